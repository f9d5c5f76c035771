/* all.h - the everyday programs, one row each.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef ALL_PROGRAMS_H
#define ALL_PROGRAMS_H
#include "program.h"
#include <stddef.h>
#include "mlp.h"
#include "lstm.h"
#include "rnn.h"
#include "vit.h"
#include "bert.h"
#include "t5.h"
#include "vae.h"
#include "gan.h"
#include "actor_critic.h"
#include "dqn.h"
#include "moe.h"
#include "graph.h"
#include "diffusion.h"
#include "contrastive.h"
#include "gpt.h"
#include "logits.h"
#include "lora.h"
#include "two_tasks.h"
#include "pascals.h"
#include "gemma.h"
#include "year.h"
#include "deep.h"
#include "modern.h"
#include "distil.h"
#include "density.h"
#include "ranking.h"
#include "sound.h"
#include "codebook.h"
#include "neighbours.h"
#include "pinn.h"

/* The state that an LSTM carries: h, then c. */
#define LSTM_STATE offsetof(lstm, h), 2 * PARTS * LSTM_ROWS * LSTM_WIDTH

static const program programs[] = {
    /* name          its struct, set-up, batch, loss                                     after
       lr     steps turns scalers parts dropout state                 near offset spared */
    { "mlp", sizeof(mlp), mlp_open, mlp_batch, mlp_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "lstm", sizeof(lstm), lstm_open, lstm_batch, lstm_loss, lstm_after, 2e-2, 0, 0, 0, 0, 0, LSTM_STATE, 0, 0, 0 },
    { "rnn", sizeof(rnn), rnn_open, rnn_batch, rnn_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "vit", sizeof(vit), vit_open, vit_batch, vit_loss, NULL, 5e-3, 0, 0, 0, 0, 0, 0, 0, 0.2, 0, 0 },
    { "bert", sizeof(bert), bert_open, bert_batch, bert_loss, NULL, 5e-3, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0 },
    { "t5_fill", sizeof(t5), t5_fill_open, t5_batch, t5_loss, NULL, 5e-3, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "t5_where", sizeof(t5), t5_where_open, t5_batch, t5_loss, NULL, 5e-3, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "t5_add", sizeof(t5), t5_add_open, t5_batch, t5_loss, NULL, 5e-3, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "t5_log", sizeof(t5), t5_log_open, t5_batch, t5_loss, NULL, 5e-3, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "t5_fused", sizeof(t5), t5_fused_open, t5_batch, t5_loss, NULL, 5e-3, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "t5_wide", sizeof(t5), t5_wide_open, t5_batch, t5_loss, NULL, 5e-3, 100, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "vae", sizeof(vae), vae_open, vae_batch, vae_loss, NULL, 1e-2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0 },
    { "gan", sizeof(gan), gan_open, gan_batch, gan_loss, NULL, 3e-3, 0, 2, 2, 0, 1, 0, 0, 0.5, 0, 0 },
    { "actor_critic", sizeof(actor_critic), actor_critic_open, actor_critic_batch, actor_critic_loss, NULL,
      1e-2, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0 },
    { "dqn", sizeof(dqn), dqn_open, dqn_batch, dqn_loss, dqn_after, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "moe", sizeof(moe), moe_open, moe_batch, moe_loss, NULL, 3e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "graph", sizeof(graph), graph_open, graph_batch, graph_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "diffusion", sizeof(diffusion), diffusion_open, diffusion_batch, diffusion_loss, NULL, 1e-2,
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "contrastive", sizeof(contrastive), contrastive_open, contrastive_batch, contrastive_loss, NULL, 1e-2,
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "gpt", sizeof(gpt), gpt_open, gpt_batch, gpt_loss, NULL, 1e-2, 0, 0, 0, 4, 1, 0, 0, 0, 0, 0 },
    { "logits", sizeof(logits), logits_open, logits_batch, logits_loss, NULL, 1e-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "lora", sizeof(lora), lora_open, lora_batch, lora_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "two_tasks", sizeof(two_tasks), two_tasks_open, two_tasks_batch, two_tasks_loss, NULL, 1e-2,
      0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "pascals", sizeof(pascals), pascals_open, pascals_batch, pascals_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0 },
    { "gemma", sizeof(gemma), gemma_open, gemma_batch, gemma_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "year", sizeof(year), year_open, year_batch, year_loss, NULL, 3e-3, 200, 0, 0, 0, 0, 0, 0, 0.01, 1, 0 },
    { "deep", sizeof(deep), deep_open, deep_batch, deep_loss, NULL, 3e-3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "modern", sizeof(modern), modern_open, modern_batch, modern_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "distil", sizeof(distil), distil_open, distil_batch, distil_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "density", sizeof(density), density_open, density_batch, density_loss, NULL, 3e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "ranking", sizeof(ranking), ranking_open, ranking_batch, ranking_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "sound", sizeof(sound), sound_open, sound_batch, sound_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4 },
    { "codebook", sizeof(codebook), codebook_open, codebook_batch, codebook_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "neighbours", sizeof(neighbours), neighbours_open, neighbours_batch, neighbours_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
    { "pinn", sizeof(pinn), pinn_open, pinn_batch, pinn_loss, NULL, 1e-2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 },
};
enum { PROGRAMS = sizeof programs / sizeof programs[0] };
#endif
