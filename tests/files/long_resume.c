/* long_resume.c - 20,000 steps with planted overflows, stopped and resumed fifty times: every byte
 * equals that of an uninterrupted run.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#define _XOPEN_SOURCE 700
#include <unistd.h>
#include "mixprec.h"
#include "test.h"

enum { STEPS = 20000, STOPS = 50, IN = 6, OUT = 5, ROWS = 4 };
static const char *path = "run.safetensors";

typedef struct program {
    mixp_context   *ctx;
    mixp_tensor    *w, *b;
    mixp_optimizer *opt[2];
    mixp_scaler    *scaler;
    double          losses;     /* of all steps, kept in the checkpoint */
    mixp_checkpoint_value value;
    mixp_checkpoint all;
} program;

static void program_make(program *p) {
    static const int64_t w[2] = { OUT, IN }, b[1] = { OUT };
    mixp_context_desc desc;
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc scaler;
    memset(p, 0, sizeof *p);
    memset(&desc, 0, sizeof desc);
    memset(&scaler, 0, sizeof scaler);
    desc.seed = 11;
    desc.threads = 1;
    scaler.growth_interval = 37;
    p->ctx = mixp_context_new(&desc);
    p->w = mixp_param(p->ctx, "w", MIXP_F16, 2, w);
    p->b = mixp_param(p->ctx, "b", MIXP_F32, 1, b);
    mixp_init_normal(p->w, 0, 0.5);
    mixp_fill(p->b, 0);
    adamw.lr = 1e-3;
    adamw.max_norm = 1;
    sgd.lr = 1e-3;
    sgd.momentum = 0.9;
    p->opt[0] = mixp_optimizer_new(p->ctx, &adamw);
    p->opt[1] = mixp_optimizer_new(p->ctx, &sgd);
    mixp_optimizer_add(p->opt[0], p->w, NULL);
    mixp_optimizer_add(p->opt[1], p->b, NULL);
    p->scaler = mixp_scaler_new(p->ctx, &scaler);
    p->value.name = "losses";
    p->value.dtype = MIXP_F64;
    p->value.count = 1;
    p->value.data = &p->losses;
    p->all.ctx = p->ctx;
    p->all.scaler = p->scaler;
    p->all.optimizers = p->opt;
    p->all.n_optimizers = 2;
    p->all.values = &p->value;
    p->all.n_values = 1;
}

/* A batch that depends on the step alone. About one in ninety has an element so large that its
 * gradients overflow whatever the scale is. */
static void batch_of(int step, float *x, float *y) {
    uint32_t r = (uint32_t)step * 2654435761u + 1;
    for (int i = 0; i < ROWS * (IN + OUT); i++) {
        r = r * 1664525u + 1013904223u;
        float v = (float)(r >> 16) / 32768.0f - 1.0f;
        if (i < ROWS * IN) x[i] = v;
        else y[i - ROWS * IN] = v;
    }
    if ((r >> 9) % 90 == 0) x[r % (ROWS * IN)] = 3e38f;
}

static int skipped;             /* steps of one optimizer or both */
static void program_step(program *p, int step) {
    static const int64_t in[2] = { ROWS, IN }, out[2] = { ROWS, OUT };
    float x[ROWS * IN], y[ROWS * OUT];
    mixp_tensor *loss = NULL;
    batch_of(step, x, y);
    mixp_step_begin(p->ctx);
    mixp_zero_grad(p->opt[0]);
    mixp_zero_grad(p->opt[1]);
    MIXP_AUTOCAST(p->ctx, MIXP_F16) {
        mixp_tensor *h = mixp_linear(p->ctx, mixp_input(p->ctx, MIXP_F32, 2, in, x), p->w, p->b);
        h = mixp_dropout(p->ctx, mixp_tanh(p->ctx, h), 0.1f, 1);
        loss = mixp_mse(p->ctx, h, mixp_input(p->ctx, MIXP_F32, 2, out, y));
    }
    if (mixp_item(loss) < 1e6) p->losses += mixp_item(loss);
    mixp_backward(p->ctx, mixp_scaler_scale(p->scaler, loss));
    mixp_scaler_step(p->scaler, p->opt[0]);
    mixp_scaler_step(p->scaler, p->opt[1]);
    mixp_scaler_update(p->scaler);
    skipped += mixp_scaler_verdict(p->scaler).outcome == MIXP_STEP_SKIPPED;
}

static unsigned char *file_bytes(size_t *size) {
    static unsigned char bytes[2][65536];
    static int which;
    FILE *f = fopen(path, "rb");
    which = !which;
    *size = f ? fread(bytes[which], 1, sizeof bytes[0], f) : 0;
    if (f) fclose(f);
    return bytes[which];
}

static void stopped_fifty_times_is_one_run(void) {
    program p;
    size_t whole_size, parts_size;
    int step, stop = 0, began = 0;
    program_make(&p);
    for (step = 0; step < STEPS; step++) program_step(&p, step);
    CHECK_INT(mixp_context_error(p.ctx, NULL), MIXP_OK);
    CHECK_INT(mixp_checkpoint_save(path, &p.all), MIXP_OK);
    mixp_context_free(p.ctx);
    unsigned char *whole = file_bytes(&whole_size);
    printf("  %d of %d steps were skipped\n", skipped, STEPS);
    CHECK(skipped > STEPS / 200 && skipped < STEPS / 20);
    for (; stop <= STOPS; stop++) {
        int end = stop == STOPS ? STEPS : (int)((int64_t)STEPS * (stop * stop + 7) / (STOPS * STOPS + 14));
        program_make(&p);
        if (stop > 0) CHECK_INT(mixp_checkpoint_load(path, &p.all), MIXP_OK);
        for (step = began; step < end; step++) program_step(&p, step);
        CHECK_INT(mixp_checkpoint_save(path, &p.all), MIXP_OK);
        mixp_context_free(p.ctx);
        began = end;
    }
    unsigned char *parts = file_bytes(&parts_size);
    CHECK(whole_size > 1000 && whole_size == parts_size);
    CHECK(memcmp(whole, parts, whole_size) == 0);
}

int main(void) {
    char folder[] = "/tmp/mixprec_resume_XXXXXX", command[64];
    if (!mkdtemp(folder) || chdir(folder) != 0) { printf("no temporary folder\n"); return 1; }
    RUN(stopped_fifty_times_is_one_run);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (chdir("/") != 0 || system(command) != 0) printf("%s stays\n", folder);
    return test_report();
}
