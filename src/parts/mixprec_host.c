#define MIXPREC_IMPLEMENTATION
#define MIXPREC_PART MIXPREC_HOST
#include "mixprec.h"
