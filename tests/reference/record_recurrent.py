#!/usr/bin/env python3
"""record_recurrent.py - torch.nn.LSTM, GRU and RNN in f64, on the numbers of tests/programs/test_recurrent.c.

    python3 tests/reference/record_recurrent.py             its tables of one layer
    python3 tests/reference/record_recurrent.py networks    tests/reference/recurrent.h: layers, directions, projections
"""
import sys

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


def layers():
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


# kind, layers, bidirectional, proj, bias, lengths, states given
NETWORKS = [
    ("LSTM", 2, 0, 0, 1, None, 1), ("LSTM", 1, 1, 0, 1, None, 1), ("LSTM", 2, 1, 0, 0, (3, 2), 0),
    ("LSTM", 2, 1, 1, 1, None, 1), ("LSTM", 1, 0, 1, 0, (1, 3), 1), ("GRU", 2, 1, 0, 1, None, 0),
    ("GRU", 1, 1, 0, 1, (3, 1), 1), ("GRU", 3, 0, 0, 0, None, 1), ("TANH", 1, 0, 0, 1, None, 1),
    ("TANH", 2, 1, 0, 1, (2, 3), 1), ("RELU", 2, 1, 0, 1, None, 0), ("RELU", 1, 0, 0, 0, (2, 3), 1),
]
KINDS = ("LSTM", "GRU", "TANH", "RELU")


def network(kind, count, two, proj, bias, lengths, given):
    """The numbers of a network: result, states after, then the gradients of x, states and weights."""
    global state
    state = 1
    options = dict(num_layers=count, bidirectional=bool(two), bias=bool(bias), batch_first=True)
    if kind in ("TANH", "RELU"):
        net = torch.nn.RNN(IN, HIDDEN, nonlinearity=kind.lower(), **options)
    else:
        net = getattr(torch.nn, kind)(IN, HIDDEN, **options, **({"proj_size": proj} if proj else {}))
    net = net.double()
    with torch.no_grad():
        for w in net.parameters():
            w.copy_(numbers(*w.shape))
    lines = count * (1 + two)
    x = numbers(BATCH, TIME, IN).requires_grad_()
    h = numbers(lines, BATCH, proj or HIDDEN).requires_grad_() if given else None
    c = numbers(lines, BATCH, HIDDEN).requires_grad_() if given and kind == "LSTM" else None
    states = None if not given else (h, c) if kind == "LSTM" else h
    if lengths:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, after = net(packed, states)
        y = torch.nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=TIME)[0]
    else:
        y, after = net(x, states)
    y.sin().mean().backward()
    parts = [y.detach()] + [a.detach() for a in (after if kind == "LSTM" else (after,))]
    parts += [t.grad for t in (x, h, c) if t is not None] + [w.grad for w in net.parameters()]
    return [v for part in parts for v in part.flatten().tolist()]


def networks():
    rows, data = [], []
    for n in NETWORKS:
        lengths = n[5] or (0, 0)
        rows.append("    { %d, %d, %d, %d, %d, { %d, %d }, %d, %d }" %
                    (KINDS.index(n[0]), n[1], n[2], n[3], n[4], lengths[0], lengths[1], n[6], len(data)))
        data += network(*n)
    print("/* recurrent.h - torch.nn.LSTM, GRU and RNN of PyTorch %s in f64, recorded by record_recurrent.py." %
          torch.__version__.split("+")[0])
    print(" * SPDX-License-Identifier: MIT OR Unlicense */")
    print("typedef struct network_case { int kind, layers, two, proj, bias, lengths[2], given, first; } network_case;")
    print("static const network_case network_cases[] = {\n" + ",\n".join(rows) + "\n};")
    print("static const double network_numbers[] = {")
    line = "   "
    for v in data:
        text = " %.9g," % v
        if len(line) + len(text) > 118:
            print(line)
            line = "   "
        line += text
    print(line.rstrip(",") + "\n};")


if sys.argv[1:] == ["networks"]:
    networks()
else:
    layers()
