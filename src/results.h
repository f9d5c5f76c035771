#pragma once
#include "base.h"
/* ==== 1. RESULTS ======================================================= >>results ====
 *
 * A function returns a mixp_result, or a pointer that is NULL on error. The context keeps the first
 * error, with a message that says what failed, where, and what to do. Later errors do not replace
 * it. An overflow of the gradients is a state of the step, never an error.
 */
#define MIXP_RESULTS(X)                                                                   \
    X(MIXP_OK,           "ok")                                                            \
    X(MIXP_ERR_ARGUMENT, "invalid argument")                                              \
    X(MIXP_ERR_SHAPE,    "shapes do not fit")                                             \
    X(MIXP_ERR_DTYPE,    "dtype not supported here")                                      \
    X(MIXP_ERR_MEMORY,   "out of memory")                                                 \
    X(MIXP_ERR_ORDER,    "calls in the wrong order")                                      \
    X(MIXP_ERR_BANNED,   "operator is unsafe in low precision")                           \
    X(MIXP_ERR_DIVERGED, "non-finite gradients that no loss scale can cure")              \
    X(MIXP_ERR_IO,       "file could not be read or written")                             \
    X(MIXP_ERR_FORMAT,   "file is malformed")                                             \
    X(MIXP_ERR_DEVICE,   "device failed")                                                 \
    X(MIXP_ERR_RANKS,    "ranks differ, or a rank cannot be reached")

#define MIXPI_RESULT_NAME(name, text) name,
typedef enum mixp_result { MIXP_RESULTS(MIXPI_RESULT_NAME) MIXP_RESULT_COUNT } mixp_result;
#undef MIXPI_RESULT_NAME

/* Returns the text of a result: a constant string; "unknown result" for a value outside the
 * enum. */
MIXPREC_API const char *mixp_result_text(mixp_result result);

/* Returns the implementation's MIXPREC_VERSION, a constant string. A value that differs from your
 * header's shows a stale object file. */
MIXPREC_API const char *mixp_version(void);

