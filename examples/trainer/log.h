/* log.h - the log of a run, and its warnings: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_LOG_H
#define TRAINER_LOG_H

#include "run.h"

static double known(double value) { return value == ABSENT ? REPORT_NONE : value; }

/* Model FLOPs utilization of steps that take `seconds` each; ABSENT where the peak is unknown. */
static double utilization(const run *r, double seconds) {
    if (r->peak_flops == 0 || !(seconds > 0)) return ABSENT;
    return r->step_tokens / seconds * r->token_flops / r->peak_flops;
}

static void write_metrics(run *r, double loss, double val, const mixp_verdict *v, double ms) {
    struct timespec now;
    report_point p = report_nothing((double)r->step);
    if (!r->metrics) return;
    p.loss = known(loss);
    p.val = known(val);
    p.norm = known(v->grad_norm);
    p.clip = v->outcome == MIXP_STEP_APPLIED ? (double)v->clip : REPORT_NONE;
    p.lr = v->lr;
    p.scale = (double)v->scale;
    p.skipped = (double)v->skipped;
    p.train = known(r->train_loss);
    p.tokens = r->tokens;
    p.ms = ms;
    p.mfu = known(utilization(r, 1e-3 * ms));
    p.seconds = r->seconds_before + seconds_now() - r->began;
    if (clock_gettime(CLOCK_REALTIME, &now) == 0) p.time = (double)now.tv_sec;
    p.mem = (double)mixp_context_memory(r->ctx).peak;
    report_step(r->metrics, &p);
    if (!r->metrics->failed) return;
    tell("cannot write metrics.jsonl: %s. Training continues without it", strerror(errno));
    report_close(r->metrics);
    r->metrics = NULL;
}

/* The interval, in steps, that samples the gradients about a hundred times in a run. */
static int64_t watch_every(int64_t steps, int64_t log_every) {
    int64_t rows = steps / log_every;
    return log_every * (rows > 100 ? rows / 100 : 1);
}

/* Warns that the run no longer learns: once, and again only after a recovery. */
static void look_for_divergence(run *r, const mixp_verdict *v, double loss) {
    enum { MANY = 20 };                 /* skips in a row; a scale that is far too high causes fewer */
    char what[48] = "the loss is nan", where[160] = "";
    if (v->applied != r->applied) { r->streak = v->step; r->warned = 0; }
    r->applied = v->applied;
    if (r->guarded) loss = 0;           /* a nan loss may be the last one       */
    if (r->warned || (!isnan(loss) && v->step - r->streak < MANY)) return;
    r->warned = 1;
    if (!isnan(loss))
        snprintf(what, sizeof what, "the last %d steps were skipped", (int)(v->step - r->streak));
    if (v->bad_tensor)
        snprintf(where, sizeof where, " (%s in the gradient of %s)", v->bad_is_nan ? "NaN" : "Inf",
                 v->bad_tensor);
    warn("at step %lld %s%s: the run seems to have diverged. %s", (long long)r->step, what, where,
         r->advice);
}

/* At the end of training: says so if the guard is on and had nothing to report. */
static void tell_no_events(const run *r) {
    if (r->guarded && !r->events && !r->quiet)
        say_line("guard", "no event: every site stayed in its dtype");
}

/* Prints the guard's events since the last call. On a GPU they arrive some steps later. */
static void tell_events(run *r) {
    enum { MOST = 20 };
    static const char *const what[MIXP_EVENT_COUNT] = {
        "overflow, f32 now", "near overflow, f32 now", "flushed, f32 now", "low again", "pinned",
        NULL, NULL, "imprecise, f32 now", "an operand loses too much, bf16 now",
        "an operand is quantised again"};
    mixp_event e;
    int        i = 0;
    report_guard(r->metrics, (double)r->step, r->ctx);
    if (!mixp_guard_event(r->ctx, 0, &e)) return;
    if (r->events > e.number) i = (int)(r->events - e.number);
    for (; mixp_guard_event(r->ctx, i, &e); i++) {
        r->events = e.number + 1;
        if (!what[e.kind] || r->quiet || r->events_told++ > MOST) continue;
        if (r->events_told > MOST) say_line("guard", "further events are in the report");
        else say_line("guard", "step %lld: %s: %s", (long long)r->step, e.site, what[e.kind]);
        if (r->events_told == 1 && e.kind <= MIXP_EVENT_FLUSHED)
            say_line("", "(its values do not fit fp16, so the site stores f32 until they "
                     "fit: no action needed)");
    }
}

#endif
