/* cortex_m.c - start-up of a bare Cortex-M4 (qemu's mps2-an386): the vectors, the FPU, and a count of instructions
 * from constructors to destructors, on stderr. newlib's semihosting does the rest.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include <stdint.h>
#include <stdio.h>

extern void _start(void);
extern char stack_top[];

/* CMSDK's timer 0: 25 MHz, which counts down. With -icount shift=0 an instruction takes 1 ns. */
static volatile uint32_t *const timer = (volatile uint32_t *)0x40000000u;
enum { TIMER_ON, TIMER_VALUE, TIMER_RELOAD, NS_A_TICK = 40 };

static void reset(void) {
    *(volatile uint32_t *)0xE000ED88u |= 0xFu << 20;    /* CPACR: access to the FPU */
    __asm__ volatile("dsb\nisb");
    _start();
}

/* A fault stops the machine. */
static void fault(void) {
    for (;;) *(volatile uint32_t *)0xE000ED0Cu = 0x05FA0004u;
}

__attribute__((section(".vectors"), used)) static void *const vectors[7] = {
    stack_top, (void *)reset, (void *)fault, (void *)fault, (void *)fault, (void *)fault, (void *)fault
};

__attribute__((constructor)) static void count_from_here(void) {
    timer[TIMER_RELOAD] = timer[TIMER_VALUE] = UINT32_MAX;
    timer[TIMER_ON] = 1;
}

__attribute__((destructor)) static void count_to_here(void)
{ fprintf(stderr, "%.0f instructions\n", (double)NS_A_TICK * (double)(UINT32_MAX - timer[TIMER_VALUE])); }
