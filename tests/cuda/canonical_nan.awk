# canonical_nan.awk - makes x86-64 assembly compute NaNs as a GPU does: tests only.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   c++ -S -mavx -ffixed-xmm14 -ffixed-xmm15 ... -o - | awk -f tests/cuda/canonical_nan.awk >nan.s
#
# An x86 keeps the payload of a NaN operand, and Inf - Inf gives 0xFFC00000. On a GPU every f32
# operation that gives NaN gives 0x7FFFFFFF. The script adds five instructions after each sum,
# product, quotient, root and narrowing in f32, and after each call of a libm function. They replace
# any NaN with the GPU's NaN and change no flags. Moves, casts by integers, f64 and comparisons stay
# unchanged.
BEGIN {
    arithmetic = "^v(add|sub|mul|div|sqrt)ss$|^vfn?m(add|sub)(132|213|231)ss$|^vcvtsd2ss$"
    packed = "^v(add|sub|mul|div|sqrt)ps$|^vfn?m(add|sub)(132|213|231)ps$"
    libm = "^(expf|exp2f|logf|log1pf|tanhf|powf|sinf|cosf|fmaf|sqrtf|fminf|fmaxf)(@PLT)?$"
}

function canonical(to) {
    print "\tvcmpunordss\t" to ", " to ", %xmm15"
    print "\tvandps\t.Lcanonical_nan(%rip), %xmm15, %xmm14"
    print "\tvandnps\t" to ", %xmm15, %xmm15"
    print "\tvorps\t%xmm14, %xmm15, %xmm15"
    print "\tvmovss\t%xmm15, " to ", " to
    count++
}

{ print }
$1 ~ arithmetic { canonical($NF) }
$1 ~ packed { print "packed arithmetic: " $0 >"/dev/stderr"; failed = 1 }
$1 == "call" && $2 ~ libm { canonical("%xmm0") }

END {
    print "\t.section\t.rodata.canonical_nan,\"a\",@progbits"
    print "\t.align 16"
    print ".Lcanonical_nan:"
    print "\t.long\t0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff"
    if (failed || count < 100) exit 1
}
