#pragma once
#include "multiply.c"
#include "histories.c"
/* --- the table of the recipes' functions ------------------------------------------------------ */

static const mixpi_quantiser mixpi_recipes_door = {
    /* autocast */
    mixpi_recipe_refuses, mixpi_recipe_open,
    /* linear layers */
    mixpi_recipe_leaves, mixpi_recipe_decide, mixpi_linear_forward, mixpi_linear_backward,
    mixpi_linear_recorded,
    /* steps */
    mixpi_recipe_begin, mixpi_recipe_walk_begin, mixpi_delayed_advance, mixpi_recipe_words,
    /* checkpoints */
#ifndef MIXPREC_NO_CHECKPOINT
    mixpi_scaled_meet, mixpi_scaled_items, mixpi_scaled_reset_missing
#else
    NULL, NULL, NULL
#endif
};
