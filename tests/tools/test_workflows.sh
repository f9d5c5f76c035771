#!/bin/sh
# test_workflows.sh - .github/workflows: the targets, scripts and archives that they name exist; msvc.sh runs with a
# stand-in for Microsoft's compiler. The workflows themselves run only on GitHub.
# SPDX-License-Identifier: MIT OR Unlicense
. tests/support/check.sh

CC=${CC:-cc}
PYTHON=${PYTHON:-python3}
flows='.github/workflows/tests.yml .github/workflows/release.yml'
# shellcheck disable=SC2086
targets() {
    sed -nE 's/^ *(- run: |run: )?make( -j[0-9]+)?(( [A-Z]+=[^ ]*)*) ([a-z-]+)$/\5/p' $flows | sort -u >"$tmp/targets"
    cat "$tmp/targets"
    [ "$(tr '\n' ' ' <"$tmp/targets")" = 'dist test ' ] || return
    while read -r target; do grep -q "^$target:" Makefile tests/tests.mk packaging/packaging.mk || return; done <"$tmp/targets"
}
check 'the targets of make exist'             targets
# shellcheck disable=SC2086
scripts() { for s in .ci/run $(grep -oh 'tests/tools/[a-z_]*\.sh' $flows); do [ -x "$s" ] || { echo "$s"; return 1; }; done; }
check 'the scripts exist'                     scripts
archives() { grep -Fq 'build/dist/*.tar.gz' .github/workflows/release.yml && grep -q '\.tar\.gz && sha256sum' packaging/packaging.mk; }
check 'the release attaches what make dist makes' archives
honest() { for f in $flows; do grep -q 'THIS FILE HAS NOT RUN YET' "$f" || return; done; }
check 'a workflow that has not run says so'   honest
# shellcheck disable=SC2086
yaml() { "$PYTHON" -c 'import sys, yaml; assert all(yaml.safe_load(open(f))["jobs"] for f in sys.argv[1:])' $flows; }
if "$PYTHON" -c 'import yaml' 2>/dev/null; then check 'they are YAML' yaml; else skip 'they are YAML (no Python with PyYAML)'; fi

without_cl() { CL_COMMAND=/nonexistent/cl tests/tools/msvc.sh | grep -Fx '0 passed, 0 failed, 1 skipped'; }
check 'msvc.sh skips without cl'              without_cl
# cl's options as those of CC.
cat >"$tmp/cl" <<'END'
#!/bin/sh
for word; do
    shift
    case $word in
    -Fe*) set -- "$@" -o "${word#-Fe}"; linked=1 ;;
    -Fo*) object=${word#-Fo} ;;
    -nologo | -W3 | -fp:*) ;;
    -std:*) set -- "$@" "-std=${word#-std:}" ;;
    -O2) set -- "$@" -O0 ;;
    *) set -- "$@" "$word" ;;
    esac
done
if [ -n "$linked" ]; then exec $CC -DMIXPREC_NO_SIMD "$@" -lm; else exec $CC -DMIXPREC_NO_SIMD "$@" -o "$object"; fi
END
printf '#!/bin/sh\nout=${2#-out:}; shift 2; ar rcs "$out" "$@"\n' >"$tmp/lib"
chmod +x "$tmp/cl" "$tmp/lib"
with_cl() {
    CC=$CC CL_COMMAND="$tmp/cl" LIB_COMMAND="$tmp/lib" BUILD="$tmp" tests/tools/msvc.sh test_scaler test_threads >"$tmp/msvc_log"
    cat "$tmp/msvc_log"
    tail -n 1 "$tmp/msvc_log" | grep -E '^[1-9][0-9]* passed, 0 failed, 1 skipped$'
}
if [ -n "$MIXPREC_TEST_QUICK" ]; then skip 'msvc.sh with a stand-in for cl: in make test-long'
else check 'msvc.sh with a stand-in for cl' with_cl
fi
report
