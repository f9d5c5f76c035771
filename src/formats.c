#pragma once
#include "formats.h"
#include "macros.c"
/* ==== 2. FORMATS (implementation) ===================================================== */

#if MIXPI_IN_PART(MIXPREC_HOST)
MIXPREC_API size_t mixp_dtype_size(mixp_dtype dtype) {
#  define MIXPI_DTYPE_BYTES(constant, name, bytes, e, m, bias, special) bytes,
    static const unsigned char size[] = { MIXP_DTYPES(MIXPI_DTYPE_BYTES) };
#  undef MIXPI_DTYPE_BYTES
    return (unsigned)dtype < MIXP_DTYPE_COUNT ? size[dtype] : 0;
}

MIXPREC_API const char *mixp_dtype_name(mixp_dtype dtype) {
#  define MIXPI_DTYPE_NAME(constant, name, bytes, e, m, bias, special) name,
    static const char *const names[] = { MIXP_DTYPES(MIXPI_DTYPE_NAME) };
#  undef MIXPI_DTYPE_NAME
    return (unsigned)dtype < MIXP_DTYPE_COUNT ? names[dtype] : "?";
}
#endif

static int mixpi_is_real(mixp_dtype d) { return d == MIXP_F32 || d == MIXP_F16 || d == MIXP_BF16; }

/* Is d converted by vector code? */
static int mixpi_has_vectors(mixp_dtype d) {
    return mixpi_is_real(d) || d == MIXP_F8_E4M3 || d == MIXP_F8_E5M2 || d == MIXP_F8_E8M0;
}

static uint64_t mixpi_load_code(const void *p, size_t size) {
    uint16_t h;
    uint32_t u;
    uint64_t d;
    switch (size) {
    case 1: return *(const uint8_t *)p;
    case 2: memcpy(&h, p, 2); return h;
    case 4: memcpy(&u, p, 4); return u;
    default: memcpy(&d, p, 8); return d;
    }
}

static void mixpi_store_code(void *p, size_t size, uint64_t code) {
    uint16_t h = (uint16_t)code;
    uint32_t u = (uint32_t)code;
    switch (size) {
    case 1: *(uint8_t *)p = (uint8_t)code; break;
    case 2: memcpy(p, &h, 2); break;
    case 4: memcpy(p, &u, 4); break;
    default: memcpy(p, &code, 8);
    }
}
