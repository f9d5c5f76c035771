#pragma once
#include "shared.c"
#include "machine.c"
#include "starts.c"
#if MIXPI_LEAST == 0
#  define MIXPI_PASS 0
#  include MIXPREC_SELF
#  undef MIXPI_PASS
#endif
#if MIXPI_X86
#  if MIXPI_LEAST <= 1
#    define MIXPI_PASS 1
#    include MIXPREC_SELF
#    undef MIXPI_PASS
#  endif
#  if !defined(MIXPREC_ONLY_FORMATS) || MIXPI_LEAST == 2  /* memory-bound: AVX2 suffices */
#    define MIXPI_PASS 2
#    include MIXPREC_SELF
#    undef MIXPI_PASS
#  endif
#endif
#if MIXPI_ARM
#  define MIXPI_PASS 3
#  include MIXPREC_SELF
#  undef MIXPI_PASS
#endif
