#define MIXPREC_IMPLEMENTATION
#define MIXPREC_PART MIXPREC_NEON
#include "mixprec.h"
