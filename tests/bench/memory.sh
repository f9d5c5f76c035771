#!/bin/sh
# memory.sh - the memory of a training step, mixprec beside PyTorch, in fp32, fp16 and bf16.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/memory.sh [MODEL...]        char, medium, gpt2; all when none is named
#
# Wants build/trainer (`make examples`); PYTHON with torch is the peer, said to be missing when
# it is not there. BUILD, THREADS (1): as you like; neither changes a figure much.
#
# activations: in mixprec the most that the step's arena ever held, gradients of activations and
# results that no backward pass needs included; in PyTorch what autograd saves for the backward
# pass, each storage once, without weights. process: the peak of resident memory, less that of
# the same program with a minute model; here every temporary of either side counts.
#
# bf16 m2: level 2, moments of bf16; m2 w4: level 3, weight and master 4 bytes together; m1 w3:
# moments of 8 bits, weight and master 3 bytes.
here=$(dirname "$0") build=${BUILD:-build} python=${PYTHON:-python3} threads=${THREADS:-1}
[ -x "$build/trainer" ] || { echo "$build/trainer is not built: make examples" >&2; exit 2; }
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
# 65 characters, as many as tinyshakespeare has.
awk 'BEGIN { for (i = 0; i < 65 * 800; i++) printf "%c", 33 + (i * i + int(i / 7)) % 65 }' >"$tmp/text"

shape() { # MODEL: its options
    case $1 in
    minute) echo --layers 1 --heads 1 --width 8 --block 8 --batch 1 ;;
    char)   echo --layers 4 --heads 4 --width 128 --block 64 --batch 12 --vocab 65 ;;
    medium) echo --layers 6 --heads 6 --width 384 --block 256 --batch 16 --vocab 65 ;;
    gpt2)   echo --layers 12 --heads 12 --width 768 --block 64 --batch 4 --vocab 50257 --bias on ;;
    *)      echo "memory.sh: no model is called $1: char, medium, gpt2" >&2; exit 2 ;;
    esac
}
ours() { # MODEL DTYPE LEVEL [OPTION...]: the numbers of torch_memory.py's line
    ours=$(shape "$1") dtype=$2 level=$3; shift 3
    "$build/trainer" --device cpu --data "$tmp/text" $ours --dtype "$dtype" --level "$level" "$@" --steps 2 \
        --log-every 99 --eval-every 99 --eval-batches 1 --threads "$threads" --profile --quiet |
    awk 'BEGIN { low = 0; peak = "-" }
        /^parameters/ { params = $NF }   /^gradients/   { grads = $NF }  /^optimizer state/ { state = $NF }
        /^low copies/ { low = $NF }      /^activations/ { acts = $NF }   /^the process/     { peak = $NF }
        END { print params, grads, state, low, acts, peak }'
}
line() { # NAME NUMBERS...
    printf '%-22s' "$1"; shift
    for n in "$@"; do [ "$n" = - ] && printf '%12s' - || printf '%12.1f' "$n"; done; echo
}
measure() { # MODEL NAME COMMAND...: a line of the table, kept for the ratios
    model=$1 name=$2; shift 2
    set -- $("$@" 2>/dev/null); [ $# -eq 6 ] || { echo "$name: failed"; return; }
    line "$name" "$@"
    echo "$*" >"$tmp/$model $name"
}
number() { cut -d ' ' -f "$1" "$tmp/$2" 2>/dev/null; }
share() { awk -v a="$1" -v b="$2" 'BEGIN { if (a + 0 > 0 && b + 0 > 0) printf "%.2f", a / b; else printf "-" }'; }
ratios() { # WHAT OF TO: those of activations and process
    printf '  %-32s%12s%12s\n' "$1" "$(share "$(number 5 "$2")" "$(number 5 "$3")")" \
        "$(share "$(number 6 "$2")" "$(number 6 "$3")")"
}

table() { # MODEL
    small=$(ours minute fp32 1 | cut -d ' ' -f 6)
    net() { ours "$@" | awk -v b="$small" '{ if ($6 != "-") $6 -= b; print }'; }
    echo; echo "$1: $(shape "$1")"
    printf '%-22s%12s%12s%12s%12s%12s%12s\n' MiB parameters gradients optimizer 'low copies' \
        activations process
    measure "$1" 'mixprec fp32' net "$1" fp32 1
    for d in fp16 bf16; do for l in 1 2; do measure "$1" "mixprec $d level $l" net "$1" $d $l; done; done
    measure "$1" 'mixprec bf16 m2' net "$1" bf16 2 --moments bf16
    measure "$1" 'mixprec bf16 m2 w4' net "$1" bf16 3 --moments bf16 --masters 16bit
    measure "$1" 'mixprec bf16 m1 w3' net "$1" bf16 3 --moments 8bit --masters 8bit
    [ -n "$have" ] && for d in f32 f16 bf16; do
        measure "$1" "torch $d" "$python" "$here/torch_memory.py" --model "$1" --dtype $d --threads "$threads"
    done
    printf '%-34s%12s%12s\n' 'over fp32 of the same program' activations process
    for n in 'mixprec fp16 level 1' 'mixprec fp16 level 2' 'mixprec bf16 level 2' 'torch f16' 'torch bf16'; do
        case $n in torch*) of='torch f32' ;; *) of='mixprec fp32' ;; esac
        [ -r "$tmp/$1 $n" ] && ratios "$n" "$1 $n" "$1 $of"
    done
    [ -n "$have" ] || return 0
    printf '%-34s%12s%12s\n' 'mixprec over PyTorch' activations process
    for pair in 'fp32:f32' 'fp16 level 1:f16' 'fp16 level 2:f16' 'bf16 level 1:bf16' 'bf16 level 2:bf16' \
                'bf16 m2:bf16' 'bf16 m2 w4:bf16' 'bf16 m1 w3:bf16'; do
        ratios "${pair%:*}" "$1 mixprec ${pair%:*}" "$1 torch ${pair#*:}"
    done
}

[ $# -gt 0 ] || set -- char medium gpt2
for m in "$@"; do shape "$m" >/dev/null || exit 2; done
have=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null)
sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1
echo "$threads thread(s), PyTorch ${have:-missing}"
for m in "$@"; do table "$m"; done
