"""generate.h in Python, and how the scripts beside it write C arrays.
SPDX-License-Identifier: MIT OR Unlicense"""
import math
import numpy as np


class Generator:
    def __init__(self, seed):
        self.x = (seed + 1) * 0x9E3779B9 & 0xFFFFFFFF
        for _ in range(8):
            self.next()

    def next(self):
        x = self.x
        x = (x ^ x << 13) & 0xFFFFFFFF
        x ^= x >> 17
        self.x = (x ^ x << 5) & 0xFFFFFFFF
        return self.x

    def fill(self, amplitude, *shape):
        """float32 in [-amplitude, amplitude), 24 bits; amplitude is a power of two."""
        n = math.prod(shape)
        v = np.array([(self.next() >> 8) - 8388608 for _ in range(n)], np.float64)
        return (v * (amplitude / 8388608)).astype(np.float32).reshape(shape)

    def short(self, *shape):
        """float32 in [-2, 2) in steps of 1/64: exact in f32, f16 and bf16."""
        v = [(self.next() >> 24) - 128 for _ in range(math.prod(shape))]
        return (np.array(v, np.float32) / np.float32(64)).reshape(shape)

    def ints(self, below, *shape):
        v = [(self.next() >> 8) % below for _ in range(math.prod(shape))]
        return np.array(v, np.int64).reshape(shape)


def number(v, digits=9):
    if isinstance(v, (int, np.integer)):
        return str(int(v))
    if math.isnan(v) or math.isinf(v):
        return "NAN" if math.isnan(v) else ("-" if v < 0 else "") + "HUGE_VAL"
    text = "%.*g" % (digits, v)
    return text if any(c in text for c in ".e") else text + ".0"


def array(ctype, name, values, digits=9):
    """A C array, wrapped to the width the project uses."""
    values = list(values)
    print(f"static const {ctype} {name}[{len(values)}] = {{")
    line = "   "
    for v in values:
        text = " " + number(v, digits) + ","
        if len(line + text) > 98:
            print(line)
            line = "   "
        line += text
    print(line + "\n};")


def header(script, text):
    import torch
    guard = script.replace("record_", "RECORDED_").replace(".py", "").upper() + "_H"
    print(f"/* {text}\n * Recorded by {script} with PyTorch {torch.__version__.split('+')[0]};"
          f" not edited by hand.\n * SPDX-License-Identifier: MIT OR Unlicense */")
    print(f"#ifndef {guard}\n#define {guard}\n#include <math.h>\n")
