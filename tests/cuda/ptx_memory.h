/* ptx_memory.h - blocks, warps, and the memory that their threads see. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Global memory is the host's: the runtime knows which addresses are allocated. A shared or local
 * address is an offset, a generic one lies in the window where the interpreter keeps that memory.
 * Each access must be aligned to its width and lie inside one allocation.
 *
 * Races. An access to shared memory remembers its thread, the block's barrier epoch and the warp's
 * epoch. Two accesses of one place, one of them a write, conflict when neither epoch separates them.
 * An access to global memory remembers block, warp and a clock of the block. Accesses of two blocks
 * of one launch conflict unless both are atomic, or the first was followed by a fence and then an
 * atomic operation, and the second block has done an atomic operation on the same address since.
 * wgmma reads shared memory asynchronously, by another path than loads and stores. wgmma sees
 * what a thread wrote after that thread's fence.proxy.async and then a barrier. Until
 * wgmma.wait_group no thread may write what an unfinished product reads.
 * Not seen: which of two orders a weak memory takes, and races that only another order of blocks
 * would show where a place remembers a newer access.
 */
#ifndef PTX_MEMORY_H
#define PTX_MEMORY_H
#include "ptx_program.h"
#include <set>

namespace ptx {

struct Three { u32 x, y, z; };

/* ---- what the runtime tells ------------------------------------------------------------- */

struct Range { u64 first, last; bool writable; };
struct Host {
    /* The allocation that holds an address of global memory; false: there is none. */
    bool (*find)(u64 address, Range *range);
    /* The k-th of n blocks, or of a block's warps, to run. */
    long (*order)(long k, long n);
    long generation;                    /* changes when memory is released                      */
};
inline Host host = { nullptr, nullptr, 0 };

struct Counts { long launches = 0, races = 0, unwritten = 0; u64 warps = 0, lanes = 0; };
inline Counts counts;

/* ---- launches, blocks, warps ------------------------------------------------------------ */

/* What atomic operations of a block have published: writes of warp w before cover[w] are. */
struct Release { std::vector<u32> cover; };

struct Launch {
    Function *function;
    Three     grid, size;
    size_t    dynamic_bytes;
    std::vector<char> parameters;
    u32       number;
    long      blocks;
    /* By the address of the atomic operation, then by block. */
    std::unordered_map<u64, std::unordered_map<u32, Release>> releases;
};

/* The newest access of a place in shared memory. others: bytes that other warps read as well in this
 * epoch of the block; lanes: bytes that other lanes read in this epoch of the warp. */
struct Access { s16 thread = -1; u8 bytes = 0, others = 0, lanes = 0; u32 epoch = 0, sync = 0; bool atomic = false; };
/* fences: fence.proxy.async that the writer had executed before its write. */
struct Shadow { Access write, read; u8 written = 0; u32 fences = 0; };      /* of four bytes    */

/* A wgmma instruction and what all warps of a warpgroup must give it: descriptors, scale-d. */
struct Together { const Instr *instr; u64 a, b, adds; };

struct Warp;
struct Block {
    Launch *launch = nullptr;
    u32     number = 0;
    Three   index = { 0, 0, 0 };
    std::vector<Warp> warps;
    char   *shared_bytes = nullptr;
    size_t  shared_size = 0;
    std::vector<Shadow> shadow;
    std::vector<char> locals;
    size_t  local_size = 0;             /* of each thread                                       */
    u32     epoch = 1;                  /* barriers so far                                      */
    int     live = 0, waiting = 0;
    const Instr *barrier = nullptr;     /* where threads wait                                   */
    u32     clock = 1, barrier_time = 0;
    std::set<u64> acquired;             /* addresses of its atomic operations                   */
    std::vector<std::vector<Together>> warpgroups;      /* what each has executed               */
    std::vector<u16> unfinished;        /* products that still read these 16 bytes              */
};

/* A copy by cp.async on its way. given < bytes: the rest becomes 0. */
struct Copy { u32 to; u64 from; int bytes, given, group; };

/* A product by wgmma on its way, and the pieces of 16 bytes of shared memory that it reads. */
struct Unfinished { u32 group; std::vector<u32> pieces; };

/* A register of a warp. touched, multiplied: when an ordinary instruction and when a product last
 * used it; group: of that product; columns: of the product that it is a sum of, 0 for a factor. */
struct RegisterUse { u32 touched = 0, multiplied = 0, group = 0; u16 columns = 0; };

/* How many fence.proxy.async each lane has executed; those before the newest bar.warp.sync or
 * barrier, and those before the newest barrier. */
struct ProxyFences { u32 all[32] = { 0 }, met[32] = { 0 }, at_barrier[32] = { 0 }; };

struct Warp {
    Block   *block = nullptr;
    int      number = 0;
    u64     *registers = nullptr;
    Function *function = nullptr;
    const Instr *now = nullptr;
    int      pc[32] = { 0 };
    u32      alive = 0, waiting = 0;    /* waiting: at the block's barrier                      */
    u32      meeting = 0;               /* at a collective, for other lanes of its mask         */
    u32      sync = 1;                  /* bar.warp.sync and barriers so far                    */
    u32      fence = 0, fence_at_barrier = 0;
    std::vector<Copy> copies[32];
    int      groups[32] = { 0 };
    ProxyFences proxy;
    std::vector<RegisterUse> uses;      /* of each register, where the kernel has wgmma         */
    std::vector<Unfinished> products;
    u32      product_group = 1, finished = 0;   /* the one that is open; the newest that ended  */
    u32      time = 0, fenced = 0;      /* instructions so far; at the newest wgmma.fence       */
    size_t   together = 0;              /* of what its warpgroup has executed                   */

    const u64 *value(const Operand &o) const
    { return o.fixed ? o.fixed : registers + 32 * (size_t)o.slot; }
    u64 *result(const Operand &o) const { return registers + 32 * (size_t)o.slot; }
    u64 address(const Operand &o, int lane) const { return value(o)[lane] + (u64)o.offset; }
};

/* f(lane) for each lane of the mask. */
template <class F> inline void for_lanes(u32 mask, F f) {
    if (mask == ~0u) {
        for (int l = 0; l < 32; l++) f(l);
        return;
    }
    for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
}

/* ---- messages --------------------------------------------------------------------------- */

inline std::string place(const Warp &w, int lane) {
    char text[512];
    const Block &b = *w.block;
    std::snprintf(text, sizeof text, "line %d of %s, kernel %s, block (%u,%u,%u), thread %d",
                  w.now->line, w.function->module->text_name.c_str(), w.function->name.c_str(),
                  b.index.x, b.index.y, b.index.z, 32 * w.number + lane);
    return text;
}
[[noreturn]] inline void fault(const Warp &w, int lane, const char *what, u64 address, int bytes) {
    stop(1, "%s: %d bytes at %llx, %s", what, bytes, (unsigned long long)address,
         place(w, lane).c_str());
}
/* A finding that does not end the run: reported once for each line. */
inline void tell(const Warp &w, int lane, const char *what, const char *where, const char *other) {
    static std::set<std::pair<const Function *, int>> told;
    if (!told.insert({ w.function, w.now->line }).second) return;
    std::fflush(stdout);
    std::fprintf(stderr, "ptx: %s: %s, %s%s\n", what, where, place(w, lane).c_str(), other);
}
inline void complain(const Warp &w, int lane, const char *what, u64 address, const char *other) {
    char where[40];
    std::snprintf(where, sizeof where, "address %llx", (unsigned long long)address);
    tell(w, lane, what, where, other);
}

/* ---- shared memory ---------------------------------------------------------------------- */

inline bool is_concurrent(const Warp &w, int me, const Access &a, u8 bytes) {
    if (a.thread < 0 || a.epoch != w.block->epoch) return false;
    if (a.others & bytes) return true;
    if (a.thread / 32 != w.number) return a.bytes & bytes;
    if (a.sync != w.sync) return false;
    return (a.lanes & bytes) || (a.thread != me && (a.bytes & bytes));
}
inline void report_race(const Warp &w, int lane, const char *what, u32 at, int other) {
    char text[40];
    counts.races++;
    std::snprintf(text, sizeof text, ", and thread %d", other);
    complain(w, lane, what, at, text);
}

inline void note_read(const Warp &w, int lane, Shadow &s, u32 at, u8 bytes) {
    int me = 32 * w.number + lane;
    if ((s.written & bytes) != bytes) {
        counts.unwritten++;
        complain(w, lane, "a read of shared memory that no thread has written", at, "");
    }
    if (is_concurrent(w, me, s.write, bytes))
        report_race(w, lane, "a race in shared memory: a read", at, s.write.thread);
    Access now = { (s16)me, bytes, 0, 0, w.block->epoch, w.sync, false };
    if (s.read.thread >= 0 && s.read.epoch == w.block->epoch) {
        const Access &old = s.read;
        bool same_warp = old.thread / 32 == w.number, same_sync = same_warp && old.sync == w.sync;
        now.others = old.others | (same_warp ? 0 : old.bytes & bytes);
        if (same_sync) now.lanes = old.lanes | (old.thread == me ? 0 : old.bytes & bytes);
        if (old.thread == me) now.bytes |= old.bytes;
    }
    s.read = now;
}
/* Two atomic operations are no race. */
inline void note_write(const Warp &w, int lane, Shadow &s, u32 at, u8 bytes, bool atomic) {
    int me = 32 * w.number + lane;
    if (is_concurrent(w, me, s.write, bytes) && !(atomic && s.write.atomic))
        report_race(w, lane, "a race in shared memory: a write after a write", at, s.write.thread);
    else if (is_concurrent(w, me, s.read, bytes))
        report_race(w, lane, "a race in shared memory: a write after a read", at, s.read.thread);
    s.write = Access{ (s16)me, bytes, 0, 0, w.block->epoch, w.sync, atomic };
    s.read = Access();
    s.written |= bytes;
    s.fences = w.proxy.all[lane];
}

/* Which of the four bytes from 4 * word on lie in [at, end). */
inline u8 bytes_in(u32 word, u32 at, u32 end) {
    u32 first = at > 4 * word ? at - 4 * word : 0, last = end < 4 * word + 4 ? end - 4 * word : 4;
    return (u8)(((1u << last) - 1) & ~((1u << first) - 1));
}

inline void note_shared(const Warp &w, int lane, u32 at, int bytes, bool write, bool atomic = false) {
    u32 end = at + (u32)bytes;
    if (write && !w.block->unfinished.empty() && w.block->unfinished[at / 16]) {
        counts.races++;
        complain(w, lane, "a write to shared memory that an unfinished product reads", at, "");
    }
    for (u32 word = at / 4; 4 * word < end; word++) {
        Shadow &s = w.block->shadow[word];
        if (write) note_write(w, lane, s, at, bytes_in(word, at, end), atomic);
        else note_read(w, lane, s, at, bytes_in(word, at, end));
    }
}
/* The target of a copy that is under way holds nothing. */
inline void forget_shared(const Warp &w, u32 at, int bytes) {
    std::memset(w.block->shared_bytes + at, 0xFF, (size_t)bytes);
    for (u32 word = at / 4; 4 * word < at + (u32)bytes; word++) w.block->shadow[word].written = 0;
}

/* ---- global memory between blocks ------------------------------------------------------- */

/* others: bytes that other blocks read as well. */
struct BlockAccess { u32 launch = 0, block = 0, time = 0; u8 warp = 0, bytes = 0, others = 0;
                     bool atomic = false; };
struct BlockShadow { BlockAccess write, read; };            /* of four bytes                    */

const u64 page_bytes = 4096;
struct Page { BlockShadow words[page_bytes / 4]; };

inline Page &page_of(u64 address) {
    static std::unordered_map<u64, std::unique_ptr<Page>> pages;
    static u64 newest = ~(u64)0;
    static Page *page;
    u64 wanted = address / page_bytes;
    if (wanted == newest) return *page;
    std::unique_ptr<Page> &p = pages[wanted];
    if (!p) p.reset(new Page);
    newest = wanted;
    return *(page = p.get());
}

/* Has a release of the other block, which this block has acquired, published the access? */
inline bool is_published(const Warp &w, const BlockAccess &a) {
    const Launch &launch = *w.block->launch;
    for (u64 address : w.block->acquired) {
        auto at = launch.releases.find(address);
        if (at == launch.releases.end()) continue;
        auto release = at->second.find(a.block);
        if (release != at->second.end() && a.time < release->second.cover[a.warp]) return true;
    }
    return false;
}
inline bool conflicts(const Warp &w, const BlockAccess &a, u8 bytes, bool atomic) {
    if (a.launch != w.block->launch->number) return false;
    if (!(a.others & bytes) && (a.block == w.block->number || !(a.bytes & bytes))) return false;
    return !(a.atomic && atomic) && !is_published(w, a);
}
inline void report_blocks(const Warp &w, int lane, const char *what, u64 at, u32 other) {
    char text[40];
    counts.races++;
    std::snprintf(text, sizeof text, ", and block %u", other);
    complain(w, lane, what, at, text);
}

enum Use : u8 { use_read, use_write, use_atomic, use_volatile_read, use_volatile_write };
inline bool is_write(Use use)
{ return use == use_write || use == use_atomic || use == use_volatile_write; }
/* Volatile accesses count as relaxed atomic ones. */
inline bool is_atomic(Use use) { return use >= use_atomic; }

inline void note_word(const Warp &w, int lane, BlockShadow &s, u64 at, u8 bytes, Use use) {
    const Block &b = *w.block;
    u32 launch = b.launch->number;
    if (conflicts(w, s.write, bytes, is_atomic(use)))
        report_blocks(w, lane, "a race of blocks in global memory: after a write", at,
                      s.write.block);
    else if (is_write(use) && conflicts(w, s.read, bytes, is_atomic(use)))
        report_blocks(w, lane, "a race of blocks in global memory: a write after a read", at,
                      s.read.block);
    if (!is_write(use) && w.now->constant_cache && s.write.launch == launch)
        complain(w, lane, "ld.global.nc reads what its own launch has written", at, ""),
        counts.races++;
    BlockAccess now = { launch, b.number, b.clock, (u8)w.number, bytes, 0, is_atomic(use) };
    if (is_write(use)) { s.write = now; return; }
    if (s.read.launch == launch) {
        bool same = s.read.block == b.number;
        now.others = s.read.others | (same ? 0 : s.read.bytes & bytes);
        now.bytes |= same ? s.read.bytes : 0;
        now.atomic = now.atomic && s.read.atomic;
    }
    s.read = now;
}
inline void note_global(const Warp &w, int lane, u64 at, int bytes, Use use) {
    if (w.block->launch->blocks < 2) return;
    Page &page = page_of(at);               /* aligned to its width: never in two pages          */
    u32 first = (u32)(at % page_bytes), end = first + (u32)bytes;
    for (u32 word = first / 4; 4 * word < end; word++)
        note_word(w, lane, page.words[word], at, bytes_in(word, first, end), use);
}

/* membar: what the warp has written before is ordered before its next atomic operation. */
inline void note_fence(Warp &w) { w.fence = ++w.block->clock; }

/* bar.warp.sync */
inline void note_meeting(Warp &w) {
    w.sync++;
    std::memcpy(w.proxy.met, w.proxy.all, sizeof w.proxy.all);
}
inline void note_barrier(Block &b) {
    b.epoch++;
    b.barrier_time = ++b.clock;
    for (Warp &w : b.warps) {
        w.fence_at_barrier = w.fence;
        note_meeting(w);
        std::memcpy(w.proxy.at_barrier, w.proxy.all, sizeof w.proxy.all);
    }
}

/* Writes of warp `other` that an atomic operation of warp w publishes: those before this time. */
inline u32 covered(const Warp &w, const Warp &other) {
    if (&w == &other) return w.fence;
    u32 by_w = w.fence > w.block->barrier_time ? w.block->barrier_time : 0;
    return other.fence_at_barrier > by_w ? other.fence_at_barrier : by_w;
}
inline void note_release(const Warp &w, u64 address) {
    Block &b = *w.block;
    if (b.launch->blocks < 2) return;
    b.acquired.insert(address);
    Release &r = b.launch->releases[address][b.number];
    r.cover.resize(b.warps.size());
    for (size_t k = 0; k < b.warps.size(); k++) {
        u32 now = covered(w, b.warps[k]);
        if (now > r.cover[k]) r.cover[k] = now;
    }
}

/* ---- addresses -------------------------------------------------------------------------- */

inline char *in_shared(const Warp &w, int lane, u64 at, int bytes, Use use) {
    Block &b = *w.block;
    at &= 0xFFFFFFFFu;
    if (at + (u64)bytes > b.shared_size) fault(w, lane, "beyond shared memory", at, bytes);
    int used = use == use_read && w.now->used_bytes ? w.now->used_bytes : bytes;
    note_shared(w, lane, (u32)at, used, is_write(use), use == use_atomic);
    return b.shared_bytes + at;
}
inline char *in_local(const Warp &w, int lane, u64 at, int bytes) {
    Block &b = *w.block;
    if (at + (u64)bytes > b.local_size) fault(w, lane, "beyond local memory", at, bytes);
    return b.locals.data() + b.local_size * (size_t)(32 * w.number + lane) + at;
}
inline char *in_parameters(const Warp &w, int lane, u64 at, int bytes, Use use) {
    std::vector<char> &p = w.block->launch->parameters;
    if (at + (u64)bytes > p.size()) fault(w, lane, "beyond the parameters", at, bytes);
    if (is_write(use)) fault(w, lane, "a write to a parameter", at, bytes);
    return p.data() + at;
}
inline char *in_global(const Warp &w, int lane, u64 at, int bytes, Use use) {
    static Range range = { 1, 0, false };
    static long generation = -1;
    if (generation != host.generation || at < range.first || at + (u64)bytes > range.last) {
        generation = host.generation;
        if (!host.find(at, &range) || at + (u64)bytes > range.last)
            fault(w, lane, is_write(use) ? "a write beyond all memory" : "a read beyond all memory",
                  at, bytes);
    }
    if (is_write(use) && !range.writable) fault(w, lane, "a write to a constant", at, bytes);
    note_global(w, lane, at, bytes, use);
    return (char *)(uintptr_t)at;
}
/* Is a generic address in the window of the block's shared memory, or of its local memory? */
inline bool is_within(u64 at, const void *base, size_t bytes)
{ return at >= (u64)(uintptr_t)base && at - (u64)(uintptr_t)base < bytes; }

inline char *in_generic(const Warp &w, int lane, u64 at, int bytes, Use use) {
    Block &b = *w.block;
    if (is_within(at, b.shared_bytes, b.shared_size))
        return in_shared(w, lane, at - (u64)(uintptr_t)b.shared_bytes, bytes, use);
    if (is_within(at, b.locals.data(), b.locals.size())) {
        char *mine = b.locals.data() + b.local_size * (size_t)(32 * w.number + lane);
        return in_local(w, lane, at - (u64)(uintptr_t)mine, bytes);
    }
    return in_global(w, lane, at, bytes, use);
}

/* Where `bytes` bytes at an address are, once the access is known to be legal. */
inline char *resolve(const Warp &w, int lane, Space space, u64 at, int bytes, Use use) {
    if (at % (u64)bytes) fault(w, lane, "misaligned", at, bytes);
    switch (space) {
    case shared: return in_shared(w, lane, at, bytes, use);
    case local:  return in_local(w, lane, at, bytes);
    case param:  return in_parameters(w, lane, at, bytes, use);
    case global: return in_global(w, lane, at, bytes, use);
    default:     return in_generic(w, lane, at, bytes, use);
    }
}

}   /* namespace ptx */
#endif
