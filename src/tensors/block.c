#pragma once
#include "structs.c"
/* --- a block of the caller's ------------------------------------------------------------- *
 *
 * All host memory of a context in one array of the caller's: consecutive chunks, each behind its
 * record. A request uses the first free chunk with room; a release joins neighbouring free chunks.
 * This first fit suffices because a context releases little.
 */
enum { MIXPI_LINE = 64 };       /* alignment of chunks; bytes that a record needs          */

typedef struct mixpi_block_part {
    size_t size;                /* bytes of the memory behind this record                  */
    struct mixpi_block_part *next;  /* next free chunk, by address                         */
} mixpi_block_part;

struct mixpi_block {
    char  *first;               /* the first record                                        */
    mixpi_block_part *free;     /* the free chunks, by address                             */
    size_t size;                /* bytes of all chunks with their records                  */
    size_t most;                /* peak of the bytes in use                                */
    size_t before;              /* bytes of the caller's array before `first`              */
};

/* The end of a chunk: the next record, or the end of the block. */
static char *mixpi_block_end(mixpi_block_part *c) { return (char *)c + MIXPI_LINE + c->size; }

/* Makes a block of the array. Returns NULL if the array is too small. */
static mixpi_block *mixpi_block_new(void *memory, size_t bytes) {
    size_t skip = (MIXPI_LINE - (uintptr_t)memory % MIXPI_LINE) % MIXPI_LINE;
    mixpi_block *b = (mixpi_block *)(void *)((char *)memory + skip);
    if (bytes < skip + 3 * MIXPI_LINE) return NULL;
    b->before = skip + MIXPI_LINE;
    b->first = (char *)memory + b->before;
    b->size = (bytes - b->before) / MIXPI_LINE * MIXPI_LINE;
    b->most = 0;
    b->free = (mixpi_block_part *)(void *)b->first;
    b->free->size = b->size - MIXPI_LINE;
    b->free->next = NULL;
    return b;
}

/* Uses the free chunk at *at, which has room. The rest of the chunk becomes a separate chunk. */
static void *mixpi_block_cut(mixpi_block *b, mixpi_block_part **at, size_t bytes) {
    mixpi_block_part *c = *at, *rest = c->next;
    if (c->size - bytes > MIXPI_LINE) {
        rest = (mixpi_block_part *)(void *)((char *)c + MIXPI_LINE + bytes);
        rest->size = c->size - bytes - MIXPI_LINE;
        rest->next = c->next;
        c->size = bytes;
    }
    *at = rest;
    size_t end = (size_t)(mixpi_block_end(c) - b->first);
    if (end > b->most) b->most = end;
    return (char *)c + MIXPI_LINE;
}

static void *mixpi_block_allocate(size_t bytes, void *user) {
    mixpi_block *b = (mixpi_block *)user;
    mixpi_block_part **at = &b->free;
    if (bytes > b->size) return NULL;
    size_t need = (bytes + MIXPI_LINE - 1) / MIXPI_LINE * MIXPI_LINE;
    while (*at && (*at)->size < need) at = &(*at)->next;
    return *at ? mixpi_block_cut(b, at, need) : NULL;
}

/* Joins a free chunk with the next one if they are neighbours. */
static void mixpi_block_join(mixpi_block_part *c) {
    mixpi_block_part *next = c->next;
    if (!next || mixpi_block_end(c) != (char *)next) return;
    c->size += MIXPI_LINE + next->size;
    c->next = next->next;
}

static void mixpi_block_release(void *p, void *user) {
    mixpi_block *b = (mixpi_block *)user;
    mixpi_block_part *c, *before = NULL, *next = b->free;
    if (!p) return;
    c = (mixpi_block_part *)(void *)((char *)p - MIXPI_LINE);
    while (next && next < c) {
        before = next;
        next = next->next;
    }
    c->next = next;
    mixpi_block_join(c);
    if (before) {
        before->next = c;
        mixpi_block_join(before);
    } else b->free = c;
}
