"""PyTorch's time for the optimizer part of a mixed-precision step on the CPU.

    python3 torch_optimizer.py [--millions N] [--tensors N] [--threads N] [--steps N]

With f32 weights and gradients: GradScaler.unscale_, clip_grad_norm_, AdamW fused, then the
f16 copies that autocast makes of every weight in the next step. `lean` leaves unscaling to
the fused step and does not clip.
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import os
import statistics
import time
import torch


def step(params, opt, scaler, lean):
    if not lean:
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    scaler.step(opt)
    scaler.update()
    return [p.detach().to(torch.float16) for p in params]


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--millions", type=float, default=64.0)
    args.add_argument("--tensors", type=int, default=64)
    args.add_argument("--threads", type=int, default=os.cpu_count())
    args.add_argument("--steps", type=int, default=10)
    a = args.parse_args()
    torch.set_num_threads(a.threads)
    count = int(a.millions * 1e6 / a.tensors)
    params = [torch.randn(count).requires_grad_() for _ in range(a.tensors)]
    for lean in (False, True):
        opt = torch.optim.AdamW(params, lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(1))
        times = []
        for i in range(a.steps + 2):
            for p in params:
                p.grad = torch.randn(count) if p.grad is None else p.grad.mul_(65536.0)
            start = time.perf_counter()
            step(params, opt, scaler, lean)
            if i >= 2:
                times.append(1e3 * (time.perf_counter() - start))
        print(f"torch {torch.__version__} {a.millions:g} M parameters in {a.tensors} tensors, "
              f"{a.threads} threads, {'lean' if lean else 'unscale + clip'}: "
              f"{statistics.median(times):.1f} ms [{min(times):.1f} {max(times):.1f}]")


if __name__ == "__main__":
    main()
