#pragma once
#include "gradients.c"
/* --- what a walk checks ----------------------------------------------------------------- *
 *
 * Before an operator is walked back: nothing that its gradients are made from was overwritten.
 * Afterwards: its backward has given each gradient that is wanted.
 */

/* Fails because tensor i of c was written since forward read it. who: the public function that
 * would read it again. */
static mixp_result mixpi_report_written(const mixp_call *c, int i, const char *who) {
    mixp_tensor *t = mixpi_call_tensor(c, i), *origin = mixpi_origin(t);
    char which[MIXPI_QUOTED], shape[224];
    if (i == c->n_in) snprintf(which, sizeof which, "its result");
    else if (!*mixpi_quoted(origin, which)) snprintf(which, sizeof which, "its input %d", i);
    return mixp_context_fail(c->ctx, MIXP_ERR_ORDER,
        "%s:%s%s %s was written%s%s since %s read it, so gradients would be wrong: call %s before "
        "the write, or run forward again",
        who, *which == ' ' ? "" : " ", which,
        mixpi_shape_text(t->rank, t->shape, shape, sizeof shape), origin->own.writer ? " by " : "",
        origin->own.writer ? origin->own.writer : "", c->op->name, who);
}

/* A walk reads what forward read: fails if any of it was written since. */
static mixp_result mixpi_check_unwritten(const mixp_call *c, const char *who) {
    const mixpi_tape_entry *e = mixpi_entry_of(c);

    /* The tensors that the gradients still wanted are made from, as a set of mixp_call_reads. */
    uint32_t what = 0;
    for (int i = 0; i < c->n_in; i++)
        if (mixp_call_wants(c, i)) what |= e->reads[mixpi_min(i, MIXPI_READS - 1)];

    for (int i = 0; i <= c->n_in && what; i++) {
        mixp_tensor *t = mixpi_call_tensor(c, i);
        uint32_t bit = i == c->n_in ? MIXP_READS_RESULT : i < 31 ? 1u << i : 0u;
        if (!t || !(what == MIXP_READS_ALL || (what & bit))) continue;
        if (mixpi_origin(t)->version != e->versions[i]) return mixpi_report_written(c, i, who);
    }
    return MIXP_OK;
}

/* Has backward asked for the gradient of input i, or of another input that is the same tensor? */
static int mixpi_was_asked(const mixp_call *c, int i) {
    const mixpi_tape_entry *e = mixpi_entry_of(c);
    if (e->inputs[i] & MIXPI_INPUT_ASKED) return 1;
    for (int j = 0; j < c->n_in; j++)
        if (e->inputs[j] & MIXPI_INPUT_ASKED && mixpi_grad_owner(c, j) == mixpi_grad_owner(c, i))
            return 1;
    return 0;
}

/* Why backward did not write the gradient of input i; NULL: it wrote the gradient. */
static const char *mixpi_gradient_wrong(const mixp_call *c, int i) {
    const int flags = mixpi_entry_of(c)->inputs[i];
    if (!mixp_call_wants(c, i)) return NULL;
    if (!mixpi_was_asked(c, i)) return "did not request";
    if (!(flags & MIXPI_INPUT_PROBED)) return NULL;
    if (!mixpi_probe_is_there(mixpi_grad_owner(c, i)->own.grad)) return NULL;
    return "requested, but did not write,";
}

/* After an operator's backward: fails unless backward has written every wanted gradient. */
static mixp_result mixpi_check_given(mixp_call *c) {
    mixpi_tape_entry *e = mixpi_entry(c);
    const char *wrong = NULL;
    char quoted[MIXPI_QUOTED];
    int i;
    for (i = 0; i < c->n_in && !wrong; i++) wrong = mixpi_gradient_wrong(c, i);
    if (wrong)
        return mixp_context_fail(c->ctx, MIXP_ERR_ARGUMENT,
            "%s backward: it %s the gradient of input %d%s, which is needed: write to the tensor "
            "of mixp_call_dx; write zeros if the gradient is 0",
            c->op->name, wrong, i - 1, mixpi_quoted(mixpi_grad_owner(c, i - 1), quoted));
    for (i = 0; i < c->n_in; i++) e->inputs[i] &= MIXPI_INPUT_CONSTANT;
    return MIXP_OK;
}
