/* Result dtypes under autocast on CUDA.
 * Recorded by record_autocast.py with PyTorch 2.15.0; not edited by hand.
 * SPDX-License-Identifier: MIT OR Unlicense */
#ifndef RECORDED_AUTOCAST_H
#define RECORDED_AUTOCAST_H
#include <math.h>

/* s f32, h f16, b bf16, - an error. in: the floating inputs' dtypes, one call per
 * word. Then the results' dtypes, call by call, in an f16 and in a bf16 region. */
typedef struct autocast_row { const char *op, *inputs, *in, *f16, *bf16; } autocast_row;
#define AUTOCAST_ROWS 43
static const autocast_row autocast_rows[AUTOCAST_ROWS] = {
    { "linear", "s2,3,5 s4,5 s4", "sss hhh bbb shs hsh hss", "hhhhhh", "bbbbbb" },
    { "linear_no_bias", "s3,5 s4,5", "ss hh bb sh hs sb bs hb", "hhhhhhhh", "bbbbbbbb" },
    { "matmul", "s2,3,4 s2,4,3", "ss hh bb sh hs sb bs hb", "hhhhhhhh", "bbbbbbbb" },
    { "matmul_trans_a", "s2,4,3 s2,4,2", "ss hh bb sh hs sb bs hb", "hhhhhhhh", "bbbbbbbb" },
    { "matmul_trans_b", "s2,2,4 s3,4", "ss hh bb sh hs sb bs hb", "hhhhhhhh", "bbbbbbbb" },
    { "attention_causal", "s2,5,12", "s h b", "hhh", "bbb" },
    { "attention_full", "s1,5,12", "s h b", "hhh", "bbb" },
    { "attention_scaled", "s1,4,12", "s h b", "hhh", "bbb" },
    { "add", "s2,3,4 s3,1", "ss hh bb sh hs sb bs hb", "shbsssss", "shbsssss" },
    { "sub", "s4 s3,4", "ss hh bb sh hs sb bs hb", "shbsssss", "shbsssss" },
    { "mul", "s2,1,4 s3,1", "ss hh bb sh hs sb bs hb", "shbsssss", "shbsssss" },
    { "div", "s2,3,2 p3,1", "ss hh bb sh hs sb bs hb", "shbsssss", "shbsssss" },
    { "scale", "s6", "s h b", "shb", "shb" },
    { "relu", "s12", "s h b", "shb", "shb" },
    { "gelu", "s16", "s h b", "shb", "shb" },
    { "gelu_tanh", "s16", "s h b", "shb", "shb" },
    { "silu", "s16", "s h b", "shb", "shb" },
    { "tanh", "s16", "s h b", "shb", "shb" },
    { "sigmoid", "s16", "s h b", "shb", "shb" },
    { "sqrt", "p8", "s h b", "shb", "shb" },
    { "exp", "s8", "s h b", "sss", "sss" },
    { "log", "p8", "s h b", "sss", "sss" },
    { "pow_3", "s8", "s h b", "sss", "sss" },
    { "pow_half", "p8", "s h b", "sss", "sss" },
    { "sum_0", "s3,4", "s h b", "sss", "sss" },
    { "sum_keep", "s2,3,2", "s h b", "sss", "sss" },
    { "sum_all", "s3,4", "s h b", "sss", "sss" },
    { "mean_last", "s3,4", "s h b", "shb", "shb" },
    { "softmax", "s3,5", "s h b", "sss", "sss" },
    { "log_softmax", "s3,5", "s h b", "sss", "sss" },
    { "layer_norm", "s3,8 s8 s8", "sss hhh bbb shs hsh hss", "ssssss", "ssssss" },
    { "layer_norm_plain", "s2,8", "s h b", "sss", "sss" },
    { "rms_norm", "s3,8 s8", "ss hh bb sh hs sb bs hb", "ssssssss", "ssssssss" },
    { "embedding", "s6,3 i2,4", "s h b", "shb", "shb" },
    { "cross_entropy", "s5,6 i5", "s h b", "sss", "sss" },
    { "cross_entropy_ignore", "s7,6 j7", "s h b", "sss", "sss" },
    { "mse", "s3,4 t3,4", "ss hh bb sh hs sb bs hb", "ssssssss", "ssssssss" },
    { "bce_with_logits", "s3,4 t3,4", "ss hh bb sh hs sb bs hb", "ssssssss", "ssssssss" },
    { "bce", "q3,4 t3,4", "ss hh bb sh hs sb bs hb", "--------", "--------" },
    { "dropout_0", "s6", "s h b", "shb", "shb" },
    { "reshape", "s2,6", "s h b", "shb", "shb" },
    { "transpose", "s2,3,4", "s h b", "shb", "shb" },
    { "concat", "s2,3 s2,2", "ss hh bb sh hs sb bs hb", "shbsssss", "shbsssss" },
};
#endif
