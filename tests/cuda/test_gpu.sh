#!/bin/sh
# test_gpu.sh - runs tests/cuda/gpu.sh as on a machine with a GPU, where every program is a stand-in: what the table
# shows of failures, hangs and cuts, and the line for each machine on which the kit is of no use.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

machine=$tmp/machine kit=$tmp/machine/kit
mkdir -p "$machine/bin" "$machine/wheel" "$machine/toolkit/lib64" "$kit/bin" "$kit/lib" "$kit/spare" "$kit/expect"

# stand_in FILE LINE...: a program of the machine.
stand_in() {
    file=$machine/$1; shift
    { echo '#!/bin/sh'; printf '%s\n' "$@"; } >"$file"
    chmod +x "$file"
}
stand_in bin/nvidia-smi 'case "$*" in' '*compute_cap*) echo 9.0 ;;' \
    '*clocks_event*) [ -z "$NO_CLOCK" ] || exit 9' \
    '    printf "%s\n" "1980, 100.5, 40, 0x1" "1500, 690.0, 60, 0x4" "1600, 700.0, 60, 0x4"; exec sleep 60 ;;' \
    '*index*) printf "%s\n" "${GPUS:-0, 3}" ;;' \
    '*) echo "Some GPU, 999.1, 81559 MiB, ${MEMORY:-3} MiB, 1 MHz, 2 MHz, 3 W, 4" ;; esac'
stand_in bin/ldd 'echo "	${LACKS:-libm.so.6} => ${LACKS:+not found}"'
stand_in bin/ldconfig 'echo "	libcublasLt.so.13 (libc6,x86-64) => $MACHINE/loader/libcublasLt.so.13"'
stand_in bin/python3 'case "$*" in' \
    '*sysconfig*) echo "$MACHINE/wheel" ;;' \
    '*torch_first*bf16-eager*) [ -z "$LONG_TABLE" ] || yes "$(printf %0160d 2)" | head -n 30' \
    '    echo "torch GPT-2 eager 180.0 ms" ;;' \
    '*--turns*) shift 4; : >"$1/ready"; for n in 1 2 3; do while [ ! -e "$1/torch_$n" ]; do sleep 0.1; done' \
    '    : >"$1/done_$n"; done; echo "torch bf16-compiled batch 64 131.00 ms [130.00 132.00] of 15 steps" ;;' \
    '*ncu_sums*) echo "NCU: 371 launches, 120.00 ms" ;;' \
    '*torch_first*) [ -z "$NO_TORCH" ] || { echo "No module named torch" >&2; exit 1; }' \
    '    while [ ! -e "$5" ]; do sleep 0.1; done' '    echo "torch GPT-2 $6 130.0 ms" ;;' \
    '*torch_cuda*) echo "gelu_tanh 9x9 1.0 MB 0.1 ms [0.1 0.1] 8 GB/s, the copy 10: 0.80 of it" ;; esac'
stand_in bin/ncu 'echo a line of ncu'
stand_in bin/lscpu 'echo "Model name: Some CPU"'
stand_in bin/compute-sanitizer 'echo "$@" >>"$MACHINE/sanitized"' 'echo "========= ERROR SUMMARY: 0 errors"' \
    'exit ${SANITIZER_STATUS:-0}'
stand_in kit/bin/probe 'echo "driver ${DRIVER:-13000}, runtime 13000, cuBLASLt 130100"' \
    '[ -z "$STARTS_NOT" ] || { echo "probe: error while loading shared libraries" >&2; exit 127; }' \
    '[ -z "$GPU_ERROR" ] || { echo "no GPU: error $GPU_ERROR, so it is"; exit 77; }' \
    'echo "Some GPU, capability ${CAPABILITY:-9.0}, 9 SMs"; echo "compute mode ${COMPUTE_MODE:-0}"' \
    '[ "$1" = --short ] || sed "${ANSWERS:-s/a/a/}" tests/cuda/probe.txt' 'echo "$LD_LIBRARY_PATH" >"$MACHINE/path"' \
    'echo "$CUDA_VISIBLE_DEVICES" >"$MACHINE/visible"'
stand_in kit/bin/bench_cuda 'echo "$@" >>"$MACHINE/benched"' \
    'case "$*" in *kernels*) echo "gelu_tanh 9x9  1.0 MB 0.1 ms [0.1 0.1]  9 GB/s, the copy  10: 0.90 of it" ;;' \
    '*) echo "GPT-2 gpt2 124.4M bf16 level 2, as a graph   120.000 ms [119.0 121.0], 9 tokens/s; model 119.5 ms"' \
    ';; esac' '[ -z "$LONG_TABLE" ] || yes "$(printf %0150d 1) ms [1 2]" | head -n 40' 'exit ${BENCH_STATUS:-0}'
stand_in kit/bin/trainer_cuda '[ "$1" != --help ] || exit 0' \
    '[ "$1" != --isa ] || { echo "scalar, avx512, amx (default)"; exit 0; }' \
    'case "$*" in *--profile*) echo "gemm 12 60.0% 61.5" ;; esac' 'while [ "$1" != --out ]; do shift; done' 'mkdir -p "$2"' \
    'row() { echo "{\"step\":$1,\"$2\":$3,\"scale\":1}"; }' \
    '{ row 0 val 4.5; row 1 loss ${LOSS:-4.4}; row 2 loss 4.3; } >"$2/metrics.jsonl"' \
    'for n in 1 2 3; do echo "{\"step\":$n,\"loss\":4.2,\"ms\":12$n.5,\"mem\":30000000000}"; done >>"$2/metrics.jsonl"' \
    'exit ${TRAIN_STATUS:-0}'
for name in fp32 bf16 fp16 gelu fp8; do printf '%s\n' '0 - 4.5' '1 4.4 -' '2 4.3 -' >"$kit/expect/$name"; done
# Each test says what lies in its file.
for name in test_cuda test_cuda_rows test_cuda_training test_cuda_attention; do
    stand_in "kit/bin/$name" ". \$MACHINE/$name.says"
done
says() { printf '%s\n' "$2" >"$machine/$1.says"; }
all_pass() {
    for name in test_cuda test_cuda_rows test_cuda_training test_cuda_attention; do
        says $name 'echo 3 passed, 0 failed, 0 skipped'
    done
}
all_pass
eval "$(sed -n '/^sources()/,/^}/p' tests/cuda/gpu.sh)"
LC_ALL=C; export LC_ALL
printf '%s\n' 'nvcc: 13.0' 'major: 13' 'arch: sm_90' 'commit: abc' "sources: $(sources)" >"$kit/built_by"
echo text >"$kit/text"
echo '--layers 1' >"$kit/model"
touch "$machine/wheel/libcublasLt.so.13" "$machine/toolkit/lib64/libcudart.so.13"

# there ARGUMENT...: the script on that machine, in the place of this shell.
there() {
    exec env PATH="$machine/bin:$PATH" MACHINE="$machine" KIT="${USE_KIT-$kit}" OUT="${USE_OUT-$machine/out}" \
        CUDA="$machine/toolkit" MAKE="${USE_MAKE:-nomake}" PYTHON=python3 TESTS="${USE_TESTS:-test_cuda_rows test_cuda}" \
        JOBS=2 sh tests/cuda/gpu.sh "$@"
}
# gpu STATUS ARGUMENT...: the script must end with STATUS; what the script said is in $tmp/said.
gpu() {
    want=$1; shift
    rm -rf "$machine/out" "$machine/benched" "$machine/sanitized"
    ( there "$@" ) >"$tmp/said" 2>&1
    status=$?
    cat "$tmp/said"
    [ "$status" = "$want" ]
}
said() { grep -q -e "$1" "$tmp/said" || { cat "$tmp/said"; return 1; }; }
unsaid() { ! said "$1"; }
one_line() { cat "$tmp/said"; [ "$(wc -l <"$tmp/said")" = 1 ] && said "$1"; }
lines() { [ "$(grep -c -e "$1" "$2")" = "$3" ] || { cat "$2"; return 1; }; }
# with NAME=VALUE... -- COMMAND: COMMAND, with these variables.
with() {
    while [ "$1" != -- ]; do export "${1?}"; names="$names ${1%%=*}"; shift; done
    shift
    "$@"
    result=$?
    # shellcheck disable=SC2086
    unset $names
    names=
    return $result
}
names=

# --- all well ----------------------------------------------------------------------------------------
check 'first runs'                              gpu 0 first
check 'its head names commit and GPU'           said '^first, .*commit abc | Some GPU, 999.1'
check 'the captures are those of the simulation' said '^captures: all [0-9]* answers are'
check 'the sum of the tests'                    said '^TESTS 6 passed, 0 failed, 0 skipped, in 2 programs'
check 'a step, with its prediction'             said '^GPT-2 bf16 level 2, as a graph 120.000 ms, 9 tokens/s; predicted 119.5 ms'
check 'PyTorch, compiled beside the tests'      said '^torch GPT-2 bf16-compiled 130.0 ms'
check 'and eager'                               said '^torch GPT-2 eager'
check 'five runs of the trainer'                lines '^train .* 3 rows, GPU 4.3, CPU 4.3, .* val 0.00000 (status 0)$' \
    "$tmp/said" 5
check 'memcheck of three programs'              lines '^memcheck .*ERROR SUMMARY: 0 errors' "$tmp/said" 3
check 'nothing failed'                          said ', 0 problems$'
archived() { [ "$(ls "$machine/out" | tr '\n' ' ')" = "$1.tgz table.txt " ] && tar -tzf "$machine/out/$1.tgz" | grep -x "$2.txt"; }
check 'the logs are one archive'                archived first tests
check 'libraries: first those of the wheels'    grep -q "^$kit/lib:$machine/wheel:$machine/toolkit/lib64" "$machine/path"
rm "$machine/wheel/libcublasLt.so.13"
mkdir "$machine/loader"; touch "$machine/loader/libcublasLt.so.13"
check 'without PyTorch'                         with NO_TORCH=1 -- gpu 0 first
check 'that is told'                            said '^no PyTorch that sees the GPU: no peer (No module'
check 'then the libraries of the loader'        grep -q "^$kit/lib:$machine/loader:$machine/toolkit/lib64" "$machine/path"
touch "$machine/wheel/libcublasLt.so.13"

# --- what fails --------------------------------------------------------------------------------------
says test_cuda 'printf "%s\n" "ok   fine" "  x.cpp:7: element 3 of 9 is 1 on the GPU, 2 on the CPU" \
    "FAIL sums (1 checks)" "1 passed, 1 failed, 0 skipped"; exit 1'
says test_cuda_rows 'echo last words; kill -SEGV $$'
says test_cuda_training 'echo "skipped, there is no GPU: so it is"; exit 77'
says test_cuda_attention 'echo fine; sleep 9'
# Limits are a fortieth of theirs.
real=$(command -v timeout)
stand_in bin/timeout 'shift 2' 's=$(($1 / 40 + 1))' 'shift' "exec $real -k 1 \$s \"\$@\""
USE_TESTS='test_cuda_attention test_cuda_training test_cuda_rows test_cuda'
check 'one test hangs, one crashes, one fails'  gpu 1 first
rm "$machine/bin/timeout"
check 'their sum'                               said '^TESTS 1 passed, 3 failed, 1 skipped, in 4 programs'
check 'the hang costs its limit'                said '^  FAIL test_cuda_attention .*: stopped after 80 s'
check 'the crash'                               said '^  FAIL test_cuda_rows .*: killed by signal 11'
check 'with its last words'                     said '^      last words'
check 'a failed test'                           said '^    FAIL sums (1 checks)'
check 'with its first lines'                    said '^      x.cpp:7: element 3 of 9'
check 'a skip says why'                         said '^  skip test_cuda_training: skipped, there is no GPU: so it is'
check 'the rest runs all the same'              said '^train fp8 '
check 'the next call is named'                  said '^next: tests/cuda/gpu.sh again test_cuda_attention test_cuda_rows test_cuda $'
for name in test_cuda test_cuda_rows; do says $name 'echo so it is; exit 77'; done
USE_TESTS=
check 'a run that skips every test is red'      gpu 1 first
check 'and says so'                             said '^no test passed'
all_pass
check 'losses apart, a bench that fails'        with LOSS=4.41 BENCH_STATUS=1 SANITIZER_STATUS=9 -- gpu 1 first
check 'apart in f32'                            said '^train fp32 .*loss 0.01000.* !! apart'
check 'but not in fp16'                         said '^train fp16 .*val 0.00000 (status 0)'
check 'the bench, with its status'              said '^OURS (bench_cuda --part first: status 1)'
check 'an error under the sanitizer'            said '^memcheck test_cuda_rows: status 9 (FAIL)'
check 'a trainer that fails, a NaN'             with LOSS=NaN TRAIN_STATUS=1 -- gpu 1 first
check 'is no row of the CPU'                    said '^train bf16 .*!! rows differ (status 1)'
check 'a driver that answers otherwise'         with ANSWERS='s/EventQuery: error 900/EventQuery: ok/' -- gpu 0 first
check 'is shown beside the simulation'          said '^> capture .*cudaEventQuery: ok'

# --- what is cut -------------------------------------------------------------------------------------
says test_cuda 'touch $MACHINE/begun; sleep 30'
rm -f "$machine/begun"
check 'the budget ends'                         with BUDGET=1 -- gpu 1 first
check 'the table is shown'                      said '^!! cut by the end of BUDGET'
signalled() {
    rm -f "$machine/begun"
    ( BUDGET=60; export BUDGET; there first ) >"$tmp/said" 2>&1 & call=$!
    tries=0
    while [ ! -e "$machine/begun" ] && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
    kill -TERM $call
    wait $call
    [ $? = 1 ]
}
check 'the call is stopped by a signal'         signalled
check 'the table is shown, too'                 said '^!! cut by a signal: what stands above was measured'
check 'with the tests that ended'               said '^TESTS 3 passed, 1 failed, 0 skipped, in 2 programs'
all_pass
check 'a long table is shortened'               with LONG_TABLE=1 -- gpu 0 first
short_enough() { [ "$(sed -n '/^first, /,$p' "$tmp/said" | wc -c)" -lt 12000 ] && said '^\.\.\. (the rest of this part: '; }
check 'below 12,000 characters'                 short_enough

# --- machines ----------------------------------------------------------------------------------------
check 'two GPUs'                                with GPUS='0, 900
1, 3' -- gpu 0 first
check 'the idlest is used'                      said '^note: 2 GPUs: number 1 is used, .*set CUDA_VISIBLE_DEVICES'
check 'by the programs'                         grep -qx 1 "$machine/visible"
check 'the choice is the caller'"'"'s'            with CUDA_VISIBLE_DEVICES=0 GPUS='0, 900
1, 3' -- gpu 0 first
check 'and no line tells of it'                 unsaid '^note:'
check 'a GPU in use'                            with MEMORY=60000 -- gpu 0 first
check 'what to do'                              said '^note: the GPU is in use (60000 MiB, 21559 .*: end the other'
check 'with a smaller batch'                    grep -q -e '--batch 32' "$machine/benched"
check 'one process at a time'                   with COMPUTE_MODE=3 -- gpu 0 first
check 'which is told'                           said '^compute mode: one process at a time'
USE_OUT=/proc/no/such
check 'a checkout that is read-only'            gpu 0 first
check 'the logs lie elsewhere'                  said '^note: OUT (/proc/no/such) cannot .* the logs lie in /tmp'
rm -rf "$(sed -n 's/.*the logs lie in \(.*\); set OUT.*/\1/p' "$tmp/said")"
unset USE_OUT
sed -i.old 's/^sources: .*/sources: 1 2/' "$kit/built_by"
check 'a kit of other sources'                  gpu 1 first
check 'says what to do'                         said '^!! the kit is of other sources .*: run tests/cuda/gpu.sh pack'
check 'check says so, too'                      gpu 1 check
check 'in its last line'                        said '^the kit is of other sources: run'
mv "$kit/built_by.old" "$kit/built_by"
check 'check of a right kit'                    gpu 0 check
check 'starts each program'                     said '^test_cuda_rows: status 0'

# --- machines where nothing runs: one line, which says what to do ----------------------------------------
check 'an older driver'                         with DRIVER=12040 GPU_ERROR=35 -- gpu 2 first
check 'says so'                                 one_line 'serves CUDA 12 and the kit needs 13: pack with nvcc 12, or install'
check 'CUDA without a GPU'                      with GPU_ERROR=100 -- gpu 3 first
check 'says so, too'                            one_line 'CUDA finds no GPU: .*error 100.*nothing was run'
check 'a GPU of another kind'                   with CAPABILITY=8.0 -- gpu 2 first
check 'which pack would serve it'               one_line 'for sm_90 .* is sm_80: run KIT_ARCH=sm_80 tests/cuda/gpu.sh pack'
touch "$machine/wheel/libcublasLt.so.12"
rm -rf "$machine/wheel/libcublasLt.so.13" "$machine/loader"
check 'wheels of another version'               with STARTS_NOT=1 LACKS=libcublasLt.so.13 -- gpu 2 first
check 'name what is there'                      one_line "so.13 is missing, $machine/wheel/.*so.12 is there: pack with nvcc 12"
check 'no library at all'                       with STARTS_NOT=1 LACKS=libnosuch.so.1 -- gpu 2 first
check 'is named'                                one_line 'libnosuch.so.1 is missing: set LD_LIBRARY_PATH'
touch "$machine/wheel/libcublasLt.so.13"
USE_KIT=$machine/nokit
check 'no kit'                                  gpu 2 first
check 'where to make one'                       one_line 'there is no kit in .*: run tests/cuda/gpu.sh pack at home'
check 'pack without nvcc'                       gpu 2 pack
check 'says what to do'                         one_line 'nvcc is missing: put nvcc on PATH, or set CUDA'
check 'a rehearsal without nvcc is a skip'      gpu 77 rehearse
# With nvcc and make the programs are compiled there.
mkdir -p "$machine/toolkit/bin"
stand_in toolkit/bin/nvcc 'echo "Cuda compilation tools, release 13.0, V13.0.88"'
stand_in bin/amake 'echo "$@" >>"$MACHINE/made"' 'for word; do' \
    'case $word in KIT=*) mkdir -p "${word#KIT=}" && cp -r "$MACHINE/kit/bin" "${word#KIT=}/" ;; esac; done'
check 'pack without make'                       gpu 2 pack
check 'says so'                                 one_line 'make is missing: install make'
USE_MAKE=$machine/bin/amake
check 'no kit, but nvcc and make'               gpu 1 first
check 'which is told'                           said '^!! there is no kit in .*; the programs were compiled here'
check 'all of it runs'                          said '^train fp8 .*(status 0)$'
unset USE_MAKE USE_KIT
if [ -e /dev/nvidia0 ]; then skip 'no GPU (this machine has one)'
else
    mv "$machine/bin/nvidia-smi" "$machine/answers"
    stand_in bin/nvidia-smi 'echo "nvidia-smi has failed" >&2; exit 9'
    check 'no GPU'                              gpu 3 first
    check 'is one line'                         one_line 'no GPU: nvidia-smi names none .*; nothing was run'
    mv "$machine/answers" "$machine/bin/nvidia-smi"
fi

# --- again -------------------------------------------------------------------------------------------
check 'again, two names'                        gpu 0 again test_cuda_rows kernels
check 'the test runs'                           said '^TESTS 3 passed, 0 failed, 0 skipped, in 1 programs'
check 'under two tools'                         lines '^--tool [a-z]*check' "$machine/sanitized" 2
check 'kernels stand beside PyTorch'"'"'s'        said '^KERNELS, PyTorch: status 0'
check 'steps'                                   gpu 0 again host steps
check 'the machine'                             said '^HOST Some CPU, [0-9]* CPUs, quota'
check 'ours, the median of the turns'           said '^GPT-2 gpt2 .* level 2, as a graph 120.00 ms \[119.00 121.00\] of 3 turns'
check 'beside PyTorch'                          said '^torch bf16-compiled .* of 15 steps'
check 'with their clock'                        said 'clock of the busier half of steps: 1550 MHz (1500 to 1600), 695 W'
check 'their log'                               archived again steps
check 'without a clock'                         with NO_CLOCK=1 -- gpu 1 again steps
check 'nothing is a result'                     unsaid '120.00 ms'
check 'and the cause is named'                  said '^!! steps: nvidia-smi named no clock'
check 'the other parts'                         gpu 0 again where fp8 big races cpu
check 'where a step goes'                       said '^gemm 12 60.0% 61.5'
check 'by ncu as well'                          said '^NCU: 371 launches'
check 'recipes'                                 lines '^  recipe .*: 122.50 ms, 30.00 GB' "$tmp/said" 4
check 'a larger model'                          said '^GPT-2 1.5B .*: 122.50 ms, 30.00 GB'
check 'races'                                   said '^racecheck test_cuda_attention: status 0'
check 'the CPU'                                 said '^  amx bf16   1: 122.50  2: 122.50  4: 122.50'
check 'an unknown name'                         gpu 2 again nosuch
check 'is told'                                 one_line 'there is no test or part nosuch: name a test'
check 'an unknown mode'                         gpu 2 nosuch
check 'shows the modes'                         said 'tests/cuda/gpu.sh rehearse'

# --- a GPU of capability 9.0 gets the products of warpgroups --------------------------------------------
# Each call of nvcc that builds for the GPU of this machine, for a kit or for a package names sm_90a.
stand_in bin/nvidia-smi 'case "$*" in *compute_cap*) echo 9.0 ;; esac'
calls() {
    PATH=$machine/bin:$PATH make -n V=1 GPU="$1" CUDA="$machine/toolkit" NVCC=a_nvcc BUILD="$tmp/none" \
        "$tmp/none/mixprec_cuda.o" "$tmp/none/gpu/test_cuda" kit-programs 2>&1 | grep 'a_nvcc '
}
reach() {
    calls "$1" >"$tmp/calls"
    grep -q inside.cu "$tmp/calls" && grep -q mixprec_cuda.cu "$tmp/calls" && ! grep -v sm_90a "$tmp/calls"
}
check 'make, on a machine with a 9.0'           reach /dev/nvidia0
without_gpu() { calls '' | grep 'mixprec_cuda.o' | grep -q 'sm_89.*sm_90a.*compute_90 '; }
check 'make cuda, without a GPU'                without_gpu
cmake_lists() { grep -q 'set(CMAKE_CUDA_ARCHITECTURES 80-real 89-real 90a-real 90-virtual)' CMakeLists.txt; }
check 'CMake'                                   cmake_lists
compiled_here() { grep -q 'KIT_ARCH=sm_90a' "$machine/made"; }
check 'a kit that is compiled on the machine'   compiled_here

# A test of a kit may run where there is no build folder.
no_build() { ! grep -n '"build/' tests/*/*.c tests/*/*.cpp tests/*/*/*.c; }
check 'no test writes into build/'              no_build
report
