#!/usr/bin/env python3
"""small.py - the training step of a small network: mixprec and PyTorch turn by turn in one process.

    make bench-small        or: python3 tests/bench/small.py build/bench/libsmall.so [ROUNDS]

Three linear layers of 64 with biases, batch 64, AdamW: 1.8 MFLOP a step. PyTorch runs eager with fused AdamW, in fp32
and in fp16 under autocast with GradScaler. One thread, and its CPU time: other programs of a busy machine do not
count. Each turn trains new networks, for 300 and for 30 steps: from about 800 steps on, the first moments of dead
units are subnormal, and an Intel processor updates subnormals slowly, in either library. Prints the medians of ROUNDS
turns, and the median, lowest and highest of the ratios of each turn.
"""
import ctypes
import statistics
import sys
import time

import torch

lib = ctypes.CDLL(sys.argv[1])
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 31
lib.small_new.restype = ctypes.c_void_p
lib.small_steps.restype = ctypes.c_double
lib.small_steps.argtypes = [ctypes.c_void_p, ctypes.c_int]
lib.small_free.argtypes = [ctypes.c_void_p]
torch.set_num_threads(1)


class Torch:
    def __init__(self, f16):
        layers = [torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(),
                  torch.nn.Linear(64, 4)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", enabled=f16)
        self.f16 = f16
        self.x, self.y = torch.randn(64, 8), torch.randn(64, 4)

    def step(self):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=self.f16):
            loss = torch.nn.functional.mse_loss(self.model(self.x), self.y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def steps(self, count):
        start = time.thread_time()
        for _ in range(count):
            self.step()
        return (time.thread_time() - start) / count


def turn(f16):
    ours, theirs = lib.small_new(f16, 1), Torch(bool(f16))
    theirs.steps(20)
    lib.small_steps(ours, 200)
    pair = lib.small_steps(ours, 100), theirs.steps(10)
    if lib.small_free(ours):
        sys.exit("small.py: mixprec's context has an error")
    return pair


def turns(f16):
    pairs = [turn(f16) for _ in range(rounds)]
    ratios = sorted(b / a for a, b in pairs)
    print("%s  mixprec %.3f ms, PyTorch %s %.3f ms, times faster: median %.1f, from %.1f to %.1f"
          % ("fp16" if f16 else "fp32", 1e3 * statistics.median(p[0] for p in pairs), torch.__version__,
             1e3 * statistics.median(p[1] for p in pairs), statistics.median(ratios), ratios[0], ratios[-1]))


for f16 in (0, 1):
    turns(f16)
