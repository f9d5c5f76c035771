#pragma once
#include "macros.c"
/* ==== 1. RESULTS (implementation) ===================================================== */

#if MIXPI_IN_PART(MIXPREC_HOST)
MIXPREC_API const char *mixp_result_text(mixp_result result) {
#  define MIXPI_RESULT_TEXT(name, text) text,
    static const char *const texts[] = { MIXP_RESULTS(MIXPI_RESULT_TEXT) };
#  undef MIXPI_RESULT_TEXT
    return (unsigned)result < MIXP_RESULT_COUNT ? texts[result] : "unknown result";
}

MIXPREC_API const char *mixp_version(void) { return MIXPREC_VERSION; }
#endif

