/* isa.h - the option --isa: the instruction set of the CPU, by name; a part of trainer.c and llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_ISA_H
#define TRAINER_ISA_H

#include "messages.h"

/* In the order of mixp_isa. */
static const char *const isa_names[MIXP_ISA_COUNT] = {
    "scalar", "avx2", "avx512", "avx512_bf16", "neon", "neon_f16", "neon_bf16", "amx", "amx_f16"
};

/* "scalar, avx2, avx512 (default)": what this machine has. */
static const char *isa_list(char *text, size_t space) {
    size_t at = 0;
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *cpu = mixp_cpu_with((mixp_isa)isa);
        if (!cpu || at >= space) continue;
        at += (size_t)snprintf(text + at, space - at, "%s%s%s", at ? ", " : "", isa_names[isa],
                               cpu == mixp_cpu() ? " (default)" : "");
    }
    return text;
}

/* The CPU with the set of this name; "" = the fastest. */
static const mixp_device *cpu_named(const char *name) {
    const mixp_device *cpu = name[0] ? NULL : mixp_cpu();
    char               list[256] = "";
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++)
        if (strcmp(name, isa_names[isa]) == 0) cpu = mixp_cpu_with((mixp_isa)isa);
    if (!cpu)
        die(2, "--isa: \"%s\" is not an instruction set of this machine, which has %s", name,
            isa_list(list, sizeof list));
    return cpu;
}

#endif
