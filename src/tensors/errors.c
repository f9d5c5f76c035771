#pragma once
#include "structs.c"
/* --- errors ---------------------------------------------------------------------------- */

/* Replaces control characters in a text, because names come from files and other ranks, and may
 * reach a terminal. The characters U+0080 to U+009F are replaced as well: one of them acts like
 * ESC [. A newline or a tab becomes a space. */
static void mixpi_printable(char *text) {
    for (; *text; text++) {
        const unsigned char *c = (const unsigned char *)text;
        if (c[0] == '\n' || c[0] == '\t') *text = ' ';
        if (c[0] == 0xC2 && c[1] >= 0x80 && c[1] < 0xA0) text[1] = '?';
        if (c[0] < 0x20 || c[0] == 0x7F || (c[0] == 0xC2 && c[1] == '?')) *text = '?';
    }
}

static int mixpi_is_digit(char c) { return c >= '0' && c <= '9'; }

/* Puts '.' between the digits of numbers, where the program's locale has put its own separator. A
 * separator between digits is part of a number: the messages' commas precede spaces. */
static void mixpi_put_points(char *text) {
    char half[16];
    snprintf(half, sizeof half, "%.1f", 0.5);
    size_t n = strlen(half) - 2;
    if (half[1] == '.' || n == 0) return;
    for (; *text; text++) {
        if (!mixpi_is_digit(*text) || strncmp(text + 1, half + 1, n) != 0) continue;
        if (!mixpi_is_digit(text[1 + n])) continue;
        text[1] = '.';
        memmove(text + 2, text + 1 + n, strlen(text + 1 + n) + 1);
    }
}

/* Every message passes here: it holds no control character, and its numbers have a point. */
static void mixpi_readable(char *text) {
    mixpi_printable(text);
    mixpi_put_points(text);
}

static void mixpi_tell(mixp_context *ctx) {
    ctx->errors.waits = 0;
    if (ctx->errors.code != MIXP_OK && ctx->errors.on_error)
        ctx->errors.on_error(ctx->errors.code, ctx->errors.message, ctx->user);
}

/* Keeps the first warning of a context. on_warning gets it when the outermost call returns. */
MIXPI_PRINTF(2, 3)
static void mixpi_warn(mixp_context *ctx, const char *format, ...) {
    va_list args;
    if (*ctx->errors.warning) return;
    va_start(args, format);
    vsnprintf(ctx->errors.warning, sizeof ctx->errors.warning, format, args);
    va_end(args);
    mixpi_readable(ctx->errors.warning);
    ctx->errors.warning_waits = 1;
}

MIXPREC_API const char *mixp_context_warning(const mixp_context *ctx) {
    return ctx ? ctx->errors.warning : "";
}

/* Enters a call that must clean up after an error. on_error and on_warning may throw, so
 * mixpi_leave calls them only when the outermost such call returns. No floating-point exception
 * traps meanwhile. Returns the `before` argument of mixpi_leave. */
static int mixpi_enter(mixp_context *ctx) {
    if (!ctx) return 0;
    if (!ctx->errors.depth) ctx->errors.float_mode = mixpi_float_calm();
    return ctx->errors.depth++;
}

/* r; MIXP_ERR_ARGUMENT for a number outside mixp_result, which your operator or hook returned. */
static mixp_result mixpi_known_result(mixp_result r) {
    return (unsigned)r < MIXP_RESULT_COUNT ? r : MIXP_ERR_ARGUMENT;
}

static mixp_result mixpi_leave(mixp_context *ctx, int before, mixp_result r) {
    if (!ctx) return r;
    r = mixpi_known_result(r);
    ctx->errors.depth = before;
    if (!before) mixpi_float_leave(ctx->errors.float_mode);
    if (!before && ctx->errors.warning_waits) {
        ctx->errors.warning_waits = 0;
        if (ctx->errors.on_warning) ctx->errors.on_warning(ctx->errors.warning, ctx->user);
    }
    if (!before && ctx->errors.waits) mixpi_tell(ctx);
    return r;
}

/* The body of a public function that enters `ctx`, which may be NULL, for one call. */
#define MIXPI_RETURN_INSIDE(ctx, call) \
    do { \
        mixp_context *const mixpi_of = (ctx); \
        const int mixpi_before = mixpi_enter(mixpi_of); \
        return mixpi_leave(mixpi_of, mixpi_before, (call)); \
    } while (0)

MIXPREC_API mixp_result mixp_context_fail(
    mixp_context *ctx, mixp_result code, const char *format, ...) {
    va_list args;
    if (!ctx) return code;
    code = mixpi_known_result(code);
    ctx->errors.failures++;
    if (ctx->errors.code != MIXP_OK) return code;
    ctx->errors.code = code;
    ctx->errors.reported++;
    va_start(args, format);
    vsnprintf(ctx->errors.message, sizeof ctx->errors.message, format, args);
    va_end(args);
    mixpi_readable(ctx->errors.message);
    ctx->errors.waits = 1;
    if (!ctx->errors.depth) mixpi_tell(ctx);
    return code;
}

MIXPREC_API mixp_result mixp_context_error(const mixp_context *ctx, const char **message) {
    if (message) *message = ctx ? ctx->errors.message : "the context is NULL";
    return ctx ? ctx->errors.code : MIXP_ERR_ARGUMENT;
}

MIXPREC_API void mixp_context_clear_error(mixp_context *ctx) {
    if (!ctx) return;
    ctx->errors.code = MIXP_OK;
    ctx->errors.message[0] = '\0';
}

/* The code that a failed call returns. Never MIXP_OK, even if on_error cleared the error. */
static mixp_result mixpi_failed(const mixp_context *ctx) {
    return ctx->errors.code != MIXP_OK ? ctx->errors.code : MIXP_ERR_ARGUMENT;
}

/* Is t a live tensor record? A released gradient has no data. */
static int mixpi_is_tensor(const mixp_tensor *t) {
    return t && t->own.self == t && t->own.of == t->ctx && t->data;
}

/* Is t, a tensor, an activation of an earlier step? */
static int mixpi_is_stale(const mixp_tensor *t) {
    return t->own.generation && t->own.generation != t->ctx->generation;
}

/* Is t a tensor, and not a stale activation? */
static int mixpi_is_live(const mixp_tensor *t) { return mixpi_is_tensor(t) && !mixpi_is_stale(t); }

/* The call that began the current step. */
static const char *mixpi_beginner(const mixp_context *ctx) {
    return ctx->evaluates ? "mixp_eval_begin" : "mixp_step_begin";
}

/* Returns what is wrong with a stale tensor of ctx. */
static const char *mixpi_stale(const mixp_context *ctx, char text[192]) {
    snprintf(text, 192,
        "is from an earlier step, and %s has recycled it: to keep its values, mixp_copy them "
        "into a tensor of mixp_buffer, mixp_param or mixp_view before that",
        mixpi_beginner(ctx));
    return text;
}

/* Was t made in this step, in a block that has freed it since? */
static int mixpi_is_spilled(const mixp_tensor *t) {
    return t && t->own.self == t && t->own.of == t->ctx && !t->data && t->own.spilled &&
           !mixpi_is_stale(t);
}
#define MIXPI_SPILLED                                                                        \
    "was made in a block of mixp_recompute, which has freed it: only the result of the block stays"

/* MIXP_ERR_ARGUMENT if t is not a tensor, MIXP_ERR_ORDER if t is from an earlier step. */
static mixp_result mixpi_check_live(const mixp_tensor *t, const char *who) {
    char stale[192];
    if (mixpi_is_spilled(t))
        return mixp_context_fail(t->ctx, MIXP_ERR_ORDER, "%s: the tensor " MIXPI_SPILLED, who);
    if (!mixpi_is_tensor(t)) return MIXP_ERR_ARGUMENT;
    if (!mixpi_is_stale(t)) return MIXP_OK;
    return mixp_context_fail(
        t->ctx, MIXP_ERR_ORDER, "%s: the tensor %s", who, mixpi_stale(t->ctx, stale));
}

/* Every write to t's memory calls this function. The new version shows readers of t, in any shape,
 * that the values changed. */
static void mixpi_note_write(mixp_tensor *t, const char *who) {
    mixp_tensor *origin = t->own.origin;
    t->version++;
    t->own.writer = who;
    if (!origin) return;
    origin->version++;
    origin->own.writer = who;
}

#if !defined(MIXPREC_NO_RANKS) || !defined(MIXPREC_NO_CHECKPOINT)
/* Notes a write of all of t's values, from a file or another rank. Unlike other writes, it leaves
 * no further digits in a master weight: the next step depends only on these values. */
static void mixpi_note_load(mixp_tensor *t, const char *who) {
    mixpi_note_write(t, who);
    t->own.loaded = t->version;
}
#endif

/* The tensor with whose memory t was made, or of whose values t is a copy in another dtype. */
static mixp_tensor *mixpi_origin(mixp_tensor *t) {
    if (t->own.origin) t = t->own.origin;
    return t->own.master ? t->own.master : t;
}

#if !defined(MIXPREC_NO_WATCH) || !defined(MIXPREC_NO_RECIPES)
/* The permanent tensor behind t, or behind the low copy t; NULL if t belongs to this step. */
static mixp_tensor *mixpi_lasting(mixp_tensor *t) {
    if (t && t->own.master) t = t->own.master;
    return t && !t->own.generation ? t : NULL;
}
#endif

/* --- functions of the program: operators' and hooks' ---------------------------------------- *
 *
 * Operators and hooks of the program must not begin a step. A C++ exception may leave one of them,
 * and frames of C cannot catch it: the next mixp_step_begin cleans up. mixp_step_begin detects the
 * exception if its own frame lies further up the stack than the frame that was left, or if it is
 * called a second time.
 */
#if MIXPI_GNU && !defined(__wasm__)
#  define MIXPI_FRAME(here) ((void)(here), (uintptr_t)__builtin_frame_address(0))
#  define MIXPI_APART __attribute__((__noinline__))
#else
#  define MIXPI_FRAME(here) ((uintptr_t)(here))
#  define MIXPI_APART
#endif

/* Returns the `before` argument of mixpi_inside_end. */
static int mixpi_inside_begin(mixp_context *ctx, uintptr_t frame) {
    if (!ctx->tape.inside) ctx->tape.frame = frame;
    return ctx->tape.inside++;
}

static void mixpi_inside_end(mixp_context *ctx, int before) {
    ctx->tape.inside = before;
    if (!before) ctx->tape.refused = 0;
}

/* Has an exception left the operators and hooks, as far as a call from this frame can know? */
static int mixpi_inside_was_left(const mixp_context *ctx, uintptr_t frame) {
    return ctx->tape.inside && (frame >= ctx->tape.frame || ctx->tape.refused);
}
