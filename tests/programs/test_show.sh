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
