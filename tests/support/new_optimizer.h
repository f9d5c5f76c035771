/* new_optimizer.h - optimizers with the defaults of their kind. */
#ifndef NEW_OPTIMIZER_H
#define NEW_OPTIMIZER_H
#include "mixprec.h"

static inline mixp_optimizer *made_from(mixp_context *ctx, mixp_optimizer_desc d)
{ return mixp_optimizer_new(ctx, &d); }
static inline mixp_optimizer *new_sgd(mixp_context *ctx)
{ return made_from(ctx, mixp_sgd_defaults()); }
static inline mixp_optimizer *new_adam(mixp_context *ctx)
{ return made_from(ctx, mixp_adam_defaults()); }
static inline mixp_optimizer *new_rmsprop(mixp_context *ctx)
{ return made_from(ctx, mixp_rmsprop_defaults()); }
static inline mixp_optimizer *new_lion(mixp_context *ctx)
{ return made_from(ctx, mixp_lion_defaults()); }
static inline mixp_optimizer *new_muon(mixp_context *ctx)
{ return made_from(ctx, mixp_muon_defaults()); }

#endif
