/* mlp.c - the whole loop: a small network learns two spirals in fp16, beside its PyTorch twin
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 *     cc -O2 examples/mlp.c -o mlp -lm && ./mlp
 */
#define MIXPREC_IMPLEMENTATION
#include "../mixprec.h"
#include <math.h>
#include <stdio.h>

enum { POINTS = 512, HIDDEN = 64, STEPS = 400 };

typedef struct mlp { mixp_tensor *w[3], *b[3]; } mlp;

/* Two spirals, one inside the other; a point's class is the spiral it lies on. */
static void make_spirals(float *xy, int32_t *label) {
    for (int i = 0; i < POINTS; i++) {
        double t = (double)(i / 2) / (POINTS / 2), angle = 9.0 * t + 3.14159265 * (i % 2);
        xy[2 * i] = (float)((0.2 + t) * cos(angle));
        xy[2 * i + 1] = (float)((0.2 + t) * sin(angle));
        label[i] = i % 2;
    }
}

/* nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 2): weights are fp32 */
static void make_mlp(mixp_context *ctx, mlp *m) {
    static const int64_t width[4] = {2, HIDDEN, HIDDEN, 2};
    for (int i = 0; i < 3; i++) {
        int64_t shape[2] = {width[i + 1], width[i]};
        double  bound = 1 / sqrt((double)width[i]);
        char    weight[16], bias[16];                       /* verdicts and checkpoints name them */
        snprintf(weight, sizeof weight, "fc%d.weight", i);
        snprintf(bias, sizeof bias, "fc%d.bias", i);
        m->w[i] = mixp_param(ctx, weight, MIXP_F32, 2, shape);
        m->b[i] = mixp_param(ctx, bias, MIXP_F32, 1, shape);
        mixp_init_uniform(m->w[i], -bound, bound);
        mixp_init_uniform(m->b[i], -bound, bound);
    }
}

static mixp_tensor *mlp_forward(mixp_context *ctx, const mlp *m, mixp_tensor *x) {
    x = mixp_relu(ctx, mixp_linear(ctx, x, m->w[0], m->b[0]));
    x = mixp_relu(ctx, mixp_linear(ctx, x, m->w[1], m->b[1]));
    return mixp_linear(ctx, x, m->w[2], m->b[2]);
}

static double accuracy(const mixp_tensor *logits, const int32_t *label) {
    float   z[2 * POINTS];
    int32_t right = 0;
    if (!logits || mixp_read_f32(logits, z, logits->count) != MIXP_OK) return 0;
    for (int i = 0; i < logits->shape[0]; i++) right += (z[2 * i + 1] > z[2 * i]) == label[i];
    return 100.0 * right / (double)logits->shape[0];
}

int main(void) {
    static float   xy[2 * POINTS];
    static int32_t label[POINTS];
    const int64_t  shape[2] = {POINTS, 2};
    const char    *why;
    mlp            model;
    make_spirals(xy, label);

    mixp_context   *ctx = mixp_context_new(NULL);           /* PyTorch                           */
    make_mlp(ctx, &model);                                  /* model = MLP()                     */
    mixp_optimizer_desc d = mixp_adamw_defaults();
    d.lr = 3e-3;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);      /* opt = AdamW(params, lr=3e-3)      */
    for (int i = 0; i < 3; i++) {
        mixp_optimizer_add(opt, model.w[i], NULL);
        mixp_optimizer_add(opt, model.b[i], NULL);
    }
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);       /* scaler = GradScaler()             */

    for (int step = 1; step <= STEPS; step++) {
        mixp_tensor *x, *y, *logits = NULL, *loss = NULL;
        mixp_step_begin(ctx);
        x = mixp_input_f32(ctx, 2, shape, xy);
        y = mixp_input_i32(ctx, 1, shape, label);
        mixp_zero_grad(opt);                                /* opt.zero_grad()                   */
        MIXP_AUTOCAST(ctx, MIXP_F16) {                      /* with autocast(dtype=float16):     */
            logits = mlp_forward(ctx, &model, x);           /*   logits = model(x)               */
            loss = mixp_cross_entropy(ctx, logits, y,       /*   loss = cross_entropy(logits, y) */
                                      MIXP_IGNORE);
        }
        mixp_backward(ctx, mixp_scaler_scale(scaler, loss));/* scaler.scale(loss).backward()     */
        mixp_scaler_step(scaler, opt);                      /* scaler.step(opt)                  */
        mixp_scaler_update(scaler);                         /* scaler.update()                   */
        if (step % 40 == 0)
            printf("step %4d | loss %.4f | scale %g | %5.1f%% right\n", step, mixp_item(loss),
                   (double)mixp_scaler_loss_scale(scaler), accuracy(logits, label));
    }
    int failed = mixp_context_error(ctx, &why) != MIXP_OK;
    if (failed) fprintf(stderr, "mlp: %s\n", why);
    mixp_context_free(ctx);
    return failed;
}
