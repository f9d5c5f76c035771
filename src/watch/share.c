#pragma once
#include "../watch.h"
#include "looks.c"
#include "../tensors/crew.c"
/* --- what all ranks saw ------------------------------------------------------------------ *
 *
 * A look on any rank counts on all ranks, so that their sites stay the same. Ranks need not have
 * met the same sites: rank 0 may evaluate on its own, and a rank may leave an operator out. The
 * ranks therefore first share the number of their sites and a hash of them. If these differ, the
 * ranks share all hashes, and each rank enters the sites that it lacks. Finally all ranks add the
 * rows of the same sites, in the order of their hashes. Waits for the device, in a sampled update
 * with several ranks.
 */

/* The head, the first words that a rank shares. */
enum {
    MIXPI_HEAD_SITES, MIXPI_HEAD_HASH,
    MIXPI_HEAD_ORIGIN,                      /* where its skip began: a mixp_origin */
    MIXPI_HEAD_AT_HIGH, MIXPI_HEAD_AT_LOW,  /* hash of that site, in halves */
    MIXPI_HEAD_WORDS
};

/* Converts a look to numbers that ranks can add, and back. */
enum { MIXPI_LOOK_WORDS = 8 };
static void mixpi_look_to_words(const mixp_look *look, double *words) {
    words[0] = (double)look->largest;
    words[1] = (double)look->count;
    words[2] = (double)look->nonfinite;
    words[3] = (double)look->zeros;
    words[4] = (double)look->flushed;
    words[5] = (double)look->least;
    words[6] = (double)look->subnormal;
    words[7] = (double)look->saturated;
}
static void mixpi_look_join_words(mixp_look *look, const double *words) {
    if ((float)words[0] > look->largest) look->largest = (float)words[0];
    look->count += mixpi_whole_of(words[1]);
    look->nonfinite += mixpi_whole_of(words[2]);
    look->zeros += mixpi_whole_of(words[3]);
    look->flushed += mixpi_whole_of(words[4]);
    look->least += mixpi_whole_of(words[5]);
    look->subnormal += mixpi_whole_of(words[6]);
    look->saturated += mixpi_whole_of(words[7]);
}

/* Bits that a sample sets in the verdict of a site. */
enum {
    MIXPI_SAW_OVERFLOW = 1,     /* the site made non-finite values from finite ones */
    MIXPI_SAW_NO_VALUE = 2,     /* all values that the site stores were flushed to zero */
    MIXPI_SAW_NO_GRAD = 4,      /* the whole gradient was flushed to zero */
    MIXPI_SAW_RAISED = 8,       /* inputs make the site store f32 */
    MIXPI_SAW_INSPECTED = 16,   /* the site's precision was measured */
    MIXPI_SAW_ROUGH = 32,       /* rounding loses more than half of the allowed share */
    MIXPI_SAW_IMPRECISE = 64,   /* rounding loses more than the allowed share */
    MIXPI_SAW_GRAD = 128        /* the gradient was seen, or cannot be seen: see mixpi_saw_grad */
};

/* Words of a site: its looks, its verdict, the share that rounding lost, and its dtypes as 0
 * (unknown) or 1 + low + 32 dtype. */
enum {
    MIXPI_SITE_VERDICT = (int)MIXPI_LOOKS * (int)MIXPI_LOOK_WORDS,
    MIXPI_SITE_LOST,
    MIXPI_SITE_STORES,
    MIXPI_SITE_OPERANDS,                    /* of each: 1 if measured, error, clipped, excess */
    MIXPI_SITE_WORDS = MIXPI_SITE_OPERANDS + 4 * (int)MIXPI_ROLES
};

static void mixpi_site_to_words(const mixpi_watch *w, int number, double *words) {
    const mixpi_site *site = mixpi_site_number(w, number);
    const mixp_look *looks = &w->seen[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS];
    for (int i = 0; i < MIXPI_LOOKS; i++)
        mixpi_look_to_words(&looks[i], words + i * MIXPI_LOOK_WORDS);
    words[MIXPI_SITE_VERDICT] = (double)site->verdict;
    words[MIXPI_SITE_LOST] = site->lost;

    /* Of a linear: what its operands have lost. */
    for (int i = 0; i < MIXPI_ROLES; i++) {
        const mixpi_lossy *o = &site->operands[i];
        double *operand = words + (int)MIXPI_SITE_OPERANDS + 4 * i;
        operand[0] = (double)o->seen;
        operand[1] = o->error;
        operand[2] = o->clipped;
        operand[3] = o->excess;
    }
    if (!site->op) return;
    words[MIXPI_SITE_STORES] = 1.0 + (double)site->low + 32.0 * (double)site->dtype;
}

static void mixpi_site_join_words(mixpi_watch *w, int number, const double *words) {
    mixpi_site *site = mixpi_site_number(w, number);
    mixp_look *looks = &w->seen[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS];
    const int stores = (int)(mixpi_whole_of(words[MIXPI_SITE_STORES]) - 1);
    for (int i = 0; i < MIXPI_LOOKS; i++)
        mixpi_look_join_words(&looks[i], words + i * MIXPI_LOOK_WORDS);
    site->verdict |= (int)mixpi_whole_of(words[MIXPI_SITE_VERDICT]);
    if (words[MIXPI_SITE_LOST] > site->lost) site->lost = words[MIXPI_SITE_LOST];

    /* Of a linear: the most that an operand has lost on any rank. */
    for (int i = 0; i < MIXPI_ROLES; i++) {
        mixpi_lossy *o = &site->operands[i];
        const double *operand = words + (int)MIXPI_SITE_OPERANDS + 4 * i;
        o->seen |= operand[0] > 0.0;
        o->error = fmax(o->error, operand[1]);
        o->clipped = fmax(o->clipped, operand[2]);
        o->excess = fmax(o->excess, operand[3]);
    }
    if (site->op || stores < 0) return;
    site->low = (mixp_dtype)(stores % 32);
    site->dtype = (mixp_dtype)(stores / 32);
}

/* Allocates a zeroed table for all ranks. Returns NULL with the error set. */
static double *mixpi_table_take(mixp_context *ctx, int64_t words) {
    const size_t bytes = (size_t)(mixpi_world(ctx) * (uint64_t)words) * sizeof(double);
    double *table = (double *)mixpi_host_take(ctx, bytes);
    if (table) memset(table, 0, bytes);
    else mixpi_out_of_memory(ctx, bytes);
    return table;
}

static uint64_t mixpi_hash_of_words(const double *halves) {
    return (uint64_t)mixpi_whole_of(halves[0]) << 32 | (uint64_t)mixpi_whole_of(halves[1]);
}
static void mixpi_hash_to_words(uint64_t hash, double *halves) {
    halves[0] = (double)(hash >> 32);
    halves[1] = (double)(hash & 0xFFFFFFFFu);
}

/* --- the heads --- */

typedef struct mixpi_all_heads {
    int         alike;          /* 1: all ranks have the same sites */
    int64_t     most;           /* sites of the rank that has most */
    mixp_origin origin;         /* an origin in a forward pass wins, then the lowest rank's */
    uint64_t    at;             /* hash of the origin's site, or 0 */
} mixpi_all_heads;

static void mixpi_head_fill(const mixpi_watch *w, mixp_origin origin, int at, double *head) {
    uint64_t hash = 0;
    for (int n = 1; n <= w->n_sites; n++) hash += mixpi_mix(mixpi_site_number(w, n)->hash, 5);
    head[MIXPI_HEAD_SITES] = (double)w->n_sites;
    head[MIXPI_HEAD_HASH] = (double)(hash >> 11);
    head[MIXPI_HEAD_ORIGIN] = (double)origin;
    if (at) mixpi_hash_to_words(mixpi_site_number(w, at)->hash, head + MIXPI_HEAD_AT_HIGH);
}

static int mixpi_began_forward(mixp_origin origin) {
    return origin != MIXP_ORIGIN_UNKNOWN && origin != MIXP_ORIGIN_BACKWARD &&
           origin != MIXP_ORIGIN_UNSCALE;
}

static mixpi_all_heads mixpi_heads_read(const double *table, int size) {
    mixpi_all_heads h = { 1, 0, MIXP_ORIGIN_UNKNOWN, 0 };
    for (int r = 0; r < size; r++) {
        const double *head = table + r * MIXPI_HEAD_WORDS;
        const mixp_origin origin = (mixp_origin)(int)mixpi_whole_of(head[MIXPI_HEAD_ORIGIN]);
        const int64_t sites = mixpi_min(mixpi_whole_of(head[MIXPI_HEAD_SITES]), 1 << 24);
        int better = origin != MIXP_ORIGIN_UNKNOWN && h.origin == MIXP_ORIGIN_UNKNOWN;
        better |= mixpi_began_forward(origin) && !mixpi_began_forward(h.origin);
        if (memcmp(head, table, 2 * sizeof *head)) h.alike = 0;
        if (sites > h.most) h.most = sites;
        if (better) h.origin = origin;
        if (better) h.at = mixpi_hash_of_words(head + MIXPI_HEAD_AT_HIGH);
    }
    return h;
}

static mixp_result mixpi_share_heads(
    mixp_context *ctx, mixp_origin origin, int at, mixpi_all_heads *h) {
    double *table = mixpi_table_take(ctx, MIXPI_HEAD_WORDS);
    if (!table) return MIXP_ERR_MEMORY;
    mixpi_head_fill(ctx->watch, origin, at, table + mixpi_place(ctx) * MIXPI_HEAD_WORDS);
    mixp_result r = mixpi_crew_share(ctx, table, MIXPI_HEAD_WORDS);
    if (r == MIXP_OK) *h = mixpi_heads_read(table, (int)mixpi_world(ctx));
    mixpi_host_free(ctx, table);
    return r;
}

/* --- the sites --- */

static int mixpi_hash_order(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts the list and removes duplicates and zeros. Returns the number of hashes left. */
static int64_t mixpi_hashes_sort(uint64_t *list, int64_t n) {
    int64_t i, left = 0;
    qsort(list, (size_t)n, sizeof *list, mixpi_hash_order);
    for (i = 0; i < n; i++)
        if (list[i] && (!left || list[i] != list[left - 1])) list[left++] = list[i];
    return left;
}

/* Collects the hashes of all ranks in list, which has room for `most` hashes of each rank. */
static mixp_result mixpi_share_hashes(mixp_context *ctx, int64_t most, uint64_t *list) {
    const mixpi_watch *w = ctx->watch;
    const int64_t all = (int64_t)mixpi_world(ctx) * most;
    double *table = mixpi_table_take(ctx, 2 * most), *own;
    if (!table) return MIXP_ERR_MEMORY;
    own = table + mixpi_place(ctx) * 2 * most;
    for (int64_t i = 0; i < w->n_sites; i++)
        mixpi_hash_to_words(mixpi_site_number(w, (int)i + 1)->hash, own + 2 * i);
    mixp_result r = mixpi_crew_share(ctx, table, 2 * most);
    for (int64_t i = 0; i < all; i++) list[i] = mixpi_hash_of_words(table + 2 * i);
    mixpi_host_free(ctx, table);
    return r;
}

/* Enters the sites that other ranks have met. Their names are set when this rank meets them. */
static mixp_result mixpi_sites_enter(mixp_context *ctx, const uint64_t *list, int64_t n) {
    mixpi_watch *w = ctx->watch;
    mixp_result r = MIXP_OK;
    for (int64_t i = 0; i < n && r == MIXP_OK; i++) {
        const int number = mixpi_site_find(w, list[i]) ? 0 : mixpi_site_new(ctx, list[i]);
        if (!number) continue;
        r = mixpi_rows_reach(ctx, number);
        if (r == MIXP_OK)
            memset(&w->seen[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS], 0,
                MIXPI_LOOKS * sizeof *w->seen);
    }
    return r;
}

/* Lists the sites of all ranks, in the same order on each rank. The caller releases *list. */
static mixp_result mixpi_share_sites(
    mixp_context *ctx, const mixpi_all_heads *h, uint64_t **list, int64_t *n) {
    const mixpi_watch *w = ctx->watch;
    const int64_t room = h->alike ? h->most : (int64_t)mixpi_world(ctx) * h->most;
    const size_t bytes = (size_t)(room + 1) * sizeof **list;
    *list = (uint64_t *)mixpi_host_take(ctx, bytes);
    if (!*list) return mixpi_out_of_memory(ctx, bytes);
    for (*n = 0; h->alike && *n < room; ++*n) (*list)[*n] = mixpi_site_number(w, (int)*n + 1)->hash;
    if (!h->alike) MIXPI_TRY(mixpi_share_hashes(ctx, h->most, *list));
    *n = mixpi_hashes_sort(*list, room);
    return h->alike ? MIXP_OK : mixpi_sites_enter(ctx, *list, *n);
}

/* --- the rows --- */

/* Words of a table that is shared at once, so that its memory does not grow with the ranks. A table
 * has at least one site of each rank. */
enum {
    MIXPI_SHARED_WORDS = 1 << 16,
    MIXPI_SHARED_LOOKS = 2,     /* at all gradients in f32, and at all low gradients */
    MIXPI_SHARED_LOOK_WORDS = MIXPI_SHARED_LOOKS * (int)MIXPI_LOOK_WORDS
};

/* The sites [first, end) of a list, and for first 0 the looks at all gradients before them. */
typedef struct mixpi_share {
    const uint64_t *list;
    int64_t first, end;
} mixpi_share;

static int64_t mixpi_share_words(const mixpi_share *s) {
    const int64_t looks = s->first ? 0 : MIXPI_SHARED_LOOK_WORDS;
    return looks + (s->end - s->first) * MIXPI_SITE_WORDS;
}

/* Sites that one table holds: all of them if there are few ranks. */
static int64_t mixpi_share_most(const mixp_context *ctx) {
    const int64_t row = MIXPI_SHARED_WORDS / (int64_t)mixpi_world(ctx) - MIXPI_SHARED_LOOK_WORDS;
    return row < MIXPI_SITE_WORDS ? 1 : row / MIXPI_SITE_WORDS;
}

/* Fills this rank's row with what it has seen. */
static void mixpi_share_fill(const mixpi_watch *w, const mixpi_share *s, double *row) {
    if (!s->first) mixpi_look_to_words(&w->seen[MIXPI_ROW_WIDE], row);
    if (!s->first) mixpi_look_to_words(&w->seen[MIXPI_ROW_NARROW], row + MIXPI_LOOK_WORDS);
    row += s->first ? 0 : MIXPI_SHARED_LOOK_WORDS;
    for (int64_t i = s->first; i < s->end; i++, row += MIXPI_SITE_WORDS) {
        const int number = mixpi_site_find(w, s->list[i]);
        if (number) mixpi_site_to_words(w, number, row);
    }
}

/* Adds one rank's row for the sites that this rank has. */
static void mixpi_share_join(mixpi_watch *w, const mixpi_share *s, const double *row) {
    if (!s->first) mixpi_look_join_words(&w->seen[MIXPI_ROW_WIDE], row);
    if (!s->first) mixpi_look_join_words(&w->seen[MIXPI_ROW_NARROW], row + MIXPI_LOOK_WORDS);
    row += s->first ? 0 : MIXPI_SHARED_LOOK_WORDS;
    for (int64_t i = s->first; i < s->end; i++, row += MIXPI_SITE_WORDS) {
        const int number = mixpi_site_find(w, s->list[i]);
        if (number) mixpi_site_join_words(w, number, row);
    }
}

/* Forgets what this rank has seen of the sites: all rows are about to be added. */
static void mixpi_share_clear(mixpi_watch *w, const mixpi_share *s) {
    if (!s->first) memset(w->seen, 0, MIXPI_ROW_SITES * sizeof *w->seen);
    for (int64_t i = s->first; i < s->end; i++) {
        const int number = mixpi_site_find(w, s->list[i]);
        if (number)
            memset(&w->seen[MIXPI_ROW_SITES + (number - 1) * MIXPI_LOOKS], 0,
                MIXPI_LOOKS * sizeof *w->seen);
    }
}

/* Shares some sites by `table`, which has a row for each rank. */
static mixp_result mixpi_share_some(mixp_context *ctx, const mixpi_share *s, double *table) {
    const int64_t words = mixpi_share_words(s), world = (int64_t)mixpi_world(ctx);
    memset(table, 0, (size_t)(world * words) * sizeof *table);
    mixpi_share_fill(ctx->watch, s, table + mixpi_place(ctx) * words);
    mixp_result result = mixpi_crew_share(ctx, table, words);
    if (result != MIXP_OK) return result;
    mixpi_share_clear(ctx->watch, s);
    for (int64_t r = 0; r < world; r++) mixpi_share_join(ctx->watch, s, table + r * words);
    return MIXP_OK;
}

/* Shares what all ranks have seen of the sites in the list. */
static mixp_result mixpi_share_rows(mixp_context *ctx, const uint64_t *list, int64_t n) {
    const int64_t most = mixpi_share_most(ctx);
    mixpi_share s = { list, 0, n < most ? n : most };
    double *table = mixpi_table_take(ctx, mixpi_share_words(&s));
    if (!table) return MIXP_ERR_MEMORY;
    mixp_result r = mixpi_share_some(ctx, &s, table);
    while (r == MIXP_OK && s.end < n) {
        s.first = s.end;
        s.end = n - s.first < most ? n : s.first + most;
        r = mixpi_share_some(ctx, &s, table);
    }
    mixpi_host_free(ctx, table);
    return r;
}

/* Combines the looks of all ranks in w->seen and in the verdicts of the sites. origin,
 * at: on entry this rank's finding of where a skip began; on return that of all ranks. */
static mixp_result mixpi_seen_share(mixp_context *ctx, mixp_origin *origin, int *at) {
    uint64_t *list = NULL;
    mixpi_all_heads h;
    int64_t n = 0;
    if (mixpi_world(ctx) == 1) return MIXP_OK;
    memset(&h, 0, sizeof h); /* share_heads writes all of it, which gcc does not see */
    mixp_result r = mixpi_share_heads(ctx, *origin, *at, &h);
    if (r == MIXP_OK) r = mixpi_share_sites(ctx, &h, &list, &n);
    if (r == MIXP_OK) r = mixpi_share_rows(ctx, list, n);
    if (list) mixpi_host_free(ctx, list);
    if (r != MIXP_OK) return r;
    *origin = h.origin;
    *at = h.at ? mixpi_site_find(ctx->watch, h.at) : 0;
    return MIXP_OK;
}
