#!/bin/sh
# test_trainer_files.sh [PROGRAM]: the effects of a run's files and folder on the trainer,
# examples/trainer/trainer.c, and of two runs in one folder on each other.
# PROGRAM: the built trainer; default BUILD/trainer (BUILD: see the Makefile).
# Ends with the line `N passed, N failed, N skipped`; exit status 1 on a failure.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
program=${1:-$build/trainer}
case $program in /*) ;; *) program=$PWD/$program ;; esac
[ -x "$program" ] || { echo "$program is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
cd "$tmp" || exit 1
unset OMP_NUM_THREADS NO_COLOR

awk 'BEGIN { for (i = 0; i < 150; i++) printf "%s jumps %d times.\n", i % 3 ? "The fox" : "A dog", i % 7 }' >text
model="--layers 1 --heads 1 --width 8 --block 8 --batch 2 --eval-batches 1 --threads 1"
small="--data text $model"

# gpt STATUS ARGUMENT...: runs the trainer; its exit status must be STATUS.
gpt() { want=$1; shift; "$program" "$@" >out 2>err </dev/null; got=$?; [ $got -eq "$want" ] || { cat err; false; }; }
# says STATUS TEXT ARGUMENT...: the same, and TEXT on stderr.
says() { says_text=$2 says_want=$1; shift 2; gpt "$says_want" "$@" && grep -q -- "$says_text" err || { cat err; false; }; }
tamed() { test "$(tr -dc '\001-\011\013-\037\177' <"$1" | wc -c)" -eq 0; }

# --- numbers of a checkpoint that no run has saved ---

# poke FILE NAME OCTAL...: the bytes of an entry of a safetensors file.
poke() {
    poke_file=$1 poke_name=$2; shift 2
    header=$(od -An -tu4 -N4 "$poke_file" | tr -d ' ')
    at=$(dd if="$poke_file" bs=1 skip=8 count="$header" 2>/dev/null |
         sed "s/.*\"$poke_name\":{[^}]*\"data_offsets\":\[\([0-9]*\),.*/\1/")
    printf "$(printf '\\%s' "$@")" | dd of="$poke_file" bs=1 seek=$((8 + header + at)) conv=notrunc 2>/dev/null
}
check "a run to spoil" gpt 0 $small --steps 4 --eval-every 2 --out whole
lowest="000 000 000 000 000 000 000 200" largest="377 377 377 377 377 377 377 177"
minus="373 377 377 377 377 377 377 377" nan="000 000 000 000 000 000 370 177"
resumed() { rm -rf spoiled; cp -R whole spoiled; poke spoiled/checkpoint.safetensors "$@"
    says 1 "no run can have saved these values: step .* The best one lies beside it" --out spoiled --resume --steps 9 --accumulate 2; }
check "a step before the first"          resumed value.step $minus
check "a step that cannot be multiplied" resumed value.step $lowest
check "a step that cannot be added to"   resumed value.step $largest
check "a last skip before the first"     resumed value.last_skip $minus
check "a best step that is yet to come"  resumed value.best_step 005 000 000 000 000 000 000 000
check "a best loss that nothing is below" resumed value.best_val $nan
check "but what a run has saved"         gpt 0 --out whole --resume --steps 6

# --- names that a terminal would obey ---

header='{"a\u001b[31m\u009b1m":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
long() { printf "\\$(printf '%03o' "$1")"; printf '\000\000\000\000\000\000\000'; }
foreign() { { long ${#header}; printf '%s' "$header"; printf '\000\000\000\000'; } >foreign.safetensors
    gpt 1 $small --steps 0 --init foreign.safetensors && tamed err && grep -q 'foreign.safetensors' err; }
check "a foreign tensor's" foreign
# GPT-2's own names, and one more.
check "a model as GPT-2 writes it" gpt 0 $small --bias on --steps 1 --export hf
# also FOLDER: the entries of stdin, empty tensors, before those of hf.
also() {
    cat >entries
    n=$(od -An -tu4 -N4 hf/model.safetensors | tr -d ' ')
    new=$((n + $(wc -c <entries)))
    rm -rf "$1" && cp -R hf "$1" &&
    { printf "\\$(printf '%03o' $((new % 256)))\\$(printf '%03o' $((new / 256 % 256)))\\$(printf '%03o' $((new / 65536)))"
      printf '\000\000\000\000\000{'; cat entries; tail -c +10 hf/model.safetensors; } >"$1/model.safetensors"
}
more() {
    printf '%s' '"\u001b]0;x\u0007\u000aand more":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' | also named
    says 1 "has no place in this model" --init named --steps 0 && tamed err && grep -q 'x.*and more' err
}
check "one that a model has no place for" more
# Masks, which are passed over, are looked at once each: not all of them for each of them.
masks() {
    awk 'BEGIN { for (i = 0; i < 90000; i++) printf "\"h.%d.attn.bias\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},", i }' |
        also masked
    gpt 0 --init masked --steps 0 --quiet
}
check "a great many that it passes over" masks
log='{"metrics":"mixprec","version":1,"device":"\u009b1m","title":"x"}
{"step":1,"loss":1}
{"step":1,"event":"\u00c2\u009b31m","site":"y","dtype":"f32"}'
drawn() { mkdir -p log; printf '%s\n' "$log" >log/metrics.jsonl; gpt 0 --report --out log &&
    ! grep -q "$(printf '\302\233')" out && ! grep -q "$(printf '\302\233')" log/report.html; }
check "and those of a log" drawn

# No byte of FILE is a control character; nor does it hold one of U+0080 to U+009F.
quiet() { tamed "$1" && ! LC_ALL=C grep -q "$(printf '\302[\200-\237]')" "$1"; }
evil=$(printf 'evil\033]0;x\007\302\2331m.txt')
titles() {
    cp text "$evil" && gpt 0 --data "$evil" $model --steps 4 --eval-every 2 --out "$evil.run" &&
        quiet out && grep -q '^data     evil?]0;x???1m.txt: ' out && grep -q '^to sample: ' out
}
check "the name of a text" titles
again() { gpt 0 --out "$evil.run" --resume --steps 6 && quiet out; }
check "and of a folder" again
controls() {
    for i in 1 2 3 4 5 6 7 8; do printf 'a\302\2331mb\177\033[2J\302\251\000\n'; done >controls
    gpt 0 --data controls $model --steps 2 --quiet --sample 400 --temperature 9 --prompt "$(printf 'a\302\2331m\033[2J')" &&
        quiet out && sed 1d out | grep -q '^a??1m?\[2J'
}
check "and those of a prompt and a sample" controls
two_bytes() { LC_ALL=C grep -q "$(printf '\302\251')" out; }
check "where other letters of two bytes stay" two_bytes

# --- what a config.json may say ---

# chosen OPTION VALUE: with it the run does not begin, and no file is made.
chosen() {
    rm -rf named named.json made; cp -R whole named
    sed "s/^{/{ \"$1\": \"$2\",/" whole/config.json >named/config.json; cp named/config.json named.json
    says 1 "named/config.json names --$1, which a config.json cannot choose: set it on the command line" --out named --resume --steps 8 &&
        says 1 "named.json names --$1" --config named.json --steps 2 && test ! -e made
}
check "no folder to export to"     chosen export made
check "no folder to train in"      chosen out made
check "nor what may be replaced"   chosen overwrite 1
check "nor what is printed"        chosen prompt '\\u001b[31m'
zero_config() {
    rm -rf zeroed; cp -R whole zeroed
    { head -n 4 whole/config.json; printf '\000\000'; tail -n +5 whole/config.json; } >zeroed/config.json
    before=$(cksum <zeroed/config.json)
    says 1 "zeroed/config.json holds a zero byte" --out zeroed --resume --steps 8 && test "$before" = "$(cksum <zeroed/config.json)"
}
check "a zero byte ends no config.json" zero_config
zero_log() {
    rm -rf zeroed; cp -R whole zeroed
    { head -n 3 whole/metrics.jsonl; printf '\000\000\000\n'; tail -n +4 whole/metrics.jsonl; } >zeroed/metrics.jsonl
    says 0 "zeroed/metrics.jsonl: 1 line is no JSON, as after a power cut, and is left out" --out zeroed --resume --steps 9 &&
        steps=$(sed -n 's/^{"step":\([0-9]*\),"loss".*/\1/p;s/^{"step":\([0-9]*\),"val".*/\1/p' zeroed/metrics.jsonl | sort -nu | tr '\n' ' ') &&
        echo "steps $steps" && test "$steps" = "0 2 4 6 8 9 "
}
check "nor a log" zero_log

# --- what a write that fails leaves ---

blocked() {     # FILE: it cannot be replaced, for it is a folder that is not empty
    rm -rf barred; mkdir -p "barred/$1/x"
    "$program" $small --steps 2 --eval-every 2 --out barred >out 2>err </dev/null
    grep -q "cannot write barred/$1" err && test ! -e "barred/$1.tmp" || { cat err; ls -A barred; false; }
}
check "a page that is not written leaves no file"  blocked report.html
check "nor does a configuration"                   blocked config.json
limited() {     # a file of one block and no more; before, SIGXFSZ ended the run with 153
    rm -rf limited; cp -R whole limited
    (ulimit -f 1 && exec "$program" --out limited --resume --steps 9 --quiet >/dev/null 2>&1)
    got=$?; test $got -eq 1 && ! ls -A limited | grep '\.tmp' && gpt 0 --out limited --resume --steps 9 || { echo "$got"; ls -A limited; false; }
}
check "a limit of file sizes is a full disk" limited
# Each file that is renamed was flushed before: a power cut leaves the old one, or the new one.
cat >flushed.c <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static char flushed[4096];
int fsync(int fd) {
    char name[64], path[4096];
    ssize_t n;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    n = readlink(name, path, sizeof path - 1);
    if (n > 0) { path[n] = 0; strcpy(flushed, path); }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
int rename(const char *from, const char *to) {
    size_t n = strlen(from), m = strlen(flushed);
    int was = m >= n && strcmp(flushed + m - n, from) == 0;
    dprintf(9, "%s %s\n", was ? "flushed" : "NOT-FLUSHED", to);
    return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(from, to);
}
END
flushes() {
    LD_PRELOAD="$PWD/flushed.so" "$program" $small --steps 2 --eval-every 2 --out flushed >out 2>err 9>renamed || { cat err; return 1; }
    cat renamed; grep -q '^flushed flushed/config.json$' renamed && grep -q '^flushed flushed/report.html$' renamed && ! grep NOT renamed
}
if [ -d /proc/self/fd ] && ${CC:-cc} -shared -fPIC flushed.c -o flushed.so -ldl 2>/dev/null &&
    LD_PRELOAD="$PWD/flushed.so" "$program" --version >/dev/null 2>&1; then check "what is replaced is flushed first" flushes
else skip "what is replaced is flushed first: it needs /proc and LD_PRELOAD"; fi
# A folder that can be written and not read fails before the training, not at its end. Root reads all.
locked() {
    rm -rf locked; mkdir locked && chmod 333 locked
    "$@" "$program" --data "$tmp/text" $model --steps 2 --out "$tmp/locked" >out 2>err </dev/null
    test $? -eq 1 && grep -q "locked cannot be read and written: .* Choose another --out" err || { cat err; false; }
}
if [ "$(id -u)" -ne 0 ]; then check "a folder that cannot be read" locked
elif command -v setpriv >/dev/null && chmod 755 "$tmp" && setpriv --reuid=65534 --clear-groups "$program" --version >/dev/null 2>&1
then check "a folder that cannot be read" locked setpriv --reuid=65534 --clear-groups
else skip "a folder that cannot be read: root reads all"; fi

# --- standard files that are closed ---

closed() {
    "$program" $small --steps 3 --log-every 1 --eval-every 1 --out closed <&- >&- 2>&-
    test ! -s closed/.lock && test -s closed/metrics.jsonl && ! grep -qv '^{.*}$' closed/metrics.jsonl
}
check "what is printed goes into no other file" closed
rest() { "$program" $small --steps 3 --lr nan --out rest <&- >&- 2>&-; test $? -eq 2; }
check "and a wrong option is one all the same" rest

# --- data that are mapped ---

# A run on 80 MB of text has not so much memory of its own.
large() {
    yes "$(head -n 40 text)" | head -c 80000000 >large
    (ulimit -d 40000 && exec "$program" --data large $model --steps 2 >out 2>err </dev/null); got=$?
    rm -f large; cat err; test $got -eq 0 && grep -q '^data     large: 72000000 bytes to train on' out
}
check "a text takes no memory of its own" large
shorter() {
    cp text short
    "$program" --data short $model --steps 100000000 --log-every 50 --eval-every 1000000 >log2 2>err2 &
    run=$!
    n=0; while ! grep -q '^ *50 ' log2 2>/dev/null && [ $n -lt 600 ]; do n=$((n + 1)); sleep 0.05; done
    : >short; n=0; while kill -0 $run 2>/dev/null && [ $n -lt 600 ]; do n=$((n + 1)); sleep 0.05; done
    kill $run 2>/dev/null; wait $run; got=$?; cat err2
    test $got -eq 1 && grep -q 'a file of --data became shorter' err2
}
check "a text that becomes shorter ends a run, which says so" shorter

# --- two runs in one folder ---

vocabulary=$(sed -n 's/.*"vocabulary": "\(.*\)".*/\1/p' whole/config.json)
mkfifo late
# refused MESSAGE: the run that waited, once its data comes, which leaves the checkpoint alone.
refused() {
    before=$(cksum <folder/checkpoint.safetensors)
    exec 4>late                         # on a busy machine the run has only looked so far, and opens its data now
    cat text >&4
    exec 3>&- 4>&-
    wait $late
    test $? -eq 1 && test $first -eq 0 && grep -q "$1" err1 &&
        test "$before" = "$(cksum <folder/checkpoint.safetensors)" || { cat err1; false; }
}
# A run that waits for its data has looked at the folder, and does not have it yet.
overtaken() {
    "$program" --data late --vocabulary "$vocabulary" $model --steps 2 --out folder >out1 2>err1 &
    late=$!
    exec 3>late                         # once it reads, it has looked
    gpt 0 $small --steps 4 --out folder; first=$?
    refused "folder holds a checkpoint: continue it with --resume"
}
check "a run that began meanwhile is not replaced" overtaken
# A folder that was copied by *.* has no lock yet.
behind() {
    rm -f folder/.lock
    "$program" --data late --out folder --resume --steps 6 >out1 2>err1 &
    late=$!
    exec 3>late                         # once it reads, it has loaded the checkpoint
    gpt 0 --data text --out folder --resume --steps 8; first=$?
    refused "another trainer has trained in folder meanwhile"
}
check "one that went on meanwhile is not taken back" behind

# --- a run that ends between two evaluations ---

# The last step of a run is validated. Neither that nor a sample moves the random numbers of dropout.
between() {
    rm -rf never again
    uneven="$small --warmup 2 --decay-steps 10 --dropout 0.3 --eval-every 4 $*"
    gpt 0 $uneven --steps 10 --out never && gpt 0 $uneven --steps 6 --out again &&
        gpt 0 --out again --resume --steps 10 &&
        cmp never/checkpoint.safetensors again/checkpoint.safetensors
}
check "goes on as if it had not ended, with dropout"    between
check "also where it samples"                           between --sample-every 3

# --- a signal to all ranks, early ---

# Rank 0 ends the others. A signal that all get ends no other rank, from its first moment on: while the
# data are read, here from a pipe into which nobody writes, SIGTERM is ignored there.
deaf() {
    rm -f slow; mkfifo slow
    "$program" --data slow $model --ranks fork:2 --steps 2 >out1 2>err1 &
    zero=$!
    n=0; one=
    while [ -z "$one" ] && [ $n -lt 300 ]; do one=$(cat /proc/$zero/task/$zero/children 2>/dev/null | tr -d ' '); n=$((n + 1)); sleep 0.02; done
    sleep 0.1
    ignored=$(awk '/^SigIgn/ { print $2 }' "/proc/$one/status"); kill $zero; wait $zero 2>/dev/null
    kill -9 "$one"                      # it waits for a writer of the pipe
    echo "rank 1 ignores $ignored"; echo "$ignored" | grep -q '[4567cdef]...$'
}
if [ -r /proc/self/task/$$/children ] || [ -r /proc/$$/task/$$/children ]; then check "a signal to all ranks ends rank 0 alone" deaf
else skip "a signal to all ranks ends rank 0 alone: it needs /proc"; fi
# A rank that stands still ends the others after --rank-seconds.
still() {
    rm -f log2
    "$program" $small --ranks fork:2 --rank-seconds 1 --steps 100000000 --log-every 50 --eval-every 1000000 >log2 2>err2 &
    zero=$!
    n=0; while ! grep -q '^ *50 ' log2 2>/dev/null && [ $n -lt 600 ]; do n=$((n + 1)); sleep 0.05; done
    one=$(tr -d ' ' </proc/$zero/task/$zero/children); kill -STOP "$one"
    wait $zero; got=$?; cat err2
    test $got -eq 1 && grep -q 'rank 1 did not answer in time' err2
}
if [ -r /proc/self/task/$$/children ] || [ -r /proc/$$/task/$$/children ]; then check "a rank that stands still" still
else skip "a rank that stands still: it needs /proc"; fi
# --- the model that a checkpoint describes ---

form="--heads 4 --activation relu2 --norm rms --positions rope --qk-norm on"
check "a run with other heads and norms" gpt 0 --data text --layers 1 --width 16 --block 8 --batch 2 --eval-batches 2 \
    --threads 1 $form --steps 4 --out form
# val_of FOLDER ARGUMENT...: the validation loss of its best checkpoint, in the file val.FOLDER.
val_of() { val_folder=$1; shift; gpt 0 --init "$val_folder/best.safetensors" --data text --block 8 --batch 2 \
    --eval-batches 2 --threads 1 --eval-only "$@" && sed -n 's/^val //p' out >"val.$val_folder" && test -s "val.$val_folder"; }
same_val() { val_of "$@" && cmp val.form "val.$1"; }
beside() { rm -rf "$1"; mkdir "$1" && cp form/best.safetensors form/checkpoint.safetensors "$1" && cat >"$1/config.json"; }
check "its validation loss" val_of form
tr -d '\n' <form/config.json | sed 's/": "/":"/g;s/,  "/,"/g' | beside compact
check "a compact config.json is the same model" same_val compact
sed 's/"\([0-9][0-9]*\)"/\1/;s/"on"/true/;s/"off"/false/' form/config.json | beside numbers
check "so is one with numbers, true and false" same_val numbers
check "which really has them" grep -q '"qk-norm": true' numbers/config.json
beside alone <form/config.json; rm alone/config.json
check "and a checkpoint without config.json" same_val alone
sed 's/"heads": "4"/"heads": "2"/' form/config.json | beside changed
check "a config.json of another model is refused" \
    says 1 "changed/config.json says --heads 2, and changed/best.safetensors beside it was made with --heads 4" \
    --init changed/best.safetensors --data text --eval-only
check "when a run is resumed, too" \
    says 1 "changed/config.json says --heads 2, and changed/checkpoint.safetensors beside it was made with --heads 4" \
    --out changed --resume --steps 6
sed 's/"vocabulary": "bytes 0a/"vocabulary": "bytes 0b/' form/config.json | beside letters
check "or another vocabulary" says 1 "letters/config.json has another vocabulary" --init letters/best.safetensors --data text --eval-only
check "a run without config.json takes its checkpoint's sizes" says 0 "there is no alone/config.json: the sizes are those of" \
    --out alone --resume --steps 6 --data text --batch 2 --eval-batches 2 --threads 1
check "and they are right" grep -q '"heads": "4"' alone/config.json
beside twice <form/config.json; sed -i.bak 's/"heads": "4"/"heads": "4", "heads": "4"/' twice/config.json
check "a name that appears twice is refused" says 1 'names "heads" twice' --init twice/best.safetensors --data text --eval-only
echo '{"model_type": "llama", "hidden_size": 16}' | beside foreign_kind
check "a config.json of another program is refused" says 1 "foreign_kind/config.json is neither the config.json of a run nor that of a GPT-2 model" \
    --init foreign_kind/best.safetensors --data text --eval-only
# A file of a version that wrote no description.
beside older <form/config.json; rm older/config.json
LC_ALL=C sed 's/trainer\.model/trainer.mxxxl/' form/best.safetensors >older/best.safetensors
check "weights that do not say are refused" \
    says 1 "older/best.safetensors does not say how its model computes, and there is no older/config.json: .* give --heads, --activation, --norm" \
    --init older/best.safetensors --data text --eval-only
check "unless the options say" same_val older --layers 1 --width 16 --block 8 $form --bias off --head tied

awk 'BEGIN { for (i = 0; i < 900; i++) printf "%c%c", 97 + i % 7, 1 }' | tr '\001' '\000' >ids.bin

# --- a drive without hard links ---

cat >link.c <<'END'
#include <errno.h>
int link(const char *from, const char *to);
int link(const char *from, const char *to) { (void)from; (void)to; errno = EPERM; return -1; }
END
if ${CC:-cc} -shared -fPIC link.c -o link.so 2>/dev/null && LD_PRELOAD=./link.so true 2>/dev/null; then
    copied() { LD_PRELOAD=./link.so "$program" $small --steps 6 --eval-every 2 --keep 2 --out kept >out 2>err </dev/null &&
        test ! -s err && test "$(ls kept/step-*)" = "$(printf 'kept/step-00000000%s.safetensors\n' 4 6)"; }
    check "--keep copies where links are refused" copied
    check "the same bytes" cmp kept/step-000000006.safetensors kept/checkpoint.safetensors
else skip "--keep without hard links"
fi

# --- links and pipes in a folder from elsewhere ---

check "a run to send" gpt 0 $small --steps 2 --out sent
# linked NAME STATUS: DIR/NAME is a link to a file of the user's, which must stay.
linked() {
    rm -rf got victim; cp -R sent got; mkdir victim; echo precious >victim/file; rm -f "got/$1"; ln -s ../victim/file "got/$1"
    "$program" --out got --resume --steps 3 --data text --csv on >out 2>err </dev/null; linked_got=$?
    test "$linked_got" -eq "$2" && test "$(cat victim/file)" = precious || { cat err; false; }
}
for name in config.json.tmp metrics.jsonl.tmp metrics.jsonl report.html.tmp report.html metrics.csv.tmp metrics.csv checkpoint.safetensors.tmp; do
    check "a link in place of $name is replaced" linked $name 0
done
for name in best.safetensors .lock checkpoint.safetensors config.json; do
    check "a link in place of $name is refused" linked $name 1
done
linked_new() { rm -rf got victim; mkdir got victim; echo precious >victim/file; ln -s ../victim/file "got/$1"
    gpt "$2" $small --steps 2 --out got && test "$(cat victim/file)" = precious; }
check "a run begins in a folder with a linked log" linked_new metrics.jsonl 0
check "and leaves a linked checkpoint alone"       linked_new best.safetensors 1
check "a dangling link makes no file elsewhere"    sh -c "rm -rf got; mkdir got; ln -s ../made got/.lock; '$program' $small --steps 2 --out got 2>err; test ! -e made"
# piped NAME ARGUMENT...: a pipe in place of a file is refused at once.
piped() { rm -rf got; cp -R sent got; rm -f "got/$1"; mkfifo "got/$1"; shift
    says 1 "not a regular file" "$@"; }
check "a pipe as config.json"        piped config.json --out got --resume --steps 3 --data text
check "beside --init, too"           piped config.json --init got/best.safetensors $small --steps 1
check "a pipe as metrics.jsonl"      piped metrics.jsonl --out got --resume --steps 3 --data text
check "with --report, too"           piped metrics.jsonl --out got --report
check "a pipe as an index"           piped model.safetensors.index.json --init got $small --steps 1
check "a pipe as tokenizer.json"     piped tokenizer.json --data ids.bin --tokenizer got/tokenizer.json $model --steps 1
check "a device as tokenizer.json"   says 1 "not a regular file" --data ids.bin --tokenizer /dev/zero $model --steps 1
piped_tmp() { rm -rf got; cp -R sent got; mkfifo got/report.html.tmp got/config.json.tmp; gpt 0 --out got --report; }
check "pipes as temporary files"     piped_tmp
exported() { rm -rf ex victim; mkdir ex; echo precious >victim; ln -s ../victim "ex/$1"
    "$program" $small --bias on --steps 1 --export ex --overwrite >out 2>err </dev/null; exported_got=$?
    test $exported_got -eq "$2" && test "$(cat victim)" = precious || { cat err; false; }; }
check "a link in place of exported weights is refused" exported model.safetensors 1
check "and beside them it is replaced"                 exported config.json.tmp 0

report
