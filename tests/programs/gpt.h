/* gpt.h - a GPT of two blocks, its head tied to its embedding, dropout, and four micro-batches a step.
 * Nothing in it leaves fp16's range.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
enum { GPT_ROWS = FIT(2), GPT_TIME = 10, GPT_VOCAB = 11, GPT_WIDTH = FIT(16), GPT_HEADS = 2, GPT_BLOCKS = 2,
       GPT_TOKENS = GPT_ROWS * GPT_TIME };

typedef struct gpt {
    mixp_tensor *wte, *wpe, *qkv[GPT_BLOCKS], *proj[GPT_BLOCKS], *up[GPT_BLOCKS], *down[GPT_BLOCKS];
    int32_t      in[GPT_TOKENS], next[GPT_TOKENS], place[GPT_TIME];
} gpt;

static void gpt_open(session *s) {
    gpt *m = (gpt *)s->model;
    m->wte = matrix(s, "wte", GPT_VOCAB, GPT_WIDTH, 0.3);
    m->wpe = matrix(s, "wpe", GPT_TIME, GPT_WIDTH, 0.1);
    for (int i = 0; i < GPT_BLOCKS; i++) {
        m->qkv[i] = layer(s, i, "attn", 3 * GPT_WIDTH, GPT_WIDTH, 0.2);
        m->proj[i] = layer(s, i, "attn.proj", GPT_WIDTH, GPT_WIDTH, 0.1);
        m->up[i] = layer(s, i, "mlp.up", 4 * GPT_WIDTH, GPT_WIDTH, 0.2);
        m->down[i] = layer(s, i, "mlp.down", GPT_WIDTH, 4 * GPT_WIDTH, 0.1);
    }
    for (int t = 0; t < GPT_TIME; t++) m->place[t] = t;
}

static void gpt_batch(session *s) {
    gpt *m = (gpt *)s->model;
    for (int i = 0; i < GPT_TOKENS; i++) {
        int first = i % GPT_TIME == 0;
        m->in[i] = first ? below(s, GPT_VOCAB) : m->next[i - 1];
        m->next[i] = (m->in[i] * 3 + 1 + (uniform(s) < 0.1f)) % GPT_VOCAB;
    }
}

static mixp_tensor *gpt_loss(session *s, int turn, int training) {
    gpt          *m = (gpt *)s->model;
    mixp_context *c = s->ctx;
    mixp_tensor  *x = mixp_embedding(c, m->wte, ints(s, m->in, GPT_ROWS, GPT_TIME)), *h;
    (void)turn;
    x = mixp_add(c, x, mixp_embedding(c, m->wpe, ints(s, m->place, GPT_TIME, 0)));
    x = mixp_dropout(c, x, 0.1f, training);
    for (int i = 0; i < GPT_BLOCKS; i++) {
        h = mixp_linear(c, mixp_layer_norm(c, x, NULL, NULL, 1e-5f), m->qkv[i], NULL);
        h = mixp_linear(c, mixp_attention(c, h, GPT_HEADS, 1, 0), m->proj[i], NULL);
        h = mixp_add_layer_norm(c, x, mixp_dropout(c, h, 0.1f, training), NULL, NULL, 1e-5f, &x);
        x = mixp_add(c, x, mixp_mlp(c, h, m->up[i], NULL, m->down[i], NULL));
    }
    x = mixp_layer_norm(c, x, NULL, NULL, 1e-5f);
    return mixp_linear_cross_entropy(c, x, m->wte, ints(s, m->next, GPT_ROWS, GPT_TIME),
                                     MIXP_IGNORE, 0);
}
