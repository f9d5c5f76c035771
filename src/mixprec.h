#include "manual.h"
#if !defined(MIXPI_PASS) && !defined(MIXPREC_H_INCLUDED)
#define MIXPREC_H_INCLUDED

#include "base.h"
#ifdef __cplusplus
extern "C" {
#endif

#include "results.h"
#include "formats.h"
#include "arithmetic.h"
#include "updates.h"
#include "agreement.h"
#include "elements.h"
#include "small.h"
#include "kernels.h"
#include "quantise.h"
#include "device.h"
#ifndef MIXPREC_ONLY_FORMATS
#include "tensors.h"
#include "recipe.h"
#include "autocast.h"
#include "tape.h"
#include "operators.h"
#include "scaler.h"
#include "optimizers.h"
#include "step.h"
#ifndef MIXPREC_NO_CHECKPOINT
#include "checkpoint.h"
#endif
#ifndef MIXPREC_NO_WATCH
#include "watch.h"
#endif
#include "ranks.h"
#endif
#ifdef __cplusplus
}   /* extern "C" */
#endif
#endif  /* MIXPREC_H_INCLUDED */

/* ==================================================================================== *
 *  Stop here if you only need the API: what follows is the implementation.             *
 * ==================================================================================== */
#if defined(MIXPREC_IMPLEMENTATION) && !defined(MIXPI_PASS) && \
    !defined(MIXPREC_IMPLEMENTATION_DONE) && !defined(MIXPI_LAST_LINES)
#define MIXPREC_IMPLEMENTATION_DONE
#define MIXPI_IMPLEMENT 1

#include "system.c"
#ifdef __cplusplus
extern "C" {
#endif

#include "macros.c"
MIXPI_SMALL_BEGIN
#include "results.c"
#include "formats.c"
#include "cpu/float_mode.c"
#include "cpu/shared.c"
#include "cpu/maps.c"
#include "cpu/row_plans.c"
#include "cpu/machine.c"
#include "cpu/link_names.c"
#ifndef MIXPREC_ONLY_FORMATS
MIXPI_HOST_BEGIN
#include "cpu/starts.c"
MIXPI_HOST_END
#include "cpu/gemm_plan.c"
#include "cpu/attention_plan.c"
#include "cpu/update_plan.c"
#endif
MIXPI_SMALL_END
#ifdef __cplusplus
}
#endif
#endif  /* implementation, first half */

/* ------------------------ compiled once per instruction set --------------------------- */
#ifdef MIXPI_PASS

#include "cpu/pass.c"
MIXPI_SMALL_BEGIN
#include "cpu/vectors.c"
#include "cpu/codes.c"
MIXPI_SMALL_END
#include "cpu/convert.c"
#ifndef MIXPREC_ONLY_FORMATS
MIXPI_SMALL_BEGIN
#include "cpu/elementwise.c"
#include "cpu/picks.c"
#include "cpu/rows.c"
MIXPI_SMALL_END
#include "cpu/gemm.c"
#include "cpu/tiles.c"
#include "cpu/gemm_tiles.c"
MIXPI_SMALL_BEGIN
#include "cpu/attention.c"
#include "cpu/attention_tiles.c"
#include "cpu/attention_tiles_back.c"
#include "cpu/update.c"
#include "cpu/states.c"
#include "cpu/look.c"
#if !MIXPI_BORROWS && !defined(MIXPREC_NO_RECIPES)
#include "cpu/quantise.c"
#include "cpu/recode.c"
#endif
MIXPI_SMALL_END
#endif
#include "cpu/table.c"
#endif  /* MIXPI_PASS */

#if defined(MIXPI_IMPLEMENT) && !defined(MIXPI_PASS)

#include "cpu/passes.c"
#if MIXPI_IN_PART(MIXPREC_HOST)
#ifdef __cplusplus
extern "C" {
#endif

MIXPI_SMALL_BEGIN
MIXPI_HOST_BEGIN
#include "cpu/device.c"
#include "cpu/arrays.c"
#ifndef MIXPREC_ONLY_FORMATS
MIXPI_SELDOM_BEGIN
#include "cpu/self_check.c"
MIXPI_SELDOM_END
#include "tensors/structs.c"
#include "tensors/block.c"
#include "tensors/errors.c"
#include "tensors/memory.c"
#include "tensors/threads.c"
#include "tensors/crew.c"
#include "tensors/watcher.c"
#include "tensors/backups.c"
#include "tensors/context.c"
#include "tensors/tensors.c"
#include "tensors/params.c"
#include "tensors/buffers.c"
#include "tensors/quantiser.c"
#include "autocast.c"
#include "tape/apply.c"
#include "tape/run.c"
#include "walk/marks.c"
#include "walk/probes.c"
#include "walk/gradients.c"
#include "walk/checks.c"
#include "walk/unscaled.c"
#include "walk/walk.c"
#include "walk/blocks.c"
#include "walk/backward.c"
#include "walk/begin.c"
#include "operators/cast.c"
#include "operators/shared.c"
#include "operators/products.c"
#include "operators/attention.c"
#include "operators/elementwise.c"
#include "operators/sums.c"
#include "operators/norms.c"
MIXPI_SELDOM_BEGIN
#include "operators/choosing.c"
MIXPI_SELDOM_END
#include "operators/losses.c"
#include "operators/shapes.c"
MIXPI_SELDOM_BEGIN
#include "operators/random.c"
#include "operators/scans.c"
#include "operators/picking.c"
#include "operators/bags.c"
#include "operators/composed.c"
#include "operators/loss_options.c"
MIXPI_SELDOM_END
#include "operators/table.c"
MIXPI_SELDOM_BEGIN
#include "operators/tangents.c"
MIXPI_SELDOM_END
#include "scaler.c"
MIXPI_SELDOM_BEGIN
#include "optimizers/slots.c"
#include "optimizers/settings.c"
#include "optimizers/param_rows.c"
#include "optimizers/muon_memory.c"
#include "optimizers/read.c"
#include "optimizers/write.c"
#include "optimizers/add.c"
#include "optimizers/feed.c"
MIXPI_SELDOM_END
#include "step/table.c"
#include "step/muon.c"
#include "step/tally.c"
#include "step/average.c"
#include "step/restore.c"
#include "step/step.c"
MIXPI_SELDOM_BEGIN
#ifndef MIXPREC_NO_CHECKPOINT
#include "files/safetensors.c"
#include "files/disk.c"
#include "files/reader.c"
#include "files/writer.c"
#include "files/list.c"
#include "files/groups.c"
#include "files/sound.c"
#include "files/partial.c"
#include "files/checkpoint.c"
#include "files/weights.c"
#endif
#ifndef MIXPREC_NO_RECIPES
#include "recipes/rules.c"
#include "recipes/delayed.c"
#include "recipes/lossy.c"
#include "recipes/linears.c"
#include "recipes/coded.c"
#include "recipes/multiply.c"
#ifndef MIXPREC_NO_CHECKPOINT
#include "recipes/histories.c"
#endif
#include "recipes/door.c"
#endif
#ifndef MIXPREC_NO_WATCH
#include "watch/traits.c"
#include "watch/guard.c"
#include "watch/sites.c"
#include "watch/looks_memory.c"
#include "watch/precision.c"
#include "watch/looks.c"
#include "watch/share.c"
#include "watch/events.c"
#include "watch/judge.c"
#include "watch/settle.c"
#include "watch/desk.c"
#include "watch/observe.c"
#ifndef MIXPREC_NO_CHECKPOINT
#include "watch/saved.c"
#endif
#include "watch/door.c"
#endif
#ifndef MIXPREC_NO_RANKS
#include "ranks/hooks.c"
#include "ranks/exchange.c"
#include "ranks/arena.c"
#include "ranks/alike.c"
#include "ranks/divided.c"
#include "ranks/summing.c"
#include "ranks/shards.c"
#include "ranks/settings.c"
#include "ranks/agree.c"
#include "ranks/check.c"
#include "ranks/shared_buffers.c"
#ifndef MIXPREC_NO_CHECKPOINT
#include "ranks/lent_states.c"
#endif
#include "ranks/door.c"
#endif
#include "guests.c"
MIXPI_SELDOM_END
#endif
MIXPI_HOST_END
MIXPI_SMALL_END
#ifdef __cplusplus
}   /* extern "C" */
#endif
#endif  /* the host's part */
#if (defined(MIXPREC_ONLY_FORMATS) || defined(MIXPREC_PART)) && MIXPI_GNU
#  pragma GCC diagnostic pop
#endif
#undef MIXPREC_IMPLEMENTATION
#undef MIXPI_IMPLEMENT
#endif  /* implementation */

#ifdef MIXPI_LAST_LINES
static __inline__ __attribute__((__unused__)) int mixpi_last_lines(int line)
{
    if (line < 0)
        return 0;
    return line;
}
#endif
