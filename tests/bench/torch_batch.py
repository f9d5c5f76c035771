#!/usr/bin/env python3
"""torch_batch.py - the GPT of `show.sh batch` in PyTorch: the trainer's weights, its batches, its schedule.

    python3 tests/bench/torch_batch.py TRAINER TEXT WAY [SEED]

WAY: fp32, bf16, fp16 (a constant scale of 1/683, as in a loss averaged over 524,288 tokens) or scaler
(GradScaler from 65,536/683). Prints the loss on the validation batches of the trainer.
SPDX-License-Identifier: MIT OR Unlicense"""
import json
import os
import subprocess
import sys
import tempfile

import torch
from torch_gpt import DTYPES, GPT, make_optimizer, train_step
from torch_quality import learning_rate

STEPS, SCHEDULE, BATCH, BLOCK, VALIDATIONS, U64 = 300, 2000, 12, 64, 40, (1 << 64) - 1
TRAIN, VAL = (1 << 62) + 1, (1 << 62) + 2
WAYS = {"fp32": ("f32", None), "bf16": ("bf16", None), "fp16": ("f16", (1 / 683, 1 << 30)),
        "scaler": ("f16", (65536 / 683, 2000))}


def random_u32(seed, step, tensor, element):
    """mixp_random_u32."""
    z = (seed + 0x9E3779B97F4A7C15 * (step + 1)) & U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 + tensor * 0xD1342543DE82EF95) & U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & U64
    z = (z + element * 0x9E3779B97F4A7C15) & U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & U64
    return (z ^ (z >> 31)) >> 32


def batch(tokens, seed, stream, step):
    starts = [random_u32(seed, step, stream, row) * (len(tokens) - BLOCK) >> 32 for row in range(BATCH)]
    rows = torch.stack([tokens[at:at + BLOCK + 1] for at in starts])
    return rows[:, :-1], rows[:, 1:]


def first_weights(program, text, seed):
    """The weights of a run that has not learned: one step with a learning rate of 0."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([program, "--preset", "char-cpu", "--data", text, "--seed", str(seed), "--steps", "1", "--lr", "0",
                        "--min-lr", "0", "--dtype", "fp32", "--eval-batches", "1", "--sample", "0", "--out", folder],
                       check=True, stdout=subprocess.DEVNULL)
        with open(os.path.join(folder, "checkpoint.safetensors"), "rb") as f:
            data = f.read()
    size = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:8 + size]).items():
        if name.startswith("transformer."):
            begin, end = (8 + size + at for at in entry["data_offsets"])
            found[name] = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32).reshape(entry["shape"])
    return found


def parameters(model):
    """The trainer's name of each parameter."""
    yield "transformer.wte.weight", model.wte.weight
    yield "transformer.wpe.weight", model.wpe.weight
    yield "transformer.ln_f.weight", model.ln_f.weight
    for i, block in enumerate(model.blocks):
        for name, layer in (("ln_1", block.ln_1), ("ln_2", block.ln_2), ("attn.c_attn", block.qkv),
                            ("attn.c_proj", block.proj), ("mlp.c_fc", block.up), ("mlp.c_proj", block.down)):
            yield f"transformer.h.{i}.{name}.weight", layer.weight


def load(model, weights):
    with torch.no_grad():
        model.wte = torch.nn.Embedding(*weights["transformer.wte.weight"].shape)
        for name, p in parameters(model):
            p.copy_(weights.pop(name))
    assert not weights, weights.keys()


@torch.no_grad()
def validate(model, dtype, tokens, seed):
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return sum(float(model(*batch(tokens, seed, VAL, i))) for i in range(VALIDATIONS)) / VALIDATIONS


def main():
    program, text, way = sys.argv[1:4]
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else 1337
    torch.set_num_threads(1)
    with open(text, "rb") as f:
        bytes_ = f.read()
    code = {c: i for i, c in enumerate(sorted(set(bytes_)))}
    tokens = torch.tensor([code[c] for c in bytes_])
    train = len(tokens) // 10 * 9 + len(tokens) % 10 * 9 // 10
    model, (name, scale) = GPT("char"), WAYS[way]
    load(model, first_weights(program, text, seed))
    opt, dtype = make_optimizer(model), DTYPES[name]
    first, interval = scale or (1.0, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=interval, enabled=scale is not None)
    for step in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, SCHEDULE)
        train_step(model, opt, scaler, dtype, *batch(tokens[:train], seed, TRAIN, step))
    val = validate(model, dtype, tokens[train:], seed)
    print(f"batch torch-{way} seed {seed}: best val {val:.4f} at step {STEPS}, after {STEPS} steps; PyTorch "
          f"{torch.__version__}")


if __name__ == "__main__":
    main()
