/* 07_inference.c - weights from a file into another program: by name, some missing, some extra, and of
 * another dtype; then forward without gradients.
 * SPDX-License-Identifier: MIT OR Unlicense
 *   cc -O2 examples/07_inference.c -I. -lm && ./a.out */
#define MIXPREC_IMPLEMENTATION
#include "mixprec.h"
#include <stdio.h>

static const char path[] = "07_inference.safetensors";
static const int64_t two[2] = { 2, 2 }, one[1] = { 2 };

/* Called for each tensor once all is loaded. */
static void tell(void *user, const char *name, mixp_weight_fate fate) {
    static const char *const words[] = { "loaded", "loaded, converted", "missing in the file",
                                         "extra in the file" };
    (void)user;
    printf("%-9s %s\n", name, words[fate]);
}

/* A file as any other program writes it: one body's weight in bf16, and a head of other use. */
static int write_file(void) {
    mixp_bf16 body[4];
    float     old[2] = { 1, 2 }, w[4] = { 0.5f, 1.0f, -1.0f, 2.0f };
    mixp_st_entry e[2] = { { "body.w", NULL, MIXP_BF16, 2, { 2, 2 }, body, sizeof body },
                           { "old.head", NULL, MIXP_F32, 1, { 2 }, old, sizeof old } };
    mixp_convert(body, MIXP_BF16, w, MIXP_F32, 4);
    return mixp_safetensors_write(path, e, 2, NULL, 0, NULL, 0) == MIXP_OK;
}

int main(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    mixp_tensor  *w = mixp_param(ctx, "body.w", MIXP_F32, 2, two), *y = NULL;
    mixp_tensor  *head = mixp_param(ctx, "new.head", MIXP_F32, 1, one);
    mixp_weights_desc how = { .allow_missing = 1, .allow_extra = 1, .convert = 1, .tell = tell };
    const char   *why;
    float         x[4] = { 1, 2, 3, 4 };
    mixp_fill(head, 10.0);                      /* what is missing stays as it is */
    if (!write_file() || mixp_checkpoint_load_weights(path, ctx, &how) != MIXP_OK) printf("failed\n");
    mixp_eval_begin(ctx);                       /* in each round of a loop, too */
    MIXP_NO_GRAD(ctx) {
        MIXP_AUTOCAST(ctx, MIXP_F16) {
            y = mixp_linear(ctx, mixp_input_f32(ctx, 2, two, x), w, head);
        }
    }
    if (y && mixp_read_f32(y, x, 4) == MIXP_OK)
        printf("%g %g %g %g\n", (double)x[0], (double)x[1], (double)x[2], (double)x[3]);
    int failed = mixp_context_error(ctx, &why) != MIXP_OK;
    if (failed) printf("%s\n", why);
    mixp_context_free(ctx);
    remove(path);
    return failed;
}
/* prints:
body.w    loaded, converted
new.head  missing in the file
old.head  extra in the file
12.5 13 15.5 15
*/
