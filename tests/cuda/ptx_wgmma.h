/* ptx_wgmma.h - products of a warpgroup: wgmma, which GPUs of 9.0 alone have. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * d[64][N] = a[64][16] b[16][N] (+ d) of four warps. Sources, sections of the PTX ISA 9.0 under
 * "Asynchronous Warpgroup Level Matrix Instructions": "Register Fragments" (who has which element),
 * "Matrix Descriptor Format" (the bits), "Leading Dimension Byte Offset", "Stride Dimension Byte
 * Offset" and "Canonical Layouts" (where an element lies), "wgmma.fence", "wgmma.wait_group" (when a
 * register may be used), "Async proxy" (when shared memory may be).
 *
 * Each warp does its 16 rows when it arrives, and reads only these rows of a; that the four warps of
 * a warpgroup do the same, one after another, is checked from a list. Products are exact; sums are
 * f32, in the order of k, after d. PTX_ROUGH=1: as tensor_sum says.
 *
 * Registers. A product's sums belong to it until wgmma.wait_group, and so do its factors. An ordinary
 * use of a register and a product that uses it later are separated by wgmma.fence; only sums pass
 * from one product to the next of as many columns without it. A mov carries the state of a register
 * to another: nvcc makes them where it likes, and ptxas takes them away. Not seen, therefore: a
 * missing fence after sums were set to a constant.
 */
#ifndef PTX_WGMMA_H
#define PTX_WGMMA_H
#include "ptx_opcodes.h"

namespace ptx {

/* ---- what the warps of a warpgroup do together ------------------------------------------ */

inline void join_warpgroup(Warp &w, const Together &now) {
    Block &b = *w.block;
    size_t group = (size_t)w.number / 4, k = w.together++;
    if (group >= b.warpgroups.size())
        stop(1, "wgmma in a warpgroup of fewer than four warps: %s", place(w, 0).c_str());
    std::vector<Together> &all = b.warpgroups[group];
    if (k == all.size()) { all.push_back(now); return; }
    if (all[k].instr != now.instr)
        stop(1, "warps of a warpgroup are at different wgmma instructions: line %d, and %s",
             all[k].instr->line, place(w, 0).c_str());
    if (all[k].a != now.a || all[k].b != now.b || all[k].adds != now.adds)
        stop(1, "warps of a warpgroup give wgmma different descriptors: %s", place(w, 0).c_str());
}
/* At the end of a block. */
inline void check_warpgroups(const Block &b) {
    for (size_t k = 0; k < 4 * b.warpgroups.size(); k++) {
        const Warp &w = b.warps[k];
        const std::vector<Together> &all = b.warpgroups[k / 4];
        if (w.together < all.size())
            stop(1, "a warp misses the wgmma of line %d, which its warpgroup executes: %s",
                 all[w.together].instr->line, place(w, 0).c_str());
    }
}

/* ---- registers -------------------------------------------------------------------------- */

inline void tell_register(const Warp &w, int slot, const char *what) {
    std::string name = "?";
    counts.races++;
    for (const auto &entry : w.function->slots)
        if (entry.second == slot) name = entry.first;
    tell(w, 0, what, ("register " + name).c_str(), "");
}
inline bool is_unfinished(const Warp &w, const RegisterUse &r) { return r.group > w.finished; }

inline void carry_use(Warp &w, int to, const Operand &from) {
    RegisterUse &d = w.uses[(size_t)to];
    RegisterUse s;
    if (!from.fixed) s = w.uses[(size_t)from.slot];
    if (is_unfinished(w, d) && !is_unfinished(w, s))
        tell_register(w, to, "a write to a register of an unfinished product");
    s.touched = std::max(s.touched, d.touched);
    d = s;
}
inline void multiply_warpgroup(Warp &, const Instr &, u32);

/* Before any instruction of a kernel that has wgmma. */
inline void note_registers(Warp &w, const Instr &i) {
    w.time++;
    if (i.run == multiply_warpgroup) return;
    if (i.run == move) { carry_use(w, i.to.slot, i.from[0]); return; }
    for (int slot : i.reads) {
        RegisterUse &r = w.uses[(size_t)slot];
        if (is_unfinished(w, r)) tell_register(w, slot, "a read of a register of an unfinished product");
        r.touched = w.time;
    }
    for (int slot : i.writes) {
        RegisterUse &r = w.uses[(size_t)slot];
        if (is_unfinished(w, r)) tell_register(w, slot, "a write to a register of an unfinished product");
        r = RegisterUse();
        r.touched = w.time;
    }
}
/* A product uses a register; columns: 0 for a factor, otherwise of the product. */
inline void use_register(Warp &w, int slot, int columns) {
    RegisterUse &r = w.uses[(size_t)slot];
    bool same = r.columns == columns;
    if (is_unfinished(w, r) && !same)
        tell_register(w, slot, "a product uses a register of an unfinished product");
    if (!w.fenced || r.touched > w.fenced || (r.multiplied > w.fenced && !same))
        tell_register(w, slot, "no wgmma.fence between a use of a register and a product");
    r.multiplied = w.time;
    r.group = w.product_group;
    r.columns = (u16)columns;
}
inline void fence_registers(Warp &w, const Instr &i, u32) {
    join_warpgroup(w, Together{ &i, 0, 0, 0 });
    w.fenced = w.time;
}
inline void commit_products(Warp &w, const Instr &i, u32) {
    join_warpgroup(w, Together{ &i, 0, 0, 0 });
    w.product_group++;
}
/* Completes all but the newest groups, as many as the operand says. */
inline void wait_for_products(Warp &w, const Instr &i, u32) {
    u32 newest = (u32)w.value(i.from[0])[0], closed = w.product_group - 1;
    std::vector<Unfinished> left;
    join_warpgroup(w, Together{ &i, 0, 0, 0 });
    if (closed > newest) w.finished = std::max(w.finished, closed - newest);
    for (Unfinished &p : w.products) {
        if (p.group > w.finished) { left.push_back(std::move(p)); continue; }
        for (u32 piece : p.pieces) w.block->unfinished[piece]--;
    }
    w.products.swap(left);
}
inline void fence_proxy(Warp &w, const Instr &, u32 mask)
{ for_lanes(mask, [&](int l) { w.proxy.all[l]++; }); }
inline void do_nothing(Warp &, const Instr &, u32) {}

/* ---- matrices in shared memory ---------------------------------------------------------- */

/* width: bytes of a row of a pattern, which is 8 rows; 16: no swizzle. across: the elements of one k
 * lie side by side (MN-major), otherwise those of one row (K-major). */
struct Matrix { u32 start, leading, stride, width, rows; bool across; };

inline Matrix matrix_of(const Warp &w, u64 descriptor, u32 rows, bool across) {
    static const u32 widths[] = { 16, 128, 64, 32 };
    Matrix m = { (u32)(descriptor & 0x3FFF) * 16, (u32)(descriptor >> 16 & 0x3FFF) * 16,
                 (u32)(descriptor >> 32 & 0x3FFF) * 16, widths[descriptor >> 62], rows, across };
    if (descriptor & 0x3FF1C000C000C000ull)
        fault(w, 0, "a matrix descriptor with unknown bits", descriptor, 8);
    if (descriptor >> 49 & 7)
        fault(w, 0, "a matrix descriptor with a base offset, which is not known", descriptor, 8);
    if (m.width == 16) return m;
    u32 pattern = 8 * m.width, in_row = across ? std::min(2 * rows, m.width) : 32;
    if (m.start % pattern >= m.width)
        fault(w, 0, "a swizzled matrix is misaligned", m.start, (int)pattern);
    if (m.start % m.width + in_row > m.width)
        fault(w, 0, "a swizzled matrix leaves its row", m.start, (int)m.width);
    if ((across || rows > 8) && m.stride % pattern)
        fault(w, 0, "a stride of a swizzled matrix is misaligned", m.stride, (int)pattern);
    if (across && 2 * rows > m.width && m.leading % pattern)
        fault(w, 0, "a leading offset of a swizzled matrix is misaligned", m.leading, (int)pattern);
    return m;
}
/* Canonical layouts, in bytes; an element has two. */
inline u32 offset_of(const Matrix &m, u32 row, u32 k) {
    u32 per = m.width / 2;
    if (m.width == 16 && m.across)
        return row % 8 * 2 + row / 8 * m.stride + k % 8 * 16 + k / 8 * m.leading;
    if (m.width == 16) return row % 8 * 16 + row / 8 * m.stride + k / 8 * m.leading + k % 8 * 2;
    if (m.across)
        return row % per * 2 + row / per * m.leading + k % 8 * m.width + k / 8 * m.stride;
    return row % 8 * m.width + row / 8 * m.stride + k * 2;
}
/* The swizzle: address bits from 4 on ^= as many from 7 on. */
inline u32 address_of(const Matrix &m, u32 row, u32 k) {
    u32 at = m.start + offset_of(m, row, k);
    return at ^ (at >> 3 & (m.width - 16));
}

/* Has the writer executed fence.proxy.async after its write, and then met this warp? */
inline void check_proxy(const Warp &w, u32 at, const Shadow &s) {
    if (s.write.thread < 0) return;
    const Warp &writer = w.block->warps[(size_t)s.write.thread / 32];
    const u32 *fences = &writer == &w ? writer.proxy.met : writer.proxy.at_barrier;
    if (fences[s.write.thread % 32] > s.fences) return;
    char other[40];
    counts.races++;
    std::snprintf(other, sizeof other, ", written by thread %d", s.write.thread);
    complain(w, 0, "no fence.proxy.async and barrier between a write and a product", at, other);
}
/* 8 elements that lie side by side. All lanes read them: the warp's own later writes need no barrier. */
inline void read_piece(const Warp &w, u32 at, Unfinished &product, u16 *codes) {
    Block &b = *w.block;
    std::memcpy(codes, in_shared(w, 0, at, 16, use_read), 16);
    for (u32 word = at / 4; word < at / 4 + 4; word++) {
        Shadow &s = b.shadow[word];
        check_proxy(w, at, s);
        s.read.sync = w.sync - 1;
    }
    b.unfinished[at / 16]++;
    product.pieces.push_back(at / 16);
}
inline float float_of(u16 code, Type type)
{ return type == type_bf16 ? bf16_value(code) : half_value(code); }

/* Row r, element k goes to out[r * row_step + k * k_step], for rows [first, first + rows). */
struct Target { float *out; u32 first, rows, row_step, k_step; };

inline void read_matrix(const Warp &w, const Matrix &m, Type type, Unfinished &product,
                        const Target &t) {
    u16 codes[8];
    u32 rows = m.across ? 8 : 1, ks = m.across ? 1 : 8;
    for (u32 r = 0; r < t.rows; r += rows)
        for (u32 k = 0; k < 16; k += ks) {
            read_piece(w, address_of(m, t.first + r, k), product, codes);
            float *to = t.out + r * t.row_step + k * t.k_step;
            for (u32 e = 0; e < 8; e++)
                to[e * (m.across ? t.row_step : t.k_step)] = float_of(codes[e], type);
        }
}

/* ---- products --------------------------------------------------------------------------- */

typedef float Eight __attribute__((vector_size(32)));
const int most_columns = 256;
/* Of one warp: 16 rows. */
struct Factors { float a[16][16]; Eight b[16][most_columns / 8], d[16][most_columns / 8]; };

inline bool has_left_registers(const Instr &i) { return i.from[0].kind == Operand::list; }

/* Operands: a, b, scale-d, scales of a and b; is a transposed, if it is in memory; is b? */
inline bool are_warpgroup_operands(const Instr &i) {
    if (i.to.items.size() != (size_t)i.mode / 2 || i.from.empty()) return false;
    bool left = has_left_registers(i);
    for (const Operand &o : i.to.items)
        if (o.kind != Operand::in_register) return false;
    for (const Operand &o : i.from[0].items)
        if (o.kind != Operand::in_register) return false;
    return i.from.size() == (left ? 6u : 7u) && (!left || i.from[0].items.size() == 4);
}
inline u64 common_value(const Warp &w, const Operand &o) {
    const u64 *v = w.value(o);
    for (int l = 1; l < 32; l++)
        if (v[l] != v[0])
            stop(1, "lanes of a warp give wgmma different descriptors: %s", place(w, l).c_str());
    return v[0];
}
/* The four registers of a fragment, as those of mma.sync: row l / 4, elements from 2 (l % 4) on. */
inline void gather_left(const Warp &w, const Instr &i, Factors &f) {
    for (u32 r = 0; r < 4; r++) {
        const u64 *v = w.value(i.from[0].items[r]);
        for (u32 e = 0; e < 64; e++) {
            u32 l = e / 2, k = l % 4 * 2 + e % 2 + r / 2 * 8;
            f.a[l / 4 + r % 2 * 8][k] = float_of((u16)(v[l] >> 16 * (e % 2)), i.type);
        }
    }
}
/* Calls go(register of d, lane, row, column) for each element of d. */
template <class F> inline void for_sums(int columns, F go) {
    for (int r = 0; r < columns / 2; r++)
        for (int l = 0; l < 32; l++)
            go((size_t)r, l, l / 4 + r % 4 / 2 * 8, r / 4 * 8 + l % 4 * 2 + r % 2);
}
inline void multiply_factors(Factors &f, int columns) {
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < columns / 8; n++) f.d[r][n] += f.a[r][k] * f.b[k][n];
}
inline void multiply_roughly(Factors &f, int columns) {
    double terms[16];
    for (int e = 0; e < 16 * columns; e++) {
        int r = e / columns, n = e % columns;
        for (int k = 0; k < 16; k++) terms[k] = (double)f.a[r][k] * f.b[k][n / 8][n % 8];
        f.d[r][n / 8][n % 8] = tensor_sum(f.d[r][n / 8][n % 8], terms, 16);
    }
}
inline void multiply_warpgroup(Warp &w, const Instr &i, u32) {
    static Factors f;
    bool left = has_left_registers(i);
    u64 a = left ? 0 : common_value(w, i.from[0]), b = common_value(w, i.from[1]);
    u64 adds = common_value(w, i.from[2]);
    float sign = (s32)w.value(i.from[3])[0] * (s32)w.value(i.from[4])[0] < 0 ? -1.0f : 1.0f;
    int columns = i.mode;
    Unfinished product = { w.product_group, {} };
    join_warpgroup(w, Together{ &i, a, b, adds });
    for (const Operand &o : i.to.items) use_register(w, o.slot, columns);

    if (left) {
        for (const Operand &o : i.from[0].items) use_register(w, o.slot, 0);
        gather_left(w, i, f);
    } else {
        Matrix m = matrix_of(w, a, 64, w.value(i.from[5])[0] != 0);
        read_matrix(w, m, i.type, product, Target{ f.a[0], (u32)w.number % 4 * 16, 16, 16, 1 });
    }
    Matrix m = matrix_of(w, b, (u32)columns, w.value(i.from.back())[0] != 0);
    read_matrix(w, m, i.type, product,
                Target{ (float *)f.b[0], 0, (u32)columns, 1, (u32)most_columns });
    for (int e = 0; e < 256; e++) f.a[e / 16][e % 16] *= sign;

    for_sums(columns, [&](size_t r, int l, int row, int n) {
        f.d[row][n / 8][n % 8] = adds ? as<float>(w.value(i.to.items[r])[l]) : 0.0f;
    });
    if (is_rough()) multiply_roughly(f, columns);
    else multiply_factors(f, columns);
    for_sums(columns, [&](size_t r, int l, int row, int n) {
        w.result(i.to.items[r])[l] = bits_of(canonical((float)f.d[row][n / 8][n % 8]));
    });
    w.products.push_back(std::move(product));
}

}   /* namespace ptx */
#endif
