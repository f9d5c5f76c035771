#!/bin/sh
# mutation.sh - do the tests of mixprec_cuda.cu detect faults? Plants one fault at a time into a
# copy. It passes if the test that should detect the fault fails, in some schedule of the simulated
# CUDA.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/tools/mutation.sh [PATTERN]         only faults whose name matches (CUDA, BUILD, CXX, JOBS)
#   tests/tools/mutation.sh -n [PATTERN]      only checks that each fault changes its line
. tests/support/check.sh
. tests/tools/plants.sh
unset MIXPREC_TEST_QUICK          # all schedules

dry=; [ "$1" = -n ] && { dry=1; shift; }
build=${BUILD:-build} CXX=${CXX:-c++} CUDA=${CUDA-/usr/local/cuda} only=$1 count=0
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)}
if [ -z "$dry" ] && [ ! -f "$CUDA/include/cuda_runtime.h" ]; then
    skip "CUDA's headers"
    report
    exit
fi
[ -n "$dry" ] || [ -f "$build/libmixprec.a" ] ||
    ${MAKE:-make} -s BUILD="$build" CUDA="$CUDA" "$build/libmixprec.a" || exit 1

# By hand, without make's word for it: as the library was built.
[ -n "${OPENMP+set}" ] || ! grep -q -s -e -fopenmp "$build/flags" || OPENMP=-fopenmp

# The compiler that leaves two registers alone, as a GPU's one NaN takes; "": there is none.
canonical=
for c in "$CXX" g++; do
    [ -z "$canonical" ] && echo 'int f();' | "$c" -x c++ -ffixed-xmm14 -fsyntax-only - 2>/dev/null && canonical=$c
done

# plant MARKER WHAT PROGRAM TEST SED [sanitized|canonical]: the sed commands SED, run on the marked line,
# make the fault WHAT; TEST, of tests/cuda/test_PROGRAM.cpp, must fail. sanitized: as it is the
# sanitizers that see it; canonical: with the NaNs of a GPU.
plant() {
    case $2 in *"$only"*) ;; *) return ;; esac
    count=$((count + 1))
    mkdir "$tmp/$count"
    printf %s "$2" >"$tmp/$count/name"
    printf '%s %s %s\n' "$3" "$4" "${6:-plain}" >"$tmp/$count/test"
    echo "$1" >"$tmp/$count/marker"
    printf '%s\n' "$5" >"$tmp/$count/sed"
}

# --- seams, runtime ------------------------------------------------------------------------
plant warp_sum             'warp_sum: a step is missing' \
    cuda_rows norm 's/int k = 16/int k = 8/'
plant warp_max             'warp_max: a step is missing' \
    cuda_rows softmax 's/16; k;/16; k > 1;/'
plant block_sum_write      'block_sum: no barrier before the reading' \
    cuda_rows norm 's/__syncthreads();//'
plant block_sum_read       'block_sum: no barrier after the reading' \
    cuda_rows norm 's/__syncthreads();//'
plant put8_end             'put8_any: one element too far' \
    cuda test_unary 's/k < n/k <= n/' sanitized
plant is_wide              'is_wide: 8 bytes taken for 16' \
    cuda test_unary 's/% 16/% 2/' sanitized
plant later_step           'a replayed step draws the same numbers' \
    cuda captures 's/= d.later.*;/= d.step;/'
plant attention_key        'attention: its dropout does not know replays' \
    cuda_replays tensor_attention 's/key_now(h.draws)/mixp_random_key(h.draws.seed, h.draws.step, h.draws.tensor)/'
plant replay_uploads       'a replay uploads nothing' \
    cuda captures 's/i < g->count/i < 0/'
plant upload_ring          'the ring of uploads is not waited for' \
    cuda transfers 's/= cudaEventSynchronize(.*);/= cudaSuccess;/'
plant fault_noted          'faults of kernels are not noted' \
    cuda_rows embedding_bad 's/\*noted = .*;/(void)what; (void)place; (void)index;/'
plant fault_stop           'a step is applied though an index was bad' \
    cuda_training a_bad_index_applies_no_step 's/\*.*f.stop = 1;//'
plant fault_forgotten      'one fault told, and the next is forgotten' \
    cuda faults 's/if (.*) \*f.stop/*f.stop/'
plant blocking             'the own stream does not wait for the default one' \
    cuda_training kernels_of_the_program 's/cudaStreamDefault/cudaStreamNonBlocking/'
plant recorder             'a capture minds the default stream' \
    cuda_training a_capture_stands_the_default_stream 's/NonBlocking/Default/'
plant stage_own            'the uploads of a graph share their memory' \
    cuda_training a_graph_converts_each_write 's/+= room/+= 0/'
plant kept_upload          'a replay reads what was temporary' \
    cuda_training a_graph_keeps_what_was_temporary 's/!again/0/'
plant foreign_capture      'a capture of the program is not noticed' \
    cuda captures_of_others 's/if (.*) return/return/'
plant other_context        'a context is left on another GPU' \
    cuda no_context_on_other_gpus 's/ && has_context(before)//'

plant graph_freed          'a graph is freed in a capture, where nothing can be' \
    cuda captures 's/if (k.state.*abandon_capture(x);//'
plant mirrors_turn         'what is written to a mirror does not show' \
    cuda peeks 's/= ++\*/= */'
plant load_recorded        'an old driver loads a kernel in a capture' \
    cuda old_drivers 's/return cuda.*;/(void)attributes; return cudaSuccess;/'

# --- elementwise ---------------------------------------------------------------------------
plant convert_aside        'convert in place: no copy aside' \
    cuda test_convert_in_place 's/if (in_place/if (0 \&\& in_place/'
plant cast_computes        'a cast computes with its number: a GPU makes one NaN of all' \
    cuda test_payloads 's/narrow8/for (volatile float one = 1.0f; one > 0.0f; one = 0.0f) for (float \&e : v) e *= one; narrow8/' \
    canonical
plant store8_add           'store8: does not accumulate' \
    cuda test_binary 's/old\[k\]/0.0f/'
plant over_64              'an index of 32 bits' \
    cuda large_indexes 's/int64_t q/a = (uint32_t)a; &/'
plant over_rest            'over: never one more' \
    cuda test_copy 's/return.*;/return q;/'
plant sum_runs_end         'sum_runs: the last run is left out' \
    cuda test_reduce 's/r < m.runs/r + 1 < m.runs/'
plant add_rows             'sum_dense_columns: the rows after the last eight are left out' \
    cuda test_reduce 's/r < rows/rows == 8/'
plant sum_many_barrier     'sum_many_runs: no barrier' \
    cuda test_reduce 's/__syncthreads();//'
plant sum_many_end         'sum_many_runs: one sum too few' \
    cuda test_reduce 's/i < sums_each/i + 1 < sums_each/'
plant add_low              'map_low: does not accumulate' \
    cuda low_functions 's/old\[k\]/0.0f/'
plant sum_rows             'sum_rows: every thread stores' \
    cuda test_reduce 's/sum = .*;/if (threadIdx.x) continue;/; n; s/if .*;/sum = block_sum(sum);/'

# --- rows ----------------------------------------------------------------------------------
plant softmax_top          'softmax: the sum does not follow its top' \
    cuda_rows softmax 's/e\.sum.*;//'
plant block_scan           'block_scan: counts itself twice' \
    cuda_rows embedding_backward 's/i < warp/i <= warp/'
plant norm_back_buffers    'norm_backward: one buffer instead of two' \
    cuda_rows norm_backward 's/(r & 1) \* 64/0/'
plant block_sums           'norm_backward: no barrier in block_sums' \
    cuda_rows norm_backward 's/__syncthreads();//'
plant kept_rstd            'norm_kept_rows: what lies beyond the row counts' \
    cuda_rows kept_rows 's/if (.*) add_long/add_long/'
plant back_next            'norm_back_kept: the last row twice' \
    cuda_rows kept_rows 's/r + 1, col/r, col/'
plant add_rounded          'add_norm: the norm of what was not rounded' \
    cuda_rows add_norm 's/plain_round.*;//'
plant back_db              'norm_back_slices: no second gradient' \
    cuda_rows norm_db 's/if (.*;//'
plant kept_db              'norm_back_kept: no second gradient' \
    cuda_rows norm_db 's/A == MIXP_F32/A == MIXP_F16/'
plant fetch_wait           'cross_entropy_both: a row is not waited for' \
    cuda_rows cross_entropy_both 's/cp_async_wait.*;//'
plant both_target          'cross_entropy_both: the target is not told from the others' \
    cuda_rows cross_entropy_both 's/target_value(s, r)/0.0f/'
plant norm_join            'norm_back_join: no barrier' \
    cuda_rows norm_backward 's/__syncthreads();//'
plant norm_join_end        'norm_back_join: one row of sums too many' \
    cuda_rows norm_backward 's/i < join_rows/i <= join_rows/'
plant embedding_next       'embedding: a place read in the middle of its change' \
    cuda_rows embedding_sorted 's/__syncwarp();//'
plant embedding_ahead      'embedding: 8 rows ahead are the first of them' \
    cuda_rows embedding_sorted 's/order\[i + r\]/order[i]/'
plant embedding_absent     'embedding: an absent id is not cleared' \
    cuda_rows embedding_backward 's/(i == end && [a-z.]*)/i == end/'
plant entropy_hot          'cross_entropy: the target of another column' \
    cuda_rows cross_entropy 's/k \* p.step == hot_at/k == hot_at/'
plant entropy_ignored      'cross_entropy: ignored rows count' \
    cuda_rows cross_entropy_of_many_rows 's/target.k. != s.ignore/1/'
plant entropy_ahead        'cross_entropy: the mean takes one row for eight' \
    cuda_rows cross_entropy_of_many_rows 's/loss.k./loss[0]/'
plant both_next            'cross_entropy_both: the row after the next' \
    cuda_rows cross_entropy_both 's/r + team_step<T>()/r + 2 * team_step<T>()/'
plant quantise_parts       'quantise: the smallest part gives the amax' \
    cuda_recipes same_numbers 's/] > most/] < most/'
plant quantise_team        'quantise: a step to the largest of a team is missing' \
    cuda_recipes same_numbers 's/k; k/k > 1; k/'
plant quantise_found       'quantise: the columns are not waited for' \
    cuda_recipes same_numbers 's/__syncthreads();//'
plant quantise_times       'quantise: the factor of the other operand is lost' \
    cuda_recipes factors 's/q.k.times ? .q.k.times : 1.0f/1.0f/'
plant quantise_key         'quantise: its rounding does not know replays' \
    cuda_recipes replays 's/key_now(q.draws)/mixp_random_key(q.draws.seed, q.draws.step, q.draws.tensor)/'
plant entropy_smooth       'cross_entropy: smoothing takes the mean for the target' \
    cuda_functions test_smooth 's/(double)below - (double)top/(double)top - (double)below/'
plant max_first            'max: the last of equals' \
    cuda_functions test_max 's/a.index < b.index/a.index > b.index/'

# --- recipes -------------------------------------------------------------------------------
# --- narrow products -----------------------------------------------------------------------
plant narrow_scale_rows    'narrow: a block of rows takes the scale of a block of columns' \
    cuda_narrow products 's/e.over_rows ? s : outer/outer/; s/e.over_rows ? outer : s/s/'
plant narrow_scale_wide    'narrow: the scales of a row of blocks begin where those of elements would' \
    cuda_narrow products 's/over(.*)/e.cols/'
plant narrow_over_rows     'narrow: a sum over rows reads along a row' \
    cuda_narrow products 's/e->over_rows ? narrow_codes_across : //'
plant narrow_place         'narrow: codes lie in the order of the values' \
    cuda_narrow products 's/(o + c) \* e.rows + s/s * e.cols + o + c/'
plant narrow_words         'narrow: codes of 4 bits stand 8 apart' \
    cuda_narrow products 's/i % 8 \* 4/i % 4 * 8/'
plant narrow_second        'narrow: the second column of a pair is the first' \
    cuda_narrow products 's/c ? pairs.i. & 0xFFFF0000u : //'
plant narrow_along         'narrow: the first 8 elements of a thread are the last, too' \
    cuda_narrow products 's/ + 8, v/, v/'
plant narrow_scale         'narrow: codes keep their scale' \
    cuda_narrow products 's/e.how.scales ? .* : 1.0f/1.0f/'
plant narrow_tile          'narrow: scales of a tile in their own order' \
    cuda_narrow products 's/in \/ 4 % 4 \* 32 + in \/ 16/in \/ 4/'
plant narrow_tiles         'narrow: a row of tiles repeats its first' \
    cuda_narrow products 's/tile % across \* tile_blocks + //'
plant narrow_padding       'narrow: scales beyond the operand are read' \
    cuda_narrow products 's/o < outer && b < blocks/o < outer/'
plant narrow_pitch         'narrow: the scales of squares are not padded to 4' \
    cuda_narrow products 's/round_up(blocks, 4)/blocks/'
plant narrow_squares       'narrow: all squares have the scales of the first rows' \
    cuda_narrow products 's/i \/ pitch \* 128/i \/ pitch/'
plant narrow_rows          'narrow: the scales of a row lie behind each other' \
    cuda_narrow products 's/: i % rows/: i \/ blocks/; s/: i \/ rows/: i % blocks/'
plant narrow_inf           'narrow: an Inf becomes the largest value' \
    cuda_narrow odd_numbers 's/, saturate/, true/'
plant narrow_bias          'narrow: an f32 bias is read as bf16' \
    cuda_narrow unfit 's/&& g.bias.dtype == MIXP_BF16 //'
plant narrow_modes         'narrow: both operands have the scales of a' \
    cuda_narrow products 's/16 \* p.mode_b/16 * p.mode_a/'
plant narrow_dtypes        'narrow: b is taken to be of the dtype of a' \
    cuda_narrow products 's/key.dtype_b = g.b.dtype/key.dtype_b = g.a.dtype/'
plant narrow_point         'narrow: the scales of a and b are exchanged' \
    cuda_narrow products 's/p.scales_a, p.scales_b/p.scales_b, p.scales_a/'
plant quantise_scales      'narrow: the scale of a block goes to its thread block' \
    cuda_narrow products 's/b + own/own/'
plant cuda_turn_moves      'turn: a history stays where it is' \
    cuda_recipes turned 's/i - 1/i/'
plant cuda_turn_barrier    'turn: a part moves before its neighbours are read' \
    cuda_recipes turned 's/__syncthreads();//'
plant cuda_turn_loop       'turn: the oldest amax does not count' \
    cuda_recipes turned 's/first = 1/first = 2/'
plant cuda_turn_loop       'turn: one thread block reads a part of a long history' \
    cuda_recipes turned 's/first < length/first == 1/'
plant cuda_turn_last       'turn: the newest amax is not kept' \
    cuda_recipes turned 's/= newest/= 0.0f/'
plant cuda_turn_first      'turn: the newest amax stays in its place' \
    cuda_recipes turned 's/history.*;//'
plant cuda_turn_scale      'turn: the scale follows the newest amax' \
    cuda_recipes turned 's/newest, largest/newest, newest/'
plant cuda_turn_scale      'turn: the scale of another operand' \
    cuda_recipes turned 's/scales.i. =/scales[0] =/'
plant cuda_turn_unused     'turn: an operand without an amax turns' \
    cuda_recipes turned 's/if .*;//'
plant cuda_turn_operand    'turn: each operand has the first history' \
    cuda_recipes turned 's/(int64_t)i/0/'
plant lose_tree            'lose: a step of the tree is missing' \
    cuda_recipes lost 's/k; k/k > 1; k/'
plant lose_barrier         'lose: no barrier in the tree' \
    cuda_recipes lost 's/__syncthreads();//'
plant lose_clipped         'lose: clipped values count twice' \
    cuda_recipes lost 's/t + k/t/'
plant lose_decode          'lose: the factor of y is lost' \
    cuda_recipes lost 's/(double)\*q.k.decode/1.0/'
plant lose_scale           'lose: a value is clipped by its own size' \
    cuda_recipes lost 's/(double)\*q.k.scale/1.0/'
plant lose_stride          'lose: elements are measured twice' \
    cuda_recipes lost 's/ \* 8//'
plant lose_parts           'lose: the last part is left out' \
    cuda_recipes lost 's/< q.part_count/+ 1 < q.part_count/'
plant lose_begin           'lose: the first scale is judged' \
    cuda_recipes lost 's/ || (.*)) return/) return/'
plant lose_mean            'lose: the mean is over the zeros, too' \
    cuda_recipes lost 's/(double)sum.seen/(double)q.k.n/'
plant lose_most            'lose: a smaller share overwrites a larger one' \
    cuda_recipes lost 's/if ([^)]*) //'
plant lose_seen            'lose: the other operands are forgotten' \
    cuda_recipes lost 's/|=/=/'
plant recode_at            'recode: the scales of another row of blocks' \
    cuda_recipes recoded 's,over(.*),& / 2,'
plant recode_columns       'recode: each 16 columns have the same scales' \
    cuda_recipes recoded 's/(i - row \* q.k.cols)/(i - row * q.k.cols) % 16/'
plant recode_inverse       'recode: values are multiplied by a power of two that divides them' \
    cuda_recipes recoded 's/inverse ? inverse_/true ? mixpi_/'
plant recode_wide_scales   'recode: 8 scales at an address of 1 byte' \
    cuda_recipes recoded 's/=.*;/= true;/' sanitized
plant fp8_top              'fp8: codes of the processor that saturate stay' \
    cuda test_convert_fp8 's/if (.*) return/return/'
plant fp8_half             'fp8: 464 is beyond e4m3' \
    cuda test_convert_fp8 's/a > 0x43E8/a >= 0x43E8/'
plant fp8_payload          'fp8: a NaN of e5m2 loses its payload' \
    cuda test_convert_fp8 's/ | (u >> 21 & 1u)//'
plant fp8_grid_inf         'quantise: an Inf becomes the largest value' \
    cuda_recipes every_bf16 's/finite ? number.j. : scaled.j./number[j]/'
plant recode_low           'recode: the halves of a byte change places' \
    cuda_recipes recoded 's/4 \* j/4 * (j ^ 1)/'
plant recode_value         'recode: the codes are read from the end' \
    cuda_recipes recoded 's/4 \* j/4 * (7 - j)/'
plant recode_high          'recode: a code falls on another' \
    cuda_recipes recoded 's/words.1./words[0]/'
plant recode_put           'recode: half of the codes are not written' \
    cuda_recipes recoded 's/if (!narrow)/if (0)/'
plant recode_get           'recode: the first four codes are read twice' \
    cuda_recipes recoded 's/(p + 4)/p/'
plant recode_times         'recode: the factor of the other operand is lost' \
    cuda_recipes recoded 's/q.k.times ? .q.k.times : 1.0f/1.0f/'
plant recode_divides       'recode: values are multiplied by their scale' \
    cuda_recipes recoded 's,/ s.j.,* s[j],'
plant recode_reciprocal    'recode: e2m1 is multiplied by its scale' \
    cuda_recipes every_code 's/rcp_approx(s)/s/'
plant recode_near          'recode: a quotient of e2m1 is not rounded' \
    cuda_recipes every_code 's/ + 0x200000u//'
plant recode_wide          'recode: 8 codes at an address of 1 byte' \
    cuda_recipes recoded 's/ && is_wide(k->codes)//' sanitized
plant lines_row            'quantise: the scale of each row is that of the first' \
    cuda_recipes same_numbers 's/(b + own) \* q.k.block_cols/0 * q.k.block_cols/'
plant lines_columns        'quantise: only a warp looks at columns' \
    cuda_recipes same_numbers 's/w < warps/w < 1/'
plant over6_rows           '4over6: the errors of the rows for 6 are not added' \
    cuda_recipes same_numbers 's/__fadd_rn(e.six, \(.*\));/(\1);/'
plant over6_row            '4over6: each row of a square is the first' \
    cuda_recipes same_numbers 's/threadIdx.x % 16/0/'
plant quantise_code        'quantise: the codes are those of the inverse scales' \
    cuda_recipes recoded 's/s.out/s.in/'
plant quantise_code_at     'quantise: the codes of the scales lie in the first row' \
    cuda_recipes recoded 's,strip,0,'
plant cuda_hadamard_at     'hadamard: every 16 rows are the first' \
    cuda_recipes hadamard 's/ \* 16 \* k.cols/ * k.cols/'
plant cuda_hadamard_sign   'hadamard: the signs are lost' \
    cuda_recipes hadamard 's/mixpi_hadamard_sign(i)/1.0f/'
plant cuda_hadamard_step   'hadamard: a step is missing' \
    cuda_recipes hadamard 's/< 16/< 8/'
plant cuda_hadamard_half   'hadamard: a difference has the wrong sign' \
    cuda_recipes hadamard 's/a - b/b - a/'
plant cuda_hadamard_size   'hadamard: not divided by 4' \
    cuda_recipes hadamard 's/ \* 0.25f//'

# --- optimizers ----------------------------------------------------------------------------
plant last_block           'the first block thinks it is the last' \
    cuda_optimizers gather_plain 's/== gridDim.x - 1;/== 0;/'
plant last_block           'the count of blocks does not start again' \
    cuda_optimizers gather_plain 's/gridDim.x - 1)/gridDim.x)/'
plant gather_found         'found_inf is lost' \
    cuda_optimizers gather_bad 's/= l.bad.*;/= 0;/'
plant update_skip          'a skipped step is applied' \
    cuda_optimizers skipped 's/if (!skip) //'
plant update_clear         'gradients to clear are left as they are' \
    cuda_optimizers adam 's/active == 2/active == 3/'
plant update_clear         'every gradient is cleared' \
    cuda_optimizers adam 's/active == 2/active/'
plant clip_nothing         'clip: clips by a norm that is none' \
    cuda_optimizers clip 's/[a-z>.-]*found_inf || //'
plant chunk_here           'a chunk is overwritten in its use' \
    cuda_optimizers adam 's/__syncthreads();//'
plant chunk_end            'a chunk goes beyond its parameter' \
    cuda_optimizers gather_plain 's/return least(\(.*\), count);/return count ? \1 : 0;/' sanitized

# --- gemm ----------------------------------------------------------------------------------
plant gemm_tiles           'gemm: tiles overwritten in their use' \
    cuda_gemm test_tiles 's/__syncthreads();//'
plant gemm_add             'gemm: does not accumulate' \
    cuda_gemm test_tiles 's/g.c.accumulate ? .* : y/y/'
plant gemm_packed_add      'gemm: sums of a packed product do not add' \
    cuda_gemm test_any_mix 's/ + old\[e\];/;/'
plant gemm_aligned         'gemm: a plan for another alignment' \
    cuda_gemm test_any_mix 's/if (!p/if (0 \&\& !p/'
plant gemm_bias            'gemm: a bias is promised to be aligned to more than 16 bytes' \
    cuda_gemm test_direct 's/ + 16//'
plant heuristic_failed     'gemm: a failure of the heuristic is taken for a refusal' \
    cuda_gemm test_failures 's/!is_refusal(e)/0/'
plant product_refused      'gemm: what cuBLASLt takes back ends the run' \
    cuda_gemm test_refused 's/e = CUBLAS_STATUS_SUCCESS;/return MIXP_ERR_DEVICE;/'
plant clear_refusal       'gemm: an error of the program goes with a refusal' \
    cuda_gemm test_refused 's/if (before == cudaSuccess) //'
plant sums_add             'gemm: sums that add are overwritten' \
    cuda_products test_sums 's/!k.sums.accumulate/true/'
plant choice_taken         'gemm: nobody looks at the choices' \
    cuda_products test_choices 's/ || p->given//'
plant choice_check         'gemm: a choice is not checked' \
    cuda_products test_choices_checked 's/c.none/true/'
plant digit_count          'gemm: a word of more digits than it has room for' \
    cuda_products test_choices_words 's/ \&\& count < 16//'
plant choice_head          'gemm: choices of another GPU are taken' \
    cuda_products test_choices_elsewhere 's/return MIXP_ERR_SHAPE;/text = strchr(text, 10) + 1;/'
plant measured_least       'gemm: measuring keeps the last algorithm' \
    cuda_products test_measured 's/if (.*) best/best/'
plant measured_aside       'gemm: trials add to the result' \
    cuda_products test_measured_values 's/if (c).*;//'
plant measured_apart       'gemm: a joined product is taken though it is slower' \
    cuda_products test_measured_epilogues 's/if (median_of.*) plan/if (0) plan/'
plant most_batch           'gemm: more matrices than cuBLASLt takes' \
    cuda_gemm test_large_batch 's/65535/70000/'

# --- attention -----------------------------------------------------------------------------
plant attention_own_key    'attention: a query does not see its own key' \
    cuda_attention test_tensor_32 's/k > row/k >= row/'
plant attention_keys_end   'attention: keys beyond the end count' \
    cuda_attention test_tensor_32 's/key + N > end || //'
plant attention_copy       'attention: a copy is not waited for' \
    cuda_attention test_long 's/wait<1>/wait<2>/'
plant attention_tile       'attention: a tile is overwritten in its use' \
    cuda_attention test_long 's/__syncthreads();//'
plant forward_left         'attention: a block without keys leaves a copy on its way' \
    cuda_attention_apart test_padding 's/cp_async_wait<0>();//'
plant backward_left        'attention: keys that nobody sees leave a copy on its way' \
    cuda_attention_apart test_padding 's/cp_async_wait<0>();//'
plant attention_row_sum    'attention: a step of the rows sum is missing' \
    cuda_attention test_tensor_32 's/sum += .*;//'
plant attention_back_mask  'attention: the causal mask of dK and dV' \
    cuda_attention test_tensor_32 's/ahead < i/ahead <= i/'
plant attention_statistics 'attention: statistics of the wrong tile' \
    cuda_attention test_long 's/(i + 1) % 2/i % 2/'
plant attention_low_add    'attention: gradients in bf16 do not add' \
    cuda_attention test_mixed 's/if (a.accumulate).*;//'
plant attention_delta      'attention: a step of delta is missing' \
    cuda_attention test_tensor_64 's/sum += .*;//'
plant attention_met        'attention: heads of a group do not share their keys' \
    cuda_attention_apart test_grouped 's,/ h.group,% h.group,'
plant attention_slope      'attention: the cap lets every gradient through' \
    cuda_attention_apart test_mixes 's/fmaf(-part, part, 1.0f)/1.0f/'
plant attention_draw       'attention: dropout of the wrong element' \
    cuda_attention_apart test_wide 's/h.keys/h.t/'
plant attention_padding    'attention: padding has a gradient' \
    cuda_attention_apart test_padding 's/own < to.end/own >= 0/'
plant attention_bent       'attention: what was dropped passes a gradient' \
    cuda_attention_apart test_wide 's/ \* kept//'
plant attention_far        'attention: a mask far from 0 is rounded before it is subtracted' \
    cuda_attention_apart test_far 's/exp_from<modified>/exp_from<false>/'
plant attention_turn       'attention: the second head of a group is masked as the first' \
    cuda_attention_apart test_mixes 's/ + i . tiles//'
plant attention_begin      'attention: keys begin one block of queries late' \
    cuda_attention_apart test_grouped 's/first - h.ahead/first/'
plant attention_plain      'attention in f32: a tile is overwritten in its use' \
    cuda_attention test_plain 's/__syncthreads();//'

# --- a guard -----------------------------------------------------------------------------
plant look_least           'look: a tie counts as the smallest subnormal' \
    cuda_guard look 's/v < at.least/v <= at.least/'
plant note_bad             'a loss that is not finite goes unnoticed' \
    cuda_guard forgive 's/\*bad = 1;/;/'
plant collect              'what was posted is not waited for' \
    cuda_guard what_was_found_arrives_late 's/cudaEventSynchronize(.*), "collect"/cudaSuccess, "collect"/'

# --- how a fault is judged ---------------------------------------------------------------
guard=; command -v timeout >/dev/null 2>&1 && guard='timeout -k 5 120'

# compile DIR PROGRAM plain|sanitized|canonical: DIR holds the companion that is tested.
compile() {
    flags=; [ "$3" = sanitized ] && flags='-fsanitize=address,undefined -fno-sanitize-recover=all'
    source=$(find tests -name "test_$2.cpp")
    set -- "$1/$2-$3" "$3" -std=c++17 -O0 -w -DMIXPREC_CUDASIM -fno-strict-aliasing -ffp-contract=off \
        $flags -isystem "$CUDA/include" -I"$1" -I. -Itests -Itests/support
    to=$1 how=$2
    shift 2
    if [ "$how" = canonical ]; then
        $canonical "$@" -mavx -ffixed-xmm14 -ffixed-xmm15 -DCUDASIM_ONE_NAN -S "$source" -o "$to.raw" &&
            awk -f tests/cuda/canonical_nan.awk "$to.raw" >"$to.s" || return 1
        rm -f "$to.raw"
        source=$to.s
        set --
    fi
    $CXX "$@" "$source" "$build/libmixprec.a" ${OPENMP-} -lm -o "$to"
}
# run DIR PROGRAM TEST plain|sanitized|canonical. One schedule is enough of the longest tests.
run() (
    case $3 in test_tensor_*) export MIXPREC_TEST_QUICK=1 ;; esac
    export ASAN_OPTIONS=detect_leaks=0 MIXPREC_TEST_ONLY="$3"
    $guard "$1/$2-$4"
)
# Leaves the verdict on fault $1 in $1/verdict: killed, or what is wrong.
judge() {
    read -r program test how <"$1/test"
    if ! plant_apply mixprec_cuda.cu "$(cat "$1/marker")" "$(cat "$1/sed")" "$1/mixprec_cuda.cu"; then :
    elif [ "$how" = canonical ] && [ -z "$canonical" ]; then echo skipped
    elif ! compile "$1" "$program" "$how" >"$1/log" 2>&1; then
        echo 'does not compile'
        head -n 5 "$1/log"
    elif run "$1" "$program" "$test" "$how" >"$1/log" 2>&1; then echo "survived $program $test"
    else echo killed
    fi >"$1/verdict"
    rm -rf "$1"/*-plain "$1"/*-sanitized "$1"/*-canonical*
}

# Every marker has its fault: one that is left over says that a plant was lost.
used() {
    plant_names mixprec_cuda.cu >"$tmp/marked"
    cat "$tmp"/*/marker | sort -u | diff "$tmp/marked" -
}
[ -n "$only" ] || check 'every line listed has a fault' used

applies() { plant_apply mixprec_cuda.cu "$(cat "$1/marker")" "$(cat "$1/sed")" "$1/dry.cu"; }
if [ -n "$dry" ]; then
    i=1
    while [ "$i" -le "$count" ]; do
        check "$(cat "$tmp/$i/name")" applies "$tmp/$i"
        i=$((i + 1))
    done
    report
    exit
fi

# The sound file passes the same tests.
passes() {
    run "$tmp/sound" "$@" >"$tmp/log" 2>/dev/null &&
        tail -n 1 "$tmp/log" | grep -q '^1 passed, 0 failed'
}
mkdir "$tmp/sound"
cp mixprec_cuda.cu "$tmp/sound/"
cat "$tmp"/*/test | sort -u >"$tmp/tests"
if [ -z "$canonical" ]; then
    grep -v ' canonical$' "$tmp/tests" >"$tmp/tests.plain"
    mv "$tmp/tests.plain" "$tmp/tests"
fi
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
    if [ "$(cat "$tmp/$i/verdict")" = skipped ]; then skip "$(cat "$tmp/$i/name"): needs gcc on x86-64"
    else check "$(cat "$tmp/$i/name")" verdict
    fi
    i=$((i + 1))
done
report
