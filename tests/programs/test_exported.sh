#!/bin/sh
# test_exported.sh - conv.h, ops.h, recurrent.h and report.h in a library of the program's own: one file defines their
# functions, others, in C and in C++, call them.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
build=${BUILD:-build}
[ -f "$build/libmixprec.a" ] || { echo "$build/libmixprec.a is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }

cat >"$tmp/api.h" <<'END'
#ifdef __cplusplus
#  define API extern "C"
#else
#  define API extern
#endif
#define CONV_API API
#define OPS_API API
#define RECURRENT_API API
#define REPORT_API API
#include "mixprec.h"
#include "examples/conv.h"
#include "examples/ops.h"
#include "examples/recurrent.h"
#include "examples/report.h"
END
echo '#include "api.h"' >"$tmp/library.c"
cat >"$tmp/user.c" <<'END'
#define CONV_NO_IMPLEMENTATION
#define OPS_NO_IMPLEMENTATION
#define RECURRENT_NO_IMPLEMENTATION
#define REPORT_NO_IMPLEMENTATION
#include "api.h"
int main(void) {
    mixp_context *ctx = mixp_context_new(NULL);
    const int64_t shape[4] = { 1, 1, 2, 2 };
    const float   values[4] = { 1, 2, 3, 4 };
    char          line[REPORT_MESSAGE];
    mixp_step_begin(ctx);
    report_header(line, sizeof line, "exported", "cpu");
    if (report_open("", line, 0)) return 1;
    if (mixp_roll(ctx, NULL, 1, 0)) return 2;
    if (lstm_layer(ctx, NULL, NULL, NULL, NULL)) return 2;
    return mixp_item(mixp_sum(ctx, upsample_nearest2d(ctx, mixp_input(ctx, MIXP_F32, 4, shape, values), 2, 3), MIXP_ALL, 0)) == 60.0
               ? 0 : 3;
}
END
cp "$tmp/user.c" "$tmp/user.cpp"
strict='-Wall -Wextra -Wshadow -Werror'
openmp=$(echo 'int main(void) { return 0; }' >"$tmp/o.c"; ${CC:-cc} -fopenmp "$tmp/o.c" -o "$tmp/o" 2>/dev/null && echo -fopenmp)
# shellcheck disable=SC2086
library() { ${CC:-cc} -std=c99 $strict -I"$tmp" -I. -c "$tmp/library.c" -o "$tmp/library.o"; }
# shellcheck disable=SC2086
user() { $1 $strict -I"$tmp" -I. "$tmp/user.$2" "$tmp/library.o" "$build/libmixprec.a" $openmp -lm -o "$tmp/user" && "$tmp/user"; }
check 'a library defines the functions'   library
check 'a program in C calls them'         user "${CC:-cc} -std=c99" c
if command -v "${CXX:-c++}" >/dev/null; then
    check 'a program in C++ calls them'   user "${CXX:-c++} -std=c++11" cpp
else
    skip 'a program in C++ calls them: no C++ compiler'
fi
report
