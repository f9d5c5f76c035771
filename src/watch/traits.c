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
    MIXPI_ROUNDS = 8,           /* its precision is measured */
    MIXPI_CUTS = 16,            /* turns numbers into zeros regardless of their size */
    MIXPI_SHRINKS = 32,         /* makes small numbers of large ones: a non-finite result of it is
                                   not finite in f32 either */
    MIXPI_MAY_MEAN = 64         /* normally makes Inf from finite numbers: f32 would not help */
};

static int mixpi_traits_at(mixp_op_id id) {
    switch (id) {
    case MIXP_OP_LINEAR: case MIXP_OP_MATMUL: case MIXP_OP_ADD: case MIXP_OP_MUL:
    case MIXP_OP_SCALE:
        return MIXPI_ROUNDS;
    case MIXP_OP_SUB:
        return MIXPI_ROUNDS | MIXPI_CUTS;
    case MIXP_OP_RELU: case MIXP_OP_RELU_SQUARED: case MIXP_OP_CLAMP: case MIXP_OP_MAXIMUM:
    case MIXP_OP_MINIMUM: case MIXP_OP_MAX:
        return MIXPI_CUTS;
    case MIXP_OP_DROPOUT:
        return MIXPI_IS_DROPOUT | MIXPI_CUTS;
    case MIXP_OP_MASKED_FILL: case MIXP_OP_WHERE:
        return MIXPI_CUTS | MIXPI_MAY_MEAN;
    case MIXP_OP_DIV: case MIXP_OP_POW:
        return MIXPI_MAY_MEAN;
    case MIXP_OP_LOG: case MIXP_OP_SQRT:
        return MIXPI_SHRINKS;
    default:
        return 0;
    }
}

/* The traits of an operator, as a set of bits. */
static int mixpi_traits_of(const mixp_op *op) {
    const uintptr_t first = (uintptr_t)mixp_op_builtin((mixp_op_id)0);
    const uintptr_t size = sizeof *op, at = (uintptr_t)op - first;
    if (mixpi_is_cast(op)) return MIXPI_IS_CAST | MIXPI_ROUNDS;
    if (op == &mixpi_scale_op) return MIXPI_SCALES_LOSS;
    return at < size * MIXP_OP_COUNT ? mixpi_traits_at((mixp_op_id)(int)(at / size)) : 0;
}

