/* ptx.h - runs what nvcc compiled, PTX text, without a GPU. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * A warp's lanes run in groups that are at one instruction; the group with the least goes first, so
 * that lanes that took different branches meet again. A collective waits for the lanes of its mask,
 * a barrier for the threads of its block. Blocks run one after another, a block's warps in turns, in
 * the order that the runtime chooses. What would hang or be undefined on a GPU ends the program.
 *
 *     ptx_values.h     types, bits, floating point
 *     ptx_program.h    text -> modules, functions, variables
 *     ptx_memory.h     address spaces, races, reads of unwritten memory
 *     ptx_opcodes.h    what instructions do
 *     ptx_wgmma.h      products of a warpgroup
 *     ptx_decode.h     a function's text -> instructions
 *     runtime.cpp      behind the CUDA runtime's functions
 *
 * Not seen: what ptxas makes of PTX (registers, spills, its own reordering and joining of operations),
 * weak memory, true concurrency, cuBLASLt, speed.
 */
#ifndef PTX_H
#define PTX_H
#include "ptx_decode.h"

namespace ptx {

struct Group { int pc, limit; u32 mask; };

/* Lanes of the group go on at pc. */
inline void move_to(Warp &w, const Group &g, int pc)
{ for_lanes(g.mask, [&](int l) { w.pc[l] = pc; }); }

inline u32 guarded_lanes(const Warp &w, const Instr &i, u32 mask) {
    if (i.guard < 0) return mask;
    const u64 *p = w.registers + 32 * (size_t)i.guard;
    u32 set = 0;
    for (int l = 0; l < 32; l++) set |= (u32)((p[l] != 0) != i.guard_negated) << l;
    return mask & set;
}

/* ---- one instruction; each returns whether the group goes on ---------------------------- */

/* A group stops where lanes of another one wait to join it. */
inline bool advance(Warp &w, Group &g, int pc) {
    g.pc = pc;
    if (g.pc != g.limit && !w.meeting) return true;
    move_to(w, g, g.pc);
    return false;
}
inline bool take_branch(Warp &w, Group &g, const Instr &i, u32 active) {
    if (!active) return advance(w, g, g.pc + 1);
    if (active == g.mask) {
        g.pc = i.target;
        move_to(w, g, g.pc);
        return g.limit == INT_MAX && !w.meeting;
    }
    move_to(w, g, g.pc + 1);
    for_lanes(active, [&](int l) { w.pc[l] = i.target; });
    return false;
}
inline void leave_lanes(Warp &w, u32 lanes) {
    for_lanes(lanes, [&](int l) {
        if (!w.copies[l].empty())
            stop(1, "a thread exits while its copies are under way: %s", place(w, l).c_str());
        if (!w.products.empty())
            stop(1, "a thread exits while its products are under way: %s", place(w, l).c_str());
    });
    w.alive &= ~lanes;
    w.block->live -= __builtin_popcount(lanes);
}
inline bool leave_function(Warp &w, Group &g, u32 active) {
    leave_lanes(w, active);
    g.mask &= ~active;
    return g.mask && advance(w, g, g.pc + 1);
}
inline bool wait_at_barrier(Warp &w, Group &g, const Instr &i, u32 active) {
    Block &b = *w.block;
    if (!active) return advance(w, g, g.pc + 1);
    if (active != g.mask || i.from.size() != 1 || w.value(i.from[0])[0])
        stop(1, "only whole barriers with number 0 are known: %s", place(w, 0).c_str());
    if (b.waiting && b.barrier != &i)
        stop(1, "divergent barrier: some threads wait at line %d, others at %s", b.barrier->line,
             place(w, __builtin_ctz(active)).c_str());
    b.barrier = &i;
    b.waiting += __builtin_popcount(active);
    w.waiting |= active;
    move_to(w, g, g.pc + 1);
    return false;
}
inline u32 wanted_lanes(const Warp &w, const Instr &i, u32 mask) {
    bool has_mask = i.run == shuffle || i.run == meet;
    return has_mask ? (u32)w.value(i.from.back())[__builtin_ctz(mask)] : ~0u;
}
/* Lanes that arrive first wait, and the group whose lane is the last does the work for all. */
inline bool do_collective(Warp &w, Group &g, const Instr &i, u32 active) {
    u32 wanted = wanted_lanes(w, i, g.mask);
    if (active != g.mask) stop(1, "a predicated collective: %s", place(w, 0).c_str());
    if (wanted & ~w.alive)
        stop(1, "mask %08x names lanes that do not exist or have exited (alive: %08x): %s", wanted,
             w.alive, place(w, 0).c_str());
    if (g.mask & ~wanted)
        stop(1, "lanes %08x are not in their own mask %08x: %s", g.mask & ~wanted, wanted,
             place(w, 0).c_str());
    if (wanted & ~g.mask) {
        move_to(w, g, g.pc);
        w.meeting |= g.mask;
        return false;
    }
    w.meeting &= ~g.mask;
    if (i.run == meet) note_meeting(w);     /* the others order no memory                       */
    i.run(w, i, g.mask);
    return advance(w, g, g.pc + 1);
}

inline void run_warp_to_stop(Warp &w);

/* A called function waits nowhere; its registers are its own. */
inline void run_call(Warp &w, const Instr &i, u32 active) {
    const Call &c = *i.called;
    std::vector<u64> registers((size_t)c.callee->slot_count * 32);
    std::memcpy(registers.data(), w.registers, 32 * specials * sizeof(u64));
    for (size_t k = 0; k < c.from.size(); k++)
        std::memcpy(&registers[32 * (size_t)c.to[k]], w.registers + 32 * (size_t)c.from[k],
                    32 * sizeof(u64));
    int live = w.block->live;
    Warp inner;
    inner.block = w.block;
    inner.number = w.number;
    inner.registers = registers.data();
    inner.function = c.callee;
    inner.alive = active;
    run_warp_to_stop(inner);
    if (inner.alive) stop(1, "the function %s waits at a barrier", c.name.c_str());
    w.block->live = live;
    if (c.result_to < 0) return;
    u64 *to = w.registers + 32 * (size_t)c.result_to;
    for_lanes(active, [&](int l) { to[l] = registers[32 * (size_t)c.result_from + (size_t)l]; });
}

inline bool step(Warp &w, Group &g) {
    if ((size_t)g.pc >= w.function->code.size()) return leave_function(w, g, g.mask);
    Instr &i = w.function->code[(size_t)g.pc];
    u32 active = guarded_lanes(w, i, g.mask);
    w.now = &i;
    if (w.function->has_products && active) note_registers(w, i);
    i.count++;
    counts.warps++;
    counts.lanes += (u64)__builtin_popcount(active);
    switch (i.flow) {
    case branch:     return take_branch(w, g, i, active);
    case leave:      return active ? leave_function(w, g, active) : advance(w, g, g.pc + 1);
    case barrier:    return wait_at_barrier(w, g, i, active);
    case collective: return do_collective(w, g, i, active);
    case trap:
        if (active) stop(1, "trap: %s", place(w, __builtin_ctz(active)).c_str());
        break;
    case call:
        if (active) run_call(w, i, active);
        break;
    default:
        if (active) i.run(w, i, active);
    }
    return advance(w, g, g.pc + 1);
}

/* ---- warps and blocks ------------------------------------------------------------------- */

/* The lanes at the least instruction, with those that wait there for a collective. */
inline Group next_group(const Warp &w, u32 ready) {
    Group g = { INT_MAX, INT_MAX, 0 };
    u32 running = w.alive & ~w.waiting;
    for_lanes(ready, [&](int l) { g.pc = std::min(g.pc, w.pc[l]); });
    for_lanes(running, [&](int l) {
        if (w.pc[l] == g.pc) g.mask |= 1u << l;
        else if (w.pc[l] > g.pc && !(w.meeting >> l & 1)) g.limit = std::min(g.limit, w.pc[l]);
    });
    return g;
}
/* Runs until each live lane waits at a barrier. */
inline void run_warp_to_stop(Warp &w) {
    while (u32 ready = w.alive & ~w.waiting & ~w.meeting) {
        Group g = next_group(w, ready);
        while (step(w, g)) {}
    }
    if (!w.meeting) return;
    w.now = &w.function->code[(size_t)w.pc[__builtin_ctz(w.meeting)]];
    stop(1, "lanes %08x wait for lanes that never come (alive %08x, at the barrier %08x): %s",
         w.meeting, w.alive, w.waiting, place(w, __builtin_ctz(w.meeting)).c_str());
}

inline void set_special(u64 *registers, int first, int lane, Three v) {
    registers[32 * first + lane] = v.x;
    registers[32 * (first + 1) + lane] = v.y;
    registers[32 * (first + 2) + lane] = v.z;
}
inline void begin_warp(Warp &w, Block &b, int number, u64 *registers) {
    Three size = b.launch->size;
    u32 threads = size.x * size.y * size.z;
    w.block = &b;
    w.number = number;
    w.function = b.launch->function;
    w.registers = registers;
    if (w.function->has_products) w.uses.resize((size_t)w.function->slot_count);
    for (int l = 0; l < 32; l++) {
        u32 t = (u32)(32 * number + l);
        if (t < threads) w.alive |= 1u << l;
        set_special(registers, tid_x, l,
                    Three{ t % size.x, t / size.x % size.y, t / size.x / size.y });
        set_special(registers, ntid_x, l, size);
        set_special(registers, ctaid_x, l, b.index);
        set_special(registers, nctaid_x, l, b.launch->grid);
        registers[32 * laneid + l] = (u64)l;
    }
}

/* Memory that blocks use one after another. */
struct Workspace {
    std::vector<u64> registers;
    char  *shared_bytes = nullptr;
    size_t shared_room = 0;
    ~Workspace() { std::free(shared_bytes); }
};
inline void prepare(Block &b, Workspace &space, int warps) {
    const Function &f = *b.launch->function;
    b.shared_size = f.shared_bytes + b.launch->dynamic_bytes;
    if (b.shared_size > space.shared_room || !space.shared_bytes) {
        std::free(space.shared_bytes);
        space.shared_room = round_up(b.shared_size + 1, 1024);
        space.shared_bytes = (char *)std::aligned_alloc(1024, space.shared_room);
    }
    b.shared_bytes = space.shared_bytes;
    std::memset(b.shared_bytes, 0xFF, b.shared_size);
    b.shadow.assign(b.shared_size / 4 + 1, Shadow());
    b.local_size = round_up(f.local_bytes + 1, 64);
    b.locals.assign(b.local_size * 32 * (size_t)warps, (char)0xFF);
    b.warps.resize((size_t)warps);
    if (f.has_products) b.unfinished.assign(b.shared_size / 16 + 1, 0);
    b.warpgroups.resize((size_t)warps / 4);
    for (int k = 0; k < warps; k++)
        begin_warp(b.warps[(size_t)k], b, k,
                   &space.registers[(size_t)k * 32 * (size_t)f.slot_count]);
}
inline void release_barrier(Block &b) {
    b.waiting = 0;
    for (Warp &w : b.warps) w.waiting = 0;
    note_barrier(b);
}
inline void run_block(Block &b) {
    long n = (long)b.warps.size();
    while (b.live) {
        for (long k = 0; k < n; k++) run_warp_to_stop(b.warps[(size_t)host.order(k, n)]);
        if (b.live && b.waiting == b.live) release_barrier(b);
    }
    check_warpgroups(b);
}

/* Runs a kernel for the whole grid. `parameters` are laid out as the kernel's declaration says. */
inline void run_grid(Function &f, Three grid, Three size, size_t dynamic_bytes,
                     const std::vector<char> &parameters) {
    static u32 number;
    Launch launch = { &f, grid, size, dynamic_bytes, parameters, ++number,
                      (long)grid.x * grid.y * grid.z, {} };
    int threads = (int)(size.x * size.y * size.z), warps = (threads + 31) / 32;
    Workspace space;
    counts.launches++;
    if (f.most_threads && threads > f.most_threads)
        stop(1, "%s: %d threads, but its launch bounds say %d", f.name.c_str(), threads,
             f.most_threads);
    space.registers.assign((size_t)f.slot_count * 32 * (size_t)warps, 0xCDCDCDCDCDCDCDCDull);
    for (long k = 0; k < launch.blocks; k++) {
        long at = host.order(k, launch.blocks);
        Block b;
        b.launch = &launch;
        b.number = (u32)at;
        b.live = threads;
        b.index = Three{ (u32)(at % grid.x), (u32)(at / grid.x % grid.y),
                         (u32)(at / grid.x / grid.y) };
        prepare(b, space, warps);
        run_block(b);
    }
}

}   /* namespace ptx */
#endif
