# user_program.sh - writes a small program that uses mixprec.h: $tmp/user.h, a.c, b.c. Scripts source this file.
# SPDX-License-Identifier: MIT OR Unlicense

# a.c holds the implementation, b.c and main; each answers 0 when the library works there.
# USER_BEFORE is what a cell puts before the header.
cat >"$tmp/user.h" <<'END'
#ifdef __cplusplus
#define USER_C extern "C"
#else
#define USER_C extern
#endif
USER_C int user_a(void);

/* Arrays with NaN are narrowed as single numbers are, on every instruction set. */
static int user_arrays(void)
{
    float x[40];
    mixp_bf16 y[40];
    int isa, i, bad = 0;
    for (i = 0; i < 40; i++) x[i] = mixp_f32_of_bits(0x7F800001u + 0x12345u * (uint32_t)i);
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *cpu = mixp_cpu_with((mixp_isa)isa);
        if (!cpu) continue;
        bad |= mixp_convert_with(cpu, y, MIXP_BF16, x, MIXP_F32, 40, NULL) != MIXP_OK;
        for (i = 0; i < 40; i++) bad |= y[i].bits != mixp_bf16_from_f32(x[i]).bits;
    }
    return bad;
}

/* 1 rounds to itself, its result has a text, the device has a table, versions agree. */
static int user_check(void)
{
    const mixp_device *cpu = mixp_cpu();
    return user_arrays() ||
           mixp_f16_from_f32(1.0f).bits != 0x3C00 || mixp_f32_from_bf16(mixp_bf16_from_f32(-2.0f)) > -2.0f ||
           mixp_result_text(MIXP_OK)[0] != 'o' || mixp_version()[0] != MIXPREC_VERSION[0] || !cpu || !cpu->name;
}
END
cat >"$tmp/a.c" <<'END'
#include "mixprec.h"
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "mixprec.h"
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "user.h"
int user_a(void) { return user_check(); }
END
cat >"$tmp/b.c" <<'END'
#include "mixprec.h"
#include "user.h"
#include "mixprec.h"
int main(void) { return user_check() + user_a(); }
END
