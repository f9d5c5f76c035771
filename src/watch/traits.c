#pragma once
#include "../operators/table.c"
#include "../scaler.c"
/* --- traits of operators ------------------------------------------------------------------ *
 *
 * Properties of built-in operators that the guard's judgement depends on. An operator is known by
 * its row in the table: a program's own operator has none of these traits, whatever its name.
 */
enum {
    MIXPI_IS_CAST = 1,
    MIXPI_IS_DROPOUT = 2,
    MIXPI_SCALES_LOSS = 4,      /* multiplies a loss by the loss scale */
    MIXPI_ROUNDS = 8,           /* the operator adds or multiplies, and stores a low
                                   result: its precision is measured                      */
    MIXPI_CUTS = 16,            /* turns numbers, or their gradients, into zeros in f32 as well */
    MIXPI_SHRINKS = 32,         /* makes small numbers of large ones: a non-finite result of it is
                                   not finite in f32 either */
    MIXPI_MAY_MEAN = 64,        /* normally makes Inf from finite numbers: f32 would not help */
    MIXPI_SCORES = 128          /* keeps the log-sum-exp of each query's scores in saved[0] */
};

/* No default: the compiler warns of an operator without a line. */
/* clang-format off */
static int mixpi_traits_at(mixp_op_id id) {
    switch (id) {
    case MIXP_OP_LINEAR: case MIXP_OP_MATMUL: case MIXP_OP_ADD: case MIXP_OP_MUL:
    case MIXP_OP_SCALE: case MIXP_OP_MEAN: case MIXP_OP_SCATTER_ADD: case MIXP_OP_INDEX_ADD:
    case MIXP_OP_EMBEDDING_BAG:
        return MIXPI_ROUNDS;
    case MIXP_OP_SUB: case MIXP_OP_SWIGLU: case MIXP_OP_SWIGLU_PACKED:
        return MIXPI_ROUNDS | MIXPI_CUTS;
    case MIXP_OP_DIV: case MIXP_OP_ADD_SCALAR: case MIXP_OP_RSUB:
        return MIXPI_ROUNDS | MIXPI_MAY_MEAN;
    case MIXP_OP_PRELU:
        return MIXPI_ROUNDS | MIXPI_CUTS;
    case MIXP_OP_RELU: case MIXP_OP_RELU_SQUARED: case MIXP_OP_CLAMP: case MIXP_OP_MAXIMUM:
    case MIXP_OP_MINIMUM: case MIXP_OP_MAX: case MIXP_OP_LEAKY_RELU:
        return MIXPI_CUTS;
    case MIXP_OP_GELU: case MIXP_OP_GELU_TANH: case MIXP_OP_SILU: case MIXP_OP_TANH:
    case MIXP_OP_SIGMOID: case MIXP_OP_SOFT_CAP: case MIXP_OP_ERF: case MIXP_OP_SOFTPLUS:
    case MIXP_OP_ELU: case MIXP_OP_EXP: case MIXP_OP_EXPM1: case MIXP_OP_SOFTMAX:
    case MIXP_OP_LOG_SOFTMAX:
        return MIXPI_CUTS;      /* flat where they are saturated */
    case MIXP_OP_DROPOUT:
        return MIXPI_IS_DROPOUT | MIXPI_CUTS;
    case MIXP_OP_MASKED_FILL: case MIXP_OP_WHERE:
        return MIXPI_CUTS | MIXPI_MAY_MEAN;
    case MIXP_OP_POW: case MIXP_OP_RECIPROCAL: case MIXP_OP_PAD: case MIXP_OP_POWER:
    case MIXP_OP_ERFINV: case MIXP_OP_ACOS: case MIXP_OP_ASIN:
        return MIXPI_MAY_MEAN;
    case MIXP_OP_LOG: case MIXP_OP_LOG1P: case MIXP_OP_SQRT: case MIXP_OP_LINEAR_CROSS_ENTROPY:
    case MIXP_OP_LOG2: case MIXP_OP_LOG10:
        return MIXPI_SHRINKS;
    case MIXP_OP_ATTENTION:
        return MIXPI_SCORES;
    case MIXP_OP_SUM: case MIXP_OP_LAYER_NORM: case MIXP_OP_RMS_NORM:
    case MIXP_OP_EMBEDDING: case MIXP_OP_CROSS_ENTROPY: case MIXP_OP_MSE:
    case MIXP_OP_BCE_WITH_LOGITS: case MIXP_OP_BCE: case MIXP_OP_L1: case MIXP_OP_SMOOTH_L1:
    case MIXP_OP_HUBER: case MIXP_OP_KL_DIV: case MIXP_OP_NLL:
    case MIXP_OP_SQUARE: case MIXP_OP_PROD: case MIXP_OP_CUMSUM: case MIXP_OP_SIN:
    case MIXP_OP_COS: case MIXP_OP_ROPE: case MIXP_OP_ATAN2:
    case MIXP_OP_TAN: case MIXP_OP_SINH: case MIXP_OP_COSH:
        return 0;
    case MIXP_OP_CAST: case MIXP_OP_RESHAPE: case MIXP_OP_TRANSPOSE: case MIXP_OP_CONCAT:
    case MIXP_OP_SLICE: case MIXP_OP_NEG: case MIXP_OP_ABS: case MIXP_OP_ARGMAX:
    case MIXP_OP_GATHER: case MIXP_OP_DETACH: case MIXP_OP_PERMUTE: case MIXP_OP_FLIP:
    case MIXP_OP_EXPAND: case MIXP_OP_STACK: case MIXP_OP_EQ: case MIXP_OP_NE: case MIXP_OP_GT:
    case MIXP_OP_GE: case MIXP_OP_LT: case MIXP_OP_LE: case MIXP_OP_ONE_HOT: case MIXP_OP_TOPK:
    case MIXP_OP_SORT: case MIXP_OP_COUNT:
        return 0;               /* copies or compares */
    }
    return 0;
}
/* clang-format on */

/* The traits of an operator, as a set of bits. */
static int mixpi_traits_of(const mixp_op *op) {
    const uintptr_t first = (uintptr_t)mixp_op_builtin((mixp_op_id)0);
    const uintptr_t size = sizeof *op, at = (uintptr_t)op - first;
    if (mixpi_is_cast(op)) return MIXPI_IS_CAST | MIXPI_ROUNDS;
    if (op == &mixpi_scale_op) return MIXPI_SCALES_LOSS;
    if (op->infer == mixpi_rounding_infer) return MIXPI_ROUNDS;
    return at < size * MIXP_OP_COUNT ? mixpi_traits_at((mixp_op_id)(int)(at / size)) : 0;
}
