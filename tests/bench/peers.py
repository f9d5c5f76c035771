"""mixprec beside every peer that is installed: turn by turn, in one process, on the same memory.

    python3 peers.py LIBPEERS [convert] [optimizer] [gemm] [attention] [--threads N] [--rounds N] [--millions N]
                             [--dtypes NAME...]

LIBPEERS is peers.cpp as a shared library (`make bench` builds it). Every row prints the median
of the rounds with [quartiles], and the ratio of mixprec's speed to the peer's: the median over
rounds of the ratio inside a round, above 1 where mixprec is faster. A peer that is missing is
named as missing. goal: the ratio that the project wants.

Where mixp_cpu selects Intel's tiles, products and attention also run without them, and a step by
tiles is timed before and after each turn: on some virtual machines loads of tiles are four times
as slow for milliseconds to minutes. A turn between two slow steps does not count; a row names how
many turns count.
SPDX-License-Identifier: MIT OR Unlicense"""

import argparse
import ctypes
import math
import os
import statistics
import time

torch = None  # or the module, once the number of threads is set

F32, F16, BF16, E4M3 = 0, 2, 3, 4
NAME, SIZE = {F32: "f32", F16: "f16", BF16: "bf16", E4M3: "e4m3"}, {
    F32: 4,
    F16: 2,
    BF16: 2,
    E4M3: 1,
}
PAUSE = 0.08  # seconds after a call: the threads of OpenBLAS and OpenMP spin on for a while


def prepare(threads):
    """What libraries read when they are loaded. Old builds of OpenBLAS do not know new processors
    and would run SSE3 kernels."""
    global torch
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "avx512f" in first("/proc/cpuinfo", "flags"):
        os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")
    try:
        import torch as found

        torch = found
        torch.set_num_threads(threads)
    except ImportError:
        pass


def load(path):
    lib = ctypes.CDLL(os.path.abspath(path))
    p, i, n, s = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p
    for name, result, *arguments in [
        ("peer_device", s),
        ("peer_without_tiles", i, i),
        ("peer_tile_step", ctypes.c_double),
        ("peer_openblas_core", s),
        ("peer_has_onednn", i),
        ("peer_buffer", p, ctypes.c_size_t),
        ("peer_free", None, p),
        ("peer_memcpy", ctypes.c_double, p, p, ctypes.c_size_t, i),
        ("peer_convert", ctypes.c_double, p, i, p, i, n, i, i),
        ("peer_convert_by", ctypes.c_double, s, p, i, p, i, n, i),
        ("peer_phase_new", p, n, i, i, i, i),
        ("peer_phase_free", None, p),
        ("peer_phase", ctypes.c_double, p, i),
        ("peer_gemm", ctypes.c_double, *[i] * 6, p, p, p, i, i),
        ("peer_gemm_by", ctypes.c_double, s, *[i] * 5, p, p, p, i, i),
        ("peer_attention", ctypes.c_double, *[i] * 7, ctypes.POINTER(p), i, i),
    ]:
        f = getattr(lib, name)
        f.restype, f.argtypes = result, arguments
    return lib


def version():
    return torch.__version__ if torch else "missing"


def seconds(work, repeat=1):
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    return (time.perf_counter() - start) / repeat


class Tiles:
    """Are loads of tiles at their full speed just now? Always, where no tiles are used."""

    def __init__(self, lib):
        self.lib, self.used = lib, lib.peer_without_tiles(0)
        self.best = min(lib.peer_tile_step() for _ in range(100)) if self.used else 0

    def fast(self):
        if not self.used:
            return True
        step = self.lib.peer_tile_step()
        self.best = min(self.best, step)
        return step < 2 * self.best

    def without(self, work):
        """The same work by AVX-512."""
        self.lib.peer_without_tiles(1)
        try:
            return work()
        finally:
            self.lib.peer_without_tiles(0)

    def note(self, times, rounds):
        """How many rounds count, of all."""
        return f"   {len(times['mixprec'])} of {rounds} count" if self.used else ""


def turns(contestants, rounds, pause=0.0, tiles=None):
    """Seconds of each contestant in each round, those without (negative) left out, and rounds with
    a slow turn too. Every other round has the opposite order. After a pause a contestant wakes its threads first, untimed: that alone can take
    milliseconds."""
    times = {who: [] for who in contestants}
    slow = {who: [] for who in contestants}
    for turn in range(-1, rounds):  # the first warms up
        took, fast = {}, tiles is None or tiles.fast()
        for who, work in list(contestants.items())[:: -1 if turn % 2 else 1]:
            t = work()
            if pause and t > 0:
                t = work()
            fast = (tiles is None or tiles.fast()) and fast
            took[who] = t
            if pause:
                time.sleep(pause)
        for who, t in took.items():
            if turn >= 0 and t > 0:
                (times if fast else slow)[who].append(t)
    if not any(times.values()):
        times = slow  # better than nothing; the row says how many rounds there are
    return {who: t for who, t in times.items() if t}


def spread(values):
    v = sorted(values)
    return f"{statistics.median(v):8.4g} [{v[len(v) // 4]:.4g} {v[3 * len(v) // 4]:.4g}]"


def ratio(times, peer, mine="mixprec"):
    """How many times faster than the peer."""
    return statistics.median(p / m for p, m in zip(times[peer], times[mine]))


def verdict(value, goal):
    return "" if goal is None else f"   goal {goal:.2f}: {'reached' if value >= goal else 'MISSED'}"


def view(address, dtype, count):
    return torch.frombuffer(
        (ctypes.c_char * (count * SIZE[dtype])).from_address(address),
        dtype={
            F32: torch.float32,
            F16: torch.float16,
            BF16: torch.bfloat16,
            E4M3: torch.float8_e4m3fn,
        }[dtype],
    )


# --- conversions -------------------------------------------------------------------------

# to, from, and the goals: of memcpy's bandwidth in memory, of the best peer's there.
CASTS = [
    (F16, F32, 0.87, 1.35),
    (BF16, F32, 0.87, 1.35),
    (F32, F16, 1.10, None),
    (F32, BF16, 1.10, None),
    (E4M3, F32, 0.70, None),
    (F32, E4M3, 1.03, None),
]


def convert(lib, a):
    print(
        "\nConversions, one thread. GB/s: bytes read plus written. Beside memcpy of as many bytes."
    )
    n = int(a.millions * 2**20)
    to, source = lib.peer_buffer(4 * n), lib.peer_buffer(4 * n)
    for count, repeat in ((65536, 64), (n, 1)):
        for dst, src, of_memcpy, of_peer in CASTS:
            both = count * (SIZE[dst] + SIZE[src])
            c = {
                "mixprec": lambda: lib.peer_convert(to, dst, source, src, count, repeat, 1),
                "memcpy": lambda: lib.peer_memcpy(to, source, both // 2, repeat),
            }
            for who in ("AVX-512 loop", "FP16", "Imath", "Eigen"):
                c[who] = lambda who=who: lib.peer_convert_by(
                    who.encode(), to, dst, source, src, count, repeat
                )
            if torch:
                d, s = view(to, dst, count), view(source, src, count)
                c["PyTorch"] = lambda: seconds(lambda: d.copy_(s), repeat)
            times = turns(c, a.rounds)
            large = count == n
            print(
                f"\n  {NAME[src]} -> {NAME[dst]}, {count} elements "
                f"({'memory' if large else 'cache'})"
            )
            peers = [who for who in times if who not in ("mixprec", "memcpy", "AVX-512 loop")]
            for who in times:
                rate = [both / t * 1e-9 for t in times[who]]
                r = "" if who == "mixprec" else f"   mixprec is {ratio(times, who):5.2f} x"
                goal = of_memcpy if large and who == "memcpy" else None
                if not large and who == "AVX-512 loop":
                    goal = 0.97
                if large and peers and who == min(peers, key=lambda p: statistics.median(times[p])):
                    goal = of_peer
                print(
                    f"    {who:14} {spread(rate)} GB/s{r}"
                    f"{verdict(ratio(times, who), goal) if r else ''}"
                )
    lib.peer_free(to)
    lib.peer_free(source)


# --- the optimizer phase -----------------------------------------------------------------


class TorchPhase:
    """What a PyTorch program does between backward and the next forward pass."""

    def __init__(self, n, tensors, half_grads):
        self.p = [torch.randn(n // tensors).requires_grad_() for _ in range(tensors)]
        self.half = (
            [torch.full_like(p, 1.0, dtype=torch.float16) for p in self.p] if half_grads else None
        )
        for p in self.p:
            p.grad = torch.full_like(p, 1.0)
        self.opt = torch.optim.AdamW(self.p, lr=1e-3, fused=True)
        self.low = [torch.empty_like(p, dtype=torch.float16) for p in self.p]
        self.scale, self.inf = torch.ones(()), torch.zeros(1)

    def unscale(self):
        torch._amp_foreach_non_finite_check_and_unscale_(
            [p.grad for p in self.p], self.inf, self.scale
        )

    def unscale_and_norm(self):
        self.unscale()
        torch.nn.utils.clip_grad_norm_(self.p, 1e30)

    def step(self):
        self.opt.step()

    def whole(self):
        if self.half:
            for p, h in zip(self.p, self.half):
                p.grad.copy_(h)
        self.unscale_and_norm()
        self.opt.step()
        with torch.no_grad():
            for p, low in zip(self.p, self.low):
                low.copy_(p)


def optimizer(lib, a):
    n, tensors = int(a.millions * 2**20), 16
    print(
        f"\nThe optimizer phase: {n / 1e6:.1f} M parameters in {tensors} tensors, AdamW, "
        f"{a.threads} thread(s). ms."
    )
    if not torch:
        print("  PyTorch: missing")
    for half in (False, True):
        ours = lib.peer_phase_new(n, tensors, F16 if half else F32, 1, a.threads)
        bare = None if half else lib.peer_phase_new(n, tensors, F32, 0, a.threads)
        peer = TorchPhase(n, tensors, half) if torch else None
        lib.peer_phase(ours, 2)  # makes the plan that the parts use
        rows = [("whole phase, f16 gradients", 2, ours, "whole", 2.7)]
        if not half:
            lib.peer_phase(bare, 2)
            rows = [
                ("unscale + found_inf + norm", 0, ours, "unscale_and_norm", 3.5),
                ("AdamW, 28 bytes a parameter", 1, bare, "step", 1.15),
                ("whole phase, f32 gradients", 2, ours, "whole", 2.0),
            ]
        for what, part, handle, method, goal in rows:
            c = {"mixprec": lambda: lib.peer_phase(handle, part)}
            if peer:
                c["PyTorch"] = lambda: seconds(getattr(peer, method))
            times = turns(c, a.rounds, PAUSE if a.threads > 1 else 0)
            print(f"  {what}")
            for who in times:
                r = "" if who == "mixprec" else f"   mixprec is {ratio(times, who):5.2f} x"
                print(
                    f"    {who:14} {spread([1e3 * t for t in times[who]])} ms{r}"
                    f"{verdict(ratio(times, who), goal) if r else ''}"
                )
        for handle in (ours, bare):
            if handle:
                lib.peer_phase_free(handle)


# --- products ----------------------------------------------------------------------------

SHAPES = [  # m, n, k, a transposed, b transposed: forward, gradient of x, gradient of w
    ("char qkv", 768, 384, 128, 0, 1),
    ("char proj", 768, 128, 128, 0, 1),
    ("char mlp up", 768, 512, 128, 0, 1),
    ("char mlp down", 768, 128, 512, 0, 1),
    ("char logits", 768, 65, 128, 0, 1),
    ("char dx up", 768, 128, 512, 0, 0),
    ("char dw up", 512, 128, 768, 1, 0),
    ("char dw logits", 65, 128, 768, 1, 0),
    ("gpt2 qkv", 256, 2304, 768, 0, 1),
    ("gpt2 proj", 256, 768, 768, 0, 1),
    ("gpt2 mlp up", 256, 3072, 768, 0, 1),
    ("gpt2 mlp down", 256, 768, 3072, 0, 1),
    ("gpt2 dx up", 256, 768, 3072, 0, 0),
    ("gpt2 dx down", 256, 3072, 768, 0, 0),
    ("gpt2 dw up", 3072, 768, 256, 1, 0),
    ("gpt2 dw down", 768, 3072, 256, 1, 0),
    ("gpt2 logits", 256, 50304, 768, 0, 1),
    ("gpt2 dx logits", 256, 768, 50304, 0, 0),
    ("gpt2 dw logits", 50304, 768, 256, 1, 0),
    ("square 512", 512, 512, 512, 0, 1),
    ("square 1024", 1024, 1024, 1024, 0, 1),
    ("square 1024", 1024, 1024, 1024, 0, 0),
    ("square 1024", 1024, 1024, 1024, 1, 0),
    ("square 1024", 1024, 1024, 1024, 1, 1),
]


def gemm(lib, a):
    tiles = Tiles(lib)
    core = lib.peer_openblas_core().decode()
    print(
        f"\nProducts, {a.threads} thread(s), GFLOP/s. "
        f"OpenBLAS: {'runs as ' + core if core else 'missing'}; "
        f"oneDNN: {'found' if lib.peer_has_onednn() else 'missing'}; PyTorch: {version()}"
    )
    totals = {}
    for what, m, n, k, ta, tb in SHAPES:
        flops = 2.0 * m * n * k
        repeat = max(1, int(1e10 / flops))
        print(f"  {what} {m} x {n} x {k} {'NT'[ta]}{'NT'[tb]}")
        for dtype in [d for d in (F32, F16, BF16) if NAME[d] in a.dtypes]:
            x, y, z = (lib.peer_buffer(SIZE[dtype] * s) for s in (m * k, k * n, m * n))
            c = {
                "mixprec": lambda: lib.peer_gemm(m, n, k, ta, tb, dtype, x, y, z, repeat, a.threads)
            }
            if dtype == F32:
                for who in ("OpenBLAS", "oneDNN"):
                    c[who] = lambda who=who: lib.peer_gemm_by(
                        who.encode(), m, n, k, ta, tb, x, y, z, repeat, a.threads
                    )
            if torch and (dtype != F16 or a.f16):
                u = view(x, dtype, m * k).view(*((k, m) if ta else (m, k)))
                v = view(y, dtype, k * n).view(*((n, k) if tb else (k, n)))
                w = view(z, dtype, m * n).view(m, n)
                c["PyTorch"] = lambda: seconds(
                    lambda: torch.mm(u.T if ta else u, v.T if tb else v, out=w), repeat
                )
            if tiles.used and dtype != F32:
                c["without tiles"] = lambda: tiles.without(c["mixprec"])
            times = turns(c, a.rounds, PAUSE if a.threads > 1 else 0, tiles)
            row = f"    {NAME[dtype]:5}"
            for who in times:
                row += f"  {who} {flops / statistics.median(times[who]) * 1e-9:.1f}"
                if who != "mixprec":
                    totals.setdefault((dtype, who), []).append(ratio(times, who))
                    row += f" ({ratio(times, who):.2f} x)"
            best = [who for who in times if who in ("OpenBLAS", "oneDNN")]
            if best:
                best = min(best, key=lambda who: statistics.median(times[who]))
                totals.setdefault((dtype, "the better of OpenBLAS and oneDNN"), []).append(
                    ratio(times, best)
                )
            print(row + tiles.note(times, a.rounds), flush=True)
            for p in (x, y, z):
                lib.peer_free(p)
    for (dtype, who), r in totals.items():
        mean = math.exp(statistics.mean(map(math.log, r)))
        goal = {(F32, "the better of OpenBLAS and oneDNN"): 1.02, (BF16, "PyTorch"): 0.97}.get(
            (dtype, who)
        )
        print(
            f"  geometric mean, {NAME[dtype]}: mixprec is {mean:.2f} x {who}, "
            f"at worst {min(r):.2f} x{verdict(mean, goal)}"
        )


# --- attention ---------------------------------------------------------------------------

# Which keys a mask of 0 and -Inf hides. "0 or -Inf": chance hides each key of each query or not. The mean query sees
# t / 2 keys there, t / 4 keys in a document, and some t / 4 in a window.
HIDDEN = {
    "0 or -Inf": lambda query, key, t: torch.rand(t, t) < 0.5,
    "4 documents": lambda query, key, t: query // (t // 4) != key // (t // 4),
    "a window": lambda query, key, t: (query - key).abs() >= t // 8,
}

# b, t, heads, d: a sequence of GPT-2, and a batch of short ones.
ATTENTION = [(1, 1024, 12, 64), (16, 128, 4, 32)]


def attention(lib, a):
    """Beside torch.nn.functional.scaled_dot_product_attention, whose kernel is fused as well, on the
    same memory; its views are [b, heads, t, d]."""
    tiles = Tiles(lib)
    print(f"\nAttention, {a.threads} thread(s), ms. PyTorch: {version()}")
    for b, t, heads, d in ATTENTION:
        n = b * t * heads * d
        for dtype in [d for d in (F32, BF16, F16) if NAME[d] in a.dtypes and (d != F16 or a.f16)]:
            sizes = [n * SIZE[dtype]] * 8 + [t * t * SIZE[dtype], b * heads * t * 4]
            memory = (ctypes.c_void_p * 10)(*(lib.peer_buffer(size) for size in sizes))
            for kind, what in enumerate(("full", "causal", "a mask [t, t]", *HIDDEN)):
                if kind >= 3 and not torch:
                    continue
                if kind >= 3:
                    i = torch.arange(t)
                    hidden = HIDDEN[what](i[:, None], i[None], t).reshape(t * t)
                    view(memory[8], dtype, t * t).copy_(torch.where(hidden, -math.inf, 0.0))
                for backward in (0, 1):
                    c = {
                        "mixprec": lambda: lib.peer_attention(
                            b, t, heads, d, dtype, kind, backward, memory, 1, a.threads
                        )
                    }
                    if torch:
                        work = torch_attention(memory, (b, t, heads, d), dtype, kind, backward)
                        c["PyTorch"] = lambda: seconds(work)
                    if tiles.used and dtype != F32:
                        c["without tiles"] = lambda: tiles.without(c["mixprec"])
                    times = turns(c, a.rounds, PAUSE if a.threads > 1 else 0, tiles)
                    row = f"  {b} x {t}, {heads} heads of {d}, {NAME[dtype]:5} {what:14} "
                    row += "forward + backward" if backward else "forward           "
                    for who in times:
                        row += f"  {who} {spread([1e3 * s for s in times[who]])}"
                    if "PyTorch" in times:
                        goal = 1.5 if t == 1024 and kind >= 2 else None
                        r = ratio(times, "PyTorch")
                        row += f"   mixprec is {r:.2f} x{verdict(r, goal)}"
                    print(row + tiles.note(times, a.rounds), flush=True)
            for p in memory:
                lib.peer_free(p)


def torch_attention(memory, sizes, dtype, kind, backward):
    b, t, heads, d = sizes
    q, k, v, dy = (
        view(p, dtype, math.prod(sizes)).view(sizes).transpose(1, 2) for p in memory[:4]
    )
    mask = view(memory[8], dtype, t * t).view(t, t) if kind >= 2 else None
    attend = torch.nn.functional.scaled_dot_product_attention

    def forward():
        with torch.no_grad():
            attend(q, k, v, attn_mask=mask, is_causal=kind == 1)

    def both():
        x = [p.detach().requires_grad_() for p in (q, k, v)]
        y = attend(*x, attn_mask=mask, is_causal=kind == 1)
        torch.autograd.grad(y, x, dy)

    return both if backward else forward


def first(file, key):
    """What a file of the kernel says after `key`."""
    try:
        with open(file) as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith(key)), "?")
    except OSError:
        return "?"


def machine():
    name, family, model = (
        first("/proc/cpuinfo", k) for k in ("model name", "cpu family", "model\t")
    )
    return (
        f"{name} (family {family}, model {model}), {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.2f}"
    )


def main():
    parts = {"convert": convert, "optimizer": optimizer, "gemm": gemm, "attention": attention}
    args = argparse.ArgumentParser()
    args.add_argument("lib")
    args.add_argument("parts", nargs="*", choices=[[], *parts])
    args.add_argument("--threads", type=int, default=1)
    args.add_argument("--rounds", type=int, default=11)
    args.add_argument("--millions", type=float, default=64, help="elements in memory, in 2^20")
    args.add_argument("--dtypes", nargs="+", default=["f32", "f16", "bf16"])
    args.add_argument(
        "--f16", action="store_true", help="PyTorch's f16 products and attention too: slow"
    )
    a = args.parse_args()
    prepare(a.threads)
    lib = load(a.lib)
    print(
        f"{machine()}\nmixprec {lib.peer_device().decode()}; PyTorch {version()}; "
        f"{a.rounds} rounds: median [quartiles]"
    )
    for name in a.parts or parts:
        parts[name](lib, a)


if __name__ == "__main__":
    main()
