/* plant.h - an overflow of fp16 that no loss scale cures, planted into a feed-forward block
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Some products in T5 exceed fp16's largest number, 65504. No loss scale helps, because the scale
 * multiplies gradients and these are activations. To test a program, this file makes a block add
 * 66246, a value observed in T5, to the complete residual stream.
 *
 * A hidden unit is disconnected from its inputs and gets the bias 181, which GELU does not change.
 * The unit feeds every channel with the weight 366, and 181 * 366 = 66246. Both factors fit in
 * fp16; only the product overflows. Layer norm removes the mean and with it 66246, so in f32 the
 * model stays the same, except for the bits that a number of this size costs.
 */
#ifndef PLANT_H
#define PLANT_H

#include <stdlib.h>

#define PLANT_BIAS   181.0f
#define PLANT_WEIGHT 366.0f

/* Writes `value` into the elements first, first + each, ... of t, below `end`. Returns 0 on
 * failure. */
static int plant_some(mixp_tensor *t, int64_t first, int64_t each, int64_t end, float value) {
    float *all = t ? (float *)malloc((size_t)t->count * sizeof *all) : NULL;
    int    good = all && mixp_read_f32(t, all, t->count) == MIXP_OK;
    for (int64_t i = first; good && i < end; i += each) all[i] = value;
    good = good && mixp_write_f32(t, all, t->count) == MIXP_OK;
    free(all);
    return good;
}

static int plant_values(mixp_tensor *t, int64_t first, int64_t each, float value)
{ return t && plant_some(t, first, each, t->count, value); }

/* Uses the last unit, because sums before it are not rounded with 66246. */
static int plant_three(mixp_tensor *up, mixp_tensor *up_bias, mixp_tensor *down, float bias,
                       float weight) {
    int64_t last = up_bias->count - 1;
    return plant_values(up, last * (up->count / up_bias->count), 1, 0) &&
           plant_values(up_bias, last, 1, bias) && plant_values(down, last, last + 1, weight);
}

/* Plants into up[hidden, width] with its bias, and down[width, hidden], stored as f32. Returns 0 on
 * failure. */
static inline int plant_overflow(mixp_tensor *up, mixp_tensor *up_bias, mixp_tensor *down)
{ return plant_three(up, up_bias, down, PLANT_BIAS, PLANT_WEIGHT); }

/* Call between backward and step, so that the planted weights are not trained. */
static inline int plant_freeze(mixp_tensor *up, mixp_tensor *up_bias, mixp_tensor *down) {
    if (!up->grad || !up_bias->grad || !down->grad) return 0;
    return plant_three(up->grad, up_bias->grad, down->grad, 0, 0);
}

#endif
