"""PyTorch's GPT-2 124M step and attention on a GPU, in a minute: the peer of bench_cuda --part first.

    python3 torch_first.py [--batch N] [--wait FILE] [--turns FOLDER] [--device cpu --tiny] KIND...

KIND is attention, or a dtype (bf16, fp16, fp32) and how: eager, compiled, autotuned (max-autotune-no-cudagraphs), cudnn
or flash (compiled, with that attention only), low (compiled; residual stream and norms in bf16, which mixprec's level 2
stores so, too). Models are compiled at once; with --wait nothing is measured before FILE exists, so that other programs
may end meanwhile. A step that does not fit is measured with half the batch.

With --turns another program alternates: FOLDER/ready says that all models are compiled; each FOLDER/torch_N asks for
five steps of every kind, and FOLDER/done_N says that they have run. FOLDER/end ends: then the medians are printed.
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import contextlib
import os
import statistics
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
import torch_cuda
import torch_gpt

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODES = {"autotuned": "max-autotune-no-cudagraphs"}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


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


class LowNorm(nn.LayerNorm):
    """Outside of autocast: the result has the dtype of x. Gain and shift stay fp32."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class LowGPT(torch_gpt.GPT):
    """Norms and the residual stream in bf16."""

    def __init__(self, model):
        super().__init__(model)
        for m in self.modules():
            if type(m) is nn.LayerNorm:
                m.__class__ = LowNorm

    def forward(self, ids, targets):
        x = (self.wte(ids) + self.wpe.weight[:ids.shape[1]]).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step_of(a, kind, batch):
    name, how = kind.split("-")
    vocab, length = (72, 17) if a.tiny else (50304, 1024)
    sizes = (1, 1, 32) if a.tiny else (12, 12, 768)
    torch.manual_seed(1)
    torch_gpt.MODELS["first"] = (*sizes[:3], length, vocab, True, batch, length, "tanh")
    model = (LowGPT if how == "low" else torch_gpt.GPT)("first").to(a.device)
    opt = torch_gpt.make_optimizer(model, lr=3e-4, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(a.device, enabled=name == "fp16")
    run = model if how == "eager" or a.tiny else torch.compile(model, mode=MODES.get(how))

    def step():     # a fresh batch for each step, as bench_cuda draws
        ids = torch.randint(vocab, (batch, length), device=a.device)
        with sdpa_kernel(BACKENDS[how]) if how in BACKENDS else contextlib.nullcontext():
            return torch_gpt.train_step(run, opt, scaler, DTYPES[name], ids, (ids * 31 + 7) % vocab, a.device)
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


def attention_that_ran(a, step):
    if a.device != "cuda":
        return ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        step()
        synchronise(a)
    names = {e.key[:40] for e in p.key_averages() if any(t in e.key.lower() for t in ("flash", "sdpa", "fmha"))}
    return "; attention: " + (", ".join(sorted(names)) or "not found")


def in_turns(a):
    steps = {}
    for kind in a.kinds:
        try:
            steps[kind] = warm_step(a, kind)
        except Exception as e:
            print(f"torch {kind} was not measured: {type(e).__name__} {str(e).splitlines()[:1]}", flush=True)
    open(os.path.join(a.turns, "ready"), "w").close()
    ms, turn, end = {kind: [] for kind in steps}, 1, os.path.join(a.turns, "end")
    while not os.path.exists(end):
        if not os.path.exists(os.path.join(a.turns, f"torch_{turn}")):
            time.sleep(0.05)
            continue
        for kind in steps:
            for _ in range(5):
                synchronise(a)
                began = time.perf_counter()
                steps[kind][0]()
                synchronise(a)
                ms[kind].append(1e3 * (time.perf_counter() - began))
        open(os.path.join(a.turns, f"done_{turn}"), "w").close()
        turn += 1
    memory = torch.cuda.max_memory_allocated() / 1e9 if a.device == "cuda" else 0
    for kind, (step, _, batch, first) in steps.items():
        if ms[kind]:
            print(f"torch {kind} batch {batch} {statistics.median(ms[kind]):.2f} ms [{min(ms[kind]):.2f} "
                  f"{max(ms[kind]):.2f}] of {len(ms[kind])} steps, {memory:.1f} GB for all kinds, loss {first:.3f} -> "
                  f"{float(step()):.3f}{attention_that_ran(a, step)}", flush=True)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--batch", type=int, default=64)
    args.add_argument("--wait", default="")
    args.add_argument("--turns", default="")
    args.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args.add_argument("--tiny", action="store_true")
    args.add_argument("kinds", nargs="+")
    a = args.parse_args()
    a.rounds = 1 if a.tiny else 3
    a.batch = 1 if a.tiny else a.batch
    clock = torch_cuda.Clock(a)
    name = torch.cuda.get_device_name() if a.device == "cuda" else "the CPU: times mean nothing"
    print(f"# torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {name}", flush=True)
    if a.turns:
        in_turns(a)
        return
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
