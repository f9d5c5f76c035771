"""Random Llama-like models as Hugging Face's files, for the scripts that compare examples/llama.c with other libraries.
SPDX-License-Identifier: MIT OR Unlicense

Needs numpy and safetensors only. `cases` are three small configurations: a tied head with grouped heads and bf16
weights; an own head with biases in f32, in shards; multi-query heads wider than width / heads with a scaling of
rotary positions in f16.

  llama_models.py smollm2|tinyllama FOLDER TEXT     a model of that shape, in bf16, with a tokenizer learnt from TEXT
                                                    (needs tokenizers)
"""
import json
import os
import shutil
import sys

import numpy as np
import safetensors.numpy

COMMON = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=448, hidden_size=64, intermediate_size=160,
              num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64, rms_norm_eps=1e-5, hidden_act="silu",
              bos_token_id=0, eos_token_id=0)
cases = {
    "tied": dict(dtype="bf16", tie_word_embeddings=True, num_key_value_heads=2, rope_theta=50000.0),
    "own head": dict(dtype="f32", tie_word_embeddings=False, num_key_value_heads=4, attention_bias=True, mlp_bias=True,
                     shards=3),
    "llama3": dict(dtype="f16", tie_word_embeddings=False, num_key_value_heads=1, head_dim=24,
                   rope_scaling=dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                     original_max_position_embeddings=32)),
}
# The other scalings, and the names that older and newer files have.
ropes = {
    "linear": dict(rope_scaling=dict(type="linear", factor=3.0)),
    "dynamic": dict(max_position_embeddings=16, rope_scaling=dict(rope_type="dynamic", factor=2.0)),
    "yarn": dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    "yarn with factors": dict(rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16,
                                                   rope_theta=20000.0, beta_fast=16.0, beta_slow=2.0, mscale=0.7,
                                                   mscale_all_dim=0.4)),
    "yarn, not truncated": dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16,
                                                  attention_factor=1.2, truncate=False)),
}

# Shapes of models that people fine-tune, with the standard deviation of their first weights.
released = {
    "smollm2": dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                    num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000.0, tie_word_embeddings=True,
                    dtype="bf16", std=0.041),
    "tinyllama": dict(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                      num_key_value_heads=4, max_position_embeddings=2048, rope_theta=10000.0, tie_word_embeddings=False,
                      dtype="bf16", std=0.02),
}


def shapes(c):
    """The names and shapes of the tensors of a config."""
    w, inner, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    d = c.get("head_dim") or w // heads
    q, kv = heads * d, c["num_key_value_heads"] * d
    yield "model.embed_tokens.weight", (c["vocab_size"], w)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (w,)
        yield p + "post_attention_layernorm.weight", (w,)
        for name, rows, cols, bias in (("self_attn.q_proj", q, w, "attention"), ("self_attn.k_proj", kv, w, "attention"),
                                       ("self_attn.v_proj", kv, w, "attention"), ("self_attn.o_proj", w, q, "attention"),
                                       ("mlp.gate_proj", inner, w, "mlp"), ("mlp.up_proj", inner, w, "mlp"),
                                       ("mlp.down_proj", w, inner, "mlp")):
            yield p + name + ".weight", (rows, cols)
            if c.get(bias + "_bias"):
                yield p + name + ".bias", (rows,)
    yield "model.norm.weight", (w,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], w)


def low(x, dtype):
    """x in a dtype, as numpy holds it: bf16 as the upper halves of f32."""
    if dtype == "f16":
        return x.astype(np.float16)
    return (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else x


def write_safetensors(path, tensors, dtype):
    """bf16 is unknown to numpy: the header is written here."""
    if dtype != "bf16":
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
        return
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, x in tensors.items():
        header[name] = dict(dtype="BF16", shape=list(x.shape), data_offsets=[at, at + x.nbytes])
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            f.write(x.tobytes())


def make(folder, tokenizer, seed=1, **settings):
    """Writes a model; tokenizer: the path of its tokenizer.json. Returns its config."""
    rng = np.random.default_rng(seed)
    c = {**COMMON, "num_key_value_heads": 2, "tie_word_embeddings": True, **settings}
    dtype, shards, std = c.pop("dtype", "f32"), c.pop("shards", 1), c.pop("std", 0.15)
    os.makedirs(folder, exist_ok=True)
    tensors = {}
    for name, shape in shapes(c):
        x = rng.standard_normal(shape, np.float32) * np.float32(std if len(shape) > 1 else 0.1 if std > 0.1 else 0)
        tensors[name] = low(x + 1 if "norm" in name else x, dtype)
    c["torch_dtype"] = dict(f32="float32", f16="float16", bf16="bfloat16")[dtype]
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(c, f, indent=2)
    names = list(tensors)
    files = ["model.safetensors"] if shards == 1 else [f"model-{k + 1:05}-of-{shards:05}.safetensors" for k in range(shards)]
    for k, file in enumerate(files):
        write_safetensors(os.path.join(folder, file), {n: tensors[n] for n in names[k::shards]}, dtype)
    if shards > 1:
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
            json.dump(dict(metadata={}, weight_map={n: files[i % shards] for i, n in enumerate(names)}), f)
    shutil.copy(tokenizer, os.path.join(folder, "tokenizer.json"))
    return c


def smollm_tokenizer(path, source, tokens=440):
    """A small tokenizer.json that cuts texts as SmolLM's does, with the tokens of its chats. Needs tokenizers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    t.train([source], trainers.BpeTrainer(vocab_size=tokens, show_progress=False,
                                          special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.save(path)
    return t


def pieces_tokenizer(path, source):
    """A small tokenizer.json of Llama 2's and TinyLlama's kind: pieces, and bytes for other characters. As in files made
    of SentencePiece's models, each pair of pieces that makes a piece is a merge, in the order of what they make."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    learnt = Tokenizer(models.BPE())
    learnt.normalizer = normalizers.Replace(" ", "▁")
    learnt.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    learnt.train([source], trainers.BpeTrainer(vocab_size=180, show_progress=False))
    order = sorted(learnt.get_vocab(), key=learnt.get_vocab().get)
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + order
    ids = {name: i for i, name in enumerate(names)}
    merges = [(name[:k], name[k:]) for name in order for k in range(1, len(name)) if name[:k] in ids and name[k:] in ids]
    t = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    t.save(path)
    return t


if __name__ == "__main__":
    shape, folder, text = sys.argv[1:]
    os.makedirs(folder, exist_ok=True)
    smollm_tokenizer(os.path.join(folder, "learnt.json"), text, 8192)
    make(folder, os.path.join(folder, "learnt.json"), **released[shape])
    os.remove(os.path.join(folder, "learnt.json"))
