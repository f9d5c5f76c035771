/* fuzz_resume.c - a checkpoint of a whole training, of which single numbers and entries are changed
 * while the file stays a valid one: refused, and then no byte of the program's memory has changed
 * and training goes on as if nobody had asked; or loaded, and then what is saved again is what was
 * loaded, and training goes on. (internals: its own copy)
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#include "memory_disk.h"
#define FUZZ_MUTATIONS 250
#include "fuzz.h"

/* --- memory of a context, piece by piece -------------------------------------------------- */

enum { PIECES = 4096, ENTRIES = 128 };

typedef struct piece { unsigned char *memory, *copy; size_t bytes; } piece;
static piece pieces[PIECES];
static int n_pieces, pieces_watched;

static void *piece_allocate(size_t bytes, void *user) {
    piece p;
    (void)user;
    memset(&p, 0, sizeof p);
    p.memory = (unsigned char *)malloc(bytes ? bytes : 1);
    p.bytes = bytes;
    EXPECT(n_pieces < PIECES && p.memory);
    pieces[n_pieces++] = p;
    return p.memory;
}

static void piece_release(void *memory, void *user) {
    int i = 0;
    (void)user;
    if (!memory) return;
    while (i < n_pieces && pieces[i].memory != memory) i++;
    EXPECT(i < n_pieces);
    EXPECT(!(pieces_watched && pieces[i].copy));    /* a refused load gives nothing back */
    free(pieces[i].copy);
    free(memory);
    pieces[i] = pieces[--n_pieces];
}

static void pieces_copy(void) {
    for (int i = 0; i < n_pieces; i++) {
        pieces[i].copy = (unsigned char *)malloc(pieces[i].bytes + 1);
        EXPECT(pieces[i].copy != NULL);
        memcpy(pieces[i].copy, pieces[i].memory, pieces[i].bytes);
    }
    pieces_watched = 1;
}

/* What a failed call may change of a context: its errors, and what it counts of memory. */
static void context_excused(mixp_context *copy, const mixp_context *now) {
    copy->errors.code = now->errors.code;
    copy->errors.reported = now->errors.reported;
    copy->errors.failures = now->errors.failures;
    memcpy(copy->errors.message, now->errors.message, sizeof copy->errors.message);
    copy->memory.allocations = now->memory.allocations;
    copy->memory.permanent = now->memory.permanent;
    copy->memory.peak = now->memory.peak;
    copy->memory.allocated = now->memory.allocated;
    copy->memory.pieces = now->memory.pieces;
    copy->memory.scratch = now->memory.scratch;
}

static void pieces_forget(void) {
    for (int i = 0; i < n_pieces; i++) {
        free(pieces[i].copy);
        pieces[i].copy = NULL;
    }
    pieces_watched = 0;
}

/* A guard's rows of a file are rebuilt by each save and each load: they may change, and nothing
 * else of the guard. */
static void watch_excused(mixpi_watch *copy, const mixpi_watch *now) {
    copy->packed = now->packed;
    copy->packed_room = now->packed_room;
    copy->hashes = now->hashes;
    copy->states = now->states;
    copy->operands = now->operands;
}

static int piece_holds(const piece *p, const void *at) {
    const uintptr_t a = (uintptr_t)at, from = (uintptr_t)p->memory;
    return a >= from && a < from + p->bytes;
}

static void pieces_expect(const mixp_context *ctx) {
    const mixpi_watch *w = ctx->watch;
    for (int i = 0; i < n_pieces; i++) {
        piece *p = &pieces[i];
        if (!p->copy) continue;
        if (p->memory == (const unsigned char *)ctx)
            context_excused((mixp_context *)(void *)p->copy, ctx);
        if (w && piece_holds(p, w))
            watch_excused((mixpi_watch *)(void *)(p->copy + ((const unsigned char *)w - p->memory)), w);
        if (w && w->hashes && piece_holds(p, w->hashes)) continue;
        EXPECT(memcmp(p->memory, p->copy, p->bytes) == 0);
    }
    pieces_forget();
}

/* --- a training with everything that a checkpoint can hold --------------------------------- */

typedef struct training {
    mixp_context   *ctx;
    mixp_tensor    *w, *b, *u, *idle, *carried, *seen;
    mixp_optimizer *opt[3];
    mixp_scaler    *scaler;
    int64_t         cursor[2];
    mixp_checkpoint_value value;
    mixp_checkpoint all;
    int             rich;
} training;

enum { SIDE = 64, SMALL_SIDE = 8, OUT = 4, ROWS = 2 };     /* 64 by 64: states of 8 bits are used */

static void training_parameters(training *t) {
    const int64_t side = t->rich ? SIDE : SMALL_SIDE, idle[1] = { 3 }, two[1] = { 2 };
    int64_t w[2], u[2];
    w[0] = w[1] = u[1] = side;
    u[0] = OUT;
    t->w = mixp_param(t->ctx, "w", t->rich ? MIXP_BF16 : MIXP_F16, 2, w);
    t->b = mixp_param(t->ctx, "b", MIXP_F32, 1, w);
    t->u = mixp_param(t->ctx, "u", MIXP_F16, 2, u);
    t->idle = mixp_param(t->ctx, "idle", MIXP_F16, 1, idle);
    t->carried = mixp_buffer(t->ctx, "carried", MIXP_F16, 0, NULL);
    t->seen = mixp_buffer(t->ctx, "seen", MIXP_I64, 1, two);
    mixp_init_normal(t->w, 0, 0.1);
    mixp_init_normal(t->u, 0, 0.1);
    mixp_fill(t->b, 0);
    mixp_fill(t->idle, 1);
}

/* Rich: states of 8 and 16 bits, spikes, and the decay of both orders. */
static void training_optimizers(training *t) {
    mixp_optimizer_desc adamw = mixp_adamw_defaults();
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_optimizer_desc muon = mixp_muon_defaults();
    adamw.schedule.kind = MIXP_SCHEDULE_COSINE;
    adamw.schedule.total = 100;
    if (t->rich) {
        adamw.states.m = adamw.states.v = MIXP_MOMENT_8BIT;
        adamw.states.master = MIXP_MASTER_16BIT;
        adamw.spike.of = MIXP_SPIKE_BOTH;
        adamw.spike.window = 4;
        adamw.spike.max_in_a_row = -1;
        adamw.max_norm = 1;
    }
    sgd.momentum = 0.5;
    sgd.nesterov = 1;
    t->opt[0] = mixp_optimizer_new(t->ctx, &adamw);
    t->opt[1] = mixp_optimizer_new(t->ctx, &sgd);
    t->opt[2] = mixp_optimizer_new(t->ctx, &muon);
    mixp_optimizer_add(t->opt[0], t->w, NULL);
    if (!t->rich) mixp_optimizer_add(t->opt[0], t->idle, NULL);
    mixp_optimizer_add(t->opt[1], t->b, NULL);
    mixp_optimizer_add(t->opt[2], t->u, NULL);
}

static void training_scaler(training *t) {
    mixp_scaler_desc scaler;
    mixp_guard_desc guard;
    memset(&scaler, 0, sizeof scaler);
    memset(&guard, 0, sizeof guard);
    scaler.growth_interval = 3;
    if (t->rich) scaler.rule = MIXP_RULE_PREDICTIVE;
    t->scaler = mixp_scaler_new(t->ctx, &scaler);
    guard.every = 2;
    guard.max_sites = 12;
    guard.patience = -1;
    if (t->rich) EXPECT(mixp_guard_start(t->ctx, &guard) == MIXP_OK);
}

static void training_begin(training *t, int rich) {
    mixp_context_desc desc;
    memset(t, 0, sizeof *t);
    memset(&desc, 0, sizeof desc);
    desc.allocate = piece_allocate;
    desc.release = piece_release;
    desc.threads = 1;
    desc.seed = 5;
    t->rich = rich;
    t->ctx = mixp_context_new(&desc);
    training_parameters(t);
    training_optimizers(t);
    training_scaler(t);
    t->value.name = "cursor";
    t->value.dtype = MIXP_I64;
    t->value.count = 2;
    t->value.data = t->cursor;
    t->all.ctx = t->ctx;
    t->all.scaler = t->scaler;
    t->all.optimizers = t->opt;
    t->all.n_optimizers = 3;
    t->all.values = &t->value;
    t->all.n_values = 1;
    EXPECT(mixp_context_error(t->ctx, NULL) == MIXP_OK);
}

static mixp_tensor *training_loss(training *t) {
    float x[ROWS * SIDE];
    int64_t shape[2];
    shape[0] = ROWS;
    shape[1] = t->rich ? SIDE : SMALL_SIDE;
    for (int i = 0; i < ROWS * SIDE; i++) x[i] = (float)((i * 37) % 19 - 9) / 8.0f;
    mixp_tensor *h = mixp_linear(t->ctx, mixp_input(t->ctx, MIXP_F32, 2, shape, x), t->w, t->b);
    h = mixp_dropout(t->ctx, mixp_gelu(t->ctx, h), 0.25f, 1);
    h = mixp_linear(t->ctx, h, t->u, NULL);
    return mixp_mean(t->ctx, mixp_mul(t->ctx, h, h), MIXP_ALL, 0);
}

static void training_run(training *t, int steps) {
    mixp_autocast region = { MIXP_F16, 1, NULL };
    if (t->rich) region.level = 2;
    for (; steps > 0; steps--) {
        mixp_step_begin(t->ctx);
        const int opened = mixp_autocast_open_with(t->ctx, &region);
        mixp_tensor *loss = training_loss(t);
        mixp_autocast_close(t->ctx, opened);
        if (t->rich) mixp_optimizer_set_loss(t->opt[0], loss);
        mixp_backward(t->ctx, mixp_scaler_scale(t->scaler, loss));
        mixp_copy(t->carried, loss);
        mixp_write(t->seen, t->cursor, MIXP_I64, 2);
        for (int o = 0; o < 3; o++) mixp_scaler_step(t->scaler, t->opt[o]);
        mixp_scaler_update(t->scaler);
        for (int o = 0; o < 3; o++) mixp_zero_grad(t->opt[o]);
        if (t->cursor[0] < INT64_MAX) t->cursor[0]++;
    }
}

/* --- files of it ---------------------------------------------------------------------------- */

typedef struct file_bytes { unsigned char *bytes; size_t size; } file_bytes;

static file_bytes training_save(training *t) {
    file_bytes f;
    EXPECT(mixp_checkpoint_save("out", &t->all) == MIXP_OK);
    int i = disk_find("out");
    f.size = disk[i].size;
    f.bytes = (unsigned char *)malloc(f.size);
    EXPECT(f.bytes != NULL);
    memcpy(f.bytes, disk[i].data, f.size);
    return f;
}

/* Saves, and sees that the file is the one that is expected. */
static void training_expect(training *t, const file_bytes *expected) {
    file_bytes now = training_save(t);
    EXPECT(now.size == expected->size && memcmp(now.bytes, expected->bytes, now.size) == 0);
    free(now.bytes);
}

/* Of each kind: after five steps, after six; after two steps, after three. */
static file_bytes good[2], good_next[2], early[2], early_next[2];

static void prepare(void) {
    if (good[0].bytes) return;
    for (int rich = 0; rich < 2; rich++) {
        training t;
        training_begin(&t, rich);
        training_run(&t, 2);
        early[rich] = training_save(&t);
        training_run(&t, 1);
        early_next[rich] = training_save(&t);
        training_run(&t, 2);
        good[rich] = training_save(&t);
        training_run(&t, 1);
        EXPECT(mixp_context_error(t.ctx, NULL) == MIXP_OK);
        good_next[rich] = training_save(&t);
        mixp_context_free(t.ctx);
        EXPECT(n_pieces == 0);
    }
}

/* --- what is changed ------------------------------------------------------------------------- */

/* A file in parts: entries with data of their own, and its metadata. */
typedef struct parts {
    mixp_st_entry e[ENTRIES];
    char        (*names)[64];
    int           n;
    const char   *schema;
} parts;

static void parts_read(parts *p, const file_bytes *from) {
    mixp_safetensors *f;
    disk_put("in", from->bytes, from->size);
    EXPECT(mixp_safetensors_read("in", &f, NULL, 0) == MIXP_OK);
    p->n = (int)mixp_safetensors_count(f);
    EXPECT(p->n < ENTRIES - 16);
    p->schema = "1";
    p->names = (char (*)[64])calloc(ENTRIES, sizeof *p->names);
    for (int i = 0; i < p->n; i++) {
        mixp_st_entry *e = &p->e[i];
        *e = *mixp_safetensors_at(f, i);
        void *data = malloc(e->bytes + 1);
        EXPECT(data && strlen(e->name) < sizeof p->names[i] - 2);
        memcpy(data, e->data, e->bytes);
        e->data = data;
        strcpy(p->names[i], e->name);
        e->name = p->names[i];
        e->type = NULL;
        if (e->dtype == MIXP_DTYPE_COUNT) e->type = "U16";
    }
    mixp_safetensors_free(f);
}

static void parts_free(parts *p) {
    for (int i = 0; i < p->n; i++) free((void *)(uintptr_t)p->e[i].data);
    free(p->names);
}

static const int64_t whole_numbers[] = {
    0, 1, -1, 2, 255, 1 << 30, (1 << 30) + 1, INT32_MAX, INT32_MAX - 1, -INT32_MAX - 1,
    (int64_t)1 << 32, ((int64_t)1 << 53) - 1, (int64_t)1 << 53, ((int64_t)1 << 53) + 1,
    ((int64_t)1 << 62) - 1, (int64_t)1 << 62, INT64_MAX, -INT64_MAX - 1 };

static const double real_numbers[] = {
    0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, -1e-45, 1.17549435e-38, 8.50705917e37, 1.7014118e38,
    3e38, 1e-8, 65504.0, 1e-300, 1e300, 0.99999999999999989, 1.0000000000000002 };

static double special_number(int which) {
    static const uint32_t bits[] = { 0x7F800000u, 0xFF800000u, 0x7FC00000u, 0x7F800001u };
    return (double)mixp_f32_of_bits(bits[which % 4]);
}

/* Sets element `at` of an entry to number `which`. */
static void change_element(mixp_st_entry *e, size_t at, int which) {
    const int n_whole = (int)(sizeof whole_numbers / sizeof whole_numbers[0]);
    const int n_real = (int)(sizeof real_numbers / sizeof real_numbers[0]);
    size_t size = e->dtype == MIXP_DTYPE_COUNT ? 2 : mixp_dtype_size(e->dtype);
    unsigned char *to = (unsigned char *)(uintptr_t)e->data;
    int64_t whole = whole_numbers[which % n_whole];
    double x = which % (n_real + 4) < n_real ? real_numbers[which % (n_real + 4)]
                                             : special_number(which);
    if (e->bytes < size) return;
    to += at % (e->bytes / size) * size;
    if (e->dtype == MIXP_I64 || e->dtype == MIXP_I32 || e->dtype == MIXP_DTYPE_COUNT)
        memcpy(to, &whole, size);
    else mixp_convert(to, e->dtype, &x, MIXP_F64, 1);
}

static void change_all(mixp_st_entry *e, int which) {
    for (size_t i = 0; i < e->bytes && i < 20000; i++) change_element(e, i, which);
}

static void change_raw(mixp_st_entry *e, size_t at, const uint8_t *raw) {
    for (size_t i = 0; i < 8 && e->bytes; i++)
        ((unsigned char *)(uintptr_t)e->data)[(at * 8 + i) % e->bytes] = raw[i];
}

/* An entry that is not in the file, of a kind that may be, or of one that may not. */
static void add_entry(parts *p, int which) {
    static const char *const names[] = {
        "mixprec.guard.more", "scaler.prediction.more", "optimizer.7.spike.more", "optimizer.7.m.w",
        "", "value.more", "w.more", "mixprec.step.more",
        "mixprec.rank.1.seen", "mixprec.rank.0.seen" };
    mixp_st_entry *e = &p->e[p->n];
    if (p->n + 1 >= ENTRIES) return;
    memset(e, 0, sizeof *e);
    strcpy(p->names[p->n], names[which % 10]);
    e->name = p->names[p->n];
    e->dtype = MIXP_F32;
    e->rank = 1;
    e->shape[0] = 2;
    e->bytes = 8;
    e->data = calloc(2, 4);
    p->n++;
}

static void drop_entry(parts *p, int i) {
    free((void *)(uintptr_t)p->e[i].data);
    p->e[i] = p->e[--p->n];
}

/* Another dtype of the same size. */
static void change_dtype(mixp_st_entry *e, int which) {
    static const mixp_dtype eight[2] = { MIXP_F64, MIXP_I64 }, four[2] = { MIXP_F32, MIXP_I32 },
                            two[2] = { MIXP_F16, MIXP_BF16 };
    size_t size = e->dtype == MIXP_DTYPE_COUNT ? 2 : mixp_dtype_size(e->dtype);
    e->type = NULL;
    if (size == 8) e->dtype = eight[which % 2];
    else if (size == 4) e->dtype = four[which % 2];
    else if (size == 2) e->dtype = two[which % 2];
    else e->dtype = which % 2 ? MIXP_U8 : MIXP_F8_E4M3;
}

/* The same elements in another shape. */
static void change_shape(mixp_st_entry *e, int which) {
    if (e->rank == 2 && which % 2) {
        int64_t t = e->shape[0];
        e->shape[0] = e->shape[1];
        e->shape[1] = t;
    } else if (e->rank < MIXP_MAX_RANK) e->shape[e->rank++] = 1;
}

static void swap_names(mixp_st_entry *a, mixp_st_entry *b) {
    const char *name = a->name;
    a->name = b->name;
    b->name = name;
}

/* Half of an entry's rows, or none of them. */
static void change_size(mixp_st_entry *e, int which) {
    int64_t rows = e->rank ? e->shape[0] : 0, left = which % 2 ? rows / 2 : 0;
    if (!rows) return;
    e->bytes = e->bytes / (size_t)rows * (size_t)left;
    e->shape[0] = left;
}

static void change_entry(parts *p, int i, int which, int kind) {
    static const char *const schemas[4] = { "1", "2", "", NULL };
    switch (kind % 7) {
    case 0: drop_entry(p, i); break;
    case 1: add_entry(p, which); break;
    case 2: change_dtype(&p->e[i], which); break;
    case 3: change_shape(&p->e[i], which); break;
    case 4: swap_names(&p->e[i], &p->e[which % p->n]); break;
    case 5: p->schema = schemas[which % 4]; break;
    default: change_size(&p->e[i], which);
    }
}

/* Four bytes a change: what, of which entry, where, to what; raw ones have eight more. */
static void parts_change(parts *p, const uint8_t *data, size_t size) {
    size_t at = 0;
    while (at + 4 <= size && p->n > 1) {
        const uint8_t *d = data + at;
        int i = d[1] % p->n;
        at += 4;
        switch (d[0] % 8) {
        case 5: change_all(&p->e[i], d[3]); break;
        case 6: change_entry(p, i, d[3], d[2]); break;
        case 7:
            if (at + 8 > size) return;
            change_raw(&p->e[i], d[2], d + 4);
            at += 8;
            break;
        default: change_element(&p->e[i], d[2], d[3]);
        }
    }
}

/* The file "in"; 0: the changes made none that can be written. */
static int parts_write(const parts *p) {
    const char *metadata[2][2] = { { "format", "pt" }, { "mixprec", "1" } };
    metadata[1][1] = p->schema;
    return mixp_safetensors_write("in", p->e, p->n, (const char *const (*)[2])metadata,
                                  p->schema ? 2 : 1, NULL, 0) == MIXP_OK;
}

/* --- what must hold ------------------------------------------------------------------------- */

/* Ids of tensors only go up, and a guard's table begins anew. */
static int is_made_anew(const char *name)
{ return strncmp(name, "mixprec.guard.", 14) == 0 || strcmp(name, "mixprec.tensors_made") == 0; }

/* What was loaded is what is saved. */
static void expect_saved(training *t, const parts *p) {
    file_bytes out = training_save(t);
    mixp_safetensors *f;
    EXPECT(mixp_safetensors_read("out", &f, NULL, 0) == MIXP_OK);
    for (int i = 0; i < p->n; i++) {
        const mixp_st_entry *e = &p->e[i], *now = mixp_safetensors_find(f, e->name);
        if (!now || is_made_anew(e->name)) continue;
        EXPECT(now->bytes == e->bytes && memcmp(now->data, e->data, e->bytes) == 0);
    }
    mixp_safetensors_free(f);
    free(out.bytes);
}

/* Whatever was loaded can be trained on, asked about, saved and loaded. */
static void go_on(training *t) {
    mixp_site_info site;
    mixp_event event;
    training_run(t, 2);
    for (int i = 0; mixp_site(t->ctx, i, &site); i++) EXPECT(site.falls >= 0 && site.clean_needed > 0);
    for (int i = 0; mixp_guard_event(t->ctx, i, &event); i++) EXPECT(event.what[0]);
    for (int i = 0; i < 3; i++) mixp_optimizer_verdict(t->opt[i]);
    mixp_retry(t->scaler, 2);
    mixp_context_clear_error(t->ctx);       /* it may diverge from there: no crash is asked */
    EXPECT(mixp_checkpoint_save("out", &t->all) == MIXP_OK);
    EXPECT(mixp_checkpoint_load("out", &t->all) == MIXP_OK);
}

static void load_refused(training *t) {
    const char *why = "";
    EXPECT(mixp_context_error(t->ctx, &why) != MIXP_OK && why[0]);
    mixp_context_clear_error(t->ctx);
    pieces_expect(t->ctx);
    EXPECT(t->cursor[0] == 2 && t->cursor[1] == 0);
    training_run(t, 1);
    training_expect(t, &early_next[t->rich]);
}

static void load_accepted(training *t, const parts *p) {
    const int i = disk_find("in");
    const file_bytes *sound = &good[t->rich];
    int unchanged = disk[i].size == sound->size &&
                    memcmp(disk[i].data, sound->bytes, sound->size) == 0;
    const double scale = (double)mixp_scaler_loss_scale(t->scaler), most = 8.5070591730234616e37;
    pieces_forget();
    EXPECT(scale >= 1.0 / most && scale <= most);       /* 2^126, as is promised of every scale */
    expect_saved(t, p);
    if (unchanged) {
        training_run(t, 1);
        training_expect(t, &good_next[t->rich]);
    }
    go_on(t);
}

static void fuzz_one(const uint8_t *data, size_t size) {
    int rich = size ? data[0] & 1 : 0;
    mixp_weights_desc weights;
    training t;
    parts p;
    prepare();
    parts_read(&p, &good[rich]);
    if (size > 1) parts_change(&p, data + 1, size - 1);
    if (parts_write(&p)) {
        training_begin(&t, rich);
        training_run(&t, 2);
        EXPECT(mixp_checkpoint_save("early", &t.all) == MIXP_OK);   /* a guard packs its table */
        pieces_copy();
        if (mixp_checkpoint_load("in", &t.all) == MIXP_OK) load_accepted(&t, &p);
        else load_refused(&t);
        memset(&weights, 0, sizeof weights);
        weights.convert = weights.allow_extra = weights.allow_missing = 1;
        if (mixp_checkpoint_load_weights("in", t.ctx, &weights) == MIXP_OK) training_run(&t, 1);
        mixp_context_free(t.ctx);
        EXPECT(n_pieces == 0);
    }
    parts_free(&p);
}

/* Of each kind: the sound file; a few changes; numbers of all entries, one after the other. */
static size_t fuzz_seed(int i, uint8_t *out) {
    static const uint8_t few[] = { 0, 3, 0, 7, 6, 9, 0, 0, 6, 2, 2, 1, 7, 5, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8 };
    size_t n = 1;
    int k;
    out[0] = (uint8_t)(i & 1);
    if (i >= 6) return 0;
    if (i >= 4)
        for (k = 0; k < 3; k++, n += 4) memcpy(out + n, few + 4 * k, 4);
    else if (i >= 2) {
        memcpy(out + n, few, sizeof few);
        n += sizeof few;
    }
    return n;
}
