/* test_weights_file.c - a file of weights contains the weights and nothing else.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include <unistd.h>

static const int64_t matrix[2] = { 2, 3 }, row[1] = { 4 };
static char          path[64];

/* Two parameters, a view that is trained, one that is not, and an optimizer with states. */
typedef struct model {
    mixp_context   *ctx;
    mixp_tensor    *w, *low, *mine;
    mixp_optimizer *opt;
    float           trained[4], grad[4], other[4];
} model;

static void model_open(model *m) {
    memset(m, 0, sizeof *m);
    for (int i = 0; i < 4; i++) m->trained[i] = m->grad[i] = 0.5f * (float)(i + 1);
    m->ctx = mixp_context_new(NULL);
    m->w = mixp_param(m->ctx, "layer.weight", MIXP_F32, 2, matrix);
    m->low = mixp_param(m->ctx, "layer.low", MIXP_BF16, 1, row);
    m->mine = mixp_view(m->ctx, "mine", MIXP_F32, 1, row, m->trained);
    mixp_view(m->ctx, "other", MIXP_F32, 1, row, m->other);
    m->opt = mixp_optimizer_new(m->ctx, NULL);
    mixp_optimizer_add(m->opt, m->w, NULL);
    mixp_optimizer_add(m->opt, m->low, NULL);
    mixp_optimizer_add(m->opt, m->mine, mixp_view(m->ctx, "", MIXP_F32, 1, row, m->grad));
}

static void model_set(model *m, double from) {
    float v[6];
    for (int i = 0; i < 6; i++) v[i] = (float)from + (float)i;
    CHECK_INT(mixp_write(m->w, v, MIXP_F32, 6), MIXP_OK);
    CHECK_INT(mixp_write(m->low, v, MIXP_F32, 4), MIXP_OK);
    CHECK_INT(mixp_write(m->mine, v, MIXP_F32, 4), MIXP_OK);
}

/* Holds it the numbers from, from + 1, ...? */
static int holds(const mixp_tensor *t, double from) {
    float got[6];
    int64_t i, good = 0;
    if (mixp_read(t, got, MIXP_F32, t->count) != MIXP_OK) return 0;
    for (i = 0; i < t->count; i++) good += got[i] == (float)from + (float)i;
    return good == t->count;
}

static void test_nothing_but_weights(void) {
    static const char *const names[3] = { "layer.low", "layer.weight", "mine" };
    static const mixp_dtype dtypes[3] = { MIXP_BF16, MIXP_F32, MIXP_F32 };
    static const float sixteen[6] = { 16, 17, 18, 19, 20, 21 };
    mixp_safetensors *f = NULL;
    const mixp_st_entry *e;
    model m;
    model_open(&m);
    CHECK_INT(mixp_optimizer_step(m.opt), MIXP_OK);         /* it has states now */
    model_set(&m, 16.0);
    CHECK_INT(mixp_checkpoint_save_weights(path, m.ctx), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, &f, NULL, 0), MIXP_OK);
    CHECK_INT(mixp_safetensors_count(f), 3);
    for (int i = 0; i < 3; i++) {
        e = mixp_safetensors_find(f, names[i]);
        CHECK(e && e->dtype == dtypes[i]);
    }
    CHECK_TEXT(mixp_safetensors_metadata(f, "format"), "pt");
    CHECK(mixp_safetensors_metadata(f, "mixprec") == NULL);
    e = mixp_safetensors_find(f, "layer.weight");
    CHECK(e && e->rank == 2 && e->shape[0] == 2 && e->shape[1] == 3);
    CHECK(e && e->bytes == sizeof sixteen && memcmp(e->data, sixteen, sizeof sixteen) == 0);
    e = mixp_safetensors_find(f, "layer.low");
    CHECK(e && e->bytes == 8 && ((const mixp_bf16 *)e->data)[1].bits == 0x4188);    /* 17 */
    mixp_safetensors_free(f);
    mixp_context_free(m.ctx);
}

/* Views that an optimizer trains are weights: nothing is missing, nothing extra. */
static void test_read_by_another(void) {
    model a, b;
    model_open(&a);
    model_open(&b);
    model_set(&a, 3.0);
    model_set(&b, 9.0);
    CHECK_INT(mixp_checkpoint_save_weights(path, a.ctx), MIXP_OK);
    CHECK_INT(mixp_checkpoint_load_weights(path, b.ctx, NULL), MIXP_OK);
    CHECK(holds(b.w, 3.0) && holds(b.low, 3.0) && holds(b.mine, 3.0));
    CHECK_INT(mixp_context_error(b.ctx, NULL), MIXP_OK);
    mixp_context_free(a.ctx);
    mixp_context_free(b.ctx);
}

/* No file of another kind comes of it: what was there stays. */
static void test_refused(void) {
    const char *why;
    model m;
    model_open(&m);
    model_set(&m, 5.0);
    CHECK_INT(mixp_checkpoint_save_weights(path, m.ctx), MIXP_OK);
    CHECK_INT(mixp_checkpoint_save_weights(NULL, m.ctx), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(m.ctx);
    CHECK_INT(mixp_checkpoint_save_weights("/nowhere/at/all", m.ctx), MIXP_ERR_IO);
    CHECK_INT(mixp_context_error(m.ctx, &why), MIXP_ERR_IO);
    CHECK_TEXT(why, "mixp_checkpoint_save_weights");
    mixp_context_clear_error(m.ctx);
    model_set(&m, 7.0);
    mixp_param(m.ctx, "", MIXP_F32, 1, row);
    CHECK_INT(mixp_checkpoint_save_weights(path, m.ctx), MIXP_ERR_ARGUMENT);
    mixp_context_error(m.ctx, &why);
    CHECK_TEXT(why, "a parameter has no name (f32, 4 elements)");
    mixp_context_free(m.ctx);
    model_open(&m);
    CHECK_INT(mixp_checkpoint_load_weights(path, m.ctx, NULL), MIXP_OK);
    CHECK(holds(m.w, 5.0));
    mixp_context_free(m.ctx);
}

/* A file whose data reach past 2 GB, of which most are a hole. Returns 0 if the system has no room
 * for it. */
static int make_far(void) {
    static const char header[] = "{\"hole\":{\"dtype\":\"U8\",\"shape\":[2147483656],\"data_offsets\":[0,2147483656]},"
                                 "\"layer.weight\":{\"dtype\":\"F32\",\"shape\":[2,3],"
                                 "\"data_offsets\":[2147483656,2147483680]}}";
    static const float weight[6] = { 40, 41, 42, 43, 44, 45 };
    unsigned char length[8] = { sizeof header - 1, 0, 0, 0, 0, 0, 0, 0 };
    FILE *f = fopen(path, "wb");
    int good = f != NULL;
    if (!f) return 0;
    good = good && fwrite(length, 1, 8, f) == 8 && fwrite(header, 1, sizeof header - 1, f) == sizeof header - 1;
    good = good && fseek(f, 1 << 30, SEEK_CUR) == 0 && fseek(f, 1 << 30, SEEK_CUR) == 0 && fseek(f, 8, SEEK_CUR) == 0;
    good = good && fwrite(weight, 1, sizeof weight, f) == sizeof weight;
    return fclose(f) == 0 && good;
}

/* A long has 32 bits on Windows, and so have the places that ftell and fseek know there. */
static void test_past_2_gb(void) {
    mixp_weights_desc desc;
    model m;
    if (!make_far()) SKIP("no room for a file of 2 GB with a hole");
    memset(&desc, 0, sizeof desc);
    desc.pattern = "layer.weight";
    desc.allow_extra = 1;
    model_open(&m);
    CHECK_INT(mixp_checkpoint_load_weights(path, m.ctx, &desc), MIXP_OK);
    CHECK(holds(m.w, 40.0));
    mixp_context_free(m.ctx);
}

/* A program's own texts lie in a checkpoint's metadata, and change nothing else. */
static void test_metadata_of_a_checkpoint(void) {
    const char *pairs[2][2] = { { "model", "heads=8 \"quoted\" \xc3\xa9" }, { "", "" } };
    static const char *const refused[][2] = { { "mixprec", "2" }, { "mixprec.x", "" }, { "format", "pt" },
                                              { "model", "" }, { "bad", "\xff" } };
    mixp_safetensors *f = NULL;
    mixp_checkpoint what;
    model m;
    model_open(&m);
    model_set(&m, 16);
    memset(&what, 0, sizeof what);
    what.ctx = m.ctx;
    what.optimizers = &m.opt;
    what.n_optimizers = 1;
    what.metadata = (const char *const (*)[2])pairs;
    what.n_metadata = 2;
    CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
    CHECK_INT(mixp_safetensors_read(path, &f, NULL, 0), MIXP_OK);
    CHECK(strcmp(mixp_safetensors_metadata(f, "model"), pairs[0][1]) == 0);
    CHECK(strcmp(mixp_safetensors_metadata(f, ""), "") == 0);
    CHECK(strcmp(mixp_safetensors_metadata(f, "mixprec"), "1") == 0);
    CHECK(strcmp(mixp_safetensors_metadata(f, "mixprec.optimizers"), "AdamW;") == 0);
    mixp_safetensors_free(f);
    model_set(&m, 0);
    what.n_metadata = 0;                                /* loading asks for none */
    CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_OK);
    CHECK(holds(m.w, 16));
    what.n_metadata = 2;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        memcpy(pairs[1], refused[i], sizeof pairs[1]);
        CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_ERR_ARGUMENT);
        mixp_context_clear_error(m.ctx);
    }
    what.metadata = NULL;
    CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_ERR_ARGUMENT);
    mixp_context_free(m.ctx);
}

/* --- weights that are not finite ----------------------------------------------------------------- */

/* Writes a file of one tensor "fc.w", and a scale unless its name is NULL. */
static void write_one(mixp_dtype dtype, const void *data, const char *scale_name) {
    static const float scale = 0.5f;
    mixp_st_entry e[2];
    memset(e, 0, sizeof e);
    e[0].name = "fc.w";
    e[0].dtype = dtype;
    e[0].rank = 1;
    e[0].shape[0] = 4;
    e[0].data = data;
    e[0].bytes = 4 * mixp_dtype_size(dtype);
    e[1].name = scale_name;
    e[1].dtype = MIXP_F32;
    e[1].data = &scale;
    e[1].bytes = sizeof scale;
    CHECK_INT(mixp_safetensors_write(path, e, scale_name ? 2 : 1, NULL, 0, NULL, 0), MIXP_OK);
}

/* Loads the file into one parameter, and checks the warning; NULL: none. */
static void load_one(mixp_dtype dtype, const char *says) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_weights_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.convert = desc.allow_extra = 1;
    CHECK(mixp_param(ctx, "fc.w", dtype, 1, row) != NULL);
    CHECK_INT(mixp_checkpoint_load_weights(path, ctx, &desc), MIXP_OK);
    if (says) CHECK_TEXT(mixp_context_warning(ctx), says);
    else CHECK(!*mixp_context_warning(ctx));
    mixp_context_free(ctx);
}

static void test_weights_that_are_not_finite(void) {
    static const float large[4] = { 1.0f, 70000.0f, -1e6f, 65504.0f }, fine[4] = { 1, 2, 3, 4 };
    static const uint8_t codes[4] = { 0x38, 0x40, 0x48, 0x50 };
    static const double wide[4] = { 1.0, 1e300, 2.0, 3.0 };
    float bad[4] = { 1, 2, 3, 4 };
    write_one(MIXP_F32, large, NULL);
    load_one(MIXP_F16, "2 values of 'fc.w' became Inf: the file has f32, and the parameter is f16, whose largest number is 65504");
    load_one(MIXP_BF16, NULL);
    load_one(MIXP_F32, NULL);
    write_one(MIXP_F64, wide, NULL);
    load_one(MIXP_F32, "1 values of 'fc.w' became Inf: the file has f64, and the parameter is f32, whose largest number is 3.40282e+38; "
                       "scale these values");
    bad[2] = mixp_f32_of_bits(0x7FC00000u);
    write_one(MIXP_F32, bad, NULL);
    load_one(MIXP_F32, "'fc.w' holds 1 values that are Inf or NaN in the file");
    load_one(MIXP_F16, "'fc.w' holds 1 values that are Inf or NaN in the file");
    write_one(MIXP_F8_E4M3, codes, "fc.w_scale_inv");
    load_one(MIXP_F32, "'fc.w' is f8_e4m3 in the file, and its scale 'fc.w_scale_inv' was ignored");
    write_one(MIXP_F8_E4M3, codes, "fc.scale");
    load_one(MIXP_BF16, "its scale 'fc.scale' was ignored");
    write_one(MIXP_F8_E4M3, codes, "gc.w_scale");
    load_one(MIXP_F32, NULL);
    write_one(MIXP_F32, fine, "fc.w_scale");
    load_one(MIXP_F32, NULL);
}

/* A checkpoint that holds NaN says so, too. */
static void test_a_checkpoint_with_a_nan(void) {
    float values[6] = { 1, 2, 3, 4, 5, 6 };
    mixp_checkpoint what;
    model m;
    model_open(&m);
    values[1] = mixp_f32_of_bits(0x7FC00000u);
    CHECK_INT(mixp_write(m.w, values, MIXP_F32, 6), MIXP_OK);
    memset(&what, 0, sizeof what);
    what.ctx = m.ctx;
    what.optimizers = &m.opt;
    what.n_optimizers = 1;
    CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
    CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_OK);
    CHECK_TEXT(mixp_context_warning(m.ctx), "mixp_checkpoint_load: 'layer.weight' holds 1 values that are Inf or NaN");
    mixp_context_free(m.ctx);
}

int main(void) {
    snprintf(path, sizeof path, "/tmp/mixprec_weights_%ld.safetensors", (long)getpid());
    RUN(test_nothing_but_weights);
    RUN(test_read_by_another);
    RUN(test_metadata_of_a_checkpoint);
    RUN(test_refused);
    RUN(test_past_2_gb);
    RUN(test_weights_that_are_not_finite);
    RUN(test_a_checkpoint_with_a_nan);
    unlink(path);
    return test_report();
}
