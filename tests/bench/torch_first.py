"""PyTorch's GPT-2 124M step and attention on a GPU, in a minute: the peer of bench_cuda --part first.

    python3 torch_first.py [--batch N] [--wait FILE] [--device cpu --tiny] KIND...

KIND is attention, or a dtype (bf16, fp16, fp32) and how: bf16-eager, bf16-compiled. Models are compiled at once; with
--wait nothing is measured before FILE exists, so that other programs may end meanwhile. A step that does not fit
is measured with half the batch.
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import os
import time
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
import torch_cuda
import torch_gpt

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def wait_for(path):
    began = time.time()
    while path and not os.path.exists(path) and time.time() - began < 240:
        time.sleep(0.1)


def synchronise(a):
    if a.device == "cuda":
        torch.cuda.synchronize()


def attention(a, clock):
    heads, length, d = (1, 17, 32) if a.tiny else (12, 1024, 64)
    q, k, v = (torch.randn(a.batch, heads, length, d, device=a.device, dtype=torch.bfloat16).requires_grad_()
               for _ in range(3))
    flops = 2.0 * a.batch * heads * length * length * d     # causal
    call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                y = call()
                back = torch_cuda.backward_of(y, torch.randn_like(y), q, k, v)
                there, again = clock.turns(call, back)
            rate, back_rate = flops / there[0] / 1e9, 2.5 * flops / again[0] / 1e9
            print(f"torch attention {backend.name.lower()}: forward {there[0]:.3f} ms {rate:.0f} TFLOP/s, "
                  f"backward {again[0]:.3f} ms {back_rate:.0f} TFLOP/s", flush=True)
        except Exception as e:      # not built, or not for these sizes
            print(f"torch attention {backend.name.lower()}: {type(e).__name__} {str(e).splitlines()[:1]}", flush=True)


def step_of(a, kind, batch):
    name, how = kind.split("-")
    vocab, length = (72, 17) if a.tiny else (50304, 1024)
    sizes = (1, 1, 32) if a.tiny else (12, 12, 768)
    torch.manual_seed(1)
    torch_gpt.MODELS["first"] = (*sizes[:3], length, vocab, True, batch, length, "tanh")
    model = torch_gpt.GPT("first").to(a.device)
    opt = torch_gpt.make_optimizer(model, lr=3e-4, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(a.device, enabled=name == "fp16")
    run = torch.compile(model) if how == "compiled" else model
    ids = torch.randint(vocab, (batch, length), device=a.device)
    targets = (ids * 31 + 7) % vocab
    step = lambda: torch_gpt.train_step(run, opt, scaler, DTYPES[name], ids, targets, a.device)
    return step, batch * length


def warm_step(a, kind):
    """(step, tokens, batch, first loss) of the largest batch that fits: a.batch, or its half or quarter."""
    for batch in (a.batch, max(1, a.batch // 2), max(1, a.batch // 4)):
        try:
            began = time.time()
            step, tokens = step_of(a, kind, batch)
            first = float(step())
            step()
            synchronise(a)
            print(f"# {kind}: warm after {time.time() - began:.0f} s", flush=True)
            return step, tokens, batch, first
        except torch.OutOfMemoryError:
            print(f"# {kind}: out of memory at batch {batch}", flush=True)
            step = None
            torch.cuda.empty_cache()
    raise MemoryError("no batch fits")


def training(a, clock, kind):
    step, tokens, batch, first = warm_step(a, kind)
    wait_for(a.wait)
    (t,) = clock.turns(step)
    memory = torch.cuda.max_memory_allocated() / 1e9 if a.device == "cuda" else 0
    print(f"torch GPT-2 {kind:<13} batch {batch} {t[0]:8.2f} ms [{t[1]:.2f} {t[2]:.2f}], "
          f"{tokens / t[0] * 1e3:.0f} tokens/s, {memory:.1f} GB, loss {first:.3f} -> {float(step()):.3f}", flush=True)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--batch", type=int, default=64)
    args.add_argument("--wait", default="")
    args.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args.add_argument("--tiny", action="store_true")
    args.add_argument("kinds", nargs="+")
    a = args.parse_args()
    a.rounds = 1 if a.tiny else 3
    a.batch = 1 if a.tiny else a.batch
    clock = torch_cuda.Clock(a)
    name = torch.cuda.get_device_name() if a.device == "cuda" else "the CPU: times mean nothing"
    print(f"# torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {name}", flush=True)
    for kind in a.kinds:
        try:
            if kind == "attention":
                wait_for(a.wait)
                attention(a, clock)
            else:
                training(a, clock, kind)
        except Exception as e:      # no memory, no compiler: the rest is measured
            print(f"torch {kind} was not measured: {type(e).__name__} {str(e).splitlines()[:1]}", flush=True)
        if a.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
