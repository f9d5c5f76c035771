/* known.h - laws that programs are known to break, with dtype, rule and level (0 = each): shown, but no
 * failure. A cure strikes its lines out.
 * SPDX-License-Identifier: MIT OR Unlicense
 */

/* fp16 with an initial loss scale of 2^24 that grows every 20 steps (rule 1): since two skips find the
 * scale, the guarded runs apply more steps, and end where other skips take them. Plain runs, which skip
 * other steps with other initial scales of 2^6 to 2^24, end at:
 * vit: 0.542 to 1.083 (0.542 is that of 2^24); the guarded one at 0.9216, in 12 cells.
 * t5_fused at level 3: 1.777 to 1.884 (1.805 is that of 2^24); the guarded one at 1.837, in 4 cells. */
{ "vit", LAW_WORSE, MIXP_F16, 1, 0 },
{ "t5_fused", LAW_WORSE, MIXP_F16, 1, 3 },

/* bf16 with 3 micro-batches and a guard that samples each fifth step: 2 cells, at level 1 with retry and at
 * level 3, each with one false event of five (the latter at step 163, out.w: "linear lost too much by
 * rounding", 6.33%), since the product is judged with its weights. */
{ "pinn", LAW_EVENTS, MIXP_BF16, 0, 0 },
