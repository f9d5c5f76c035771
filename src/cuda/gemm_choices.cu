#pragma once
#include "gemm_measuring.cu"
/* --- choices, as text ------------------------------------------------------------------- *
 *
 * A first line names the GPU and library, then follow one line per plan and their number, which
 * reveals a truncated text.
 */
namespace {

/* A text under construction. Characters beyond `size` are only counted. */
struct Writer {
    char  *text;
    size_t size, used;
};

inline void write_text(Writer *w, const char *format, ...) {
    const bool room = w->used < w->size;
    va_list list;
    va_start(list, format);
    const int n =
        vsnprintf(room ? w->text + w->used : NULL, room ? w->size - w->used : 0, format, list);
    va_end(list);
    w->used += n > 0 ? (size_t)n : 0;
}

/* A key is written as 64-bit words, in memory order. */
const int key_words = sizeof(PlanKey) / 8, algorithm_words = sizeof(cublasLtMatmulAlgo_t) / 8;

inline void write_words(Writer *w, const void *from, int count) {
    for (int i = 0; i < count; i++) {
        uint64_t word;
        memcpy(&word, (const char *)from + 8 * i, 8);
        write_text(w, " %llx", (unsigned long long)word);
    }
}

/* A text of choices begins with this; the number is its format's. */
const char *const choices_mark = "mixprec products 2:";

inline void write_head(Writer *w, const State *s) {
    write_text(w, "%s cuBLASLt %zu, capability %d, %d multiprocessors\n", choices_mark,
        cublasLtGetVersion(), s->capability, s->processors);
}

inline void write_plan(Writer *w, const Plan *p) {
    write_text(w, is_usable(p) ? "use" : "none");
    write_words(w, &p->key, key_words);
    if (is_usable(p)) write_words(w, &p->algorithms[p->at], algorithm_words);
    write_text(w, "\n");
}

/* The text that mixp_context_gemm_choices returns. */
size_t gemm_choices(const mixp_exec *x, char *text, size_t size) {
    State *s = state_of(x);
    Writer w = { text, size, 0 };
    int count = 0;
    if (!s) return 1;
    write_head(&w, s);
    for (int i = 0; i < plan_lists && s->plans; i++)
        for (const Plan *p = s->plans->first[i]; p; p = p->next, count++) write_plan(&w, p);
    write_text(&w, "end %d\n", count);
    return w.used + 1;
}

/* The value of a hexadecimal digit as we write them; 16: not a digit. */
inline unsigned digit_value(char c) {
    if (c >= '0' && c <= '9') return (unsigned)(c - '0');
    return c >= 'a' && c <= 'f' ? (unsigned)(c - 'a') + 10 : 16;
}

/* Reads 1 to 16 hexadecimal digits at *at. Unlike strtoull, accepts no sign and no 0x. */
inline bool read_digits(const char **at, uint64_t *word) {
    int count = 0;
    *word = 0;
    for (; digit_value(**at) < 16 && count < 16; count++) {
        *word = *word << 4 | digit_value(**at);
        (*at)++;
    }
    return count > 0;
}

/* Reads `count` words of hexadecimal digits at *at. Returns false on anything else. */
inline bool read_words(const char **at, void *to, int count) {
    for (int i = 0; i < count; i++) {
        if (**at != ' ') return false;
        (*at)++;
        uint64_t word;
        if (!read_digits(at, &word)) return false;
        memcpy((char *)to + 8 * i, &word, 8);
    }
    return true;
}

inline bool read_word(const char **at, const char *word) {
    size_t n = strlen(word);
    if (strncmp(*at, word, n) != 0) return false;
    *at += n;
    return true;
}

/* Reads the line of one plan. */
inline bool read_choice(const char **at, Choice *c) {
    c->none = read_word(at, "none");
    if (!c->none && !read_word(at, "use")) return false;
    return read_words(at, &c->key, key_words) &&
           (c->none || read_words(at, &c->algorithm, algorithm_words)) && read_word(at, "\n");
}

inline int lines_of(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

inline bool read_all(State *s, const char *at, int lines) {
    for (int i = 0; i < lines; i++)
        if (!read_choice(&at, &s->choices[i])) return false;
    s->choice_count = lines;
    char end[32];
    snprintf(end, sizeof end, "end %d\n", lines);
    return strcmp(at, end) == 0;
}

/* Reads a text of choices. MIXP_ERR_FORMAT: not such a text, or truncated. MIXP_ERR_SHAPE: from
 * another GPU or library. */
mixp_result choices_read(State *s, const char *text) {
    char head[128];
    Writer w = { head, sizeof head, 0 };
    const char *after_mark = text;
    int lines = text ? lines_of(text) - 2 : 0;
    if (!text) return MIXP_OK;
    if (!read_word(&after_mark, choices_mark) || lines < 0) return MIXP_ERR_FORMAT;
    write_head(&w, s);
    if (!read_word(&text, head)) return MIXP_ERR_SHAPE;
    s->choices = (Choice *)host_new(s->host, (size_t)(lines + 1) * sizeof *s->choices);
    if (!s->choices) return MIXP_ERR_MEMORY;
    return read_all(s, text, lines) ? MIXP_OK : MIXP_ERR_FORMAT;
}

}   /* namespace */
