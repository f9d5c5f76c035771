#pragma once
#include "updates.h"

/* The words of a rank's row in the table by which ranks agree on a step. Each rank fills its own
 * row of a table of zeros, so the sum of the tables is exact in any order. */
enum {
    /* HERE to NORM must be equal on all ranks (to GRADED where the sums are scattered). */
    MIXP_AGREE_HERE,            /* 1: this rank takes part; 2: and has looked only at its
                                   part of the sums: its norm is squared */
    MIXP_AGREE_GUARD,           /* hash of the guard's settings and of whether it looks    */
    MIXP_AGREE_SCALE, MIXP_AGREE_APPLIED, MIXP_AGREE_RATE,
    MIXP_AGREE_BETA1, MIXP_AGREE_BETA2, MIXP_AGREE_EPS, MIXP_AGREE_DECAY,   /* group 0's  */
    MIXP_AGREE_LIMIT,           /* max_norm                                                */
    MIXP_AGREE_SETTINGS,        /* hash of all settings                                    */
    MIXP_AGREE_WEIGHTS,         /* hash of a part of the weights, in some steps            */
    MIXP_AGREE_GRADED,          /* hash of which parameters have gradients                 */
    MIXP_AGREE_NORM,            /* norm of the summed gradients: if it differs, so do the
                                   sums                                                    */
    MIXP_AGREE_FOUND,           /* 1: a look at the summed gradients found Inf or NaN      */
    MIXP_AGREE_LARGEST,
    MIXP_AGREE_LOSS,
    MIXP_AGREE_FORWARD,         /* 1: this rank's loss is Inf or NaN                       */
    MIXP_AGREE_BAD,             /* 1: this rank's own gradients held Inf or NaN, before
                                   the sum                                                 */
    MIXP_AGREE_LEAF, MIXP_AGREE_ELEMENT, MIXP_AGREE_NAN,    /* where, and whether NaN      */
    MIXP_AGREE_PART_ROW, MIXP_AGREE_PART_ELEMENT, MIXP_AGREE_PART_NAN,
                                /* the first Inf or NaN in this rank's part of the sums */
    MIXP_AGREE_BUFFER,          /* number of this rank's bad buffer, plus 1; 0 = none      */
    MIXP_AGREE_BUFFER_ELEMENT, MIXP_AGREE_BUFFER_NAN,
    MIXP_AGREE_WORDS
};

/* Writes this rank's first Inf or NaN gradient, in the order of buckets. first: the first leaf of
 * each bucket. */
MIXPREC_HD void mixpi_agree_bad(double *row, const mixp_step_state *looks, int64_t n_looks,
                                const int64_t *first) {
    int64_t i;
    for (i = 0; i < n_looks && !looks[i].stats.found_inf; i++)
        continue;
    if (i == n_looks) return;
    row[MIXP_AGREE_BAD] = 1.0;
    row[MIXP_AGREE_LEAF] = (double)(first[i] + looks[i].stats.bad_row);
    row[MIXP_AGREE_ELEMENT] = (double)looks[i].stats.bad_element;
    row[MIXP_AGREE_NAN] = (double)looks[i].stats.bad_is_nan;
}

/* The integer that another rank has sent as a double; 0 for NaN, and for numbers of 2^53 and above:
 * sums over all ranks then stay in range. */
MIXPREC_HD int64_t mixpi_whole_of(double x)
{ return (mixp_bits_of_f64(x) >> 52 & 0x7FFu) < 1023u + 53u ? (int64_t)x : 0; }

/* Writes this rank's results into its row. All of the row's numbers are finite, except perhaps the
 * loss. */
MIXPREC_HD void mixpi_agree_fill(double *row, const mixp_step_plan *plan,
                                const mixp_step_state *s,
                                const mixp_scaler_state *scaler) {
    int found = s->stats.found_inf != 0;
    int finite = (mixp_bits_of_f64(s->stats.norm) >> 52 & 0x7FFu) != 0x7FFu;
    row[MIXP_AGREE_HERE] = 1.0;

    /* Write what must be equal on all ranks. */
    row[MIXP_AGREE_SCALE] = scaler ? (double)scaler->scale : 1.0;
    row[MIXP_AGREE_APPLIED] = (double)s->applied;
    row[MIXP_AGREE_RATE] = mixpi_plan_lr(plan, plan->groups[0].lr, s->applied);
    row[MIXP_AGREE_BETA1] = plan->groups[0].beta1;
    row[MIXP_AGREE_BETA2] = plan->groups[0].beta2;
    row[MIXP_AGREE_EPS] = plan->groups[0].eps;
    row[MIXP_AGREE_DECAY] = plan->groups[0].weight_decay;
    row[MIXP_AGREE_LIMIT] = plan->max_norm;
    row[MIXP_AGREE_SETTINGS] = (double)plan->settings;
    row[MIXP_AGREE_WEIGHTS] = (double)plan->weights;
    row[MIXP_AGREE_GRADED] = (double)plan->graded;
    row[MIXP_AGREE_GUARD] = (double)plan->guard;

    /* Write what this rank found by itself. */
    row[MIXP_AGREE_FOUND] = (double)found;
    row[MIXP_AGREE_LARGEST] = (double)s->stats.largest;
    row[MIXP_AGREE_NORM] = finite ? s->stats.norm : 0.0;
    row[MIXP_AGREE_LOSS] = plan->loss ? (double)*plan->loss : 0.0;
    row[MIXP_AGREE_FORWARD] = scaler && scaler->loss_bad ? 1.0 : 0.0;
    if (!s->buffer_found) return;
    row[MIXP_AGREE_BUFFER] = (double)(mixpi_bad_number(s->buffer_found) + 1);
    row[MIXP_AGREE_BUFFER_ELEMENT] = (double)mixpi_bad_element(s->buffer_found);
    row[MIXP_AGREE_BUFFER_NAN] = (double)mixpi_bad_is_nan(s->buffer_found);
}

/* Completes the row where sums are scattered: this rank has looked only at its part of the sums. */
MIXPREC_HD void mixpi_agree_part(double *row, const mixp_step_state *s) {
    row[MIXP_AGREE_HERE] = 2.0;
    row[MIXP_AGREE_NORM] = s->stats.norm * s->stats.norm;   /* other ranks add zeros */
    row[MIXP_AGREE_PART_ROW] = (double)s->stats.bad_row;
    row[MIXP_AGREE_PART_ELEMENT] = (double)s->stats.bad_element;
    row[MIXP_AGREE_PART_NAN] = (double)s->stats.bad_is_nan;
}

MIXPREC_HD int mixpi_agree_in_parts(const double *table)
{ return table[MIXP_AGREE_HERE] > 1.0; }

/* Joins the parts. The norm is summed in the order of ranks: the same on each rank, and in each run
 * with as many ranks. The first Inf or NaN is in the first row; within a row it is on the lowest
 * rank, which has the beginning of the row. */
MIXPREC_HD void mixpi_agree_join(const double *table, int size, mixp_step_state *s) {
    double squares = 0.0;
    int r;
    s->stats.bad_row = s->stats.bad_element = -1;
    s->stats.bad_is_nan = s->agreed.part_rank = 0;
    for (r = 0; r < size; r++) {
        const double *row = table + (int64_t)r * MIXP_AGREE_WORDS;
        const int64_t bad = mixpi_whole_of(row[MIXP_AGREE_PART_ROW]);
        squares += row[MIXP_AGREE_NORM];
        if (!(row[MIXP_AGREE_FOUND] > 0.0) || bad < 0) continue;
        if (s->agreed.part_rank && bad >= s->stats.bad_row) continue;
        s->agreed.part_rank = r + 1;
        s->stats.bad_row = bad;
        s->stats.bad_element = mixpi_whole_of(row[MIXP_AGREE_PART_ELEMENT]);
        s->stats.bad_is_nan = (int32_t)mixpi_whole_of(row[MIXP_AGREE_PART_NAN]);
    }
    s->stats.norm = MIXPI_LIBM(sqrt)(squares);
}

/* Records the first word in which rank r differs from rank 0. */
MIXPREC_HD void mixpi_agree_differs(const double *table, int r, mixp_agreement *a) {
    const double *zero = table, *row = table + (int64_t)r * MIXP_AGREE_WORDS;
    const int last = mixpi_agree_in_parts(table) ? MIXP_AGREE_GRADED : MIXP_AGREE_NORM;
    int word = MIXP_AGREE_HERE;
    while (word <= last &&
           mixp_bits_of_f64(zero[word]) == mixp_bits_of_f64(row[word])) {
        word++;
    }
    if (word > last) return;
    a->differs = r + 1;
    a->word = word;
    a->here = zero[word];
    a->there = row[word];
}

/* Records rank r's own Inf or NaN gradient, if r is the lowest rank with one. */
MIXPREC_HD void mixpi_agree_name(const double *row, int r, mixp_agreement *a) {
    if (a->bad_rank || !(row[MIXP_AGREE_BAD] > 0.0)) return;
    a->bad_rank = r + 1;
    a->bad_leaf = mixpi_whole_of(row[MIXP_AGREE_LEAF]);
    a->bad_element = mixpi_whole_of(row[MIXP_AGREE_ELEMENT]);
    a->bad_is_nan = (int32_t)mixpi_whole_of(row[MIXP_AGREE_NAN]);
}

/* Records rank r's bad buffer, if r is the lowest rank with one. */
MIXPREC_HD void mixpi_agree_buffer(const double *row, int r, mixp_agreement *a) {
    if (a->buffer_rank || !(row[MIXP_AGREE_BUFFER] > 0.0)) return;
    a->buffer_rank = r + 1;
    a->buffer = mixpi_bad_word(mixpi_whole_of(row[MIXP_AGREE_BUFFER]) - 1,
                               mixpi_whole_of(row[MIXP_AGREE_BUFFER_ELEMENT]),
                               row[MIXP_AGREE_BUFFER_NAN] > 0.0);
}

/* Reads the results of all ranks from the table. If ranks differ, all ranks skip the step. */
MIXPREC_HD void mixpi_agree_read(const double *table, int size, mixp_step_state *s,
                                mixp_scaler_state *scaler) {
    const int32_t part_rank = s->agreed.part_rank;
    double loss = 0.0;
    int r;
    memset(&s->agreed, 0, sizeof s->agreed);
    s->agreed.part_rank = part_rank;    /* of the last look in parts */

    /* Inf on one rank is Inf on all; the loss is the mean. */
    for (r = 0; r < size; r++) {
        const double *row = table + (int64_t)r * MIXP_AGREE_WORDS;
        float largest = (float)row[MIXP_AGREE_LARGEST];
        if (!s->agreed.differs) mixpi_agree_differs(table, r, &s->agreed);
        if (row[MIXP_AGREE_FOUND] > 0.0) s->stats.found_inf = 1;
        if (largest > s->stats.largest) s->stats.largest = largest;
        loss += row[MIXP_AGREE_LOSS];
        if (scaler && row[MIXP_AGREE_FORWARD] > 0.0) scaler->loss_bad = 1;
        mixpi_agree_name(row, r, &s->agreed);
        mixpi_agree_buffer(row, r, &s->agreed);
    }

    s->agreed.ranks = size;
    s->agreed.loss = (float)(loss / (double)size);
    if (mixpi_agree_in_parts(table)) mixpi_agree_join(table, size, s);
}
