#!/bin/sh
# mutation.sh - do the tests of mixprec_cuda.cu see its faults? Plants one at a time into a copy and
# passes when the one test that should see it fails, in some schedule of the simulated CUDA.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/mutation.sh [PATTERN]         only faults whose name matches (CUDA, BUILD, CXX, JOBS)
. tests/check.sh
unset MIXPREC_TEST_QUICK          # all schedules

build=${BUILD:-build} CXX=${CXX:-c++} CUDA=${CUDA-/usr/local/cuda} only=$1 count=0
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)}
if [ ! -f "$CUDA/include/cuda_runtime.h" ]; then
    skip "CUDA's headers"
    report
    exit
fi
[ -f "$build/cuda_host.o" ] ||
    ${MAKE:-make} -s BUILD="$build" CUDA="$CUDA" "$build/cuda_host.o" || exit 1

# plant NAME PROGRAM TEST FROM TO [sanitized]: FROM, once in the file, becomes TO; TEST, of
# tests/test_PROGRAM.cpp, must fail. sanitized: as it is the sanitizers that see it.
plant() {
    case $1 in *"$only"*) ;; *) return ;; esac
    count=$((count + 1))
    mkdir "$tmp/$count"
    printf %s "$1" >"$tmp/$count/name"
    printf '%s %s %s\n' "$2" "$3" "${6:-plain}" >"$tmp/$count/test"
    printf %s "$4" >"$tmp/$count/from"
    printf %s "$5" >"$tmp/$count/to"
}

# --- seams, runtime ----------------------------------------------------------------------
plant 'warp_sum: a step is missing'                 cuda_rows norm \
    'for (int k = 16; k; k /= 2) v += __shfl_xor' 'for (int k = 8; k; k /= 2) v += __shfl_xor'
plant 'warp_max: a step is missing'                 cuda_rows softmax \
    'for (int k = 16; k; k /= 2) v = fmaxf' 'for (int k = 16; k > 1; k /= 2) v = fmaxf'
plant 'block_sum: no barrier before the reading'    cuda_rows norm \
    '    __syncthreads();
    v = lane < (int)blockDim.x' '    v = lane < (int)blockDim.x'
plant 'block_sum: no barrier after the reading'     cuda_rows norm \
    'part[lane] : (T)0;
    v = warp_sum(v);
    __syncthreads();' 'part[lane] : (T)0;
    v = warp_sum(v);'
plant 'put8_any: one element too far'               cuda test_unary \
    'if (k < n) put1(a, i + k, v[k]);' 'if (k <= n) put1(a, i + k, v[k]);' sanitized
plant 'is_wide: 8 bytes taken for 16'               cuda test_unary \
    'return (uintptr_t)a.data % 16 == 0; }

/* Blocks' 'return (uintptr_t)a.data % 2 == 0; }

/* Blocks' sanitized
plant 'a replayed step draws the same numbers'      cuda captures \
    'return later ? step + *later : step;' '(void)later; return step;'
plant 'a replay uploads nothing'                    cuda captures \
    'for (i = 0; i < g->count && r == MIXP_OK; i++)' 'for (i = 0; i < 0; i++)'
plant 'the ring of uploads is not waited for'       cuda transfers \
    'if (e == cudaErrorNotReady) e = cudaEventSynchronize(s->sent[i]);' \
    'if (e == cudaErrorNotReady) e = cudaSuccess;'
plant 'faults of kernels are not noted'             cuda_rows embedding_bad \
    'if (*p == FAULT_NONE) *p = fault;' '(void)p; (void)fault;'

# --- elementwise -------------------------------------------------------------------------
plant 'convert in place: no copy aside'             cuda test_convert_in_place \
    'if (dst.data == src.data && out != in' 'if (0 && dst.data == src.data && out != in'
plant 'store8: does not accumulate'                 cuda test_binary \
    'v[k] = __fadd_rn(old[k], v[k]);' 'v[k] = __fadd_rn(0.0f, v[k]);'
plant 'an index of 32 bits'                         cuda large_indexes \
    'int64_t q = (int64_t)__umul64hi((uint64_t)a, inverse);' \
    'a = (uint32_t)a; int64_t q = (int64_t)__umul64hi((uint64_t)a, inverse);'
plant 'over: never one more'                        cuda test_copy \
    'return a - q * n >= n ? q + 1 : q;' 'return q;'
plant 'sum_runs: the last run is left out'          cuda test_reduce \
    'r < m.runs; r += step)' 'r + 1 < m.runs; r += step)'
plant 'sum_rows: every thread stores'               cuda test_reduce \
    'sum = block_sum(sum);
        if (threadIdx.x) continue;' 'if (threadIdx.x) continue;
        sum = block_sum(sum);'

# --- rows --------------------------------------------------------------------------------
plant 'softmax: the sum does not follow its top'    cuda_rows softmax \
    'e.sum *= exp_of(e.top - base);' ''
plant 'block_scan: counts itself twice'             cuda_rows embedding_backward \
    'if (i < warp) before += part[i];' 'if (i <= warp) before += part[i];'
plant 'norm_backward: one buffer instead of two'    cuda_rows norm_backward \
    'parts + (r & 1) * 64' 'parts'
plant 'norm_backward: no barrier in block_sums'     cuda_rows norm_backward \
    'parts[32 + warp] = b; }
    __syncthreads();' 'parts[32 + warp] = b; }'
plant 'norm_back_join: no barrier'                  cuda_rows norm_backward \
    '+ lane] = sum;
    __syncthreads();' '+ lane] = sum;'
plant 'norm_back_join: one row of sums too many'    cuda_rows norm_backward \
    'for (int i = 1; i < join_rows; i++)' 'for (int i = 1; i <= join_rows; i++)'
plant 'embedding: a list overwritten in its use'    cuda_rows embedding_sorted \
    'count++;
        }
        __syncthreads();' 'count++;
        }'
plant 'embedding: an absent id is not cleared'      cuda_rows embedding_backward \
    '(i == end && s.accumulate)) continue;' 'i == end) continue;'
plant 'cross_entropy: the target of another column' cuda_rows cross_entropy \
    'p.col + k * p.step == target' 'p.col + k == target'
plant 'cross_entropy: ignored rows count'           cuda_rows cross_entropy \
    'count += targets[i] != ignore;' 'count += ignore != targets[0] || i;'

# --- optimizers --------------------------------------------------------------------------
plant 'the first block thinks it is the last'       cuda_optimizers gather_plain \
    '*last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;' \
    '*last = atomicInc(arrived, gridDim.x - 1) == 0;'
plant 'the count of blocks does not start again'    cuda_optimizers gather_plain \
    '*last = atomicInc(arrived, gridDim.x - 1)' '*last = atomicInc(arrived, gridDim.x)'
plant 'found_inf is lost'                           cuda_optimizers gather_bad \
    'stats.found_inf = l.bad != nothing_bad;' 'stats.found_inf = 0;'
plant 'a skipped step is applied'                   cuda_optimizers skipped \
    'if (!skip) update_8(' 'update_8('
plant 'gradients to clear are left as they are'     cuda_optimizers adam \
    'if (row.active == 2) clear_8(' 'if (row.active == 3) clear_8('
plant 'every gradient is cleared'                   cuda_optimizers adam \
    'if (row.active == 2) clear_8(' 'if (row.active) clear_8('
plant 'clip: clips by a norm that is none'          cuda_optimizers clip \
    'if (step->stats.found_inf || factor >= 1.0f) return;' 'if (factor >= 1.0f) return;'
plant 'a chunk is overwritten in its use'           cuda_optimizers adam \
    '*found = *here;
    __syncthreads();' '*found = *here;'
plant 'a chunk goes beyond its parameter'           cuda_optimizers gather_plain \
    'return least(c.first + chunk_size, count); }' 'return count ? c.first + chunk_size : 0; }' \
    sanitized

# --- gemm --------------------------------------------------------------------------------
plant 'gemm: tiles overwritten in their use'        cuda_gemm test_tiles \
    'tile_multiply(sums, a, b);
            __syncthreads();' 'tile_multiply(sums, a, b);'
plant 'gemm: does not accumulate'                   cuda_gemm test_tiles \
    'put1(g.c, at, g.accumulate ? y + get1(g.c, at) : y);' 'put1(g.c, at, y);'
plant 'gemm: sums of a packed product do not add'   cuda_gemm test_any_mix \
    'v[e] = v[e] + add[e] + old[e];' 'v[e] = v[e] + add[e];'
plant 'gemm: a plan for another alignment'          cuda_gemm test_any_mix \
    'key.unaligned = (!p.pack_a' 'key.unaligned = 0 & (!p.pack_a'

# --- attention ---------------------------------------------------------------------------
plant 'attention: a query does not see its own key' cuda_attention test_tensor_32 \
    '(h.causal && k > row + e / 2 * 8)) s' '(h.causal && k >= row + e / 2 * 8)) s'
plant 'attention: keys beyond the end count'        cuda_attention test_tensor_32 \
    'if (key + N > h.t || (h.causal && key' 'if ((h.causal && key'
plant 'attention: a copy is not waited for'         cuda_attention test_long \
    'cp_async_wait<1>();
        __syncthreads();
        if (first + row' 'cp_async_wait<2>();
        __syncthreads();
        if (first + row'
plant 'attention: a tile is overwritten in its use' cuda_attention test_long \
    'now, first + row, i * keys);
        __syncthreads();' 'now, first + row, i * keys);'
plant 'attention: a step of the rows sum is missing' cuda_attention test_tensor_32 \
    'sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        inverse' 'inverse'
plant 'attention: the causal mask of dK and dV'     cuda_attention test_tensor_32 \
    '(keys ? j < i : j > i))) s[n][e]' '(keys ? j <= i : j > i))) s[n][e]'
plant 'attention: statistics of the wrong tile'     cuda_attention test_long \
    'statistics[(i + 1) % 2 * 2 * N + (int)threadIdx.x] = ahead;' \
    'statistics[i % 2 * 2 * N + (int)threadIdx.x] = ahead;'
plant 'attention: gradients in bf16 do not add'     cuda_attention test_mixed \
    'if (accumulate) x += low_value(a.dtype, old & 0xFFFFu);' ''
plant 'attention: a step of delta is missing'       cuda_attention test_tensor_64 \
    'for (int k = 4; k; k /= 2) sum += __shfl' 'for (int k = 2; k; k /= 2) sum += __shfl'
plant 'attention in f32: no barrier for the values' cuda_attention test_plain \
    'o[j] *= shrink;
        __syncthreads();' 'o[j] *= shrink;'

# --- how a fault is judged ---------------------------------------------------------------
guard=; command -v timeout >/dev/null 2>&1 && guard='timeout -k 5 120'

# compile DIR PROGRAM plain|sanitized: DIR holds the companion that is tested.
compile() {
    flags=; [ "$3" = sanitized ] && flags='-fsanitize=address,undefined -fno-sanitize-recover=all'
    mkdir -p "$1/tests"
    for file in tests/*.h "tests/test_$2.cpp"; do ln -sf "$PWD/$file" "$1/tests/"; done
    $CXX -std=c++17 -O0 -w -DMIXPREC_CUDASIM -fno-strict-aliasing -ffp-contract=off $flags \
        -isystem "$CUDA/include" -I. -Itests "$1/tests/test_$2.cpp" "$build/cuda_host.o" -lm \
        -o "$1/$2-$3"
}
planted() {
    FROM=$(cat "$1/from"; echo .) TO=$(cat "$1/to"; echo .) awk '
        BEGIN { RS = "\001"; from = ENVIRON["FROM"]; to = ENVIRON["TO"]
                sub(/\.$/, "", from); sub(/\.$/, "", to) }
        { at = index($0, from); rest = substr($0, at + length(from))
          if (!at || index(rest, from)) exit 1
          printf "%s%s%s", substr($0, 1, at - 1), to, rest }' mixprec_cuda.cu >"$1/mixprec_cuda.cu"
}
# run DIR PROGRAM TEST plain|sanitized. One schedule is enough of the longest tests.
run() (
    case $3 in test_tensor_*) export MIXPREC_TEST_QUICK=1 ;; esac
    export ASAN_OPTIONS=detect_leaks=0 MIXPREC_TEST_ONLY="$3"
    $guard "$1/$2-$4"
)
# Leaves the verdict on fault $1 in $1/verdict: killed, or what is wrong.
judge() {
    read -r program test how <"$1/test"
    if ! planted "$1"; then echo 'its text is not in mixprec_cuda.cu once'
    elif ! compile "$1" "$program" "$how" >"$1/log" 2>&1; then
        echo 'does not compile'
        head -n 5 "$1/log"
    elif run "$1" "$program" "$test" "$how" >"$1/log" 2>&1; then echo "survived $program $test"
    else echo killed
    fi >"$1/verdict"
    rm -rf "$1/tests" "$1"/*-plain "$1"/*-sanitized
}

# The sound file passes the same tests.
passes() {
    run "$tmp/sound" "$@" >"$tmp/log" 2>/dev/null &&
        tail -n 1 "$tmp/log" | grep -q '^1 passed, 0 failed'
}
mkdir "$tmp/sound"
cp mixprec_cuda.cu "$tmp/sound/"
cat "$tmp"/*/test | sort -u >"$tmp/tests"
cut -d ' ' -f 1,3 "$tmp/tests" | sort -u >"$tmp/programs"

# Faults $1, $1 + jobs, ...
work() {
    i=$1
    while [ "$i" -le "$count" ]; do judge "$tmp/$i"; i=$((i + jobs)); done
}
pids= j=1
while [ "$j" -le "$jobs" ]; do work "$j" & pids="$pids $!"; j=$((j + 1)); done
trap 'kill $pids 2>/dev/null; exit 130' INT TERM
while read -r program how; do
    check "$program, $how, compiles" compile "$tmp/sound" "$program" "$how"
done <"$tmp/programs"
while read -r program test how; do
    check "sound: $program $test passes" passes "$program" "$test" "$how"
done <"$tmp/tests"
wait $pids
i=1
while [ "$i" -le "$count" ]; do
    verdict() { cat "$tmp/$i/verdict"; [ "$(cat "$tmp/$i/verdict")" = killed ]; }
    check "$(cat "$tmp/$i/name")" verdict
    i=$((i + 1))
done
report
