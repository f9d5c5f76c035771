"""Records blocks in MX formats, in torchao's four roundings of a scale, for test_recipes.c:
python3 record_e8m0.py > e8m0.h

Each block of 32 holds four numbers eight times; the first is the largest. Beside them stand the bf16 bits of what
torchao decodes: rows RCEIL, FLOOR, CEIL, EVEN. Not among them are scales of 2^-127, by which torchao does not
divide, and an amax that exceeds a power of two times the element's largest value by less than 2^-20 of it: there
torchao's logarithm in f32 rounds RCEIL down.
SPDX-License-Identifier: MIT OR Unlicense"""
import sys
import torch
import torchao
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

ELEMENTS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2]
MODES = [Mode.RCEIL, Mode.FLOOR, Mode.CEIL, Mode.EVEN]
# Of the largest number. The last two lie in the steps below the element's normal numbers.
SHARES = [[-1.0, 0.71875, -1.40625 * 2.0 ** -14, 1.40625 * 2.0 ** -15],
          [-1.0, 0.71875, -1.40625 * 2.0 ** -29, 1.40625 * 2.0 ** -30],
          [-1.0, 0.71875, -0.328125, 0.140625]]
# On both sides of a power of two, of each element's largest value, and of the ties of EVEN.
AMAX = [1.0, 1.0 + 2.0 ** -23, 1.0 - 2.0 ** -24, 1.75, 1.75 + 2.0 ** -16, 1.5, 1.5 + 2.0 ** -22, 1.75 - 2.0 ** -23,
        1.875, 1.875 - 2.0 ** -23, 1.9375, 1.9375 - 2.0 ** -23, 448.0, 449.0, 3.0e-20, 3.4028234663852886e38]


def hexes(values):
    return ", ".join("0x%Xu" % v for v in values)


print(f"/* e8m0.h - made by record_e8m0.py with torchao {torchao.__version__}. */")
print("enum { E8M0_VALUES = 4 };")
print("/* element: 0 e4m3, 1 e5m2, 2 e2m1. */")
print("typedef struct e8m0_block { int element; uint32_t x[E8M0_VALUES]; uint16_t y[4][E8M0_VALUES]; } e8m0_block;")
print("static const e8m0_block e8m0_blocks[] = {")
for number, element in enumerate(ELEMENTS):
    for amax in AMAX:
        x = torch.tensor(amax) * torch.tensor(SHARES[number])
        rows = []
        for mode in MODES:
            y = MXTensor.to_mx(x.repeat(8)[None], element, 32, mode).dequantize(torch.float32)[0, :4]
            low = y.bfloat16()
            if not torch.isinf(y).any() and (low.float() != y).any():
                sys.exit(f"{element} {amax} {mode}: bf16 does not hold {y}")
            rows.append(hexes(v & 0xFFFF for v in low.view(torch.int16).tolist()))
        bits = hexes(v & 0xFFFFFFFF for v in x.view(torch.int32).tolist())
        print("    { %d, { %s }, { { %s } } }," % (number, bits, " }, { ".join(rows)))
print("};")
print("enum { E8M0_BLOCKS = sizeof e8m0_blocks / sizeof e8m0_blocks[0] };")
