/* each_isa.h - a context on each instruction set that the machine has, one after the other. The test frees it.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef EACH_ISA_H
#define EACH_ISA_H

static mixp_context *context_on(int isa) {
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.device = mixp_cpu_with((mixp_isa)isa);
    return d.device ? mixp_context_new(&d) : NULL;
}
#define EACH_ISA(isa, ctx)                                                                \
    for (isa = 0; isa < MIXP_ISA_COUNT; isa++)                                            \
        if ((ctx = context_on(isa)) != NULL)

#endif
