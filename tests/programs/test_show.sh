#!/bin/sh
# test_show.sh - examples/proof.c: how much fp16 loses in models without planted faults, and that
# the guard loses nothing.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
build=${BUILD:-build}
export OMP_NUM_THREADS=1

# run MODEL WAY: its last losses' mean into $loss.
run() { loss=$("$build/proof" "$1" "$2" | sed -n 's/.*: loss \([^,]*\),.*/\1/p'); echo "$1 $2: $loss"; }
lost() { run "$1" "$2"; case $loss in *nan*) ;; *) false ;; esac; }
close_to_fp32() {
    run "$1" fp32 && fp32=$loss
    run "$1" "$2" && awk "BEGIN { d = $loss - $fp32; exit !(d < $3 && d > -$3) }"
}
for model in atmosphere gemma; do
    check "$model: fp16 alone ends in NaN"              lost $model fp16
    check "$model: fp16 with a scaler ends in NaN"      lost $model scaler
    check "$model: fp16 with a guard ends as fp32 does" close_to_fp32 $model guard 0.004
    check "$model: bf16 ends as fp32 does"              close_to_fp32 $model bf16 0.004
done
# README's table: each figure of rows 2 to 4 is the mean of four seeds. Sums in another order, of another instruction set
# or compiler, change these means by up to a hundredth. The steps that the guard skips are in the sentence above it.
readme() { # MODEL WORDS: five figures, in the table's order
    for way in fp16 scaler guard fp32 bf16; do
        for seed in 1 2 3 4; do "$build/proof" "$1" $way $seed | tail -n 1; done | sed 's/,//g' |
            awk '{ sum += $6; nan += $6 ~ /nan/; if ($8 > most) most = $8 } END { print nan ? "NaN" : sum / NR, most + 0 }'
    done >"$tmp/means"
    sed -n 3p "$tmp/means" | cut -d ' ' -f 2 >>"$tmp/skips"
    grep "^| $2" README.md | tr -d '* ' | awk -F '|' '{ for (i = 3; i < 8; i++) print $i }' | paste -d ' ' "$tmp/means" - |
        awk '{ print "measured " $1 ", README " $3; d = $1 - $3
               if (NF != 3 || ($1 == "NaN") != ($3 == "NaN") || d > 0.01 * $3 + 1e-4 || -d > 0.01 * $3 + 1e-4) bad = 1 }
             END { exit bad || NR != 5 }'
}
skips_of_readme() {
    told=$(sed -n 's/.*it skips \([a-z]*\) steps* in row 2 and \([a-z]*\) in row 3.*/\1 \2/p' README.md | sed 's/one/1/g; s/two/2/g')
    echo "README $told, measured $(tr '\n' ' ' <"$tmp/skips")"
    [ "$told 0 " = "$(tr '\n' ' ' <"$tmp/skips")" ]
}
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip "README's table: in make test-long"
else
    check "README's row 2"                              readme atmosphere 'Inputs too large'
    check "README's row 3"                              readme gemma 'A product too large'
    check "README's row 4"                              readme year 'Digits lost'
    check 'the steps that README says are skipped'      skips_of_readme
fi
unknown() { "$build/proof" moon fp32 2>"$tmp/why"; [ $? -eq 2 ] && grep -q usage "$tmp/why"; }
check 'an unknown model is refused'                     unknown

if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'a residual network: in make test-long'
else check 'a residual network learns in fp16 as in fp32' "$build/resnet"
fi

page() {
    PYTHON=$tmp/python BUILD="$tmp/build" SEEDS=1 tests/bench/show.sh gemma >"$tmp/out" &&
        grep -q 'Gemma' "$tmp/build/show/show.html" && grep -c '<polyline' "$tmp/build/show/show.html"
}
if command -v "${PYTHON:-python3}" >/dev/null 2>&1; then
    mkdir "$tmp/build" && cp "$build/proof" "$tmp/build/"
    # A Python without PyTorch, so that this takes seconds.
    printf '#!/bin/sh\n[ "$1" = -c ] && exit 1\nexec %s "$@"\n' "${PYTHON:-python3}" >"$tmp/python"
    chmod +x "$tmp/python"
    check 'the page is drawn'                           page
else skip 'the page is drawn (no Python)'
fi
report
