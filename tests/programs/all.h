/* all.h - the everyday programs.
 * SPDX-License-Identifier: MIT OR Unlicense
 */
#ifndef ALL_PROGRAMS_H
#define ALL_PROGRAMS_H
#include "program.h"
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
#include "convnet.h"
#include "unet.h"
#include "tagger.h"
#include "neighbours.h"
#include "pinn.h"
#include "ctc.h"
#include "molecules.h"
#include "rays.h"

enum { MOST_PROGRAMS = 64 };
static program programs[MOST_PROGRAMS];
static int     program_count;

/* Adds a program. All that it has besides is 0, for the caller to set. */
static program *program_add(const char *name, size_t size, void (*open)(session *), void (*batch)(session *),
                            mixp_tensor *(*loss)(session *, int, int), double lr) {
    program *p = &programs[program_count++];
    p->name = name;
    p->size = size;
    p->open = open;
    p->batch = batch;
    p->loss = loss;
    p->lr = lr;
    return p;
}
#define PROGRAM(name, lr) program_add(#name, sizeof(name), name##_open, name##_batch, name##_loss, lr)

/* A form of t5.h's model. */
static void program_add_t5(const char *name, void (*open)(session *))
{ program_add(name, sizeof(t5), open, t5_batch, t5_loss, 5e-3)->steps = 100; }

static void programs_of_sequences(void) {
    PROGRAM(lstm, 2e-2)->carry = lstm_carry;
    PROGRAM(rnn, 1e-2)->carry = rnn_carry;
    PROGRAM(tagger, 5e-2);
    PROGRAM(vit, 5e-3)->near = 0.2;
    PROGRAM(bert, 5e-3)->dropout = 1;
    program_add_t5("t5_fill", t5_fill_open);
    program_add_t5("t5_where", t5_where_open);
    program_add_t5("t5_add", t5_add_open);
    program_add_t5("t5_log", t5_log_open);
    program_add_t5("t5_fused", t5_fused_open);
    program_add_t5("t5_wide", t5_wide_open);
    program *p = PROGRAM(gpt, 1e-2);
    p->parts = 4;
    p->dropout = 1;
    PROGRAM(logits, 1e-1);
    PROGRAM(lora, 1e-2);
    PROGRAM(gemma, 1e-2);
    PROGRAM(modern, 1e-2);
    PROGRAM(sound, 1e-2)->spared = 4;
}

static void programs_of_several_networks(void) {
    program *p = PROGRAM(gan, 3e-3);
    p->turns = p->scalers = 2;
    p->dropout = 1;
    p->near = 0.5;
    p = PROGRAM(actor_critic, 1e-2);
    p->turns = 2;
    p->scalers = 1;
    PROGRAM(dqn, 1e-2)->after = dqn_after;
    PROGRAM(distil, 1e-2);
}

/* Fills the table. main calls it first. */
static void programs_make(void) {
    PROGRAM(mlp, 1e-2);
    programs_of_sequences();
    programs_of_several_networks();
    PROGRAM(vae, 1e-2)->dropout = 1;
    PROGRAM(moe, 3e-2);
    PROGRAM(graph, 1e-2);
    PROGRAM(diffusion, 1e-2);
    program *p = PROGRAM(contrastive, 1e-2);
    p->carry = contrastive_carry;
    p->mixes = 1;
    PROGRAM(two_tasks, 1e-2);
    PROGRAM(pascals, 1e-2)->offset = 1;
    p = PROGRAM(year, 3e-3);
    p->steps = 200;
    p->near = 0.01;
    p->offset = 1;
    PROGRAM(deep, 3e-3);
    PROGRAM(density, 3e-2);
    PROGRAM(ranking, 1e-2);
    p = PROGRAM(codebook, 1e-2);
    p->carry = codebook_carry;
    p->mixes = 1;
    PROGRAM(convnet, 1e-2);
    PROGRAM(unet, 1e-2);
    PROGRAM(neighbours, 1e-2);
    PROGRAM(pinn, 1e-2);
    PROGRAM(ctc, 1e-2);
    PROGRAM(molecules, 1e-2);
    PROGRAM(rays, 1e-2)->steps = 40;     /* later the losses of single batches vary much */
}
#endif
