#pragma once
#include "sites.c"
/* --- rows ------------------------------------------------------------------------------- *
 *
 * The looks of all sites are one array in device memory, because the device sends them to the host
 * in one copy. Their memory grows with the number of sites: between steps, or at the
 * first look at a new site in a sampled step. No captured step is sampled, so no graph knows the
 * addresses of rows.
 */

/* Moves `used` bytes of device memory to new memory of `bytes` bytes, which is its own owner. The
 * rest is zero. Waits for the device. Returns NULL with the error set. */
static void *mixpi_device_longer(mixp_context *ctx, void *old, size_t used, size_t bytes) {
    void *p = mixpi_device_alloc(ctx, bytes), *host;
    mixp_result r = MIXP_OK;
    if (!p) return NULL;
    ctx->memory.pieces->owner = p;
    if (!old) return p;
    host = mixpi_host_take(ctx, used);
    if (!host) mixpi_out_of_memory(ctx, used);
    else r = mixpi_download(ctx, host, old, used);
    if (host && r == MIXP_OK) r = mixpi_upload(ctx, p, host, used);
    if (host) mixpi_host_free(ctx, host);
    if (host && r == MIXP_OK) return p;
    mixpi_owned_free(ctx, p);
    return NULL;
}

/* Moves the rows, and the host's copy of them, to longer memory. */
static mixp_result mixpi_rows_grow(mixp_context *ctx, int room) {
    mixpi_watch *w = ctx->watch;
    const size_t bytes = mixpi_rows_bytes(room), used = mixpi_rows_bytes(w->rows_room);
    mixp_look *seen = (mixp_look *)mixpi_owner_new(ctx, bytes);
    if (seen && w->seen) memcpy(seen, w->seen, used);
    mixp_look *rows = (mixp_look *)mixpi_device_longer(ctx, w->rows, used, bytes);
    if (!rows && seen) mixpi_owned_free(ctx, seen);
    if (!seen && rows) mixpi_owned_free(ctx, rows);
    if (!seen || !rows) return MIXP_ERR_MEMORY;
    if (w->rows) mixpi_owned_free(ctx, w->seen);
    if (w->rows) mixpi_owned_free(ctx, w->rows);
    w->seen = seen;
    w->rows = rows;
    w->rows_room = room;
    return MIXP_OK;
}

/* Makes room for the rows of n sites. */
static mixp_result mixpi_rows_reach(mixp_context *ctx, int n) {
    const mixpi_watch *w = ctx->watch;
    int room = w->rows_room ? w->rows_room : MIXPI_SITE_CHUNK;
    if (n <= w->rows_room) return MIXP_OK;
    while (room < n) room *= 2;
    return mixpi_rows_grow(ctx, room < w->capacity ? room : w->capacity);
}
