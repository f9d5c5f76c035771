/* resume.h - a resumed run has the bits of an uninterrupted one; what a checkpoint's file holds, and which files a load refuses.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- checkpoints -------------------------------------------------------------------------------- */

/* A small problem: three parameters and one view, two optimizers, a scaler that meets overflows. */
typedef struct problem {
    mixp_context   *ctx;
    mixp_tensor    *w, *b, *n, *view;
    mixp_tensor    *gw, *gb, *gn, *gview, *idle;
    mixp_optimizer *opt[2];
    mixp_scaler    *scaler;
    float           memory[6], grads[4][64];
    int64_t         cursor, epoch;
    double          best[3];
    mixp_checkpoint_value values[3];
    mixp_checkpoint all;
} problem;

enum { N_W = 35, N_B = 7, N_N = 1, N_V = 6 };

static void problem_make(problem *p, const mixp_context_desc *desc, mixp_scaler_preset rule, double momentum)
{
    static const int64_t w[2] = { 5, 7 }, b[1] = { 7 }, v[3] = { 1, 2, 3 };
    static const int64_t nw[1] = { N_W }, nb[1] = { N_B }, nn[1] = { N_N }, nv[1] = { N_V };
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_scaler_desc s;
    mixp_param_group group;
    memset(p, 0, sizeof *p);
    p->ctx = mixp_context_new(desc);
    if (!p->ctx) return;
    p->w = mixp_param(p->ctx, "layer.0.weight", MIXP_F16, 2, w);
    p->b = mixp_param(p->ctx, "layer.0.bias", MIXP_F32, 1, b);
    p->n = mixp_param(p->ctx, "norm", MIXP_BF16, 0, NULL);
    p->view = mixp_view(p->ctx, "view", MIXP_F32, 3, v, p->memory);
    p->gw = mixp_view(p->ctx, "", MIXP_F32, 1, nw, p->grads[0]);
    p->gb = mixp_view(p->ctx, "", MIXP_F32, 1, nb, p->grads[1]);
    p->gn = mixp_view(p->ctx, "", MIXP_F32, 1, nn, p->grads[2]);
    p->gview = mixp_view(p->ctx, "", MIXP_F32, 1, nv, p->grads[3]);
    adamw.lr = 0.02;
    adamw.max_norm = 5.0;
    adamw.schedule.kind = MIXP_SCHEDULE_COSINE;
    adamw.schedule.warmup = 2;
    adamw.schedule.total = 20;
    sgd.momentum = momentum;
    memset(&s, 0, sizeof s);
    s.rule = rule;
    s.init_scale = 1024.0f;
    s.growth_interval = 3;
    p->opt[0] = mixp_optimizer_new(p->ctx, &adamw);
    p->opt[1] = mixp_optimizer_new(p->ctx, &sgd);
    p->scaler = mixp_scaler_new(p->ctx, &s);
    if (!p->scaler || !p->opt[0] || !p->opt[1] || !p->view || !p->gview) return;
    mixp_init_normal(p->w, 0.0, 0.5);
    mixp_init_normal(p->b, 1.0, 0.5);
    mixp_fill(p->n, 1.5);
    mixp_init_uniform(p->view, -1.0, 1.0);
    if (mixp_optimizer_add(p->opt[0], p->w, p->gw) != MIXP_OK) return;
    mixp_optimizer_group(p->opt[0], 0, &group);
    group.weight_decay = 0.0;
    mixp_optimizer_add_group(p->opt[0], &group);
    mixp_optimizer_add(p->opt[0], p->b, p->gb);
    p->idle = mixp_param(p->ctx, "idle", MIXP_F32, 1, nb);
    mixp_optimizer_add(p->opt[0], p->idle, NULL);
    mixp_optimizer_add(p->opt[1], p->n, p->gn);
    mixp_optimizer_add(p->opt[1], p->view, p->gview);
    p->values[0].name = "cursor";
    p->values[1].name = "epoch";
    p->values[0].dtype = p->values[1].dtype = MIXP_I64;
    p->values[0].count = p->values[1].count = 1;
    p->values[0].data = &p->cursor;
    p->values[1].data = &p->epoch;
    p->values[2].name = "best";
    p->values[2].dtype = MIXP_F64;
    p->values[2].count = 3;
    p->values[2].data = p->best;
    p->all.ctx = p->ctx;
    p->all.scaler = p->scaler;
    p->all.optimizers = p->opt;
    p->all.n_optimizers = 2;
    p->all.values = p->values;
    p->all.n_values = 3;
}

static float *grad_of(problem *p, int which, mixp_tensor *t) {
    float value[64], scale = mixp_scaler_loss_scale(p->scaler);
    CHECK_INT(mixp_read(t, value, MIXP_F32, t->count), MIXP_OK);
    for (int64_t i = 0; i < t->count; i++)
        p->grads[which][i] = scale * (value[i] * 0.7f + (float)((i * 13 + p->cursor * 5) % 11) * 0.1f - 0.4f);
    return p->grads[which];
}

/* Steps; every fifth gradient overflows. */
static void problem_run(problem *p, int steps) {
    mixp_param_group group;
    for (; steps > 0; steps--) {
        CHECK_INT(mixp_step_begin(p->ctx), MIXP_OK);
        grad_of(p, 0, p->w);
        grad_of(p, 1, p->b);
        grad_of(p, 2, p->n);
        grad_of(p, 3, p->view);
        p->idle->grad = p->cursor % 4 == 2 ? p->gb : NULL;      /* misses most of the steps */
        if (p->cursor % 5 == 3) p->grads[p->cursor % 2 ? 1 : 3][2] = mixp_f32_of_bits(0x7F800000u);
        CHECK_INT(mixp_scaler_unscale(p->scaler, p->opt[1]), MIXP_OK);
        CHECK_INT(mixp_scaler_step(p->scaler, p->opt[0]), MIXP_OK);
        CHECK_INT(mixp_scaler_step(p->scaler, p->opt[1]), MIXP_OK);
        CHECK_INT(mixp_scaler_update(p->scaler), MIXP_OK);
        mixp_optimizer_group(p->opt[1], 0, &group);
        group.lr *= 0.97;               /* a schedule by hand */
        mixp_optimizer_set_group(p->opt[1], 0, &group);
        p->cursor++;
        p->epoch = p->cursor / 4 - 3;
        p->best[p->cursor % 3] = 1.0 / (double)p->cursor;
    }
}

static int same_bits(mixp_tensor *a, mixp_tensor *b) {
    unsigned char x[512], y[512];
    size_t bytes = (size_t)a->count * mixp_dtype_size(a->dtype);
    return mixp_read(a, x, a->dtype, a->count) == MIXP_OK && mixp_read(b, y, b->dtype, b->count) == MIXP_OK &&
           memcmp(x, y, bytes) == 0;
}

/* Stop anywhere and go on in a new context: the same weights and, in its file, the same state,
 * byte for byte, as never having stopped. */
static void resume_on(const mixp_device *device, mixp_scaler_preset rule, double momentum) {
    enum { STEPS = 16 };
    mixp_context_desc desc;
    problem straight, first, then;
    memset(&desc, 0, sizeof desc);
    desc.device = device;
    desc.seed = UINT64_C(0x9123456789ABCDEF);
    problem_make(&straight, &desc, rule, momentum);
    problem_run(&straight, STEPS);
    CHECK_INT(mixp_checkpoint_save("straight", &straight.all), MIXP_OK);
    for (int stop = 0; stop <= STEPS; stop += 3) {
        size_t n = 0;
        unsigned char *want = get_file("straight", &n);
        problem_make(&first, &desc, rule, momentum);
        problem_run(&first, stop);
        CHECK_INT(mixp_checkpoint_save("ck", &first.all), MIXP_OK);
        desc.seed = 5;                  /* the seed, too, comes from the file */
        problem_make(&then, &desc, rule, momentum);
        desc.seed = UINT64_C(0x9123456789ABCDEF);
        problem_run(&then, 4);          /* whatever was there before is replaced */
        uint64_t version = then.b->version;
        CHECK_INT(mixp_checkpoint_load("ck", &then.all), MIXP_OK);
        CHECK(then.b->version > version);       /* cached low copies are stale */
        CHECK_INT(then.cursor, stop);
        CHECK_INT(mixp_context_steps(then.ctx), stop);
        problem_run(&then, STEPS - stop);
        CHECK(same_bits(then.w, straight.w) && same_bits(then.b, straight.b));
        CHECK(same_bits(then.n, straight.n) && same_bits(then.view, straight.view));
        CHECK(same_bits(then.idle, straight.idle));
        CHECK_INT(mixp_optimizer_applied(then.opt[0]), mixp_optimizer_applied(straight.opt[0]));
        CHECK_INT(mixp_checkpoint_save("then", &then.all), MIXP_OK);
        CHECK(want && file_is("then", want, n));
        free(want);
        mixp_context_free(first.ctx);
        mixp_context_free(then.ctx);
    }
    CHECK(mixp_optimizer_applied(straight.opt[0]) < STEPS);     /* some step was skipped */
    mixp_context_free(straight.ctx);
}

/* A device with memory of its own: what is on it is moved by its functions only. */
static int moves;
static void *far_allocate(const mixp_exec *x, size_t bytes) { (void)x; return malloc(bytes); }
static void far_release(const mixp_exec *x, void *p) { (void)x; free(p); }
static mixp_result far_upload(const mixp_exec *x, void *device, const void *host, size_t bytes) {
    (void)x;
    moves++;
    memcpy(device, host, bytes);
    return MIXP_OK;
}
static mixp_result far_download(const mixp_exec *x, void *host, const void *device, size_t bytes) {
    (void)x;
    moves++;
    memcpy(host, device, bytes);
    return MIXP_OK;
}

static void test_resume_on_a_device(void) {
    mixp_device far = *mixp_cpu();
    mixp_context_desc desc;
    problem p;
    far.allocate = far_allocate;
    far.release = far_release;
    far.upload = far_upload;
    far.download = far_download;
    resume_on(&far, MIXP_RULE_TORCH, 0.9);
    memset(&desc, 0, sizeof desc);
    desc.device = &far;
    problem_make(&p, &desc, MIXP_RULE_TORCH, 0.9);
    int before = moves;
    CHECK_INT(mixp_checkpoint_save("ck", &p.all), MIXP_OK);
    CHECK(moves - before >= 5 + 2 * 3 + 2 + 2);     /* weights, moments of both kinds, masters */
    before = moves;
    CHECK_INT(mixp_checkpoint_load("ck", &p.all), MIXP_OK);
    CHECK(moves - before >= 5 + 2 * 3 + 2 + 2);
    mixp_context_free(p.ctx);
}

static void test_resume(void) {
    for (int isa = 0; isa < MIXP_ISA_COUNT; isa++) {
        const mixp_device *device = mixp_cpu_with((mixp_isa)isa);
        if (!device) continue;
        resume_on(device, MIXP_RULE_TORCH, 0.9);
        resume_on(device, MIXP_RULE_MEGATRON, 0.0);
        resume_on(device, MIXP_RULE_PADDLE, 0.9);
    }
}

/* Other tools see a model; a weight written by hand before saving reaches its master. */
static void test_file_of_a_checkpoint(void) {
    static const char *const names[] = {
        "layer.0.weight", "layer.0.bias", "norm", "view", "optimizer.0.m.layer.0.weight",
        "optimizer.0.v.layer.0.bias", "optimizer.0.master.layer.0.weight", "optimizer.1.m.view",
        "optimizer.1.master.norm", "optimizer.0.applied", "optimizer.1.group.0.lr", "scaler.scale",
        "scaler.growth_tracker", "scaler.hysteresis_left", "scaler.floor_skips", "scaler.updates",
        "scaler.skips", "optimizer.0.missed.idle", "optimizer.1.steps", "mixprec.step", "mixprec.seed", "value.cursor", "value.epoch", "value.best" };
    mixp_safetensors *f = NULL;
    problem p;
    float master[N_W];
    problem_make(&p, NULL, MIXP_RULE_TORCH, 0.9);
    problem_run(&p, 2);
    CHECK_INT(mixp_fill(p.w, 0.25), MIXP_OK);
    CHECK_INT(mixp_checkpoint_save("ck", &p.all), MIXP_OK);
    CHECK_INT(mixp_safetensors_read("ck", &f, NULL, 0), MIXP_OK);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (!mixp_safetensors_find(f, names[i])) printf("  %s\n", names[i]);
        CHECK(mixp_safetensors_find(f, names[i]) != NULL);
    }
    CHECK(mixp_safetensors_find(f, "optimizer.0.master.layer.0.bias") == NULL);     /* f32 has none */
    CHECK_TEXT(mixp_safetensors_metadata(f, "format"), "pt");
    if (mixp_safetensors_find(f, "layer.0.weight")) {
        const mixp_st_entry *e = mixp_safetensors_find(f, "layer.0.weight");
        CHECK(e->dtype == MIXP_F16 && e->rank == 2 && e->shape[0] == 5 && e->shape[1] == 7);
        CHECK(memcmp(e->data, "\0\x34", 2) == 0);
        memcpy(master, mixp_safetensors_find(f, "optimizer.0.master.layer.0.weight")->data, sizeof master);
        for (size_t i = 0; i < N_W; i++) CHECK_NEAR(master[i], 0.25, 0.0);
    }
    mixp_safetensors_free(f);
    mixp_context_free(p.ctx);
}

/* A load must say what differs and change nothing: the state saved again is the same file. */
static void refuses(problem *p, const char *path, mixp_result want, const char *part) {
    const char *message;
    size_t n;
    CHECK_INT(mixp_checkpoint_save("before", &p->all), MIXP_OK);
    unsigned char *before = get_file("before", &n);
    CHECK_INT(mixp_checkpoint_load(path, &p->all), want);
    CHECK_INT(mixp_context_error(p->ctx, &message), want);
    CHECK_TEXT(message, part);
    mixp_context_clear_error(p->ctx);
    CHECK_INT(mixp_checkpoint_save("after", &p->all), MIXP_OK);
    CHECK(before && file_is("after", before, n));
    free(before);
}

/* Writes "ck" again as "bad": one entry left out, added or changed. */
static void tamper(const char *name, const void *data, mixp_dtype dtype, int rank, int64_t d0,
                   const char *schema) {
    const char *metadata[1][2] = { { "mixprec", NULL } };
    mixp_safetensors *f = NULL;
    mixp_st_entry e[128];
    int64_t i, n = 0;
    int found = 0;
    size_t bytes = mixp_dtype_size(dtype);
    CHECK_INT(mixp_safetensors_read("ck", &f, NULL, 0), MIXP_OK);
    if (rank) bytes *= (size_t)d0;
    for (i = 0; i < mixp_safetensors_count(f); i++) {
        e[n] = *mixp_safetensors_at(f, i);
        if (strcmp(e[n].name, name) == 0) {
            found = 1;
            if (!data) continue;
            e[n] = entry(name, NULL, dtype, rank, d0, 0, data, bytes);
        }
        n++;
    }
    if (!found && data) e[n++] = entry(name, NULL, dtype, rank, d0, 0, data, bytes);
    metadata[0][1] = schema;
    CHECK_INT(mixp_safetensors_write("bad", e, n, (const char *const (*)[2])metadata, schema != NULL, NULL, 0),
              MIXP_OK);
    mixp_safetensors_free(f);
}

static void test_load_refuses(void) {
    static const float zeros[64] = { 0 };
    const float zero = 0.0f, inf = mixp_f32_of_bits(0x7F800000u);
    const int64_t minus = -1;
    const int32_t minus32 = -1, most32 = INT32_MAX, one32 = 1;
    const int64_t most64 = INT64_MAX;
    const double zero64 = 0.0, inf64 = (double)mixp_f32_of_bits(0x7F800000u);
    const double nan = (double)mixp_f32_of_bits(0x7FC00000u), one = 1.0;
    problem p;
    problem_make(&p, NULL, MIXP_RULE_TORCH, 0.9);
    problem_run(&p, 3);
    CHECK_INT(mixp_checkpoint_save("ck", &p.all), MIXP_OK);
    problem_run(&p, 3);
    refuses(&p, "nowhere", MIXP_ERR_IO, strerror(ENOENT));
    put_file("bad", "rubbish rubbish", 15);
    refuses(&p, "bad", MIXP_ERR_FORMAT, "header length");
    refuses(&p, "bad", MIXP_ERR_FORMAT, "not a safetensors file");
    put_file("bad", "short", 5);
    refuses(&p, "bad", MIXP_ERR_FORMAT, "not a safetensors file");
    put_file("bad", "\x40\0\0\0\0\0\0\0{\"a\":", 13);    /* 64 bytes of header, 5 of them there */
    refuses(&p, "bad", MIXP_ERR_FORMAT, "cut short");
    CHECK_INT(save_number("bad", 1.0, NULL), MIXP_OK);
    refuses(&p, "bad", MIXP_ERR_FORMAT, "not a mixprec checkpoint");
#define REJECTS(name, data, dtype, rank, d0, code, part) do {                                          \
        tamper(name, data, dtype, rank, d0, "1"); refuses(&p, "bad", code, part); } while (0)
    REJECTS("norm", NULL, MIXP_F32, 0, 0, MIXP_ERR_SHAPE, "1 tensor does not fit; 'norm' is missing");
    REJECTS("extra", zeros, MIXP_F32, 1, 3, MIXP_ERR_SHAPE, "1 tensor does not fit; 'extra' is in the file only");
    REJECTS("view", zeros, MIXP_F32, 1, 6, MIXP_ERR_SHAPE, "'view' is f32 [6], not f32 [1, 2, 3]");
    REJECTS("norm", zeros, MIXP_F16, 0, 0, MIXP_ERR_DTYPE, "'norm' is f16 [], not bf16 []");
    REJECTS("value.epoch", NULL, MIXP_I64, 0, 0, MIXP_ERR_SHAPE, "'value.epoch' is missing");
    REJECTS("mixprec.step", &minus, MIXP_I64, 0, 0, MIXP_ERR_FORMAT, "'mixprec.step' is out of range");
    REJECTS("optimizer.1.applied", &minus, MIXP_I64, 0, 0, MIXP_ERR_FORMAT, "'optimizer.1.applied'");
    REJECTS("scaler.growth_tracker", &minus32, MIXP_I32, 0, 0, MIXP_ERR_FORMAT, "'scaler.growth_tracker'");
    REJECTS("scaler.updates", &most64, MIXP_I64, 0, 0, MIXP_ERR_FORMAT, "'scaler.updates'");
    REJECTS("scaler.skips", &most64, MIXP_I64, 0, 0, MIXP_ERR_FORMAT, "'scaler.skips'");
    REJECTS("mixprec.step", &most64, MIXP_I64, 0, 0, MIXP_ERR_FORMAT, "'mixprec.step'");
    REJECTS("mixprec.tensors_made", &most64, MIXP_I64, 0, 0, MIXP_ERR_FORMAT, "'mixprec.tensors_made'");
    REJECTS("optimizer.0.steps", &most64, MIXP_I64, 0, 0, MIXP_ERR_FORMAT, "'optimizer.0.steps'");
    REJECTS("optimizer.1.skipped", &most64, MIXP_I64, 0, 0, MIXP_ERR_FORMAT, "'optimizer.1.skipped'");
    REJECTS("optimizer.0.missed.idle", &most64, MIXP_I64, 0, 0, MIXP_ERR_FORMAT, "'optimizer.0.missed.idle'");
    REJECTS("optimizer.1.group.0.nesterov", &most32, MIXP_I32, 0, 0, MIXP_ERR_FORMAT, "nesterov'");
    REJECTS("optimizer.1.group.0.dampening", &inf64, MIXP_F64, 0, 0, MIXP_ERR_FORMAT, "dampening'");
    tamper("optimizer.1.group.0.momentum", &zero64, MIXP_F64, 0, 0, "1");      /* each alone is fine */
    CHECK(rename("bad", "ck2") == 0 && rename("ck", "ck1") == 0 && rename("ck2", "ck") == 0);
    REJECTS("optimizer.1.group.0.nesterov", &one32, MIXP_I32, 0, 0, MIXP_ERR_FORMAT,
            "group 0 of optimizer 1: nesterov needs momentum");
    CHECK(rename("ck1", "ck") == 0);
    REJECTS("scaler.scale", &zero, MIXP_F32, 0, 0, MIXP_ERR_FORMAT, "'scaler.scale'");
    REJECTS("scaler.scale", &inf, MIXP_F32, 0, 0, MIXP_ERR_FORMAT, "'scaler.scale'");
    REJECTS("optimizer.1.group.0.lr", &nan, MIXP_F64, 0, 0, MIXP_ERR_FORMAT, "group.0.lr'");
    REJECTS("optimizer.0.group.1.beta2", &one, MIXP_F64, 0, 0, MIXP_ERR_FORMAT, "group.1.beta2'");
    tamper("none", NULL, MIXP_F32, 0, 0, "2");
    refuses(&p, "bad", MIXP_ERR_FORMAT, "another version of mixprec: the file has layout '2'");
    tamper("none", NULL, MIXP_F32, 0, 0, NULL);
    refuses(&p, "bad", MIXP_ERR_FORMAT, "not a mixprec checkpoint");
    p.all.n_optimizers = 1;     /* fewer optimizers: the first three of its lost tensors are named */
    refuses(&p, "ck", MIXP_ERR_SHAPE, "set .optimizers (ck)");
    p.all.n_optimizers = 2;
    tamper("none", NULL, MIXP_F32, 0, 0, "1");      /* and nothing is wrong with the way this is tested */
    CHECK_INT(mixp_checkpoint_load("bad", &p.all), MIXP_OK);
    CHECK_INT(p.cursor, 3);
    mixp_context_free(p.ctx);
}
