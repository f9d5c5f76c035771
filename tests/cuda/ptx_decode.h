/* ptx_decode.h - a function's text becomes instructions. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * Registers, parameters of a called function included, get slots of 32 lanes. The first slots hold
 * the special registers. An opcode or modifier that the interpreter does not know ends the program
 * with one line that names it.
 */
#ifndef PTX_DECODE_H
#define PTX_DECODE_H
#include "ptx_wgmma.h"
#include <algorithm>

namespace ptx {

enum Special { tid_x, tid_y, tid_z, ntid_x, ntid_y, ntid_z, ctaid_x, ctaid_y, ctaid_z, nctaid_x,
               nctaid_y, nctaid_z, laneid, specials };

inline int special_register(const std::string &name) {
    static const char *const names[] = { "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y",
        "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z",
        "%laneid" };
    for (int k = 0; k < specials; k++)
        if (name == names[k]) return k;
    return -1;
}

struct Decoder {
    Function &f;
    Module   &m;
    int       line;

    explicit Decoder(Function &function)
        : f(function), m(*function.module), line(function.body_line) {}

    [[noreturn]] void refuse(const char *what, const std::string &name) const {
        stop(1, "%s %s: line %d of %s, %s", what, name.c_str(), line, m.text_name.c_str(),
             f.name.c_str());
    }

    /* -- operands ------------------------------------------------------------------------- */

    int slot_of(const std::string &name) {
        auto found = f.slots.find(name);
        if (found != f.slots.end()) return found->second;
        return f.slots[name] = f.slot_count++;
    }
    Operand in_slot(int slot) const {
        Operand o;
        o.kind = Operand::in_register;
        o.slot = slot;
        return o;
    }
    Operand constant(u64 value) {
        Operand o;
        o.kind = Operand::constant;
        o.fixed = m.constant(value);
        return o;
    }
    Operand list(const std::string &s) {
        Operand o;
        o.kind = Operand::list;
        for (const std::string &item : split(s.substr(1, s.size() - 2)))
            o.items.push_back(operand(item));
        return o;
    }
    /* [name+8], [%rd1], [16] */
    Operand address(const std::string &s) {
        std::string inside = trimmed(s.substr(1, s.size() - 2));
        size_t sign = inside.find_first_of("+-", 1);
        s64 offset = 0;
        if (sign != std::string::npos) {
            offset = (s64)number(trimmed(inside.substr(sign + (inside[sign] == '+'))));
            inside = trimmed(inside.substr(0, sign));
        }
        Operand o = operand(inside);
        o.offset += offset;
        return o;
    }

    /* A static variable of shared memory gets its place where a function first names it. */
    size_t place_in_shared(const Variable &v) {
        auto found = f.in_shared.find(v.name);
        if (found != f.in_shared.end()) return found->second;
        size_t at = round_up(f.shared_bytes, v.align);
        f.shared_bytes = at + v.bytes;
        return f.in_shared[v.name] = at;
    }
    Operand variable(const Variable &v) {
        if (v.space == global) return constant((u64)(uintptr_t)v.data);
        if (!v.external) return constant(place_in_shared(v));
        f.dynamic_align = std::max(f.dynamic_align, v.align);
        Operand o = constant(0);            /* known when all static variables have a place      */
        o.dynamic = true;
        return o;
    }
    bool parameter(const std::string &name, Operand *o) {
        if (!f.is_entry) return false;
        for (const Parameter &p : f.parameters)
            if (p.name == name) { *o = constant(p.offset); return true; }
        return false;
    }
    Operand named(const std::string &name) {
        Operand o;
        auto in_local = f.in_local.find(name);
        auto in_module = m.variables.find(name);
        if (in_local != f.in_local.end()) return constant(in_local->second);
        if (parameter(name, &o)) return o;
        if (in_module != m.variables.end()) return variable(in_module->second);
        o.kind = Operand::label;
        o.name = name;
        return o;
    }
    Operand operand(const std::string &s) {
        if (s.empty() || s == "_") return Operand();
        if (s[0] == '{') return list(s);
        if (s[0] == '[') return address(s);
        if (std::isdigit((unsigned char)s[0]) || s[0] == '-') return constant(number(s));
        int special = special_register(s);
        if (special >= 0) return in_slot(special);
        auto found = f.slots.find(s);
        return found != f.slots.end() ? in_slot(found->second) : named(s);
    }

    /* -- declarations --------------------------------------------------------------------- */

    /* .reg .b32 %r<10>;   .reg .pred p, q; */
    void declare_registers(const std::string &s) {
        std::istringstream in(s);
        std::string reg, type, rest;
        in >> reg >> type;
        std::getline(in, rest);
        for (const std::string &name : split(rest)) {
            size_t angle = name.find('<');
            if (angle == std::string::npos) { slot_of(name); continue; }
            int n = std::atoi(name.c_str() + angle + 1);
            for (int k = 0; k < n; k++) slot_of(name.substr(0, angle) + std::to_string(k));
        }
    }
    void declare_local(const std::string &s) {
        Declaration d = declaration(s);
        size_t at = round_up(f.local_bytes, d.align);
        f.in_local[d.name] = at;
        f.local_bytes = at + d.bytes;
    }

    /* -- opcodes -------------------------------------------------------------------------- */

    /* "ld.global.f32": its words. */
    static std::vector<std::string> words_of(const std::string &opcode) {
        std::vector<std::string> words;
        std::istringstream in(opcode);
        std::string word;
        while (std::getline(in, word, '.')) words.push_back(word);
        return words;
    }
    static bool set_space(Instr &i, const std::string &word) {
        static const char *const names[] = { "global", "shared", "local", "param" };
        for (int k = 0; k < 4; k++)
            if (word == names[k]) { i.space = (Space)(k + 1); return true; }
        return false;
    }
    bool set_type(Instr &i, const std::string &word) const {
        Type t = type_of(word);
        if (t != no_type) i.type = t;
        return t != no_type;
    }
    /* What a cache keeps changes no value. */
    static bool is_hint(const std::string &word)
    { return word == "wb" || word == "cg" || word == "ca" || word == "cs" || word == "uni"; }

    bool memory_word(Instr &i, const std::string &word) const {
        if (word == "v2" || word == "v4") i.vector = (u8)(word[1] - '0');
        else if (word == "volatile") i.mode = 1;
        else if (word == "nc") i.constant_cache = true;
        else return is_hint(word) || set_space(i, word) || set_type(i, word);
        return true;
    }
    bool memory(Instr &i, const std::vector<std::string> &words) const {
        i.run = words[0] == "ld" ? load : store;
        for (size_t k = 1; k < words.size(); k++)
            if (!memory_word(i, words[k])) return false;
        return i.type != no_type;
    }
    bool moving(Instr &i, const std::vector<std::string> &words) const {
        i.run = move;
        return words.size() == 2 && set_type(i, words[1]);
    }
    bool address_word(Instr &i, const std::vector<std::string> &words) const {
        i.run = convert_address;
        i.mode = words.size() == 4 && words[1] == "to";
        return words.size() == 3u + (size_t)i.mode && words.back() == "u64" &&
               set_space(i, words[words.size() - 2]);
    }

    static bool rounding_word(Conversion &c, const std::string &word) {
        static const char *const names[] = { "rn", "rz", "rm", "rp" };
        for (int k = 0; k < 4; k++) {
            if (word != names[k] && word != std::string(names[k]) + "i") continue;
            c.rounding = (Rounding)(k + 1);
            c.whole = word.size() == 3;
            return true;
        }
        return false;
    }
    bool conversion_word(Conversion &c, const std::string &word) const {
        if (rounding_word(c, word)) return true;
        if (word == "sat") c.saturate = true;
        else if (word == "ftz") c.flush = true;
        else {
            Type t = type_of(word);
            (c.to == no_type ? c.to : c.from) = t;
            return t != no_type;
        }
        return true;
    }
    /* cvt: a rounding to f32, f64 or f16 other than .rn, and a saturated integer, are not known. */
    bool converting(Instr &i, const std::vector<std::string> &words) const {
        Conversion &c = i.conversion;
        i.run = convert_lanes;
        for (size_t k = 1; k < words.size(); k++)
            if (!conversion_word(c, words[k])) return false;
        if (c.from == no_type || c.to == type_bf16 || (c.to == type_f16 && c.from != type_f32))
            return false;
        bool to_real = is_real(c.to);
        if (to_real && !c.whole && c.rounding > nearest) return false;
        return !c.saturate || (c.to == type_f32 && is_real(c.from));
    }

    template <size_t n> static int index_of(const char *const (&names)[n], const std::string &s) {
        for (size_t k = 0; k < n; k++)
            if (s == names[k]) return (int)k;
        return -1;
    }
    bool atomically(Instr &i, const std::vector<std::string> &words) const {
        static const char *const names[] = { "add", "min", "max", "inc" };
        if (words.size() != 4 || !set_space(i, words[1]) || !set_type(i, words[3])) return false;
        i.mode = index_of(names, words[2]);
        i.run = i.type == type_u32 ? atomic<u32> : i.type == type_s32 ? atomic<s32>
              : i.type == type_u64 ? atomic<u64> : nullptr;
        return i.mode >= 0 && i.run;
    }
    bool shuffling(Instr &i, const std::vector<std::string> &words) const {
        static const char *const names[] = { "up", "down", "bfly", "idx" };
        if (words.size() != 4 || words[1] != "sync" || words[3] != "b32") return false;
        i.flow = collective;
        i.run = shuffle;
        i.mode = index_of(names, words[2]);
        return i.mode >= 0;
    }
    bool asynchronous(Instr &i, const std::string &opcode) const {
        if (opcode == "cp.async.commit_group") i.run = commit_copies;
        else if (opcode == "cp.async.wait_group") i.run = wait_for_copies;
        else if (opcode == "cp.async.cg.shared.global") i.run = copy_async;
        else if (opcode == "cp.async.ca.shared.global") i.run = copy_async;
        return i.run != nullptr;
    }
    bool matrices(Instr &i, const std::string &opcode) const {
        i.flow = collective;
        i.run = multiply_matrices;
        i.type = opcode.find(".bf16.bf16.") != std::string::npos ? type_bf16 : type_f16;
        i.mode = opcode.find(".m16n8k16.") != std::string::npos ? 16 : 8;
        std::string kind = i.type == type_bf16 ? "bf16" : "f16";
        return opcode == "mma.sync.aligned.m16n8k" + std::to_string(i.mode) + ".row.col.f32." +
                         kind + "." + kind + ".f32";
    }
    /* One, two or four matrices. */
    bool matrix_load(Instr &i, const std::string &opcode) const {
        size_t at = opcode.find(".x");
        i.flow = collective;
        i.run = load_matrices;
        i.vector = at == std::string::npos ? 0 : (u8)(opcode[at + 2] - '0');
        i.trans = opcode.find(".trans.") != std::string::npos;
        return (i.vector == 1 || i.vector == 2 || i.vector == 4) &&
               opcode == "ldmatrix.sync.aligned.m8n8.x" + std::to_string(i.vector) +
                         (i.trans ? ".trans" : "") + ".shared.b16";
    }
    /* wgmma: products of 64 rows, 16 summed over. */
    bool warpgroup(Instr &i, const std::string &opcode) const {
        const std::string all = ".sync.aligned", product = "wgmma.mma_async" + all + ".m64n";
        i.flow = collective;
        f.has_products = true;
        if (!f.is_entry) refuse("in a called function,", opcode);
        if (opcode == "wgmma.fence" + all) i.run = fence_registers;
        else if (opcode == "wgmma.commit_group" + all) i.run = commit_products;
        else if (opcode == "wgmma.wait_group" + all) i.run = wait_for_products;
        if (i.run || !starts_with(opcode, product.c_str())) return i.run != nullptr;
        i.run = multiply_warpgroup;
        i.mode = std::atoi(opcode.c_str() + product.size());
        i.type = opcode.find(".bf16") != std::string::npos ? type_bf16 : type_f16;
        std::string kind = i.type == type_bf16 ? ".bf16" : ".f16";
        return i.mode >= 8 && i.mode <= 256 && i.mode % 8 == 0 &&
               opcode == product + std::to_string(i.mode) + "k16.f32" + kind + kind;
    }
    /* setmaxnreg only moves registers between warps. */
    static bool flowing(Instr &i, const std::string &opcode) {
        if (opcode == "bra" || opcode == "bra.uni") i.flow = branch;
        else if (opcode == "call" || opcode == "call.uni") i.flow = call;
        else if (opcode == "ret" || opcode == "exit") i.flow = leave;
        else if (opcode == "trap") i.flow = trap;
        else if (opcode == "bar.sync" || opcode == "barrier.sync") i.flow = barrier;
        else if (opcode == "bar.warp.sync") { i.flow = collective; i.run = meet; }
        else if (opcode == "membar.gl" || opcode == "membar.sys") i.run = fence;
        else if (opcode == "fence.proxy.async" || opcode == "fence.proxy.async.shared::cta")
            i.run = fence_proxy;
        else if (opcode == "setmaxnreg.inc.sync.aligned.u32" ||
                 opcode == "setmaxnreg.dec.sync.aligned.u32") i.run = do_nothing;
        else return false;
        return true;
    }
    bool known(Instr &i, const std::string &opcode) const {
        auto found = arithmetic_opcodes().find(opcode);
        if (found != arithmetic_opcodes().end()) { i.run = found->second; return true; }
        std::vector<std::string> words = words_of(opcode);
        if (words[0] == "ld" || words[0] == "st") return memory(i, words);
        if (words[0] == "mov") return moving(i, words);
        if (words[0] == "cvt") return converting(i, words);
        if (words[0] == "cvta") return address_word(i, words);
        if (words[0] == "atom") return atomically(i, words);
        if (words[0] == "shfl") return shuffling(i, words);
        if (words[0] == "cp") return asynchronous(i, opcode);
        if (words[0] == "mma") return matrices(i, opcode);
        if (words[0] == "ldmatrix") return matrix_load(i, opcode);
        if (words[0] == "wgmma") return warpgroup(i, opcode);
        return flowing(i, opcode);
    }

    /* The first capability that has the opcode. nvcc does not read what stands in asm. */
    static int least_target(const std::string &opcode) {
        auto has = [&](const char *part) { return opcode.find(part) != std::string::npos; };
        if (starts_with(opcode, "fence.proxy")) return 90;
        if (has("e4m3") || has("e5m2")) return 89;
        if (has("bf16") || has("m16n8k16") || starts_with(opcode, "cp.async")) return 80;
        if (has("m16n8k8") || starts_with(opcode, "ldmatrix") || starts_with(opcode, "tanh.approx"))
            return 75;
        return 0;
    }
    /* GPUs of 9.0 have these, and neither older nor newer ones. */
    static bool is_specific(const std::string &opcode)
    { return starts_with(opcode, "wgmma") || starts_with(opcode, "setmaxnreg"); }

    /* -- instructions --------------------------------------------------------------------- */

    /* Takes "@%p1 " or "@!%p1 " off the front. */
    std::string guarded(Instr &i, const std::string &s) {
        if (s[0] != '@') return s;
        size_t blank = s.find_first_of(" \t\n");
        i.guard_negated = s[1] == '!';
        std::string name = s.substr(i.guard_negated ? 2 : 1, blank - (i.guard_negated ? 2 : 1));
        auto found = f.slots.find(name);
        if (found == f.slots.end()) refuse("an unknown predicate", name);
        i.guard = found->second;
        return trimmed(s.substr(blank));
    }
    /* (result), name, (inputs) */
    void read_call(Instr &i, const std::vector<std::string> &texts) {
        size_t k = 0;
        i.called.reset(new Call);
        if (texts[0][0] == '(')
            i.called->outputs = split(texts[k++].substr(1, texts[0].size() - 2));
        i.called->name = texts[k++];
        if (k < texts.size()) i.called->inputs = split(texts[k].substr(1, texts[k].size() - 2));
    }
    /* Parameters of calls are registers: a load or store of one is a move. */
    bool is_call_parameter(Instr &i, const std::string &text) {
        if (i.space != param || (i.run != load && i.run != store)) return false;
        std::string name = text.substr(1, text.find_first_of("+]") - 1);
        if (name[0] == '%') return false;
        if (operand(name).kind != Operand::label && f.slots.find(name) == f.slots.end())
            return false;
        if (i.vector != 1) refuse("a vector in a call's parameter", name);
        bool is_load = i.run == load;
        i.run = move;
        if (is_load) i.from[0] = in_slot(slot_of(name));
        else {
            i.to = in_slot(slot_of(name));
            i.from.erase(i.from.begin());
        }
        return true;
    }
    static bool has_result(const Instr &i) {
        for (Handler none : { (Handler)nullptr, (Handler)store, (Handler)copy_async,
                              (Handler)wait_for_copies, (Handler)wait_for_products, (Handler)meet,
                              (Handler)do_nothing })
            if (i.run == none) return false;
        return true;
    }
    void read_operands(Instr &i, const std::vector<std::string> &texts) {
        size_t k = 0;
        if (has_result(i) && !texts.empty()) {
            size_t bar = texts[0].find('|');
            i.to = operand(trimmed(texts[0].substr(0, bar)));
            if (bar != std::string::npos) i.to2 = operand(trimmed(texts[0].substr(bar + 1)));
            k = 1;
        }
        for (; k < texts.size(); k++) i.from.push_back(operand(texts[k]));
        if (i.run == move && i.to.kind == Operand::list) i.run = unpack;
        else if (i.run == move && i.from[0].kind == Operand::list) i.run = pack;
        size_t place = i.run == load ? 1 : 0;
        if (i.run == load || i.run == store) is_call_parameter(i, texts[place]);
        for (const Operand &o : i.from)
            if (o.kind == Operand::label) refuse("an unknown name", o.name);
    }
    void instruction(const std::string &statement, u8 used_bytes) {
        Instr i;
        i.line = line;
        i.used_bytes = used_bytes;
        std::string s = guarded(i, statement);
        size_t blank = std::min(s.find_first_of(" \t\n"), s.size());
        std::string opcode = s.substr(0, blank);
        std::vector<std::string> texts = split(s.substr(blank));
        if (!known(i, opcode)) refuse("unknown opcode", opcode);
        if (least_target(opcode) > m.target) refuse("too new an opcode", opcode);
        if (is_specific(opcode) && !m.specific) refuse("an opcode of sm_90a alone:", opcode);
        if (i.flow == call) read_call(i, texts);
        else if (i.flow == branch) i.to.name = texts[0];
        else read_operands(i, texts);
        check(i, opcode);
        f.code.push_back(std::move(i));
    }

    /* Are there as many operands as the instruction reads? */
    void check(const Instr &i, const std::string &opcode) const {
        size_t least = 1;
        if (i.flow != straight && i.flow != collective) return;
        if (i.run == fence || i.run == commit_copies || i.run == fence_proxy ||
            i.run == fence_registers || i.run == commit_products) return;
        auto begins = [&](const char *with) { return starts_with(opcode, with); };
        if (begins("fma") || begins("mad") || begins("selp") || begins("prmt") || begins("mma"))
            least = 3;
        else if (begins("bfi") || begins("shfl")) least = 4;
        else if (i.run == copy_async) least = 3;
        else if (begins("add") || begins("sub") || begins("mul") || begins("div") ||
                 begins("rem") || begins("min") || begins("max") || begins("setp") ||
                 begins("shl") || begins("shr") || begins("atom")) least = 2;
        if (i.from.size() < least) refuse("too few operands of", opcode);
        if (i.run == multiply_matrices &&
            (i.to.items.size() != 4 || i.from[0].items.size() != (size_t)i.mode / 4 ||
             i.from[1].items.size() != (size_t)i.mode / 8 || i.from[2].items.size() != 4))
            refuse("wrong fragments of", opcode);
        if (i.run == multiply_warpgroup && !are_warpgroup_operands(i))
            refuse("wrong operands of", opcode);
        if (i.run == load_matrices && i.to.items.size() != i.vector)
            refuse("wrong fragments of", opcode);
    }

    /* -- the whole body ------------------------------------------------------------------- */

    /* .pragma "used_bytes_mask 15": how many bytes of the next load are used. */
    static u8 used_bytes(const std::string &s) {
        size_t at = s.find("used_bytes_mask");
        if (at == std::string::npos) return 0;
        unsigned long mask = std::strtoul(s.c_str() + at + 15, nullptr, 10);
        return mask ? (u8)(64 - __builtin_clzl(mask)) : 0;
    }
    void statement(const std::string &s, u8 *used) {
        if (starts_with(s, ".reg")) declare_registers(s);
        else if (starts_with(s, ".local")) declare_local(s.substr(6));
        else if (starts_with(s, ".shared")) read_variable(m, s);
        else if (starts_with(s, ".pragma")) *used = used_bytes(s);
        else if (starts_with(s, ".param") || starts_with(s, ".loc")) return;
        else {
            instruction(s, *used);
            *used = 0;
        }
    }
    /* Statements end with ';', labels with ':'; the braces of scopes are skipped. */
    void read_body() {
        Text in(f.body, f.body_line);
        u8 used = 0;
        for (in.skip_blanks(); !in.at_end(); in.skip_blanks()) {
            char c = in.s[in.at];
            line = in.line;
            if (c == '{' || c == '}') { in.advance(in.at + 1); continue; }
            size_t end = in.s.find_first_of(";:", in.at);
            while (end + 1 < in.s.size() && in.s[end] == ':' && in.s[end + 1] == ':')
                end = in.s.find_first_of(";:", end + 2);
            if (end == std::string::npos) refuse("the PTX is truncated in", f.name);
            std::string text = trimmed(in.s.substr(in.at, end - in.at));
            if (in.s[end] == ':') f.labels[text] = (int)f.code.size();
            else statement(text, &used);
            in.advance(end + 1);
        }
    }
    void link_call(Instr &i);

    /* Which registers an operand is made of; a label has none. */
    static void add_slots(std::vector<int> &slots, const Operand &o) {
        if (o.kind == Operand::in_register && !o.fixed) slots.push_back(o.slot);
        for (const Operand &item : o.items) add_slots(slots, item);
    }
    static void list_registers(Instr &i) {
        add_slots(i.writes, i.to);
        add_slots(i.writes, i.to2);
        for (const Operand &o : i.from) add_slots(i.reads, o);
        if (i.guard >= 0) i.reads.push_back(i.guard);
        if (!i.called) return;
        i.reads.insert(i.reads.end(), i.called->from.begin(), i.called->from.end());
        if (i.called->result_to >= 0) i.writes.push_back(i.called->result_to);
    }
    void link() {
        f.shared_bytes = round_up(f.shared_bytes, f.dynamic_align);
        for (Instr &i : f.code) {
            line = i.line;
            if (i.flow == call) link_call(i);
            if (f.has_products) list_registers(i);
            for (Operand &o : i.from)
                if (o.dynamic) o.fixed = m.constant(f.shared_bytes);
            if (i.flow != branch) continue;
            auto found = f.labels.find(i.to.name);
            if (found == f.labels.end()) refuse("an unknown label", i.to.name);
            i.target = found->second;
        }
    }
};

inline void decode(Function &f) {
    if (f.decoded) return;
    f.decoded = true;
    f.slot_count = specials;
    Decoder d(f);
    d.read_body();
    d.link();
    f.body.clear();
}

/* A called function has no shared or local memory of its own. */
inline void Decoder::link_call(Instr &i) {
    Call &c = *i.called;
    auto found = m.functions.find(c.name);
    if (found == m.functions.end()) refuse("an unknown function", c.name);
    c.callee = found->second.get();
    decode(*c.callee);
    if (c.callee->shared_bytes || c.callee->local_bytes) refuse("memory of its own in", c.name);
    if (c.inputs.size() != c.callee->parameters.size()) refuse("wrong parameters of", c.name);
    Decoder other(*c.callee);
    for (size_t k = 0; k < c.inputs.size(); k++) {
        c.from.push_back(slot_of(c.inputs[k]));
        c.to.push_back(other.slot_of(c.callee->parameters[k].name));
    }
    if (c.outputs.empty()) return;
    c.result_to = slot_of(c.outputs[0]);
    c.result_from = other.slot_of(c.callee->result);
}

}   /* namespace ptx */
#endif
