"""Records where torchao puts the scales of 300 x 13 blocks for a GPU's MXFP8 and NVFP4 products, for
test_cuda_lt_narrow.cpp: python3 record_scale_tiles.py > scale_tiles.h
SPDX-License-Identifier: MIT OR Unlicense"""
import torch
import torchao
from torchao.prototype.mx_formats.utils import to_blocked

OUTERS, BLOCKS = 300, 13
ROWS = [0, 1, 31, 32, 33, 63, 64, 95, 96, 127, 128, 129, 160, 255, 256, 299]
COLUMNS = [0, 3, 4, 7, 8, 12]

numbers = torch.arange(1, OUTERS * BLOCKS + 1, dtype=torch.int32).reshape(OUTERS, BLOCKS)
blocked = to_blocked(numbers).tolist()
print(f"/* scale_tiles.h - made by record_scale_tiles.py with torchao {torchao.__version__}. */")
print(f"enum {{ TILED_OUTERS = {OUTERS}, TILED_BLOCKS = {BLOCKS}, TILED_BYTES = {len(blocked)} }};")
print("/* Of some blocks: where its scale is. */")
print("typedef struct scale_place { int outer, block, at; } scale_place;")
print("static const scale_place scale_places[] = {")
for row in ROWS:
    places = ["{ %d, %d, %d }" % (row, c, blocked.index(row * BLOCKS + c + 1)) for c in COLUMNS]
    print("    %s," % ", ".join(places))
print("};")
print("enum { SCALE_PLACES = sizeof scale_places / sizeof scale_places[0] };")
