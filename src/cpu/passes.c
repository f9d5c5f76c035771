#pragma once
#include "link_names.c"
#include "attention_plan.c"
#include "update_plan.c"
#if MIXPI_WITH_SCALAR && MIXPI_IN_PART(MIXPREC_SCALAR)
#  define MIXPI_PASS 0
#  include MIXPREC_SELF
#  undef MIXPI_PASS
#endif
#if MIXPI_WITH_AVX2 && MIXPI_IN_PART(MIXPREC_AVX2)
#  define MIXPI_PASS 1
#  include MIXPREC_SELF
#  undef MIXPI_PASS
#endif
#if MIXPI_WITH_AVX512 && MIXPI_IN_PART(MIXPREC_AVX512)
#  define MIXPI_PASS 2
#  include MIXPREC_SELF
#  undef MIXPI_PASS
#endif
#if MIXPI_ARM && MIXPI_IN_PART(MIXPREC_NEON)
#  define MIXPI_PASS 3
#  include MIXPREC_SELF
#  undef MIXPI_PASS
#endif
