#!/usr/bin/env python3
"""proof_torch.py - the models of examples/proof.c in PyTorch: the same weights, the same batches.

    python3 tests/bench/proof_torch.py MODEL WAY [SEED] [LOG]

WAY: fp32, bf16, fp16 (autocast without a scaler) or scaler (autocast and GradScaler). Rows of LOG as proof.c's.
"""
import sys

import torch
import torch.nn.functional as F

BATCH, STEPS, LAST = 64, 600, 50
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "scaler": torch.float16}


class Model:
    """The generator of proof.c, in steps of f32 arithmetic, and a model's parameters."""

    def __init__(self, seed):
        self.random = seed
        self.w = []

    def uniform(self, n=1):
        out = []
        for _ in range(n):
            self.random = (self.random * 1664525 + 1013904223) & 0xFFFFFFFF
            out.append(self.random >> 8)
        return torch.tensor(out, dtype=torch.float32) / 16777216.0

    def weight(self, rows, cols, bound):
        values = bound * (2.0 * self.uniform(rows * cols) - 1.0)
        self.w.append(torch.nn.Parameter(values.reshape(rows, cols)))


class Atmosphere(Model):
    def __init__(self, seed):
        super().__init__(seed)
        self.weight(64, 16, 0.6)
        self.weight(64, 64, 0.3)
        self.weight(4, 64, 0.2)

    def next(self):
        u = self.uniform(BATCH * 18).reshape(BATCH, 18)
        weather, label = 6000.0 * (u[:, :1] - 0.5), (4.0 * u[:, 1]).long()
        source = 30000.0 * (torch.arange(16) % 4 == label[:, None])
        return 101325.0 + weather + 60000.0 * (u[:, 2:] - 0.5) + source, label

    def loss(self, x, label):
        h = F.layer_norm(F.linear(x, self.w[0]), (64,))
        h = F.relu(F.linear(h, self.w[1]))
        return F.cross_entropy(F.linear(h, self.w[2]), label)


class Gemma(Model):
    def __init__(self, seed):
        super().__init__(seed)
        self.weight(64, 32, 70.0)
        self.weight(64, 32, 70.0)
        self.weight(32, 64, 0.17)
        self.weight(4, 32, 0.35)

    def next(self):
        u = self.uniform(BATCH * 33).reshape(BATCH, 33)
        label = (4.0 * u[:, 0]).long()
        return 2.0 * u[:, 1:] - 1.0 + 0.7 * (torch.arange(32) % 4 == label[:, None]), label

    def loss(self, x, label):
        y = F.silu(F.linear(x, self.w[0])) * F.linear(x, self.w[1])
        y = F.rms_norm(F.linear(y, self.w[2]), (32,), eps=1e-6)
        return F.cross_entropy(F.linear(y, self.w[3]), label)


class Year(Model):
    def __init__(self, seed):
        super().__init__(seed)
        u = self.uniform(128).reshape(64, 2)
        self.hinge = torch.where(u[:, 0] < 0.5, -8.0, 8.0)
        self.offset = -self.hinge * (2023.0 + u[:, 1])
        self.weight(64, 64, 0.2)
        self.weight(1, 64, 0.2)

    def next(self):
        part = self.uniform(BATCH)
        wave = torch.where(part < 0.5, 4.0 * part - 1.0, 3.0 - 4.0 * part)
        return (2023.0 + part)[:, None], wave[:, None]

    def loss(self, x, y):
        h = F.relu(F.linear(x, self.hinge[:, None]) + self.offset)
        h = F.relu(F.linear(h, self.w[0]))
        return F.mse_loss(F.linear(h, self.w[1]), y)


MODELS = {"atmosphere": Atmosphere, "gemma": Gemma, "year": Year}


def main(name, way, seed=1, log=None):
    torch.set_num_threads(1)
    model = MODELS[name](int(seed))
    optimizer = torch.optim.AdamW(model.w, lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=way == "scaler")
    out = open(log, "w") if log else None
    last, skipped = 0.0, 0
    for step in range(1, STEPS + 1):
        x, y = model.next()
        optimizer.zero_grad()
        with torch.autocast("cpu", DTYPES[way], enabled=way != "fp32"):
            loss = model.loss(x, y)
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        if out:
            out.write("%d %.9g\n" % (step, loss.item()))
        if step > STEPS - LAST:
            last += loss.item() / LAST
    print("%s torch-%s seed %s: loss %.4f, skipped %d" % (name, way, seed, last, skipped))


if len(sys.argv) < 3 or sys.argv[1] not in MODELS or sys.argv[2] not in DTYPES:
    sys.exit("usage: proof_torch.py atmosphere|gemma|year fp32|bf16|fp16|scaler [SEED] [LOG]")
main(*sys.argv[1:5])
