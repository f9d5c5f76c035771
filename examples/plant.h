/* plant.h - an overflow of fp16 that no loss scale cures, planted into a feed-forward block
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Products of T5 pass the largest number of fp16, 65504, and no loss scale helps: it multiplies
 * gradients, and this is an activation. To see what a program does then, a block is made to add
 * 66246, the number that was met there, to all of the residual stream.
 *
 * A hidden unit is cut off from its inputs and given the bias 181, which GELU leaves as it is; it
 * feeds every channel with the weight 366, and 181 * 366 = 66246. All of these are numbers of
 * fp16: what overflows is the product. Layer norm takes the mean away and with it all of 66246, so
 * that in f32 the model is what it was, but for the bits that so large a number costs.
 */
#ifndef PLANT_H
#define PLANT_H

#include <stdlib.h>

#define PLANT_BIAS   181.0f
#define PLANT_WEIGHT 366.0f

/* Writes `value` into the elements first, first + each, ... of t, those below `end`. 0: no memory, or
 * a failure. */
static int plant_some(mixp_tensor *t, int64_t first, int64_t each, int64_t end, float value) {
    float *all = t ? (float *)malloc((size_t)t->count * sizeof *all) : NULL;
    int    good = all && mixp_read(t, all, MIXP_F32, t->count) == MIXP_OK;
    for (int64_t i = first; good && i < end; i += each) all[i] = value;
    good = good && mixp_write(t, all, MIXP_F32, t->count) == MIXP_OK;
    free(all);
    return good;
}

static int plant_values(mixp_tensor *t, int64_t first, int64_t each, float value)
{ return t && plant_some(t, first, each, t->count, value); }

/* The last unit: what is added before it is not rounded as 66246 is. */
static int plant_three(mixp_tensor *up, mixp_tensor *up_bias, mixp_tensor *down, float bias,
                       float weight) {
    int64_t last = up_bias->count - 1;
    return plant_values(up, last * (up->count / up_bias->count), 1, 0) &&
           plant_values(up_bias, last, 1, bias) && plant_values(down, last, last + 1, weight);
}

/* up[hidden, width] with its bias, then down[width, hidden], stored as f32. 0: it failed. */
static inline int plant_overflow(mixp_tensor *up, mixp_tensor *up_bias, mixp_tensor *down)
{ return plant_three(up, up_bias, down, PLANT_BIAS, PLANT_WEIGHT); }

/* Between backward and step: what was planted is not trained. */
static inline int plant_freeze(mixp_tensor *up, mixp_tensor *up_bias, mixp_tensor *down) {
    if (!up->grad || !up_bias->grad || !down->grad) return 0;
    return plant_three(up->grad, up_bias->grad, down->grad, 0, 0);
}

#endif
