#pragma once
#include "parts.c"
/* --- a block of the caller's ------------------------------------------------------------- *
 *
 * All host memory of a context in one array of the caller's: consecutive chunks, each behind its
 * record. A request takes the first free chunk with room; a release joins neighbouring free chunks.
 * This first fit suffices because a context releases little.
 */
enum { MIXPI_LINE = 64 };       /* alignment of chunks; bytes that a record takes          */

typedef struct mixpi_block_part {
    size_t size;                /* bytes of the memory behind this record                  */
    int    used;
} mixpi_block_part;

struct mixpi_block {
    char  *first;               /* the first record                                        */
    size_t size;                /* bytes of all chunks with their records                  */
    size_t most;                /* peak of the bytes in use                                */
    size_t before;              /* bytes of the caller's array before `first`              */
};

static mixpi_block_part *mixpi_block_at(const mixpi_block *b, size_t at)
{ return (mixpi_block_part *)(void *)(b->first + at); }

/* Makes a block of the array. Returns NULL if the array is too small. */
static mixpi_block *mixpi_block_new(void *memory, size_t bytes) {
    size_t skip = (MIXPI_LINE - (uintptr_t)memory % MIXPI_LINE) % MIXPI_LINE;
    mixpi_block *b = (mixpi_block *)(void *)((char *)memory + skip);
    if (bytes < skip + 3 * MIXPI_LINE) return NULL;
    b->before = skip + MIXPI_LINE;
    b->first = (char *)memory + b->before;
    b->size = (bytes - b->before) / MIXPI_LINE * MIXPI_LINE;
    b->most = 0;
    mixpi_block_at(b, 0)->size = b->size - MIXPI_LINE;
    mixpi_block_at(b, 0)->used = 0;
    return b;
}

/* Takes a free chunk at `at` that has room. The rest of the chunk becomes a chunk of its own. */
static void *mixpi_block_cut(mixpi_block *b, size_t at, size_t bytes) {
    mixpi_block_part *c = mixpi_block_at(b, at);
    size_t end = at + MIXPI_LINE + bytes;
    if (c->size - bytes > MIXPI_LINE) {
        mixpi_block_part *rest = mixpi_block_at(b, end);
        rest->size = c->size - bytes - MIXPI_LINE;
        rest->used = 0;
        c->size = bytes;
    }
    c->used = 1;
    end = at + MIXPI_LINE + c->size;
    if (end > b->most) b->most = end;
    return b->first + at + MIXPI_LINE;
}

static void *mixpi_block_allocate(size_t bytes, void *user) {
    mixpi_block *b = (mixpi_block *)user;
    size_t at = 0, need;
    if (bytes > b->size) return NULL;
    need = (bytes + MIXPI_LINE - 1) / MIXPI_LINE * MIXPI_LINE;
    while (at < b->size) {
        const mixpi_block_part *c = mixpi_block_at(b, at);
        if (!c->used && c->size >= need) return mixpi_block_cut(b, at, need);
        at += MIXPI_LINE + c->size;
    }
    return NULL;
}

static void mixpi_block_release(void *p, void *user) {
    mixpi_block *b = (mixpi_block *)user;
    size_t at = 0;
    mixpi_block_part *before = NULL;
    if (!p) return;
    mixpi_block_at(b, (size_t)((char *)p - b->first) - MIXPI_LINE)->used = 0;
    while (at < b->size) {
        mixpi_block_part *c = mixpi_block_at(b, at);
        at += MIXPI_LINE + c->size;
        if (before && !before->used && !c->used) before->size += MIXPI_LINE + c->size;
        else before = c;
    }
}

