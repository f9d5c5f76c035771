#!/bin/sh
# test_names.sh - every name that trainer, llama and trail open or create, with a link, a FIFO and a folder in its
# place: nothing behind a link changes, no program waits, and what cannot be written is refused before the training.
# A preloaded library lists the names of an undisturbed run, so that a new name is tested by itself.
# SPDX-License-Identifier: MIT OR Unlicense
[ -w /dev/shm ] && export TMPDIR=/dev/shm        # a save flushes to the disk
. tests/support/check.sh
build=${BUILD:-build}
case $build in /*) ;; *) build=$PWD/$build ;; esac
for p in trainer llama trail test_llama; do
    [ -x "$build/$p" ] || { echo "$build/$p is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
done
export OMP_NUM_THREADS=1

# Only plain_file.h opens files. The others open devices: random numbers, shared memory, closed standard files.
one_place() {
    grep -nE '(^|[^a-z_>.])(fopen|freopen|open|openat|creat)\(' examples/*.[ch] examples/*/*.[ch] |
        grep -v '^examples/plain_file.h:' | grep -v '"/dev/\(urandom\|zero\|null\)"'
    [ $? -eq 1 ]
}
check "examples open files in plain_file.h only" one_place

root=$PWD
cd "$tmp" || exit 1
cat >names.c <<'CODE'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/types.h>
#define NEXT(result, name, ...) ((result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))
static void say(int writes, const char *path) { dprintf(9, "%c %s\n", writes ? 'w' : 'r', path); }
#define OPEN(name)                                                             \
    int name(const char *path, int flags, ...) {                               \
        va_list list;                                                          \
        mode_t mode;                                                           \
        va_start(list, flags);                                                 \
        mode = flags & O_CREAT ? va_arg(list, mode_t) : 0;                     \
        va_end(list);                                                          \
        say((flags & O_ACCMODE) != O_RDONLY, path);                            \
        return NEXT(int, #name, const char *, int, ...)(path, flags, mode);    \
    }
OPEN(open)
OPEN(open64)
FILE *fopen(const char *path, const char *mode) {
    say(mode[0] != 'r', path);
    return NEXT(FILE *, "fopen", const char *, const char *)(path, mode);
}
int rename(const char *from, const char *to) {
    say(1, to);
    return NEXT(int, "rename", const char *, const char *)(from, to);
}
int link(const char *from, const char *to) {
    say(1, to);
    return NEXT(int, "link", const char *, const char *)(from, to);
}
CODE
if ! ${CC:-cc} -shared -fPIC names.c -o names.so -ldl 2>log || ! LD_PRELOAD="$PWD/names.so" "$build/trail" 9>/dev/null 2>log && [ ! -s log ]; then
    skip "the names that programs open: this needs LD_PRELOAD"; report; exit
fi

# The files that the commands find.
mkdir start start/m start/o start/g start/a
(cd "$root" && "$build/test_llama" --make "$tmp/start/m") || exit 1
awk 'BEGIN { for (i = 0; i < 120; i++) printf "%s jumps %d times.\n", i % 3 ? "The fox" : "A dog", i % 7 }' >start/text
for f in tokenizer_config.json special_tokens_map.json generation_config.json; do echo '{}' >start/m/$f; done
echo '{{ messages }}' >start/m/chat_template.jinja
small="--layers 1 --heads 1 --width 8 --block 8 --batch 2 --eval-batches 1 --threads 1 --bias on"
tune="$build/llama m --data text --steps 2 --batch 1 --block 16 --sample 0 --threads 1 --dtype fp32"
(cd start && "$build/trainer" --data text $small --steps 2 --trail a.trail --out r && $tune --lora 2 --out a &&
    $tune --gguf in.gguf) >log 2>&1 || { cat log; exit 1; }
cp start/a.trail start/b.trail

# here COMMAND: runs it in a fresh folder `here`, in which NAME is what PLACE makes of it. A run of 30 s waits for ever.
here() {
    rm -rf here victim; cp -R start here; echo precious >victim
    [ -z "$1" ] || { mkdir -p "here/$(dirname "$1")"; rm -rf "here/$1"; (cd here && $2 "$1"); }
    (cd here && ulimit -v 8000000 && timeout 30 sh -c "$3" >../out 2>../err </dev/null)
    got=$?
}
to_victim() { ln -s "$tmp/victim" "$1"; }
to_zero()   { ln -s /dev/zero "$1"; }
folder()    { mkdir "$1" && echo mine >"$1/file"; }

# trial: what a run did, of which $got is the exit status.
trained() { grep -Eq '^(step|  *[12] ) *[0-9]' out; }
trial() { # MODE NAME KIND
    [ "$got" -ne 124 ] && [ "$(cat victim)" = precious ] || return
    [ "$got" -lt 128 ] || return
    [ "$3" != folder ] || [ "$(cat "here/$2/file" 2>/dev/null)" = mine ] || return
    [ "$got" -eq 0 ] || [ -s err ] || return
    [ "$got" -eq 0 ] || ! trained || [ "$1" = late ]
}

# every WHAT COMMAND: a run, then one for each of its names and kinds.
every() {
    rm -rf here; cp -R start here
    (cd here && LD_PRELOAD="$tmp/names.so" sh -c "$1" 9>../names >../out 2>&1) || { cat out; false; } || return
    grep -v ' /\(dev\|proc\|sys\|etc\|usr\|lib\)' names | sed "s,$tmp/here/,," | sort -u >list
    n=0
    while read -r mode name; do
        case $mode in
        w) kinds="to_victim mkfifo folder" ;;
        *) kinds="mkfifo folder to_zero" ;;
        esac
        case $name in */|*.[0-9]*.tmp) continue ;; text) [ "$mode" = r ] && kinds="folder to_zero" ;; esac
        for kind in $kinds; do
            here "$name" "$kind" "$1"
            trial "$mode" "$name" "$kind" || { echo "$mode $name as $kind: $got $(cat victim)"; tail -n 2 out; cat err; false; } || return
            n=$((n + 1))
        done
    done <list
    echo "$n"; [ "$n" -ge "$2" ]
}
check "llama, all weights"          every "$tune --out o --gguf g/x.gguf" 40
check "llama, adapters"             every "$tune --lora 2 --out o" 20
check "llama, merged"               every "$tune --adapter a --steps 0 --merge 1 --out o --gguf g/x.gguf" 40
check "llama, from GGUF"            every "$build/llama in.gguf --data text --steps 1 --batch 1 --sample 0 --dtype fp32 --out o" 15
check "trainer, a run"              every "$build/trainer --data text $small --steps 2 --out new --csv on --trail t" 20
check "trainer, resumed"            every "$build/trainer --out r --resume --steps 3 --data text" 15
check "trainer, a folder exported"  every "$build/trainer --data text $small --steps 1 --export o" 6
check "trainer, GGUF exported"      every "$build/trainer --data text $small --activation gelu-tanh --steps 1 --tokenizer m/tokenizer.json --export g/x.gguf" 6
check "trail"                       every "$build/trail a.trail b.trail" 6

# Devices that a user names. A device of its own, for as root a rename would replace that of the system.
device() { # COMMAND...
    mkdir -p dev; rm -f dev/full; mknod dev/full c 1 7; rm -f dev/zero.gguf; mknod dev/zero.gguf c 1 5
    (cd start && timeout 30 "$@" >../out 2>../err </dev/null); got=$?
    [ $got -ne 0 ] && [ $got -lt 124 ] && [ -c dev/full ] && [ -c dev/zero.gguf ] && ! trained && cat err && grep -q "not a regular file" err
}
if mknod full c 1 7 2>/dev/null; then
    check "--gguf with a device"    device $tune --gguf "$tmp/dev/full"
    check "a model that is one"     device "$build/llama" "$tmp/dev/zero.gguf" --sample 0
else skip "devices: only root makes them"; fi
long() { { head -n 1 start/a.trail; head -c 100000 /dev/zero | tr '\0' x; echo; } >long.trail; "$build/trail" long.trail long.trail 2>err; [ $? -eq 2 ] && grep -q "line 1: a line has more than 16,383 bytes" err; }
check "a line without end"          long
evil() { sed '2s/f32/f\x1b]0;x\x07/' start/a.trail >evil.trail; "$build/trail" start/a.trail evil.trail >out 2>&1; [ $? -eq 1 ] && grep -q 'f?\]0;x?' out; }
check "control characters of a trail" evil
report
