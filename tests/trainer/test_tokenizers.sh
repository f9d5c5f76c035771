#!/bin/sh
# test_tokenizers.sh - the trainer's tokenizer beside Hugging Face's `tokenizers`, on 45 files of different
# makers' kinds: tokenizers_beside.py. Skipped where PYTHON lacks that package.
# SPDX-License-Identifier: MIT OR Unlicense
cd "$(dirname "$0")/../.." || exit 1
program=${BUILD:-build}/test_tokenizer
[ -x "$program" ] || { echo "$program is not built"; echo "0 passed, 1 failed, 0 skipped"; exit 1; }
command -v "${PYTHON:-python3}" >/dev/null || { echo "skip tokenizers beside the library: no Python"; echo "0 passed, 0 failed, 1 skipped"; exit 0; }
exec "${PYTHON:-python3}" tests/trainer/tokenizers_beside.py "$program" README.md
