#!/bin/sh
# test_reference_page.sh - the API reference: every public function has an entry, every link has a
# target, and the index by PyTorch's names refers only to existing entries. If headless Chromium is
# installed, it renders the page at two widths.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh
python=${PYTHON:-python3}

if ! "$python" -c 'import html' 2>/dev/null; then
    skip 'the API reference (no Python)'
    report
    exit
fi
page="$tmp/reference.html"
makes() { "$python" src/reference.py >"$page"; }
check 'the page is made, and its PyTorch names lead to names of ours' makes

# From the product itself, by another way than the page's script reads the rooms.
sed '/Stop here/,$d' mixprec.h | tr '\n' ' ' | grep -o 'MIXPREC_API[^;{]*(' |
    sed 's/(.*//; s/.*[ *]//' | grep '^mixp_' | LC_ALL=C sort -u >"$tmp/functions"
grep -o 'id="[A-Za-z0-9_-]*"' "$page" | sed 's/id="//; s/"//' | LC_ALL=C sort >"$tmp/ids"
grep -o 'href="#[A-Za-z0-9_-]*"' "$page" | sed 's/href="#//; s/"//' | LC_ALL=C sort -u >"$tmp/links"
none_left() { [ -z "$(LC_ALL=C comm -23 "$1" "$2" | tee /dev/stderr)" ]; }
LC_ALL=C sort -u "$tmp/ids" >"$tmp/unique"
check "each of $(wc -l <"$tmp/functions") public functions has a place" none_left "$tmp/functions" "$tmp/unique"
cat examples/conv.h examples/ops.h examples/recurrent.h examples/compare.h | grep -E '^[A-Z]+_API ' | sed 's/(.*//; s/.*[ *]//' |
    LC_ALL=C sort -u >"$tmp/addons"
check "so has each of $(wc -l <"$tmp/addons") functions of the add-ons"   none_left "$tmp/addons" "$tmp/unique"
no_linkage() { ! grep -n '[A-Z]_API \(<a\|mixp\|int\|void\|const\)' "$page"; }
check 'prototypes have no words for the linker'   no_linkage
check 'every link leads somewhere'                none_left "$tmp/links" "$tmp/unique"
check 'no place stands twice'                     cmp "$tmp/ids" "$tmp/unique"
check 'at least 80 names of PyTorch'              [ "$(grep -c '^[a-z]' src/pytorch_names.txt)" -ge 80 ]

wrong_name() {
    cp -r src "$tmp/src" && mkdir "$tmp/examples" && cp examples/*.h "$tmp/examples" && echo 'torch.nothing | mixp_nothing |' >>"$tmp/src/pytorch_names.txt"
    ! "$python" "$tmp/src/reference.py" >/dev/null 2>"$tmp/why" && grep -q 'mixp_nothing is not in the header' "$tmp/why"
}
check 'a name that is not there is an error'      wrong_name

# A page that is wider than the window would be scrolled sideways on a phone.
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
# The browser's window cannot be as narrow as a phone, a frame can.
fits() {
    { printf '<!doctype html><body style="margin:0"><iframe style="border:0;width:%spx;height:900px" srcdoc="' "$1"
      sed 's/&/\&amp;/g; s/"/\&quot;/g' "$page"
      echo '" onload="document.title = `w` + this.contentDocument.documentElement.scrollWidth"></iframe></body>'; } >"$tmp/wide.html"
    timeout 100 "$browser" --headless --no-sandbox --disable-gpu --window-size=1300,900 \
        --dump-dom "file://$tmp/wide.html" 2>/dev/null | grep -o '<title>w[0-9]*' | head -n 1 | tee "$tmp/width"
    [ "$(sed 's/[^0-9]//g' "$tmp/width")" -le "$1" ]
}
# The first item found by its text stands below the last item found by its name.
names_first() {
    sed "s#</body>#<script>field.value = '$1'; search(); const at = which => items.filter(i => !i.classList.contains('hidden') \\&\\&\
 i.closest('article') \\&\\& i.classList.contains('named') === which).map(i => i.getBoundingClientRect().top);\
 document.title = at(true).length > 1 \\&\\& at(false).length > 1 \\&\\& Math.max(...at(true)) < Math.min(...at(false)) ? 'first' : 'mixed';</script></body>#" \
        "$page" >"$tmp/found.html"
    timeout 100 "$browser" --headless --no-sandbox --disable-gpu --dump-dom "file://$tmp/found.html" 2>/dev/null |
        grep -q '<title>first</title>'
}
# The heading next above each item found is that of the item's section; a section without hits shows none.
under_headings() {
    sed "s#</body>#<script>field.value = '$1'; search(); const shown = [...document.querySelectorAll('h2')].filter(h => h.offsetHeight);\
 const y = e => e.getBoundingClientRect().top, hits = items.filter(i => !i.classList.contains('hidden'));\
 const over = i => shown.filter(h => y(h) <= y(i)).sort((a, b) => y(b) - y(a))[0];\
 const right = hits.every(i => over(i) \&\& over(i).closest('section') === i.closest('section'));\
 const used = shown.every(h => hits.some(i => over(i) === h));\
 document.title = hits.length \&\& right \&\& used ? 'headed' : 'bare';</script></body>#" "$page" >"$tmp/found.html"
    timeout 100 "$browser" --headless --no-sandbox --disable-gpu --dump-dom "file://$tmp/found.html" 2>/dev/null |
        grep -q '<title>headed</title>'
}
if [ -z "$browser" ]; then skip 'the page in a browser (no Chromium)'
elif [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'the page in a browser: in make test-long'
else
    check 'it fits a desktop'                     fits 1280
    check 'it fits a phone'                       fits 390
    check 'a search shows names before texts'     names_first scaler
    check 'each hit stands under its section'     under_headings scaler
    check 'so it does if only texts are found'    under_headings pinned
    check 'and if only names are'                 under_headings mixp_scaler_update_to
fi
report
