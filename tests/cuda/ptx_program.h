/* ptx_program.h - a PTX text as modules, functions, variables and instructions. Tests only.
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * read_module finds the functions and variables of a text. A function's body stays text until
 * ptx_decode.h decodes it, before its first launch: a text of 20 MB is read in a tenth of a second.
 */
#ifndef PTX_PROGRAM_H
#define PTX_PROGRAM_H
#include "ptx_values.h"
#include <map>
#include <memory>
#include <sstream>
#include <unordered_map>
#include <vector>

namespace ptx {

enum Space : u8 { generic, global, shared, local, param };

/* ---- instructions ----------------------------------------------------------------------- */

struct Operand {
    enum Kind : u8 { none, in_register, constant, list, label } kind = none;
    bool        negated = false;
    int         slot = -1;              /* in_register: which register                          */
    const u64  *fixed = nullptr;        /* constant: 32 copies of its value                     */
    s64         offset = 0;             /* of an address                                        */
    bool        dynamic = false;        /* the address of dynamic shared memory                 */
    std::string name;                   /* label: its text                                      */
    std::vector<Operand> items;         /* list: {a, b, ...}                                    */
};

struct Warp;
struct Function;
struct Instr;
/* Does the work of an instruction for the lanes in the mask. */
typedef void (*Handler)(Warp &, const Instr &, u32 mask);

/* How an instruction moves a warp's lanes. */
enum Flow : u8 { straight, branch, call, leave, trap, barrier, collective };

struct Call {
    Function *callee = nullptr;
    std::string name;
    std::vector<std::string> inputs, outputs;   /* names of the caller's parameters             */
    std::vector<int> from, to;                  /* inputs: registers of caller and callee       */
    int result_from = -1, result_to = -1;
};

struct Instr {
    Flow       flow = straight;
    Handler    run = nullptr;
    Type       type = no_type;
    Space      space = generic;
    bool       trans = false;           /* ldmatrix: transposed                                 */
    bool       constant_cache = false;  /* ld.global.nc                                         */
    u8         vector = 1;              /* elements of a load or store                          */
    u8         used_bytes = 0;          /* of a load, when nvcc says that it uses fewer          */
    int        mode = 0;                /* an enum of its opcode                                */
    Conversion conversion = Conversion();
    int        guard = -1;              /* the predicate's register; -1: none                   */
    bool       guard_negated = false;
    Operand    to, to2;
    std::vector<Operand> from;
    std::vector<int> reads, writes;     /* registers, where a function has wgmma                */
    int        target = -1;             /* branch: which instruction                            */
    std::unique_ptr<Call> called;
    int        line = 0;
    u64        count = 0;               /* times that a warp executed it                        */
};

/* ---- functions, variables, modules ------------------------------------------------------ */

struct Parameter { std::string name; Type type; size_t bytes, align, offset; };
struct Variable {
    std::string name;
    Space  space = global;
    size_t bytes = 0, align = 8;
    bool   external = false;            /* dynamic shared memory                                */
    char  *data = nullptr;              /* global: where it is                                  */
};

struct Module;
struct Function {
    Module     *module = nullptr;
    std::string name, body;
    int         body_line = 0;
    bool        is_entry = false, decoded = false;
    std::vector<Parameter> parameters;
    size_t      parameter_bytes = 0;
    std::string result;                 /* name of the parameter it returns                     */
    int         most_threads = 0;
    std::unordered_map<std::string, int> slots, labels;
    std::unordered_map<std::string, size_t> in_shared, in_local;
    int         slot_count = 0;
    size_t      shared_bytes = 0, local_bytes = 0, dynamic_align = 128;
    bool        has_products = false;   /* wgmma                                                */
    std::vector<Instr> code;
};

struct Module {
    std::string text_name;              /* for messages: "sm_80"                                */
    int version = 0, target = 0;        /* 90: PTX 9.0; 80: sm_80                               */
    bool specific = false;              /* sm_90a: with what only GPUs of 9.0 have              */
    std::unordered_map<std::string, std::unique_ptr<Function>> functions;
    std::unordered_map<std::string, Variable> variables;
    std::map<u64, std::unique_ptr<u64[]>> constants;
    std::map<uintptr_t, size_t> ranges; /* variables in global memory                           */

    const u64 *constant(u64 v) {
        std::unique_ptr<u64[]> &copies = constants[v];
        if (copies) return copies.get();
        copies.reset(new u64[32]);
        for (int i = 0; i < 32; i++) copies[(size_t)i] = v;
        return copies.get();
    }
};

/* ---- text ------------------------------------------------------------------------------- */

inline std::string trimmed(const std::string &s) {
    size_t a = s.find_first_not_of(" \t\r\n"), b = s.find_last_not_of(" \t\r\n");
    return a == std::string::npos ? "" : s.substr(a, b - a + 1);
}
inline bool starts_with(const std::string &s, const char *with)
{ return s.compare(0, std::strlen(with), with) == 0; }

inline bool opens(char c) { return c == '{' || c == '[' || c == '('; }
inline bool closes(char c) { return c == '}' || c == ']' || c == ')'; }

/* The pieces between commas that stand in no brackets. */
inline std::vector<std::string> split(const std::string &s) {
    std::vector<std::string> out;
    std::string piece;
    int depth = 0;
    for (char c : s) {
        depth += opens(c) - closes(c);
        if (c != ',' || depth) { piece += c; continue; }
        out.push_back(trimmed(piece));
        piece.clear();
    }
    piece = trimmed(piece);
    if (!piece.empty() || !out.empty()) out.push_back(piece);
    return out;
}

/* 12, -3, 0x1F, 0f3F800000, 0d3FF0000000000000 */
inline u64 number(const std::string &s) {
    const char *p = s.c_str();
    if (starts_with(s, "0f") || starts_with(s, "0d")) return std::strtoull(p + 2, nullptr, 16);
    if (s[0] == '-') return (u64)0 - std::strtoull(p + 1, nullptr, 0);
    return std::strtoull(p, nullptr, 0);
}

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct Text {
    const std::string &s;
    size_t at = 0;
    int    line = 1;

    explicit Text(const std::string &text, int first_line = 1) : s(text), line(first_line) {}
    bool at_end() const { return at >= s.size(); }
    void advance(size_t to) {
        for (; at < to && at < s.size(); at++) line += s[at] == '\n';
    }
    bool at_comment() const { return s[at] == '/' && at + 1 < s.size() && s[at + 1] == '/'; }
    /* Skips spaces and comments. */
    void skip_blanks() {
        while (!at_end()) {
            if (at_comment()) advance(std::min(s.find('\n', at), s.size()));
            else if (std::isspace((unsigned char)s[at])) advance(at + 1);
            else return;
        }
    }
    /* Where `what` stands next; a text that ends first is truncated. */
    size_t find(char what, const char *where) const {
        size_t found = s.find(what, at);
        if (found == std::string::npos)
            stop(1, "the PTX is truncated: line %d, %s has no '%c'", line, where, what);
        return found;
    }
};

/* ---- declarations ----------------------------------------------------------------------- */

/* ".align 16 .b8 name[64]" and the like: sets name, type, bytes and align; returns the elements. */
struct Declaration { std::string name; Type type = type_b8; size_t bytes = 0, align = 0; };

inline Declaration declaration(const std::string &text) {
    Declaration d;
    std::istringstream in(text);
    std::string word;
    while (in >> word) {
        if (word == ".align") { in >> d.align; continue; }
        if (word[0] != '.') { d.name += word; continue; }
        Type t = type_of(word.substr(1));
        if (t != no_type) d.type = t;
    }
    size_t bracket = d.name.find('['), n = 1;
    if (bracket != std::string::npos) {
        n = std::strtoull(d.name.c_str() + bracket + 1, nullptr, 10);
        d.name.resize(bracket);
    }
    d.bytes = n * (size_t)bytes_of(d.type);
    if (!d.align) d.align = (size_t)bytes_of(d.type);
    return d;
}

inline void initialise(const Variable &v, Type type, std::string values) {
    size_t size = (size_t)bytes_of(type), at = 0;
    if (values[0] == '{') values = values.substr(1, values.rfind('}') - 1);
    for (const std::string &value : split(values)) {
        u64 bits = number(value);
        if (at + size > v.bytes) stop(1, "too many initial values of %s", v.name.c_str());
        std::memcpy(v.data + at, &bits, size);
        at += size;
    }
}

/* ".global .align 4 .b8 name[8] = {1, 2}", ".extern .shared .align 16 .b8 name[]" */
inline void read_variable(Module &m, const std::string &text) {
    size_t equals = text.find('=');
    Declaration d = declaration(text.substr(0, equals));
    Variable v;
    v.name = d.name;
    v.bytes = d.bytes;
    v.align = d.align;
    v.external = text.find(".extern") != std::string::npos;
    v.space = text.find(".shared") != std::string::npos ? shared : global;
    if (v.space == global) {
        v.data = (char *)std::aligned_alloc(256, round_up(v.bytes + 1, 256));
        std::memset(v.data, 0, v.bytes);
        if (equals != std::string::npos) initialise(v, d.type, trimmed(text.substr(equals + 1)));
        m.ranges[(uintptr_t)v.data] = v.bytes;
    }
    m.variables[v.name] = v;
}

/* ---- functions -------------------------------------------------------------------------- */

inline void read_parameters(Function &f, const std::string &list) {
    for (const std::string &text : split(list)) {
        if (text.empty()) continue;
        Declaration d = declaration(text);
        size_t offset = round_up(f.parameter_bytes, d.align);
        f.parameters.push_back(Parameter{ d.name, d.type, d.bytes, d.align, offset });
        f.parameter_bytes = offset + d.bytes;
    }
}

/* ".visible .entry name(...) .maxntid 256" or ".func (.param .b64 result) name(...)" */
inline void read_head(Function &f, const std::string &head) {
    f.is_entry = head.find(".entry") != std::string::npos;
    std::string rest = trimmed(head.substr(head.find(f.is_entry ? ".entry" : ".func") +
                                           (f.is_entry ? 6 : 5)));
    if (rest[0] == '(') {
        size_t close = rest.find(')');
        f.result = declaration(rest.substr(1, close - 1)).name;
        rest = trimmed(rest.substr(close + 1));
    }
    size_t open = rest.find('('), close = rest.find(')', open);
    if (open == std::string::npos) { f.name = trimmed(rest); return; }
    f.name = trimmed(rest.substr(0, open));
    read_parameters(f, rest.substr(open + 1, close - open - 1));
    size_t limit = rest.find(".maxntid", close);
    if (limit != std::string::npos) f.most_threads = std::atoi(rest.c_str() + limit + 8);
}

/* Where the brace that is open at `at` closes. */
inline size_t closing_brace(const Text &in, const std::string &name) {
    int depth = 0;
    for (size_t i = in.at; i < in.s.size(); i++) {
        depth += (in.s[i] == '{') - (in.s[i] == '}');
        if (!depth) return i;
    }
    stop(1, "the PTX is truncated: %s, from line %d on, has no end", name.c_str(), in.line);
}

inline void read_function(Module &m, Text &in) {
    size_t brace = in.find('{', "a function"), semicolon = in.s.find(';', in.at);
    std::unique_ptr<Function> f(new Function);
    bool only_declared = semicolon < brace;
    read_head(*f, in.s.substr(in.at, (only_declared ? semicolon : brace) - in.at));
    f->module = &m;
    in.advance(only_declared ? semicolon + 1 : brace);
    if (only_declared) return;
    size_t end = closing_brace(in, f->name);
    f->body_line = in.line;
    f->body = in.s.substr(in.at + 1, end - in.at - 1);
    in.advance(end + 1);
    m.functions[f->name] = std::move(f);
}

/* ".version 9.0", ".target sm_80", ".target sm_90a", ".address_size 64" */
inline void read_directive(Module &m, const std::string &line) {
    if (starts_with(line, ".version ")) {
        double version = std::atof(line.c_str() + 9);
        m.version = (int)(10.0 * version + 0.5);
    } else if (starts_with(line, ".target sm_")) {
        char *end;
        m.target = (int)std::strtol(line.c_str() + 11, &end, 10);
        m.specific = *end == 'a';
    }
}

inline bool is_directive(const std::string &s, size_t at) {
    return !s.compare(at, 8, ".version") || !s.compare(at, 7, ".target") ||
           !s.compare(at, 13, ".address_size") || !s.compare(at, 5, ".file");
}

/* The versions of PTX that this interpreter was written for: those of nvcc 12.0 to 13.0. */
const int oldest_version = 80, newest_version = 90;

inline void check_version(const Module &m) {
    if (!m.version || !m.target) stop(1, "this is no PTX: it has no .version and .target");
    if (m.version < oldest_version || m.version > newest_version)
        stop(77, "PTX %d.%d is another nvcc's: the interpreter knows %d.%d to %d.%d", m.version / 10,
             m.version % 10, oldest_version / 10, oldest_version % 10, newest_version / 10,
             newest_version % 10);
}

inline void read_item(Module &m, Text &in) {
    size_t end = std::min(in.s.find('\n', in.at), in.s.size());
    if (is_directive(in.s, in.at)) {
        read_directive(m, in.s.substr(in.at, end - in.at));
        in.advance(end);
        return;
    }
    size_t head_end = in.s.find_first_of(";{(=", in.at);
    std::string head = in.s.substr(in.at, head_end - in.at);
    if (head.find(".entry") != std::string::npos || head.find(".func") != std::string::npos) {
        read_function(m, in);
        return;
    }
    size_t semicolon = in.find(';', "a declaration");
    read_variable(m, in.s.substr(in.at, semicolon - in.at));
    in.advance(semicolon + 1);
}

/* The module that the text describes. A text that is no PTX, ends too soon, or is of another nvcc
 * ends the program with one line. */
inline std::unique_ptr<Module> read_module(const std::string &text) {
    std::unique_ptr<Module> m(new Module);
    Text in(text);
    for (in.skip_blanks(); !in.at_end(); in.skip_blanks()) read_item(*m, in);
    check_version(*m);
    m->text_name = "sm_" + std::to_string(m->target) + (m->specific ? "a" : "");
    return m;
}

}   /* namespace ptx */
#endif
