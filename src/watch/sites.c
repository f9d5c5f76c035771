#pragma once
#include "traits.c"
#include "guard.c"
/* --- sites ----------------------------------------------------------------------------- *
 *
 * A site is identified by a hash of its operator, its scope and its inputs: a parameter by its id,
 * an activation by the hash of the site that made it, data by 0. A buffer is data: a recurrent net
 * that carries its state in training, and begins with zeros in an evaluation, has the same sites in
 * both. Several sites on the same tensors (three slices of one qkv) are distinguished by their
 * order. The same operator on other tensors is another pass through the same site. Casts, reshapes
 * and dropout are ignored: a fallback adds and removes casts, and an evaluation, which has no
 * dropout, must have the sites of training.
 */
static uint64_t mixpi_mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9E3779B97F4A7C15u;
    return h ^ (h >> 29);
}

static uint64_t mixpi_mix_text(uint64_t h, const char *text, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ (unsigned char)text[i]) * 0x100000001B3u; /* FNV-1a */
    return h;
}

/* Site `number`, 1 to the sites that have memory. */
static mixpi_site *mixpi_site_number(const mixpi_watch *w, int number) {
    return &w->sites[(number - 1) / MIXPI_SITE_CHUNK][(number - 1) % MIXPI_SITE_CHUNK];
}

static mixpi_site *mixpi_site_at(const mixp_context *ctx, int number) {
    return number ? mixpi_site_number(ctx->watch, number) : NULL;
}

/* The tensor of which t is a cast, a reshape or a dropout; otherwise t itself. */
static mixp_tensor *mixpi_seen_as(mixp_tensor *t) {
    return t && t->own.watch.seen ? t->own.watch.seen : t;
}

/* The parameter or view behind t; NULL: t belongs to this step, or is a buffer. */
static mixp_tensor *mixpi_site_weight(mixp_tensor *t) {
    mixp_tensor *lasting = mixpi_lasting(t);
    return lasting && !mixpi_backup_of(lasting) ? lasting : NULL;
}

static uint64_t mixpi_identity(const mixp_context *ctx, mixp_tensor *t) {
    if (!t) return 1;
    t = mixpi_seen_as(t);
    const mixp_tensor *weight = mixpi_site_weight(t);
    if (weight) return mixpi_mix(2, (uint64_t)weight->own.id);
    return t->own.watch.site ? mixpi_site_at(ctx, t->own.watch.site)->hash : 0;
}

/* One application of an operator: the parts that identify its site. */
typedef struct mixpi_visit {
    const mixp_op *op;
    int            n_in;
    mixp_tensor  **in;
    uint64_t       hash, tensors;   /* hash of the kind of site; hash of the tensors */
    uint64_t       weights;     /* hash of the operator and its trained parameters; 0: none */
    int            lasting;     /* 1: all inputs are weights: addresses distinguish nothing */
    int            reader;      /* of autocast's cast of a tensor that no site made: the site that
                                   reads the cast; otherwise 0 */
} mixpi_visit;

/* Enters the reader of a cast: two casts of data are one site only if the same input of the same
 * site reads them. */
static void mixpi_visit_read(const mixp_context *ctx, mixpi_visit *v) {
    const mixpi_watch *w = ctx->watch;
    if (!w->reader || !mixpi_is_cast(v->op) || mixpi_seen_as(v->in[0])->own.watch.site) return;
    v->reader = w->reader;
    if (v->lasting) return;
    v->hash = mixpi_mix(v->hash, mixpi_site_at(ctx, v->reader)->hash);
    v->hash = mixpi_mix(v->hash, (uint64_t)w->input);
}

static mixpi_visit mixpi_visit_of(
    const mixp_context *ctx, const mixp_op *op, int n_in, mixp_tensor **in) {
    mixpi_visit v = { op, n_in, in, 0, 0, 0, 1, 0 };
    int length;
    const char *scope = mixpi_scope_now(ctx, &length);
    v.hash = mixpi_mix_text(0xCBF29CE484222325u, op->name, strlen(op->name));

    uint64_t weights = v.hash;
    v.hash = mixpi_mix_text(mixpi_mix(v.hash, 3), scope, (size_t)length);

    /* Find what it reads. */
    for (int i = 0; i < n_in; i++) {
        const mixp_tensor *weight = mixpi_site_weight(in[i]);
        v.hash = mixpi_mix(v.hash, mixpi_identity(ctx, in[i]));
        v.tensors = mixpi_mix(v.tensors, (uint64_t)(uintptr_t)mixpi_seen_as(in[i]));
        if (in[i] && !weight) v.lasting = 0;
        if (!weight || !weight->requires_grad) continue;
        weights = mixpi_mix(weights, (uint64_t)weight->own.id);
        v.weights = weights | 1u;
    }

    mixpi_visit_read(ctx, &v);
    return v;
}

/* The number of the first site in the bucket of a hash. The lowest bit of a hash is always 1. */
static int *mixpi_site_bucket(const mixpi_watch *w, uint64_t hash) {
    return &mixpi_site_number(w, 1 + (int)(hash >> 1 & (uint64_t)(w->n_buckets - 1)))->first;
}

static int mixpi_site_find(const mixpi_watch *w, uint64_t hash) {
    int n = w->room ? *mixpi_site_bucket(w, hash) : 0;
    while (n && mixpi_site_number(w, n)->hash != hash) n = mixpi_site_number(w, n)->next;
    return n;
}

/* Puts site `number` in its bucket. */
static void mixpi_site_link(mixpi_watch *w, int number) {
    mixpi_site *site = mixpi_site_number(w, number);
    int *bucket = mixpi_site_bucket(w, site->hash);
    site->next = *bucket;
    *bucket = number;
}

/* Doubles the buckets as often as there are records for them. */
static void mixpi_sites_link(mixpi_watch *w) {
    int buckets = MIXPI_SITE_CHUNK, n;
    while (buckets <= w->room / 2) buckets *= 2;
    if (buckets == w->n_buckets) return;
    w->n_buckets = buckets;
    for (n = 1; n <= w->room; n++) mixpi_site_number(w, n)->first = 0;
    for (n = 1; n <= w->n_sites; n++) mixpi_site_link(w, n);
}

/* Makes room for n sites. Sites that exist keep their addresses. */
static mixp_result mixpi_sites_reach(mixp_context *ctx, int n) {
    mixpi_watch *w = ctx->watch;
    mixpi_site *chunk;
    while (w->room < n) {
        chunk = (mixpi_site *)mixpi_host_alloc(ctx, MIXPI_SITE_CHUNK * sizeof *chunk);
        if (!chunk) return MIXP_ERR_MEMORY;
        w->sites[w->room / MIXPI_SITE_CHUNK] = chunk;
        w->room += MIXPI_SITE_CHUNK;
        mixpi_sites_link(w);
    }
    return MIXP_OK;
}

/* Returns the number of the visited site, or 0 for a new site. *hash: the site's hash. */
static int mixpi_visited_site(const mixpi_watch *w, const mixpi_visit *v, uint64_t *hash) {
    for (uint64_t sibling = 0;; sibling++) {
        *hash = mixpi_mix(v->hash, sibling) | 1u;
        int n = mixpi_site_find(w, *hash);
        if (!n) return 0;
        const mixpi_site *site = mixpi_site_number(w, n);
        if (site->pass != w->pass) return n;
        if (site->tensors != v->tensors && !v->lasting) return n;
    }
}

/* The name of a site's parameter: of the first parameter that has a name. A cast is named after any
 * parameter or view. */
static const char *mixpi_visit_param(const mixpi_visit *v) {
    for (int i = 0; i < v->n_in; i++) {
        const mixp_tensor *t = mixpi_site_weight(v->in[i]);
        if (t && (t->requires_grad || mixpi_is_cast(v->op)) && *t->name) return t->name;
    }
    return "";
}

/* Writes the part of the name before the colon, "h.3.w", to text[MIXPI_SITE_NAME]. from: the
 * reader of a cast, or the site after which a site without a parameter and a scope is named; 0 =
 * none. */
static void mixpi_site_stem(const mixp_context *ctx, const mixpi_visit *v, int from, char *text) {
    int length;
    const char *scope = mixpi_scope_now(ctx, &length), *param = mixpi_visit_param(v);
    const char *producer = from ? mixpi_site_at(ctx, from)->name : "", *colon;
    int room = length > 40 ? 40 : length;
    *text = '\0';
    if (*param && length && strncmp(param, scope, (size_t)length) != 0)
        snprintf(text, MIXPI_SITE_NAME, "%.*s.%.40s", room, scope, param);
    else if (*param) snprintf(text, MIXPI_SITE_NAME, "%.60s", param);
    else if (length && !v->reader) snprintf(text, MIXPI_SITE_NAME, "%.*s", room, scope);
    else if ((colon = strstr(producer, ": ")) != NULL)
        snprintf(text, MIXPI_SITE_NAME, "%.*s", (int)(colon - producer), producer);
}

/* Writes the name of a visit's site to text[MIXPI_SITE_NAME], without its number. */
static void mixpi_visit_name(const mixp_context *ctx, const mixpi_visit *v, int from, char *text) {
    const char *of = ctx->tape.tangent_of, *param = mixpi_visit_param(v);
    const int reader = *param ? 0 : v->reader;
    char stem[MIXPI_SITE_NAME];
    mixpi_site_stem(ctx, v, reader ? reader : from, stem);
    const char *colon = *stem ? ": " : "";
    if (of) snprintf(text, MIXPI_SITE_NAME, "%.53s%stangent of %.20s", stem, colon, of);
    else if (reader)
        snprintf(text, MIXPI_SITE_NAME, "%.40s%scast of input %d of %.20s", stem, colon,
            ctx->watch->input, mixpi_site_at(ctx, reader)->op);
    else snprintf(text, MIXPI_SITE_NAME, "%.64s%s%.20s", stem, colon, v->op->name);
}

/* Makes a unique name for a new site. */
MIXPI_SELDOM
static void mixpi_site_name(const mixp_context *ctx, const mixpi_visit *v, int number) {
    mixpi_site *site = mixpi_site_at(ctx, number);
    char name[MIXPI_SITE_NAME];
    int i, same = 0;
    mixpi_visit_name(ctx, v, site->from[0], name);
    size_t n = strlen(name);
    for (i = 1; i <= ctx->watch->n_sites; i++) {
        const char *other = mixpi_site_at(ctx, i)->name;
        same += strncmp(other, name, n) == 0 && (!other[n] || strncmp(other + n, " #", 2) == 0);
    }
    snprintf(site->name, sizeof site->name, same ? "%.86s #%d" : "%.86s", name, same + 1);
}

/* Sets the inputs of a site: the sites behind its inputs, and its weights. */
static void mixpi_site_reads(mixpi_site *site, const mixpi_visit *v) {
    int i, from = 0, read = 0;
    for (i = 0; i < v->n_in; i++) {
        mixp_tensor *t = v->in[i], *lasting = mixpi_lasting(t);
        if (lasting && read < 2) site->read[read++] = lasting;
        if (!t || !t->own.watch.site || from == MIXPI_SITE_FROM) continue;
        site->from[from++] = t->own.watch.site;
    }
}

/* Enters a new site in the table. Returns its number; 0 if the table is full, or, with the error
 * set, if memory is. */
MIXPI_SELDOM
static int mixpi_site_new(mixp_context *ctx, uint64_t hash) {
    mixpi_watch *w = ctx->watch;
    if (w->n_sites >= w->capacity) {
        w->full = 1;
        return 0;
    }
    if (mixpi_sites_reach(ctx, w->n_sites + 1) != MIXP_OK) return 0;
    mixpi_site_number(w, ++w->n_sites)->hash = hash;
    mixpi_site_link(w, w->n_sites);
    return w->n_sites;
}

/* The site of a visit; a new site is entered in the table with its name and its pin. */
static int mixpi_site_of(mixp_context *ctx, const mixpi_visit *v) {
    uint64_t hash;
    int number = mixpi_visited_site(ctx->watch, v, &hash);
    if (!number) number = mixpi_site_new(ctx, hash);
    if (!number) return 0;
    mixpi_site *site = mixpi_site_at(ctx, number);
    if (site->op) return number;
    site->op = v->op->name; /* first visit, or the first since a checkpoint was loaded */
    site->traits = mixpi_traits_of(v->op);
    site->weights = v->weights;
    mixpi_site_reads(site, v);
    mixpi_site_name(ctx, v, number);
    mixpi_site_pin(ctx->watch, site);
    return number;
}

/* The site of an application, marked as visited in this pass; 0 without guard and observer. */
static int mixpi_site_enter(mixp_context *ctx, const mixp_op *op, int n_in, mixp_tensor **in) {
    if (!mixpi_guard_is_on(ctx) && !ctx->watch->observer.see) return 0;
    mixpi_visit v = mixpi_visit_of(ctx, op, n_in, in);
    int number = mixpi_site_of(ctx, &v);
    ctx->watch->reader = 0;
    if (!number) return 0;
    mixpi_site *site = mixpi_site_at(ctx, number);
    site->tensors = v.tensors;
    site->pass = ctx->watch->pass;
    site->reader = v.reader;
    return number;
}

/* The site that a cast of x would have. visit 1: counts it as visited although the cast is left
 * out. */
static int mixpi_cast_site(mixp_context *ctx, mixp_tensor *x, int visit) {
    mixpi_visit v = mixpi_visit_of(ctx, &mixpi_cast_op, 1, &x);
    return visit ? mixpi_site_enter(ctx, &mixpi_cast_op, 1, &x) : mixpi_site_of(ctx, &v);
}
