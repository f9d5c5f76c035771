/* json_file.h - reads a file of JSON: a part of trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef TRAINER_JSON_FILE_H
#define TRAINER_JSON_FILE_H

#include "disk.h"
#include "json.h"
#include "messages.h"

/* Reads a file of JSON. Returns the text, which the caller frees; *root: its value. hint: what to check if
 * the file cannot be read, or "". */
static char *read_json(const char *path, int64_t most, const char *hint, const char **root) {
    int64_t     size = 0;
    const char *wrong = NULL;
    char       *text = read_file(path, most, &size);
    if (!text) die(1, "cannot read %s: %s%s", path, plain_error(), hint);
    if (strlen(text) != (size_t)size)
        die(1, "%s holds a zero byte, as after a power cut: what follows cannot be read. Use a copy of the "
               "file, or write the file again", path);
    *root = json_check(text, size, &wrong);
    if (!*root)
        die(1, "%s is not whole: its JSON is malformed in line %lld, at \"%.30s\". Use a copy of the "
               "file, or write the file again", path, (long long)json_line(text, wrong), wrong);
    return text;
}

/* Reads the header of a safetensors file. Returns NULL if the file has no header. Loading the
 * file finds all other errors. */
static char *read_header(const char *path, int64_t *size) {
    unsigned char front[8];
    char         *header = NULL;
    uint64_t      n = 0;
    int           file = open_regular(path);
    if (file < 0) return NULL;
    if (read(file, front, sizeof front) == (ssize_t)sizeof front)
        for (int i = 7; i >= 0; i--) n = n << 8 | front[i];
    if (n > 0 && n <= 1 << 28) header = (char *)malloc((size_t)n + 1);
    if (header && read(file, header, (size_t)n) != (ssize_t)n) { free(header); header = NULL; }
    if (header) header[n] = '\0';
    *size = (int64_t)n;
    close(file);
    return header;
}

#endif
