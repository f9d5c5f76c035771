#pragma once
#include "param_rows.c"
/* --- Muon's memory ----------------------------------------------------------------------- */

static int64_t mixpi_muon_side(const mixp_tensor *p) { return mixpi_min(p->shape[0], p->shape[1]); }

/* Allocates n elements of the iteration's dtype. data NULL: out of memory. */
static mixp_out mixpi_muon_array(const mixp_optimizer *opt, int64_t n) {
    mixp_dtype dtype = opt->muon->settings.f32 ? MIXP_F32 : MIXP_BF16;
    size_t bytes = (size_t)n * mixp_dtype_size(dtype);
    return mixpi_out_to(mixpi_opt_device(opt, bytes), dtype, 0);
}
static float *mixpi_muon_floats(const mixp_optimizer *opt, int64_t n) {
    return (float *)mixpi_opt_device(opt, (size_t)n * sizeof(float));
}

/* Makes room for matrix p. If out of memory, the old arrays stay in use. The optimizer keeps arrays
 * that became too small until it is freed. */
static mixp_result mixpi_muon_room(mixp_optimizer *opt, const mixp_tensor *p) {
    mixpi_muon more = *opt->muon;
    const int64_t side = mixpi_muon_side(p);
    if (p->count > more.elements) {
        more.x = mixpi_muon_array(opt, p->count);
        more.x_sum = mixpi_muon_floats(opt, p->count);
        more.elements = p->count;
        if (!more.x.data || !more.x_sum) return MIXP_ERR_MEMORY;
    }

    if (side > more.side) {
        more.gram = mixpi_muon_array(opt, side * side);
        more.poly = mixpi_muon_array(opt, side * side);
        more.poly_sum = mixpi_muon_floats(opt, side * side);
        more.side = side;
        if (!more.gram.data || !more.poly.data || !more.poly_sum) return MIXP_ERR_MEMORY;
    }

    /* All is there: the new arrays come into use. */
    if (more.x.data != opt->muon->x.data) opt->rows_changed = 1; /* passes point to x */
    *opt->muon = more;
    return MIXP_OK;
}

/* Allocates the rows of Muon's passes for as many parameters as the optimizer has room for. */
static mixp_result mixpi_muon_rows_grow(mixp_optimizer *opt) {
    mixpi_muon *m = opt->muon;
    size_t bytes = (size_t)opt->capacity * MIXPI_MUON_PASSES * sizeof *m->rows;
    if (m->room == opt->capacity) return MIXP_OK;
    mixp_param_row *rows = (mixp_param_row *)mixpi_opt_host(opt, bytes);
    mixp_param_row *device = (mixp_param_row *)mixpi_opt_device(opt, bytes);
    if (!rows || !device) return MIXP_ERR_MEMORY;
    m->rows = rows;
    m->device_rows = device;
    m->room = opt->capacity;
    opt->rows_changed = 1;
    return MIXP_OK;
}

static mixp_result mixpi_muon_add(mixp_optimizer *opt, const mixp_tensor *p, mixp_param_row *row) {
    double rows = (double)p->shape[0], cols = (double)p->shape[1];
    double larger = rows > cols ? rows : cols;
    mixp_result r = mixpi_muon_room(opt, p);
    row->rate = (float)sqrt(rows > cols ? rows / cols : 1.0);
    if (opt->muon->settings.rate == MIXP_MUON_RATE_MATCH_RMS_ADAMW)
        row->rate = (float)(0.2 * sqrt(larger));
    if (opt->muon->settings.rate == MIXP_MUON_RATE_SPECTRAL_UNCLAMPED)
        row->rate = (float)sqrt(rows / cols);
    return r == MIXP_OK ? mixpi_muon_rows_grow(opt) : r;
}
