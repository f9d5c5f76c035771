"""Sums of f32 by PyTorch's gloo, in the sizes of ranks_gloo.sh, which starts this file once for each rank.

SPDX-License-Identifier: MIT OR Unlicense
"""
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
n = 256
while n <= 1 << 24:
    took = []
    x = torch.empty(n)
    for turn in range(-2, 60 if n < 1 << 20 else 15 if n < 1 << 22 else 5):
        x.fill_(1)
        began = time.perf_counter()
        dist.all_reduce(x)
        assert x[-1] == dist.get_world_size()
        if turn >= 0:
            took.append(1e6 * (time.perf_counter() - began))
    if dist.get_rank() == 0:
        print(f"gloo {n} {min(took):.1f}", flush=True)
    n *= 16
dist.destroy_process_group()
