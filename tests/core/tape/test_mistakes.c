/* test_mistakes.c - mistakes of first users: each is reported at once, with its code, its subject
 * and a fix. Mistakes that cannot be detected have symptoms, which the test shows.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "examples/ops.h"
#include "examples/compare.h"
#include "test.h"
#include "new_optimizer.h"
#include <math.h>
#include <unistd.h>

/* A layer of 4 inputs and 2 outputs, with all that trains it. */
typedef struct model {
    mixp_context   *ctx;
    mixp_tensor    *w, *b;
    mixp_optimizer *opt;
    mixp_scaler    *scaler;
} model;

static const int64_t weights[2] = { 2, 4 }, two[1] = { 2 }, batch[2] = { 8, 4 }, eight[1] = { 8 };
static float   numbers[64];
static int32_t classes[8];
static int64_t wide_classes[8];

static model model_open(void) {
    model m;
    for (int i = 0; i < 64; i++) numbers[i] = 0.25f * (float)(i % 7 - 3);
    for (int i = 0; i < 8; i++) classes[i] = i % 2;
    m.ctx = mixp_context_new(NULL);
    m.w = mixp_param(m.ctx, "fc.w", MIXP_F32, 2, weights);
    m.b = mixp_param(m.ctx, "fc.b", MIXP_F32, 1, two);
    mixp_write(m.w, numbers, MIXP_F32, 8);
    m.opt = new_sgd(m.ctx);
    mixp_optimizer_add(m.opt, m.w, NULL);
    mixp_optimizer_add(m.opt, m.b, NULL);
    m.scaler = mixp_scaler_new(m.ctx, NULL);
    mixp_step_begin(m.ctx);
    return m;
}

static mixp_tensor *input(const model *m) {
    return mixp_input(m->ctx, MIXP_F32, 2, batch, numbers);
}
static mixp_tensor *targets(const model *m) {
    return mixp_input(m->ctx, MIXP_I32, 1, eight, classes);
}
static mixp_tensor *logits_of(const model *m) {
    return mixp_linear(m->ctx, input(m), m->w, m->b);
}
static mixp_tensor *loss_of(const model *m) {
    return mixp_cross_entropy(m->ctx, logits_of(m), targets(m), MIXP_IGNORE);
}
static void backward(const model *m) {
    mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, loss_of(m)));
}
static void step(const model *m) {
    mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_update(m->scaler);
}

/* --- shapes, dtypes, numbers ------------------------------------------------------------- */

static void transposed_weight(model *m) {
    static const int64_t turned[2] = { 4, 2 };
    mixp_linear(m->ctx, input(m), mixp_param(m->ctx, "turned", MIXP_F32, 2, turned), NULL);
}
static void target_of_other_shape(model *m) { mixp_mse(m->ctx, logits_of(m), input(m)); }
static void matrices_that_do_not_fit(model *m) {
    mixp_matmul(m->ctx, input(m), input(m), 0, 0);
}
static void parts_that_do_not_join(model *m) {
    mixp_tensor *part[2];
    part[0] = input(m);
    part[1] = logits_of(m);
    mixp_concat(m->ctx, 2, part, 0);
}
static void reshape_to_another_count(model *m) { mixp_reshape(m->ctx, input(m), 1, eight); }
static void transpose_of_no_axis(model *m) { mixp_transpose(m->ctx, input(m), 0, 5); }
static void heads_that_do_not_divide(model *m) {
    static const int64_t shape[3] = { 1, 4, 12 };
    mixp_attention(m->ctx, mixp_input(m->ctx, MIXP_F32, 3, shape, numbers), 3, 1, 0.0f);
}
static void int64_targets(model *m) {
    mixp_tensor *t = mixp_input(m->ctx, MIXP_I64, 1, eight, wide_classes);
    mixp_cross_entropy(m->ctx, logits_of(m), t, MIXP_IGNORE);
}
static void class_out_of_range(model *m) {
    classes[5] = 7;
    loss_of(m);
}
static void id_out_of_range(model *m) {
    classes[3] = 9;
    mixp_embedding(m->ctx, m->w, targets(m));
}
static void float_ids(model *m) { mixp_embedding(m->ctx, m->w, input(m)); }
static void softmax_of_integers(model *m) { mixp_softmax(m->ctx, targets(m)); }
static void dropout_in_percent(model *m) { mixp_dropout(m->ctx, input(m), 10.0f, 1); }
static void norm_without_eps(model *m) { mixp_layer_norm(m->ctx, input(m), NULL, NULL, -1.0f); }
static void bce_in_fp16(model *m) {
    MIXP_AUTOCAST(m->ctx, MIXP_F16) { mixp_bce(m->ctx, input(m), input(m)); }
}

/* --- tensors ------------------------------------------------------------------------------ */

static void null_batch(model *m) { mixp_input(m->ctx, MIXP_F32, 2, batch, NULL); }
static void dimension_of_zero(model *m) {
    static const int64_t empty[2] = { 3, 0 };
    mixp_param(m->ctx, "empty", MIXP_F32, 2, empty);
}
static void integer_parameter(model *m) { mixp_param(m->ctx, "ids", MIXP_I32, 1, two); }
static void one_name_twice(model *m) { mixp_param(m->ctx, "fc.w", MIXP_F32, 2, weights); }
static void param_in_every_step(model *m) {
    for (int i = 0; i < 6; i++) {
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        mixp_param(m->ctx, NULL, MIXP_F32, 1, two);
        backward(m);
        step(m);
    }
}
static void view_in_every_step(model *m) {
    for (int i = 0; i < 6; i++) {
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        mixp_view(m->ctx, "batch", MIXP_F32, 2, batch, numbers);
        backward(m);
        step(m);
    }
}
static void view_of_nothing(model *m) { mixp_view(m->ctx, "v", MIXP_F32, 1, two, NULL); }
static void view_of_odd_bytes(model *m) {
    mixp_view(m->ctx, "v", MIXP_F32, 1, two, (char *)numbers + 1);
}
static void gradient_of_integers(model *m) { mixp_tensor_set_requires_grad(targets(m), 1); }
static void small_read(model *m) {
    float few[4];
    mixp_read(m->w, few, MIXP_F32, 4);
}
static void item_of_a_matrix(model *m) { mixp_item(logits_of(m)); }
static void tensor_of_the_last_step(model *m) {
    mixp_tensor *x = input(m);
    mixp_step_begin(m->ctx);
    mixp_linear(m->ctx, x, m->w, m->b);
}
static void item_in_an_evaluation(model *m) {
    const mixp_tensor *loss = loss_of(m);
    mixp_eval_begin(m->ctx);
    mixp_item(loss);
}
static void tensor_in_an_evaluation(model *m) {
    mixp_tensor *x = input(m);
    mixp_eval_begin(m->ctx);
    mixp_linear(m->ctx, x, m->w, m->b);
}
static void backward_in_an_evaluation(model *m) {
    mixp_tensor *loss = loss_of(m);
    mixp_eval_begin(m->ctx);
    mixp_backward(m->ctx, loss);
}
static void two_contexts(model *m) {
    static mixp_context *other;
    mixp_context_free(other);
    other = mixp_context_new(NULL);
    mixp_linear(m->ctx, mixp_input(other, MIXP_F32, 2, batch, numbers), m->w, m->b);
    mixp_context_free(other);
    other = NULL;
}

/* --- walking back --------------------------------------------------------------------------- */

static void backward_of_nothing(model *m) { mixp_backward(m->ctx, NULL); }
static void backward_of_a_matrix(model *m) { mixp_backward(m->ctx, logits_of(m)); }
static void backward_twice(model *m) {
    mixp_tensor *loss = mixp_scaler_scale(m->scaler, loss_of(m));
    mixp_backward(m->ctx, loss);
    mixp_backward(m->ctx, loss);
}
static void backward_without_record(model *m) {
    mixp_tensor *loss = NULL;
    MIXP_NO_GRAD(m->ctx) { loss = loss_of(m); }
    mixp_backward(m->ctx, loss);
}
static void loss_of_a_gradient(model *m) {
    backward(m);
    mixp_sum(m->ctx, m->w->grad, MIXP_ALL, 0);
}

/* --- regions -------------------------------------------------------------------------------- */

static void break_out_of_autocast(model *m) {
    for (int i = 0; i < 1; i++) {
        mixpi_autocast_enter(m->ctx, MIXP_F16);      /* what MIXP_AUTOCAST does, left by break */
    }
    mixp_step_begin(m->ctx);
}
static void autocast_in_fp8(model *m) {
    MIXP_AUTOCAST(m->ctx, MIXP_F8_E4M3) { input(m); }
}
static void level_that_is_none(model *m) { mixp_autocast_set_level(m->ctx, 7); }
static void level_3_of_f32(model *m) {
    mixp_autocast_set_level(m->ctx, 3);
    MIXP_AUTOCAST(m->ctx, MIXP_F16) { logits_of(m); }
}
static void scope_without_a_name(model *m) { mixp_scope_open(m->ctx, ""); }

/* --- optimizers ------------------------------------------------------------------------------ */

static void zeroed_description(model *m) {
    mixp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    d.lr = 1e-3;
    mixp_optimizer_new(m->ctx, &d);
}
static void negative_rate(model *m) {
    mixp_optimizer_desc d = mixp_sgd_defaults();
    d.lr = -1.0;
    mixp_optimizer_new(m->ctx, &d);
}
static void schedule_without_an_end(model *m) {
    mixp_optimizer_desc d = mixp_sgd_defaults();
    d.schedule.kind = MIXP_SCHEDULE_COSINE;
    mixp_optimizer_new(m->ctx, &d);
}
static void nesterov_without_momentum(model *m) {
    mixp_optimizer_desc d = mixp_sgd_defaults();
    d.nesterov = 1;
    mixp_optimizer_new(m->ctx, &d);
}
static void group_with_a_rate_alone(model *m) {
    mixp_param_group g;
    memset(&g, 0, sizeof g);
    g.lr = 1e-3;
    mixp_optimizer_add_group(mixp_optimizer_new(m->ctx, NULL), &g);
}
static void added_twice(model *m) { mixp_optimizer_add(m->opt, m->w, NULL); }
static void added_as_another_view(model *m) {
    mixp_tensor *again = mixp_view(m->ctx, "again", MIXP_F32, 2, weights, m->w->data);
    mixp_optimizer_add(m->opt, again, mixp_view(m->ctx, "g", MIXP_F32, 2, weights, numbers));
}
static void adds_an_activation(model *m) { mixp_optimizer_add(m->opt, input(m), NULL); }
static void view_without_gradient(model *m) {
    mixp_optimizer_add(m->opt, mixp_view(m->ctx, "v", MIXP_F32, 1, two, numbers), NULL);
}
static void gradient_of_another_size(model *m) {
    mixp_tensor *v = mixp_view(m->ctx, "v", MIXP_F32, 1, two, numbers);
    mixp_optimizer_add(m->opt, v, mixp_view(m->ctx, "g", MIXP_F32, 1, eight, numbers + 8));
}
static void nothing_added(model *m) {
    backward(m);
    mixp_scaler_step(m->scaler, new_sgd(m->ctx));
}
static void parameter_in_no_optimizer(model *m) {
    mixp_optimizer *half = new_sgd(m->ctx);
    mixp_optimizer_free(m->opt);
    mixp_optimizer_add(half, m->w, NULL);
    for (int i = 0; i < 3; i++) {
        mixp_step_begin(m->ctx);
        mixp_zero_grad(half);
        backward(m);
        mixp_scaler_step(m->scaler, half);
        mixp_scaler_update(m->scaler);
    }
}
static void spike_without_a_loss(model *m) {
    mixp_optimizer_desc d = mixp_sgd_defaults();
    d.spike.of = MIXP_SPIKE_LOSS;
    mixp_optimizer *opt = mixp_optimizer_new(m->ctx, &d);
    mixp_optimizer_add(opt, m->w, NULL);
    backward(m);
    mixp_scaler_step(m->scaler, opt);
}

/* --- the order of a step ---------------------------------------------------------------------- */

static void forgotten_step_begin(model *m) {
    for (int i = 0; i < 2; i++) {
        mixp_zero_grad(m->opt);
        backward(m);
        step(m);
    }
}
static void forgotten_backward(model *m) {
    loss_of(m);
    step(m);
}
static void forgotten_update(model *m) {
    backward(m);
    mixp_scaler_step(m->scaler, m->opt);
    mixp_scaler_step(m->scaler, m->opt);
}
static void update_without_step(model *m) { mixp_scaler_update(m->scaler); }
static void unscaled_loss(model *m) {
    mixp_backward(m->ctx, loss_of(m));
    step(m);
}
static void loss_scaled_twice(model *m) {
    mixp_tensor *loss = mixp_scaler_scale(m->scaler, mixp_scaler_scale(m->scaler, loss_of(m)));
    mixp_backward(m->ctx, loss);
    step(m);
}
static void step_without_the_scaler(model *m) {
    backward(m);
    mixp_optimizer_step(m->opt);
}
static void step_without_the_scaler_after_unscale(model *m) {
    backward(m);
    mixp_scaler_unscale(m->scaler, m->opt);
    mixp_optimizer_step(m->opt);
}
static void clip_before_unscale(model *m) {
    backward(m);
    mixp_clip_grad_norm(m->opt, 1.0);
}
static void unscaled_twice(model *m) {
    backward(m);
    mixp_scaler_unscale(m->scaler, m->opt);
    mixp_scaler_unscale(m->scaler, m->opt);
}
static void anothers_scaler(model *m) {
    backward(m);
    mixp_scaler_step(mixp_scaler_new(m->ctx, NULL), m->opt);
}
static void gradients_used_again(model *m) {
    backward(m);
    step(m);
    step(m);
}
static void own_gradients_as_they_are(model *m) {
    static float w[8], g[8];
    mixp_optimizer *opt = new_sgd(m->ctx);
    mixp_optimizer_add(opt, mixp_view(m->ctx, "mine", MIXP_F32, 1, eight, w),
                       mixp_view(m->ctx, "mine.grad", MIXP_F32, 1, eight, g));
    g[0] = 1.0f;
    mixp_scaler_step(m->scaler, opt);
}

/* --- scalers, freeing, the rest ----------------------------------------------------------------- */

static void growth_that_shrinks(model *m) {
    mixp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.growth_factor = 0.5;
    mixp_scaler_new(m->ctx, &d);
}
static void scale_of_infinity(model *m) {
    mixp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.init_scale = HUGE_VALF;
    mixp_scaler_new(m->ctx, &d);
}
static void gradients_of_a_freed_scaler(model *m) {
    backward(m);
    mixp_scaler_free(m->scaler);
    mixp_scaler_step(mixp_scaler_new(m->ctx, NULL), m->opt);
}
static void loss_of_a_freed_scaler(model *m) {
    mixp_tensor *loss = mixp_scaler_scale(m->scaler, loss_of(m));
    mixp_scaler_free(m->scaler);
    mixp_backward(m->ctx, loss);
}
static void optimizer_freed_too_soon(model *m) {
    backward(m);
    mixp_scaler_step(m->scaler, m->opt);
    mixp_optimizer_free(m->opt);
}
static void graph_on_a_cpu(model *m) { mixp_capture_begin(m->ctx); }
static void moment_that_is_not_kept(model *m) {
    float few[8];
    mixp_optimizer_read(m->opt, m->w, MIXP_STATE_V, few, 8);
}
static void weights_of_a_c_file(model *m) {
    char path[64];
    FILE *file;
    snprintf(path, sizeof path, "/tmp/mixprec_mistake_%ld.c", (long)getpid());
    file = fopen(path, "w");
    if (file) fprintf(file, "/* a program */\nint main(void) { return 0; }\n");
    if (file) fclose(file);
    mixp_checkpoint_load_weights(path, m->ctx, NULL);
    remove(path);
}
static void weights_that_are_not_there(model *m) {
    mixp_checkpoint_load_weights("no/such/file.safetensors", m->ctx, NULL);
}
static void checkpoint_without_a_name(model *m) {
    mixp_checkpoint what;
    memset(&what, 0, sizeof what);
    what.ctx = m->ctx;
    mixp_param(m->ctx, "", MIXP_F32, 1, two);
    mixp_checkpoint_save("/tmp/no_name.safetensors", &what);
}

/* --- what was silent once ------------------------------------------------------------------------ */

static mixp_tensor *region_loss(mixp_context *ctx, void *user) {
    mixp_tensor *loss = NULL;
    (void)ctx;
    MIXP_AUTOCAST(ctx, MIXP_F16) { loss = loss_of((const model *)user); }
    return loss;
}
static mixp_tensor *dropping_loss(mixp_context *ctx, void *user)
{ return mixp_mean(ctx, mixp_dropout(ctx, logits_of((const model *)user), 0.5f, 1), MIXP_ALL, 0); }
static void compared_within_a_region(model *m) {
    mixp_compare_desc d;
    mixp_difference rows[8];
    int64_t n = 0;
    memset(&d, 0, sizeof d);
    d.a.dtype = MIXP_F16;
    d.a.level = 1;
    d.fn = region_loss;
    d.user = m;
    mixp_compare(m->ctx, &d, rows, 8, &n);
}
static void checked_with_dropout(model *m) {
    double worst;
    mixp_check_gradients(m->ctx, dropping_loss, m, 1, &m->w, 0, &worst);
}
static void checked_under_fp16(model *m) {
    double worst;
    mixp_check_gradients(m->ctx, region_loss, m, 1, &m->w, 0, &worst);
}
static void scaled_loss_for_spikes(model *m) {
    mixp_optimizer_desc d = mixp_sgd_defaults();
    d.spike.of = MIXP_SPIKE_LOSS;
    mixp_optimizer_set_loss(mixp_optimizer_new(m->ctx, &d), mixp_scaler_scale(m->scaler, loss_of(m)));
}
static void freezes_an_activation(model *m) { mixp_tensor_set_requires_grad(logits_of(m), 0); }
static void state_kept_as_a_tensor(model *m) {
    mixp_tensor *h = logits_of(m);
    mixp_step_begin(m->ctx);
    mixp_add(m->ctx, logits_of(m), h);
}
static void losses_in_a_list(model *m) {
    mixp_tensor *list[4];
    for (int i = 0; i < 4; i++) {
        mixp_step_begin(m->ctx);
        list[i] = loss_of(m);
    }
    for (int i = 0; i < 4; i++) mixp_item(list[i]);
}
static void gamma_written_too_soon(model *m) {
    mixp_tensor *y = mixp_rms_norm(m->ctx, logits_of(m), m->b, 1e-5f);
    mixp_fill(m->b, 7.0);
    mixp_backward(m->ctx, mixp_sum(m->ctx, y, MIXP_ALL, 0));
}
static void evaluation_without_steps(model *m) {
    static char memory[300000];
    mixp_context_desc d;
    mixp_context *old = m->ctx;
    memset(&d, 0, sizeof d);
    d.memory = memory;
    d.memory_bytes = sizeof memory;
    d.threads = 1;
    m->ctx = mixp_context_new(&d);
    mixp_context_free(old);
    for (int i = 0; i < 10000 && mixp_context_error(m->ctx, NULL) == MIXP_OK; i++)
        MIXP_NO_GRAD(m->ctx) { mixp_mean(m->ctx, input(m), MIXP_ALL, 0); }
}
static void clip_after_the_step(model *m) {
    backward(m);
    mixp_scaler_step(m->scaler, m->opt);
    mixp_clip_grad_norm(m->opt, 1.0);
}
static void zero_grad_too_late(model *m) {
    backward(m);
    mixp_zero_grad(m->opt);
    step(m);
}
static void loss_behind_a_detach(model *m) {
    mixp_tensor *h = mixp_detach(m->ctx, logits_of(m));
    mixp_backward(m->ctx, mixp_cross_entropy(m->ctx, h, targets(m), MIXP_IGNORE));
}
static void label_of_minus_one(model *m) {
    classes[2] = -1;
    loss_of(m);
}
static void mask_of_bytes(model *m) {
    static const int64_t shape[4] = { 1, 2, 2, 4 };
    static unsigned char seen[4] = { 1, 0, 1, 1 };
    mixp_attention_desc d;
    mixp_tensor *q = mixp_input(m->ctx, MIXP_F32, 4, shape, numbers);
    memset(&d, 0, sizeof d);
    d.mask = mixp_input(m->ctx, MIXP_U8, 2, shape + 1, seen);
    mixp_attention_apply(m->ctx, q, q, q, &d);
}
static void pytorch_layout_with_heads(model *m) {
    static const int64_t bhtd[4] = { 1, 2, 3, 4 };
    mixp_attention_desc d;
    mixp_tensor *q = mixp_input(m->ctx, MIXP_F32, 4, bhtd, numbers);
    memset(&d, 0, sizeof d);
    d.heads = 2;
    mixp_attention_apply(m->ctx, q, q, q, &d);
}
static void group_of_nothing(model *m) { mixp_optimizer_set_group(m->opt, 0, NULL); }
static void new_group_of_nothing(model *m) { mixp_optimizer_add_group(m->opt, NULL); }
static const char *saved_path(void) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/mixprec_mistake_%ld.safetensors", (long)getpid());
    return path;
}
static void loaded_too_soon(model *m) {
    mixp_checkpoint what;
    memset(&what, 0, sizeof what);
    what.ctx = m->ctx;
    what.optimizers = &m->opt;
    what.n_optimizers = 1;
    mixp_checkpoint_save(saved_path(), &what);
    m->opt = new_sgd(m->ctx);
    mixp_checkpoint_load(saved_path(), &what);
    remove(saved_path());
}
static void loaded_without_the_scaler(model *m) {
    mixp_checkpoint what;
    memset(&what, 0, sizeof what);
    what.ctx = m->ctx;
    what.scaler = m->scaler;
    mixp_checkpoint_save(saved_path(), &what);
    what.scaler = NULL;
    mixp_checkpoint_load(saved_path(), &what);
    remove(saved_path());
}
static void weights_with_a_prefix(model *m) {
    mixp_context *other = mixp_context_new(NULL);
    mixp_param(other, "model.fc.w", MIXP_F32, 2, weights);
    mixp_param(other, "model.fc.b", MIXP_F32, 1, two);
    mixp_checkpoint_save_weights(saved_path(), other);
    mixp_context_free(other);
    mixp_checkpoint_load_weights(saved_path(), m->ctx, NULL);
    remove(saved_path());
}

static void one_hot_targets(model *m) {
    mixp_cross_entropy(m->ctx, logits_of(m), logits_of(m), MIXP_IGNORE);
}
static void image_of_bytes(model *m) {
    static const unsigned char bytes[32] = { 1 };
    mixp_linear(m->ctx, mixp_input(m->ctx, MIXP_U8, 2, batch, bytes), m->w, NULL);
}
static void batch_in_double(model *m) {
    static const double values[32] = { 1.0 };
    mixp_linear(m->ctx, mixp_input(m->ctx, MIXP_F64, 2, batch, values), m->w, NULL);
}
static void targets_before_logits(model *m) {
    mixp_cross_entropy(m->ctx, targets(m), logits_of(m), MIXP_IGNORE);
}
static void ids_before_the_table(model *m) { mixp_embedding(m->ctx, targets(m), m->w); }
static void classes_from_one(model *m) {
    classes[3] = 2;
    mixp_cross_entropy(m->ctx, logits_of(m), targets(m), MIXP_IGNORE);
}
static void every_weight_is_frozen(model *m) {
    mixp_tensor_set_requires_grad(m->w, 0);
    mixp_tensor_set_requires_grad(m->b, 0);
    backward(m);
}
static void weights_by_torch_save(model *m) {
    FILE *f = fopen("model.pt", "wb");
    fwrite("PK\3\4 and what a zip file holds", 1, 30, f);
    fclose(f);
    mixp_checkpoint_load_weights("model.pt", m->ctx, NULL);
    remove("model.pt");
}
/* Saves the weights as `dtype`, with the shape [rows, columns], and loads them into f32 [2, 4]. */
static void load_as(model *m, mixp_dtype dtype, int64_t rows, int64_t columns) {
    static float data[8];
    mixp_st_entry e[2];
    memset(e, 0, sizeof e);
    e[0].name = "fc.b";
    e[0].rank = 1;
    e[0].shape[0] = 2;
    e[0].bytes = 8;
    e[1].name = "fc.w";
    e[1].rank = 2;
    e[1].shape[0] = rows;
    e[1].shape[1] = columns;
    e[1].bytes = 8 * mixp_dtype_size(dtype);
    e[0].dtype = MIXP_F32;
    e[1].dtype = dtype;
    e[0].data = e[1].data = data;
    CHECK_INT(mixp_safetensors_write("file", e, 2, NULL, 0, NULL, 0), MIXP_OK);
    mixp_checkpoint_load_weights("file", m->ctx, NULL);
    remove("file");
}
static void weights_of_bf16(model *m) { load_as(m, MIXP_BF16, 2, 4); }
static void weights_transposed_in_the_file(model *m) { load_as(m, MIXP_F32, 4, 2); }
static void checkpoint_of_weights_only(model *m) {
    mixp_checkpoint what = { 0 };
    mixp_st_entry none;
    memset(&none, 0, sizeof none);
    what.ctx = m->ctx;
    CHECK_INT(mixp_safetensors_write("file", &none, 0, NULL, 0, NULL, 0), MIXP_OK);
    mixp_checkpoint_load("file", &what);
    remove("file");
}
static void accuracy_of_a_mask(model *m) {
    mixp_tensor *hit = mixp_eq(m->ctx, mixp_argmax(m->ctx, logits_of(m), -1, 0), targets(m));
    mixp_mean(m->ctx, hit, MIXP_ALL, 0);
}
static void filled_beyond_f16(model *m) {
    mixp_fill(mixp_param(m->ctx, "low", MIXP_F16, 1, two), 1e6);
}
static void unscaled_after_each_batch(model *m) {
    for (int i = 0; i < 2; i++) {
        mixp_step_begin(m->ctx);
        backward(m);
        mixp_scaler_unscale(m->scaler, m->opt);
    }
}
static mixp_tensor *step_in_a_block(mixp_context *ctx, mixp_tensor *x, void *user) {
    (void)x;
    mixp_step_begin(ctx);
    return mixp_relu(ctx, input((const model *)user));
}
static void block_that_begins_a_step(model *m) {
    mixp_recompute(m->ctx, step_in_a_block, m, input(m));
}
static void state_of_another_kind(model *m) {
    mixp_optimizer_desc lion = mixp_lion_defaults(), sgd = mixp_sgd_defaults();
    mixp_checkpoint what;
    memset(&what, 0, sizeof what);
    sgd.momentum = 0.9;
    mixp_optimizer *opt = mixp_optimizer_new(m->ctx, &sgd);
    mixp_optimizer_add(opt, m->w, NULL);
    what.ctx = m->ctx;
    what.optimizers = &opt;
    what.n_optimizers = 1;
    mixp_checkpoint_save(saved_path(), &what);
    opt = mixp_optimizer_new(m->ctx, &lion);
    mixp_optimizer_add(opt, m->w, NULL);
    mixp_checkpoint_load(saved_path(), &what);
    remove(saved_path());
}

/* Steps that make what is to be made once. */
static void made_in_the_loop(model *m, int scaler, int optimizer, int freed, int before) {
    for (int i = 0; i < 6; i++) {
        mixp_optimizer *old = m->opt;
        mixp_scaler *last = m->scaler;
        if (!before) mixp_step_begin(m->ctx);
        if (optimizer && freed) mixp_optimizer_free(old);
        if (scaler && freed) mixp_scaler_free(last);
        if (scaler) m->scaler = mixp_scaler_new(m->ctx, NULL);
        if (optimizer) m->opt = mixp_optimizer_new(m->ctx, NULL);
        if (optimizer) mixp_optimizer_add(m->opt, m->w, NULL);
        if (optimizer) mixp_optimizer_add(m->opt, m->b, NULL);
        if (before) mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        backward(m);
        step(m);
    }
}
static void scaler_in_every_step(model *m) { made_in_the_loop(m, 1, 0, 0, 0); }
static void scaler_freed_in_every_step(model *m) { made_in_the_loop(m, 1, 0, 1, 0); }
static void optimizer_in_every_step(model *m) { made_in_the_loop(m, 0, 1, 0, 0); }
static void optimizer_freed_in_every_step(model *m) { made_in_the_loop(m, 0, 1, 1, 0); }
static void both_in_every_step(model *m) { made_in_the_loop(m, 1, 1, 1, 0); }
static void scaler_before_every_step(model *m) { made_in_the_loop(m, 1, 0, 0, 1); }
static void both_before_every_step(model *m) { made_in_the_loop(m, 1, 1, 1, 1); }

typedef struct mistake {
    const char *name;
    void      (*make)(model *m);
    mixp_result code;
    const char *part;           /* of the message: what it is about, or what to do */
} mistake;

#define MISTAKE(name, code, part) { #name, name, MIXP_ERR_##code, part }
static const mistake mistakes[] = {
    MISTAKE(transposed_weight, SHAPE, "'turned' [4, 2] do not fit"),
    MISTAKE(target_of_other_shape, SHAPE, "[8, 2]"),
    MISTAKE(matrices_that_do_not_fit, SHAPE, "[8, 4]"),
    MISTAKE(parts_that_do_not_join, SHAPE, "concat"),
    MISTAKE(reshape_to_another_count, SHAPE, "reshape"),
    MISTAKE(transpose_of_no_axis, SHAPE, "transpose"),
    MISTAKE(heads_that_do_not_divide, SHAPE, "heads"),
    MISTAKE(int64_targets, DTYPE, "i32"),
    MISTAKE(class_out_of_range, ARGUMENT, "7"),
    MISTAKE(id_out_of_range, ARGUMENT, "9"),
    MISTAKE(float_ids, DTYPE, "i32"),
    MISTAKE(softmax_of_integers, DTYPE, "i32"),
    MISTAKE(dropout_in_percent, ARGUMENT, "dropout"),
    MISTAKE(norm_without_eps, ARGUMENT, "eps"),
    MISTAKE(bce_in_fp16, BANNED, "use mixp_bce_with_logits"),
    MISTAKE(null_batch, ARGUMENT, "host_data is NULL"),
    MISTAKE(dimension_of_zero, SHAPE, "dimension 1 is 0"),
    MISTAKE(integer_parameter, DTYPE, "'ids'"),
    MISTAKE(one_name_twice, ARGUMENT, "'fc.w': this name is taken"),
    MISTAKE(param_in_every_step, ORDER, "once, before the loop"),
    MISTAKE(view_in_every_step, ORDER, "'batch'"),
    MISTAKE(view_of_nothing, ARGUMENT, "data is NULL"),
    MISTAKE(view_of_odd_bytes, ARGUMENT, "not aligned"),
    MISTAKE(gradient_of_integers, DTYPE, "not i32"),
    MISTAKE(small_read, SHAPE, "count is 4"),
    MISTAKE(item_of_a_matrix, SHAPE, "16 elements"),
    MISTAKE(tensor_of_the_last_step, ORDER, "mixp_step_begin has recycled it"),
    MISTAKE(item_in_an_evaluation, ORDER, "mixp_item: the tensor is from an earlier step, and mixp_eval_begin"),
    MISTAKE(tensor_in_an_evaluation, ORDER, "mixp_eval_begin has recycled it"),
    MISTAKE(backward_in_an_evaluation, ORDER, "the loss is from an earlier step, and mixp_eval_begin has recycled it"),
    MISTAKE(two_contexts, ARGUMENT, "another context"),
    MISTAKE(backward_of_nothing, ARGUMENT, "NULL"),
    MISTAKE(backward_of_a_matrix, SHAPE, "mean or sum"),
    MISTAKE(backward_twice, ORDER, "already called on this loss"),
    MISTAKE(backward_without_record, ORDER, "MIXP_NO_GRAD"),
    MISTAKE(loss_of_a_gradient, ORDER, "no double backward"),
    MISTAKE(break_out_of_autocast, ORDER, "return, goto, break"),
    MISTAKE(autocast_in_fp8, ARGUMENT, "autocast"),
    MISTAKE(level_that_is_none, ARGUMENT, "level"),
    MISTAKE(level_3_of_f32, DTYPE, "'fc.w' is f32"),
    MISTAKE(scope_without_a_name, ARGUMENT, "pass a name"),
    MISTAKE(zeroed_description, ARGUMENT, "start from the defaults"),
    MISTAKE(negative_rate, ARGUMENT, "lr must"),
    MISTAKE(schedule_without_an_end, ARGUMENT, "schedule.total"),
    MISTAKE(nesterov_without_momentum, ARGUMENT, "momentum"),
    MISTAKE(group_with_a_rate_alone, ARGUMENT, "mixp_optimizer_group(opt, 0, &g)"),
    MISTAKE(added_twice, ARGUMENT, "'fc.w' was added before"),
    MISTAKE(added_as_another_view, ARGUMENT, "'again' shares memory with a parameter"),
    MISTAKE(adds_an_activation, ARGUMENT, "one step only"),
    MISTAKE(view_without_gradient, ARGUMENT, "mixp_tensor_set_requires_grad"),
    MISTAKE(gradient_of_another_size, SHAPE, "number of elements: 2 and 8"),
    MISTAKE(nothing_added, ORDER, "mixp_optimizer_add for each"),
    MISTAKE(parameter_in_no_optimizer, ORDER, "the parameter 'fc.b'"),
    MISTAKE(spike_without_a_loss, ORDER, "mixp_optimizer_set_loss"),
    MISTAKE(forgotten_step_begin, ORDER, "mixp_step_begin was not called"),
    MISTAKE(forgotten_backward, ORDER, "call mixp_backward first"),
    MISTAKE(forgotten_update, ORDER, "call mixp_scaler_update first"),
    MISTAKE(update_without_step, ORDER, "call mixp_scaler_step first"),
    MISTAKE(unscaled_loss, ORDER, "mixp_scaler_scale(scaler, loss)"),
    MISTAKE(loss_scaled_twice, ORDER, "two loss scales"),
    MISTAKE(step_without_the_scaler, ORDER, "call mixp_scaler_step instead"),
    MISTAKE(step_without_the_scaler_after_unscale, ORDER, "which skips the step if one is not finite"),
    MISTAKE(clip_before_unscale, ORDER, "call mixp_scaler_unscale first"),
    MISTAKE(unscaled_twice, ORDER, "already"),
    MISTAKE(anothers_scaler, ORDER, "another scaler"),
    MISTAKE(gradients_used_again, ORDER, "was used by the step before"),
    MISTAKE(own_gradients_as_they_are, ORDER, "mixp_scaler_loss_scale(scaler)"),
    MISTAKE(growth_that_shrinks, ARGUMENT, "growth_factor"),
    MISTAKE(scale_of_infinity, ARGUMENT, "Inf or NaN"),
    MISTAKE(gradients_of_a_freed_scaler, ORDER, "a scaler that was freed"),
    MISTAKE(loss_of_a_freed_scaler, ORDER, "freed"),
    MISTAKE(optimizer_freed_too_soon, ORDER, "mixp_scaler_update first"),
    MISTAKE(graph_on_a_cpu, DEVICE, "no graphs"),
    MISTAKE(moment_that_is_not_kept, ARGUMENT, "does not have this state"),
    MISTAKE(weights_of_a_c_file, FORMAT, "not a safetensors file"),
    MISTAKE(weights_that_are_not_there, IO, "no/such/file"),
    MISTAKE(checkpoint_without_a_name, ARGUMENT, "name"),
    MISTAKE(compared_within_a_region, ORDER, "fn opens an autocast region"),
    MISTAKE(checked_with_dropout, ORDER, "pass training 0 to mixp_dropout"),
    MISTAKE(checked_under_fp16, ORDER, "check it in f32"),
    MISTAKE(scaled_loss_for_spikes, ARGUMENT, "pass the loss from before mixp_scaler_scale"),
    MISTAKE(freezes_an_activation, ARGUMENT, "mixp_detach"),
    MISTAKE(state_kept_as_a_tensor, ORDER, "mixp_copy"),
    MISTAKE(losses_in_a_list, ORDER, "from an earlier step"),
    MISTAKE(gamma_written_too_soon, ORDER, "'fc.b' [2] was written by mixp_fill since rms_norm"),
    MISTAKE(evaluation_without_steps, MEMORY, "since mixp_step_begin"),
    MISTAKE(clip_after_the_step, ORDER, "step is over"),
    MISTAKE(zero_grad_too_late, ORDER, "mixp_zero_grad has cleared them"),
    MISTAKE(loss_behind_a_detach, ORDER, "it comes from detach"),
    MISTAKE(label_of_minus_one, ARGUMENT, "MIXP_IGNORE"),
    MISTAKE(mask_of_bytes, DTYPE, "-Inf where it is hidden"),
    MISTAKE(pytorch_layout_with_heads, SHAPE, "mixp_scaled_dot_product_attention"),
    MISTAKE(group_of_nothing, ARGUMENT, "the group is NULL"),
    MISTAKE(new_group_of_nothing, ARGUMENT, "the group is NULL"),
    MISTAKE(loaded_too_soon, SHAPE, "call mixp_optimizer_add first"),
    MISTAKE(loaded_without_the_scaler, SHAPE, "set .scaler"),
    MISTAKE(weights_with_a_prefix, SHAPE, "begin with 'model.'"),
    MISTAKE(one_hot_targets, DTYPE, "not one-hot"),
    MISTAKE(image_of_bytes, DTYPE, "mixp_cast"),
    MISTAKE(batch_in_double, DTYPE, "convert it with mixp_cast"),
    MISTAKE(targets_before_logits, DTYPE, "the two are swapped"),
    MISTAKE(ids_before_the_table, DTYPE, "a table) come first"),
    MISTAKE(classes_from_one, ARGUMENT, "the first is 0"),
    MISTAKE(every_weight_is_frozen, ORDER, "mixp_freeze_all"),
    MISTAKE(weights_by_torch_save, FORMAT, "safetensors.torch.save_file"),
    MISTAKE(weights_of_bf16, DTYPE, "set .convert"),
    MISTAKE(weights_transposed_in_the_file, SHAPE, "the file has the transpose"),
    MISTAKE(checkpoint_of_weights_only, FORMAT, "call mixp_checkpoint_load_weights"),
    MISTAKE(accuracy_of_a_mask, DTYPE, "mixp_cast"),
    MISTAKE(filled_beyond_f16, ARGUMENT, "beyond the range of f16"),
    MISTAKE(unscaled_after_each_batch, ORDER, "after the last mixp_backward of the step"),
    MISTAKE(block_that_begins_a_step, ORDER, "the block called mixp_step_begin"),
    MISTAKE(state_of_another_kind, SHAPE, "mixp_checkpoint_load_weights")
};

/* Each in a context of its own; and the error callback hears what the context keeps. */
static void test_told(void) {
    const size_t n = sizeof mistakes / sizeof mistakes[0];
    CHECK(n >= 104);
    for (size_t i = 0; i < n; i++) {
        model m = model_open();
        const char *text = "";
        mistakes[i].make(&m);
        mixp_result got = mixp_context_error(m.ctx, &text);
        if (got != mistakes[i].code || !strstr(text, mistakes[i].part)) {
            test_bad++;
            TEST_SHOW("%s: %d '%s', not %d '...%s...'", mistakes[i].name, (int)got, text,
                      (int)mistakes[i].code, mistakes[i].part);
        }
        mixp_context_free(m.ctx);
    }
}

/* The largest numbers that round to a finite one, the smallest that do not, and Inf, which is meant. */
static void test_bounds_of_a_fill(void) {
    static const struct { mixp_dtype dtype; double value; int fits; } rows[] = {
        { MIXP_F16, 65519.99, 1 }, { MIXP_F16, -65519.99, 1 }, { MIXP_F16, 65520.0, 0 },
        { MIXP_F16, -65520.0, 0 }, { MIXP_F16, HUGE_VAL, 1 }, { MIXP_F16, -HUGE_VAL, 1 },
        { MIXP_BF16, 3.39e38, 1 }, { MIXP_BF16, 3.4e38, 0 }, { MIXP_F32, 3.4e38, 1 },
        { MIXP_F32, 3.41e38, 0 }, { MIXP_F16, 1e-30, 1 }
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        model m = model_open();
        mixp_tensor *t = mixp_param(m.ctx, "t", rows[i].dtype, 1, two);
        float got[2];
        CHECK_INT(mixp_fill(t, rows[i].value), rows[i].fits ? MIXP_OK : MIXP_ERR_ARGUMENT);
        mixp_context_clear_error(m.ctx);
        CHECK_INT(mixp_read(t, got, MIXP_F32, 2), MIXP_OK);
        if (!rows[i].fits) CHECK_NEAR(got[1], 0.0, 0);
        mixp_context_free(m.ctx);
    }
}

/* --- what may be meant, and is a warning ------------------------------------------------------ */

static mixp_tensor *column(model *m) {
    static const int64_t shape[2] = { 8, 1 };
    return mixp_input(m->ctx, MIXP_F32, 2, shape, numbers);
}
static mixp_tensor *vector(model *m) { return mixp_input(m->ctx, MIXP_F32, 1, eight, numbers); }
static mixp_tensor *soft(model *m) { return mixp_softmax(m->ctx, logits_of(m)); }
static mixp_tensor *logs(model *m) { return mixp_log_softmax(m->ctx, logits_of(m)); }

static void entropy_of_softmax(model *m)
{ mixp_cross_entropy(m->ctx, soft(m), targets(m), MIXP_IGNORE); }
static void entropy_of_logits(model *m)
{ mixp_cross_entropy(m->ctx, logits_of(m), targets(m), MIXP_IGNORE); }
static void entropy_of_low_softmax(model *m) {
    mixp_cross_entropy(m->ctx, mixp_cast(m->ctx, soft(m), MIXP_F16), targets(m), MIXP_IGNORE);
}
static void nll_of_softmax(model *m) { mixp_nll(m->ctx, soft(m), targets(m), MIXP_IGNORE); }
static void nll_of_logits(model *m) { mixp_nll(m->ctx, logits_of(m), targets(m), MIXP_IGNORE); }
static void nll_of_logs(model *m) { mixp_nll(m->ctx, logs(m), targets(m), MIXP_IGNORE); }
static void nll_of_log_of_softmax(model *m)
{ mixp_nll(m->ctx, mixp_log(m->ctx, soft(m)), targets(m), MIXP_IGNORE); }
static void bce_of_sigmoid(model *m) {
    mixp_bce_with_logits(m->ctx, mixp_sigmoid(m->ctx, logits_of(m)), mixp_detach(m->ctx, soft(m)));
}
static void bce_of_logits(model *m)
{ mixp_bce_with_logits(m->ctx, logits_of(m), mixp_detach(m->ctx, soft(m))); }
static void kl_of_softmax(model *m)
{ mixp_kl_div(m->ctx, soft(m), mixp_detach(m->ctx, soft(m)), 0); }
static void kl_of_logs(model *m) { mixp_kl_div(m->ctx, logs(m), mixp_detach(m->ctx, soft(m)), 0); }
static void mse_of_softmax(model *m) { mixp_mse(m->ctx, soft(m), mixp_detach(m->ctx, soft(m))); }
static void column_less_vector(model *m) { mixp_sub(m->ctx, column(m), vector(m)); }
static void vector_less_column(model *m) { mixp_sub(m->ctx, vector(m), column(m)); }
static void column_less_row(model *m) {
    static const int64_t row[2] = { 1, 8 };
    mixp_sub(m->ctx, column(m), mixp_reshape(m->ctx, vector(m), 2, row));
}
static void column_less_column(model *m) { mixp_sub(m->ctx, column(m), column(m)); }
static void column_times_vector(model *m) { mixp_mul(m->ctx, column(m), vector(m)); }
static void column_less_one(model *m)
{ mixp_sub(m->ctx, column(m), mixp_full(m->ctx, MIXP_F32, 0, NULL, 1.0)); }
static void dropped(model *m, int evaluates, int training) {
    if (evaluates) mixp_eval_begin(m->ctx);
    else mixp_step_begin(m->ctx);
    mixp_dropout(m->ctx, logits_of(m), 0.5f, training);
}
static void dropout_that_evaluates(model *m) { dropped(m, 1, 1); }
static void dropout_that_is_off(model *m) { dropped(m, 1, 0); }
static void dropout_that_trains(model *m) { dropped(m, 0, 1); }
static void attended(model *m, int evaluates) {
    static const int64_t shape[3] = { 1, 4, 12 };
    mixp_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = 2;
    d.dropout = 0.5f;
    if (evaluates) mixp_eval_begin(m->ctx);
    mixp_attention_apply(m->ctx, mixp_input(m->ctx, MIXP_F32, 3, shape, numbers), NULL, NULL, &d);
}
static void attention_that_evaluates(model *m) { attended(m, 1); }
static void attention_that_trains(model *m) { attended(m, 0); }
static void grouped(model *m, int late, int filled) {
    mixp_optimizer *opt = new_sgd(m->ctx);
    mixp_param_group g;
    mixp_optimizer_group(opt, 0, &g);
    if (!late) mixp_optimizer_add_group(opt, &g);
    mixp_optimizer_add(opt, m->w, NULL);
    if (late) mixp_optimizer_add_group(opt, &g);
    if (filled) mixp_optimizer_add(opt, m->b, NULL);
    mixp_backward(m->ctx, loss_of(m));
    mixp_optimizer_step(opt);
}
static void group_behind_its_parameters(model *m) { grouped(m, 1, 0); }
static void groups_with_parameters(model *m) { grouped(m, 1, 1); }
static void all_behind_group_0(model *m) { grouped(m, 0, 1); }

/* Logits behind an activation: softmax computes with differences of any sign. */
static mixp_tensor *activated(model *m, mixp_tensor *(*f)(mixp_context *, mixp_tensor *))
{ return f(m->ctx, logits_of(m)); }
static void entropy_of(model *m, mixp_tensor *(*f)(mixp_context *, mixp_tensor *))
{ mixp_cross_entropy(m->ctx, activated(m, f), targets(m), MIXP_IGNORE); }
static void entropy_of_relu(model *m) { entropy_of(m, mixp_relu); }
static void entropy_of_tanh(model *m) { entropy_of(m, mixp_tanh); }
static void entropy_of_sigmoid(model *m) { entropy_of(m, mixp_sigmoid); }
static void smooth_entropy_of_relu(model *m) {
    mixp_cross_entropy_smooth(m->ctx, activated(m, mixp_relu), targets(m), MIXP_IGNORE, 0.1f);
}
static void bce_of_relu(model *m)
{ mixp_bce_with_logits(m->ctx, activated(m, mixp_relu), mixp_detach(m->ctx, soft(m))); }
static void nll_of_relu(model *m) { mixp_nll(m->ctx, activated(m, mixp_relu), targets(m), MIXP_IGNORE); }
static void entropy_of_capped_logits(model *m) {
    mixp_tensor *x = mixp_tanh(m->ctx, mixp_scale(m->ctx, logits_of(m), 1.0f / 30.0f));
    mixp_cross_entropy(m->ctx, mixp_scale(m->ctx, x, 30.0f), targets(m), MIXP_IGNORE);
}
static void mse_of_relu(model *m) { mixp_mse(m->ctx, activated(m, mixp_relu), mixp_detach(m->ctx, soft(m))); }

static void entropy_of_reshaped_relu(model *m) {
    static const int64_t rows[2] = { 8, 2 }, maps[3] = { 1, 8, 2 };
    mixp_tensor *x = mixp_reshape(m->ctx, activated(m, mixp_relu), 3, maps);
    mixp_cross_entropy(m->ctx, mixp_reshape(m->ctx, x, 2, rows), targets(m), MIXP_IGNORE);
}
static void entropy_of_transposed_softmax(model *m) {
    mixp_tensor *x = mixp_transpose(m->ctx, mixp_softmax(m->ctx, mixp_transpose(m->ctx, logits_of(m), 0, 1)), 0, 1);
    mixp_cross_entropy(m->ctx, x, targets(m), MIXP_IGNORE);
}
static void entropy_of_reshaped_logits(model *m) {
    static const int64_t rows[2] = { 8, 2 };
    mixp_cross_entropy(m->ctx, mixp_reshape(m->ctx, logits_of(m), 2, rows), targets(m), MIXP_IGNORE);
}

/* Steps of a loop with one thing wrong in it, or nothing. */
typedef struct loop {
    int   steps, regions;       /* regions of f16 before the model: 1 = empty, 2 = around it */
    float lr, late_lr, clip;
    int   clips, overwritten, frozen, unscaled;
} loop;
static void looped(model *m, loop l) {
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    sgd.lr = (double)l.lr;
    m->opt = mixp_optimizer_new(m->ctx, &sgd);
    mixp_optimizer_add(m->opt, m->w, NULL);
    mixp_optimizer_add(m->opt, m->b, NULL);
    if (l.frozen) mixp_tensor_set_requires_grad(m->w, 0);
    for (int i = 0; i < l.steps; i++) {
        mixp_tensor *w = m->w, *loss;
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        if (i) mixp_optimizer_set_lr(m->opt, (double)(l.late_lr != 0.0f ? l.late_lr : l.lr));
        if (l.overwritten) w = mixp_input(m->ctx, MIXP_F32, 2, weights, numbers);
        if (l.regions) mixpi_autocast_enter(m->ctx, MIXP_F16);
        if (l.regions == 1) mixpi_autocast_leave(m->ctx);
        loss = mixp_cross_entropy(m->ctx, mixp_linear(m->ctx, input(m), w, m->b), targets(m), MIXP_IGNORE);
        if (l.regions == 2) mixpi_autocast_leave(m->ctx);
        mixp_backward(m->ctx, l.unscaled ? loss : mixp_scaler_scale(m->scaler, loss));
        if (l.clips) mixp_scaler_unscale(m->scaler, m->opt);
        if (l.clips) mixp_clip_grad_norm(m->opt, (double)l.clip);
        if (l.unscaled) mixp_optimizer_step(m->opt);
        else step(m);
    }
}
static const loop sound = { 6, 2, 0.01f, 0.0f, 1.0f, 0, 0, 0, 0 };
#define LOOPED(name, change) static void name(model *m) { loop l = sound; change; looped(m, l); }
LOOPED(loop_that_is_sound, l.clips = 1; l.steps = 100)
LOOPED(loop_beside_its_region, l.regions = 1)
LOOPED(loop_without_a_region, l.regions = 0)
LOOPED(rate_of_integers, l.lr = 1 / 1000; l.steps = 20)
LOOPED(rate_of_integers_without_a_scaler, l.lr = 1 / 1000; l.steps = 20; l.unscaled = 1; l.regions = 0)
LOOPED(rate_that_rises_from_0, l.lr = 0.0f; l.late_lr = 0.1f; l.steps = 20)
LOOPED(clip_of_integers, l.clips = 1; l.clip = 1 / 2)
LOOPED(clip_that_measures, l.clips = 1; l.clip = HUGE_VALF)
LOOPED(weight_overwritten, l.overwritten = 1; l.steps = 100)
LOOPED(weight_overwritten_without_a_scaler, l.overwritten = l.unscaled = 1; l.steps = 100; l.regions = 0)
LOOPED(weight_that_is_frozen, l.frozen = 1; l.steps = 100)

/* Two layers, of which none, the first, or both are 0; or data of 0. */
static void layers_of(model *m, int first, int second, float data) {
    const int64_t square[2] = { 2, 2 };
    mixp_tensor *w2 = mixp_param(m->ctx, "out.w", MIXP_F32, 2, square);
    mixp_fill(m->w, first ? 0.5 : 0.0);
    mixp_fill(w2, second ? 0.5 : 0.0);
    mixp_optimizer_add(m->opt, w2, NULL);
    for (int i = 0; i < 20; i++) {
        mixp_step_begin(m->ctx);
        mixp_zero_grad(m->opt);
        mixp_tensor *x = mixp_scale(m->ctx, input(m), data);
        x = mixp_linear(m->ctx, mixp_tanh(m->ctx, mixp_linear(m->ctx, x, m->w, NULL)), w2, m->b);
        mixp_backward(m->ctx, mixp_scaler_scale(m->scaler, mixp_cross_entropy(m->ctx, x, targets(m), MIXP_IGNORE)));
        step(m);
    }
}
static void layers_of_zeros(model *m) { layers_of(m, 0, 0, 1.0f); }
static void first_layer_of_zeros(model *m) { layers_of(m, 0, 1, 1.0f); }
static void second_layer_of_zeros(model *m) { layers_of(m, 1, 0, 1.0f); }
static void data_of_zeros(model *m) { layers_of(m, 1, 1, 0.0f); }

typedef struct suspicion {
    const char *name;
    void      (*make)(model *m);
    const char *part;           /* words that the warning holds; NULL: the case must not warn */
} suspicion;

static const suspicion suspicions[] = {
    { "entropy_of_softmax", entropy_of_softmax, "computes the softmax itself" },
    { "entropy_of_low_softmax", entropy_of_low_softmax, "computes the softmax itself" },
    { "entropy_of_logits", entropy_of_logits, NULL },
    { "nll_of_softmax", nll_of_softmax, "use mixp_log_softmax" },
    { "nll_of_logits", nll_of_logits, "a result of mixp_linear" },
    { "nll_of_logs", nll_of_logs, NULL },
    { "nll_of_log_of_softmax", nll_of_log_of_softmax, NULL },
    { "bce_of_sigmoid", bce_of_sigmoid, "computes the sigmoid itself" },
    { "bce_of_logits", bce_of_logits, NULL },
    { "kl_of_softmax", kl_of_softmax, "mixp_kl_div expects log-probabilities" },
    { "kl_of_logs", kl_of_logs, NULL },
    { "mse_of_softmax", mse_of_softmax, NULL },
    { "column_less_vector", column_less_vector, "broadcast to [8, 8]" },
    { "vector_less_column", vector_less_column, "broadcast to [8, 8]" },
    { "all_pairs_of_column", column_less_vector, "for all pairs, reshape the second to [1, 8]" },
    { "all_pairs_of_vector", vector_less_column, "for all pairs, reshape the first to [1, 8]" },
    { "column_less_row", column_less_row, NULL },
    { "column_less_column", column_less_column, NULL },
    { "column_times_vector", column_times_vector, NULL },
    { "column_less_one", column_less_one, NULL },
    { "dropout_that_evaluates", dropout_that_evaluates, "pass training 0" },
    { "dropout_that_is_off", dropout_that_is_off, NULL },
    { "dropout_that_trains", dropout_that_trains, NULL },
    { "attention_that_evaluates", attention_that_evaluates, "set attention's dropout to 0" },
    { "attention_that_trains", attention_that_trains, NULL },
    { "group_behind_its_parameters", group_behind_its_parameters, "group 1 of an optimizer" },
    { "groups_with_parameters", groups_with_parameters, NULL },
    { "all_behind_group_0", all_behind_group_0, NULL },
    { "entropy_of_relu", entropy_of_relu, "leave out the activation" },
    { "entropy_of_tanh", entropy_of_tanh, "leave out the activation" },
    { "entropy_of_sigmoid", entropy_of_sigmoid, "leave out the activation" },
    { "smooth_entropy_of_relu", smooth_entropy_of_relu, "leave out the activation" },
    { "bce_of_relu", bce_of_relu, "leave out the activation" },
    { "nll_of_relu", nll_of_relu, "use mixp_log_softmax" },
    { "entropy_of_capped_logits", entropy_of_capped_logits, NULL },
    { "mse_of_relu", mse_of_relu, NULL },
    { "entropy_of_reshaped_relu", entropy_of_reshaped_relu, "leave out the activation" },
    { "entropy_of_transposed_softmax", entropy_of_transposed_softmax, "computes the softmax itself" },
    { "entropy_of_reshaped_logits", entropy_of_reshaped_logits, NULL },
    { "loop_that_is_sound", loop_that_is_sound, NULL },
    { "loop_beside_its_region", loop_beside_its_region, NULL },
    { "scaler_in_every_step", scaler_in_every_step, "mixp_scaler_new: four training steps" },
    { "scaler_freed_in_every_step", scaler_freed_in_every_step, "once, before the loop" },
    { "optimizer_in_every_step", optimizer_in_every_step, "mixp_optimizer_new: four training steps" },
    { "optimizer_freed_in_every_step", optimizer_freed_in_every_step, "starts from nothing" },
    { "both_in_every_step", both_in_every_step, "once, before the loop" },
    { "scaler_before_every_step", scaler_before_every_step, "once, before the loop" },
    { "both_before_every_step", both_before_every_step, "once, before the loop" },
    { "loop_without_a_region", loop_without_a_region, NULL },
    { "rate_of_integers", rate_of_integers, "1/1000 is 0 in C" },
    { "rate_of_integers_without_a_scaler", rate_of_integers_without_a_scaler, "1/1000 is 0 in C" },
    { "rate_that_rises_from_0", rate_that_rises_from_0, NULL },
    { "clip_of_integers", clip_of_integers, "max_norm is 0" },
    { "clip_that_measures", clip_that_measures, NULL },
    { "weight_overwritten", weight_overwritten, "'fc.w' has had no gradient" },
    { "weight_overwritten_without_a_scaler", weight_overwritten_without_a_scaler, "'fc.w' has had no gradient" },
    { "weight_that_is_frozen", weight_that_is_frozen, NULL },
    { "layers_of_zeros", layers_of_zeros, "are still 0 at step 20" },
    { "first_layer_of_zeros", first_layer_of_zeros, NULL },
    { "second_layer_of_zeros", second_layer_of_zeros, NULL },
    { "data_of_zeros", data_of_zeros, NULL }
};

/* A warning each, or none; never an error. */
static void test_warned(void) {
    for (size_t i = 0; i < sizeof suspicions / sizeof suspicions[0]; i++) {
        const suspicion *s = &suspicions[i];
        model m = model_open();
        const char *why, *text;
        s->make(&m);
        text = mixp_context_warning(m.ctx);
        if (mixp_context_error(m.ctx, &why) != MIXP_OK ||
            (s->part ? !strstr(text, s->part) : *text != '\0')) {
            test_bad++;
            TEST_SHOW("%s: error '%s', warning '%s', not '...%s...'", s->name, why, text,
                      s->part ? s->part : "none");
        }
        mixp_context_free(m.ctx);
    }
}

static void test_told_without_a_context(void) {
    mixp_context_desc d;
    const char *why = "";
    memset(&d, 0, sizeof d);
    d.why = &why;
    d.threads = -1;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "threads is negative");
    CHECK(mixp_param(NULL, "w", MIXP_F32, 1, two) == NULL);
    CHECK_INT(mixp_context_error(NULL, &why), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(why, "the context is NULL");
}

/* --- what is no mistake ----------------------------------------------------------------------- */

/* Several optimizers, and several updates of one, in a step that begins once; a parameter whose
 * gradient the program looks after itself; one that is frozen; gradients over a scale of its own. */
static void test_legal(void) {
    model m = model_open();
    mixp_optimizer *second = new_sgd(m.ctx);
    mixp_tensor *mine = mixp_param(m.ctx, "mine", MIXP_F32, 1, two);
    mixp_tensor *frozen = mixp_param(m.ctx, "frozen", MIXP_F32, 1, two);
    mixp_tensor *other = mixp_param(m.ctx, "other", MIXP_F32, 1, two);
    const char *why = "";
    CHECK_INT(mixp_tensor_set_requires_grad(frozen, 0), MIXP_OK);
    CHECK_INT(mixp_optimizer_add(second, other, NULL), MIXP_OK);
    for (int i = 0; i < 4; i++) {
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt);
        mixp_zero_grad(second);
        if (mine->grad) mixp_fill(mine->grad, 0.0);
        mixp_tensor *y = mixp_add(m.ctx, mixp_add(m.ctx, logits_of(&m), mine), mixp_mul(m.ctx, frozen, other));
        mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, mixp_mean(m.ctx, y, MIXP_ALL, 0)));
        CHECK_INT(mixp_scaler_step(m.scaler, m.opt), MIXP_OK);
        CHECK_INT(mixp_scaler_step(m.scaler, second), MIXP_OK);
        CHECK_INT(mixp_scaler_update(m.scaler), MIXP_OK);
    }
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_OK);
    CHECK_TEXT(why, "");
    CHECK(frozen->grad == NULL);
    mixp_context_free(m.ctx);
}

/* q, k and v in PyTorch's layout: what attention gives of them transposed, transposed back. */
static void test_layouts_of_attention(void) {
    static const int64_t bhtd[4] = { 1, 2, 3, 4 }, bthd[4] = { 1, 3, 2, 4 };
    model m = model_open();
    mixp_attention_desc d;
    mixp_tensor *q = mixp_input(m.ctx, MIXP_F32, 4, bhtd, numbers), *y, *z;
    float turned[24], a[24], b[24];
    for (int h = 0; h < 2; h++)
        for (int t = 0; t < 3; t++)
            for (int c = 0; c < 4; c++) turned[(t * 2 + h) * 4 + c] = numbers[(h * 3 + t) * 4 + c];
    memset(&d, 0, sizeof d);
    d.causal = 1;
    y = mixp_input(m.ctx, MIXP_F32, 4, bthd, turned);
    y = mixp_attention_apply(m.ctx, y, y, y, &d);
    d.heads = 2;
    z = mixp_scaled_dot_product_attention(m.ctx, q, q, q, &d);
    CHECK(y && z && z->rank == 4 && z->shape[1] == 2 && z->shape[2] == 3);
    CHECK_INT(mixp_read(y, a, MIXP_F32, 24), MIXP_OK);
    CHECK_INT(mixp_read(z, b, MIXP_F32, 24), MIXP_OK);
    for (int h = 0; h < 2; h++)
        for (int t = 0; t < 3; t++)
            for (int c = 0; c < 4; c++) CHECK_NEAR(b[(h * 3 + t) * 4 + c], a[(t * 2 + h) * 4 + c], 0.0);
    mixp_context_free(m.ctx);
}

/* A disabled scaler has the verdicts of its optimizer's steps, and may be left for another. */
static void test_verdict_of_a_disabled_scaler(void) {
    model m = model_open();
    mixp_scaler *enabled = m.scaler;
    mixp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.disabled = 1;
    m.scaler = mixp_scaler_new(m.ctx, &d);
    for (int i = 1; i <= 5; i++) {
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt);
        backward(&m);
        step(&m);
        mixp_verdict v = mixp_scaler_verdict(m.scaler);
        CHECK_INT(v.outcome, MIXP_STEP_APPLIED);
        CHECK_INT(v.applied, i);
    }
    m.scaler = enabled;
    mixp_step_begin(m.ctx);
    mixp_zero_grad(m.opt);
    backward(&m);
    step(&m);
    CHECK_INT(mixp_scaler_verdict(m.scaler).applied, 6);
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
}

/* A disabled scaler skips no step, but its verdict reports a loss that is Inf or NaN, until the next
 * step's. The loss stays the caller's tensor. */
static void test_bad_loss_of_a_disabled_scaler(void) {
    static const double factors[5] = { 1.0, HUGE_VAL, 1.0, NAN, 1.0 };
    model m = model_open();
    mixp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.disabled = 1;
    m.scaler = mixp_scaler_new(m.ctx, &d);
    for (int i = 0; i < 5; i++) {
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt);
        mixp_tensor *loss = mixp_scale(m.ctx, loss_of(&m), (float)factors[i]);
        CHECK(mixp_scaler_scale(m.scaler, loss) == loss);
        mixp_backward(m.ctx, mixp_mean(m.ctx, m.w, MIXP_ALL, 0));
        CHECK(mixp_scaler_scale(m.scaler, loss_of(&m)) != NULL);    /* a second one, and finite */
        step(&m);
        CHECK_INT(mixp_scaler_verdict(m.scaler).outcome, MIXP_STEP_APPLIED);
        CHECK_INT(mixp_scaler_verdict(m.scaler).loss_bad, factors[i] != 1.0);
    }
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
}

/* --- a loss that is not finite is in the verdict of its first step -------------------------------- */

static void test_bad_loss_at_once(void) {
    model m = model_open();
    mixp_tensor *huge = mixp_scale(m.ctx, loss_of(&m), HUGE_VALF);
    mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, huge));
    step(&m);
    mixp_verdict v = mixp_scaler_verdict(m.scaler);
    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(v.loss_bad, 1);
    CHECK_INT(v.origin, MIXP_ORIGIN_NO_GUARD);
    CHECK_TEXT(mixp_origin_text(v.origin), "the loss is not finite");

    mixp_step_begin(m.ctx);             /* and it is forgotten with the next step */
    mixp_zero_grad(m.opt);
    backward(&m);
    step(&m);
    v = mixp_scaler_verdict(m.scaler);
    CHECK_INT(v.outcome, MIXP_STEP_APPLIED);
    CHECK_INT(v.loss_bad, 0);
    CHECK_TEXT(mixp_origin_text(v.origin), "no value was Inf or NaN");

    mixp_step_begin(m.ctx);             /* gradients that overflow in a finite loss are not its */
    mixp_zero_grad(m.opt);
    huge = mixp_scale(m.ctx, mixp_sum(m.ctx, m.b, MIXP_ALL, 0), 3e38f);
    mixp_fill(m.b, 0.0);
    mixp_backward(m.ctx, mixp_scaler_scale(m.scaler, huge));
    step(&m);
    v = mixp_scaler_verdict(m.scaler);
    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
    CHECK_INT(v.loss_bad, 0);
    CHECK_INT(v.origin, MIXP_ORIGIN_UNKNOWN);
    mixp_context_free(m.ctx);
}

/* A NaN in the data of a step that the guard does not sample, then in one that it samples. */
static void test_bad_data_under_a_guard(void) {
    static const char *const part[7] = { "none", "none", "none", "repeat the step with mixp_retry",
                                         "the batch contains Inf or NaN", "none", "none" };
    model m = model_open();
    mixp_guard_desc g;
    memset(&g, 0, sizeof g);
    g.every = 64;
    CHECK_INT(mixp_guard_start(m.ctx, &g), MIXP_OK);
    for (int i = 0; i < 7; i++) {
        mixp_step_begin(m.ctx);
        mixp_zero_grad(m.opt);
        numbers[17] = i == 3 || i == 4 ? NAN : 0.5f;
        backward(&m);
        step(&m);
        CHECK_INT(mixp_scaler_verdict(m.scaler).outcome, i == 3 || i == 4 ? MIXP_STEP_SKIPPED : MIXP_STEP_APPLIED);
        CHECK_TEXT(mixp_origin_text(mixp_scaler_verdict(m.scaler).origin), part[i]);
    }
    mixp_context_free(m.ctx);
}

/* --- what nobody can tell, and its sign: the list in the manual ------------------------------------ */

static double norm_of_step(const model *m) {
    mixp_step_begin(m->ctx);
    backward(m);
    step(m);
    return mixp_scaler_verdict(m->scaler).grad_norm;
}

/* Forgotten zero_grad, after an update that clears no marks: told; with a fixed scale gradients are
 * summed, which is legal, and the norm grows from step to step. */
static void test_sign_of_a_forgotten_zero_grad(void) {
    model m = model_open();
    mixp_scaler_desc d;
    double norm[3];
    memset(&d, 0, sizeof d);
    d.rule = MIXP_RULE_STATIC;
    m.scaler = mixp_scaler_new(m.ctx, &d);
    for (int i = 0; i < 3; i++) norm[i] = norm_of_step(&m);
    CHECK(norm[1] > 1.5 * norm[0] && norm[2] > 1.2 * norm[1]);
    CHECK_INT(mixp_context_error(m.ctx, NULL), MIXP_OK);
    mixp_context_free(m.ctx);
}

/* Data written behind the library's back: its low copy stays until mixp_tensor_touch. */
static void test_sign_of_a_missing_touch(void) {
    model m = model_open();
    double before = 0.0, after = 0.0, touched = 0.0;
    MIXP_AUTOCAST(m.ctx, MIXP_F16) { before = mixp_item(loss_of(&m)); }
    ((float *)m.w->data)[0] += 4.0f;
    MIXP_AUTOCAST(m.ctx, MIXP_F16) { after = mixp_item(loss_of(&m)); }
    mixp_tensor_touch(m.w);
    MIXP_AUTOCAST(m.ctx, MIXP_F16) { touched = mixp_item(loss_of(&m)); }
    CHECK_NEAR(after, before, 0.0);
    CHECK(fabs(touched - before) > 0.1);
    mixp_context_free(m.ctx);
}

/* A low weight comes from its master, which follows when the library is told. */
static void test_sign_of_a_missing_touch_beside_a_master(void) {
    mixp_context   *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = new_sgd(ctx);
    static float    grad[2] = { 0.0f, 0.0f };
    static mixp_f16 w[2];
    mixp_tensor    *view = mixp_view(ctx, "w", MIXP_F16, 1, two, w);
    w[0] = w[1] = mixp_f16_from_f32(1.0f);
    mixp_optimizer_add(opt, view, mixp_view(ctx, "g", MIXP_F32, 1, two, grad));
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    w[0] = mixp_f16_from_f32(5.0f);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK_NEAR(mixp_f32_from_f16(w[0]), 1.0, 0.0);
    w[0] = mixp_f16_from_f32(5.0f);
    mixp_tensor_touch(view);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK_NEAR(mixp_f32_from_f16(w[0]), 5.0, 0.0);
    mixp_context_free(ctx);
}

/* Host data of another dtype than was said: numbers that are none of the data. */
static void test_sign_of_a_wrong_host_dtype(void) {
    model m = model_open();
    float seen[32];
    mixp_tensor *x = mixp_input(m.ctx, MIXP_F16, 2, batch, numbers);
    CHECK_INT(mixp_read(x, seen, MIXP_F32, 32), MIXP_OK);
    CHECK_NEAR(seen[0], 0.0, 0.0);              /* the lower half of -0.75f, and its upper half */
    CHECK(seen[1] < -1.5f);
    mixp_context_free(m.ctx);
}

/* Forgotten initialisation: weights of 0, so the first loss of a classifier is log(classes), as it
 * should be, and the layers below get no gradient. */
static void test_sign_of_a_forgotten_init(void) {
    model m = model_open();
    mixp_tensor *h = mixp_param(m.ctx, "h", MIXP_F32, 2, weights), *loss;
    mixp_tensor *head = mixp_param(m.ctx, "head", MIXP_F32, 1, two);
    float grad[8];
    mixp_write(h, numbers, MIXP_F32, 8);
    loss = mixp_mul(m.ctx, mixp_linear(m.ctx, input(&m), h, NULL), head);
    loss = mixp_cross_entropy(m.ctx, loss, targets(&m), MIXP_IGNORE);
    CHECK_NEAR(mixp_item(loss), log(2.0), 1e-6);
    mixp_backward(m.ctx, loss);
    CHECK_INT(mixp_read(h->grad, grad, MIXP_F32, 8), MIXP_OK);
    for (int i = 0; i < 8; i++) CHECK_NEAR(grad[i], 0.0, 0.0);
    mixp_context_free(m.ctx);
}

/* The scale was asked for, and gradients were not multiplied by it all the same: their norm is
 * smaller than it should be by that factor. */
static void test_sign_of_gradients_without_the_scale(void) {
    static float w[8], g[8];
    model m = model_open();
    mixp_optimizer *opt = new_sgd(m.ctx);
    mixp_optimizer_add(opt, mixp_view(m.ctx, "mine", MIXP_F32, 1, eight, w),
                       mixp_view(m.ctx, "mine.grad", MIXP_F32, 1, eight, g));
    g[0] = 2.0f;
    CHECK_NEAR(mixp_scaler_loss_scale(m.scaler), 65536.0, 0.0);
    CHECK_INT(mixp_scaler_step(m.scaler, opt), MIXP_OK);
    CHECK_NEAR(mixp_optimizer_verdict(opt).grad_norm, 2.0 / 65536.0, 0.0);
    mixp_context_free(m.ctx);
}

int main(void) {
    RUN(test_told);
    RUN(test_bounds_of_a_fill);
    RUN(test_warned);
    RUN(test_told_without_a_context);
    RUN(test_legal);
    RUN(test_layouts_of_attention);
    RUN(test_verdict_of_a_disabled_scaler);
    RUN(test_bad_loss_of_a_disabled_scaler);
    RUN(test_bad_loss_at_once);
    RUN(test_bad_data_under_a_guard);
    RUN(test_sign_of_a_forgotten_zero_grad);
    RUN(test_sign_of_a_missing_touch);
    RUN(test_sign_of_a_missing_touch_beside_a_master);
    RUN(test_sign_of_a_wrong_host_dtype);
    RUN(test_sign_of_a_forgotten_init);
    RUN(test_sign_of_gradients_without_the_scale);
    return test_report();
}
