#!/bin/sh
# mutation_c.sh - do the C tests detect faults of mixprec.h? Plants one fault at a time into a copy,
# in lines of every section that tests/tools/plants.txt lists. It passes if the test that should detect the fault fails.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/tools/mutation_c.sh [-s SEED]       a third, drawn by SEED (default: the day of the year)
#   tests/tools/mutation_c.sh -a              all faults
#   tests/tools/mutation_c.sh NAME...         the faults in the lines of these names (CC, BUILD, JOBS)
#   tests/tools/mutation_c.sh -n              only checks that each fault changes its line
#
# Builds are unoptimised and without SIMD, because all instruction sets share one text. The suffix
# _simd of a program's name builds it with all instruction sets, _avx512 if the machine has AVX-512.
. tests/support/check.sh
. tests/tools/plants.sh
unset MIXPREC_TEST_QUICK

CC=${CC:-cc} seed=$(date +%j) share=3 names= dry=
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)}
case $1 in
    -a) share=1 ;;
    -n) share=1 dry=1 ;;
    -s) seed=$2 ;;
    ?*) share=1 names=" $* " ;;
esac
guard=; command -v timeout >/dev/null 2>&1 && guard='timeout -k 5 60'

# --- what is planted: the operators, by sed; each takes the first place that fits ----------
operator() {
    case $1 in
    turn)       # a comparison turned
        printf '%s\n' 's/==/!=/;t;s/!=/==/;t;s/ >= / < /;t;s/ <= / > /;t;s/ < / >= /;t;s/ > / <= /' ;;
    bound)      # a bound off by one
        printf '%s\n' 's/ >= / > /;t;s/ <= / < /;t;s/ < / <= /;t;s/ > / >= /' ;;
    drop)       # the line's first statement left out
        printf '%s\n' 's/[^ ][^;]*;/;/' ;;
    never)      # a condition that never holds
        printf '%s\n' 's/if (\(.*\)) \(.*[;{]\)/if (0 \&\& (\1)) \2/' ;;
    always)     # a condition that always holds
        printf '%s\n' 's/if (\(.*\)) \(.*[;{]\)/if (1 || (\1)) \2/' ;;
    logic)      # and for or, or for and
        printf '%s\n' 's/ && / || /;t;s/ || / \&\& /' ;;
    sign)       # a sum for a difference, or the other way
        printf '%s\n' 's/ + / - /;t;s/ += / -= /;t;s/ - / + /;t;s/ -= / += /' ;;
    factor)     # a product for a quotient, or the other way
        printf '%s\n' 's| \* | / |;t;s| / | * |;t;s| \*= | /= |;t;s| /= | *= |' ;;
    more)       # a count one too large
        printf '%s\n' 's/\([a-z_]\)\(;\|)\)/\1 + 1\2/' ;;
    zero)       # nothing is assigned
        printf '%s\n' 's/ = [^;]*;/ = 0;/' ;;
    yes)        # a check that accepts everything
        printf '%s\n' 's/return [^;]*;/return 1;/' ;;
    no)
        printf '%s\n' 's/return [^;]*;/return 0;/' ;;
    swap)       # the two arguments of a choice
        printf '%s\n' 's/ ? \([^:]*\) : \([^;)]*\)/ ? \2 : \1/' ;;
    *) return 1 ;;
    esac
}

# plant MARKER OPERATOR PROGRAM TEST: TEST of test_PROGRAM.c must fail.
plant() { echo "$1 $2 $3 $4" >>"$tmp/plants"; }

plant pack_tie           bound   formats     narrow_f64_around_midpoints
plant unpack_subnormal   drop    formats     decode_every_code
plant max_code           turn    formats     constants_match_codes
plant integer_limit      drop    formats     integers
plant stochastic         bound   formats     stochastic_threshold
plant scaler_floor       swap    scaler      test_backoff_stops
plant scaler_hysteresis  drop    scaler      test_presets
plant scaler_ceiling     drop    scaler      test_presets
plant scaler_past        drop    step        test_scales_remembered
plant scaler_delay       zero    scaler      test_presets
plant axes_adjoin        turn    formats     copy_strided
plant axes_part          drop    numerics    swiglu_of_two_columns
plant unary_by_result    never   kernels     test_unary_backward
plant binary_sign        logic   kernels     test_binary
plant dropout_scale      factor  kernels     test_dropout_and_scale
plant dropout_range      logic   kernels     test_dropout_and_scale
plant log_softmax        drop    kernels     test_softmax
plant softmax_slope      zero    kernels     test_softmax
plant norm_eps           sign    kernels     test_norm
plant norm_mean          drop    kernels     test_norm
plant norm_slope         factor  kernels     test_norm
plant norm_beta          drop    kernels     test_norm
plant add_norm_sum       drop    kernels     test_norm
plant norm_db            drop    kernels     test_norm
plant norm_told          drop    add_norm    gradients_are_those_of_two_operators
plant norm_sum_kept      never   add_norm    gradients_are_those_of_two_operators
plant entropy_walked     zero    scaled_entropy misuse_is_told
plant entropy_spent      drop    scaled_entropy misuse_is_told
plant term_readers       drop    add_norm    a_disposable_term_is_given_back
plant embedding_absent   logic   kernels     test_embedding
plant entropy_hot        drop    kernels     test_cross_entropy
plant entropy_rsum       drop    kernels     test_cross_entropy
plant clamp_low          drop    kernels     test_special
plant bad_first          always  optimizers  test_finds_the_bad_element
plant bad_is_nan         zero    optimizers  test_finds_the_bad_element
plant clip_nothing       logic   optimizers  test_clip_of_a_bad_gradient
plant agree_lowest       logic   ranks       planted_inf
plant agree_found        zero    ranks       planted_inf
plant agree_forward      zero    ranks       guarded_skips
plant ranks_awaited      drop    ranks       buckets
plant part_first         logic   ranks       scattered_inf
plant part_norm          zero    ranks       scattered
plant part_element       sign    ranks       scattered_inf
plant unscaled_pieces    drop    ranks       in_pieces
plant buckets_order      drop    ranks       scattered
plant scattered_view     logic   ranks       in_pieces
plant attention_last     swap    attention   any_size_and_mix
plant attention_reach    sign    attention_apart odd_sizes
plant attention_first    sign    attention_apart odd_sizes
plant attention_met      factor  attention_apart any_mix
plant attention_padding  swap    attention_apart any_mix
plant attention_past     sign    attention_apart any_mix
plant attention_mask_at  sign    attention_apart any_mix
plant attention_unseen   turn    attention_apart blocks_that_some_queries_see
plant attention_draw     sign    attention_apart any_mix
plant attention_slope    drop    attention_apart any_mix
plant attention_tossed   drop    attention   repeated_tops
plant attention_drops_dy drop    attention_apart any_mix
plant attention_none     never   attention_apart what_sees_nothing_is_zero
plant attention_aliased  never   attention_apart gradients_are_differences
plant attention_mask_step swap   attention_apart values_are_pytorchs
plant max_first          drop    functions   test_ties
plant max_ties           factor  functions   test_ties
plant max_shared         turn    functions   test_ties
plant entropy_smooth     factor  functions   test_against_torch
plant product_again      logic   functions   test_products
plant rope_back          turn    functions   test_against_torch
plant fan_in             factor  functions   test_initialisers
plant missed             drop    optimizers  test_missing_gradients
plant state_floor        swap    states      test_codes_of_v
plant master_nan         sign    states      test_masters_of_16_bits
plant cautious           logic   states      test_cautious
plant muon_unit          swap    muon        test_f32_as_pytorch
plant muon_tall          turn    muon        test_f32_as_pytorch
plant arena_again        turn    ledger      memory_is_not_scattered
plant round_up           sign    tensors     test_activation_of_last_step_is_refused
plant shape_limit        turn    tensors     test_a_name_is_used_once
plant shape_one          bound   jvp         test_of_nothing
plant buffer_keep        drop    buffers     test_ways
plant buffer_window      always  buffers     test_accumulation
plant buffer_valid       turn    buffers     test_ways
plant buffer_flags       drop    buffers     test_two_optimizers
plant buffer_computed    logic   buffers     test_meant
plant buffer_recover     always  buffers     test_failed_step
plant buffer_skips       drop    buffers     test_spoilt
plant turn_inf           never   delayed     against_emulation
plant name_used          always  tensors     test_a_name_is_used_once
plant first_error        turn    tensors     test_first_error_sticks
plant uniform            factor  tensors     test_init_moments_and_repeatability
plant normal             factor  tensors     test_init_moments_and_repeatability
plant view_aligned       drop    tensors     test_bad_shapes_and_arguments
plant region_refused     swap    autocast    test_regions_nest_and_restore
plant region_no_grad     logic   autocast    test_blocks_on_one_line
plant region_close       turn    autocast    test_open_and_close
plant region_unopened    always  autocast    test_bad_regions
plant region_leave       sign    autocast    test_regions_nest_and_restore
plant region_told        drop    autocast    test_blocks_left_open_are_told_and_closed
plant level_two          swap    autocast    test_dtype_of_every_operator
plant widest             swap    autocast    test_promotion_takes_the_widest
plant low_version        drop    autocast    test_cache_casts_once_and_is_never_stale
plant weight_hits        never   autocast    test_cache_casts_once_and_is_never_stale
plant override           drop    autocast    test_banned_and_override
plant mark_mixed         drop    step        test_two_scales_in_one_sum
plant double_backward    logic   operators   test_no_double_backward
plant embedding_shape    drop    every_operator every_tangent_and_gradient
plant dropout_key        zero    operators   test_dropout_is_keyed_and_scaled
plant reshape_known      logic   operators   test_bad_inputs_name_the_rule
plant tangent_l1         never   every_operator every_tangent_and_gradient
plant tangent_target     never   every_operator every_tangent_and_gradient
plant traits_shrink      no      guard_traits the_list_has_its_traits
plant concat_others      logic   operators   test_gradients
plant concat_first       drop    operators   test_gradients
plant kept_grad          logic   operators   test_a_kept_gradient_is_not_handed_on
plant lent_kept          logic   gradient_memory sums_of_all_kinds_share_their_gradients
plant settle_own         zero    gradient_memory sums_of_all_kinds_share_their_gradients
plant settle_inputs      zero    gradient_memory a_users_operator_never_reads_where_it_writes
plant mark_true          drop    walks       a_freed_scalers_gradients_are_true
plant call_constant      zero    walks       frozen_is_frozen
plant grad_lacks         drop    walks       memory_is_refused_in_a_walk
plant grad_over_spent    drop    walks       disposable_logits_are_walked_once
plant entropy_at         zero    walks       the_scale_moves_before_the_walk
plant product_version    never   walks       what_was_written_is_not_walked
plant written_origin     drop    stale       written_through_another_shape
plant records_turn       zero    stale       a_state_kept_as_a_tensor
plant stale              no      stale       every_call_refuses_it
plant bucket_frozen      never   walks       what_is_frozen_stays_among_ranks
plant noted_since        turn    hostile     a_failure_is_told_once
plant grad_over          drop    gradient_memory a_loss_writes_over_logits_that_nobody_reads
plant transpose          drop    operators   test_gradients
plant slice_rest         drop    operators   test_slices_of_one_tensor
plant slice_inside       bound   operators   test_bad_inputs_name_the_rule
plant slices_grow        turn    bad_input   sharded_and_late
plant usable_scale       yes     arguments   scaler_descriptions
plant one_multiplier     drop    scaler      test_one_factor_is_restored
plant f32_factor         drop    scaler      test_preset_factors
plant scaler_limits      bound   scaler      test_disabled
plant scaled_at          drop    scaler      test_scale_changed_before_the_walk
plant scales             drop    step        test_own_scale
plant rows_grow          drop    optimizers  test_many_parameters
plant low_bf16           swap    optimizers  test_plain_step
plant low_fresh          drop    optimizers  test_low_copies
plant still_scaled       logic   scaler      test_scale_on_tape
plant clipped_once       drop    scaler      test_gradients_changed_after_clipping
plant load_hysteresis    drop    scaler      test_hysteresis_is_restored
plant loss_told          zero    mistakes    test_bad_loss_at_once
plant made_runs          always  mistakes    test_told
plant begin_forgotten    always  mistakes    test_told
plant lone_grad          turn    mistakes    test_legal
plant scale_asked        logic   mistakes    test_bad_loss_at_once
plant mark_lost          never   free        test_a_scaler_goes
plant scale_lose         never   free        test_a_scaler_goes
plant entropy_bad        drop    hostile     bad_loss_is_told
plant renew_found        drop    hostile     new_scale_forgets
plant inside_operator    always  hostile     operator_calls_what_it_must_not
plant tell_at_once       always  hostile     on_error_waits_for_the_outermost_call
plant attention_rank     zero    hostile     ranks_drop_as_steps_do
plant overlap            turn    hostile     views_that_overlap
plant failed             turn    hostile     errors_cleared_at_once
plant first_version      drop    borders     a_cast_that_failed_is_made_again
plant rows_sent          always  borders     a_table_that_was_not_sent_is_sent_again
plant recycled           yes     borders     a_gradient_that_was_given_back
plant printable          never   borders     no_control_character_of_a_name_is_told
plant capture_twice      zero    hostile     capture_within_a_capture
plant capture_undo       drop    orders      a_capture_that_fails
plant capture_failed     always  orders      two_masters
plant muon_scratch       never   refused_step on_the_host
plant block_unrecorded   never   recompute   test_memory_of_an_evaluation
plant block_keeps        turn    recompute   test_without_gradients
plant views_once         never   orders      views_are_summed_once
plant agree_graded       zero    ranks       frozen_on_one
plant far_shared         drop    ranks_apart unlike_devices
plant checked_lose       never   free        test_a_verdict_without_it
plant block_join         always  block       test_a_block_is_used_again
plant skips_allowed      swap    scaler      test_skips_to_diverge
plant utf8_overlong      drop    checkpoint  test_malformed_rows
plant utf8_surrogate     swap    checkpoint  test_malformed_rows
plant json_zero          logic   checkpoint  test_malformed_rows
plant json_twice         drop    checkpoint  test_malformed_rows
plant st_bits            drop    checkpoint  test_malformed_rows
plant st_order           swap    checkpoint  test_golden_bytes
plant merge_missing      turn    watch_scale test_other_files
plant same_shape         turn    checkpoint  test_load_refuses
plant counter_range      yes     checkpoint  test_load_refuses
plant flag_range         yes     checkpoint  test_load_refuses
plant numbers_row        never   counters    windows_without_numbers
plant retry_loaded       drop    counters    a_load_ends_a_retry
plant found_forget       no      checkpoint  test_between_step_and_update
plant tallied_once       never   watch_scale test_underflow_after_a_step_given_up
plant group_kept         logic   checkpoint  test_groups_with_anything
plant nadam_numerator    factor  optim_db    test_recorded
plant radam_length       turn    optim_db    test_recorded
plant amsgrad_top        turn    optim_db    test_recorded
plant step_uphill        swap    optim_db    test_recorded
plant sum_start          never   optim_db    test_initial_sum
plant piece_third        zero    ranks       sharded_checkpoints
plant schedule_restart   swap    schedules   test_recorded
plant schedule_milestone bound   schedules   test_recorded
plant schedule_valley    turn    schedules   test_recorded
plant factors_from       zero    schedules   test_function
plant spike_name         yes     checkpoint  test_a_parameter_called_spike
plant compare_held       drop    guard       test_compare_forgets
plant part_of_all        bound   counters    a_part_is_no_more_than_all
plant steps_sum          turn    counters    steps_are_the_sum
plant site_state         logic   counters    sites_of_a_file
plant look_least         sign    guard       test_look
plant look_past          turn    guard       test_look
plant look_flushed       bound   guard       test_look
plant guard_pin          logic   guard       test_pins
plant guard_bad_cast     logic   guard       test_cast_of_the_batch
plant guard_carry        swap    guard       test_planted_overflow
plant floor_for_grad     drop    guard_floor comes_back_with_its_gradient
plant grad_unseen        never   guard_returns evaluations_return_no_gradient
plant guard_every        no      guard_everyday two_networks
plant site_inputs        no      guard       test_control_flow
plant site_sibling       turn    guard       test_two_passes
plant guard_uncast       no      guard       test_growing_logits
plant guard_doubles      swap    guard       test_relapse
plant guard_high         never   guard       test_growth
plant guard_weight       never   guard       test_origins
plant guard_first        drop    guard       test_origins
plant guard_patience     swap    guard       test_pinned_low
plant guard_probe        never   guard_everyday depth_costs_two_skips
plant guard_meant        never   guard_everyday masks_of_inf
plant siblings_fall      always  guard_everyday depth_costs_two_skips
plant retry_loss         zero    guard_everyday an_evaluation_is_repeated
plant heads_differ       never   guard_ranks ranks_may_part
plant bits_differ        logic   ranks_apart instruction_sets
plant cpu_of_file        logic   checkpoint  test_of_another_cpu
plant cpu_of_resumed     never   checkpoint  test_of_another_cpu
plant agree_guard        zero    guard_ranks guards_started_later
plant retries            bound   guard       test_retry
plant trial_step         drop    observe     test_trials
plant predicted_scale    drop    watch_scale test_sets_the_scale
plant spike_z            never   watch_scale test_spikes_of_norms
plant spike_level        drop    watch_scale test_a_new_level
plant spike_enters       drop    watch_scale test_spikes_of_losses
plant update_lost        turn    watch_scale test_lost_updates
plant pin_void           no      watch_events test_patterns_given_again
plant sight_sample       swap    observe     test_bins

plant recode_strip_end   bound   codes       codes_are_exact
plant codes_told         logic   codes       inputs_that_stay
plant recode_scale_at    factor  codes       codes_are_exact
plant recode_scale_zero  factor  codes       codes_are_exact
plant recode_pair        sign    codes       codes_are_exact
plant recode_nibble      sign    codes       codes_are_exact
plant recode_factor      factor  codes       factor
plant scale_of_code      turn    codes       codes_are_exact
plant e2m1_half          zero    codes       codes_are_exact
plant keep_scales_at     sign    codes       codes_are_exact
plant keep_scales        factor  codes       codes_are_exact
plant loss_none          drop    fallback    odd_values
plant loss_inf           drop    fallback    odd_values
plant loss_inf_clipped   drop    fallback    odd_values
plant loss_error         factor  fallback    numbers
plant loss_clipped       factor  fallback    numbers
plant loss_clipped       logic   fallback    numbers
plant loss_row           factor  fallback    numbers
plant loss_sum           drop    fallback    numbers
plant loss_beyond        swap    fallback    numbers
plant loss_bound         swap    fallback    bounds
plant loss_first         never   fallback    numbers
plant turn_largest       drop    delayed     against_emulation
plant turn_moves         sign    delayed     against_emulation
plant turn_last          drop    delayed     against_emulation
plant turn_first         drop    delayed     against_emulation
plant turn_operand       factor  delayed     against_emulation
plant turn_unused        never   delayed     other_updates
plant turned_amax        swap    delayed     against_emulation
plant turned_inf         swap    delayed     against_emulation
plant turn_limit         swap    delayed     against_emulation
plant hadamard_sign      swap    recipes     hadamard
plant hadamard_step      never   recipes     hadamard
plant hadamard_rest      never   recipes     hadamard
plant hadamard_strip     factor  recipes     hadamard
plant hadamard_size      factor  recipes     hadamard
plant recipe_power       zero    recipes     switches
plant recipe_scale_power swap    recipes     against_reference
plant over6_choice       drop    recipes     against_reference
plant over6_expand       never   recipes     recorded_nvfp4
plant over6_guard        never   fallback    blocks_are_told
plant lines_factor       factor  recipes     against_reference
plant lines_kept         drop    codes       every_way
plant lines_lost         swap    fallback    scales_of_rows
plant over6_hadamard     logic   recipes     refused
plant recipe_weight_low  zero    recipe_weights two_optimizers
plant recipe_rounded     zero    recipe_weights random_rounding

# By an emulation of AMX, whose packing needs AVX-512.
plant tiles_again        logic   amx         inf_and_nan_are_avx512s
plant tiles_bad          drop    amx         inf_and_nan_are_avx512s
plant tiles_bad_columns  never   amx         inf_and_nan_are_avx512s
plant tiles_bad_rows     never   amx         inf_and_nan_are_avx512s
plant tiles_bias         drop    amx         bf16_in_the_stated_order
plant tiles_old          drop    amx         bf16_in_the_stated_order
plant tiles_passes       never   amx         bf16_in_the_stated_order
plant tiles_tail         drop    amx         bf16_in_the_stated_order
plant tiles_depth        never   amx         bf16_in_the_stated_order
plant tiles_exchanged    swap    amx         split_in_the_stated_order
plant tiles_low          drop    amx         split_in_the_stated_order
plant amx_configure      drop    amx         bf16_of_any_size
plant amx_release        drop    amx         bf16_of_any_size
plant amx_answer         never   amx         wrong_answers_are_not_used
plant tiled_keep         never   amx         attention_of_inf_and_nan
plant tiled_bad_block    drop    amx         attention_of_inf_and_nan
plant tiled_reach        sign    amx         attention_of_bf16
plant tiled_release      drop    amx         attention_of_parts
plant tiled_sum          drop    amx         attention_of_bf16
plant tiled_unseen       bound   amx         attention_of_parts
plant tiled_bad_grads    drop    amx         attention_of_inf_and_nan

# Functions of registers, which the scalar table's bytes judge.
plant vector_random      drop    states_simd test_same_bytes
plant vector_bf16        sign    states_simd test_same_bytes
plant vector_tiny        drop    states_simd test_same_bytes
plant vector_m_nan       drop    states_simd test_same_bytes
plant vector_m_value     factor  states_simd test_same_bytes
plant vector_floor       drop    states_simd test_same_bytes
plant vector_v_inf       drop    states_simd test_same_bytes
plant vector_v_none      drop    states_simd test_same_bytes
plant vector_v_top       drop    states_simd test_same_bytes
plant bytes_tiny         zero    state_bytes_avx512 test_every_code
plant bytes_usual        turn    state_bytes_avx512 test_every_code
plant bytes_bad          logic   state_bytes_avx512 test_every_code
plant bytes_large        drop    state_bytes_avx512 test_every_code
plant bytes_place        drop    state_bytes_avx512 test_every_code
plant vector_draw        drop    formats_simd stochastic_is_reproducible
plant vector_master_16   sign    states_simd test_same_bytes
plant vector_kept        sign    states_simd test_same_bytes
plant vector_master_8    sign    states_simd test_same_bytes
plant block_largest      always  states      test_nan_stays_alone

# --- how a fault is judged -----------------------------------------------------------------
flags='-std=c99 -D_GNU_SOURCE -O0 -w -include tests/support/checked.h -Itests -Itests/support -I.'

# build DIR PROGRAM: DIR holds the header that is tested; it and the test are one piece of text.
build() {
    case $2 in checkpoint) ;; *) echo '#define MIXPREC_IMPLEMENTATION' ;; esac >"$1/main.c"
    name=${2%_simd}
    echo "#include \"$(find tests -name "test_${name%_avx512}.c")\"" >>"$1/main.c"
    case $2 in amx|*_simd|*_avx512) simd= ;; *) simd=-DMIXPREC_NO_SIMD ;; esac
    $CC "-I$1" $flags $simd "$1/main.c" -lm -o "$1/$2"
}
run() ( MIXPREC_TEST_ONLY=$3; export MIXPREC_TEST_ONLY; cd "$tmp" && $guard "$1/$2" )

judge() { # NUMBER MARKER OPERATOR PROGRAM TEST
    dir=$tmp/$1
    mkdir "$dir"
    if ! plant_apply mixprec.h "$2" "$(operator "$3")" "$dir/mixprec.h"; then :
    elif ! build "$dir" "$4" >"$dir/log" 2>&1; then
        echo 'does not compile'
        head -n 5 "$dir/log"
    elif run "$dir" "$4" "$5" >"$dir/log" 2>&1; then
        echo "survived $4 $5:"
        diff mixprec.h "$dir/mixprec.h"
    else echo killed
    fi >"$tmp/$1.verdict"
    rm -rf "$dir"
}
work() {
    i=0
    while read -r plant; do
        i=$((i + 1))
        [ $((i % jobs)) -eq "$1" ] && judge "$i" $plant
    done <"$tmp/drawn"
}

# --- which, and the verdicts ---------------------------------------------------------------
avx512=$(grep -c -m 1 avx512dq /proc/cpuinfo 2>/dev/null)
simd=$(grep -c -m 1 -E 'avx2|asimd' /proc/cpuinfo 2>/dev/null)
awk -v seed="$seed" -v share="$share" -v names="$names" -v avx512="${avx512:-0}" -v simd="${simd:-0}" '
    BEGIN { srand(seed) }
    { draw = rand() * share < 1
      if (($3 == "amx" || $3 ~ /_avx512$/) && !avx512) next
      if ($3 ~ /_simd$/ && !simd) next
      if (names == "" ? draw : index(names, " " $1 " ")) print }' "$tmp/plants" >"$tmp/drawn"
used() {
    plant_names mixprec.h >"$tmp/marked"
    cut -d ' ' -f 1 "$tmp/plants" | sort -u | diff "$tmp/marked" -
}
passes() { run "$tmp/sound" "$@" >"$tmp/log" 2>&1 && tail -n 1 "$tmp/log" | grep -q '^1 passed, 0 failed'; }
check 'every line listed has a fault, every fault a line' used
applies() { plant_apply mixprec.h "$1" "$(operator "$2")" "$tmp/dry.h"; }
if [ -n "$dry" ]; then
    while read -r marker fault test; do
        check "$marker $fault" applies "$marker" "$fault" </dev/null
    done <"$tmp/plants"
    report
    exit
fi
mkdir "$tmp/sound"
cp mixprec.h "$tmp/sound/"
for program in $(cut -d ' ' -f 3 "$tmp/drawn" | sort -u); do
    check "$program compiles" build "$tmp/sound" "$program"
done
cut -d ' ' -f 3,4 "$tmp/drawn" | sort -u >"$tmp/tests"
while read -r program test; do
    check "sound: $program $test passes" passes "$program" "$test" </dev/null
done <"$tmp/tests"
pids= j=0
while [ "$j" -lt "$jobs" ]; do work "$j" & pids="$pids $!"; j=$((j + 1)); done
trap 'kill $pids 2>/dev/null; exit 130' INT TERM
wait $pids
i=0
while read -r plant; do
    i=$((i + 1))
    verdict() { cat "$tmp/$i.verdict"; [ "$(cat "$tmp/$i.verdict")" = killed ]; }
    check "$plant" verdict </dev/null
done <"$tmp/drawn"
echo "$(wc -l <"$tmp/drawn") of $(wc -l <"$tmp/plants") faults, seed $seed"
report
