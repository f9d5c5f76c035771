/* test_cuda_everyday_recipes.cpp - everyday programs under recipes on the simulated GPU, in its own fp8 and
 * fp4: graphs replay their steps, as in test_cuda_everyday.cpp. Sizes are multiples of 32.
 * SPDX-License-Identifier: MIT OR Unlicense */
#define PROGRAMS_UNIT 32
#include "test_cuda_everyday.cpp"
