/* test_tensors.c - contexts, memory, tensors: shapes, ownership, allocation counts, errors.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include "mixprec.h"
#include "test.h"
#include <stdlib.h>

/* An allocator that counts, and fails from the n-th request on when told to. */
typedef struct counting { int64_t alive, made, fail_at; } counting;

static void *count_allocate(size_t bytes, void *user) {
    counting *c = (counting *)user;
    if (c->fail_at && c->made + 1 >= c->fail_at) return NULL;
    c->made++;
    c->alive++;
    return malloc(bytes);
}

static void count_release(void *p, void *user) {
    ((counting *)user)->alive--;
    free(p);
}

static mixp_context *counted_context(counting *c) {
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    memset(c, 0, sizeof *c);
    d.allocate = count_allocate;
    d.release = count_release;
    d.user = c;
    d.seed = 7;
    return mixp_context_new(&d);
}

static mixp_result code_of(mixp_context *ctx) {
    mixp_result r = mixp_context_error(ctx, NULL);
    mixp_context_clear_error(ctx);
    return r;
}

static void test_result_texts(void) {
    for (int i = 0; i < MIXP_RESULT_COUNT; i++)
        for (int j = 0; j < i; j++)
            CHECK(strcmp(mixp_result_text((mixp_result)i), mixp_result_text((mixp_result)j)) != 0);
    CHECK_TEXT(mixp_result_text((mixp_result)999), "unknown");
    CHECK_TEXT(mixp_version(), MIXPREC_VERSION);
}

static void test_first_error_sticks(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    const char *text = NULL;
    int64_t bad[2] = { 3, 0 };
    CHECK_INT(mixp_context_error(ctx, &text), MIXP_OK);
    CHECK(text && text[0] == '\0');
    CHECK(mixp_param(ctx, "w", MIXP_F32, 2, bad) == NULL);
    CHECK(mixp_param(ctx, "w", MIXP_I32, 2, bad) == NULL);
    CHECK_INT(mixp_context_error(ctx, &text), MIXP_ERR_SHAPE);
    CHECK_TEXT(text, "dimension 1 is 0");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_context_error(ctx, &text), MIXP_OK);
    CHECK_INT(mixp_context_fail(ctx, MIXP_ERR_IO, "mine %d", 5), MIXP_ERR_IO);
    mixp_context_error(ctx, &text);
    CHECK_TEXT(text, "mine 5");
    mixp_context_free(ctx);
}

static void test_bad_shapes_and_arguments(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    int64_t one[1] = { 4 }, nine[9] = { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, negative[1] = { -4 };
    int64_t huge[3] = { (int64_t)1 << 31, (int64_t)1 << 31, 4 }, large[2] = { (int64_t)1 << 40, (int64_t)1 << 22 };
    float data[4] = { 1, 2, 3, 4 };
    CHECK(!mixp_param(ctx, "a", MIXP_F32, 9, nine));      CHECK_INT(code_of(ctx), MIXP_ERR_SHAPE);
    CHECK(!mixp_param(ctx, "a", MIXP_F32, -1, one));      CHECK_INT(code_of(ctx), MIXP_ERR_SHAPE);
    CHECK(!mixp_param(ctx, "a", MIXP_F32, 1, NULL));      CHECK_INT(code_of(ctx), MIXP_ERR_SHAPE);
    CHECK(!mixp_param(ctx, "a", MIXP_F32, 1, negative));  CHECK_INT(code_of(ctx), MIXP_ERR_SHAPE);
    CHECK(!mixp_param(ctx, "a", MIXP_F32, 3, huge));      CHECK_INT(code_of(ctx), MIXP_ERR_SHAPE);
    CHECK(!mixp_param(ctx, "a", MIXP_F32, 2, large));     CHECK_INT(code_of(ctx), MIXP_ERR_SHAPE);
    CHECK(!mixp_param(ctx, "a", MIXP_U8, 1, one));        CHECK_INT(code_of(ctx), MIXP_ERR_DTYPE);
    CHECK(!mixp_param(ctx, "a", (mixp_dtype)99, 1, one)); CHECK(code_of(ctx) != MIXP_OK);
    CHECK(!mixp_param(NULL, "a", MIXP_F32, 1, one));
    CHECK(!mixp_view(ctx, "v", MIXP_F32, 1, one, NULL));  CHECK_INT(code_of(ctx), MIXP_ERR_ARGUMENT);
    CHECK(!mixp_view(ctx, "v", MIXP_F32, 1, one, (char *)data + 1)); CHECK_INT(code_of(ctx), MIXP_ERR_ARGUMENT);
    CHECK(!mixp_input(ctx, MIXP_F32, 1, one, NULL));      CHECK_INT(code_of(ctx), MIXP_ERR_ARGUMENT);
    CHECK(!mixp_activation(ctx, (mixp_dtype)-1, 1, one)); CHECK_INT(code_of(ctx), MIXP_ERR_DTYPE);
    CHECK_INT(mixp_read(NULL, data, MIXP_F32, 4), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_step_begin(NULL), MIXP_ERR_ARGUMENT);
    mixp_context_free(ctx);
    mixp_context_free(NULL);
}

static mixp_result no_attach(mixp_exec *x) {
    (void)x;
    return MIXP_ERR_DEVICE;
}

/* A step of bf16 on a context's CPU; NULL: the one of portable_bits. */
static void step_on(const mixp_device *cpu, float *out) {
    static const int64_t shape[2] = { 48, 80 };
    static float values[48 * 80];
    mixp_tensor *x, *w, *y = NULL;
    mixp_context_desc d;
    for (int i = 0; i < 48 * 80; i++) values[i] = (float)(i * 29 % 83) / 41.0f - 1.0f;
    memset(&d, 0, sizeof d);
    d.device = cpu;
    d.portable_bits = cpu == NULL;
    mixp_context *ctx = mixp_context_new(&d);
    mixp_step_begin(ctx);
    x = mixp_input(ctx, MIXP_F32, 2, shape, values);
    w = mixp_input(ctx, MIXP_F32, 2, shape, values);
    mixp_tensor_set_requires_grad(w, 1);
    MIXP_AUTOCAST(ctx, MIXP_BF16) y = mixp_gelu(ctx, mixp_linear(ctx, x, w, NULL));
    CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, mixp_mul(ctx, y, y), MIXP_ALL, 0)), MIXP_OK);
    CHECK_INT(mixp_read(w->grad, out, MIXP_F32, 48 * 80), MIXP_OK);
    mixp_context_free(ctx);
}

/* portable_bits takes the set of which all machines share the bits, by the name of its device. */
static void test_portable_bits(void) {
    static const mixp_isa order[4] = { MIXP_ISA_AVX512, MIXP_ISA_AVX2, MIXP_ISA_NEON, MIXP_ISA_SCALAR };
    static float want[48 * 80], got[48 * 80];
    mixp_context_desc d;
    const char *why = NULL;
    int i, first = 1;
    memset(&d, 0, sizeof d);
    d.portable_bits = 1;
    d.why = &why;
    mixp_context *ctx = mixp_context_new(&d);
    CHECK(!strstr(mixp_context_device(ctx)->name, "avx512 bf16") && !strstr(mixp_context_device(ctx)->name, "amx"));
    step_on(NULL, want);
    for (i = 0; i < 4; i++) {
        const mixp_device *cpu = mixp_cpu_with(order[i]);
        if (!cpu) continue;
        if (first && order[i] != MIXP_ISA_NEON) CHECK(mixp_context_device(ctx) == cpu);
        first = 0;
        step_on(cpu, got);
        CHECK(memcmp(want, got, sizeof want) == 0);
    }
    mixp_context_free(ctx);
    d.device = mixp_cpu();
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "portable_bits");
}

static void test_a_context_says_why_there_is_none(void) {
    mixp_device broken = *mixp_cpu();
    mixp_context_desc plain, d;
    const char *why = NULL;
    counting c;
    memset(&plain, 0, sizeof plain);
    d = plain;
    d.allocate = count_allocate;
    CHECK(mixp_context_new(&d) == NULL);        /* nobody asks why */
    d.why = &why;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "allocate and release");
    d = plain;
    d.why = &why;
    d.device_allocator.allocate = count_allocate;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "device_allocator");
    d = plain;
    d.why = &why;
    d.threads = -1;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "threads");
    memset(&c, 0, sizeof c);
    c.fail_at = 1;
    d = plain;
    d.why = &why;
    d.allocate = count_allocate;
    d.release = count_release;
    d.user = &c;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "out of memory");
    broken.attach = no_attach;
    d = plain;
    d.why = &why;
    d.device = &broken;
    CHECK(mixp_context_new(&d) == NULL);
    CHECK_TEXT(why, "device");
    d = plain;
    d.why = &why;
    mixp_context *ctx = mixp_context_new(&d);
    CHECK(ctx != NULL && why && !why[0]);
    mixp_context_free(ctx);
}

typedef struct told { int times; mixp_result code; char text[128]; } told;

static void *told_allocate(size_t bytes, void *user) { (void)user; return malloc(bytes); }
static void told_release(void *p, void *user) { (void)user; free(p); }

static void tell(mixp_result code, const char *message, void *user) {
    told *t = (told *)user;
    t->times++;
    t->code = code;
    snprintf(t->text, sizeof t->text, "%s", message);
}

static void test_the_first_error_is_told(void) {
    told heard = { 0, MIXP_OK, "" };
    mixp_context_desc d;
    memset(&d, 0, sizeof d);
    d.allocate = told_allocate;
    d.release = told_release;
    d.user = &heard;
    d.on_error = tell;
    mixp_context *ctx = mixp_context_new(&d);
    CHECK_INT(heard.times, 0);
    CHECK(!mixp_input(ctx, MIXP_F32, 0, NULL, NULL));
    CHECK_INT(heard.times, 1);
    CHECK_INT(heard.code, MIXP_ERR_ARGUMENT);
    CHECK_TEXT(heard.text, "mixp_input: host_data is NULL");
    mixp_context_fail(ctx, MIXP_ERR_IO, "a later one");
    CHECK_INT(heard.times, 1);
    mixp_context_clear_error(ctx);
    mixp_context_fail(ctx, MIXP_ERR_IO, "the next one");
    CHECK_INT(heard.times, 2);
    CHECK_INT(heard.code, MIXP_ERR_IO);
    CHECK_TEXT(heard.text, "the next one");
    mixp_context_free(ctx);
    d.allocate = NULL;          /* user is the callback's with the usual allocator too */
    d.release = NULL;
    ctx = mixp_context_new(&d);
    mixp_context_fail(ctx, MIXP_ERR_IO, "again");
    CHECK_INT(heard.times, 3);
    mixp_context_free(ctx);
}

static void test_copies_say_what_does_not_fit(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    const int64_t shape[2] = { 4, 4 };
    const char *text = "";
    float data[16] = { 0 };
    mixp_tensor *w = mixp_param(ctx, "h.0.w", MIXP_F32, 2, shape);
    CHECK_INT(mixp_read(w, data, MIXP_F32, 4), MIXP_ERR_SHAPE);
    mixp_context_error(ctx, &text);
    CHECK_TEXT(text, "mixp_read 'h.0.w': count is 4, but the tensor [4, 4] has 16 elements");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_write(w, NULL, MIXP_F32, 16), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &text);
    CHECK_TEXT(text, "mixp_write 'h.0.w': the host memory is NULL");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_read(w, data, (mixp_dtype)77, 16), MIXP_ERR_DTYPE);
    mixp_context_error(ctx, &text);
    CHECK_TEXT(text, "mixp_read 'h.0.w': 77 is not a mixp_dtype");
    mixp_context_free(ctx);
}

static void test_a_name_is_used_once(void) {
    mixp_context *ctx = mixp_context_new(NULL), *other = mixp_context_new(NULL);
    int64_t shape[1] = { 4 };
    const char *text = "";
    float data[4] = { 0 };
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, shape);
    size_t used = mixp_context_memory(ctx).used;
    CHECK(w && !mixp_param(ctx, "w", MIXP_F16, 1, shape));
    CHECK_INT(mixp_context_error(ctx, &text), MIXP_ERR_ARGUMENT);
    CHECK_TEXT(text, "'w'");
    CHECK_TEXT(text, "before the loop");
    CHECK_INT(mixp_context_memory(ctx).used, used);
    mixp_context_clear_error(ctx);
    CHECK(mixp_param(ctx, "w2", MIXP_F32, 1, shape) != NULL);
    CHECK(mixp_param(ctx, "", MIXP_F32, 1, shape) != NULL);
    CHECK(mixp_param(ctx, "", MIXP_F32, 1, shape) != NULL);         /* no name is like no other */
    CHECK(mixp_param(ctx, NULL, MIXP_F32, 1, shape) != NULL);
    CHECK(mixp_view(ctx, "w", MIXP_F32, 1, shape, data) != NULL);   /* a view is no parameter */
    CHECK(mixp_param(other, "w", MIXP_F32, 1, shape) != NULL);
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
    mixp_context_free(other);
}

static void test_everything_is_freed(void) {
    counting c;
    mixp_context *ctx = counted_context(&c);
    int64_t shape[2] = { 30, 40 };
    for (int i = 0; i < 5; i++) {
        CHECK(mixp_param(ctx, NULL, MIXP_F32, 2, shape) != NULL);
        mixp_activation(ctx, MIXP_F16, 2, shape);
    }
    mixp_step_begin(ctx);
    CHECK(c.alive > 5);
    mixp_context_free(ctx);
    CHECK_INT(c.alive, 0);
}

static void test_out_of_memory_is_an_error(void) {
    int64_t shape[1] = { 1000 };
    for (int64_t n = 1; n < 12; n++) {
        counting c;
        mixp_context_desc d;
        memset(&d, 0, sizeof d);
        memset(&c, 0, sizeof c);
        c.fail_at = n;
        d.allocate = count_allocate;
        d.release = count_release;
        d.user = &c;
        mixp_context *ctx = mixp_context_new(&d);
        if (n == 1) { CHECK(ctx == NULL); continue; }
        if (!mixp_param(ctx, "w", MIXP_F32, 1, shape) || !mixp_activation(ctx, MIXP_F32, 1, shape))
            CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_MEMORY);
        mixp_context_free(ctx);
        CHECK_INT(c.alive, 0);
    }
}

static void test_read_and_write_convert(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    int64_t shape[1] = { 4 };
    float in[4] = { 1.0f, -2.5f, 65504.0f, 0.0f };
    double out[4];
    mixp_tensor *t = mixp_param(ctx, "h", MIXP_F16, 1, shape);
    uint64_t before = t->version;
    CHECK_INT(mixp_write(t, in, MIXP_F32, 4), MIXP_OK);
    CHECK(t->version > before);
    CHECK_INT(mixp_read(t, out, MIXP_F64, 4), MIXP_OK);
    CHECK_NEAR(out[0], 1.0, 0);
    CHECK_NEAR(out[1], -2.5, 0);
    CHECK_NEAR(out[2], 65504.0, 0);
    CHECK_INT(mixp_read(t, out, MIXP_F64, 3), MIXP_ERR_SHAPE);
    CHECK_INT(mixp_write(t, NULL, MIXP_F64, 4), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_read(t, out, (mixp_dtype)77, 4), MIXP_ERR_DTYPE);
    CHECK_INT(mixp_fill(t, 3.0), MIXP_OK);
    mixp_read(t, out, MIXP_F64, 4);
    CHECK_NEAR(out[3], 3.0, 0);
    CHECK((mixp_bits_of_f32((float)mixp_item(t)) & 0x7FFFFFFFu) > 0x7F800000u);  /* NaN: not one */
    mixp_context_free(ctx);
}

static void test_init_moments_and_repeatability(void) {
    enum { N = 20000 };
    static float a[N], b[N];
    mixp_context *one = mixp_context_new(NULL), *two = mixp_context_new(NULL);
    int64_t shape[1] = { N };
    mixp_tensor *ta = mixp_param(one, "a", MIXP_F32, 1, shape), *tb = mixp_param(two, "b", MIXP_F32, 1, shape);
    mixp_tensor *other = mixp_param(one, "c", MIXP_F32, 1, shape);
    double sum = 0, square = 0;
    int i;
    mixp_init_normal(ta, 1.0, 2.0);
    mixp_init_normal(tb, 1.0, 2.0);
    mixp_init_normal(other, 1.0, 2.0);
    mixp_read(ta, a, MIXP_F32, N);
    mixp_read(tb, b, MIXP_F32, N);
    CHECK(!memcmp(a, b, sizeof a));
    mixp_read(other, b, MIXP_F32, N);
    CHECK(memcmp(a, b, sizeof a) != 0);     /* each tensor has its own stream */
    for (i = 0; i < N; i++) { sum += (double)a[i]; square += ((double)a[i] - 1.0) * ((double)a[i] - 1.0); }
    CHECK_NEAR(sum / N, 1.0, 5.0 * 2.0 / sqrt((double)N));
    CHECK_NEAR(square / N, 4.0, 5.0 * 4.0 * sqrt(2.0 / N));
    mixp_init_uniform(ta, -3.0, 5.0);
    mixp_read(ta, a, MIXP_F32, N);
    for (sum = 0, i = 0; i < N; i++) { CHECK(a[i] >= -3.0f && a[i] <= 5.0f); sum += (double)a[i]; }
    CHECK_NEAR(sum / N, 1.0, 5.0 * 8.0 / sqrt(12.0 * N));
    mixp_context_free(one);
    mixp_context_free(two);
}

static void test_views_are_not_copied(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    float data[3] = { 1, 2, 3 };
    int64_t shape[1] = { 3 };
    mixp_tensor *v = mixp_view(ctx, "mine", MIXP_F32, 1, shape, data);
    CHECK(v && v->data == (void *)data && !strcmp(v->name, "mine") && v->count == 3);
    mixp_fill(v, 9.0);
    CHECK_NEAR(data[2], 9.0, 0);
    mixp_context_free(ctx);
    CHECK_NEAR(data[0], 9.0, 0);            /* and not freed */
}

static void test_activation_of_last_step_is_refused(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    int64_t shape[1] = { 8 };
    mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 1, shape), *old;
    mixp_step_begin(ctx);
    old = mixp_relu(ctx, w);
    CHECK(old != NULL);
    mixp_step_begin(ctx);
    CHECK(mixp_relu(ctx, old) == NULL);
    CHECK_INT(code_of(ctx), MIXP_ERR_ORDER);
    mixp_context_free(ctx);
}

static void test_tensor_of_another_context_is_refused(void) {
    mixp_context *a = mixp_context_new(NULL), *b = mixp_context_new(NULL);
    int64_t shape[1] = { 8 };
    mixp_tensor *w = mixp_param(a, "w", MIXP_F32, 1, shape);
    CHECK(mixp_relu(b, w) == NULL);
    CHECK_INT(code_of(b), MIXP_ERR_ARGUMENT);
    CHECK_INT(code_of(a), MIXP_OK);
    mixp_context_free(a);
    mixp_context_free(b);
}

int main(void) {
    RUN(test_result_texts);
    RUN(test_first_error_sticks);
    RUN(test_bad_shapes_and_arguments);
    RUN(test_a_context_says_why_there_is_none);
    RUN(test_portable_bits);
    RUN(test_the_first_error_is_told);
    RUN(test_copies_say_what_does_not_fit);
    RUN(test_a_name_is_used_once);
    RUN(test_everything_is_freed);
    RUN(test_out_of_memory_is_an_error);
    RUN(test_read_and_write_convert);
    RUN(test_init_moments_and_repeatability);
    RUN(test_views_are_not_copied);
    RUN(test_activation_of_last_step_is_refused);
    RUN(test_tensor_of_another_context_is_refused);
    return test_report();
}
