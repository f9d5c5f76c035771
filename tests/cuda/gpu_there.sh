# gpu_there.sh - the part of gpu.sh that runs on the machine with the GPU: gpu.sh reads this file for `first` and
# `again`.
# SPDX-License-Identifier: MIT OR Unlicense
# shellcheck shell=sh disable=SC2154,SC2086
. tests/cuda/gpu_parts.sh

# --- the GPU -----------------------------------------------------------------------------------------
# The GPUs, a line each: number, memory in use.
gpus() { limited 20 nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits 2>/dev/null; }
gpu_facts() {
    limited 20 nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} \
        --query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,power.limit,temperature.gpu \
        --format=csv,noheader 2>/dev/null | head -n 1
}
capability_here() {
    limited 20 nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} --query-gpu=compute_cap \
        --format=csv,noheader 2>/dev/null | head -n 1
}
# Takes the idlest of several GPUs, unless the caller chose.
choose_gpu() {
    export CUDA_DEVICE_ORDER=PCI_BUS_ID
    gpu_note=
    count=$(gpus | grep -c .)
    [ "$count" -gt 1 ] && [ -z "${CUDA_VISIBLE_DEVICES:-}" ] || return 0
    CUDA_VISIBLE_DEVICES=$(gpus | sort -t , -k 2n -k 1n | head -n 1 | cut -d , -f 1)
    export CUDA_VISIBLE_DEVICES
    gpu_note="$count GPUs: number $CUDA_VISIBLE_DEVICES is used, the idlest; set CUDA_VISIBLE_DEVICES to use another"
}
# A step of GPT-2 takes about half a gigabyte for each sequence. Sets busy_note.
fit_batch() {
    busy_note=
    free_mib=$(echo "$gpu_line" | awk -F ', *' 'NF > 3 && $3 + 0 > 0 { print $3 - $4 }')
    used_mib=$(echo "$gpu_line" | awk -F ', *' 'NF > 3 { print $4 + 0 }')
    wanted=$BATCH
    while [ -n "$free_mib" ] && [ "$BATCH" -gt 1 ] && [ $((BATCH * 550 + 3000)) -gt "$free_mib" ]; do
        BATCH=$((BATCH / 2))
    done
    if [ "${used_mib:-0}" -gt 2000 ]; then
        busy_note="the GPU is in use ($used_mib MiB, $free_mib MiB free): end the other program; no time below counts"
    fi
    [ "$BATCH" = "$wanted" ] ||
        busy_note="${busy_note:+$busy_note; }batch $BATCH instead of $wanted, which needs $((wanted * 550 + 3000)) MiB"
}

# --- where the logs lie --------------------------------------------------------------------------------
logs='facts tests bench choices torch train sanitizer kernels training ncu clocks host steps where cpu'
# All logs as one file beside the table: a loan may return only a few files.
archive_logs() {
    ( cd "$OUT" && there= && for log in $logs; do [ ! -f "$log.txt" ] || there="$there $log.txt"; done &&
        tar -czf "$mode.tgz" table.txt $there && rm -f $there ) 2>/dev/null
}
open_out() {
    out_note=
    if ! { mkdir -p "$OUT" && ( : >"$OUT/table.txt" ); } 2>/dev/null; then
        wanted=$OUT
        OUT=$(mktemp -d) || fail 2 "OUT ($wanted) cannot be written, nor can /tmp: set OUT to a folder that can"
        out_note="OUT ($wanted) cannot be written: the logs lie in $OUT; set OUT to a folder that can"
    fi
    OUT=$(cd "$OUT" && pwd)
    table=$OUT/table.txt
    for log in $logs; do rm -f "$OUT/$log.txt"; done
    : >"$table"
}
say() { printf '%s\n' "$*" | cut -c 1-170 >>"$table"; }
trouble() { echo x >>"$work/problems"; say "!! $*"; }
progress() { echo "[$(used) s] $*"; }

# --- is the kit of use here? ---------------------------------------------------------------------------
# Sets reason, where the kit is of none. $work/probe has what the short probe said.
kit_serves() {
    reason=
    if [ ! -f "$KIT/bin/probe" ]; then
        reason="there is no kit in $KIT: run tests/cuda/gpu.sh pack at home and bring that folder, or set KIT"
        return 1
    fi
    find_libraries >"$work/libraries" 2>&1
    limited 30 "$KIT/bin/probe" --short >"$work/probe" 2>&1
    case $? in
    0)  arch_serves ;;
    77) driver_answers ;;
    *)  loader_answers ;;
    esac
    [ -z "$reason" ]
}
# A kit of sm_90 serves 9.0 and later minor versions of 9, one of sm_90a only 9.0.
arch_serves() {
    capability=$(sed -n 's/.*, capability \([0-9]*\.[0-9]*\),.*/\1/p' "$work/probe" | tr -d .)
    arch=$(of_kit arch | tr -dc 0-9)
    [ "$capability" ] && [ "$arch" ] || return 0
    [ $((capability / 10)) = $((arch / 10)) ] && [ "$capability" -ge "$arch" ] && return 0
    reason="the kit is for sm_$arch and this GPU is sm_$capability: \
run KIT_ARCH=sm_$capability tests/cuda/gpu.sh pack at home"
}
# Error 35: the driver is older than the runtime.
driver_answers() {
    error=$(sed -n 's/^no GPU: error \([0-9]*\),.*/\1/p' "$work/probe")
    driver=$(sed -n 's/^driver \([0-9]*\),.*/\1/p' "$work/probe")
    if [ "$error" = 35 ] && [ "${driver:-0}" -gt 0 ]; then
        driver=$((driver / 1000))
        reason="the driver serves CUDA $driver and the kit needs $(of_kit major): \
pack with nvcc $driver, or install a newer driver"
    else
        reason="CUDA finds no GPU: $(tail -n 1 "$work/probe" | cut -c 1-100)"
        no_gpu=1
    fi
}
# The loader found no library, or a library is damaged.
loader_answers() {
    library=$(missing | head -n 1)
    other=
    if [ "$library" ]; then
        folder=$(folder_of "${library%%.so*}.so.[0-9]*")
        [ -z "$folder" ] || other=$(echo "$folder/${library%%.so*}".so.[0-9]*)
        other=${other%% *}
    fi
    case $library in
    '') reason="the kit does not start: $(head -n 1 "$work/probe" | cut -c 1-100)" ;;
    *)  if [ "$other" ]; then
            major=${other##*.so.}
            reason="$library is missing, $other is there: \
pack with nvcc ${major%%.*}, or install cuBLAS of CUDA $(of_kit major)"
        else reason="$library is missing: set LD_LIBRARY_PATH to the folder that has it, or install it"
        fi ;;
    esac
}
# Compiles the programs here, for the GPU that is here.
pack_here() {
    [ -x "$CUDA/bin/nvcc" ] && command -v "$MAKE" >/dev/null 2>&1 && [ "$(left)" -gt 90 ] || return 1
    progress "the kit is of no use here: compiling ($reason)"
    arch_here=native
    [ "$(capability_here)" != 9.0 ] || arch_here=sm_90a
    here=$work/kit model=$(cat "$KIT/model" 2>/dev/null) text=${DATA:-}
    [ "$text" ] || [ ! -f "$KIT/text" ] || text=$KIT/text
    limited $(($(left) - 60)) env BUILD="$work/build" KIT="$here" KIT_ARCH="$arch_here" MODEL="$model" DATA="$text" \
        CUDA="$CUDA" MAKE="$MAKE" LD_LIBRARY_PATH="$loader_path" sh tests/cuda/gpu.sh pack \
        >"$work/packed" 2>&1 || return 1
    KIT=$here
}

# --- tests ---------------------------------------------------------------------------------------------
# The lines of the table for what tests/tools/run.sh said: failed programs with the first lines of each failed test, or
# with their last lines; programs that were skipped, and why.
digest() {
    awk '
        function flush(    i, n) {
            if (failed && !inner)
                for (n = lines > 4 ? lines - 3 : 1; n <= lines; n++) print "      " substr(line[n], 1, 150)
            lines = kept = inner = 0
        }
        /^(ok  |FAIL) .* passed, [0-9]+ failed, [0-9]+ skipped  \([0-9]+ s\)/ {
            flush()
            failed = /^FAIL/
            gsub(/ +/, " ")
            if (failed) print "  " substr($0, 1, 160)
            else if (sub(/ 0 passed, 0 failed, 1 skipped \([0-9]+ s\)/, "")) print "  skip " substr($0, 4, 150)
            next
        }
        /^  / && failed { if (kept++ < 3) text[kept] = substr($0, 3, 150) }
        /^FAIL / && failed {
            inner++
            if (inner <= 8) {
                print "    " substr($0, 1, 110)
                for (i = 1; i <= kept && i <= 3; i++) print "      " text[i]
            }
            kept = 0
        }
        failed { line[++lines] = $0 }
        END { flush() }' "$1"
}
failed_programs() { sed -n 's/^FAIL \([^ ]*\) .* skipped  ([0-9]* s).*/\1/p' "$1"; }

# run_tests SECONDS NAME...: into tests.txt and the table. Many hangs together cost less than half of the time.
run_tests() {
    each=$1; shift
    share=$(($(left) * 45 / 100))
    [ "$share" -gt 20 ] || share=20
    limited "$share" env PATH="$KIT/bin:$PATH" OMP_NUM_THREADS=2 tests/tools/run.sh -n -t "$each" -j "$JOBS" "$@" \
        >"$OUT/tests.txt" 2>&1
    status=$?
    say "TESTS $(tail -n 1 "$OUT/tests.txt"), in $# programs"
    [ $status = 0 ] || echo x >>"$work/problems"
    grep '^no test passed' "$OUT/tests.txt" >>"$table"
    sed '$d' "$OUT/tests.txt" | digest /dev/stdin | head -c 3000 >>"$table"
    grep -h 'multiply codes\|multiplies codes' "$OUT/tests.txt" | sort -u | head -n 4 | cut -c 1-110 >>"$table"
    progress "tests: $(failed_programs "$OUT/tests.txt" | grep -c .) programs failed"
}

# --- the sanitizer -------------------------------------------------------------------------------------
sanitizer=$(command -v compute-sanitizer || echo "$CUDA/bin/compute-sanitizer")
# sanitized TOOL SECONDS NAME. Errors of API calls are not reported: the tests make some on purpose.
sanitized() {
    [ -x "$sanitizer" ] || return 0
    options=
    [ "$1" = racecheck ] || options='--report-api-errors no'
    # shellcheck disable=SC2086
    limited "$2" "$sanitizer" --tool "$1" $options --error-exitcode 9 "$KIT/bin/$3" >"$work/sanitizer" 2>&1
    status=$?
    { echo "=== $1 $3: status $status"; cat "$work/sanitizer"; } >>"$OUT/sanitizer.txt"
    case $status in
    0)         word= ;;
    124 | 137) word="cut after $2 s, nothing found so far" ;;
    *)         word='FAIL'; echo x >>"$work/problems" ;;
    esac
    sum=$(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' "$work/sanitizer" | tail -n 1 | cut -c 1-80)
    say "$1 $3: status $status ${word:+($word) }$sum"
    [ $status = 0 ] || grep -e '=========.*\(Invalid\|Race\|Error\|at \)' "$work/sanitizer" | head -n 6 |
        cut -c 1-150 >>"$table"
}

# --- PyTorch -------------------------------------------------------------------------------------------
# torch SECONDS SCRIPT OPTION...: with the loader's path as it was, so that PyTorch finds its own libraries.
torch() {
    seconds=$1 script=$2; shift 2
    limited "$seconds" env LD_LIBRARY_PATH="$loader_path" PYTHONUNBUFFERED=1 \
        "$PYTHON" "tests/bench/$script" --batch "$BATCH" "$@" >>"$OUT/torch.txt" 2>>"$work/torch.err"
}
no_peer() { say "no PyTorch that sees the GPU: no peer ($(tail -n 1 "$work/torch.err" 2>/dev/null | cut -c 1-100))"; }
# PyTorch compiles while the tests run, and waits: its step is measured when nothing else uses the GPU.
start_peer() {
    timeout -k 5 330 env LD_LIBRARY_PATH="$loader_path" PYTHONUNBUFFERED=1 \
        "$PYTHON" tests/bench/torch_first.py --batch "$BATCH" --wait "$work/quiet" bf16-compiled attention \
        </dev/null >>"$OUT/torch.txt" 2>>"$work/torch.err" &
    peer=$!
}
finish_peer() {
    touch "$work/quiet"
    [ "$peer" ] || return 0
    tries=0
    while kill -0 "$peer" 2>/dev/null && [ $tries -lt 350 ] && [ "$(left)" -gt 190 ]; do
        sleep 0.2
        tries=$((tries + 1))
    done
    if kill "$peer" 2>/dev/null; then trouble 'PyTorch was not ready in time and was stopped'; fi
    wait "$peer" 2>/dev/null
    progress 'PyTorch, compiled'
}
show_peer() {
    [ -s "$OUT/torch.txt" ] || { no_peer; return; }
    say PYTORCH
    cut -c 1-165 "$OUT/torch.txt" | head -n 30 >>"$table"
    cat "$work/torch.err" >>"$OUT/torch.txt" 2>/dev/null
}

# --- the bench -----------------------------------------------------------------------------------------
# bench SECONDS FILE OPTION...
bench() {
    seconds=$1 to=$2; shift 2
    # shellcheck disable=SC2086
    limited "$seconds" "$KIT/bin/bench_cuda" --batch "$BATCH" ${SIZE:-} "$@" >>"$to" 2>&1
}
# Its lines, shortened: time, rate, the time and the share that the ledger predicts.
short() {
    awk '/ GFLOP | ms \[|products:|launches and|device memory|not measured|us \[/ {
        gsub(/ +/, " "); sub(/ \[[^]]*\]/, ""); sub(/GPT-2 gpt2 [0-9.]*M /, "GPT-2 "); sub(/, MFU [^;]*/, "")
        sub(/; model /, "; predicted "); sub(/, roofline [0-9.]*/, ""); sub(/ [0-9]+x[0-9x]+ [0-9.]+ GFLOP/, "")
        sub(/ of the peak/, ""); sub(/ \([0-9.]+%\)/, ""); gsub(/ TFLOP\/s/, "T"); print substr($0, 1, 150) }' "$1"
    grep -i -e 'error\|failed\|bench_cuda:' "$1" | head -n 4 | cut -c 1-160
}
run_bench() {
    : >"$OUT/bench.txt"
    bench 100 "$OUT/bench.txt" --part first --rounds 5 --choices "$work/choices"
    status=$?
    cat "$work"/choices_*.txt >"$OUT/choices.txt" 2>/dev/null
    say "OURS (bench_cuda --part first: status $status)"
    [ $status = 0 ] || echo x >>"$work/problems"
    short "$OUT/bench.txt" | head -n 40 >>"$table"
    progress 'bench'
}
# The other dtypes, with epilogues, where the time allows.
run_more() {
    for dtype in f16 f32; do
        [ "$(left)" -gt 75 ] || return 0
        : >"$work/more"
        bench 30 "$work/more" --part training --dtype $dtype --epilogues 3 --rounds 1
        cat "$work/more" >>"$OUT/bench.txt"
        short "$work/more" | grep 'GPT-2' | head -n 6 >>"$table"
    done
    progress 'bench, other dtypes'
}

# --- the trainer ---------------------------------------------------------------------------------------
# compare NAME FOLDER: one line. f32 stays within 0.002 of the CPU; sums in another order turn roundings of bf16 and
# fp16 over.
compare() {
    losses "$2" >"$work/losses" 2>/dev/null
    paste -d ' ' "$KIT/expect/$1" "$work/losses" | awk -v name="$1" '
        function far(a, b) { return a - b > 0 ? a - b : b - a }
        function number(a) { return a ~ /^-?[0-9.]/ }
        NF < 6 || $1 != $4 || number($2) != number($5) || number($3) != number($6) { bad++; next }
        { rows++ }
        number($2) { last = $5; cpu = $2; if (far($2, $5) > loss) loss = far($2, $5) }
        number($3) { if (far($3, $6) > val) val = far($3, $6) }
        END {
            limit = name == "fp32" ? 0.002 : 0.02
            verdict = rows < 3 || bad ? " !! rows differ" : loss > limit || val > limit ? " !! apart" : ""
            printf "train %-5s %d rows, GPU %s, CPU %s, most apart: loss %.5f, val %.5f%s\n",
                name, rows, last, cpu, loss, val, verdict
        }'
}
run_trainer() {
    for name in $(runs | cut -d ' ' -f 1); do
        [ -z "$stopped" ] || return 0
        [ "$(left)" -gt 50 ] || { say "train $name: no time was left"; continue; }
        options=--graph
        [ "$name" = gelu ] && options="$options --epilogues on"
        [ "$name" = fp8 ] && options="$options --narrow-products"
        # shellcheck disable=SC2086
        train 25 "$name" "$work/train_$name" --device cuda $options >"$work/train" 2>&1
        status=$?
        { echo "=== trainer $name: status $status"; cat "$work/train"; } >>"$OUT/train.txt"
        line=$(compare "$name" "$work/train_$name")
        say "$line (status $status)"
        case $status$line in
        0*'!!'*) echo x >>"$work/problems" ;;
        0*)      ;;
        *)       echo x >>"$work/problems"; tail -n 2 "$work/train" | cut -c 1-150 >>"$table" ;;
        esac
    done
    progress trainer
}

# --- what the probe says ---------------------------------------------------------------------------------
run_probe() {
    # shellcheck disable=SC2086
    limited 60 "$KIT/bin/probe" ${SIZE:-} >"$work/probe" 2>&1
    status=$?
    {
        cat "$work/libraries"
        uname -r
        nproc
        command -v make c++ ncu compute-sanitizer
        limited 20 nvidia-smi
        cat "$work/probe"
    } >"$OUT/facts.txt" 2>&1
    say "FACTS (probe: status $status)"
    [ $status = 0 ] || echo x >>"$work/problems"
    grep -v '^capture ' "$work/probe" | cut -c 1-115 | head -c 2600 >>"$table"
    if grep '^capture ' "$work/probe" | diff tests/cuda/probe.txt - >"$work/differ"; then
        say "captures: all $(grep -c '^capture ' "$work/probe") answers are the simulation's"
    else
        say 'captures: the driver (>) answers otherwise than the simulation (<):'
        grep '^[<>]' "$work/differ" | cut -c 1-130 | head -n 12 >>"$table"
    fi
    # One process at a time, where the driver allows no more.
    grep -q 'compute mode [1-9]' "$work/probe" && { JOBS=1; say 'compute mode: one process at a time'; }
    progress "probe: status $status"
}

# --- the two calls ---------------------------------------------------------------------------------------
# After a signal no step begins.
step() { [ -n "$stopped" ] || "$@"; }
run_eager() {
    [ -s "$OUT/torch.txt" ] && [ "$(left)" -gt 100 ] || return 0
    torch 60 torch_first.py bf16-eager fp16-eager
    progress 'PyTorch, eager'
}
run_memcheck() {
    for name in test_cuda_attention test_cuda_training test_cuda_rows; do
        [ "$(left)" -le 40 ] || step sanitized memcheck 35 "$name"
    done
}
name_next() {
    failed=$(failed_programs "$OUT/tests.txt" | head -n 4 | tr '\n' ' ')
    [ -z "$failed" ] || say "next: tests/cuda/gpu.sh again $failed"
}
first_steps() {
    run_probe
    export MIXPREC_TEST_QUICK=1
    [ "$JOBS" = 1 ] || step start_peer
    # shellcheck disable=SC2046,SC2086
    step run_tests 80 ${TESTS:-$(all_tests)}
    step finish_peer
    step run_bench
    step run_eager
    step run_trainer
    step run_more
    run_memcheck
    show_peer
    name_next
}

again_steps() {
    [ $# -gt 0 ] || set -- test_cuda_training test_cuda_attention test_cuda_rows kernels profile
    tests='' parts=''
    for name; do
        case $name in test_cuda*) tests="$tests $name" ;; *) parts="$parts $name" ;; esac
    done
    JOBS=4
    # shellcheck disable=SC2086
    [ -z "$tests" ] || step run_tests 60 $tests
    for name in $tests; do
        [ "$(left)" -le 60 ] || step sanitized memcheck 60 "$name"
        [ "$(left)" -le 60 ] || step sanitized racecheck 60 "$name"
    done
    for name in $parts; do
        if [ "$(left)" -le 30 ]; then say "$name: no time was left"
        else
            case $name in
            steps | where | fp8 | big) step clocked "$name" ;;
            *)                         step "part_$name" ;;
            esac
        fi
        progress "$name"
    done
}
all_parts() { sed -n 's/^part_\([a-z0-9]*\)().*/\1/p' tests/cuda/gpu_parts.sh; }
check_names() {
    for name; do
        { all_tests; all_parts; } | grep -qx "$name" || fail 2 "there is no test or part $name: \
name a test of tests/cuda, or $(all_parts | tr '\n' ' ')"
    done
}

# --- the call ----------------------------------------------------------------------------------------------
# A reply keeps about 12,000 characters: the middle of a longer table stays in its file.
show_table() {
    echo
    if [ "$(wc -c <"$table")" -le 11300 ]; then cat "$table"; return; fi
    head -c 4800 "$table"
    echo
    echo "... (the rest of this part: $table)"
    tail -c 6300 "$table"
}
# Runs the steps beside this shell, which shows the table when they have ended, when BUDGET is over, and after a signal.
within_budget() {
    "$@" &
    steps=$!
    cut=
    trap 'cut="a signal"' INT TERM
    while kill -0 $steps 2>/dev/null && [ -z "$cut" ]; do
        [ "$(left)" -gt 0 ] || cut="the end of BUDGET ($BUDGET s)"
        sleep 0.2
    done
    [ -z "$cut" ] || stop_steps
    problems=$(grep -c . "$work/problems" 2>/dev/null)
    say "-- $(used) s of $BUDGET, ${problems:=0} problems"
    show_table
}
# The running command ends; what the command has said so far is in the table within seconds.
stop_steps() {
    kill $steps 2>/dev/null
    tries=0
    while kill -0 $steps 2>/dev/null && [ $tries -lt 40 ]; do sleep 0.2; tries=$((tries + 1)); done
    kill -KILL $steps 2>/dev/null
    trouble "cut by $cut: what stands above was measured"
}
steps() {
    trap 'stopped=1; kill $child $peer 2>/dev/null' TERM
    "${mode}_steps" "$@"
}

[ "$mode" = first ] || check_names "$@"
choose_gpu
gpu_line=$(gpu_facts)
[ "$gpu_line" ] || [ -e /dev/nvidia0 ] ||
    fail 3 'no GPU: nvidia-smi names none and there is no /dev/nvidia0; nothing was run'
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
open_out
no_gpu='' peer='' child='' stopped='' first_reason=''
if ! kit_serves; then
    [ -z "$no_gpu" ] || fail 3 "$reason; nothing was run"
    first_reason=$reason
    if ! { pack_here && kit_serves; }; then fail 2 "$first_reason"; fi
fi
fit_batch
say "$mode, $(date -u +%FT%TZ), commit $(of_kit commit) | $gpu_line"
for note in "$gpu_note" "$busy_note" "$out_note"; do [ -z "$note" ] || say "note: $note"; done
[ -z "$first_reason" ] || trouble "$first_reason; the programs were compiled here"
same_sources || trouble 'the kit is of other sources than this checkout: run tests/cuda/gpu.sh pack at home'
progress "$gpu_line"
within_budget steps "$@"
archive_logs
[ "$problems" = 0 ]
