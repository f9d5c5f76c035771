"""PyTorch on a GPU: the peer of bench_cuda.cpp, the same kernels and the same GPT-2 124M step.

    python3 torch_cuda.py [--batch N] [--rounds N] [--only TEXT] [--peak N] [--tiny] [--device cpu]
                          [--part kernels|training] [--model gpt2|char]

Kernels run eagerly, and time is CUDA events'; a line names the same bytes or FLOP as its twin
there, whatever PyTorch really moves. A step is zero_grad, autocast forward, backward, unscale
(f16), clip at 1.0, fused AdamW: eager, then torch.compile. --device cpu --tiny only shows that the
script runs.
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import statistics
import time
import torch
from torch.nn import functional as F
import torch_gpt

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "GH200": 989, "A100": 312,
         "L40S": 362, "RTX 4090": 165.2}     # dense TFLOP/s of f16 and bf16, by the data sheets


class Clock:
    """Milliseconds a call, by events of the GPU; by the host's clock without one."""

    def __init__(self, a):
        self.cuda, self.rounds, self.tiny = a.device == "cuda", a.rounds, a.tiny

    def sample(self, f, calls):
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(calls):
                f()
            return 1e3 * (time.perf_counter() - start) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            f()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls

    def calls_for(self, f):
        self.sample(f, 2)
        if self.tiny:
            return 1
        return max(1, min(250, int(5.0 / max(self.sample(f, 1), 1e-3))))

    def turns(self, *works):
        """The samples of works that take turns: (median, least, most) of each."""
        calls = [self.calls_for(f) for f in works]
        ms = [[] for _ in works]
        for _ in range(self.rounds):
            for i, f in enumerate(works):
                ms[i].append(self.sample(f, calls[i]))
        return [(statistics.median(t), min(t), max(t)) for t in ms]


class Bench:
    def __init__(self, a):
        self.a, self.clock, self.lines = a, Clock(a), 0

    def wanted(self, name):
        yes = self.a.only in name
        self.lines += yes
        return yes

    def numbers(self, dtype, *shape):
        return (torch.rand(*shape, device=self.a.device) * 3 - 1.5).to(dtype)

    def by_bytes(self, name, shape, size, f):
        if not self.wanted(name):
            return
        source = torch.zeros(max(1, int(size) // 2), dtype=torch.uint8, device=self.a.device)
        target = torch.empty_like(source)
        t, copy = self.clock.turns(f, lambda: target.copy_(source))
        print(f"{name:<30} {'x'.join(map(str, shape)):<22} {size / 1e6:8.1f} MB {t[0]:9.4f} ms "
              f"[{t[1]:.4f} {t[2]:.4f}] {size / t[0] / 1e6:7.0f} GB/s, the copy "
              f"{size / copy[0] / 1e6:7.0f}: {copy[0] / t[0]:.2f} of it", flush=True)

    def by_flops(self, name, shape, flops, f):
        if not self.wanted(name):
            return
        (t,) = self.clock.turns(f)
        rate = flops / t[0] / 1e9
        share = f", {100 * rate / self.a.peak:.1f}% of the peak" if self.a.peak else ""
        print(f"{name:<30} {'x'.join(map(str, shape)):<22} {flops / 1e9:8.2f} GFLOP {t[0]:9.4f} ms "
              f"[{t[1]:.4f} {t[2]:.4f}] {rate:7.1f} TFLOP/s{share}", flush=True)


def backward_of(y, dy, *wanted):
    """What runs the backward pass of y alone, again and again."""
    return lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)


def maps(b, rows, width):
    wide, low = b.numbers(F32, rows, width), b.numbers(BF16, rows, width)
    n, shape = rows * width, (rows, width)
    b.by_bytes("convert f32 bf16", shape, 6 * n, lambda: wide.to(BF16))
    b.by_bytes("convert bf16 f32", shape, 6 * n, lambda: low.to(F32))
    b.by_bytes("convert f32 f16", shape, 6 * n, lambda: wide.to(F16))
    b.by_bytes("copy transposed bf16", shape, 4 * n, lambda: low.t().contiguous())
    n, shape = 4 * n, (rows, 4 * width)
    a, dy = (b.numbers(BF16, *shape) for _ in range(2))
    x = a.clone().requires_grad_()
    y = F.gelu(x, approximate="tanh")
    b.by_bytes("gelu_tanh", shape, 4 * n, lambda: F.gelu(a, approximate="tanh"))
    b.by_bytes("gelu_tanh backward", shape, 6 * n, backward_of(y, dy, x))
    b.by_bytes("add", shape, 6 * n, lambda: a + dy)
    b.by_bytes("reduce", shape, 2 * n, lambda: a.sum(0, dtype=F32))
    b.by_bytes("dropout", shape, 4 * n, lambda: F.dropout(a, 0.1))


def row_kernels(b, rows, width, vocab):
    n, shape = rows * width, (rows, width)
    x, dy = b.numbers(BF16, *shape).requires_grad_(), b.numbers(BF16, *shape)
    gain, shift = (b.numbers(BF16, width).requires_grad_() for _ in range(2))
    b.by_bytes("layer norm", shape, 4 * n, lambda: F.layer_norm(x.detach(), (width,), gain, shift))
    y = F.layer_norm(x, (width,), gain, shift)
    b.by_bytes("layer norm backward", shape, 6 * n, backward_of(y, dy, x, gain, shift))
    b.by_bytes("softmax", shape, 4 * n, lambda: F.softmax(dy, 1))
    b.by_bytes("softmax backward", shape, 6 * n, backward_of(F.softmax(x, 1), dy, x))
    table = b.numbers(BF16, vocab, width)
    ids = torch.randint(vocab, (rows,), device=b.a.device)
    b.by_bytes("embedding", shape, 4 * n, lambda: F.embedding(ids, table))
    weights = b.numbers(F32, vocab, width).requires_grad_()
    found = F.embedding(ids, weights)
    b.by_bytes("embedding backward", shape, 2 * n + 4 * vocab * width,
               backward_of(found, dy.to(F32), weights))


def cross_entropy(b, rows, vocab):
    """Half the rows at a time: PyTorch wants f32 copies of the logits beside them."""
    rows, targets = rows // 2, torch.randint(vocab, (rows // 2,), device=b.a.device)
    x = b.numbers(BF16, rows, vocab).requires_grad_()
    n, shape = rows * vocab, (rows, vocab)
    b.by_bytes("cross entropy", shape, 2 * n, lambda: F.cross_entropy(x.detach(), targets))
    b.by_bytes("cross entropy backward", shape, 4 * n,
               backward_of(F.cross_entropy(x, targets), None, x))


def optimizer(b, make_model):
    params = [p.detach().clone().requires_grad_() for p in make_model().parameters()]
    n = sum(p.numel() for p in params)
    for p in params:
        p.grad = torch.rand_like(p) * 1e-3
    opt = torch.optim.AdamW(params, lr=1e-4, fused=True)
    b.by_bytes("gather", (len(params), n), 4 * n,
               lambda: torch.nn.utils.get_total_norm([p.grad for p in params]))
    b.by_bytes("update, AdamW", (len(params), n), 28 * n, opt.step)


def linear(b, name, m, n, k, dtype):
    x, w, dy = b.numbers(dtype, m, k), b.numbers(dtype, n, k), b.numbers(dtype, m, n)
    bias, flops, shape = b.numbers(dtype, n), 2.0 * m * n * k, (m, n, k)
    name = f"linear {name} {'f16' if dtype == F16 else 'bf16'}"
    b.by_flops(f"{name}, y", shape, flops, lambda: F.linear(x, w, bias))
    b.by_flops(f"{name}, dx", shape, flops, lambda: dy @ w)
    b.by_flops(f"{name}, dw", shape, flops, lambda: dy.t() @ x)


def attention(b, batch, heads, length, d, dtype, causal):
    q, k, v = (b.numbers(dtype, batch, heads, length, d).requires_grad_() for _ in range(3))
    dy = b.numbers(dtype, batch, heads, length, d)
    flops = 4.0 * batch * heads * length * length * d / (2 if causal else 1)
    name = f"attention {'f16' if dtype == F16 else 'bf16'}{' causal' if causal else ''}"
    shape = (batch * heads, length, d)
    with torch.no_grad():
        b.by_flops(name, shape, flops,
                   lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    b.by_flops(f"{name}, backward", shape, 2.5 * flops, backward_of(y, dy, q, k, v))


def gpt2(b, make_model, dtype, compiled, sizes):
    layers, width, vocab, batch, length = sizes
    name = {F16: "f16", BF16: "bf16", F32: "f32"}[dtype]
    how = "torch.compile" if compiled else "eager"
    if not b.wanted("GPT-2"):
        return
    model = make_model()
    n = sum(p.numel() for p in model.parameters())
    opt = torch_gpt.make_optimizer(model, lr=3e-4, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(b.a.device, enabled=dtype == F16)
    run = torch.compile(model) if compiled else model
    ids = torch.randint(vocab, (batch, length), device=b.a.device)
    targets = (ids * 31 + 7) % vocab
    step = lambda: torch_gpt.train_step(run, opt, scaler, dtype, ids, targets, b.a.device)
    first = float(step())
    (t,) = b.clock.turns(step)
    tokens = batch * length
    plain = 6.0 * n * tokens
    full = plain + 12.0 * layers * width * length * tokens
    share = (f", MFU {plain / t[0] / 1e7 / b.a.peak:.1f}% (6N), "
             f"{full / t[0] / 1e7 / b.a.peak:.1f}% (6N + attention)" if b.a.peak else "")
    print(f"GPT-2 {b.a.model} {n / 1e6:.1f}M {name} {how:<13} {t[0]:9.3f} ms [{t[1]:.3f} {t[2]:.3f}], "
          f"{tokens / t[0] * 1e3:.0f} tokens/s{share}; loss {first:.4f} -> {float(step()):.4f}",
          flush=True)


def options():
    args = argparse.ArgumentParser()
    args.add_argument("--batch", type=int, default=64)
    args.add_argument("--rounds", type=int, default=21)
    args.add_argument("--only", default="")
    args.add_argument("--peak", type=float, default=0)
    args.add_argument("--tiny", action="store_true")
    args.add_argument("--part", default="", choices=("", "kernels", "training"))
    args.add_argument("--model", default="gpt2", choices=("gpt2", "char"))
    args.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    a = args.parse_args()
    if a.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch_cuda.py: nothing was measured, PyTorch sees no GPU")
    name = torch.cuda.get_device_name() if a.device == "cuda" else "the CPU: times mean nothing"
    for part, rate in PEAKS.items():
        if not a.peak and part in name:
            a.peak = rate
    if a.tiny:
        a.rounds, a.batch = 1, 1
    print(f"torch {torch.__version__} on {name}; peak "
          + (f"taken as {a.peak:.0f} TFLOP/s dense" if a.peak else "not known: --peak"))
    return a


def main():
    a = options()
    torch.manual_seed(1)
    sizes = ((1, 1, 32, 17, 72) if a.tiny else (6, 6, 384, 256, 72) if a.model == "char"
             else (12, 12, 768, 1024, 50304))
    layers, heads, width, length, vocab = sizes
    rows, b = a.batch * length, Bench(a)
    torch_gpt.MODELS["bench"] = (layers, heads, width, length, vocab, True, a.batch, length, "tanh")
    make_model = lambda: torch_gpt.GPT("bench").to(a.device)
    if a.part != "training":
        maps(b, rows, width)
        row_kernels(b, rows, width, vocab)
        cross_entropy(b, rows, vocab)
        optimizer(b, make_model)
    for dtype in (F16, BF16) if a.part != "training" else ():
        linear(b, "qkv", rows, 3 * width, width, dtype)
        linear(b, "proj", rows, width, width, dtype)
        linear(b, "up", rows, 4 * width, width, dtype)
        linear(b, "down", rows, width, 4 * width, dtype)
        linear(b, "logits", rows, vocab, width, dtype)
        attention(b, a.batch, heads, length, width // heads, dtype, True)
        attention(b, a.batch, heads, length, width // heads, dtype, False)
    for compiled in (False,) if a.device == "cpu" else (False, True):
        for dtype in (BF16, F16, F32) if a.part != "kernels" else ():
            try:
                gpt2(b, make_model, dtype, compiled, (layers, width, vocab, a.batch, length))
            except Exception as e:          # no memory, no compiler: the rest is measured
                print(f"GPT-2 {a.model} {dtype} was not measured: {type(e).__name__}: "
                      f"{str(e).splitlines()[:1]}", flush=True)
            if a.device == "cuda":
                torch.cuda.empty_cache()
    print(f"{b.lines} lines")


if __name__ == "__main__":
    main()
