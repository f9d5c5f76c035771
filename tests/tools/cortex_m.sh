#!/bin/sh
# cortex_m.sh - the header on a bare Cortex-M4, in qemu: the example without malloc prints what it should; a network
# trained in fp16 has the bits of this machine; bytes of the program, and instructions of a step.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
flags='-std=c99 -Os -DMIXPREC_NO_SIMD -DMIXPREC_NO_RANKS -DMIXPREC_NO_WATCH -DMIXPREC_NO_CHECKPOINT -DMIXPREC_STATIC'
for tool in arm-none-eabi-gcc qemu-system-arm; do
    command -v $tool >/dev/null || { skip "Cortex-M: no $tool"; report; exit; }
done

for_m4() { # PROGRAM SOURCE
    arm-none-eabi-gcc -mcpu=cortex-m4 -mfloat-abi=hard -mfpu=fpv4-sp-d16 $flags -w -ffunction-sections -fdata-sections \
        -Wl,--gc-sections -I. --specs=rdimon.specs -T tests/support/cortex_m.ld "$2" tests/support/cortex_m.c -lm -o "$tmp/$1"
}
on_m4() { # PROGRAM
    timeout 300 qemu-system-arm -M mps2-an386 -nographic -monitor none -serial none -icount shift=0 \
        -semihosting-config enable=on,target=native -kernel "$tmp/$1" </dev/null 2>"$tmp/count"
}

# Two layers and a ReLU on four points, in fp16 with a scaler; the weights' bits after each fifth step.
cat >"$tmp/steps.c" <<'END'
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>
static char memory[1 << 20];
int main(void) {
    const int64_t in[2] = { 8, 2 }, out[2] = { 1, 8 }, four[2] = { 4, 2 }, one[2] = { 4, 1 };
    float x[8] = { 0, 0, 0, 1, 1, 0, 1, 1 }, y[4] = { 0, 1, 1, 0 }, w[16];
    mixp_context_desc d;
    mixp_context *ctx;
    mixp_tensor *a, *b, *loss = NULL;
    mixp_optimizer *opt;
    mixp_scaler *scaler;
    memset(&d, 0, sizeof d);
    d.memory = memory; d.memory_bytes = sizeof memory; d.threads = 1;
    ctx = mixp_context_new(&d);
    a = mixp_param(ctx, "a", MIXP_F32, 2, in);
    b = mixp_param(ctx, "b", MIXP_F32, 2, out);
    for (int i = 0; i < 16; i++) w[i] = (float)(i * 7 % 16) / 8 - 0.9f;
    mixp_write(a, w, MIXP_F32, 16);
    mixp_write(b, w, MIXP_F32, 8);
    opt = mixp_optimizer_new(ctx, NULL);
    scaler = mixp_scaler_new(ctx, NULL);
    mixp_optimizer_add(opt, a, NULL);
    mixp_optimizer_add(opt, b, NULL);
    for (int step = 0; step < 40; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            mixp_tensor *h = mixp_relu(ctx, mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, four, x), a, NULL));
            loss = mixp_mse(ctx, mixp_linear(ctx, h, b, NULL), mixp_input(ctx, MIXP_F32, 2, one, y));
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));
        mixp_scaler_step(scaler, opt);
        mixp_scaler_update(scaler);
        if (step % 5) continue;
        mixp_read(a, w, MIXP_F32, 16);
        for (int i = 0; i < 16; i++) printf("%08lx ", (unsigned long)mixp_bits_of_f32(w[i]));
        printf("%08lx\n", (unsigned long)mixp_bits_of_f32((float)mixp_item(loss)));
    }
    return mixp_context_error(ctx, NULL);
}
END

learns() { on_m4 example >"$tmp/out" && grep -qx 'w = 3.0, in the bytes that two steps needed: yes' "$tmp/out"; }
alike() { on_m4 steps >"$tmp/there" && "$tmp/host" >"$tmp/here" && [ -s "$tmp/here" ] && cmp "$tmp/here" "$tmp/there"; }
text() { arm-none-eabi-size "$tmp/example" | awk 'NR == 2 { print $1 }'; }
small() { [ "$(text)" -lt 300000 ] || { text; false; }; }
few() { awk '{ exit !($1 > 0 && $1 / 202 < 150000) }' "$tmp/count" || { cat "$tmp/count"; false; }; }

check 'the example without malloc compiles'          for_m4 example examples/08_no_malloc.c
check 'it learns in the bytes that two steps needed' learns
check 'a step of it takes fewer than 150,000 instructions' few
echo "     $(text) bytes of code and constants; $(awk '{ printf "%.0f", $1 / 202 }' "$tmp/count") instructions a step"
check 'its code is below 300,000 bytes'              small
check 'a network compiles'                           for_m4 steps "$tmp/steps.c"
check 'the same for this machine'                    ${CC:-cc} $flags -w -I. "$tmp/steps.c" -lm -o "$tmp/host"
check 'its weights and losses have the same bits'    alike
report
