#!/bin/sh
# modern.sh - what each part of --preset modern buys: nanoGPT's CPU configuration, one part after the
# other added to GPT-2's form, and the validation loss after equal steps and after equal time.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/modern.sh TEXT [SEEDS [STEPS [THREADS]]]
#
# TEXT is the corpus (tinyshakespeare). SEEDS (1), STEPS (2000), THREADS (2). In the environment:
# DTYPE=fp32, EVAL=1000 (batches of a validation), and ALONE=1 to add each part alone instead of all
# before it. TIME=0 leaves out equal time, and then a busy machine does not matter. Equal time is that
# of GPT-2's form for STEPS, of milliseconds a step as measured here; the schedule ends with the steps.
# Wants build/trainer (`make examples`). With one seed about 15 minutes on 2 quiet cores.
text=$1 seeds=${2:-1} steps=${3:-2000} threads=${4:-2} build=${BUILD:-build}
dtype=${DTYPE:-fp32} batches=${EVAL:-1000} alone=${ALONE:-0} timed=${TIME:-1}
[ -r "$text" ] || { echo "usage: tests/bench/modern.sh TEXT [SEEDS [STEPS [THREADS]]]" >&2; exit 2; }
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT

run() { # SEED STEPS OPTION...: milliseconds a step, and the last validation loss
    seed=$1 many=$2; shift 2
    rm -rf "$tmp/out"
    "$build/trainer" --preset char-cpu --data "$text" --dtype "$dtype" --seed "$seed" --steps "$many" \
        --decay-steps "$many" --warmup auto --threads "$threads" --log-every "$many" --eval-every "$many" \
        --eval-batches 1 --out "$tmp/out" "$@" >"$tmp/log" 2>&1 || { cat "$tmp/log" >&2; exit 1; }
    "$build/trainer" --out "$tmp/out" --resume --eval-only --eval-batches "$batches" \
        --threads "$threads" >"$tmp/val" 2>&1 || { cat "$tmp/val" >&2; exit 1; }
    awk -v n="$many" '$1 == n { ms = $NF } $1 == "val" { print ms, $2 }' "$tmp/log" "$tmp/val"
}
steps_in() { awk -v a="$1" -v b="$2" -v n="$steps" 'BEGIN { printf "%.0f", n * a / b }'; }

sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1
echo "$dtype, $steps steps, $seeds seeds, $threads threads, $batches batches to validate"
all= base=
while IFS='|' read -r name more; do
    [ "$alone" = 1 ] && options=$more || options="$all $more"
    all="$all $more"
    for seed in $(seq "$seeds"); do
        found=$(run "$seed" "$steps" $options) || exit 1
        set -- $found
        [ -n "$base" ] || base=$1
        ms=$1 loss=$2 equal=- same=-
        if [ "$timed" = 1 ]; then
            equal=$(steps_in "$base" "$ms")
            [ "$equal" = "$steps" ] || found=$(run "$seed" "$equal" $options) || exit 1
            same=${found#* }
        fi
        echo "$name|$seed|$ms|$loss|$equal|$same" >>"$tmp/all"
    done
done <<'END'
GPT-2's form|
RMSNorm|--norm rms
RoPE|--positions rope
QK-norm|--qk-norm on
relu squared|--activation relu2
a head of its own|--head own
zeros to begin with|--zero-init on
Muon|--optimizer muon
END
[ "$alone" = 1 ] && echo "each part alone" || echo "each part with those above it"
awk -F '|' -v steps="$steps" '
    { if (!($1 in n)) order[++rows] = $1
      n[$1]++; ms[$1] += $3; loss[$1] += $4; equal[$1] += $5; same[$1] += $6; timed = $5 != "-" }
    END { printf "%-20s %8s %9s %9s %9s %9s\n", "", "ms", "after " steps, "change", "steps", "same time"
          for (i = 1; i <= rows; i++) {
              k = order[i]; mean = loss[k] / n[k]
              change = i > 1 ? sprintf("%+.4f", mean - last) : "-"
              printf "%-20s %8.1f %9.4f %9s", k, ms[k] / n[k], mean, change
              if (timed) printf " %9.0f %9.4f", equal[k] / n[k], same[k] / n[k]
              printf "\n"
              if (i == 1 || '"$((1 - alone))"') last = mean } }' "$tmp/all"
