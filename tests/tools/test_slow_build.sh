#!/bin/sh
# test_slow_build.sh - mixp_self_check names the features of the machine that a build does not use:
# optimisation, vector instructions, threads. For a build that uses all of them, its message is
# empty.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
CC=${CC:-cc}

cat >"$tmp/check.c" <<'END'
#ifdef __OPTIMIZE__
#  define MIXPREC_PART MIXPREC_HOST
#  include "internals.h"
#else
#  define MIXPREC_STATIC
#  define MIXPREC_IMPLEMENTATION
#  include "mixprec.h"
#endif
int main(void) {
    const char *slow = mixpi_check_speed();
    puts(slow ? slow : "");
    return 0;
}
END

# What mixp_self_check adds at its end. Calling that alone, of the host's part, spares compiling every kernel;
# an unoptimised build keeps the functions that it does not call.
says() {
    wanted=$1
    shift
    "$CC" "$@" -I. -Itests/support "$tmp/check.c" -lm -o "$tmp/check" || return 1
    "$tmp/check" >"$tmp/said" || return 1
    grep -q -e "$wanted" "$tmp/said" || { cat "$tmp/said"; return 1; }
}
has_openmp() { echo 'int main(void) { return 0; }' >"$tmp/omp.c" && "$CC" -fopenmp "$tmp/omp.c" -o "$tmp/omp" 2>/dev/null; }
many_cores() { [ "$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)" -gt 1 ]; }

if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'without optimisation: in make test-long'
else check 'without optimisation'       says '^slow: compiled without optimisation.*-O2$' -O0 -fno-inline; fi
case $(uname -m) in
x86_64 | aarch64)
    check 'without vector instructions' says '^slow: compiled without vector' -O1 -DMIXPREC_NO_SIMD ;;
esac
if many_cores; then
    check 'without threads'             says '^slow: compiled without threads.*-fopenmp' -O1
else
    skip 'without threads' 'one core'
fi
if has_openmp; then
    check 'nothing of a whole build'    says '^$' -O1 -fopenmp
else
    skip 'nothing of a whole build' 'no OpenMP'
fi
report
