#!/usr/bin/env python3
"""interop_gguf.py - GGUF files of examples/gguf.h beside the gguf package and, where it is installed, llama.cpp.
SPDX-License-Identifier: MIT OR Unlicense

  interop_gguf.py [PATH_OF_test_llama [PATH_OF_trainer]]     (default: $BUILD/test_llama, $BUILD/trainer)

The gguf package reads our files: metadata, shapes and values bit for bit, those of Q8_0 against its own quantiser.
We read files that the package writes. llama.cpp runs our files: the same tokens of texts, the same likeliest tokens.
Needs numpy, safetensors and gguf; llama_cpp (package llama-cpp-python) is skipped and counted where it is absent.
"""
import json
import os
import subprocess
import sys
import tempfile

try:
    import gguf
    import numpy as np
    import safetensors.numpy
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
try:
    import llama_cpp
except ImportError:
    llama_cpp = None

root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(root, "tests", "support"))
import llama_models

build = os.environ.get("BUILD", "build")
program = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(build, "test_llama"))
trainer = os.path.abspath(sys.argv[2] if len(sys.argv) > 2 else os.path.join(build, "trainer"))
tokens_file = os.path.join(root, "tests", "reference", "tokenizer.json")
Q = gguf.GGMLQuantizationType
passed = failed = skipped = 0
# llama.cpp keeps keys and values in f16 unless it is told to keep f32.
SETTINGS = dict(n_ctx=64, logits_all=True, verbose=False, n_threads=1, n_threads_batch=1, type_k=Q.F32, type_v=Q.F32, flash_attn=False)
TEXTS = ["the gradient of the loss", "  two  spaces\n\n\ttabs", "don't we'll x's 65504.0, 2023!", "naïve café — “quoted” €5",
         "Привет, мир 日本語", "trailing   "]


def check(name, condition):
    global passed, failed
    passed += bool(condition)
    failed += not condition
    print("ok  " if condition else "FAIL", name)


def skip(name):
    global skipped
    skipped += 1
    print("skip", name)


def run(*arguments):
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.strip())
    return done


def values_of(folder):
    """The tensors of a model as float32, of one file or several."""
    out = {}
    for file in sorted(os.listdir(folder)):
        if not file.endswith(".safetensors"):
            continue
        with open(os.path.join(folder, file), "rb") as f:
            n = int.from_bytes(f.read(8), "little")
            header, data = json.loads(f.read(n)), f.read()
        for name, e in header.items():
            if name == "__metadata__":
                continue
            raw = data[slice(*e["data_offsets"])]
            x = np.frombuffer(raw, dict(F32=np.float32, F16=np.float16, BF16=np.uint16)[e["dtype"]])
            if e["dtype"] == "BF16":
                x = (x.astype(np.uint32) << 16).view(np.float32)
            out[name] = x.astype(np.float32).reshape(e["shape"])
    return out


def turned(x, heads):
    """llama.cpp's order of the rows of queries and keys."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def renamed(name, x, c, arch):
    """A tensor's name in GGUF by the package's own table, and its values in GGUF's order."""
    names = gguf.get_tensor_name_map(arch, c["layers"])
    stem, end = name.rsplit(".", 1)
    if "q_proj" in name:
        x = turned(x, c["heads"])
    if "k_proj" in name:
        x = turned(x, c["kv_heads"])
    if arch == gguf.MODEL_ARCH.GPT2 and ".h." in name and x.ndim == 2:
        x = x.T
    return names.get_name(stem) + "." + end, np.ascontiguousarray(x)


def same_values(name, reader, want, kind):
    """kind: the type of matrices; vectors are f32."""
    found = {t.name: t for t in reader.tensors}
    check(f"{name}: its {len(want)} tensors", set(found) - {"rope_freqs.weight"} == set(want))
    wrong = []
    for key, x in want.items():
        t = found.get(key)
        kind_here = kind if x.ndim > 1 and (kind != Q.Q8_0 or x.shape[-1] % 32 == 0) else Q.F32
        if t is None or t.tensor_type != kind_here or list(t.shape) != list(x.shape[::-1]):
            wrong.append(key)
            continue
        stored = gguf.quantize(x, kind_here)
        if np.asarray(t.data).view(np.uint8).tobytes() != stored.view(np.uint8).tobytes():
            wrong.append(key)
    check(f"{name}: values are the package's, bit for bit{': not ' + ', '.join(wrong[:3]) if wrong else ''}", not wrong)


def field(reader, key):
    return reader.fields[key].contents() if key in reader.fields else None


def refused(scratch, name, tokenizer, settings):
    """Scalings that GGUF does not have."""
    folder, path = os.path.join(scratch, name), os.path.join(scratch, name + ".gguf")
    llama_models.make(folder, tokenizer, **settings)
    done = subprocess.run([program, "--run", folder, "--sample", "0", "--gguf", path], capture_output=True, text=True)
    check(f"{name}: refused for GGUF", done.returncode == 1 and "GGUF has no such scaling" in done.stderr and not os.path.exists(path))


def llama_files(scratch, tokenizer):
    """Our GGUF of Llama-like models, for each type. Returns the files that llama.cpp should run."""
    files = []
    for name, settings in {**llama_models.cases, **llama_models.ropes}.items():
        if name in ("dynamic", "yarn, not truncated"):
            refused(scratch, name, tokenizer, settings)
            continue
        folder = os.path.join(scratch, name)
        c = llama_models.make(folder, tokenizer, **settings)
        sizes = dict(layers=3, heads=4, kv_heads=c["num_key_value_heads"])
        want = dict(renamed(n, x, sizes, gguf.MODEL_ARCH.LLAMA) for n, x in values_of(folder).items())
        kinds = [("f32", Q.F32), ("f16", Q.F16), ("bf16", Q.BF16), ("q8_0", Q.Q8_0)]
        for text, kind in kinds if name in llama_models.cases else kinds[:1]:
            path = os.path.join(scratch, f"{name}.{text}.gguf")
            run(program, "--run", folder, "--sample", 0, "--dtype", "fp32", "--gguf", path, "--gguf-type", text)
            reader = gguf.GGUFReader(path)
            same_values(f"{name}, {text}", reader, want, kind)
            check(f"{name}, {text}: metadata", field(reader, "general.architecture") == "llama"
                  and field(reader, "llama.block_count") == 3 and field(reader, "llama.embedding_length") == 64
                  and field(reader, "llama.attention.head_count_kv") == c["num_key_value_heads"]
                  and field(reader, "tokenizer.ggml.model") == "gpt2" and len(field(reader, "tokenizer.ggml.tokens")) == c["vocab_size"])
            files.append((f"{name}, {text}", path, folder))
    return files


def logits(folder, ids, *more):
    done = run(program, "--logits", folder, len(ids), *ids, *more)
    return np.array([float(x) for x in done.stdout.split()[1:]]).reshape(len(ids), -1)


def greedy(folder, ids, n, *more):
    """The likeliest tokens after ids, each computed from the whole sequence."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(logits(folder, ids, *more)[-1].argmax()))
    return ids


def run_by_llama_cpp(files, ids):
    for name, path, folder in files:
        model = llama_cpp.Llama(path, **SETTINGS)
        model.eval(ids)
        their = np.array(model.scores[:len(ids)], np.float64)
        mine = logits(folder, ids) if "f32" in name else None
        if mine is not None:
            off = np.abs(their - mine).max() / np.abs(mine).max()
            check(f"llama.cpp, {name}: logits {off:.1e} off", off < 2e-5)
            check(f"llama.cpp, {name}: the same 12 likeliest tokens", greedy_cpp(model, ids, 12) == greedy(folder, ids, 12))
        else:
            check(f"llama.cpp, {name}: it runs", np.isfinite(their).all() and their.std() > 0)
        model.close()


def greedy_cpp(model, ids, n):
    ids = list(ids)
    for _ in range(n):
        model.reset()
        model.eval(ids)
        ids.append(int(np.array(model.scores[len(ids) - 1]).argmax()))
    return ids


def tokens_by_llama_cpp(path, tokenizer):
    from tokenizers import Tokenizer
    t = Tokenizer.from_file(tokenizer)
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    for text in TEXTS:
        check(f"llama.cpp cuts {text!r} as tokenizers does",
              model.tokenize(text.encode(), add_bos=False, special=True) == t.encode(text, add_special_tokens=False).ids)
    model.close()


def pieces(scratch):
    """TinyLlama's kind of tokenizer."""
    tokenizer, folder = os.path.join(scratch, "pieces.json"), os.path.join(scratch, "pieces")
    path = os.path.join(scratch, "pieces.gguf")
    llama_models.pieces_tokenizer(tokenizer, os.path.join(root, "README.md"))
    llama_models.make(folder, tokenizer, bos_token_id=1, eos_token_id=2)
    run(program, "--run", folder, "--sample", 0, "--dtype", "fp32", "--gguf", path, "--gguf-type", "f32")
    reader = gguf.GGUFReader(path)
    kinds = field(reader, "tokenizer.ggml.token_type")
    check("pieces: types of unknown, special, byte and other tokens", kinds[:4] == [2, 3, 3, 6] and kinds[258:260] == [6, 1])
    check("pieces: bos, eos, and that a text begins with it", field(reader, "tokenizer.ggml.bos_token_id") == 1
          and field(reader, "tokenizer.ggml.eos_token_id") == 2 and field(reader, "tokenizer.ggml.add_bos_token"))
    if llama_cpp:
        run_by_llama_cpp([("pieces, f32", path, folder)], list(range(3, 23)))
        tokens_by_llama_cpp(path, tokenizer)


def read_back(scratch, tokenizer):
    """Files of the package and our own, read by llama.c: the logits of the folder's model, bit for bit."""
    ids = list(range(3, 33))
    for name in ("tied", "own head"):
        folder = os.path.join(scratch, name)
        want = logits(folder, ids)
        for text, kind in ("f32", Q.F32), ("f16", Q.F16), ("bf16", Q.BF16), ("q5_0", Q.Q5_0):
            c = json.load(open(os.path.join(folder, "config.json")))
            path = os.path.join(scratch, f"by_package.{text}.gguf")
            w = gguf.GGUFWriter(path, "llama")
            w.add_block_count(3)
            w.add_context_length(64)
            w.add_embedding_length(64)
            w.add_feed_forward_length(160)
            w.add_head_count(4)
            w.add_head_count_kv(c["num_key_value_heads"])
            w.add_layer_norm_rms_eps(1e-5)
            w.add_rope_freq_base(c.get("rope_theta", 10000.0))
            w.add_array("a.list.of.texts", ["one", "two", ""])
            w.add_array("a.list.of.numbers", [1.5, 2.5])
            sizes = dict(layers=3, heads=4, kv_heads=c["num_key_value_heads"])
            for n, x in values_of(folder).items():
                key, x = renamed(n, x, sizes, gguf.MODEL_ARCH.LLAMA)
                k = kind if x.ndim > 1 else Q.F32
                w.add_tensor(key, gguf.quantize(x, k), raw_dtype=k)
            w.write_header_to_file()
            w.write_kv_data_to_file()
            w.write_tensors_to_file()
            w.close()
            if kind == Q.Q5_0:
                got = run(program, "--run", path, "--tokenizer", tokenizer, "--sample", 0)
                check(f"Q5_0 is refused by its name, {name}", got.returncode == 1 and "Q5_0" in got.stderr)
                continue
            ours = os.path.join(scratch, f"{name}.{text}.gguf")
            exact = name == "tied" and text == "bf16" or text == "f32"      # the model's own dtype, or wider
            for whose, file in ("the package", path), ("ours", ours):
                got = logits(file, ids, "--tokenizer", tokenizer)
                off = np.abs(got - want).max() / np.abs(want).max() if got.shape == want.shape else np.inf
                check(f"read back, {name}, {text}, {whose}: {off:.1e} off", off == 0 if exact else off < 0.1)
    want = logits(os.path.join(scratch, "tied"), ids)
    got = logits(os.path.join(scratch, "tied.q8_0.gguf"), ids, "--tokenizer", tokenizer)
    off = np.abs(got - want).max() / np.abs(want).max() if got.shape == want.shape else np.inf
    check(f"our Q8_0 is read back: {off:.1e} off", 0 < off < 0.1)


def gpt2_files(scratch, tokenizer):
    """The trainer's GPT-2: --export FILE.gguf beside --export of a folder, and --init of the GGUF file."""
    text = os.path.join(root, "README.md")
    common = [trainer, "--data", text, "--tokenizer", tokenizer, "--layers", 2, "--heads", 2, "--width", 32, "--block", 32, "--bias",
              "on", "--activation", "gelu-tanh", "--batch", 2, "--device", "cpu", "--threads", 1, "--quiet", "--eval-batches", 1]
    folder = os.path.join(scratch, "gpt2")
    run(*common, "--steps", 10, "--lr", "1e-2", "--export", folder)
    c = dict(layers=2, heads=2, kv_heads=2)
    want = dict(renamed(n, x, c, gguf.MODEL_ARCH.GPT2) for n, x in values_of(folder).items())
    for kind_text, kind in ("f32", Q.F32), ("f16", Q.F16), ("bf16", Q.BF16), ("q8_0", Q.Q8_0):
        path = os.path.join(scratch, f"gpt2.{kind_text}.gguf")
        run(*common, "--steps", 10, "--lr", "1e-2", "--export", path, "--export-type", kind_text)
        reader = gguf.GGUFReader(path)
        same_values(f"gpt2, {kind_text}", reader, want, kind)
        check(f"gpt2, {kind_text}: metadata", field(reader, "general.architecture") == "gpt2" and field(reader, "gpt2.block_count") == 2
              and field(reader, "gpt2.attention.head_count") == 2 and field(reader, "tokenizer.ggml.pre") == "gpt-2")
    return os.path.join(scratch, "gpt2.f32.gguf"), folder, common


def gpt2_by_llama_cpp(path, folder):
    """The likeliest tokens, as interop_gpt2.py's program prints their logits."""
    gpt2 = os.path.join(os.path.dirname(program), "test_gpt2")
    ids = list(range(5, 25))
    done = run(gpt2, "--logits", folder, *ids)
    mine = np.array([float(x) for x in done.stdout.split()]).reshape(len(ids), -1)
    model = llama_cpp.Llama(path, **SETTINGS)
    model.eval(ids)
    their = np.array(model.scores[:len(ids)], np.float64)
    off = np.abs(their - mine).max() / np.abs(mine).max()
    check(f"llama.cpp, gpt2: logits {off:.1e} off", off < 2e-5)
    check("llama.cpp, gpt2: the same likeliest tokens", (their.argmax(1) == mine.argmax(1)).all())
    model.close()


def main():
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = tokens_file
        try:
            tokenizer = os.path.join(scratch, "tokenizer.json")
            llama_models.smollm_tokenizer(tokenizer, os.path.join(root, "README.md"))
        except ImportError as error:
            tokenizer = tokens_file
            skip(f"a tokenizer of SmolLM's kind: {error}")
        files = llama_files(scratch, tokenizer)
        read_back(scratch, tokenizer)
        try:
            pieces(scratch)
        except ImportError as error:
            skip(f"pieces: {error}")
        path, folder, _ = gpt2_files(scratch, tokens_file)
        if llama_cpp:
            run_by_llama_cpp(files, list(range(3, 23)))
            tokens_by_llama_cpp(files[0][1], tokenizer)
            gpt2_by_llama_cpp(path, folder)
            tokens_by_llama_cpp(path, tokens_file)
        else:
            skip("llama.cpp: llama_cpp is absent")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


sys.exit(main())
