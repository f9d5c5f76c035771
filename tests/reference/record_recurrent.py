#!/usr/bin/env python3
"""record_recurrent.py - torch.nn.LSTM and GRU in f64, on the numbers of tests/programs/test_recurrent.c: its tables.

    python3 tests/reference/record_recurrent.py
"""
import torch

IN, HIDDEN, BATCH, TIME = 3, 2, 2, 3
state = 1


def numbers(*shape):
    """As `fill` of tests/programs/test_recurrent.c: sixteenths between -1 and 1."""
    global state
    out = []
    for _ in range(torch.Size(shape).numel()):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        u = (state >> 8) / 8388608.0 - 1.0
        out.append(int(16 * u) / 16)
    return torch.tensor(out, dtype=torch.float64).reshape(shape)


def show(name, t):
    print("static const double %s[] = { %s };" % (name, ", ".join("%.15g" % v for v in t.flatten().tolist())))


for name, gates in (("lstm", 4), ("gru", 3)):
    state = 1
    layer = (torch.nn.LSTM if gates == 4 else torch.nn.GRU)(IN, HIDDEN, batch_first=True).double()
    with torch.no_grad():
        layer.weight_ih_l0.copy_(numbers(gates * HIDDEN, IN))
        layer.weight_hh_l0.copy_(numbers(gates * HIDDEN, HIDDEN))
        layer.bias_ih_l0.copy_(numbers(gates * HIDDEN))
        layer.bias_hh_l0.copy_(numbers(gates * HIDDEN))
    x = numbers(BATCH, TIME, IN)
    h = numbers(BATCH, HIDDEN)
    given = (h[None], numbers(BATCH, HIDDEN)[None]) if gates == 4 else h[None]
    y, after = layer(x, given)
    show(name + "_y", y)
    if gates == 4:
        show("lstm_c", after[1])
    y.sin().mean().backward()
    show(name + "_dw", layer.weight_hh_l0.grad)
