#!/bin/sh
# train.sh - milliseconds a training step in mixprec and in PyTorch, eager and torch.compile, turn by
# turn, each dtype in every round, and the ratio of the medians.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/train.sh [-m MODEL] TEXT [ROUNDS [THREADS [STEPS]]]
#
# MODEL: char, nanoGPT's CPU configuration (default), or gpt2, the 124M model at batch 4, 64 tokens;
# STEPS of it 12 unless given. TEXT is the corpus (tinyshakespeare for the published figures). Wants
# build/trainer (`make examples`); PYTHON with torch is the peer, said to be missing when it is not
# there. torch.compile needs a C++ compiler.
model=char
[ "$1" != -m ] || { model=$2; shift 2; }
text=$1 rounds=${2:-5} threads=${3:-2}
case $model in
    char) steps=${4:-200} warm=3 options='--preset char-cpu' dtypes='f32 f16 bf16' ;;
    gpt2) steps=${4:-12} warm=2 dtypes='f32 bf16'       # PyTorch in f16: minutes a step
          options='--preset gpt2 --batch 4 --block 64 --accumulate 1' ;;
    *)    echo "train.sh: no model is called $model: char, gpt2" >&2; exit 2 ;;
esac
[ -r "$text" ] || { echo "usage: tests/bench/train.sh [-m MODEL] TEXT [ROUNDS [THREADS [STEPS]]]" >&2; exit 2; }
here=$(dirname "$0") build=${BUILD:-build} python=${PYTHON:-python3}
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
export OMP_NUM_THREADS="$threads"
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=17179869184

ours() { # ROW DTYPE [OPTION...]: the mean of the second half of a run, warm
    row="mixprec $1" dtype=$2; shift 2
    "$build/trainer" $options --data "$text" --threads "$threads" --steps "$steps" --dtype "$dtype" "$@" \
        --log-every $((steps / 2)) --eval-every 1000000 --eval-batches 1 --sample 0 |
        awk -v steps="$steps" '$1 == steps && NF > 8 { print $NF }' >>"$tmp/$row"
}
peer() { # ROW DTYPE [OPTION...]: the median of a run
    row="torch $1" dtype=$2; shift 2
    "$python" "$here/torch_gpt.py" --model $model --dtype "$dtype" --threads "$threads" --warmup $warm \
        --steps $((steps / 2)) "$@" 2>/dev/null | sed -n 's/.* steps: \([0-9.]*\) ms .*/\1/p' >>"$tmp/$row"
}
show() { # ROW
    [ ! -s "$tmp/$1" ] || sort -n "$tmp/$1" | awk -v name="$1" '{ v[NR] = $1 } END {
        printf "%-26s %8.2f  [%.2f %.2f]  %d runs\n", name, v[int((NR + 1) / 2)], v[1], v[NR], NR }'
}
median() { [ ! -s "$tmp/$1" ] || sort -n "$tmp/$1" | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
ratio() { # ROW TO: the median of the first over that of the second
    awk -v a="$(median "$1")" -v b="$(median "$2")" -v what="$1 / $2" \
        'BEGIN { if (a > 0 && b > 0) printf "%s: %.2f\n", what, a / b }'
}

have=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null)
sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1
echo "$model, $threads threads, $steps steps a run; load $(cut -d ' ' -f 1 /proc/loadavg 2>/dev/null); PyTorch ${have:-missing}"
for round in $(seq "$rounds"); do
    for d in $dtypes; do
        case $d in f32) name=fp32 ;; f16) name=fp16 ;; *) name=bf16 ;; esac
        ours $d $name --level 1
        [ $d = f32 ] || ours "$d O2" $name --level 2
        [ $d != bf16 ] || ours 'bf16 small states' bf16 --level 3 --moments 8bit --masters 8bit
        [ -z "$have" ] || peer $d $d
        [ -z "$have" ] || [ $d = f16 ] || peer "$d compiled" $d --compile
    done
done
echo "ms a step                    median  [min max]"
for d in $dtypes; do for row in "$d" "$d O2" "$d small states"; do show "mixprec $row"; done; done
for d in $dtypes; do show "torch $d"; show "torch $d compiled"; done
for d in $dtypes; do
    ratio "torch $d" "mixprec $d"
    ratio "torch $d compiled" "mixprec $d"
done
ratio 'torch bf16 compiled' 'mixprec bf16 small states'
ratio 'mixprec f32' 'mixprec bf16'
