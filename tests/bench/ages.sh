#!/bin/sh
# ages.sh - the results files that README.md and docs/ name, the oldest first: how many commits have changed the measured
# code since. A figure whose code has changed should be measured again, or its page should say so.
# SPDX-License-Identifier: MIT OR Unlicense
#
#   tests/bench/ages.sh          in a checkout with its history
cd "$(dirname "$0")/../.." || exit 1
git rev-parse --git-dir >/dev/null 2>&1 || { echo 'ages.sh: needs git and the history' >&2; exit 2; }
results=tests/bench/results

# What a file measures, by its name.
code_of() {
    case $1 in
    *h100* | *h200*)          echo 'src/cuda' ;;
    *conv*)                   echo 'src/cpu examples/conv.h' ;;
    *llama*)                  echo 'src/cpu src/operators examples/llama.c' ;;
    *ranks*)                  echo 'src/ranks examples/ddp_*' ;;
    *guard* | *show* | *imprecise* | *real_data*) echo 'src/watch' ;;
    *recipe* | *quantisers*)  echo 'src/recipes src/cpu/quantise.c' ;;
    *optimizer* | *states* | *small* | *train* | *measures*) echo 'src/cpu src/step src/tape' ;;
    *)                        echo 'src/cpu' ;;
    esac
}
for file in $(grep -oh '20[0-9-]*_[a-z0-9_]*\.txt' README.md docs/*.md | sort -u); do
    if [ ! -f "$results/$file" ]; then echo "$file is named, and missing"; continue; fi
    measured=$(git log -1 --format=%H -- "$results/$file")
    # shellcheck disable=SC2046
    echo "$file $(git rev-list --count "$measured..HEAD" -- $(code_of "$file"))"
done | awk '{ printf "%-46s %4s commits of its code since\n", $1, $2 }'
