#!/bin/sh
# test_trainer_files.sh [PROGRAM]: what the files and the folder of a run can do to the trainer,
# examples/tiny_gpt.c, and what two runs in one folder can do to each other.
# PROGRAM: the built trainer, BUILD/tiny_gpt when left out (BUILD: see the Makefile).
# Ends with the line `N passed, N failed, N skipped`; exit status 1 on a failure.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/check.sh
build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
program=${1:-$build/tiny_gpt}
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
    says 1 "no run has saved these: step .* The best one lies beside it" --out spoiled --resume --steps 9 --accumulate 2; }
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

# --- standard files that are closed ---

closed() {
    "$program" $small --steps 3 --log-every 1 --eval-every 1 --out closed <&- >&- 2>&-
    test ! -s closed/.lock && test -s closed/metrics.jsonl && ! grep -qv '^{.*}$' closed/metrics.jsonl
}
check "what is printed goes into no other file" closed
rest() { "$program" $small --steps 3 --lr nan --out rest <&- >&- 2>&-; test $? -eq 2; }
check "and a wrong option is one all the same" rest

# --- two runs in one folder ---

vocabulary=$(sed -n 's/.*"vocabulary": "\(.*\)".*/\1/p' whole/config.json)
mkfifo late
# refused MESSAGE: the run that waited, once its data comes, which leaves the checkpoint alone.
refused() {
    before=$(cksum <folder/checkpoint.safetensors)
    cat text >&3
    exec 3>&-
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
    refused "another tiny_gpt has trained in folder meanwhile"
}
check "one that went on meanwhile is not taken back" behind
report
