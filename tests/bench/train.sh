#!/bin/sh
# train.sh - milliseconds a training step: nanoGPT's CPU configuration in mixprec and in
# PyTorch, turn by turn, each dtype in every round, and the ratio of the medians.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/train.sh TEXT [ROUNDS [THREADS [STEPS]]]
#
# TEXT is the corpus (tinyshakespeare for the published figures). Wants build/tiny_gpt (`make
# examples`); PYTHON with torch is the peer, said to be missing when it is not there.
text=$1 rounds=${2:-5} threads=${3:-2} steps=${4:-200}
[ -r "$text" ] || { echo "usage: tests/bench/train.sh TEXT [ROUNDS [THREADS [STEPS]]]" >&2; exit 2; }
here=$(dirname "$0") build=${BUILD:-build} python=${PYTHON:-python3}
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
export OMP_NUM_THREADS="$threads"
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=17179869184

ours() { # DTYPE LEVEL NAME: the mean of the second half of a run, warm
    "$build/tiny_gpt" --preset char-cpu --data "$text" --threads "$threads" --steps "$steps" \
        --log-every $((steps / 2)) --eval-every 1000000 --eval-batches 1 --sample 0 --dtype "$1" --level "$2" |
        awk -v steps="$steps" '$1 == steps { print $NF }' >>"$tmp/$3"
}
peer() { # DTYPE NAME: the median of a run
    "$python" "$here/torch_gpt.py" --model char --dtype "$1" --threads "$threads" --steps $((steps / 2)) 2>/dev/null |
        sed -n 's/.* steps: \([0-9.]*\) ms .*/\1/p' >>"$tmp/$2"
}
show() { # NAME
    sort -n "$tmp/$1" | awk -v name="$1" '{ v[NR] = $1 } END { if (NR)
        printf "%-16s %7.2f  [%.2f %.2f]  %d runs\n", name, v[int((NR + 1) / 2)], v[1], v[NR], NR }'
}
median() { sort -n "$tmp/$1" | awk '{ v[NR] = $1 } END { print NR ? v[int((NR + 1) / 2)] : 0 }'; }

have=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null)
sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1
echo "$threads threads, $steps steps a run; load $(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null); PyTorch ${have:-missing}"
for round in $(seq "$rounds"); do
    for d in f32 f16 bf16; do
        case $d in f32) name=fp32 ;; f16) name=fp16 ;; *) name=bf16 ;; esac
        ours $name 1 "mixprec $d"
        [ $d = f32 ] || ours $name 2 "mixprec $d O2"
        [ -z "$have" ] || peer $d "torch $d"
    done
done
echo "ms a step        median  [min max]"
for f in f32 f16 'f16 O2' bf16 'bf16 O2'; do show "mixprec $f"; done
[ -n "$have" ] || exit 0
for d in f32 f16 bf16; do show "torch $d"; done
for d in f32 f16 bf16; do
    awk -v d=$d -v a="$(median "torch $d")" -v b="$(median "mixprec $d")" \
        'BEGIN { if (b > 0) printf "torch / mixprec, %s: %.2f\n", d, a / b }'
done
