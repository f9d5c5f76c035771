/* test_guard_memory.c - the memory of a guard follows the number of its sites; what it has seen survives
 * each growth.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * The program is a chain of products with 2 and 1/2, all in f32: every value and gradient is a power of two
 * that the test knows.
 */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include "examples/compare.h"
#include "test.h"
#include <unistd.h>

enum { VALUES = 4, DEFAULT_SITES = 4096 };

/* --- a context whose memory is counted --------------------------------------------------- */

typedef struct counted { size_t size; double unused; } counted;     /* before each allocation */
static size_t held;                 /* bytes that are allocated now */
static long   requests, refused;    /* refused: number of the request that fails; 0: none */

static void *take(size_t bytes, void *user) {
    counted *p;
    (void)user;
    if (++requests == refused) return NULL;
    p = (counted *)malloc(sizeof *p + bytes);
    if (!p) return NULL;
    p->size = bytes;
    held += bytes;
    return p + 1;
}
static void put(void *p, void *user) {
    counted *c = (counted *)p - 1;
    (void)user;
    held -= c->size;
    free(c);
}

typedef struct chain {
    mixp_context   *ctx;
    mixp_tensor    *w;
    mixp_optimizer *opt;                /* changes nothing: its learning rate is 0 */
    mixp_exponents *counts;             /* NULL: nothing is counted */
} chain;

static chain chain_open(const mixp_guard_desc *guard, int guarded) {
    static const int64_t shape[1] = { VALUES };
    mixp_optimizer_desc sgd = mixp_sgd_defaults();
    mixp_context_desc d;
    chain c;
    memset(&d, 0, sizeof d);
    d.threads = 1;
    d.allocate = take;
    d.release = put;
    c.ctx = mixp_context_new(&d);
    c.w = mixp_param(c.ctx, "w", MIXP_F32, 1, shape);
    mixp_fill(c.w, 1.0);
    sgd.lr = 0;
    c.opt = mixp_optimizer_new(c.ctx, &sgd);
    mixp_optimizer_add(c.opt, c.w, NULL);
    if (guarded) CHECK_INT(mixp_guard_start(c.ctx, guard), MIXP_OK);
    c.counts = NULL;
    return c;
}

/* As chain_open, with a guard, and values counted by exponent. */
static chain chain_counted(const mixp_guard_desc *guard) {
    chain c = chain_open(guard, 1);
    c.counts = mixp_exponents_new(c.ctx);
    CHECK(c.counts != NULL);
    return c;
}

static void chain_close(chain *c) {
    mixp_exponents_free(c->counts);
    mixp_context_free(c->ctx);
}

static mixp_guard_desc every_step(void) {
    mixp_guard_desc d;
    memset(&d, 0, sizeof d);
    d.every = 1;
    return d;
}

/* Link i multiplies by 2 where i modulo 10 is below 5, and by 1/2 otherwise. */
static float factor(int i) { return i % 10 < 5 ? 2.0f : 0.5f; }
static double value_after(int i) { return ldexp(1.0, i % 10 < 5 ? i % 10 + 1 : 9 - i % 10); }

static mixp_result chain_step(chain *c, int links) {
    mixp_tensor *y = c->w;
    if (mixp_step_begin(c->ctx) != MIXP_OK) return mixp_context_error(c->ctx, NULL);
    for (int i = 0; i < links && y; i++) y = mixp_scale(c->ctx, y, factor(i));
    if (y) y = mixp_sum(c->ctx, y, MIXP_ALL, 0);
    if (y) mixp_backward(c->ctx, y);
    if (y) mixp_optimizer_step(c->opt);
    return mixp_context_error(c->ctx, NULL);
}

/* What a chain holds after three steps. on_device: its device memory alone. */
static size_t held_by(int links, int guarded, size_t *on_device) {
    chain c = chain_open(NULL, guarded);
    for (int i = 0; i < 3; i++) CHECK_INT(chain_step(&c, links), MIXP_OK);
    *on_device = mixp_context_memory(c.ctx).allocated;
    size_t bytes = held;
    mixp_context_free(c.ctx);
    CHECK_INT(held, 0);
    return bytes;
}

static void memory_follows_the_sites(void) {
    static const int links[3] = { 9, 99, 999 };
    for (int i = 0; i < 3; i++) {
        size_t bare, device_bare, guarded, device;
        bare = held_by(links[i], 0, &device_bare);
        guarded = held_by(links[i], 1, &device) - bare;
        device -= device_bare;
        printf("  %d sites: %.0f bytes, of which %.0f on the device\n", links[i] + 1,
               (double)guarded, (double)device);
        CHECK(guarded <= (size_t)(16000 + 2200 * (links[i] + 1)));
        CHECK(device <= (size_t)(4000 + 2 * 5 * sizeof(mixp_look) * (size_t)(links[i] + 1)));
        CHECK(guarded > 800 * (size_t)links[i]);
    }
}

/* --- what was seen ------------------------------------------------------------------------- */

/* The number of site entries up to the one of the last link. Chains of several lengths have been there,
 * each with a sum of its own. */
static int entries_of(const chain *c, int links) {
    mixp_site_info site;
    int n = 0, scales = 0;
    while (scales < links && mixp_site(c->ctx, n, &site)) {
        scales += strcmp(site.op, "scale") == 0;
        n++;
    }
    CHECK_INT(scales, links);
    return n;
}

/* How often each exponent was stored in the step that has just ended. */
static void check_exponents(chain *c, int links) {
    int64_t counts[MIXP_EXPONENTS];
    mixp_site_info site;
    int i, link = 0, n = entries_of(c, links);
    for (i = 0; i < n && mixp_site(c->ctx, i, &site); i++) {
        if (strcmp(site.op, "scale") != 0) continue;
        CHECK_INT(mixp_site_exponents(c->counts, i, counts), 1);
        CHECK_INT(counts[127 + ilogb(value_after(link++))], VALUES);
    }
}

static void check_looks(const chain *c, int links) {
    mixp_site_info site;
    double after = 1.0;
    int i, link = links;
    for (i = entries_of(c, links) - 1; i >= 0 && mixp_site(c->ctx, i, &site); i--) {
        if (strcmp(site.op, "scale") != 0) continue;
        link--;
        CHECK_NEAR(site.value.largest, value_after(link), 0);
        CHECK_INT(site.value.count, VALUES);
        CHECK_NEAR(site.grad.largest, after, 0);
        after *= (double)factor(link);
    }
}

/* The newest step, then the sample that the step after it settles. */
static void check_sites(chain *c, int links) {
    check_exponents(c, links);
    CHECK_INT(mixp_step_begin(c->ctx), MIXP_OK);
    check_looks(c, links);
}

/* Rows grow while the sampled step runs, and keep what they have. */
static void rows_survive_their_growth(void) {
    mixp_guard_desc guard = every_step();
    chain c = chain_counted(&guard);
    for (int step = 0; step < 3; step++) {
        const int links = 30 + 300 * step;
        CHECK_INT(chain_step(&c, links), MIXP_OK);
        check_sites(&c, links);
        CHECK_INT(chain_step(&c, links), MIXP_OK);
        check_sites(&c, links);
    }
    chain_close(&c);
}

/* All requests of memory fail, one after the other: the error is reported, and the run goes on. */
static void refused_memory(void) {
    const int links = 70;
    long all, i;
    for (i = 1, all = 2; i < all; i++) {
        mixp_guard_desc guard = every_step();
        chain c = chain_counted(&guard);
        refused = requests + i;
        chain_step(&c, 5);
        chain_step(&c, links);
        chain_step(&c, links);
        CHECK_INT(mixp_context_error(c.ctx, NULL), requests < refused ? MIXP_OK : MIXP_ERR_MEMORY);
        if (requests >= refused) all = i + 2;
        refused = 0;
        mixp_context_clear_error(c.ctx);
        CHECK_INT(chain_step(&c, links), MIXP_OK);
        while (!mixp_guard_due(c.ctx)) CHECK_INT(chain_step(&c, links), MIXP_OK);
        CHECK_INT(chain_step(&c, links), MIXP_OK);
        check_sites(&c, links);
        if (test_bad) printf("at %ld\n", i);
        chain_close(&c);
        CHECK_INT(held, 0);
    }
    CHECK(all > 10);
}

/* The newest 1024 events are kept, in their order. */
static void events_survive_their_growth(void) {
    enum { LINKS = 1500, KEPT = 1024 };
    mixp_guard_desc guard = every_step();
    chain c = chain_open(&guard, 1);
    mixp_event e;
    int i;
    CHECK_INT(mixp_guard_pin(c.ctx, "w*scale*", MIXP_F32), MIXP_OK);
    chain_step(&c, LINKS);
    mixp_step_begin(c.ctx);
    for (i = 0; mixp_guard_event(c.ctx, i, &e); i++) {
        char name[64];
        snprintf(name, sizeof name, "w: scale #%d", LINKS - KEPT + i + 1);
        CHECK_INT(e.number, LINKS - KEPT + i);
        CHECK_INT(e.kind, MIXP_EVENT_PINNED);
        CHECK(strcmp(e.site, name) == 0);
    }
    CHECK_INT(i, KEPT);
    mixp_context_free(c.ctx);
}

/* --- files --------------------------------------------------------------------------------- */

static mixp_checkpoint all_of(const chain *c) {
    mixp_checkpoint what;
    memset(&what, 0, sizeof what);
    what.ctx = c->ctx;
    return what;
}

/* Writes the file again with `rows` rows in the guard's arrays. Site 3 has fallen back twice. */
static void file_lengthened(const char *path, int64_t rows) {
    static mixp_st_entry entries[256];
    static const char *const metadata[2][2] = { { "format", "pt" }, { "mixprec", "1" } };
    static int64_t hashes[DEFAULT_SITES];
    static int32_t states[DEFAULT_SITES][4];
    static int32_t operands[DEFAULT_SITES][4];
    mixp_safetensors *file;
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    int64_t n = mixp_safetensors_count(file);
    for (int64_t i = 0; i < n; i++) {
        mixp_st_entry *e = &entries[i];
        *e = *mixp_safetensors_at(file, i);
        if (strcmp(e->name, "mixprec.guard.sites") == 0) {
            memcpy(hashes, e->data, e->bytes);
            e->data = hashes;
            e->bytes = (size_t)rows * sizeof *hashes;
            e->shape[0] = rows;
        }
        if (strcmp(e->name, "mixprec.guard.operands") == 0) {
            memcpy(operands, e->data, e->bytes);
            e->bytes = e->bytes / (size_t)e->shape[0] * (size_t)rows;
            e->data = operands;
            e->shape[0] = rows;
        }
        if (strcmp(e->name, "mixprec.guard.states") == 0) {
            memcpy(states, e->data, e->bytes);
            states[3][0] = 1;
            states[3][1] = 2;
            e->data = states;
            e->bytes = (size_t)rows * sizeof *states;
            e->shape[0] = rows;
        }
    }
    CHECK_INT(mixp_safetensors_write(path, entries, n, metadata, 2, NULL, 0), MIXP_OK);
    mixp_safetensors_free(file);
}

static int64_t rows_of_file(const char *path, const char *name) {
    mixp_safetensors *file;
    int64_t rows = -1;
    CHECK_INT(mixp_safetensors_read(path, &file, NULL, 0), MIXP_OK);
    const mixp_st_entry *e = mixp_safetensors_find(file, name);
    if (e) rows = e->shape[0];
    mixp_safetensors_free(file);
    return rows;
}

/* A file has one row for each site. A file that has a row for each of max_sites, mostly zeros, loads as
 * well. Site 3 of the file has fallen back, in both. */
static void files_have_the_rows_of_their_sites(void) {
    const int links = 40;
    for (int longer = 0; longer < 2; longer++) {
        char path[64];
        mixp_guard_desc guard = every_step();
        chain c = chain_open(&guard, 1), next = chain_open(&guard, 1);
        mixp_checkpoint what = all_of(&c);
        mixp_site_info site;
        snprintf(path, sizeof path, "guard_memory_%ld.safetensors", (long)getpid());
        CHECK_INT(chain_step(&c, links), MIXP_OK);
        CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
        CHECK_INT(rows_of_file(path, "mixprec.guard.sites"), links + 1);
        CHECK_INT(rows_of_file(path, "mixprec.guard.states"), links + 1);
        file_lengthened(path, longer ? DEFAULT_SITES : links + 1);
        what = all_of(&next);
        CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_OK);
        CHECK_INT(chain_step(&next, links + 20), MIXP_OK);
        CHECK_INT(mixp_site(next.ctx, 2, &site), 1);
        CHECK_INT(site.falls, 0);
        CHECK_INT(mixp_site(next.ctx, 3, &site), 1);
        CHECK_INT(site.falls, 2);
        CHECK_INT(site.fallen, 1);
        CHECK_TEXT(site.name, "w: scale");
        CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
        CHECK_INT(rows_of_file(path, "mixprec.guard.sites"), links + 20 + 2);
        remove(path);
        mixp_context_free(c.ctx);
        mixp_context_free(next.ctx);
        CHECK_INT(held, 0);
    }
}

/* A guard that has no site yet saves and loads, also over a guard that has some. */
static void files_without_sites(void) {
    char path[64];
    mixp_guard_desc guard = every_step();
    chain c = chain_open(&guard, 1), next = chain_open(&guard, 1);
    mixp_checkpoint what = all_of(&c);
    mixp_site_info site;
    snprintf(path, sizeof path, "guard_memory_%ld.safetensors", (long)getpid());
    CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
    CHECK_INT(chain_step(&next, 40), MIXP_OK);
    what = all_of(&next);
    CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_OK);
    CHECK_INT(mixp_site(next.ctx, 0, &site), 0);
    CHECK_INT(chain_step(&next, 40), MIXP_OK);
    remove(path);
    mixp_context_free(c.ctx);
    mixp_context_free(next.ctx);
}

/* Bytes of the file that c saves after a few steps. */
static long saved_bytes(chain *c) {
    char path[64];
    mixp_checkpoint what = all_of(c);
    FILE *f;
    snprintf(path, sizeof path, "guard_memory_%ld.safetensors", (long)getpid());
    CHECK_INT(chain_step(c, 40), MIXP_OK);
    CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
    f = fopen(path, "rb");
    CHECK(f && !fseek(f, 0, SEEK_END));
    long bytes = f ? ftell(f) : 0;
    if (f) fclose(f);
    remove(path);
    return bytes;
}

/* Without a guard, a file has no state of one, whoever observes. */
static void files_of_observers(void) {
    chain plain = chain_open(NULL, 0), seen = chain_open(NULL, 0), guarded = chain_open(NULL, 1);
    const long bytes = saved_bytes(&plain);
    seen.counts = mixp_exponents_new(seen.ctx);
    CHECK(seen.counts != NULL);
    CHECK_INT(saved_bytes(&seen), bytes);
    CHECK(saved_bytes(&guarded) > bytes);
    chain_close(&seen);
    mixp_context_free(plain.ctx);
    mixp_context_free(guarded.ctx);
}

/* A file with more sites than max_sites is refused, and changes nothing. */
static void files_with_too_many_sites(void) {
    char path[64];
    mixp_guard_desc guard = every_step();
    chain c = chain_open(&guard, 1), next;
    mixp_checkpoint what = all_of(&c);
    mixp_site_info site;
    const char *why;
    float w[VALUES];
    snprintf(path, sizeof path, "guard_memory_%ld.safetensors", (long)getpid());
    CHECK_INT(chain_step(&c, 40), MIXP_OK);
    CHECK_INT(mixp_checkpoint_save(path, &what), MIXP_OK);
    guard.max_sites = 40;
    next = chain_open(&guard, 1);
    mixp_fill(next.w, 3.0);
    CHECK_INT(chain_step(&next, 5), MIXP_OK);
    what = all_of(&next);
    CHECK_INT(mixp_checkpoint_load(path, &what), MIXP_ERR_SHAPE);
    mixp_context_error(next.ctx, &why);
    CHECK_TEXT(why, "41 sites");
    CHECK_TEXT(why, "max_sites is 40");
    mixp_context_clear_error(next.ctx);
    mixp_read(next.w, w, MIXP_F32, VALUES);
    CHECK_NEAR(w[0], 3.0, 0);
    CHECK_INT(mixp_site(next.ctx, 5, &site), 1);
    remove(path);
    mixp_context_free(c.ctx);
    mixp_context_free(next.ctx);
}

int main(void) {
    RUN(memory_follows_the_sites);
    RUN(rows_survive_their_growth);
    RUN(refused_memory);
    RUN(events_survive_their_growth);
    RUN(files_have_the_rows_of_their_sites);
    RUN(files_without_sites);
    RUN(files_of_observers);
    RUN(files_with_too_many_sites);
    return test_report();
}
