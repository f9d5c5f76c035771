"""linears.py - a linear's three products under a recipe beside those of PyTorch and torchao, on the same operands.
SPDX-License-Identifier: MIT OR Unlicense

    linears.py LIBRARY

LIBRARY is quantisers.c as a shared library. x, w and dy hold numbers of bf16. The peers give results in f32:
torch._scaled_mm of torchao's fp8 operands with their two scales, torchao's Float8Linear with emulate=True, and f32
products of tensors that torchao's MXTensor has quantised along each product's sum, in its four roundings.

mixprec rounds y to bf16; dx and dw are f32. Where n products are added, two sums in f32 may differ by n 2^-23 of the
sum of the magnitudes, and y by half a step of bf16 more. A row shows the most by which a sum of mixprec differs from
the peer's, as a share of that bound (of y: beyond the half step), and how many values of y are not the peer's rounded
to bf16. Ends with 1 if a share exceeds 1.
"""
import ctypes
import dataclasses
import sys

import torch
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

torch.set_num_threads(1)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_CURRENT, MXFP8 = 1, 4           # mixp_recipe_kind
MODES = [Mode.RCEIL, Mode.FLOOR, Mode.CEIL, Mode.EVEN]      # mixp_e8m0_rounding
SIZES = [(32, 64, 96), (768, 128, 128), (768, 512, 128), (256, 768, 768), (128, 96, 3072)]


class LinearCall(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ('kind', 'dy_e4m3', 'e8m0')] + \
               [(name, ctypes.c_int64) for name in ('rows', 'outs', 'ins')] + \
               [(name, ctypes.c_void_p) for name in ('x', 'w', 'dy', 'y', 'dx', 'dw')]


def ours(library, x, w, dy, kind, dy_e4m3, e8m0):
    results = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
    arrays = [ctypes.c_void_p(t.data_ptr()) for t in (x, w, dy, *results)]
    r = library.linear(ctypes.byref(LinearCall(kind, dy_e4m3, e8m0, *dy.shape, x.shape[1], *arrays)))
    assert r == 0, r
    return results


def scaled_mm(x, w, dy, dy_dtype):
    def quantised(t, dtype):
        scale = tensor_to_scale(t, dtype)
        return to_fp8_saturated(t * scale, dtype), torch.reciprocal(scale)

    def product(a, b):
        return torch._scaled_mm(a[0].contiguous(), b[0].t().contiguous().t(), scale_a=a[1], scale_b=b[1],
                                out_dtype=torch.float32)

    def turned(a):
        return a[0].t(), a[1]
    x, w, dy = quantised(x, E4M3), quantised(w, E4M3), quantised(dy, dy_dtype)
    return product(x, turned(w)), product(dy, w), product(turned(dy), x)


def float8_linear(x, w, dy):
    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight.data.copy_(w)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name('tensorwise'), emulate=True)
    layer = Float8Linear.from_float(layer, config)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def mx(x, w, dy, mode):
    def decoded(t):
        return MXTensor.to_mx(t.contiguous(), E4M3, 32, mode).dequantize(torch.float32)
    return (decoded(x) @ decoded(w).t(), decoded(dy) @ decoded(w.t()).t(), decoded(dy.t()) @ decoded(x.t()).t())


def operands(seed, rows, outs, ins):
    """Numbers of bf16: normal ones; then with exponents far apart; then with columns of outliers, and zeros."""
    g = torch.Generator().manual_seed(seed)
    x, w, dy = (torch.randn(size, generator=g) for size in ((rows, ins), (outs, ins), (rows, outs)))
    if seed % 3 == 1:
        x, w, dy = (torch.ldexp(t, torch.randint(-8, 9, t.shape, generator=g)) for t in (x, w, dy))
    if seed % 3 == 2:
        x[:, ::16] *= 100
        x[: rows // 2] = 0
        w[:, 1::16] *= 10
        dy[::32] = 0
    return [t.bfloat16().float() for t in (x, 0.02 * w, 1e-3 * dy)]


def shares(got, want, magnitudes, n, rounded):
    """The most by which got differs from want, of what is allowed; and how many values are not want's, rounded."""
    allowed = n * 2.0 ** -23 * magnitudes.double()
    differ = (got.double() - want.double()).abs()
    assert not differ.isnan().any()
    other = 0
    if rounded:
        differ -= torch.ldexp(torch.ones(()).double(), torch.frexp(want)[1] - 9)        # half a step
        other = int((got != want.bfloat16().float()).sum())
    return torch.where(differ > 0, differ / allowed, 0).max().item(), other


def main():
    library = ctypes.CDLL(sys.argv[1])
    rows = [('fp8_current', FP8_CURRENT, 0, 0, 'torch._scaled_mm', lambda *t: scaled_mm(*t, E5M2)),
            ('fp8_current, dy e4m3', FP8_CURRENT, 1, 0, 'torch._scaled_mm', lambda *t: scaled_mm(*t, E4M3)),
            ('fp8_current', FP8_CURRENT, 0, 0, 'Float8Linear emulated', float8_linear)]
    rows += [('mxfp8, ' + mode.name, MXFP8, 0, number, 'torchao MXTensor', lambda *t, mode=mode: mx(*t, mode))
             for number, mode in enumerate(MODES)]
    bad = 0
    for what, kind, dy_e4m3, e8m0, name, peer in rows:
        most, others, count = [0.0, 0.0, 0.0], 0, 0
        for seed in range(6):
            for size in SIZES:
                x, w, dy = operands(seed, *size)
                mine = ours(library, x, w, dy, kind, dy_e4m3, e8m0)
                # Quantising changes the magnitudes little: their products are the bound's measure.
                a, b, d = x.abs(), w.abs(), dy.abs()
                sums = a @ b.t(), d @ b, d.t() @ a
                terms = size[2], size[1], size[0]
                for i, want in enumerate(peer(x, w, dy)):
                    share, other = shares(mine[i], want, sums[i], terms[i], i == 0)
                    most[i] = max(most[i], share)
                    others += other
                count += mine[0].numel()
        bad += max(most) > 1
        print(f'{what:22} {name:22} y {most[0]:6.4f}  dx {most[1]:6.4f}  dw {most[2]:6.4f}   '
              f'{others} of {count} y differ', flush=True)
    sys.exit(bad > 0)


main()
