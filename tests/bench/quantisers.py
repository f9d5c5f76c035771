"""quantisers.py - the CPU's quantiser beside those of torchao and TransformerEngine, bit for bit.
SPDX-License-Identifier: MIT OR Unlicense

    quantisers.py LIBRARY [MILLIONS [TRANSFORMER_ENGINE]]

LIBRARY is quantisers.c as a shared library; MILLIONS of values go through each row (4). torchao must be
installed. TRANSFORMER_ENGINE is a checkout; where it is given, its references in Python run as well.
Compared are the bits of the decoded values and of the factor of a product; 0 and -0 count as the same, because
TransformerEngine's reference makes 0 of -0 (its hardware does not). Blocks whose e8m0 scale is 2^-127 are left out
and counted: torchao divides them by 1 or 2^-126. Ends with 1 if a bit differs.
"""
import ctypes
import enum
import math
import sys
import types
from unittest.mock import MagicMock

import torch
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

torch.set_num_threads(1)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLS = 1024, 1024
TURNED, MX_E5M2, LINES = 10, 14, (19, 20, 21)
MXFP8 = {4: ScaleCalculationMode.RCEIL, 7: ScaleCalculationMode.FLOOR, 8: ScaleCalculationMode.CEIL,
         9: ScaleCalculationMode.EVEN}
# The largest amax whose e8m0 scale is 2^-127.
MOST_OF_SMALLEST = {ScaleCalculationMode.RCEIL: 448 * 2.0 ** -127, ScaleCalculationMode.CEIL: 2.0 ** -119,
                    ScaleCalculationMode.FLOOR: (2 - 2.0 ** -23) * 2.0 ** -119,
                    ScaleCalculationMode.EVEN: (2 - 2.0 ** -4 - 2.0 ** -23) * 2.0 ** -119}
one = torch.ones(())


def stub_transformer_engine(path):
    """The references need no compiled part: what they import from it is stood in for here."""
    top = 'transformer_engine.pytorch'
    for name in ('transformer_engine', top, top + '.constants', top + '.custom_recipes', top + '.quantized_tensor'):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[top + '.custom_recipes'].__path__ = [path + '/transformer_engine/pytorch/custom_recipes']
    sys.modules[top + '.custom_recipes'].gemm = sys.modules[top + '.custom_recipes.gemm'] = MagicMock()
    base = sys.modules[top + '.quantized_tensor']
    base.QuantizedTensorStorage = base.Quantizer = type('Base', (), {})
    fp8 = enum.Enum('DType', 'kFloat8E4M3 kFloat8E5M2')
    sys.modules[top].DType = fp8
    sys.modules[top + '.constants'].TE_DType_To_Torch = {
        fp8.kFloat8E4M3: E4M3, fp8.kFloat8E5M2: E5M2}
    sys.path.insert(0, path + '/tests/pytorch')
    return fp8


def ao_tensor(dtype, power=False):
    def run(x):
        scale = tensor_to_scale(x, dtype, round_scales_to_power_of_2=power)
        return to_fp8_saturated(x.float() * scale, dtype).float(), torch.reciprocal(scale)
    return run


def ao_mx(mode, dtype=E4M3):
    def run(x):
        exponent, low = to_mx(x, dtype, 32, mode)
        factor = torch.ldexp(one, exponent.contiguous().view(torch.uint8).int() - 127)
        return low.float().view(-1, 32).mul(factor.reshape(-1, 1)).view(x.shape), one
    return run


def te_tensor(kind, power=False):
    from references.ref_per_tensor_cs import ref_per_tensor_cs_cast

    def run(x):
        q, inverse, _, _ = ref_per_tensor_cs_cast(x, kind, force_pow_2_scales=power)
        return q.float(), inverse.reshape(())
    return run


def te_block(tile, dtype=E4M3):
    from references.blockwise_quantizer_reference import BlockwiseQuantizerReference

    def run(x):
        q = BlockwiseQuantizerReference().quantize(x, dtype, pow_2_scales=True, quant_tile_shape=tile,
                                                   munge_scale_shapes=False)
        factor = q.scale.repeat_interleave(128, 1)
        return q.data.float() * (factor if tile[0] == 1 else factor.repeat_interleave(128, 0)), one
    return run


def te_nvfp4(tile, choice=None, bound=448):
    """choice: how 4over6 compares its two scales; None: one scale."""
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4 as nvfp4
    over6 = dict(nvfp4_use_4over6=True, nvfp4_e4m3_max=bound, nvfp4_4over6_err_mode=choice) if choice else {}

    def run(x):
        amax = x.abs().max().float().view(1)
        q, scale = nvfp4.NVFP4QuantizerRef._quantize_blockwise_reference(
            x, amax, tile[1], tile[0], pow_2_scales=False, eps=0.0, **over6)
        encode = torch.clamp(torch.div(torch.tensor(6.0 * bound), amax), max=torch.finfo(torch.float32).max)
        values = nvfp4.cast_from_fp4x2(q, torch.float32)
        return values * scale.float().repeat_interleave(16, 1), torch.div(1.0, encode).reshape(())
    return run


def te_nvfp4_lines(down, choice=None):
    """A scale for each row; down: for each column, in blocks of 16 rows."""
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4 as nvfp4
    over6 = dict(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode=choice) if choice else {}
    bound = 1536.0 if choice else 2688.0

    def run(x):
        y = x.t().contiguous() if down else x
        amax = y.abs().amax(1).float()
        q, scale = nvfp4.NVFP4QuantizerRef._quantize_blockwise_reference(
            y, amax, 16, 1, pow_2_scales=False, row_scaled_nvfp4=True, eps=0.0, **over6)
        encode = torch.clamp(torch.div(torch.tensor(bound), amax), max=torch.finfo(torch.float32).max)
        encode[amax == 0] = 1.0         # as in the kernel; the reference divides zeros by 0
        values = nvfp4.cast_from_fp4x2(q, torch.float32) * scale.float().repeat_interleave(16, 1)
        return values.t() if down else values, torch.div(1.0, encode)
    return run


def te_turned():
    """x as TransformerEngine's reference quantises it for the gradient of a weight: transformed in bf16 first."""
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4 as nvfp4
    reference = nvfp4.NVFP4QuantizerRef.__new__(nvfp4.NVFP4QuantizerRef)
    reference.with_rht = reference.with_random_sign_mask = True
    reference.quant_tile_shape = (1, 16)
    quantised = te_nvfp4((1, 16))

    def run(x):
        y, factor = quantised(reference._apply_rht(x.t().contiguous()))
        return y.t(), factor
    return run


def values(seed, dtype):
    """Normal numbers, each block of 128 x 128 times a power of two of its own; and, in turns, the exponents far
    apart within a row, ties of the grids, all bits of bf16 that are finite, zeros, subnormal numbers."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLS, generator=g)
    blocks = torch.randint(-30, 31, (ROWS // 128, COLS // 128), generator=g)
    x = torch.ldexp(x, blocks.repeat_interleave(128, 0).repeat_interleave(128, 1))
    if seed % 4 == 1:
        x = torch.ldexp(x, torch.randint(-20, 21, x.shape, generator=g))
    if seed % 4 == 2:
        steps = torch.randint(-64, 65, x.shape, generator=g).float() / 16
        x = torch.ldexp(steps, torch.randint(-9, 10, (ROWS, COLS // 16), generator=g).repeat_interleave(16, 1))
    if seed % 4 == 3:
        every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
        every = every[torch.isfinite(every) & (every.abs() < 1e30)]
        x.view(-1)[:every.numel()] = every
        x[512:640] = 0
        x[640:768] *= 1e-35
    return x.to(dtype)


def ours(library, which, x):
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    decode = torch.empty(x.shape[which == 20] if which in LINES else ())
    r = library.quantise(which, int(x.dtype == torch.bfloat16), ctypes.c_void_p(x.data_ptr()),
                         ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(decode.data_ptr()),
                         ctypes.c_int64(x.shape[0]), ctypes.c_int64(x.shape[1]))
    assert r == 0, r
    return y, decode


def smallest_scale(which, x):
    """True for what lies in a block of MXFP8 whose scale is 2^-127."""
    if which not in MXFP8 and which != MX_E5M2:
        return torch.zeros(x.shape, dtype=torch.bool)
    amax = x.float().abs().view(-1, 32).amax(1, keepdim=True)
    most = 57344 * 2.0 ** -127 if which == MX_E5M2 else MOST_OF_SMALLEST[MXFP8[which]]
    return (amax <= most).expand(-1, 32).reshape(x.shape)


def main():
    library, millions = ctypes.CDLL(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    peers = [(0, 'e4m3, one scale', 'torchao', ao_tensor(E4M3)), (1, 'e5m2, one scale', 'torchao', ao_tensor(E5M2)),
             *((which, 'MXFP8, 1 x 32', 'torchao ' + mode.name, ao_mx(mode)) for which, mode in MXFP8.items()),
             (11, 'e4m3, power of two', 'torchao', ao_tensor(E4M3, True)),
             (12, 'e5m2, power of two', 'torchao', ao_tensor(E5M2, True)),
             (MX_E5M2, 'e5m2, 1 x 32', 'torchao RCEIL', ao_mx(ScaleCalculationMode.RCEIL, E5M2))]
    if len(sys.argv) > 3:
        fp8 = stub_transformer_engine(sys.argv[3])
        name = 'TransformerEngine'
        peers += [(0, 'e4m3, one scale', name, te_tensor(fp8.kFloat8E4M3)),
                  (1, 'e5m2, one scale', name, te_tensor(fp8.kFloat8E5M2)),
                  (2, 'e4m3, 1 x 128', name, te_block((1, 128))), (3, 'e4m3, 128 x 128', name, te_block((128, 128))),
                  (5, 'NVFP4, 1 x 16', name, te_nvfp4((1, 16))), (6, 'NVFP4, 16 x 16', name, te_nvfp4((16, 16))),
                  (TURNED, 'NVFP4, transformed', name, te_turned()),
                  (11, 'e4m3, power of two', name, te_tensor(fp8.kFloat8E4M3, True)),
                  (12, 'e5m2, power of two', name, te_tensor(fp8.kFloat8E5M2, True)),
                  (13, 'e5m2, 1 x 128', name, te_block((1, 128), E5M2)),
                  (15, '4over6, 1 x 16', name + ' MAE', te_nvfp4((1, 16), 'MAE', 256)),
                  (16, '4over6, 16 x 16', name + ' MAE', te_nvfp4((16, 16), 'MAE', 256)),
                  (17, '4over6, 1 x 16', name + ' MSE 448', te_nvfp4((1, 16), 'MSE')),
                  (18, '4over6, 16 x 16', name + ' MSE 448', te_nvfp4((16, 16), 'MSE')),
                  (19, 'NVFP4, by rows', name, te_nvfp4_lines(False)),
                  (20, 'NVFP4, by columns', name, te_nvfp4_lines(True)),
                  (21, '4over6, by rows', name + ' MAE', te_nvfp4_lines(False, 'MAE'))]
    bad = 0
    for which, what, peer, run in peers:
        wrong = factors = small = count = 0
        for seed in range(math.ceil(millions * 1e6 / (ROWS * COLS))):
            x = values(seed, torch.bfloat16 if seed & 4 or which == TURNED else torch.float32)
            y, decode = ours(library, which, x)
            want, factor = run(x)
            out = smallest_scale(which, x)
            wrong += int(((y != want.to(torch.bfloat16)) & ~out).sum())
            factors += int((decode != factor).sum())
            small += int(out.sum())
            count += x.numel()
        bad += wrong + factors
        print(f'{what:18} {peer:25} {count / 1e6:6.1f} million: {wrong} values differ, {factors} factors;'
              f' {small} left out', flush=True)
    sys.exit(bad > 0)


main()
