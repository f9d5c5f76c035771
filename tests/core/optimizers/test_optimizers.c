/* test_optimizers.c - Adam, AdamW and SGD compared with plain double loops; statistics, clipping,
 * skipping, masters, low copies; on every instruction set.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "internals.h"      /* the struct of an optimizer */
#include "args.h"
#include "test.h"
#include "new_optimizer.h"
#include "numbers.h"
#include "each_isa.h"

/* A scaler whose scale was asked for, as programs do that multiply by it. */
static mixp_scaler *known_scaler(mixp_context *ctx) {
    mixp_scaler *scaler = mixp_scaler_new(ctx, NULL);
    CHECK_NEAR(mixp_scaler_loss_scale(scaler), 65536.0, 0);
    return scaler;
}

static float uniform(void) { return (float)random_value(); }

static const mixp_dtype reals[3] = { MIXP_F32, MIXP_F16, MIXP_BF16 };

static mixp_tensor *view1(mixp_context *ctx, const char *name, mixp_dtype dtype, int64_t n,
                          void *data) {
    return mixp_view(ctx, name, dtype, 1, &n, data);
}

/* Adds n f32 weights with n f32 gradients. */
static void add_f32(mixp_optimizer *opt, const char *name, int64_t n, float *w, float *g) {
    CHECK_INT(mixp_optimizer_add(opt, view1(opt->ctx, name, MIXP_F32, n, w),
                                 view1(opt->ctx, "g", MIXP_F32, n, g)), MIXP_OK);
}

/* --- against double loops ----------------------------------------------------------- */

enum { N = 500, STEPS = 60 };

typedef struct reference { double p, m, v; } reference;

/* The formulas of torch.optim.Adam and AdamW. */
static void adam_reference(reference *r, double g, const mixp_optimizer_desc *d, int decoupled, int t) {
    double bc1 = 1.0 - pow(d->beta1, t), bc2 = 1.0 - pow(d->beta2, t), update;
    if (!decoupled) g += d->weight_decay * r->p;
    if (decoupled) r->p -= d->lr * d->weight_decay * r->p;
    r->m = d->beta1 * r->m + (1.0 - d->beta1) * g;
    r->v = d->beta2 * r->v + (1.0 - d->beta2) * g * g;
    update = (r->m / bc1) / (sqrt(r->v / bc2) + d->eps);
    r->p -= d->lr * update;
}

static void test_adam(void) {
    mixp_context *ctx;
    int isa, kind, i, t;
    EACH_ISA(isa, ctx) {
        for (kind = 0; kind < 2; kind++) {
            static float w[N], g[N];
            static reference ref[N];
            mixp_optimizer_desc d = mixp_adamw_defaults();
            d.weight_decay = 0.1;
            d.lr = 3e-3;
            mixp_optimizer_desc adam = args_adam(&d);
            mixp_optimizer *opt = kind ? mixp_optimizer_new(ctx, &d) : mixp_optimizer_new(ctx, &adam);
            memset(ref, 0, sizeof ref);
            for (i = 0; i < N; i++) ref[i].p = (double)(w[i] = uniform());
            add_f32(opt, "w", N, w, g);
            for (t = 1; t <= STEPS; t++) {
                for (i = 0; i < N; i++) {
                    g[i] = uniform() * (i % 3 ? 1.0f : 1e-3f);
                    adam_reference(&ref[i], (double)g[i], &d, kind, t);
                }
                CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
            }
            /* A weight of about 1 is rounded once per step, by up to 2^-25. */
            for (i = 0; i < N; i++) CHECK_NEAR(w[i], ref[i].p, ldexp(STEPS, -25));
            CHECK_INT(mixp_optimizer_applied(opt), STEPS);
        }
        mixp_context_free(ctx);
    }
}

static void test_sgd(void) {
    static const double momentum[4] = { 0, 0.9, 0.9, 0.9 }, dampening[4] = { 0, 0, 0.3, 0 };
    mixp_context *ctx;
    int isa, k, i, t;
    EACH_ISA(isa, ctx) {
        for (k = 0; k < 4; k++) {
            static float w[N], g[N];
            static double p[N], b[N];
            mixp_optimizer_desc d = mixp_sgd_defaults();
            d.lr = 0.01;
            d.momentum = momentum[k];
            d.dampening = dampening[k];
            d.nesterov = k == 3;
            d.weight_decay = 0.05;
            mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
            for (i = 0; i < N; i++) p[i] = (double)(w[i] = uniform());
            add_f32(opt, "w", N, w, g);
            for (t = 0; t < STEPS; t++) {
                for (i = 0; i < N; i++) {
                    double grad = (double)(g[i] = uniform()) + d.weight_decay * p[i];
                    if (d.momentum > 0) {
                        b[i] = t ? d.momentum * b[i] + (1 - d.dampening) * grad : grad;
                        grad = d.nesterov ? grad + d.momentum * b[i] : b[i];
                    }
                    p[i] -= d.lr * grad;
                }
                CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
            }
            for (i = 0; i < N; i++) CHECK_NEAR(w[i], p[i], 2e-6);
        }
        mixp_context_free(ctx);
    }
}

/* --- the same bits everywhere ------------------------------------------------------- */

/* Runs the tasks from the last to the first: any order must give the same bits. */
static void backwards(void *user, int64_t tasks, mixp_task task, void *arg) {
    (void)user;
    while (tasks-- > 0) task(arg, tasks, 0);
}

enum { BIG = 70001 };

typedef struct outcome {
    float    w[BIG], m[BIG], v[BIG];
    uint16_t low[BIG];
    double   norm;
    float    largest;
} outcome;

/* Three scaled, clipped steps over two tensors; everything they leave behind. */
static void train(mixp_context *ctx, int kind, mixp_dtype grad_dtype, outcome *o) {
    static float g32[BIG], w2[37], g2[37];
    static uint16_t g16[BIG];
    mixp_optimizer_desc a = mixp_adamw_defaults();
    mixp_optimizer_desc s = mixp_sgd_defaults();
    mixp_scaler *scaler = known_scaler(ctx);
    a.max_norm = s.max_norm = 1.0;
    s.momentum = 0.9;
    s.nesterov = 1;
    mixp_optimizer *opt = kind == 2 ? mixp_optimizer_new(ctx, &s) : mixp_optimizer_new(ctx, &a);
    random_state = 99;
    for (int i = 0; i < BIG; i++) o->w[i] = uniform();
    for (int i = 0; i < 37; i++) w2[i] = g2[i] = uniform();
    mixp_tensor *w = view1(ctx, "w", MIXP_F32, BIG, o->w);
    mixp_tensor *g = view1(ctx, "g", grad_dtype, BIG, grad_dtype == MIXP_F32 ? (void *)g32 : (void *)g16);
    w->own.low[1] = view1(ctx, "low", MIXP_BF16, BIG, o->low);
    w->own.low_version[1] = w->version;
    add_f32(opt, "w2", 37, w2, g2);
    CHECK_INT(mixp_optimizer_add(opt, w, g), MIXP_OK);
    for (int t = 0; t < 3; t++) {
        static float fresh[BIG];
        for (int i = 0; i < BIG; i++) fresh[i] = uniform() * 1000.0f;
        CHECK_INT(mixp_write(g, fresh, MIXP_F32, BIG), MIXP_OK);
        if (t == 1) CHECK_INT(mixp_scaler_unscale(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
    }
    CHECK_INT(mixp_scaler_verdict(scaler).outcome, MIXP_STEP_APPLIED);
    memcpy(o->m, opt->rows[1].m, sizeof o->m);
    if (opt->rows[1].v) memcpy(o->v, opt->rows[1].v, sizeof o->v);
    o->norm = mixp_scaler_verdict(scaler).grad_norm;
    o->largest = mixp_scaler_verdict(scaler).largest;
}

static void test_same_bits(void) {
    static outcome first, other;
    mixp_context *ctx;
    int isa, kind, dtype, order;
    if (FAST_MATH) SKIP("fast-math leaves no bits to promise");
    for (kind = 0; kind < 3; kind++) for (dtype = 0; dtype < 3; dtype++) {
        int have = 0;
        EACH_ISA(isa, ctx) {
            mixp_context_free(ctx);
            for (order = 0; order < 2; order++) {
                outcome *o = have ? &other : &first;
                ctx = context_on(isa);
                ctx->exec.parallel = order ? backwards : NULL;
                memset(o, 0, sizeof *o);
                train(ctx, kind, reals[dtype], o);
                if (have) CHECK(memcmp(&first, &other, sizeof first) == 0);
                have = 1;
                mixp_context_free(ctx);
            }
        }
    }
}

/* The vector code against the one-element functions, through tails of every length. */
static void test_element_bits(void) {
    mixp_context *ctx;
    int isa, kind, n, i;
    if (FAST_MATH) SKIP("fast-math leaves no bits to promise");
    EACH_ISA(isa, ctx) {
        for (kind = 0; kind < 4; kind++) for (n = 1; n < 70; n++) {
            float w[70], g[70], p[70], m[70], v[70];
            mixp_optimizer_desc a = mixp_adamw_defaults();
            mixp_optimizer_desc s = mixp_sgd_defaults();
            s.momentum = kind == 3 ? 0.9 : 0.0;
            s.weight_decay = 0.01;
            mixp_optimizer *opt = kind < 2 ? mixp_optimizer_new(ctx, &a) : mixp_optimizer_new(ctx, &s);
            for (i = 0; i < 70; i++) {
                p[i] = w[i] = uniform();
                g[i] = ldexpf(uniform(), (int)(random_bits() % 60) - 40);
                m[i] = v[i] = 0.0f;
            }
            add_f32(opt, "w", n, w, g);
            CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
            CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
            const mixp_step_scalars *u = &opt->state->update[0];
            { mixp_step_scalars first = *u;   /* the scalars of step 1 again, from the plan */
              mixp_step_state at = *opt->state;
              at.applied = 1;
              mixpi_step_scalars_of(&opt->plan, &at, 0, 1, &first);
              for (i = 0; i < 2 * n; i++) {
                  const mixp_step_scalars *now = i < n ? &first : u;
                  int e = i % n;
                  if (kind < 2) mixpi_adam_element(now, g[e], p + e, m + e, v + e);
                  else mixpi_sgd_element(now, g[e], p + e, kind == 3 ? m + e : NULL);
              } }
            CHECK(memcmp(p, w, sizeof p) == 0);
            if (opt->rows[0].m) CHECK(memcmp(m, opt->rows[0].m, (size_t)n * 4) == 0);
            if (opt->rows[0].v) CHECK(memcmp(v, opt->rows[0].v, (size_t)n * 4) == 0);
        }
        mixp_context_free(ctx);
    }
}

/* --- low weights, masters, low copies ----------------------------------------------- */

static void test_masters(void) {
    mixp_context *ctx;
    int isa, wd, gd, no_master, i, t;
    EACH_ISA(isa, ctx) {
        for (wd = 0; wd < 3; wd++) for (gd = 0; gd < 3; gd++)
        for (no_master = 0; no_master < 2; no_master++) {
            static uint32_t wmem[N], gmem[N];
            static float start[N], grad[N], seen[N];
            static reference ref[N];
            mixp_optimizer_desc d = mixp_adamw_defaults();
            mixp_tensor *w = view1(ctx, "w", reals[wd], N, wmem);
            mixp_tensor *g = view1(ctx, "g", reals[gd], N, gmem);
            d.no_master = no_master;
            mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
            for (i = 0; i < N; i++) start[i] = uniform();
            CHECK_INT(mixp_optimizer_add(opt, w, g), MIXP_OK);
            CHECK_INT(mixp_write(w, start, MIXP_F32, N), MIXP_OK);  /* the master follows */
            CHECK_INT(mixp_read(w, start, MIXP_F32, N), MIXP_OK);
            memset(ref, 0, sizeof ref);
            for (i = 0; i < N; i++) ref[i].p = (double)start[i];
            for (t = 1; t <= 20; t++) {
                for (i = 0; i < N; i++) grad[i] = uniform();
                CHECK_INT(mixp_write(g, grad, MIXP_F32, N), MIXP_OK);
                CHECK_INT(mixp_read(g, grad, MIXP_F32, N), MIXP_OK);
                for (i = 0; i < N; i++) adam_reference(&ref[i], (double)grad[i], &d, 1, t);
                CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
            }
            CHECK_INT(mixp_read(w, seen, MIXP_F32, N), MIXP_OK);
            CHECK((opt->rows[0].master != NULL) == (wd != 0 && !no_master));
            for (i = 0; i < N; i++) {
                const float *master = (const float *)opt->rows[0].master;
                float m = master ? master[i] : seen[i], rounded = m;
                if (wd == 1) rounded = mixp_f32_from_f16(mixp_f16_from_f32(m));
                if (wd == 2) rounded = mixp_f32_from_bf16(mixp_bf16_from_f32(m));
                CHECK(seen[i] == rounded);      /* the weight is its master, rounded once */
                /* Without a master each of 20 steps rounds to 11 or 8 bits. */
                CHECK_NEAR(m, ref[i].p, !wd || !no_master ? 1e-6 : wd == 1 ? 5e-3 : 4e-2);
            }
        }
        mixp_context_free(ctx);
    }
}

/* A program writes its low weights after each step: what it reads, clipped to a bound that only element 0 ever meets,
 * which is 3 after step 10. All other masters are as if nothing was written: beside double loops, and to the bit
 * beside a run without the writes. */
static void test_masters_of_written_weights(void) {
    enum { FROM = 3 };
    mixp_context *ctx;
    int isa, wd, i, t;
    EACH_ISA(isa, ctx) {
        for (wd = 1; wd < 3; wd++) {
            static uint32_t wmem[2][N], gmem[N];
            static float start[N], grad[N], seen[N], read[N];
            static reference ref[N];
            mixp_optimizer_desc d = mixp_adamw_defaults();
            mixp_optimizer *opt[2];
            mixp_tensor *w[2], *g = view1(ctx, "g", MIXP_F32, N, gmem);
            for (i = 0; i < N; i++) start[i] = uniform();
            for (t = 0; t < 2; t++) {
                w[t] = view1(ctx, "w", reals[wd], N, wmem[t]);
                opt[t] = mixp_optimizer_new(ctx, &d);
                CHECK_INT(mixp_write(w[t], start, MIXP_F32, N), MIXP_OK);
                CHECK_INT(mixp_optimizer_add(opt[t], w[t], g), MIXP_OK);
            }
            CHECK_INT(mixp_read(w[0], start, MIXP_F32, N), MIXP_OK);
            memset(ref, 0, sizeof ref);
            for (i = 0; i < N; i++) ref[i].p = (double)start[i];
            for (t = 1; t <= 20; t++) {
                for (i = 0; i < N; i++) grad[i] = uniform();
                CHECK_INT(mixp_write(g, grad, MIXP_F32, N), MIXP_OK);
                for (i = 0; i < N; i++) adam_reference(&ref[i], (double)grad[i], &d, 1, t);
                CHECK_INT(mixp_optimizer_step(opt[0]), MIXP_OK);
                CHECK_INT(mixp_optimizer_step(opt[1]), MIXP_OK);
                CHECK_INT(mixp_read(w[0], seen, MIXP_F32, N), MIXP_OK);
                if (t == 10) ref[0].p = (double)(seen[0] = FROM);
                CHECK_INT(mixp_write(w[0], seen, MIXP_F32, N), MIXP_OK);
                CHECK_INT(mixp_optimizer_read(opt[0], w[0], MIXP_STATE_MASTER, read, N), MIXP_OK);
                for (i = 0; i < N; i++) CHECK_NEAR(read[i], ref[i].p, 1e-6);
                if (t == 10) CHECK(read[0] == FROM);
            }

            CHECK_INT(mixp_optimizer_read(opt[1], w[1], MIXP_STATE_MASTER, seen, N), MIXP_OK);
            for (i = 1; i < N; i++) CHECK(read[i] == seen[i]);
            CHECK(read[0] != seen[0]);
        }
        mixp_context_free(ctx);
    }
}

static void test_low_copies(void) {
    mixp_context *ctx;
    int isa, i;
    EACH_ISA(isa, ctx) {
        static float w[N], g[N];
        static uint16_t f16[N], bf16[N], before[N];
        mixp_tensor *p = view1(ctx, "w", MIXP_F32, N, w);
        mixp_scaler *scaler = known_scaler(ctx);
        mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
        for (i = 0; i < N; i++) { w[i] = uniform(); g[i] = 65536.0f * uniform(); }
        p->own.low[0] = view1(ctx, "f16", MIXP_F16, N, f16);
        p->own.low[1] = view1(ctx, "bf16", MIXP_BF16, N, bf16);
        p->version = 5;
        p->own.low_version[0] = 5;      /* fresh */
        p->own.low_version[1] = 4;      /* stale */
        CHECK_INT(mixp_optimizer_add(opt, p, view1(ctx, "g", MIXP_F32, N, g)), MIXP_OK);
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
        CHECK(p->own.low_version[0] == p->version && p->version > 5);
        CHECK(p->own.low_version[1] != p->version);
        for (i = 0; i < N; i++) CHECK(f16[i] == mixp_f16_from_f32(w[i]).bits);
        memcpy(before, f16, sizeof before);
        g[N / 2] = bits_f32(0x7F800000u);
        CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
        CHECK(memcmp(before, f16, sizeof before) == 0);
        CHECK(p->own.low_version[0] == p->version);
        mixp_context_free(ctx);
    }
}

/* Copies beyond MIXPI_STREAM_BYTES are stored past the caches, except from an odd address on. */
static void test_large_low_copies(void) {
    enum { MANY = (2 << 19) + 77 };
    float *w = (float *)malloc(MANY * sizeof *w);
    uint16_t *g = (uint16_t *)malloc(MANY * sizeof *g), *low = (uint16_t *)malloc(2 * MANY * sizeof *g + 65);
    uint16_t *f16 = low + 32 - ((uintptr_t)low & 63u) / 2, *bf16 = f16 + MANY;
    mixp_context *ctx;
    int isa, i, bad;
    CHECK(MANY * sizeof *g > MIXPI_STREAM_BYTES && ((uintptr_t)f16 & 31u) == 0 && ((uintptr_t)bf16 & 31u) != 0);
    EACH_ISA(isa, ctx) {
        mixp_tensor *p = view1(ctx, "w", MIXP_F32, MANY, w);
        mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
        for (i = 0; i < MANY; i++) { w[i] = uniform(); g[i] = mixp_f16_from_f32(uniform()).bits; }
        memset(f16, 0xFF, 2 * MANY * sizeof *g);
        p->own.low[0] = view1(ctx, "f16", MIXP_F16, MANY, f16);
        p->own.low[1] = view1(ctx, "bf16", MIXP_BF16, MANY, bf16);
        p->own.low_version[0] = p->own.low_version[1] = p->version;
        CHECK_INT(mixp_optimizer_add(opt, p, view1(ctx, "g", MIXP_F16, MANY, g)), MIXP_OK);
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        for (i = bad = 0; i < MANY; i++)
            bad += f16[i] != mixp_f16_from_f32(w[i]).bits || bf16[i] != mixp_bf16_from_f32(w[i]).bits;
        CHECK_INT(bad, 0);
        mixp_context_free(ctx);
    }
    free(w); free(g); free(low);
}

/* Which of the two a conversion walks depends on the machine, so both are called here. */
static void test_conversions_past_the_caches(void) {
#if defined(__GNUC__) && defined(__x86_64__) && !defined(MIXPREC_NO_SIMD)
    enum { MANY = 3 * 4096 + 2048 };
    static const mixp_dtype narrow[] = { MIXP_F16, MIXP_BF16, MIXP_F8_E4M3, MIXP_F8_E5M2 };
    static float wide[MANY];
    char *memory = (char *)malloc(4 * MANY + 64), *to = memory + 64 - ((uintptr_t)memory & 63u);
    static char codes[4 * MANY], want[4 * MANY];
    int isa, k, pages, up, i;
    for (i = 0; i < MANY; i++) wide[i] = bits_f32((uint32_t)i * 2654435761u);
    for (isa = MIXP_ISA_AVX2; isa <= MIXP_ISA_AVX512; isa++) for (k = 0; k < 8; k++) for (pages = 1; pages < 5; pages += 3) {
        mixp_dtype d = narrow[k / 2], dst = (up = k & 1) ? MIXP_F32 : d, src = up ? d : MIXP_F32;
        mixpi_convert_piece piece;
        if (!mixp_cpu_with((mixp_isa)isa)) continue;
        mixp_convert_with(mixp_cpu_with(MIXP_ISA_SCALAR), codes, d, wide, MIXP_F32, MANY, NULL);
        mixp_convert_with(mixp_cpu_with(MIXP_ISA_SCALAR), want, dst, up ? (void *)codes : wide, src, MANY, NULL);
        memset(to, 0x55, 4 * MANY);
        piece.dst = mixpi_out_to(to, dst, 0);
        piece.src = mixpi_in(up ? (void *)codes : wide, src);
        piece.n = MANY;
        int64_t done = (isa == MIXP_ISA_AVX2 ? mixpi_convert_stream_avx2 : mixpi_convert_stream_avx512)(
            &piece, pages);
        CHECK_INT(done, pages == 4 ? 3 * 4096 : MANY);
        CHECK(memcmp(to, want, (size_t)done * mixp_dtype_size(dst)) == 0);
    }
    free(memory);
#else
    SKIP("no such stores on this machine");
#endif
}

/* --- skipping ----------------------------------------------------------------------- */

static void test_skip_leaves_every_byte(void) {
    mixp_context *ctx;
    int isa, wd, i, t;
    EACH_ISA(isa, ctx) {
        for (wd = 0; wd < 3; wd++) {
            static uint32_t w[N], w0[N];
            static float g[N], m0[N], v0[N], master0[N];
            mixp_scaler *scaler = known_scaler(ctx);
            mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
            mixp_tensor *p = view1(ctx, "w", reals[wd], N, w);
            CHECK_INT(mixp_fill(p, 0.5), MIXP_OK);
            CHECK_INT(mixp_optimizer_add(opt, p, view1(ctx, "g", MIXP_F32, N, g)), MIXP_OK);
            for (t = 0; t < 6; t++) {
                int bad = t > 2, explicit_unscale = t % 2;
                for (i = 0; i < N; i++) g[i] = 1000.0f * uniform();
                if (bad) g[(t * 77) % N] = bits_f32(t & 1 ? 0x7FC00000u : 0xFF800000u);
                memcpy(w0, w, sizeof w);
                memcpy(m0, opt->rows[0].m, sizeof m0);
                memcpy(v0, opt->rows[0].v, sizeof v0);
                if (wd) memcpy(master0, opt->rows[0].master, sizeof master0);
                if (explicit_unscale) CHECK_INT(mixp_scaler_unscale(scaler, opt), MIXP_OK);
                CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
                CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
                CHECK((memcmp(w0, w, sizeof w) == 0) == bad);
                CHECK((memcmp(m0, opt->rows[0].m, sizeof m0) == 0) == bad);
                CHECK((memcmp(v0, opt->rows[0].v, sizeof v0) == 0) == bad);
                if (wd) CHECK((memcmp(master0, opt->rows[0].master, sizeof master0) == 0) == bad);
                CHECK_INT(mixp_optimizer_applied(opt), t < 3 ? t + 1 : 3);
            }
            CHECK_INT(mixp_optimizer_verdict(opt).skipped, 3);
        }
        mixp_context_free(ctx);
    }
}

/* Inf and NaN at the head, in every lane, at chunk borders and in the tail, in every dtype. */
static void test_finds_the_bad_element(void) {
    static const int64_t size[3] = { 1, 61, 33000 };
    static const char *const name[3] = { "bias", "small", "large" };
    static float w[3][33000];
    static uint32_t g[3][33000];
    mixp_context *ctx;
    int isa, dtype, at, k, value;
    EACH_ISA(isa, ctx) {
        for (dtype = 0; dtype < 3; dtype++) {
            mixp_scaler_desc d;
            mixp_optimizer *opt = new_sgd(ctx);
            mixp_tensor *grad[3];
            memset(&d, 0, sizeof d);
            d.max_floor_skips = -1;
            mixp_scaler *scaler = mixp_scaler_new(ctx, &d);
            CHECK(mixp_scaler_loss_scale(scaler) > 0.0f);   /* whoever multiplies by it asks */
            for (k = 0; k < 3; k++) {
                grad[k] = view1(ctx, "g", reals[dtype], size[k], g[k]);
                CHECK_INT(mixp_fill(grad[k], 1.0), MIXP_OK);
                CHECK_INT(mixp_optimizer_add(opt, view1(ctx, name[k], MIXP_F32, size[k], w[k]),
                                             grad[k]), MIXP_OK);
            }
            for (k = 0; k < 3; k++)
            for (at = 0; at < size[k]; at += k == 2 && at >= 40 && at < 32700 ? 2721 : 1) {
                if (k == 2 && at > 32800 && at < 32960) continue;
                for (value = 0; value < 3; value++) {
                    uint16_t h = (uint16_t)(dtype == 1 ? 0x7C00 : 0x7F80);
                    uint16_t one = (uint16_t)(dtype == 1 ? 0x3C00 : 0x3F80);
                    h = (uint16_t)(value == 1 ? h | 0x8000 : value == 2 ? h | 1 : h);
                    if (dtype) ((uint16_t *)g[k])[at] = h;
                    else g[k][at] = value == 1 ? 0xFF800000u : 0x7F800000u + (value == 2);
                    CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
                    CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
                    mixp_verdict v = mixp_scaler_verdict(scaler);
                    CHECK_INT(v.outcome, MIXP_STEP_SKIPPED);
                    CHECK_TEXT(v.bad_tensor, name[k]);
                    CHECK_INT(v.bad_element, at);
                    CHECK_INT(v.bad_is_nan, value == 2);
                    if (dtype) ((uint16_t *)g[k])[at] = one; else g[k][at] = 0x3F800000u;
                }
            }
            CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
            CHECK_INT(mixp_scaler_verdict(scaler).outcome, MIXP_STEP_APPLIED);
            /* Several bad ones: the first in the order of the table. */
            CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
            memset(&g[2][0], 0xFF, 8);
            memset(&g[1][10], 0xFF, 8);
            CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
            CHECK_TEXT(mixp_scaler_verdict(scaler).bad_tensor, "small");
            CHECK_INT(mixp_scaler_verdict(scaler).bad_element, dtype ? 20 : 10);
        }
        mixp_context_free(ctx);
    }
}

/* --- statistics and clipping -------------------------------------------------------- */

static void test_norm(void) {
    static float w[BIG], g[BIG];
    mixp_context *ctx;
    int isa, k, i;
    EACH_ISA(isa, ctx) {
        static const double size[7] = { 1, 1e-4, 1e-15, 1e-25, 1e-35, 1e25, 3.4e38 };
        mixp_scaler_desc d;
        mixp_optimizer *opt = new_sgd(ctx);
        memset(&d, 0, sizeof d);
        d.rule = MIXP_RULE_STATIC;
        d.init_scale = 1.0f;
        mixp_scaler *scaler = mixp_scaler_new(ctx, &d);
        add_f32(opt, "w", BIG, w, g);
        for (k = 0; k < 9; k++) {
            double squares = 0, largest = 0;
            for (i = 0; i < BIG; i++) {
                g[i] = (float)((double)uniform() * (k < 7 ? size[k] : k == 7 ? 0.0 : size[i % 6]));
                squares += (double)g[i] * (double)g[i];
                if (fabs((double)g[i]) > largest) largest = fabs((double)g[i]);
            }
            CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
            CHECK_INT(mixp_scaler_verdict(scaler).outcome, MIXP_STEP_APPLIED);
            CHECK_NEAR(mixp_scaler_verdict(scaler).grad_norm, sqrt(squares), 1e-6 * sqrt(squares));
            CHECK((double)mixp_scaler_verdict(scaler).largest == largest);
            CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
        }
        mixp_context_free(ctx);
    }
}

static void test_clip(void) {
    mixp_context *ctx;
    int isa, dtype, way, i;
    EACH_ISA(isa, ctx) {
        for (dtype = 0; dtype < 3; dtype++) for (way = 0; way < 3; way++) {
            static float w[N], grad[N], seen[N];
            static uint32_t gmem[N];
            mixp_optimizer_desc d = mixp_sgd_defaults();
            mixp_scaler *scaler = known_scaler(ctx);
            mixp_tensor *g = view1(ctx, "g", reals[dtype], N, gmem);
            double squares = 0, coefficient;
            double tolerance = dtype == 0 ? 1e-6 : dtype == 1 ? 1e-3 : 8e-3;
            d.lr = 1.0;
            d.max_norm = way == 0 ? 0.5 : 0.0;  /* lean; unscale and clip; clip without scaler */
            mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
            for (i = 0; i < N; i++) { grad[i] = uniform(); w[i] = 0.0f; }
            CHECK_INT(mixp_write(g, grad, MIXP_F32, N), MIXP_OK);
            CHECK_INT(mixp_read(g, grad, MIXP_F32, N), MIXP_OK);
            if (way < 2) {      /* times 2^4: exact in every dtype */
                CHECK_INT(mixp_scaler_update_to(scaler, 16.0f), MIXP_OK);
                for (i = 0; i < N; i++) seen[i] = 16.0f * grad[i];
                CHECK_INT(mixp_write(g, seen, MIXP_F32, N), MIXP_OK);
            }
            for (i = 0; i < N; i++) squares += (double)grad[i] * (double)grad[i];
            coefficient = 0.5 / (sqrt(squares) + 1e-6);
            CHECK_INT(mixp_optimizer_add(opt, view1(ctx, "w", MIXP_F32, N, w), g), MIXP_OK);
            if (way == 1) CHECK_INT(mixp_scaler_unscale(scaler, opt), MIXP_OK);
            if (way > 0) {
                CHECK_INT(mixp_clip_grad_norm(opt, 1e6), MIXP_OK);      /* nothing to do */
                CHECK_INT(mixp_read(g, seen, MIXP_F32, N), MIXP_OK);
                for (i = 0; i < N; i++) CHECK(seen[i] == grad[i]);
                CHECK_INT(mixp_clip_grad_norm(opt, 0.5), MIXP_OK);
                CHECK_INT(mixp_read(g, seen, MIXP_F32, N), MIXP_OK);
                for (i = 0; i < N; i++)
                    CHECK_NEAR(seen[i], (double)grad[i] * coefficient, tolerance);
            }
            CHECK_INT(way < 2 ? mixp_scaler_step(scaler, opt) : mixp_optimizer_step(opt), MIXP_OK);
            for (i = 0; i < N; i++) CHECK_NEAR(w[i], -(double)grad[i] * coefficient, tolerance);
            mixp_verdict v = mixp_optimizer_verdict(opt);
            CHECK_NEAR(v.grad_norm, sqrt(squares), 1e-5);       /* before clipping */
            CHECK_NEAR(v.clip, coefficient, 1e-6);
            if (way < 2) CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
            CHECK_INT(mixp_clip_grad_norm(opt, -1.0), MIXP_ERR_ARGUMENT);
            mixp_context_clear_error(ctx);
        }
        mixp_context_free(ctx);
    }
}

/* The norm of what holds an Inf is none: nothing is clipped by it. */
static void test_clip_of_a_bad_gradient(void) {
    mixp_context *ctx;
    int isa;
    EACH_ISA(isa, ctx) {
        static float w[3], g[3];
        mixp_optimizer *opt = new_sgd(ctx);
        g[0] = 3.0f;
        g[1] = HUGE_VALF;
        g[2] = -4.0f;
        add_f32(opt, "w", 3, w, g);
        CHECK_INT(mixp_clip_grad_norm(opt, 0.5), MIXP_OK);
        CHECK(g[0] == 3.0f && g[1] == HUGE_VALF && g[2] == -4.0f);
        mixp_context_free(ctx);
    }
}

/* --- groups, schedules, missing gradients ------------------------------------------- */

static void test_groups(void) {
    static float w[3][4], g[4] = { 1.0f, 2.0f, -1.0f, 0.5f };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc d = mixp_sgd_defaults();
    mixp_param_group group;
    d.lr = 0.5;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
    add_f32(opt, "a", 4, w[0], g);
    CHECK_INT(mixp_optimizer_group(opt, 0, &group), MIXP_OK);
    group.lr = 0.25;
    CHECK_INT(mixp_optimizer_add_group(opt, &group), 1);
    add_f32(opt, "b", 4, w[1], g);
    add_f32(opt, "c", 4, w[2], g);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    for (int i = 0; i < 4; i++)
        CHECK(w[0][i] == -0.5f * g[i] && w[1][i] == -0.25f * g[i] && w[2][i] == w[1][i]);
    group.lr = 1.0;
    CHECK_INT(mixp_optimizer_set_group(opt, 1, &group), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    for (int i = 0; i < 4; i++) CHECK(w[0][i] == -g[i] && w[1][i] == -1.25f * g[i]);
    CHECK_NEAR(mixp_optimizer_lr(opt, 1), 1.0, 0);
    group.momentum = 0.9;       /* memory for it was never made */
    CHECK_INT(mixp_optimizer_set_group(opt, 1, &group), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    group.momentum = 0.0;
    group.lr = (double)bits_f32(0x7FC00000u);
    CHECK_INT(mixp_optimizer_add_group(opt, &group), -1);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_group(opt, 2, &group), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_group(opt, 0, &group), MIXP_OK);
    for (int i = 2; i < MIXP_MAX_GROUPS; i++) CHECK_INT(mixp_optimizer_add_group(opt, &group), i);
    CHECK_INT(mixp_optimizer_add_group(opt, &group), -1);
    mixp_context_free(ctx);
}

/* nanoGPT's get_lr, as its text says; skipped steps do not count. */
static double nanogpt_lr(int it, int kind, double lr, double min_lr, int warmup, int total) {
    if (it < warmup) return lr * (it + 1) / (warmup + 1);
    if (kind == 0) return lr;
    if (it > total) return min_lr;
    double ratio = (double)(it - warmup) / (total - warmup);
    if (kind == 1) return lr + (min_lr - lr) * ratio;
    return min_lr + 0.5 * (1.0 + cos(3.141592653589793 * ratio)) * (lr - min_lr);
}

static void test_schedules(void) {
    static float w[2], g[2];
    mixp_context *ctx = mixp_context_new(NULL);
    for (int kind = 0; kind < 3; kind++) {
        mixp_optimizer_desc d = mixp_sgd_defaults();
        mixp_scaler *scaler = known_scaler(ctx);
        int applied = 0;
        d.lr = 0.125;
        d.schedule.kind = (mixp_schedule_kind)kind;
        d.schedule.warmup = 5;
        d.schedule.total = 30;
        d.schedule.min_factor = 0.1;
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
        add_f32(opt, "w", 2, w, g);
        CHECK_INT(mixp_scaler_update_to(scaler, 1.0f), MIXP_OK);
        for (int t = 0; t < 50; t++) {
            double want = nanogpt_lr(applied, kind, 0.125, 0.0125, 5, 30);
            int bad = t % 7 == 3;
            float before = w[0];
            CHECK_NEAR(mixp_optimizer_lr(opt, 0), want, 1e-12);
            CHECK_INT(mixp_scaler_update_to(scaler, 1.0f), MIXP_OK);
            g[0] = 1.0f;
            g[1] = bad ? bits_f32(0x7F800000u) : 0.0f;
            CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
            CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
            CHECK_NEAR(mixp_scaler_verdict(scaler).lr, want, 1e-12);
            if (bad) CHECK(w[0] == before);
            else CHECK_NEAR(before - w[0], want, 1e-6);
            applied += !bad;
        }
    }
    mixp_context_free(ctx);
}

/* A parameter without a gradient is left alone, and its bias correction waits with it. */
/* More parameters than the table has room for at first: those added before it grew are kept. */
static void test_many_parameters(void) {
    enum { MANY = 100 };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor *w[MANY];
    float grad[MANY];
    sgd.lr = 1.0;
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &sgd);
    for (int i = 0; i < MANY; i++) {
        grad[i] = (float)(i + 1);
        w[i] = mixp_param(ctx, NULL, MIXP_F32, 0, NULL);
        CHECK_INT(mixp_optimizer_add(opt, w[i], mixp_view(ctx, "g", MIXP_F32, 0, NULL, &grad[i])), MIXP_OK);
    }
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    for (int i = 0; i < MANY; i++) CHECK_NEAR(mixp_item(w[i]), -(double)(i + 1), 0.0);
    mixp_context_free(ctx);
}

static void test_missing_gradients(void) {
    static float w[3], g[3];
    static reference ref[3];
    mixp_optimizer_desc d = mixp_adamw_defaults();
    mixp_context *ctx;
    const char *why;
    int isa, t, k, count[3];
    EACH_ISA(isa, ctx) {
        mixp_optimizer *opt = mixp_optimizer_new(ctx, &d);
        mixp_tensor *p[3], *grad[3];
        memset(ref, 0, sizeof ref);
        memset(count, 0, sizeof count);
        for (k = 0; k < 3; k++) {
            p[k] = view1(ctx, "p", MIXP_F32, 1, &w[k]);
            grad[k] = view1(ctx, "g", MIXP_F32, 1, &g[k]);
            w[k] = (float)(ref[k].p = 0.5);
        }
        for (k = 0; k < 2; k++) {       /* a view is no parameter until it is asked to be one */
            CHECK_INT(mixp_optimizer_add(opt, p[k], NULL), MIXP_ERR_ARGUMENT);
            CHECK_INT(mixp_tensor_set_requires_grad(p[k], 1), MIXP_OK);
            CHECK_INT(mixp_optimizer_add(opt, p[k], NULL), MIXP_OK);
        }
        CHECK_INT(mixp_tensor_set_requires_grad(p[2], 1), MIXP_OK);
        CHECK_INT(mixp_optimizer_add(opt, p[1], NULL), MIXP_ERR_ARGUMENT);
        mixp_context_clear_error(ctx);
        CHECK_INT(mixp_optimizer_add(opt, NULL, NULL), MIXP_ERR_ARGUMENT);
        CHECK_INT(mixp_context_error(ctx, &why), MIXP_ERR_ARGUMENT);
        CHECK_TEXT(why, "param is NULL");
        mixp_context_clear_error(ctx);
        CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_ORDER);
        mixp_context_clear_error(ctx);
        for (t = 0; t < 12; t++) {
            if (t == 6) CHECK_INT(mixp_optimizer_add(opt, p[2], NULL), MIXP_OK);
            for (k = 0; k < 3; k++) {
                int has = k == 0 || (k == 1 && t % 3 == 1) || (k == 2 && t >= 6);
                p[k]->grad = has ? grad[k] : NULL;
                g[k] = uniform();
                if (has) adam_reference(&ref[k], (double)g[k], &d, 1, ++count[k]);
            }
            CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
            for (k = 0; k < 3; k++) CHECK_NEAR(w[k], ref[k].p, 1e-6);
        }
        CHECK_INT(mixp_zero_grad(opt), MIXP_OK);
        CHECK(p[0]->grad == NULL && p[1]->grad == NULL);
        mixp_context_free(ctx);
    }
}

/* --- clearing gradients ------------------------------------------------------------- */

/* Adam's defaults decay nothing, AdamW's do: gradients of 0 for 1000 steps. */
static void test_adam_does_not_decay(void) {
    for (int kind = 0; kind < 3; kind++) {
        static float w[N], g[N];
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_optimizer_desc adam = mixp_adam_defaults();
        mixp_optimizer *opt = kind == 0 ? new_adam(ctx)
                            : kind == 1 ? mixp_optimizer_new(ctx, &adam) : mixp_optimizer_new(ctx, NULL);
        for (int t = 0; t < N; t++) w[t] = 10.0f;
        add_f32(opt, "w", N, w, g);
        for (int t = 0; t < 1000; t++) CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
        CHECK_NEAR(w[0], kind < 2 ? 10.0 : 10.0 * pow(1.0 - 1e-5, 1000.0), kind < 2 ? 0.0 : 1e-3);
        mixp_context_free(ctx);
    }
}

static mixp_optimizer *optimizer_of(mixp_context *ctx, int kind, int zero_grad) {
    mixp_optimizer_desc a = mixp_adamw_defaults();
    mixp_optimizer_desc s = mixp_sgd_defaults();
    a.zero_grad = s.zero_grad = zero_grad;
    mixp_optimizer_desc adam = args_adam(&a);
    s.momentum = kind == 3 ? 0.9 : 0.0;
    return kind == 0 ? mixp_optimizer_new(ctx, &adam) : kind == 1 ? mixp_optimizer_new(ctx, &a)
                                                          : mixp_optimizer_new(ctx, &s);
}

static int all_zero(const void *p, size_t bytes) {
    const unsigned char *c = (const unsigned char *)p;
    for (size_t i = 0; i < bytes; i++) if (c[i]) return 0;
    return 1;
}

/* Two weights, of which the first is longer than a chunk. Its twin's gradients stay. */
enum { CLEARED = 33001, LITTLE = 13 };
typedef struct cleared {
    float          w[CLEARED], little[LITTLE];
    uint32_t       g[CLEARED + 1];      /* of either size, and a word that is not its own */
    uint16_t       little_g[LITTLE];
    mixp_tensor   *grad;
    mixp_optimizer *opt;
    mixp_scaler   *scaler;
} cleared;

static void cleared_make(cleared *c, mixp_context *ctx, int kind, int zero_grad, mixp_dtype dtype) {
    memset(c, 0, sizeof *c);
    random_state = 5;
    for (int i = 0; i < CLEARED; i++) c->w[i] = uniform();
    c->scaler = known_scaler(ctx);
    c->opt = optimizer_of(ctx, kind, zero_grad);
    c->grad = view1(ctx, "g", dtype, CLEARED, c->g);
    CHECK_INT(mixp_optimizer_add(c->opt, view1(ctx, "w", MIXP_F32, CLEARED, c->w), c->grad),
              MIXP_OK);
    CHECK_INT(mixp_optimizer_add(c->opt, view1(ctx, "little", MIXP_F32, LITTLE, c->little),
                                 view1(ctx, "lg", MIXP_BF16, LITTLE, c->little_g)), MIXP_OK);
}

/* Step t: as the lean way, after unscale, with an overflow (t 2 and 3), without a scaler. */
static void cleared_step(cleared *c, int t) {
    static float fresh[CLEARED];
    random_state = 77 + (uint64_t)t;
    for (int i = 0; i < CLEARED; i++) fresh[i] = uniform() * 100.0f;
    if (t == 2 || t == 3) fresh[t == 2 ? 0 : CLEARED - 1] = bits_f32(0x7F800000u);
    CHECK_INT(mixp_write(c->grad, fresh, MIXP_F32, CLEARED), MIXP_OK);
    for (int i = 0; i < LITTLE; i++) c->little_g[i] = mixp_bf16_from_f32(uniform()).bits;
    c->g[CLEARED] = 0x12345678u;
    if (t % 2) CHECK_INT(mixp_scaler_unscale(c->scaler, c->opt), MIXP_OK);
    if (t == 4) { CHECK_INT(mixp_optimizer_step(c->opt), MIXP_OK); return; }
    CHECK_INT(mixp_scaler_step(c->scaler, c->opt), MIXP_OK);
    CHECK_INT(mixp_scaler_update(c->scaler), MIXP_OK);
}

/* The update is the same to the bit, and afterwards the gradients are 0: skipped steps too. */
static void test_step_clears_gradients(void) {
    static cleared a, b;
    mixp_context *ctx;
    int isa, kind, dtype, t;
    EACH_ISA(isa, ctx) {
        for (kind = 0; kind < 4; kind++) for (dtype = 0; dtype < 3; dtype++) {
            size_t size = mixp_dtype_size(reals[dtype]);
            cleared_make(&a, ctx, kind, 0, reals[dtype]);
            cleared_make(&b, ctx, kind, 1, reals[dtype]);
            for (t = 0; t < 6; t++) {
                cleared_step(&a, t);
                cleared_step(&b, t);
                CHECK(memcmp(a.w, b.w, sizeof a.w) == 0);
                CHECK(memcmp(a.little, b.little, sizeof a.little) == 0);
                if (a.opt->rows[0].m)
                    CHECK(memcmp(a.opt->rows[0].m, b.opt->rows[0].m, sizeof a.w) == 0);
                CHECK(!all_zero(a.g, CLEARED * size));
                CHECK(all_zero(b.g, CLEARED * size));
                CHECK(all_zero(b.little_g, sizeof b.little_g));
                CHECK(b.g[CLEARED] == 0x12345678u);
            }
            CHECK_INT(mixp_optimizer_verdict(b.opt).skipped, 2);
            CHECK_INT(mixp_optimizer_verdict(b.opt).applied, 4);
        }
        mixp_context_free(ctx);
    }
}

/* Gradients of the tape are forgotten, as by mixp_zero_grad: training goes on the same. */
static void test_step_forgets_the_tape(void) {
    static const float x[6] = { 1, 2, 3, -1, 0.5f, 2 };
    int64_t shape[2] = { 1, 3 }, in[2] = { 2, 3 };
    float seen[2][3];
    for (int zero_grad = 0; zero_grad < 2; zero_grad++) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_tensor *w = mixp_param(ctx, "w", MIXP_F32, 2, shape);
        mixp_tensor *unused = mixp_param(ctx, "unused", MIXP_F32, 2, shape);
        mixp_optimizer *opt = optimizer_of(ctx, 1, zero_grad);
        CHECK_INT(mixp_fill(w, 1.0), MIXP_OK);
        CHECK_INT(mixp_fill(unused, 1.0), MIXP_OK);
        CHECK_INT(mixp_optimizer_add(opt, w, NULL), MIXP_OK);
        CHECK_INT(mixp_optimizer_add(opt, unused, NULL), MIXP_OK);
        for (int t = 0; t < 4; t++) {
            if (!zero_grad) mixp_zero_grad(opt);
            for (int k = 0; k < 2; k++) {       /* two losses add up */
                mixp_step_begin(ctx);
                mixp_tensor *y = mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, in, x), w, NULL);
                if (t == 0) y = mixp_add(ctx, y, mixp_linear(ctx, mixp_input(ctx, MIXP_F32, 2, in, x),
                                                             unused, NULL));
                CHECK_INT(mixp_backward(ctx, mixp_mean(ctx, mixp_mul(ctx, y, y), MIXP_ALL, 0)), MIXP_OK);
            }
            CHECK(w->grad != NULL);
            CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
            CHECK((w->grad == NULL) == zero_grad);
        }
        CHECK_INT(mixp_read(w, seen[zero_grad], MIXP_F32, 3), MIXP_OK);
        CHECK_INT((int)*opt->rows[1].missed, 3);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
        mixp_context_free(ctx);
    }
    CHECK(memcmp(seen[0], seen[1], sizeof seen[0]) == 0);
}

/* What the first to be updated clears, the second would read. */
static void test_shared_gradient(void) {
    static float w[2][4], g[4];
    const char *why;
    for (int zero_grad = 0; zero_grad < 2; zero_grad++) {
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_optimizer *opt = optimizer_of(ctx, 2, zero_grad);
        add_f32(opt, "a", 4, w[0], g);
        CHECK_INT(mixp_optimizer_add(opt, view1(ctx, "b", MIXP_F32, 4, w[1]),
                                     view1(ctx, "g", MIXP_F32, 4, g)),
                  zero_grad ? MIXP_ERR_ARGUMENT : MIXP_OK);
        mixp_context_error(ctx, &why);
        if (zero_grad) CHECK_TEXT(why, "'b' shares its gradient");
        mixp_context_free(ctx);
    }
}

static void test_no_parameter_was_added(void) {
    const int64_t two = 2;
    static float w[2], g[2];
    const char *why = "";
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_scaler *scaler = known_scaler(ctx);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_ORDER);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "mixp_optimizer_step: no parameter was added to this optimizer: call mixp_optimizer_add");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_ERR_ORDER);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "mixp_scaler_step: no parameter was added");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_add(opt, mixp_param(ctx, "p", MIXP_F32, 1, &two), NULL), MIXP_OK);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_ERR_ORDER);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "has a gradient; call mixp_backward first");
    mixp_context_clear_error(ctx);
    add_f32(opt, "with its gradient", 2, w, g);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    mixp_context_free(ctx);
}

static void test_a_group_of_lr_alone(void) {
    const char *why = "";
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL), *sgd = new_sgd(ctx);
    mixp_optimizer_desc zeroed;
    mixp_param_group g;
    memset(&zeroed, 0, sizeof zeroed);
    memset(&g, 0, sizeof g);
    g.lr = zeroed.lr = 1e-3;
    CHECK_INT(mixp_optimizer_add_group(opt, &g), -1);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "group 1: beta2 and eps are 0: start from mixp_optimizer_group(opt, 0, &g)");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_set_group(opt, 0, &g), MIXP_ERR_ARGUMENT);
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "group 0: beta2 and eps are 0: start from mixp_optimizer_group(opt, 0, &g)");
    mixp_context_clear_error(ctx);
    CHECK(!mixp_optimizer_new(ctx, &zeroed));
    mixp_context_error(ctx, &why);
    CHECK_TEXT(why, "mixp_optimizer_new: Adam: beta2 and eps are 0: start from the defaults");
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_add_group(sgd, &g), 1);    /* of SGD that is a whole group */
    mixp_context_free(ctx);
}

static void test_errors(void) {
    static float w[8], g[9];
    static int32_t ints[8];
    mixp_context *ctx = mixp_context_new(NULL), *other = mixp_context_new(NULL);
    mixp_optimizer *opt = mixp_optimizer_new(ctx, NULL);
    mixp_verdict v = mixp_optimizer_verdict(opt);
    CHECK_INT(v.outcome, MIXP_STEP_NONE);
    for (int i = 0; i < 13; i++) {
        mixp_optimizer_desc a = mixp_adamw_defaults();
        mixp_optimizer_desc s = mixp_sgd_defaults();
        float nan = bits_f32(0x7FC00000u);
        switch (i) {
        case 0: a.lr = -1; s.lr = -1; break;
        case 1: a.lr = (double)nan; s.lr = (double)nan; break;
        case 2: a.beta1 = 1.0; s.momentum = -0.1; break;
        case 11: memset(&a, 0, sizeof a); a.lr = 1e-3; s.momentum = -0.1; break;   /* 0 by 0 */
        case 3: a.beta2 = -0.1; s.nesterov = 1; break;
        case 4: a.eps = -1e-8; s.nesterov = 1; s.momentum = 0.9; s.dampening = 0.1; break;
        case 5: a.weight_decay = -1; s.weight_decay = -1; break;
        case 6: a.max_norm = -1; s.max_norm = -1; break;
        case 7: a.schedule.warmup = -1; s.schedule.warmup = -1; break;
        case 8: a.schedule.kind = s.schedule.kind = MIXP_SCHEDULE_COSINE; break;
        case 9: a.schedule.min_factor = s.schedule.min_factor = 2.0; break;
        case 10: a.max_norm = s.max_norm = (double)nan; break;
        default: a.beta1 = s.dampening = (double)nan; break;
        }
        CHECK(mixp_optimizer_new(ctx, &a) == NULL);
        mixp_optimizer_desc adam = args_adam(&a);
        CHECK(mixp_optimizer_new(ctx, &adam) == NULL);
        CHECK(mixp_optimizer_new(ctx, &s) == NULL);
        CHECK_INT(mixp_context_error(ctx, NULL), MIXP_ERR_ARGUMENT);
        mixp_context_clear_error(ctx);
    }
    CHECK_INT(mixp_optimizer_add(opt, view1(ctx, "w", MIXP_F32, 8, w),
                                 view1(ctx, "g", MIXP_F32, 9, g)), MIXP_ERR_SHAPE);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_add(opt, view1(ctx, "i", MIXP_I32, 8, ints), NULL), MIXP_ERR_DTYPE);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_add(opt, view1(other, "w", MIXP_F32, 8, w), NULL), MIXP_ERR_ARGUMENT);
    mixp_context_clear_error(ctx);
    CHECK_INT(mixp_optimizer_add(opt, NULL, NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_zero_grad(NULL), MIXP_ERR_ARGUMENT);
    CHECK_INT(mixp_optimizer_applied(NULL), 0);
    mixp_context_free(other);
    mixp_context_free(ctx);
}

/* --- in the long run ---------------------------------------------------------------- */

/* Linear regression: every optimizer finds the weights the data were made with, and no step
 * after the first allocates. */
static void test_convergence(void) {
    for (int kind = 0; kind < 3; kind++) {
        static const float truth[4] = { 0.5f, -1.0f, 2.0f, 0.25f };
        float w[4] = { 0, 0, 0, 0 }, g[4];
        mixp_context *ctx = mixp_context_new(NULL);
        mixp_scaler *scaler = known_scaler(ctx);
        mixp_optimizer_desc a = mixp_adamw_defaults();
        mixp_optimizer_desc s = mixp_sgd_defaults();
        int64_t allocations = 0;
        a.lr = 0.02;
        a.weight_decay = 0.0;
        s.lr = 0.05;
        s.momentum = 0.9;
        mixp_optimizer_desc adam = args_adam(&a);
        mixp_optimizer *opt = kind == 0 ? mixp_optimizer_new(ctx, &a)
            : kind == 1 ? mixp_optimizer_new(ctx, &adam) : mixp_optimizer_new(ctx, &s);
        mixp_tensor *view = view1(ctx, "w", MIXP_F32, 4, w);
        CHECK_INT(mixp_optimizer_add(opt, view, view1(ctx, "g", MIXP_F32, 4, g)), MIXP_OK);
        for (int t = 0; t < 1500; t++) {
            float scale = mixp_scaler_loss_scale(scaler);
            CHECK_INT(mixp_zero_grad(opt), MIXP_OK);
            for (int k = 0; k < 8; k++) {
                float x[4], e = 0;
                for (int i = 0; i < 4; i++) { x[i] = uniform(); e += (w[i] - truth[i]) * x[i]; }
                for (int i = 0; i < 4; i++) g[i] += scale * e * x[i] / 4.0f;
            }
            CHECK_INT(mixp_scaler_step(scaler, opt), MIXP_OK);
            CHECK_INT(mixp_scaler_update(scaler), MIXP_OK);
            if (t == 0) allocations = mixp_context_memory(ctx).allocations;
        }
        CHECK_INT(mixp_context_memory(ctx).allocations, allocations);
        for (int i = 0; i < 4; i++) CHECK_NEAR(w[i], truth[i], 2e-2);
        mixp_context_free(ctx);
    }
}

/* Without a scaler nothing is gathered, and the gradients go in as they are. */
static void test_plain_step(void) {
    float w[2] = { 1.0f, 1.0f }, g[2] = { 0.5f, 0.0f };
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer *opt = new_sgd(ctx);
    add_f32(opt, "w", 2, w, g);
    g[1] = bits_f32(0x7F800000u);
    CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    CHECK((f32_bits(w[1]) & 0x7F800000u) == 0x7F800000u);
    CHECK_NEAR(w[0], 1.0 - 0.0005, 1e-7);
    CHECK((f32_bits((float)mixp_optimizer_verdict(opt).grad_norm) & 0x7FFFFFFFu) > 0x7F800000u);
    CHECK(mixp_optimizer_verdict(opt).scale == 1.0f);
    mixp_context_free(ctx);
}

/* Arrays from 8 KiB on start at multiples of 1024 bytes, whatever stands between them: a loop that writes a little behind
 * what it reads, in the low 12 bits of the addresses, would be slow. */
#define APART(p) CHECK_INT((uintptr_t)(p) % 1024, 0)
static void test_large_arrays_lie_apart(void) {
    const int64_t large[3] = { 2048, 2500, 70000 }, small = 3;
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer *opt = mixp_optimizer_new(ctx, &adamw);
    mixp_tensor *w[3];
    for (int i = 0; i < 3; i++) {
        char name[2] = { (char)('a' + i), 0 };
        mixp_param(ctx, i == 0 ? "x" : i == 1 ? "y" : "z", MIXP_F32, 1, &small);
        w[i] = mixp_param(ctx, name, MIXP_F32, 1, &large[i]);
        mixp_optimizer_add(opt, w[i], NULL);
        APART(w[i]->data);
        APART(opt->rows[i].m);
        APART(opt->rows[i].v);
    }
    for (int step = 0; step < 3; step++) {
        mixp_step_begin(ctx);
        mixp_zero_grad(opt);
        for (int i = 0; i < 3; i++) {
            mixp_tensor *y = mixp_mul(ctx, w[i], w[i]), *sum = mixp_sum(ctx, y, 0, 0);
            APART(y->data);
            mixp_backward(ctx, sum);
            APART(w[i]->grad->data);
        }
        CHECK_INT(mixp_optimizer_step(opt), MIXP_OK);
    }
    CHECK_INT(mixp_context_error(ctx, NULL), MIXP_OK);
    mixp_context_free(ctx);
}

int main(void) {
    RUN(test_adam);
    RUN(test_adam_does_not_decay);
    RUN(test_sgd);
    RUN(test_same_bits);
    RUN(test_element_bits);
    RUN(test_masters);
    RUN(test_masters_of_written_weights);
    RUN(test_low_copies);
    RUN(test_large_low_copies);
    RUN(test_conversions_past_the_caches);
    RUN(test_skip_leaves_every_byte);
    RUN(test_finds_the_bad_element);
    RUN(test_norm);
    RUN(test_clip);
    RUN(test_clip_of_a_bad_gradient);
    RUN(test_groups);
    RUN(test_schedules);
    RUN(test_many_parameters);
    RUN(test_missing_gradients);
    RUN(test_step_clears_gradients);
    RUN(test_step_forgets_the_tape);
    RUN(test_shared_gradient);
    RUN(test_no_parameter_was_added);
    RUN(test_a_group_of_lr_alone);
    RUN(test_errors);
    RUN(test_convergence);
    RUN(test_plain_step);
    RUN(test_large_arrays_lie_apart);
    return test_report();
}
