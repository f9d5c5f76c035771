#!/usr/bin/env python3
"""tokenizers_beside.py TEST_TOKENIZER TEXT - tokenizer.json files as different makers write them, read by the
trainer (test_tokenizer --encode) and by Hugging Face's tokenizers: the same tokens, or an error or a warning
of the trainer that names the field. Ends with `N passed, N failed, N skipped`, a file a test.
SPDX-License-Identifier: MIT OR Unlicense"""
import json
import os
import subprocess
import sys
import tempfile

try:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
except ImportError:
    print("skip tokenizers beside the library: no tokenizers for this Python")
    print("0 passed, 0 failed, 1 skipped")
    sys.exit(0)

program, text = sys.argv[1], sys.argv[2]
folder = tempfile.mkdtemp()
END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
trained = {}


def byte_level(**options):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert), byte_level(use_regex=False)])


def train(cut=None, normal=None, special=("<|endoftext|>",), size=500):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = cut or byte_level()
    if normal:
        t.normalizer = normal
    t.decoder = decoders.ByteLevel()
    t.train([text], trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), show_progress=False,
                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t


def added(*tokens, special=False, base=None):
    t = base or train()
    (t.add_special_tokens if special else t.add_tokens)(list(tokens))
    return t


def ignoring_merges():
    j = json.loads(train().to_str())
    j["model"]["ignore_merges"] = True
    whole = {"Ġbrown": 9000, "hello": 9001, "ĠĠ": 9002}         # no merge makes them
    for k, (name, _) in enumerate(whole.items()):
        j["model"]["vocab"].setdefault(name, len(j["model"]["vocab"]))
    return Tokenizer.from_str(json.dumps(j))


def with_template():
    t = train()
    t.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    return t


def with_field(name, value):
    t = train()
    if name == "truncation":
        t.enable_truncation(max_length=value)
    else:
        t.enable_padding(length=value)
    return t


def sentencepiece():
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.train([text], trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False))
    return t


def pieces(pre=None, normalizer=None, crossing=False):
    """Llama 2's kind: pieces with spaces as U+2581, and tokens of bytes for the characters that are none."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    if not crossing:
        trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train([text], trainers.BpeTrainer(vocab_size=500, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    names += [name for name in sorted(learnt["vocab"], key=learnt["vocab"].get)]
    t = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [tuple(m) for m in learnt["merges"]], unk_token="<unk>",
                             fuse_unk=True, byte_fallback=True))
    if normalizer:
        t.normalizer = normalizer
    if pre:
        t.pre_tokenizer = pre
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    return t


LLAMA2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def wordpiece():
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.train([text], trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False))
    return t


def pad_of_the_vocabulary():
    t = train()
    t.add_special_tokens(["the", "!"])                          # the model's vocabulary has both
    return t


# name: tokenizer, and the field that the trainer must name when tokens differ ("" = they never do)
FILES = {
    "GPT-2": (train(), ""),
    "GPT-2 with its pattern in a Split": (train(split(GPT2)), ""),
    "GPT-2's pattern, removed and inverted": (train(split(GPT2, "removed", True)), ""),
    "RoBERTa, add_prefix_space": (train(byte_level(add_prefix_space=True)), ""),
    "RoBERTa with mask, lstrip": (added(AddedToken("<mask>", lstrip=True), special=True, base=train(byte_level(add_prefix_space=True))), ""),
    "GPT-NeoX, runs of spaces": (added(*[AddedToken(" " * n, normalized=False) for n in range(24, 1, -1)]), ""),
    "GPT-NeoX, NFC and runs of spaces": (added(*[AddedToken(" " * n) for n in range(2, 9)], base=train(normal=normalizers.NFC())), "normalizer"),
    "CodeGen, runs of tabs": (added(*[AddedToken("\t" * n, normalized=False) for n in range(9, 1, -1)]), ""),
    "Llama 3": (added("<|begin_of_text|>", "<|eot_id|>", special=True, base=train(split(END + r"\p{N}{1,3}" + SIGNS))), ""),
    "GPT-4 as a removed Split": (train(split(END + r"\p{N}{1,3}" + SIGNS, "removed", True)), ""),
    "Qwen 2, NFC": (added("<|im_start|>", "<|im_end|>", special=True, base=train(split(END + r"\p{N}" + SIGNS), normalizers.NFC())), "normalizer"),
    "StarCoder, digits alone": (train(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])), ""),
    "runs of digits": (train(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), byte_level()])), ""),
    "digits and a prefix space": (train(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(add_prefix_space=True)])), ""),
    "DeepSeek's cut": (train(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), byte_level()])), "pre_tokenizer"),
    "Punctuation": (train(pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), byte_level()])), "pre_tokenizer"),
    "one word, no cut": (train(byte_level(use_regex=False)), ""),
    "NFD": (train(normal=normalizers.NFD()), "normalizer"),
    "NFKC": (train(normal=normalizers.NFKC()), "normalizer"),
    "Lowercase": (train(normal=normalizers.Lowercase()), "normalizer"),
    "NFC, then Lowercase": (train(normal=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])), "normalizer"),
    "StripAccents": (train(normal=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])), "normalizer"),
    "Llama 2, TinyLlama": (pieces(normalizer=LLAMA2), ""),
    "Llama 2, pieces across spaces": (pieces(normalizer=LLAMA2, crossing=True), ""),
    "Llama 2, Metaspace at the beginning": (pieces(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)), ""),
    "Llama 2, Metaspace always": (pieces(pre_tokenizers.Metaspace(prepend_scheme="always", split=False)), ""),
    "Llama 2, Metaspace never": (pieces(pre_tokenizers.Metaspace(prepend_scheme="never", split=False)), ""),
    "Llama 2, Metaspace that splits": (pieces(pre_tokenizers.Metaspace()), "pre_tokenizer"),
    "ignore_merges": (ignoring_merges(), ""),
    "one special begins another, short first": (added("<|im_start|>", "<|im_start|>user", "<|im_end|>", special=True), ""),
    "one special begins another, long first": (added("<|im_start|>user", "<|im_start|>", "<|im_end|>", special=True), ""),
    "specials with brackets and braces": (added("[PAD]", "[MASK]", "}", "{x}", special=True), ""),
    "single_word": (added(AddedToken("cat", single_word=True), AddedToken("é", single_word=True)), ""),
    "lstrip": (added(AddedToken("<mask>", lstrip=True), special=True), ""),
    "rstrip": (added(AddedToken("<sep>", rstrip=True), AddedToken("cat", rstrip=True)), ""),
    "lstrip and rstrip of words": (added(AddedToken("the", lstrip=True, rstrip=True, single_word=True)), ""),
    "normalized added tokens under Lowercase": (added(AddedToken("CAT"), AddedToken("<X>", normalized=False), base=train(normal=normalizers.Lowercase())), "normalizer"),
    "emoji as specials": (added("\U0001f600", "\U0001f468‍\U0001f469", "é", special=True), ""),
    "emoji among the trained specials": (train(special=("<|endoftext|>", "\U0001f600", "▁")), ""),
    "pad and others of the vocabulary": (pad_of_the_vocabulary(), ""),
    "a post_processor": (with_template(), ""),
    "truncation": (with_field("truncation", 4), "truncation"),
    "padding": (with_field("padding", 64), "padding"),
    "SentencePiece's BPE": (sentencepiece(), "pre_tokenizer|normalizer"),
    "WordPiece": (wordpiece(), "model"),
}
PROBES = [
    "Hello world, it's 12345 o'clock.", "int  main(void)\n{\n        return 0;\n}\n", "a   b    c", "IT'S WE'LL  x I'Ve", "<|im_start|>user\nhi<|im_end|>",
    "café cafe\u0301 naïve Ünder", "[PAD]x}y{x} [MASK]", "the cat concatenates a <mask> b cat", "hi \U0001f600! \U0001f468‍\U0001f469 é", "\n\n\n  x\t\ty \r\n\r\n z",
    "x<|endoftext|>y <|endoftext|>", "ПРИВЕТ, Мир", "日本語のテキスト 123 ４５", "  leading and trailing   ", "²³ ½ Ⅷ ٣٤ १२", "don't 's 'S ' s''ll", "hello brown brown  hello",
    "THE the <sep>  the cat  !", "α ΒΓ ǅ ﬁ Å \u212b", "\u00a0wide\u3000space\u2028line\u200bzero", "tabs\t\t\t\tend 1234567 3.14,15",
    "มันคือ हिन्दी عربي", "CAT cat <X> <x> CATs", "e\u0301\u0300 ö \u0308o", "a" * 300, "\t\r\n \u1680 \x85 x", "'ſ it'ſ K", "▁the ▁ _the_ the_",
]


def run(path, probes):
    r = subprocess.run([program, "--encode", path] + probes, capture_output=True, text=True)
    return r.returncode, r.stdout.split("\n")[:len(probes)], r.stderr


passed = failed = 0
for name, (t, field) in FILES.items():
    wrong = []
    for ascii_only in (False, True):
        path = os.path.join(folder, "tokenizer.json")
        with open(path, "w", encoding="utf-8") as f:
            json.dump(json.loads(t.to_str()), f, ensure_ascii=ascii_only)
        want = [" ".join(map(str, t.encode(p, add_special_tokens=False).ids)) for p in PROBES]
        status, got, said = run(path, PROBES)
        excused = 0
        if status:                                              # all of it is refused
            excused = len(PROBES)
            if status != 1 or not any(f in said for f in field.split("|")) or not field:
                wrong.append(("status %d" % status, said, field))
            continue
        for probe, mine, theirs in zip(PROBES, got, want):
            if mine == theirs:
                continue
            excused += 1
            _, _, alone = run(path, [probe])
            if not field or not any(f in alone for f in field.split("|")):
                wrong.append((probe, mine, theirs))
    print("%s %s%s" % ("FAIL" if wrong else "ok  ", name, ": %d of %d by an error or a warning" % (excused, len(PROBES)) if excused else ""))
    for row in wrong[:3]:
        print("    %r\n      got  %s\n      want %s" % tuple(str(x)[:200] for x in row))
    failed += bool(wrong)
    passed += not wrong
print("%d passed, %d failed, 0 skipped" % (passed, failed))
sys.exit(failed > 0)
