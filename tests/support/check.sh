# check.sh - functions shared by the test scripts, which source it: `. tests/support/check.sh`.
# SPDX-License-Identifier: MIT OR Unlicense

# A script run by hand asks make for what make tells its scripts: the compilers, Python, CUDA.
if [ -z "${CUDA+set}" ] && [ -f Makefile ]; then
    eval "$("${MAKE:-make}" -s --eval 'told: ; @echo "export $(EXPORT)"' told 2>/dev/null | grep '^export ')"
fi

tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM
passed=0 failed=0 skipped=0

# check NAME COMMAND...: one test; it passes when the command succeeds. What a failing command
# printed is shown.
check() {
    check_name=$1; shift
    if "$@" >"$tmp/check.log" 2>&1; then passed=$((passed + 1)); echo "ok   $check_name"
    else failed=$((failed + 1)); echo "FAIL $check_name"; head -n 20 "$tmp/check.log" | sed 's/^/  /'
    fi
}

skip() { skipped=$((skipped + 1)); echo "skip $1"; }

# The last line of a script, and its exit status.
report() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
}
