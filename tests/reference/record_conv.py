#!/usr/bin/env python3
"""record_conv.py - convolutions, pooling and resizing of torch.nn.functional in f64: tests/reference/conv.h.

    python3 tests/reference/record_conv.py >tests/reference/conv.h

A case is a row; its numbers stand in one array: the result, then the gradients of x, w and the bias for the sum of the
result times a given slope, then the indices. tests/support/window_cases.h reads them and makes the same inputs.
"""
import torch
import torch.nn.functional as F

KINDS = ("conv", "transpose", "max", "avg", "adaptive_max", "adaptive_avg", "nearest", "exact", "linear", "area",
         "shuffle", "unshuffle", "unpool")
state = 1


def numbers(*shape):
    """As `window_fill` of tests/support/window_cases.h: sixteenths between -1 and 1."""
    global state
    out = []
    for _ in range(torch.Size(shape).numel()):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        out.append(int(16 * ((state >> 8) / 8388608.0 - 1.0)) / 16)
    return torch.tensor(out, dtype=torch.float64).reshape(shape)


def conv(x, w, **d):
    return dict(kind="conv", x=x, w=w, **d)


def transpose(x, w, **d):
    return dict(kind="transpose", x=x, w=w, **d)


def pool(kind, x, size, **d):
    return dict(kind=kind, x=x, size=size, **d)


def resize(kind, x, size=(), scale=(), **d):
    return dict(kind=kind, x=x, size=size, scale=scale, **d)


CASES = [
    conv((2, 2, 7), (3, 2, 3), stride=(2,), padding=(1,)),
    conv((1, 4, 9), (4, 2, 2), dilation=(3,), groups=2, bias=1),
    conv((2, 2, 6), (2, 1, 4), padding=(-1,), groups=2),
    conv((1, 2, 4, 5), (3, 2, 3, 3), padding=(1, 1), bias=1),
    conv((1, 2, 5, 7), (2, 2, 2, 3), stride=(3, 2), padding=(2, 1), dilation=(2, 1)),
    conv((1, 2, 5, 4), (2, 2, 2, 3), padding=(-1, -1), dilation=(1, 2)),
    conv((2, 3, 3, 3), (2, 3, 1, 1), bias=1),
    conv((1, 3, 5, 5), (2, 3, 1, 1), stride=(2, 3)),
    conv((1, 2, 3, 3), (2, 2, 1, 1), padding=(1, 2)),
    conv((1, 3, 6, 6), (3, 1, 2, 2), stride=(4, 5), groups=3),
    conv((1, 2, 3, 4, 5), (2, 2, 2, 3, 2), stride=(1, 2, 2), padding=(1, 1, 0), bias=1),
    conv((1, 4, 4, 3, 3), (2, 2, 2, 2, 2), dilation=(2, 1, 1), groups=2),
    transpose((2, 2, 4), (2, 3, 3), stride=(2,), padding=(1,), more=(1,), bias=1),
    transpose((1, 2, 3), (2, 2, 2), stride=(1,), dilation=(3,), more=(2,)),
    transpose((1, 4, 5), (4, 2, 3), groups=2, padding=(1,)),
    transpose((1, 2, 3, 4), (2, 2, 3, 2), stride=(2, 3), padding=(1, 0), more=(1, 2), bias=1),
    transpose((1, 2, 3, 3), (2, 1, 2, 3), stride=(2, 1), dilation=(3, 2), more=(2, 1), groups=2),
    transpose((1, 2, 3, 3), (2, 3, 3, 3), padding=(1, 1)),
    transpose((2, 4, 1, 3), (4, 1, 3, 3), stride=(2, 2), groups=4),
    transpose((1, 2, 2, 2, 3), (2, 2, 2, 2, 2), stride=(2, 1, 2), more=(1, 0, 0), bias=1),
    pool("max", (2, 2, 9), (3,), stride=(2,), padding=(1,)),
    pool("max", (1, 2, 8), (3,), stride=(3,), ceil=1),
    pool("max", (1, 2, 6, 7), (2, 3), stride=(2, 1), padding=(1, 1), ceil=1),
    pool("max", (1, 2, 7, 7), (3, 2), dilation=(2, 3), padding=(1, 1), stride=(2, 2)),
    pool("max", (2, 1, 5, 5), (2, 2)),
    pool("max", (1, 1, 5, 4), (1, 2), stride=(3, 3), ceil=1),
    pool("max", (1, 2, 3, 4, 5), (2, 2, 3), stride=(1, 2, 2), padding=(1, 0, 1)),
    pool("avg", (2, 2, 9), (3,), stride=(2,), padding=(1,)),
    pool("avg", (1, 2, 8), (3,), ceil=1, padding=(1,)),
    pool("avg", (1, 2, 6, 7), (2, 3), stride=(2, 1), padding=(1, 1), image_only=1),
    pool("avg", (1, 2, 6, 7), (3, 2), stride=(2, 3), padding=(1, 1), ceil=1),
    pool("avg", (1, 2, 6, 7), (3, 2), stride=(2, 3), padding=(1, 1), ceil=1, image_only=1),
    pool("avg", (1, 2, 5, 5), (2, 2), divisor=3, stride=(3, 3), ceil=1),
    pool("avg", (1, 1, 3, 4, 5), (2, 2, 3), stride=(2, 2, 2), padding=(1, 1, 1), image_only=1),
    pool("adaptive_max", (1, 2, 7), (3,)),
    pool("adaptive_max", (1, 2, 5, 7), (3, 4)),
    pool("adaptive_max", (1, 1, 3, 4, 5), (2, 2, 3)),
    pool("adaptive_avg", (1, 2, 7), (3,)),
    pool("adaptive_avg", (1, 2, 5, 7), (3, 4)),
    pool("adaptive_avg", (2, 2, 4, 3), (1, 1)),
    pool("adaptive_avg", (1, 1, 3, 4, 5), (2, 5, 3)),
    resize("nearest", (1, 2, 5), (7,)),
    resize("nearest", (1, 2, 4, 5), (7, 3)),
    resize("nearest", (1, 2, 4, 5), scale=(1.7, 0.6)),
    resize("exact", (1, 2, 4, 5), (7, 3)),
    resize("nearest", (1, 1, 2, 3, 2), (3, 3, 5)),
    resize("linear", (1, 2, 5), (8,)),
    resize("linear", (1, 2, 3, 4), (6, 8)),
    resize("linear", (1, 2, 3, 4), (5, 7), corners=1),
    resize("linear", (1, 2, 6, 5), (4, 1)),
    resize("linear", (1, 1, 6, 5), (4, 1), corners=1),
    resize("linear", (1, 2, 4, 5), scale=(1.7, 0.6)),
    resize("linear", (1, 1, 2, 3, 3), (3, 4, 5)),
    resize("area", (1, 2, 5, 7), (3, 9)),
    dict(kind="shuffle", x=(1, 8, 2, 3), factor=2),
    dict(kind="unshuffle", x=(1, 2, 4, 6), factor=2),
    dict(kind="unpool", x=(1, 2, 4, 6), size=(2, 3)),
]
POOLS = {"max": (F.max_pool1d, F.max_pool2d, F.max_pool3d), "avg": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
         "adaptive_max": (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
         "adaptive_avg": (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)}
MODES = {"nearest": "nearest", "exact": "nearest-exact", "area": "area"}


def convolve(c, x, w, b):
    dims = len(c["x"]) - 2
    d = dict(stride=c.get("stride", 1), dilation=c.get("dilation", 1), groups=c.get("groups", 1))
    padding = c.get("padding", 0)
    if c["kind"] == "conv":
        if padding != 0 and padding[0] < 0:
            padding = "same"
        return (F.conv1d, F.conv2d, F.conv3d)[dims - 1](x, w, b, padding=padding, **d)
    f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    return f(x, w, b, padding=padding, output_padding=c.get("more", 0), **d)


def run(c, x, w, b):
    """The result, and indices or None."""
    kind, dims = c["kind"], len(c["x"]) - 2
    if kind in ("conv", "transpose"):
        return convolve(c, x, w, b), None
    if kind == "max":
        return POOLS[kind][dims - 1](x, c["size"], c.get("stride"), c.get("padding", 0), c.get("dilation", 1),
                                     bool(c.get("ceil")), True)
    if kind == "avg":
        more = {"divisor_override": c["divisor"]} if "divisor" in c else {}
        return POOLS[kind][dims - 1](x, c["size"], c.get("stride"), c.get("padding", 0), bool(c.get("ceil")),
                                     not c.get("image_only"), **more), None
    if kind == "adaptive_max":
        return POOLS[kind][dims - 1](x, c["size"], True)
    if kind == "adaptive_avg":
        return POOLS[kind][dims - 1](x, c["size"]), None
    if kind == "shuffle":
        return F.pixel_shuffle(x, c["factor"]), None
    if kind == "unshuffle":
        return F.pixel_unshuffle(x, c["factor"]), None
    if kind == "unpool":                            # of its own max_pool2d
        y, at = F.max_pool2d(x, c["size"], return_indices=True)
        return F.max_unpool2d(y, at, c["size"], output_size=c["x"][2:]), None
    mode = MODES.get(kind) or ("linear", "bilinear", "trilinear")[dims - 1]
    corners = {"align_corners": bool(c.get("corners"))} if kind == "linear" else {}
    return F.interpolate(x, size=c["size"] or None, scale_factor=c["scale"] or None, mode=mode, **corners), None


def row(values, n):
    values = list(values) + [0] * (n - len(values))
    return "{ %s }" % ", ".join("%g" % v for v in values)


def main():
    rows, data = [], []
    global state
    for c in CASES:
        state = 1
        x = numbers(*c["x"]).requires_grad_()
        w = numbers(*c["w"]).requires_grad_() if "w" in c else None
        width = 0
        if c.get("bias"):
            width = c["w"][0] if c["kind"] == "conv" else c["w"][1] * c.get("groups", 1)
        b = numbers(width).requires_grad_() if width else None
        y, at = run(c, x, w, b)
        (y * numbers(*y.shape)).sum().backward()
        parts = [y.detach(), x.grad] + [t.grad for t in (w, b) if t is not None] + ([at] if at is not None else [])
        rows.append("{ %d, %d, %s, %s, %d, %s, %s, %s, %s, %s, %s, %d, %d, %d, %d, %d, %d, %s, %d }" % (
            KINDS.index(c["kind"]), len(c["x"]), row(c["x"], 5), row(c.get("w", ()), 5), width,
            row(c.get("size", ()), 3), row(c.get("stride", ()), 3), row(c.get("padding", ()), 3),
            row(c.get("dilation", ()), 3), row(c.get("more", ()), 3), row(c.get("scale", ()), 3), c.get("groups", 0),
            c.get("ceil", 0), c.get("image_only", 0), c.get("divisor", 0), c.get("corners", 0), c.get("factor", 0),
            row(y.shape, 5), len(data)))
        for part in parts:
            data += part.flatten().tolist()
    print("/* conv.h - convolutions, pooling and resizing of PyTorch %s in f64, recorded by record_conv.py." %
          torch.__version__.split("+")[0])
    print(" * SPDX-License-Identifier: MIT OR Unlicense */")
    print("enum { " + ", ".join("CASE_" + k.upper() for k in KINDS) + " };")
    print("typedef struct window_case {")
    print("    int    kind, rank, x[5], w[5], bias, size[3], stride[3], padding[3], dilation[3], more[3];")
    print("    double scale[3];")
    print("    int    groups, ceil, image_only, divisor, corners, factor, y[5], first;")
    print("} window_case;")
    print("static const window_case window_cases[] = {")
    print(",\n".join("    " + r for r in rows))
    print("};")
    print("static const double window_numbers[] = {")
    texts = ["%.8g" % v for v in data]
    line = "   "
    for text in texts:
        if len(line) + len(text) > 117:
            print(line)
            line = "   "
        line += " " + text + ","
    print(line.rstrip(","))
    print("};")


main()
