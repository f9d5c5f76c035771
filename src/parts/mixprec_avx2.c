#define MIXPREC_IMPLEMENTATION
#define MIXPREC_PART MIXPREC_AVX2
#include "mixprec.h"
