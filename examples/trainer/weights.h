/* weights.h - opens the weights of a model, in one safetensors file or in several: a part of
 * trainer.c and of llama.c
 * SPDX-License-Identifier: MIT OR Unlicense
 *
 * `transformers` divides a large model into several files, shards, and writes an index beside
 * them: a JSON whose weight_map names the file of each tensor. Include mixprec.h before this
 * file.
 */
#ifndef TRAINER_WEIGHTS_H
#define TRAINER_WEIGHTS_H

#include "json_file.h"

/* files[k] was read from paths[k]. */
typedef struct weight_files {
    mixp_safetensors **files;
    char             **paths;
    int64_t            n;
    const char        *named_by; /* the option that names them, for messages */
} weight_files;

/* The tensor of a name, or NULL. *path, unless path is NULL: the path of its file. */
static const mixp_st_entry *find_weight(const weight_files *w, const char *name,
                                        const char **path) {
    for (int64_t k = 0; k < w->n; k++) {
        const mixp_st_entry *found = mixp_safetensors_find(w->files[k], name);
        if (!found) continue;
        if (path) *path = w->paths[k];
        return found;
    }
    return NULL;
}

static void close_weights(weight_files *w) {
    for (int64_t k = 0; k < w->n; k++) {
        mixp_safetensors_free(w->files[k]);
        free(w->paths[k]);
    }
    free(w->files);
    free(w->paths);
    memset(w, 0, sizeof *w);
}

static char *copy_text(const char *text) {
    char *copy = (char *)malloc(strlen(text) + 1);
    if (!copy) die(1, "out of memory");
    return strcpy(copy, text);
}

/* A tensor may be in one file only. */
static void check_duplicates(const weight_files *w, const mixp_safetensors *file,
                             const char *path) {
    for (int64_t i = 0; i < mixp_safetensors_count(file); i++) {
        const char *name = mixp_safetensors_at(file, i)->name, *other;
        if (find_weight(w, name, &other))
            die(1, "%s and %s both hold %s: keep the files of one model only in the folder", other,
                path, name);
    }
}

/* Opens one more file of a model. */
static void add_weights(weight_files *w, const char *path) {
    char   error[MIXP_MESSAGE_SIZE];
    size_t n = (size_t)w->n + 1;
    w->files = (mixp_safetensors **)realloc(w->files, n * sizeof *w->files);
    w->paths = (char **)realloc(w->paths, n * sizeof *w->paths);
    if (!w->files || !w->paths) die(1, "out of memory");
    w->files[n - 1] = NULL;
    if (mixp_safetensors_read(path, &w->files[n - 1], error, sizeof error) != MIXP_OK)
        die(1, "while reading %s: %s", w->named_by, error);
    check_duplicates(w, w->files[n - 1], path);
    w->paths[n - 1] = copy_text(path);
    w->n++;
}

static int by_name(const void *a, const void *b) {
    const char *x, *y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return strcmp(x, y);
}

/* The file of a tensor in an index. The index is untrusted: no file of another folder is read. */
static char *index_file(const char *index, const char *value) {
    char file[256];
    if (json_string(value, file, sizeof file) < 1)
        die(1, "%s is malformed in its weight_map, at \"%.40s\"", index, value);
    if (strchr(file, '/') || file[0] == '.')
        die(1, "%s names %s, which is not a file in the same folder", index, file);
    return copy_text(file);
}

/* The files of a weight_map, {"tensor": "file", ...}, one for each tensor, in order of name. */
static char **index_files(const char *index, const char *map, size_t *n) {
    char **files = NULL;
    size_t room = 0;
    *n = 0;
    for (const char *key = json_first(map); key; key = json_next(json_of_key(key))) {
        if (*n == room) {
            room = room ? 2 * room : 64;
            files = (char **)realloc(files, room * sizeof *files);
            if (!files) die(1, "out of memory");
        }
        files[(*n)++] = index_file(index, json_of_key(key));
    }
    if (!*n) die(1, "%s names no tensor", index);
    qsort(files, *n, sizeof *files, by_name);
    return files;
}

/* Each tensor of a weight_map must be in one of the files. */
static void check_index(const weight_files *w, const char *index, const char *map) {
    char name[512];
    for (const char *key = json_first(map); key; key = json_next(json_of_key(key))) {
        if (json_string(key, name, sizeof name) < 1 || find_weight(w, name, NULL)) continue;
        die(1,
            "%s: its weight_map has %s, and no file that it names holds this tensor: download the files of the "
            "model again",
            index, name);
    }
}

/* Opens the files that an index names, each once. */
static void read_index(weight_files *w, const char *index) {
    char        path[PATH_SPACE + 256], **files;
    const char *slash = strrchr(index, '/'), *root, *map;
    int         folder = slash ? (int)(slash - index + 1) : 0;
    size_t      n;
    char       *text = read_json(index, (int64_t)1 << 26, "", &root);
    map = json_get(root, "weight_map");
    if (!map || *map != '{') die(1, "%s is not an index of weights: it has no weight_map", index);
    files = index_files(index, map, &n);
    for (size_t i = 0; i < n; i++) {
        snprintf(path, sizeof path, "%.*s%s", folder, index, files[i]);
        if (i == 0 || strcmp(files[i], files[i - 1]) != 0) add_weights(w, path);
    }
    check_index(w, index, map);
    for (size_t i = 0; i < n; i++) free(files[i]);
    free(files);
    free(text);
}

static int is_index(const char *path) {
    size_t n = strlen(path);
    return n > 11 && strcmp(path + n - 11, ".index.json") == 0;
}

/* Opens a safetensors file, or the files of an index, FILE.index.json. named_by: for messages. */
static void open_weights(weight_files *w, const char *path, const char *named_by) {
    memset(w, 0, sizeof *w);
    w->named_by = named_by;
    if (is_index(path)) read_index(w, path);
    else add_weights(w, path);
}

#endif
