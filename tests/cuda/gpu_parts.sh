# gpu_parts.sh - the parts that `gpu.sh again NAME` can measure, a function part_NAME for each: gpu_there.sh reads this
# file. Each step of a part has a limit of its own.
# SPDX-License-Identifier: MIT OR Unlicense
# shellcheck shell=sh disable=SC2154

# --- clocks --------------------------------------------------------------------------------------------
# A time counts only beside the clock that the GPU had. clocked PART: runs part_PART, whose figures go to $work/figures,
# and reads clock, watts, temperature and the reasons of a lower clock five times a second.
clocked() {
    : >"$work/figures"
    nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} --format=csv,noheader,nounits -lms 200 \
        --query-gpu=clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active >"$work/clocks" 2>/dev/null &
    clocks=$!
    "part_$1"
    kill $clocks 2>/dev/null
    wait $clocks 2>/dev/null
    { echo "=== $1: MHz, W, C, reasons"; cat "$work/clocks" "$work/figures"; } >>"$OUT/clocks.txt"
    busy=$(busy_clock "$work/clocks")
    if [ "$busy" ]; then
        cut -c 1-165 "$work/figures" >>"$table"
        say "  clock of the busier half of $1: $busy"
    else trouble "$1: nvidia-smi named no clock, so its times are no results; they are in clocks.txt"
    fi
}
# The half of the samples that drew more power: mean clock and power, lowest and highest clock, reasons.
busy_clock() {
    awk -F ', *' '$1 > 0 && $2 > 0 { print $2, $1, $4 }' "$1" | sort -n | awk '
        { watts[NR] = $1; mhz[NR] = $2; why[NR] = $3 }
        END {
            for (i = int(NR / 2) + 1; i <= NR; i++) {
                n++; w += watts[i]; m += mhz[i]; seen[why[i]]++
                if (!low || mhz[i] < low) low = mhz[i]
                if (mhz[i] > high) high = mhz[i]
            }
            if (!n) exit
            printf "%.0f MHz (%d to %d), %.0f W", m / n, low, high, w / n
            for (reason in seen) printf ", %s x %d", reason, seen[reason]
        }'
}
figure() { printf '%s\n' "$*" >>"$work/figures"; }
# measured SECONDS LOG COMMAND...: the output goes to $work/said and to LOG; a failure is one line of the table.
measured() {
    most=$1 log=$OUT/$2.txt; shift 2
    [ "$(left)" -gt "$most" ] || most=$(($(left) - 5))
    [ "$most" -gt 3 ] || { say "no time was left for: $*"; return 1; }
    limited "$most" "$@" >"$work/said" 2>&1
    status=$?
    { echo "=== $*: status $status"; cat "$work/said"; } >>"$log"
    [ $status = 0 ] || trouble "status $status: $(echo "$*" | cut -c 1-80): $(tail -n 1 "$work/said" | cut -c 1-60)"
    return $status
}

# --- the machine ---------------------------------------------------------------------------------------
part_host() {
    for name in amx_bf16 amx_fp16 avx512_bf16 avx512_fp16; do
        grep -q -w -m 1 "$name" /proc/cpuinfo && sets="${sets:+$sets }$name"
    done
    say "HOST $(lscpu | sed -n 's/^Model name: *//p'), $(nproc) CPUs, quota $(cat /sys/fs/cgroup/cpu.max 2>/dev/null),\
 $(awk '/MemTotal/ { printf "%.0f GB", $2 / 1e6 }' /proc/meminfo); ${sets:-no sets of interest}"
    measured 10 host sh -c 'lscpu; uname -a; free -g; nvidia-smi -q -d CLOCK,POWER,PERFORMANCE,TEMPERATURE'
    measured 10 host "$KIT/bin/trainer_cuda" --isa list && say "ISA $(tail -n 1 "$work/said")"
}

# --- kernels and steps -----------------------------------------------------------------------------------
part_kernels() {
    bench 150 "$OUT/kernels.txt" --part kernels --rounds 3
    say "KERNELS, ours: status $?"
    short "$OUT/kernels.txt" | grep -v 'quantise\|code \|turn' | cut -c 1-130 | head -n 40 >>"$table"
    torch 150 torch_cuda.py --part kernels --rounds 3
    say "KERNELS, PyTorch: status $?"
    [ -s "$OUT/torch.txt" ] || { no_peer; return; }
    short "$OUT/torch.txt" | cut -c 1-110 | head -n 40 >>"$table"
}
part_training() {
    for model in gpt2 char; do bench 200 "$OUT/training.txt" --part training --model $model --rounds 5; done
    say "TRAINING, ours: status $?"
    short "$OUT/training.txt" | grep 'GPT-2' | head -n 50 >>"$table"
}
part_peers() {
    for model in gpt2 char; do torch 300 torch_cuda.py --part training --model $model --rounds 5; done
    say "TRAINING, PyTorch: status $?"
    [ -s "$OUT/torch.txt" ] || { no_peer; return; }
    short "$OUT/torch.txt" | grep 'GPT-2' | head -n 30 >>"$table"
}

# GPT-2's step in bf16, both levels and each choice of epilogues, and PyTorch's, with norms and the residual stream in
# fp32 (bf16-compiled: compare with level 1) and in bf16 (bf16-low: compare with level 2). PyTorch compiles first; then
# the programs alternate.
part_steps() {
    turns=$work/turns
    rm -rf "$turns"
    mkdir -p "$turns"
    timeout -k 5 "$(left)" env LD_LIBRARY_PATH="$loader_path" PYTHONUNBUFFERED=1 "$PYTHON" tests/bench/torch_first.py \
        --batch "$BATCH" ${TORCH_SIZE:-} --turns "$turns" ${PEERS:-bf16-compiled bf16-low} \
        </dev/null >"$work/peer" 2>>"$work/torch.err" &
    peer=$!
    until_there "$turns/ready" 200
    for turn in 1 2 3; do
        measured 60 steps "$KIT/bin/bench_cuda" --batch "$BATCH" ${SIZE:-} --part training --dtype bf16 --rounds 5
        : >"$turns/torch_$turn"
        until_there "$turns/done_$turn" 60
    done
    : >"$turns/end"
    wait $peer
    figure "STEPS: 3 turns of 5 rounds each, medians [least most]"
    medians "$OUT/steps.txt" >>"$work/figures"
    cat "$work/peer" >>"$OUT/steps.txt"
    grep '^torch' "$work/peer" >>"$work/figures" || figure "no PyTorch: $(tail -n 1 "$work/torch.err" | cut -c 1-100)"
    peer=
}
# until_there FILE SECONDS: also ends when PyTorch has ended.
until_there() {
    tries=$(($2 * 5))
    while [ ! -e "$1" ] && [ $tries -gt 0 ] && [ "$(left)" -gt 20 ] && kill -0 "$peer" 2>/dev/null; do
        sleep 0.2
        tries=$((tries - 1))
    done
}
# A line for each kind of step: the median over all turns.
medians() {
    sed -n 's/^\(GPT-2 .*[^ ]\)  *\([0-9.]*\) ms \[\([0-9.]*\) \([0-9.]*\)\].*/\1|\2|\3|\4/p' "$1" |
        sort -t '|' -k 1,1 -k 2,2n | awk -F '|' '
            function flush() { if (n) printf "%s %.2f ms [%.2f %.2f] of %d turns\n", name, ms[int((n + 1) / 2)], low, high, n }
            $1 != name { flush(); n = 0; name = $1; low = $3; high = $4 }
            { ms[++n] = $2; if ($3 < low) low = $3; if ($4 > high) high = $4 }
            END { flush() }'
}

# --- whole runs ------------------------------------------------------------------------------------------
gpt2_shape='--layers 12 --heads 12 --width 768 --block 1024 --vocab 50304 --batch 64 --bias on --activation gelu-tanh --steps 24'
big_shape='--layers 48 --heads 25 --width 1600 --block 1024 --vocab 50304 --batch 16 --bias on --activation gelu-tanh --steps 12'
# trained NAME SECONDS OPTION...: milliseconds of a step and GB of a run of the trainer.
trained() {
    of=$1 seconds=$2; shift 2
    measured "$seconds" train "$KIT/bin/trainer_cuda" --data "$KIT/text" --guard off --sample 0 --eval-batches 1 \
        --eval-every 100000 --log-every 3 --overwrite --out "$work/run" "$@" && figure "$of: $(ms_of "$work/run")"
}
# The median of ms in a run's metrics, without the first row that has a loss; the most memory.
ms_of() {
    awk -F '[:,{}]' '/"loss":/ {
        ms = ""
        for (f = 1; f < NF; f++) {
            if ($f == "\"ms\"") ms = $(f + 1)
            if ($f == "\"mem\"" && $(f + 1) > mem) mem = $(f + 1)
        }
        if (n++ && ms != "") print ms, mem }' "$1/metrics.jsonl" 2>/dev/null | sort -n | awk '
        { ms[NR] = $1; if ($2 > mem) mem = $2 }
        END { if (NR) printf "%.2f ms, %.2f GB", ms[int((NR + 1) / 2)], mem / 1e9; else printf "no row" }'
}
part_fp8() {
    figure 'GPT-2 124M in bf16 at level 2, a recipe, products in fp8 (head: of the head alone): ms a step, GB'
    for recipe in none head fp8 fp8-delayed; do
        case $recipe in
        none) options='--recipe none' ;;
        head) options='--recipe-of *wte*=fp8 --narrow-products' ;;
        *)    options="--recipe $recipe --narrow-products" ;;
        esac
        # shellcheck disable=SC2086
        trained "  recipe $recipe" 30 ${DEVICE:---device cuda --graph} --dtype bf16 --level 2 $options ${GPT2:-$gpt2_shape}
    done
}
part_big() {
    # shellcheck disable=SC2086
    trained 'GPT-2 1.5B in bf16 at level 2, batch 16' 45 ${DEVICE:---device cuda --graph} --dtype bf16 --level 2 \
        ${BIG:-$big_shape}
}
part_nanogpt() {
    for dtype in fp16 bf16; do
        limited 240 "$KIT/bin/trainer_cuda" --preset char-gpu --device cuda --graph --dtype $dtype --data "$KIT/text" \
            --sample 0 --out "$work/nanogpt_$dtype" --overwrite >"$work/train" 2>&1
        say "NANOGPT $dtype: status $?, $(grep -i 'best' "$work/train" | tail -n 1 | cut -c 1-120)"
        cat "$work/train" >>"$OUT/train.txt"
    done
}

# --- where a step's time goes ------------------------------------------------------------------------------
# The trainer waits behind each kernel; ncu times every kernel of a step as it runs.
part_where() {
    # shellcheck disable=SC2086
    measured 35 where "$KIT/bin/trainer_cuda" --data "$KIT/text" --guard off --sample 0 ${DEVICE:---device cuda} --dtype bf16 \
        --level 2 ${GPT2:-$gpt2_shape} --profile --eval-every 100000 --eval-batches 1 --overwrite --out "$work/run" &&
        figure 'WHERE A STEP GOES, with a wait behind each kernel' &&
        awk '$NF ~ /^[0-9.]+$/ && $(NF - 1) ~ /%$/' "$work/said" | tr -s ' ' | head -n 24 >>"$work/figures"
    ncu=$(command -v ncu || echo "$CUDA/bin/ncu")
    [ -x "$ncu" ] || { figure 'ncu is not there'; return; }
    measured 60 where "$ncu" --clock-control none --metrics gpu__time_duration.sum --csv --launch-skip 1500 \
        --launch-count 420 "$KIT/bin/bench_cuda" --batch "$BATCH" ${SIZE:-} --part training --dtype bf16 --epilogues 2 \
        --rounds 1 && "$PYTHON" tests/cuda/ncu_sums.py "$work/said" >>"$work/figures" 2>>"$OUT/where.txt"
}
part_profile() {
    ncu=$(command -v ncu || echo "$CUDA/bin/ncu")
    [ -x "$ncu" ] || { say 'ncu is not there'; return; }
    limited 45 "$ncu" --clock-control none -k regex:attention -c 6 --set basic \
        "$KIT/bin/bench_cuda" --batch 16 --part kernels --rounds 1 --only 'attention bf16 causal' >"$OUT/ncu.txt" 2>&1
    say "PROFILE: status $?"
    grep -e 'attention_\|Duration\|Registers Per\|Achieved Occ\|Compute (SM)\|Memory Throughput\|Local' "$OUT/ncu.txt" |
        tr -s ' ' | cut -c 1-110 | head -n 24 >>"$table"
}
part_races() {
    export MIXPREC_TEST_QUICK=1
    sanitized racecheck 60 test_cuda_attention
    unset MIXPREC_TEST_QUICK
}

# --- the host's CPU ------------------------------------------------------------------------------------------
# GPT-2's step by number of threads: the fastest set in bf16 and fp16, AVX-512 in fp32; the other sets by one thread and
# by all. Then products, and the model of many threads where the kit has it.
part_cpu() {
    say "CPU: GPT-2 124M, 4 x 64 tokens, level 2: ms a step by threads"
    sets=$("$KIT/bin/trainer_cuda" --isa list 2>/dev/null | tail -n 1 | tr -d ' ' | sed 's/(default)//g' | tr ',' '\n' |
        grep -x -e amx -e avx512_bf16 -e avx512 | sort)
    best=$(echo "$sets" | grep -x amx || echo "$sets" | tail -n 1)
    threads=${THREADS:-1 2 4 8 16} done_jobs=
    for job in "$best bf16" "$best fp16" 'avx512 fp32' 'avx512_bf16 bf16' 'avx512 fp16'; do
        case ",$done_jobs," in *",$job,"*) continue ;; esac
        echo "$sets" | grep -q -x "${job% *}" || continue
        done_jobs="$done_jobs,$job"
        some=$threads
        case $job in "$best"* | *fp32) ;; *) some="${threads%% *} ${threads##* }" ;; esac
        cpu_row "${job% *}" "${job#* }" "$some"
    done
    for n in 1 ${threads##* }; do
        [ ! -x "$KIT/bin/bench_gemm" ] || measured 15 cpu "$KIT/bin/bench_gemm" "$n" 0.1
    done
    [ ! -x "$KIT/bin/bench_threads" ] || { measured 75 cpu "$KIT/bin/bench_threads" && tail -n 12 "$work/said" >>"$table"; }
}
cpu_shape='--layers 12 --heads 12 --width 768 --block 64 --vocab 50304 --batch 4 --bias on --activation gelu-tanh --steps 4'
cpu_row() { # SET DTYPE THREADS
    row=
    for n in $3; do
        # shellcheck disable=SC2086
        measured 25 cpu env OMP_NUM_THREADS="$n" "$KIT/bin/trainer_cuda" --device cpu --isa "$1" --threads "$n" --dtype "$2" \
            --level 2 ${CPU:-$cpu_shape} --log-every 1 --data "$KIT/text" --guard off --sample 0 --eval-every 100000 \
            --eval-batches 1 --overwrite --out "$work/run" || continue
        row="$row  $n: $(ms_of "$work/run" | cut -d ' ' -f 1)"
    done
    say "  $1 $2 $row"
}
