#!/bin/sh
# test_web.sh - examples/web: the page and page.c agree on names; in test-long page.wasm is built, and trains
# in node and in headless Chromium as the same file does when compiled for this machine.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
. tests/support/check.sh
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
python=${PYTHON:-python3}

exported() { grep -o 'EXPORT(page_[a-z_]*)' examples/web/page.c | sed 's/EXPORT(//; s/)//' | sort -u; }
called()   { grep -o 'gpt\.page_[a-z_]*' examples/web/index.html | sed 's/gpt\.//' | sort -u; }
same_names() { exported >"$tmp/a" && called >"$tmp/b" && test -s "$tmp/a" && diff "$tmp/a" "$tmp/b"; }
no_links() { ! grep -Eq '(src|href) *= *["'"'"']?(https?:)?//' examples/web/index.html; }

check 'the page calls what page.c exports'        same_names
check 'the page loads nothing from elsewhere'     no_links
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'page.wasm: in make test-long'; report; exit; fi

cat >"$tmp/native.c" <<'EOF2'
#include "examples/web/page.c"
int main(void) {
    int step;
    page_start();
    for (step = 1; step <= 300; step++) {
        if (step == 151) page_set_inner(1e5);
        if (!page_step()) return 1;
        if (step % 100 == 0 || step == 1) printf("%d %.4f %g %d\n", step, page_loss(), page_scale(), page_skipped());
    }
    return 0;
}
EOF2
cat >"$tmp/run.cjs" <<'EOF2'
const compiled = new WebAssembly.Module(require("fs").readFileSync(process.argv[2])), system = {};
for (const i of WebAssembly.Module.imports(compiled)) (system[i.module] ||= {})[i.name] = () => 52;
const gpt = new WebAssembly.Instance(compiled, system).exports;
gpt._initialize();
gpt.page_start();
for (let step = 1; step <= 300; step++) {
  if (step === 151) gpt.page_set_inner(1e5);
  if (!gpt.page_step()) process.exit(1);
  if (step % 100 === 0 || step === 1)
    console.log(step, gpt.page_loss().toFixed(4), gpt.page_scale(), gpt.page_skipped());
}
EOF2
# Counts what was painted, once the page has done its steps.
cat >"$tmp/painted.html" <<'EOF2'
<script>setInterval(() => { if (document.body.dataset.done) document.title = "painted " +
  [...document.querySelectorAll("canvas")].map(c => c.getContext("2d").getImageData(0, 0, c.width, c.height)
    .data.filter((v, i) => i % 4 === 3 && v).length).join(" "); }, 100);</script>
EOF2

near()    { awk -v a="$1" -v b="$2" 'BEGIN { d = a - b; exit !(a + 0 == a && b + 0 == b && d < 0.01 && d > -0.01) }'; }
between() { awk -v x="$1" -v low="$2" -v high="$3" 'BEGIN { exit !(x + 0 == x && x >= low && x <= high) }'; }
loss()    { awk -v step="$2" '$1 == step { print $2 }' "$tmp/$1"; }
native()  { ${CC:-cc} -std=c99 -O1 -DMIXPREC_NO_SIMD -I. "$tmp/native.c" -lm -o "$tmp/native" && "$tmp/native" >"$tmp/here"; }
agrees()  { for s in 1 100 200 300; do near "$(loss here $s)" "$(loss "$1" $s)" || return 1; done
            test "$(awk '{ print $3, $4 }' "$tmp/here")" = "$(awk '{ print $3, $4 }' "$tmp/$1")"; }
serve()   { "$python" -u -m http.server 0 --bind 127.0.0.1 -d "$tmp/web" >"$tmp/port" 2>"$tmp/served" & server=$!
            for i in 1 2 3 4 5 6 7 8 9; do grep -q port "$tmp/port" && return; sleep 1; done; return 1; }
in_browser() {
    cat "$tmp/painted.html" >>"$tmp/web/index.html"
    serve && timeout 300 "$browser" --headless --no-sandbox --disable-gpu --virtual-time-budget=60000 --dump-dom \
        "http://127.0.0.1:$(sed -n 's/.* port \([0-9]*\).*/\1/p' "$tmp/port")/index.html?steps=300&overflow=150" \
        >"$tmp/dom" 2>"$tmp/browser"
    kill "$server"
    grep -q 'data-done="300"' "$tmp/dom"
}
# clang runs a wasm-opt of the PATH at a link with -O2.
unchanged() {
    mkdir "$tmp/bin" && printf '#!/bin/sh\nexit 1\n' >"$tmp/bin/wasm-opt" && chmod +x "$tmp/bin/wasm-opt" &&
        PATH=$tmp/bin:$PATH ${MAKE:-make} -s BUILD="$tmp/again" web && cmp "$tmp/web/page.wasm" "$tmp/again/web/page.wasm"
}
shown()   { sed -n 's/.*id="state"[^>]*>step 300, loss \([0-9.]*\),.*/\1/p' "$tmp/dom"; }
painted() { sed -n 's/.*<title>painted \([0-9]*\) \([0-9]*\)<.*/\1 \2/p' "$tmp/dom" |
                awk '{ ok = $1 > 500 && $2 > 500 } END { exit !ok }'; }

check 'page.c trains when compiled for this machine'   native
check 'from about ln 27, 3.30'                         between "$(loss here 1)" 3.1 3.5
check 'in 300 steps below 2.2'                         between "$(loss here 300)" 1.0 2.2
if ! ${MAKE:-make} -s BUILD="$tmp" web >"$tmp/make" 2>&1; then
    if grep -q 'web: no ' "$tmp/make"; then skip "page.wasm ($(sed -n 's/.*web: \(no .*\)/\1/p' "$tmp/make" | head -n 1))"
    else check 'make web' cat "$tmp/make" /nonexistent; fi
    report; exit
fi
check 'page.wasm has at most 450 KiB'                  test "$(wc -c <"$tmp/web/page.wasm")" -le 460800
check 'no wasm-opt on the way changes it'              unchanged
if command -v node >/dev/null; then
    check 'it trains in node'                          eval 'node "$tmp/run.cjs" "$tmp/web/page.wasm" >"$tmp/node"'
    check 'with the losses, scales and skips of here'  agrees node
else skip 'page.wasm in node (no node)'; fi
if [ -n "$browser" ] && command -v "$python" >/dev/null; then
    check 'it trains in Chromium'                      in_browser
    check 'with the loss of here'                      near "$(shown)" "$(loss here 300)"
    check 'both curves are painted'                    painted
    check 'the guard tells what overflowed'            grep -q '<li>step 151: mlp.up: scale overflowed: stores f32 now' "$tmp/dom"
else skip 'the page in a browser (no Chromium)'; fi
report
