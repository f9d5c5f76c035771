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

#endif
