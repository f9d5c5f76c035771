/* long_everyday_blocks.c - a few steps of everyday programs in fp8 in blocks of 128: their sizes are
 * multiples of 128. See test_everyday_recipes.c. It does not check how far they learn.
 * SPDX-License-Identifier: MIT OR Unlicense */
#define PROGRAMS_UNIT 128
#define RECIPES { MIXP_RECIPE_FP8_BLOCK }
#define RECIPE_STEPS 6
#include "test_everyday_recipes.c"
