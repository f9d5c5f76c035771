/* weights.h - weights without states, also of other dtypes.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
/* --- weights alone ---------------------------------------------------------------------------- */

/* What a load of weights told, as "name=fate " in its order. */
static char told[512];
static void tell(void *user, const char *name, mixp_weight_fate fate) {
    size_t n = strlen(told);
    int    is = fate == MIXP_WEIGHT_LOADED ? 0 : fate == MIXP_WEIGHT_CONVERTED ? 1 : fate == MIXP_WEIGHT_MISSING ? 2 : 9;
    if (fate == MIXP_WEIGHT_EXTRA) is = 3;
    CHECK(user == told);
    snprintf(told + n, sizeof told - n, "%s=%d ", name, is);
}

/* A context with parameters a[2, 3] and b[4] of a dtype, all 9. */
typedef struct pair { mixp_context *ctx; mixp_tensor *a, *b; } pair;
static pair pair_make(mixp_dtype dtype, const mixp_context_desc *desc) {
    static const int64_t a[2] = { 2, 3 }, b[1] = { 4 };
    pair p;
    p.ctx = mixp_context_new(desc);
    p.a = mixp_param(p.ctx, "a", dtype, 2, a);
    p.b = mixp_param(p.ctx, "b", dtype, 1, b);
    mixp_fill(p.a, 9.0);
    mixp_fill(p.b, 9.0);
    return p;
}

static int holds(mixp_tensor *t, const float *want) {
    float got[8];
    return mixp_read(t, got, MIXP_F32, t->count) == MIXP_OK &&
           memcmp(got, want, (size_t)t->count * sizeof(float)) == 0;
}

static const float nines[6] = { 9, 9, 9, 9, 9, 9 };

static void weights_fail(pair *p, const char *path, const mixp_weights_desc *desc, mixp_result want,
                         const char *part) {
    const char *why;
    told[0] = '\0';
    CHECK_INT(mixp_checkpoint_load_weights(path, p->ctx, desc), want);
    CHECK_INT(mixp_context_error(p->ctx, &why), want);
    CHECK_TEXT(why, part);
    CHECK_TEXT(why, "mixp_checkpoint_load_weights");
    mixp_context_clear_error(p->ctx);
    CHECK(holds(p->a, nines) && holds(p->b, nines));
    CHECK(told[0] == '\0');
}

static void test_weights(void) {
    /* In f32; halfway cases of f16 and bf16, rounded to even by hand. */
    static const float a[6] = { 1.0f, -2.5f, 1.00390625f, 1.01171875f, 65504.0f, -0.0f };
    static const float a_bf16[6] = { 1.0f, -2.5f, 1.0f, 1.015625f, 65536.0f, -0.0f };
    static const float b[4] = { 1.00048828125f, 1.00146484375f, 5.9604644775390625e-8f, 3.0f };
    static const float b_f16[4] = { 1.0f, 1.001953125f, 5.9604644775390625e-8f, 3.0f };
    static const int32_t whole[4] = { 1, 2, 3, 4 };
    mixp_st_entry e[3];
    mixp_weights_desc desc;
    pair p = pair_make(MIXP_F32, NULL), bf16 = pair_make(MIXP_BF16, NULL), f16 = pair_make(MIXP_F16, NULL);
    memset(&desc, 0, sizeof desc);
    desc.tell = tell;
    desc.user = told;
    e[0] = entry("a", NULL, MIXP_F32, 2, 2, 3, a, sizeof a);
    e[1] = entry("b", NULL, MIXP_F32, 1, 4, 0, b, sizeof b);
    e[2] = entry("more", NULL, MIXP_F32, 1, 4, 0, b, sizeof b);
    CHECK_INT(mixp_safetensors_write("w", e, 2, NULL, 0, NULL, 0), MIXP_OK);
    CHECK_INT(mixp_safetensors_write("w3", e, 3, NULL, 0, NULL, 0), MIXP_OK);
    CHECK_INT(mixp_safetensors_write("w1", e + 1, 1, NULL, 0, NULL, 0), MIXP_OK);
    CHECK_INT(mixp_safetensors_write("empty", NULL, 0, NULL, 0, NULL, 0), MIXP_OK);
    /* refused: the message lists, nothing changes */
    weights_fail(&p, "w3", &desc, MIXP_ERR_SHAPE, "1 tensor does not fit; 'more' is in the file only");
    weights_fail(&p, "w1", NULL, MIXP_ERR_SHAPE, "1 tensor does not fit; 'a' is missing");
    weights_fail(&p, "nowhere", NULL, MIXP_ERR_IO, strerror(ENOENT));
    weights_fail(&bf16, "w", NULL, MIXP_ERR_DTYPE, "'a' is f32 [2, 3], not bf16 [2, 3]");
    e[1] = entry("b", NULL, MIXP_F32, 2, 2, 2, b, sizeof b);
    CHECK_INT(mixp_safetensors_write("bad", e, 2, NULL, 0, NULL, 0), MIXP_OK);
    desc.convert = desc.allow_extra = desc.allow_missing = 1;
    weights_fail(&p, "bad", &desc, MIXP_ERR_SHAPE, "'b' is f32 [2, 2], not f32 [4]");
    e[1] = entry("b", NULL, MIXP_I32, 1, 4, 0, whole, sizeof whole);
    CHECK_INT(mixp_safetensors_write("bad", e, 2, NULL, 0, NULL, 0), MIXP_OK);
    weights_fail(&p, "bad", &desc, MIXP_ERR_DTYPE, "'b' is i32 [4], not f32 [4]");
    CHECK_INT(mixp_checkpoint_load_weights("w", NULL, NULL), MIXP_ERR_ARGUMENT);
    weights_fail(&p, NULL, NULL, MIXP_ERR_ARGUMENT, "path is NULL");
    /* taken */
    CHECK_INT(mixp_checkpoint_load_weights("empty", p.ctx, &desc), MIXP_OK);
    CHECK(strcmp(told, "a=2 b=2 ") == 0 && holds(p.a, nines));
    told[0] = '\0';
    CHECK_INT(mixp_checkpoint_load_weights("w1", p.ctx, &desc), MIXP_OK);
    CHECK(strcmp(told, "a=2 b=0 ") == 0 && holds(p.a, nines) && holds(p.b, b));
    told[0] = '\0';
    CHECK_INT(mixp_checkpoint_load_weights("w3", p.ctx, &desc), MIXP_OK);
    CHECK(strcmp(told, "a=0 b=0 more=3 ") == 0 && holds(p.a, a) && holds(p.b, b));
    told[0] = '\0';
    CHECK_INT(mixp_checkpoint_load_weights("w", bf16.ctx, &desc), MIXP_OK);
    CHECK(strcmp(told, "a=1 b=1 ") == 0 && holds(bf16.a, a_bf16));
    CHECK_INT(mixp_checkpoint_load_weights("w", f16.ctx, &desc), MIXP_OK);
    CHECK(holds(f16.b, b_f16));
    CHECK_INT(mixp_checkpoint_load_weights("w", p.ctx, NULL), MIXP_OK);
    mixp_context_free(p.ctx);
    mixp_context_free(bf16.ctx);
    mixp_context_free(f16.ctx);
}

/* A weight that the file lacks stays as it is, with what its master weight knows beyond it: four
 * steps of 2^-13 are one of f16 below 1, and none of them alone. */
static void test_weights_left_alone(void) {
    static const int64_t a[2] = { 2, 3 };
    static const float b[4] = { 2.0f, 2.0f, 2.0f, 2.0f };
    float slope[6] = { 1, 1, 1, 1, 1, 1 }, want[6];
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_weights_desc desc;
    pair p = pair_make(MIXP_F16, NULL);
    memset(&desc, 0, sizeof desc);
    desc.convert = desc.allow_missing = 1;
    sgd.lr = 1.0 / 8192.0;
    mixp_optimizer *opt = mixp_optimizer_new(p.ctx, &sgd);
    mixp_fill(p.a, 1.0);
    CHECK_INT(mixp_optimizer_add(opt, p.a, mixp_view(p.ctx, "slope", MIXP_F32, 2, a, slope)),
              MIXP_OK);
    mixp_st_entry e = entry("b", NULL, MIXP_F32, 1, 4, 0, b, sizeof b);
    CHECK_INT(mixp_safetensors_write("only_b", &e, 1, NULL, 0, NULL, 0), MIXP_OK);
    for (int i = 0; i < 4; i++) {
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        CHECK_INT(mixp_checkpoint_load_weights("only_b", p.ctx, &desc), MIXP_OK);
    }
    for (int i = 0; i < 6; i++) want[i] = 1.0f - 1.0f / 2048.0f;
    CHECK(holds(p.a, want) && holds(p.b, b));
    mixp_context_free(p.ctx);
}

/* Of a checkpoint: the weights alone, without room for the rest; masters follow. */
static void test_weights_of_a_checkpoint(void) {
    mixp_context_desc desc;
    mixp_safetensors *f = NULL;
    problem p, q;
    mixp_result r = MIXP_ERR_MEMORY;
    float master[N_W];
    int k;
    problem_make(&p, NULL, MIXP_RULE_TORCH, 0.9);
    problem_run(&p, 5);
    CHECK_INT(mixp_checkpoint_save("ck", &p.all), MIXP_OK);
    memset(&desc, 0, sizeof desc);
    desc.allocate = limited_allocate;
    desc.release = limited_release;
    problem_make(&q, &desc, MIXP_RULE_TORCH, 0.9);
    problem_run(&q, 2);
    for (k = 0; r == MIXP_ERR_MEMORY && k < 100; k++) {
        CHECK(!same_bits(q.w, p.w));
        allowed = k;
        r = mixp_checkpoint_load_weights("ck", q.ctx, NULL);
        allowed = -1;
        mixp_context_clear_error(q.ctx);
    }
    CHECK(r == MIXP_OK && k > 5);
    CHECK(same_bits(q.w, p.w) && same_bits(q.b, p.b) && same_bits(q.n, p.n) && same_bits(q.view, p.view));
    CHECK_INT(q.cursor, 2);
    CHECK_INT(mixp_checkpoint_save("ck2", &q.all), MIXP_OK);
    CHECK_INT(mixp_safetensors_read("ck2", &f, NULL, 0), MIXP_OK);
    memcpy(master, mixp_safetensors_find(f, "optimizer.0.master.layer.0.weight")->data, sizeof master);
    for (int64_t i = 0; i < N_W; i++) {
        mixp_f16 w;
        memcpy(&w, (const char *)mixp_safetensors_find(f, "layer.0.weight")->data + 2 * i, 2);
        CHECK_NEAR(master[i], mixp_f32_from_f16(w), 0.0);
    }
    mixp_safetensors_free(f);
    mixp_context_free(p.ctx);
    mixp_context_free(q.ctx);
}
