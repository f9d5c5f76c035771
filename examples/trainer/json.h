/* json.h - a strict reader of JSON (RFC 8259): a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * json_check accepts a text or says where it is malformed. In a text that it accepted, a pointer to the
 * first character of a value stands for that value, and the other functions walk the text:
 *
 *     for (const char *key = json_first(object); key; key = json_next(json_of_key(key))) ...
 *
 * Nothing is allocated, nothing recurses, and each walk takes time proportional to what it passes.
 */
#ifndef TRAINER_JSON_H
#define TRAINER_JSON_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { JSON_DEPTH = 128 };              /* containers in containers; a deeper text is refused */

static const char *json_space(const char *p) { return p + strspn(p, " \t\r\n"); }

static int json_hex(const char *p, unsigned *code) {
    *code = 0;
    for (int i = 0; i < 4; i++) {
        const char *digits = "0123456789abcdef0123456789ABCDEF";
        const char *at = p[i] ? strchr(digits, p[i]) : NULL;
        if (!at) return 0;
        *code = *code << 4 | (unsigned)((at - digits) & 15);
    }
    return 1;
}

/* The end of the escape at p, which begins with a backslash, or NULL. *code: its code point. A code
 * point above U+FFFF is a pair of surrogates; a surrogate without the other is malformed. */
static const char *json_escape(const char *p, unsigned *code) {
    static const char names[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    const char *name = p[1] ? strchr(names, p[1]) : NULL;
    unsigned    low;
    if (name) { *code = (unsigned char)meant[name - names]; return p + 2; }
    if (p[1] != 'u' || !json_hex(p + 2, code)) return NULL;
    if (*code < 0xD800 || *code > 0xDFFF) return p + 6;
    if (*code > 0xDBFF || p[6] != '\\' || p[7] != 'u' || !json_hex(p + 8, &low)) return NULL;
    if (low < 0xDC00 || low > 0xDFFF) return NULL;
    *code = 0x10000 + ((*code - 0xD800) << 10) + (low - 0xDC00);
    return p + 12;
}

/* The end of the string at p, or NULL. *wrong: where it is malformed. */
static const char *json_pass_string(const char *p, const char **wrong) {
    unsigned code;
    *wrong = p;
    if (*p++ != '"') return NULL;
    while (*p != '"') {
        *wrong = p;
        if ((unsigned char)*p < 32) return NULL;
        p = *p == '\\' ? json_escape(p, &code) : p + 1;
        if (!p) return NULL;
    }
    return p + 1;
}

static const char *json_digits(const char *p) { return p + strspn(p, "0123456789"); }

/* The end of the number at p, or NULL. */
static const char *json_pass_number(const char *p) {
    const char *whole = p + (*p == '-'), *end = json_digits(whole);
    if (end == whole || (*whole == '0' && end > whole + 1)) return NULL;
    if (*end == '.') {
        if (json_digits(end + 1) == end + 1) return NULL;
        end = json_digits(end + 1);
    }
    if (*end == 'e' || *end == 'E') {
        const char *exponent = end + 1 + (end[1] == '-' || end[1] == '+');
        end = json_digits(exponent);
        if (end == exponent) return NULL;
    }
    return end;
}

/* The end of a string, a number, true, false or null at p, or NULL. */
static const char *json_pass_scalar(const char *p, const char **wrong) {
    *wrong = p;
    if (*p == '"') return json_pass_string(p, wrong);
    if (strncmp(p, "true", 4) == 0 || strncmp(p, "null", 4) == 0) return p + 4;
    return strncmp(p, "false", 5) == 0 ? p + 5 : json_pass_number(p);
}

/* The value behind the key at p, or NULL. */
static const char *json_pass_key(const char *p, const char **wrong) {
    p = json_pass_string(p, wrong);
    if (!p) return NULL;
    *wrong = p = json_space(p);
    return *p == ':' ? json_space(p + 1) : NULL;
}

/* The end of the value at p, or NULL. *wrong: where it is malformed. */
static const char *json_pass(const char *p, const char **wrong) {
    char closers[JSON_DEPTH];
    int  depth = 0;
    do {
        /* a container opens: its first value comes next, unless it is empty */
        if (*p == '{' || *p == '[') {
            *wrong = p;
            if (depth == JSON_DEPTH) return NULL;
            closers[depth++] = *p == '{' ? '}' : ']';
            p = json_space(p + 1);
            if (*p != closers[depth - 1]) {
                if (closers[depth - 1] == '}') p = json_pass_key(p, wrong);
                if (!p) return NULL;
                continue;
            }
        } else {
            p = json_pass_scalar(p, wrong);
            if (!p) return NULL;
        }
        /* a value has ended: containers may end with it, or the next value follows */
        while (depth > 0) {
            p = json_space(p);
            if (*p == closers[depth - 1]) { p++; depth--; continue; }
            *wrong = p;
            if (*p != ',') return NULL;
            p = json_space(p + 1);
            if (closers[depth - 1] == '}') p = json_pass_key(p, wrong);
            if (!p) return NULL;
            break;
        }
    } while (depth > 0);
    return p;
}

/* Is the text of `size` bytes, which ends with '\0', one JSON value? Returns the value, or NULL with
 * *wrong: where it is malformed. Bytes above 127 are not checked. */
static const char *json_check(const char *text, int64_t size, const char **wrong) {
    const char *value = json_space(text), *end = json_pass(value, wrong);
    if (!end) return NULL;
    *wrong = end = json_space(end);
    return end == text + size ? value : NULL;
}

/* The line of a place in a text, from 1. */
static int64_t json_line(const char *text, const char *place) {
    int64_t line = 1;
    for (; text < place; text++) line += *text == '\n';
    return line;
}

/* ==== Walking a text that json_check accepted ======================================= */

/* The first element of an array, or the first key of an object; NULL if it is empty. */
static const char *json_first(const char *container) {
    const char *p = json_space(container + 1);
    return *p == ']' || *p == '}' ? NULL : p;
}

/* What follows a value: the next element, or the next key; NULL at the end. */
static const char *json_next(const char *value) {
    const char *wrong, *p = json_space(json_pass(value, &wrong));
    return *p == ',' ? json_space(p + 1) : NULL;
}

/* The value of a key. */
static const char *json_of_key(const char *key) {
    const char *wrong;
    return json_pass_key(key, &wrong);
}

static size_t put_utf8(char *to, unsigned code) {
    unsigned char *p = (unsigned char *)to;
    if (code < 0x80) { p[0] = (unsigned char)code; return 1; }
    if (code < 0x800) {
        p[0] = (unsigned char)(0xC0 | code >> 6);
        p[1] = (unsigned char)(0x80 | (code & 0x3F));
        return 2;
    }
    if (code < 0x10000) {
        p[0] = (unsigned char)(0xE0 | code >> 12);
        p[1] = (unsigned char)(0x80 | (code >> 6 & 0x3F));
        p[2] = (unsigned char)(0x80 | (code & 0x3F));
        return 3;
    }
    p[0] = (unsigned char)(0xF0 | code >> 18);
    p[1] = (unsigned char)(0x80 | (code >> 12 & 0x3F));
    p[2] = (unsigned char)(0x80 | (code >> 6 & 0x3F));
    p[3] = (unsigned char)(0x80 | (code & 0x3F));
    return 4;
}

/* Writes a string without quotes and escapes, and a '\0'. Returns its length, or -1: it is no string,
 * it does not fit, or it holds U+0000. */
static int64_t json_string(const char *value, char *to, size_t space) {
    size_t n = 0;
    if (!value || *value++ != '"') return -1;
    while (*value != '"') {
        unsigned code = 1;
        if (n + 5 > space) return -1;
        if (*value != '\\') { to[n++] = *value++; continue; }
        value = json_escape(value, &code);
        if (!code) return -1;
        n += put_utf8(to + n, code);
    }
    to[n] = '\0';
    return (int64_t)n;
}

/* The value of a key of an object, or NULL. If the key appears twice, the last value counts, as in
 * most readers. */
static const char *json_get(const char *object, const char *key) {
    const char *found = NULL;
    char        name[256];
    if (!object || *object != '{') return NULL;
    for (const char *p = json_first(object); p;) {
        const char *value = json_of_key(p);
        if (json_string(p, name, sizeof name) >= 0 && strcmp(name, key) == 0) found = value;
        p = json_next(value);
    }
    return found;
}

/* Like json_get, but NULL for null. */
static const char *json_find(const char *object, const char *key) {
    const char *value = json_get(object, key);
    return value && *value == 'n' ? NULL : value;
}

/* The text of a scalar: a string without its quotes, a number, true, false or null as written. Returns 0
 * if it is a container or does not fit. */
static int json_text(const char *value, char *to, size_t space) {
    const char *wrong, *end;
    if (!value || *value == '{' || *value == '[') return 0;
    if (*value == '"') return json_string(value, to, space) >= 0;
    end = json_pass_scalar(value, &wrong);
    if ((size_t)(end - value) >= space) return 0;
    memcpy(to, value, (size_t)(end - value));
    to[end - value] = '\0';
    return 1;
}

/* A whole number from 0 to 2^53, or -1. */
static int64_t json_count(const char *value) {
    int64_t n = 0;
    if (!value || *value < '0' || *value > '9') return -1;
    for (; *value >= '0' && *value <= '9'; value++) {
        n = 10 * n + (*value - '0');
        if (n > (int64_t)1 << 53) return -1;
    }
    return strchr(".eE", *value) && *value ? -1 : n;
}

#endif
