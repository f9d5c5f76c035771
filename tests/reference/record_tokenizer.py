#!/usr/bin/env python3
# record_tokenizer.py - makes a byte-level BPE of GPT-2's kind with Hugging Face's tokenizers, writes its
# tokenizer.json, and records how that cuts texts: tests/reference/tokenizer.json, tokenizer.h
# SPDX-License-Identifier: MIT OR Unlicense
import sys
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

folder, source = sys.argv[1], sys.argv[2]       # tests/reference, and a text to learn from
t = Tokenizer(models.BPE())
t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
t.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<|endoftext|>"], show_progress=False,
                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
t.train([source], trainer)
t.save(folder + "/tokenizer.json")
texts = ["", "a", "the gradient of the loss", "  two  spaces", "tabs\t\tand\n\nlines\n", "don't we'll I've x's",
         "fp16 65504.0, 2023!", "a<|endoftext|>the", "<|endoftext|>", "naïve café", "Привет, мир", "日本語のテキスト",
         "x ≠ y — “quoted” … €5", "emoji 🙂 end", "trailing   ", " ' s", "\u00a0wide\u3000space", "if (x) { y += 1; }\n    return;",
         "ÀÉ ß ²³ ¼", "'S 'Re n't", "mixprec's 'quoted'  'words'", "\\ \" \u007f \u0001"]
with open(folder + "/tokenizer.h", "w") as out:
    out.write("/* tokenizer.h - how tokenizers %s cuts texts with tokenizer.json, recorded by\n"
              " * record_tokenizer.py\n * SPDX-License-Identifier: MIT OR Unlicense\n */\n"
              "static const struct { const char *text; int n; int ids[64]; } tokenizer_cases[] = {\n"
              % tokenizers.__version__)
    for text in texts:
        ids = t.encode(text).ids
        assert len(ids) <= 64 and t.decode(ids, skip_special_tokens=False) == text
        quoted = "".join("\\%03o" % b if b < 32 or b > 126 or chr(b) in "\"\\?" else chr(b)
                         for b in text.encode())
        out.write('    { "%s", %d, { %s } },\n' % (quoted, len(ids), ", ".join(map(str, ids)) or "0"))
    out.write("};\n")
