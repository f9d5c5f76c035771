"""Records arrays in NVFP4 with 4over6, and with a scale for each row or column, as TransformerEngine's reference in
Python quantises them, for test_recipes.c:
python3 record_nvfp4.py TRANSFORMER_ENGINE > nvfp4.h

TRANSFORMER_ENGINE is a checkout; its reference needs no compiled part and no GPU. Each array has 16 rows of 32 numbers
of bf16. A record has a character for each element, its code of e2m1 in hexadecimal digits, and two for each block, the
code of its scale in e4m3.
SPDX-License-Identifier: MIT OR Unlicense"""
import sys
import types
from unittest.mock import MagicMock

import torch

ROWS, COLS = 16, 32


def reference():
    """TransformerEngine's NVFP4QuantizerRef; what it imports is stood in for here."""
    top = 'transformer_engine.pytorch'
    for name in ('transformer_engine', top, top + '.custom_recipes', top + '.quantized_tensor'):
        sys.modules[name] = types.ModuleType(name)
    recipes = sys.modules[top + '.custom_recipes']
    recipes.__path__ = [sys.argv[1] + '/transformer_engine/pytorch/custom_recipes']
    recipes.gemm = sys.modules[top + '.custom_recipes.gemm'] = MagicMock()
    base = sys.modules[top + '.quantized_tensor']
    base.QuantizedTensorStorage = base.Quantizer = type('Base', (), {})
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4
    return reference_nvfp4.NVFP4QuantizerRef


def arrays():
    g = torch.Generator().manual_seed(1)
    normal = torch.randn(ROWS, COLS, generator=g)
    normal[8:] = torch.randint(-24, 25, (8, COLS), generator=g).float() / 4     # ties, and blocks that both fit
    wide = torch.ldexp(torch.randn(ROWS, COLS, generator=g), torch.randint(-12, 1, (ROWS, COLS), generator=g))
    wide[:, 16:] *= 2.0 ** -9           # scales of blocks that are subnormal in e4m3, or 0
    wide[3, 1:16] = 0
    wide[5, :16] = -wide[5, :16].abs().max()
    huge = normal * 5e37
    tiny = wide * 3e-38                 # 1536 / amax is beyond f32
    return [x.to(torch.bfloat16) for x in (normal, wide, huge, tiny)]


def record(ref, x, tile, choice, bound, lines):
    """tile: rows and columns of a block of x. lines: a scale for each row (1 x 16) or column (16 x 1)."""
    turned = tile == (16, 1)
    y = x.t().contiguous() if turned else x
    amax = y.abs().amax(1).float() if lines else y.abs().max().float().view(1)
    q, scales = ref._quantize_blockwise_reference(
        y, amax, 16, 16 if tile == (16, 16) else 1, pow_2_scales=False, row_scaled_nvfp4=lines,
        nvfp4_use_4over6=bool(choice), nvfp4_e4m3_max=bound, nvfp4_4over6_err_mode=choice or 'MAE', eps=0.0)
    codes = torch.stack([q & 15, q >> 4], 2).view(y.shape)
    scales = scales.view(torch.uint8)
    if turned:
        codes, scales = codes.t(), scales.t()
    if tile == (16, 16):
        scales = scales[:1]
    return ''.join('%x' % v for v in codes.flatten().tolist()), ''.join('%02x' % v for v in scales.flatten().tolist())


def main():
    ref, choices = reference(), [None, 'MAE', 'MSE']
    xs = arrays()
    print('/* nvfp4.h - made by record_nvfp4.py with the reference of TransformerEngine. */')
    print('enum { NVFP4_ARRAYS = %d, NVFP4_ROWS = %d, NVFP4_COLS = %d };' % (len(xs), ROWS, COLS))
    print('static const uint16_t nvfp4_arrays[NVFP4_ARRAYS][NVFP4_ROWS * NVFP4_COLS] = {')
    for x in xs:
        bits = [v & 0xFFFF for v in x.view(torch.int16).flatten().tolist()]
        print('    { ' + ', '.join('0x%X' % v for v in bits) + ' },')
    print('};')
    print('/* choice: a mixp_4over6. lines: 1 = a scale for each row, or for each column. */')
    print('typedef struct nvfp4_record { int array, block_rows, block_cols, choice, bound_448, lines; const char *codes,'
          ' *scales; } nvfp4_record;')
    print('static const nvfp4_record nvfp4_records[] = {')
    forms = [(tile, choice, bound, False) for tile in ((1, 16), (16, 1), (16, 16)) for choice in ('MAE', 'MSE')
             for bound in (256, 448)]
    forms += [((1, 16), None, 448, True), ((16, 1), None, 448, True), ((1, 16), 'MAE', 256, True),
              ((1, 16), 'MSE', 448, True)]
    for tile, choice, bound, lines in forms:
        for number, x in enumerate(xs):
            codes, scales = record(ref, x, tile, choice, bound, lines)
            print('    { %d, %d, %d, %d, %d, %d,\n      "%s",\n      "%s" },' % (
                number, *tile, choices.index(choice), int(bool(choice) and bound == 448), lines, codes, scales))
    print('};')
    print('enum { NVFP4_RECORDS = sizeof nvfp4_records / sizeof nvfp4_records[0] };')


main()
