"""Trains nanoGPT's CPU configuration with PyTorch: the reference for validation loss.

    python3 torch_quality.py TEXT [--dtype f32|f16|bf16] [--steps 2000] [--seed N]
                                  [--eval-every 250] [--eval-batches 20]

As `train.py config/train_shakespeare_char.py` with --eval_iters=20 --block_size=64
--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000
--dropout=0.0: the first 90 % of the characters train, the rest validate.
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import math
import os
import torch
from torch_gpt import DTYPES, GPT, MODELS, make_optimizer, train_step

WARMUP, LR, MIN_LR = 100, 1e-3, 1e-4


def learning_rate(step, steps):
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    share = (step - WARMUP) / (steps - WARMUP)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * share)) * (LR - MIN_LR)


def batch(data, g):
    size, tokens = MODELS["char"][6], MODELS["char"][7]
    at = torch.randint(len(data) - tokens, (size,), generator=g)
    text = torch.stack([data[i:i + tokens + 1] for i in at])
    return text[:, :-1], text[:, 1:]


@torch.no_grad()
def evaluate(model, data, dtype, g, batches):
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        return sum(float(model(*batch(data, g))) for _ in range(batches)) / batches


def main():
    args = argparse.ArgumentParser()
    args.add_argument("text")
    args.add_argument("--dtype", default="f32", choices=DTYPES)
    args.add_argument("--threads", type=int, default=os.cpu_count())
    args.add_argument("--steps", type=int, default=2000)
    args.add_argument("--seed", type=int, default=1337)
    args.add_argument("--eval-every", type=int, default=250)
    args.add_argument("--eval-batches", type=int, default=20)
    a = args.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    with open(a.text, encoding="utf-8") as f:
        text = f.read()
    code = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([code[c] for c in text])
    train, val = data[:len(data) * 9 // 10], data[len(data) * 9 // 10:]
    g = torch.Generator().manual_seed(a.seed)
    model, dtype, best = GPT("char"), DTYPES[a.dtype], math.inf
    opt = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for step in range(a.steps + 1):
        if step % a.eval_every == 0:
            loss = evaluate(model, val, dtype, g, a.eval_batches)
            best = min(best, loss)
            print(f"step {step}: train {evaluate(model, train, dtype, g, a.eval_batches):.4f}, "
                  f"val {loss:.4f}", flush=True)
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, a.steps)
        train_step(model, opt, scaler, dtype, *batch(train, g))
    print(f"best val {best:.4f}")


if __name__ == "__main__":
    main()
