/* states.h - optimizers of each kind and in any order, steps half done, names of a program; a fault at each call of a load.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* A network of one weight after two steps with an optimizer of this kind, with momentum where it
 * has one. */
static mixp_checkpoint one_weight(mixp_optimizer_desc d, mixp_optimizer *keep[1]) {
    static const int64_t two[2] = { 2, 2 };
    static const float x[4] = { 1, 2, 3, 4 };
    mixp_checkpoint all;
    if (d.kind == MIXP_OPTIMIZER_SGD || d.kind == MIXP_OPTIMIZER_RMSPROP) d.momentum = 0.5;
    memset(&all, 0, sizeof all);
    all.ctx = mixp_context_new(NULL);
    mixp_tensor *w = mixp_param(all.ctx, "w", MIXP_F32, 2, two);
    keep[0] = mixp_optimizer_new(all.ctx, &d);
    mixp_fill(w, 1.0);
    mixp_optimizer_add(keep[0], w, NULL);
    for (int i = 0; i < 2; i++) {
        mixp_step_begin(all.ctx);
        mixp_zero_grad(keep[0]);
        mixp_tensor *in = mixp_input(all.ctx, MIXP_F32, 2, two, x);
        mixp_backward(all.ctx, mixp_sum(all.ctx, mixp_linear(all.ctx, in, w, NULL), MIXP_ALL, 0));
        CHECK_INT(mixp_optimizer_step(keep[0]), MIXP_OK);
    }
    all.optimizers = keep;
    all.n_optimizers = 1;
    return all;
}

/* Two optimizers of one kind in another order than the file's: the error says so, and changes nothing. */
static void test_optimizers_in_another_order(void) {
    static const char *const name[] = { "a", "b" };
    const int64_t one = 1;
    mixp_optimizer *opt[2], *turned[2];
    mixp_checkpoint all;
    mixp_tensor *w[2];
    const char *why;
    memset(&all, 0, sizeof all);
    all.ctx = mixp_context_new(NULL);
    for (int i = 0; i < 2; i++) {
        w[i] = mixp_param(all.ctx, name[i], MIXP_F32, 1, &one);
        mixp_fill(w[i], 1.0 + i);
        opt[i] = turned[1 - i] = mixp_optimizer_new(all.ctx, NULL);
        mixp_optimizer_add(opt[i], w[i], NULL);
    }
    all.optimizers = opt;
    all.n_optimizers = 2;
    CHECK_INT(mixp_checkpoint_save("order", &all), MIXP_OK);
    mixp_fill(w[1], 5.0);
    all.optimizers = turned;
    CHECK_INT(mixp_checkpoint_load("order", &all), MIXP_ERR_SHAPE);
    CHECK_INT(mixp_context_error(all.ctx, &why), MIXP_ERR_SHAPE);
    CHECK_TEXT(why, "set .optimizers in the order in which they were saved (order)");
    CHECK_NEAR(mixp_item(w[1]), 5.0, 0.0);
    mixp_context_clear_error(all.ctx);
    all.optimizers = opt;
    CHECK_INT(mixp_checkpoint_load("order", &all), MIXP_OK);
    CHECK_NEAR(mixp_item(w[1]), 2.0, 0.0);
    mixp_context_free(all.ctx);
}

/* Adam, AdamW and RMSprop have the same states, and so have SGD, Lion and Muon: a file loads into
 * its own kind and form only, and the error changes nothing and names both kinds. */
static void test_kinds(void) {
    enum { KINDS = 12 };
    static const char *const name[KINDS] = { "Adam", "AdamW", "SGD", "RMSprop", "Lion", "Muon", "Adagrad",
        "Adamax", "NAdam", "RAdam", "AdamW amsgrad", "RMSprop centered" };
    mixp_optimizer_desc kind[KINDS] = { mixp_adam_defaults(), mixp_adamw_defaults(), mixp_sgd_defaults(),
        mixp_rmsprop_defaults(), mixp_lion_defaults(), mixp_muon_defaults(), mixp_adagrad_defaults(),
        mixp_adamax_defaults(), mixp_nadam_defaults(), mixp_radam_defaults(), mixp_adamw_defaults(),
        mixp_rmsprop_defaults() };
    mixp_optimizer *saved[1], *loaded[1];
    char part[100];
    const char *why;
    kind[10].amsgrad = kind[11].centered = 1;
    for (int from = 0; from < KINDS; from++)
        for (int to = 0; to < KINDS; to++) {
            mixp_checkpoint file = one_weight(kind[from], saved), here = one_weight(kind[to], loaded);
            size_t n;
            CHECK_INT(mixp_checkpoint_save("kinds", &file), MIXP_OK);
            CHECK_INT(mixp_checkpoint_save("before", &here), MIXP_OK);
            unsigned char *before = get_file("before", &n);
            CHECK_INT(mixp_checkpoint_load("kinds", &here), from == to ? MIXP_OK : MIXP_ERR_SHAPE);
            mixp_context_error(here.ctx, &why);
            snprintf(part, sizeof part, "optimizers are '%s;', the program's '%s;'", name[from], name[to]);
            if (from != to) CHECK_TEXT(why, part);
            if (from != to) CHECK_TEXT(why, "mixp_checkpoint_load_weights");
            mixp_context_clear_error(here.ctx);
            CHECK_INT(mixp_checkpoint_save("after", &here), MIXP_OK);
            if (from != to) CHECK(before && file_is("after", before, n));
            if (from != to) CHECK_INT(mixp_checkpoint_load_weights("kinds", here.ctx, NULL), MIXP_OK);
            free(before);
            mixp_context_free(file.ctx);
            mixp_context_free(here.ctx);
        }
}

/* A problem without a region (low 0), or with one of bf16, on a device of this name. */
static void problem_on(problem *p, mixp_device *device, const char *name, int low) {
    mixp_context_desc desc;
    *device = *mixp_cpu();
    device->name = name;
    memset(&desc, 0, sizeof desc);
    desc.device = device;
    problem_make(p, &desc, MIXP_RULE_TORCH, 0.9);
    problem_run(p, 3);
    if (low) MIXP_AUTOCAST(p->ctx, MIXP_BF16) mixp_add(p->ctx, p->b, p->b);
}

/* A file says which bits the CPU's products of f16 and bf16 had. Where they go on with others, one
 * warning says so, and the state is loaded. */
static void test_of_another_cpu(void) {
    static const struct { const char *saved, *loaded; int low, warned; const char *key; } row[] = {
        { "cpu avx512", "cpu avx512", 1, 0, "cpu" },
        { "cpu scalar", "cpu avx512 bf16", 1, 0, "cpu" },
        { "cpu neon f16 bf16", "cpu avx2", 1, 0, "cpu" },
        { "cpu avx512 amx", "cpu avx512 amx", 1, 0, "cpu amx" },
        { "cpu avx512 amx f16", "cpu avx512 amx f16", 1, 0, "cpu amx f16" },
        { "cpu avx512", "cpu avx512 amx", 1, 1, "cpu" },
        { "cpu avx512 amx", "cpu avx512 bf16", 1, 1, "cpu amx" },
        { "cpu avx512 amx", "cpu avx512 amx f16", 1, 1, "cpu amx" },
        { "cpu avx512 amx f16", "cpu neon", 1, 1, "cpu amx f16" },
        { "cpu avx512 amx", "cpu avx512", 0, 0, NULL },     /* fp32: no such product */
        { "cuda", "cpu avx512 amx", 1, 0, NULL },
        { "cpu avx512 amx", "cuda", 1, 0, "cpu amx" }
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        mixp_device devices[2];
        mixp_safetensors *f = NULL;
        problem from, to;
        problem_on(&from, &devices[0], row[i].saved, row[i].low);
        problem_on(&to, &devices[1], row[i].loaded, 0);
        CHECK_INT(mixp_checkpoint_save("ck", &from.all), MIXP_OK);
        CHECK_INT(mixp_safetensors_read("ck", &f, NULL, 0), MIXP_OK);
        const char *key = mixp_safetensors_metadata(f, "mixprec.cpu");
        CHECK(row[i].key ? key && strcmp(key, row[i].key) == 0 : !key);
        mixp_safetensors_free(f);

        CHECK_INT(mixp_checkpoint_load("ck", &to.all), MIXP_OK);
        CHECK_INT(mixp_context_error(to.ctx, NULL), MIXP_OK);
        CHECK_INT(*mixp_context_warning(to.ctx) != '\0', row[i].warned);
        if (row[i].warned) CHECK_TEXT(mixp_context_warning(to.ctx), "portable_bits");
        if (row[i].warned) CHECK_TEXT(mixp_context_warning(to.ctx), row[i].key);
        CHECK(same_bits(from.w, to.w) && same_bits(from.b, to.b));

        /* The loaded state is saved with the bits of its new CPU. */
        CHECK_INT(mixp_checkpoint_save("ck", &to.all), MIXP_OK);
        CHECK_INT(mixp_safetensors_read("ck", &f, NULL, 0), MIXP_OK);
        key = mixp_safetensors_metadata(f, "mixprec.cpu");
        CHECK_INT(key != NULL, row[i].key && strcmp(row[i].loaded, "cuda") != 0);
        mixp_safetensors_free(f);
        mixp_context_free(from.ctx);
        mixp_context_free(to.ctx);
    }
}

/* A file that names no kinds, as early versions wrote it, loads; of many kinds the first that
 * differs counts, and a text of the file reaches the message without control characters. */
static void test_kinds_in_the_file(void) {
    static const struct { const char *kinds; mixp_result want; const char *part; } row[] = {
        { "AdamW;SGD;", MIXP_OK, "" },
        { "AdamW;Lion;", MIXP_ERR_SHAPE, "optimizer 1 has another kind: the file's optimizers are 'AdamW;Lion;'" },
        { "Adam;SGD;", MIXP_ERR_SHAPE, "optimizer 0 has another kind" },
        { "SGD;AdamW;", MIXP_ERR_SHAPE, "optimizer 0 has another kind" },
        { "\x1B]0;", MIXP_ERR_SHAPE, "the file's optimizers are '?]0;'" },
        { NULL, MIXP_OK, "" }
    };
    const char *metadata[2][2] = { { "mixprec", "1" }, { "mixprec.optimizers", NULL } };
    problem p;
    problem_make(&p, NULL, MIXP_RULE_TORCH, 0.9);
    problem_run(&p, 3);
    CHECK_INT(mixp_checkpoint_save("ck", &p.all), MIXP_OK);
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        mixp_safetensors *f = NULL;
        mixp_st_entry e[128];
        int64_t k;
        const char *why;
        CHECK_INT(mixp_safetensors_read("ck", &f, NULL, 0), MIXP_OK);
        CHECK_TEXT(mixp_safetensors_metadata(f, "mixprec.optimizers"), "AdamW;SGD;");
        for (k = 0; k < mixp_safetensors_count(f); k++) e[k] = *mixp_safetensors_at(f, k);
        metadata[1][1] = row[i].kinds;
        CHECK_INT(mixp_safetensors_write("bad", e, k, (const char *const (*)[2])metadata, row[i].kinds ? 2 : 1,
                                         NULL, 0), MIXP_OK);
        mixp_safetensors_free(f);
        CHECK_INT(mixp_checkpoint_load("bad", &p.all), row[i].want);
        mixp_context_error(p.ctx, &why);
        CHECK_TEXT(why, row[i].part);
        mixp_context_clear_error(p.ctx);
    }
    mixp_context_free(p.ctx);
}

/* A header with __metadata__ twice, the first with two million pairs: their count must not be
 * used with the second, which is shorter. */
static void test_load_of_two_metadata(void) {
    const size_t pairs = 2000000, room = pairs * 12 + 100;
    char *header = (char *)malloc(room);
    unsigned char *bytes = (unsigned char *)malloc(room + 8);
    mixp_checkpoint all;
    const char *why;
    CHECK(header && bytes);
    if (!header || !bytes) return;
    size_t n = (size_t)sprintf(header, "{\"__metadata__\":{");
    for (size_t i = 0; i < pairs; i++) n += (size_t)sprintf(header + n, "%s\"%06x\":\"\"", i ? "," : "", (unsigned)i);
    n += (size_t)sprintf(header + n, "},\"__metadata__\":{}}");
    put_file("bad", bytes, make(bytes, header, n, 0));
    memset(&all, 0, sizeof all);
    all.ctx = mixp_context_new(NULL);
    CHECK_INT(mixp_checkpoint_load("bad", &all), MIXP_ERR_FORMAT);
    mixp_context_error(all.ctx, &why);
    CHECK_TEXT(why, "__metadata__ appears twice");
    mixp_context_free(all.ctx);
    free(header);
    free(bytes);
    remove("bad");
}

/* A file of another model, or too big to be one, is refused by its header: no memory is taken
 * for its 3 GB, which stand in the file as a hole. */
static size_t most_asked;
static void *asked_allocate(size_t bytes, void *user) {
    (void)user;
    if (bytes > most_asked) most_asked = bytes;
    return malloc(bytes);
}
static void asked_release(void *p, void *user) { (void)user; free(p); }

static void test_load_looks_first(void) {
    static const char header[] = "{\"__metadata__\":{\"mixprec\":\"1\"},\"a\":{\"dtype\":\"F32\","
                                 "\"shape\":[805306368],\"data_offsets\":[0,3221225472]}}";
    unsigned char bytes[256];
    mixp_context_desc desc;
    const char *why;
    problem p;
    size_t n = make(bytes, header, sizeof header - 1, 0);
    memset(&desc, 0, sizeof desc);
    desc.allocate = asked_allocate;
    desc.release = asked_release;
    problem_make(&p, &desc, MIXP_RULE_TORCH, 0.9);
    put_file("huge", bytes, n);
    if (truncate("huge", (off_t)((int64_t)n + INT64_C(3221225472))) != 0) SKIP("no room for a file with a hole");
    most_asked = 0;
    CHECK_INT(mixp_checkpoint_load("huge", &p.all), MIXP_ERR_SHAPE);
    mixp_context_error(p.ctx, &why);
    CHECK_TEXT(why, "'a' is in the file only");
    CHECK(most_asked < 100000);
    mixp_context_free(p.ctx);
    remove("huge");
}

static void fails(const char *path, problem *p, mixp_result want, const char *part) {
    const char *message;
    CHECK_INT(mixp_checkpoint_save(path, &p->all), want);
    mixp_context_error(p->ctx, &message);
    CHECK_TEXT(message, part);
    mixp_context_clear_error(p->ctx);
}

static void test_save_refuses(void) {
    problem p;
    float one[2] = { 1.0f, 1.0f };
    problem_make(&p, NULL, MIXP_RULE_TORCH, 0.9);
    put_file("keep", "old", 3);
    CHECK_INT(mixp_checkpoint_save("keep", NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_checkpoint_load("keep", NULL), MIXP_ERR_ARGUMENT);
    fails(NULL, &p, MIXP_ERR_ARGUMENT, "path is NULL");
    fails("nowhere/x", &p, MIXP_ERR_IO, strerror(ENOENT));
    p.values[1].name = "cursor";
    fails("keep", &p, MIXP_ERR_ARGUMENT, "'value.cursor'");
    p.values[1].name = NULL;
    fails("keep", &p, MIXP_ERR_ARGUMENT, "value");
    p.values[1].name = "epoch";
    p.all.n_optimizers = -1;
    fails("keep", &p, MIXP_ERR_ARGUMENT, "negative");
    p.all.n_optimizers = 2;
    for (int i = 0; i < 64; i++) p.grads[0][i] = p.grads[1][i] = 1.0f;
    CHECK_INT(mixp_scaler_unscale(p.scaler, p.opt[0]), MIXP_OK);
    fails("keep", &p, MIXP_ERR_ORDER, "optimizer 0 is in the middle of a step");
    CHECK_INT(mixp_checkpoint_load("ck", &p.all), MIXP_ERR_ORDER);
    mixp_context_clear_error(p.ctx);
    CHECK_INT(mixp_scaler_step(p.scaler, p.opt[0]), MIXP_OK);
    CHECK_INT(mixp_scaler_update(p.scaler), MIXP_OK);
    mixp_tensor *same = mixp_view(p.ctx, "norm", MIXP_F32, 0, NULL, &one[0]);        /* mixp_param would refuse */
    mixp_tensor *grad = mixp_view(p.ctx, "grad", MIXP_F32, 0, NULL, &one[1]);
    CHECK_INT(mixp_optimizer_add(p.opt[1], same, grad), MIXP_OK);
    fails("keep", &p, MIXP_ERR_ARGUMENT, "two tensors have the name 'norm'");
    CHECK(mixp_param(p.ctx, NULL, MIXP_F32, 0, NULL) != NULL);
    fails("keep", &p, MIXP_ERR_ARGUMENT, "a parameter has no name (f32, 1 elements)");
    CHECK(file_is("keep", "old", 3));
    mixp_context_free(p.ctx);
}

/* What a pass has found waits for the update: a file of before it would lose that. A load forgets
 * it, as it is of another state. */
static void test_between_step_and_update(void) {
    const int32_t found = 1;
    mixp_scaler_state state;
    problem p;
    problem_make(&p, NULL, MIXP_RULE_TORCH, 0.9);
    problem_run(&p, 2);
    CHECK_INT(mixp_checkpoint_save("ck", &p.all), MIXP_OK);
    for (int i = 0; i < 64; i++) p.grads[0][i] = p.grads[1][i] = mixp_f32_of_bits(0x7F800000u);
    CHECK_INT(mixp_scaler_unscale(p.scaler, p.opt[0]), MIXP_OK);
    CHECK_INT(mixp_zero_grad(p.opt[0]), MIXP_OK);
    fails("keep", &p, MIXP_ERR_ORDER, "the scaler is in the middle of a step");
    CHECK_INT(mixp_checkpoint_load("ck", &p.all), MIXP_ERR_ORDER);
    mixp_context_clear_error(p.ctx);
    CHECK_INT(mixp_scaler_update(p.scaler), MIXP_OK);
    p.scaler->state->loss_bad = p.scaler->state->found_inf = found;
    CHECK_INT(mixp_checkpoint_load("ck", &p.all), MIXP_OK);
    CHECK_INT(mixpi_scaler_get(p.scaler, &state), MIXP_OK);
    CHECK_INT(state.found_inf, 0);
    CHECK_INT(state.loss_bad, 0);
    mixp_context_free(p.ctx);
}

/* One micro-batch of the loss sum(w^2) or, if large, 4 sum(w^2): gradients 2 w or 8 w. */
static void micro_batch(mixp_context *ctx, mixp_tensor *w, int large) {
    CHECK_INT(mixp_step_begin(ctx), MIXP_OK);
    CHECK_INT(mixp_backward(ctx, mixp_scale(ctx, mixp_sum(ctx, mixp_square(ctx, w), MIXP_ALL, 0), large ? 4 : 1)),
              MIXP_OK);
}

/* Between two micro-batches: a save gives a warning, since the file lacks their gradients, and a load forgets them. No
 * warning where an update or mixp_zero_grad came last. lr 1: a step subtracts the gradient. */
static void test_between_micro_batches(void) {
    static const int64_t shape[1] = { 2 };
    static const float   begin[2] = { 3.0f, -5.0f };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    sgd.lr = 1.0;
    for (int way = 0; way < 4; way++) {         /* a save behind: a micro-batch, an update, zero_grad, a load */
        mixp_context   *ctx = mixp_context_new(NULL);
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
        mixp_tensor    *w = mixp_param(ctx, "w", MIXP_F32, 1, shape);
        mixp_checkpoint all;
        float           got[2];
        memset(&all, 0, sizeof all);
        all.ctx = ctx;
        all.optimizers = &opt;
        all.n_optimizers = 1;
        CHECK_INT(mixp_optimizer_add(opt, w, NULL), MIXP_OK);
        CHECK_INT(mixp_write(w, begin, MIXP_F32, 2), MIXP_OK);
        CHECK_INT(mixp_checkpoint_save("begin", &all), MIXP_OK);
        micro_batch(ctx, w, 1);
        if (way == 1) CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        if (way == 2) CHECK_INT(mixp_zero_grad(opt), MIXP_OK);
        if (way == 3) CHECK_INT(mixp_checkpoint_load("begin", &all), MIXP_OK);
        CHECK_INT(mixp_checkpoint_save("micro", &all), MIXP_OK);
        if (way == 0) CHECK_TEXT(mixp_context_warning(ctx), "save after its update");
        else CHECK(!*mixp_context_warning(ctx));

        /* After a load the next micro-batch is the first: w - 2 w. */
        if (way != 1) CHECK_INT(mixp_checkpoint_load("begin", &all), MIXP_OK);
        if (way == 1) CHECK_INT(mixp_write(w, begin, MIXP_F32, 2), MIXP_OK);
        if (way == 1) CHECK_INT(mixp_zero_grad(opt), MIXP_OK);
        micro_batch(ctx, w, 0);
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        CHECK_INT(mixp_read(w, got, MIXP_F32, 2), MIXP_OK);
        CHECK(got[0] == -3.0f && got[1] == 5.0f);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        mixp_context_free(ctx);
    }
}

/* What the kind of an optimizer lacks may hold anything in a group, and nesterov any truth: what is
 * saved of it loads. */
static void test_groups_with_anything(void) {
    static const int64_t n[1] = { 3 };
    mixp_checkpoint all;
    memset(&all, 0, sizeof all);
    for (int k = 0; k < 3; k++) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_optimizer_desc d = mixp_sgd_defaults();
        mixp_optimizer *opt;
        mixp_param_group g;
        const char *why = "";
        d.momentum = 0.9;
        d.nesterov = 2;
        opt = k == 0 ? mixp_optimizer_new(ctx, &d) : k == 1 ? mixp_optimizer_new(ctx, NULL) : new_muon(ctx);
        CHECK_INT(mixp_optimizer_group(opt, 0, &g), MIXP_OK);
        CHECK_INT(g.nesterov, k != 1);
        g.nesterov = -5;
        if (k == 0) g.beta1 = g.beta2 = g.eps = -1.0;
        else g.dampening = (double)mixp_f32_of_bits(0x7FC00000u);
        CHECK_INT(mixp_optimizer_set_group(opt, 0, &g), MIXP_OK);
        CHECK_INT(mixp_optimizer_add_group(opt, &g), 1);
        CHECK_INT(mixp_optimizer_group(opt, 0, &g), MIXP_OK);
        CHECK_INT(g.nesterov, k != 1);
        if (k < 2) CHECK_INT(mixp_optimizer_add(opt, mixp_param(ctx, "x", MIXP_F32, 1, n), NULL), MIXP_OK);
        all.ctx = ctx;
        all.optimizers = &opt;
        all.n_optimizers = 1;
        CHECK_INT(mixp_checkpoint_save("ck", &all), MIXP_OK);
        CHECK_INT(mixp_checkpoint_load("ck", &all), MIXP_OK);
        mixp_context_error(ctx, &why);
        CHECK_TEXT(why, "");
        mixp_context_free(ctx);
    }
}

/* States of a parameter called "net.spike.w" are no state of spikes, which may be passed over. */
static void test_a_parameter_called_spike(void) {
    static const int64_t n[1] = { 3 };
    mixp_checkpoint all;
    const char *why = "";
    memset(&all, 0, sizeof all);
    for (int has = 1; has >= 0; has--) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_tensor *w = mixp_param(ctx, "net.spike.w", MIXP_F32, 1, n);
        mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
        CHECK_INT(mixp_optimizer_add(opt, mixp_param(ctx, "x", MIXP_F32, 1, n), NULL), MIXP_OK);
        if (has) CHECK_INT(mixp_optimizer_add(opt, w, NULL), MIXP_OK);
        all.ctx = ctx;
        all.optimizers = &opt;
        all.n_optimizers = 1;
        if (has) CHECK_INT(mixp_checkpoint_save("ck", &all), MIXP_OK);
        CHECK_INT(mixp_checkpoint_load("ck", &all), has ? MIXP_OK : MIXP_ERR_SHAPE);
        mixp_context_error(ctx, &why);
        if (!has) CHECK_TEXT(why, "'optimizer.0.m.net.spike.w' is in the file only");
        mixp_context_free(ctx);
    }
}

/* A fault in each system call of a load: an error, and nothing has changed; or, of one whose
 * failure does not matter, all is loaded. */
static void test_fault_at_each_call_of_a_load(void) {
    problem p;
    size_t n;
    int at, loaded = 0;
    problem_make(&p, NULL, MIXP_RULE_TORCH, 0.9);
    problem_run(&p, 2);
    CHECK_INT(mixp_checkpoint_save("ck", &p.all), MIXP_OK);
    problem_run(&p, 2);
    CHECK_INT(mixp_checkpoint_save("before", &p.all), MIXP_OK);
    unsigned char *before = get_file("before", &n);
    for (at = 0; ; at++) {
        fault_calls = 0;
        fault_at = at;
        fault_errno = EIO;
        mixp_result r = mixp_checkpoint_load("ck", &p.all);
        if (fault_calls <= at) break;
        CHECK_INT(r, strcmp(fault_hit, "stat") && strcmp(fault_hit, "close") && strcmp(fault_hit, "fclose")
                     ? MIXP_ERR_IO : MIXP_OK);
        faults_off();
        mixp_context_clear_error(p.ctx);
        CHECK_INT(mixp_checkpoint_save("after", &p.all), MIXP_OK);
        CHECK(before && file_is("after", before, n) == (r != MIXP_OK));
        if (r != MIXP_OK) continue;
        CHECK_INT(p.cursor, 2);
        problem_run(&p, 2);             /* the same two steps again */
        CHECK_INT(mixp_checkpoint_save("after", &p.all), MIXP_OK);
        CHECK(before && file_is("after", before, n));
        loaded++;
    }
    faults_off();
    CHECK(at > 50 && loaded == (POSIX ? 2 : 1));
    printf("  %d loads\n", at);
    free(before);
    mixp_context_free(p.ctx);
}

/* Values of every dtype that the format has, one and several, come back to the bit. */
static void test_values(void) {
    static const mixp_dtype dtypes[] = { MIXP_F64, MIXP_F32, MIXP_F16, MIXP_BF16, MIXP_I64, MIXP_I32, MIXP_U8,
                                         MIXP_F8_E4M3, MIXP_F8_E5M2 };
    enum { N = 9, ROOM = 7 * 8 };
    unsigned char want[2 * N][ROOM], data[2 * N][ROOM];
    char name[2 * N][16];
    mixp_checkpoint_value values[2 * N], old;
    mixp_checkpoint all;
    mixp_safetensors *f;
    const char *why;
    int64_t number = INT64_C(-0x123456789ABCDEF);
    size_t i, k;
    for (i = 0; i < 2 * N; i++) {
        values[i].name = name[i];
        values[i].dtype = dtypes[i / 2];
        values[i].count = i % 2 ? 7 : 1;
        values[i].data = data[i];
        snprintf(name[i], sizeof name[i], "v%d", (int)i);
        for (k = 0; k < ROOM; k++) want[i][k] = (unsigned char)(i * 37 + k * 91 + 5);
    }
    memset(&all, 0, sizeof all);
    all.ctx = mixp_context_new(NULL);
    all.values = values;
    all.n_values = 2 * N;
    memcpy(data, want, sizeof data);
    CHECK_INT(mixp_checkpoint_save("v", &all), MIXP_OK);
    memset(data, 0, sizeof data);
    CHECK_INT(mixp_checkpoint_load("v", &all), MIXP_OK);
    for (i = 0; i < 2 * N; i++) {
        size_t bytes = (size_t)values[i].count * mixp_dtype_size(values[i].dtype);
        CHECK(memcmp(data[i], want[i], bytes) == 0);
        for (k = bytes; k < ROOM; k++) CHECK(data[i][k] == 0);
    }
    CHECK_INT(mixp_safetensors_read("v", &f, NULL, 0), MIXP_OK);
    CHECK(f && mixp_safetensors_find(f, "value.v0")->rank == 0 && mixp_safetensors_find(f, "value.v1")->rank == 1);
    mixp_safetensors_free(f);
#define VALUE_IS_REFUSED(i, field, bad, code, part) do { mixp_checkpoint_value kept = values[i];   \
        values[i].field = bad; CHECK_INT(mixp_checkpoint_load("v", &all), code);                    \
        mixp_context_error(all.ctx, &why); CHECK_TEXT(why, part); mixp_context_clear_error(all.ctx); \
        values[i] = kept; CHECK(memcmp(data[1], want[1], 56) == 0); } while (0)
    VALUE_IS_REFUSED(0, dtype, MIXP_I64, MIXP_ERR_DTYPE, "'value.v0' is f64 [], not i64 []");
    VALUE_IS_REFUSED(1, count, 6, MIXP_ERR_SHAPE, "'value.v1' is f64 [7], not f64 [6]");
    VALUE_IS_REFUSED(1, count, 0, MIXP_ERR_ARGUMENT, "count is below 1");
    VALUE_IS_REFUSED(1, count, INT64_MAX, MIXP_ERR_ARGUMENT, "larger than memory");
    VALUE_IS_REFUSED(1, dtype, MIXP_F4_E2M1, MIXP_ERR_ARGUMENT, "dtype");
    VALUE_IS_REFUSED(1, dtype, MIXP_DTYPE_COUNT, MIXP_ERR_ARGUMENT, "dtype");
    VALUE_IS_REFUSED(1, data, NULL, MIXP_ERR_ARGUMENT, "NULL");
    /* A file of version 0.1: its values were single int64 numbers. */
    old.name = "cursor";
    old.dtype = MIXP_I64;
    old.count = 1;
    old.data = &number;
    all.values = &old;
    all.n_values = 1;
    CHECK_INT(mixp_checkpoint_save("v", &all), MIXP_OK);
    number = 0;
    CHECK_INT(mixp_checkpoint_load("v", &all), MIXP_OK);
    CHECK(number == INT64_C(-0x123456789ABCDEF));
    mixp_context_free(all.ctx);
    remove("v");
}

/* Without memory at the k-th request of a save or a load: an error, and nothing has changed. */
static int64_t allowed = -1;
static void *limited_allocate(size_t bytes, void *user) {
    (void)user;
    if (allowed == 0) return NULL;
    if (allowed > 0) allowed--;
    return malloc(bytes);
}
static void limited_release(void *p, void *user) { (void)user; free(p); }

static void test_out_of_memory(void) {
    mixp_context_desc desc;
    mixp_result r = MIXP_ERR_MEMORY;
    problem p;
    size_t n;
    int k;
    memset(&desc, 0, sizeof desc);
    desc.allocate = limited_allocate;
    desc.release = limited_release;
    problem_make(&p, &desc, MIXP_RULE_TORCH, 0.9);
    problem_run(&p, 2);
    CHECK_INT(mixp_checkpoint_save("ck", &p.all), MIXP_OK);
    problem_run(&p, 2);
    CHECK_INT(mixp_checkpoint_save("before", &p.all), MIXP_OK);
    unsigned char *before = get_file("before", &n);
    for (k = 0; r == MIXP_ERR_MEMORY && k < 100; k++) {
        allowed = k;
        r = mixp_checkpoint_save("before", &p.all);
        allowed = -1;
        CHECK(r == MIXP_OK || mixp_context_error(p.ctx, NULL) == MIXP_ERR_MEMORY);
        mixp_context_clear_error(p.ctx);
        CHECK(before && file_is("before", before, n));
    }
    CHECK(r == MIXP_OK && k > 3);
    for (k = 0, r = MIXP_ERR_MEMORY; r == MIXP_ERR_MEMORY && k < 100; k++) {
        if (k) CHECK_INT(p.cursor, 4);
        allowed = k;
        r = mixp_checkpoint_load("ck", &p.all);
        allowed = -1;
        mixp_context_clear_error(p.ctx);
        CHECK_INT(mixp_checkpoint_save("after", &p.all), MIXP_OK);
        CHECK(before && file_is("after", before, n) == (r != MIXP_OK));
    }
    CHECK(r == MIXP_OK && k > 5);
    CHECK_INT(p.cursor, 2);
    free(before);
    mixp_context_free(p.ctx);
}
