#!/usr/bin/env python3
"""module_db.py - PyTorch's own module database (module_db) against the recurrent layers of examples/recurrent.h.
SPDX-License-Identifier: MIT OR Unlicense

    make shared && python3 tests/tools/module_db.py [build/shared]

Needs cffi, numpy, expecttest and torch: prints a skip and ends with 77 without them. The samples are PyTorch's, of LSTM,
GRU, RNN and their cells, in f32, in training and in evaluation. The judge is the module in f64: the results and the states
after agree to 1e-6 plus 1e-5 of them, and so do the gradients of the inputs and of all weights. Ends with 1 if one differs.
"""
import logging
import os
import sys
import warnings

try:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    import torch
    from torch.testing._internal.common_modules import module_db
    import bridge
except ImportError as error:
    print(f"skip PyTorch's module database: {error}\n0 passed, 0 failed, 1 skipped")
    sys.exit(77)

NAMES = ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")
KINDS = {"LSTM": 0, "GRU": 1, "tanh": 2, "relu": 3}


def kind_of(module):
    name = type(module).__name__.replace("Cell", "")
    return KINDS[module.nonlinearity if name == "RNN" else name]


class Ours:
    """A module's call through the bridge, with the numbers of `module`, whose parameters and inputs are f64."""
    def __init__(self, m, module, x, states):
        m.begin()
        self.m, self.module, self.kind = m, module, kind_of(module)
        self.given = states is not None
        self.x = self.float(x)
        self.weights = {name: self.float(w) for name, w in module.named_parameters()}
        states = () if states is None else states if isinstance(states, tuple) else (states,)
        self.states = [self.float(s) for s in states]
        self.results = self.cell() if type(module).__name__.endswith("Cell") else self.layers()

    def float(self, t):
        return self.m.tensor(t.detach().float(), True)

    def weight(self, name):
        return self.weights.get(name, self.m.ffi.NULL)

    def group(self, line, suffix):
        for field, name in zip(("w_x", "w_h", "b_x", "b_h"), ("weight_ih", "weight_hh", "bias_ih", "bias_hh")):
            setattr(line, field, self.weight(name + suffix))

    def cell(self):
        """A batch of one where PyTorch has none; zeros where no state is given."""
        m = self.m
        w = m.new("recurrent_weights")
        self.group(w, "")
        batched = self.x.rank == 2
        x = self.x if batched else m.unsqueeze(self.x, 0)
        zeros = [x.shape[0], self.module.hidden_size]
        h = [s if batched else m.unsqueeze(s, 0) for s in self.states]
        h += [m.full(m.lib.MIXP_F32, 2, zeros, 0.0) for _ in range(2 - len(h))]
        if self.kind == 0:
            c = m.ffi.new("mixp_tensor *[1]", [h[1]])
            results = [m.lstm_cell(x, h[0], c, w), c[0]]
        else:
            results = [m.gru_cell(x, h[0], w) if self.kind == 1 else m.rnn_cell(x, h[0], w, self.kind == 3)]
        return [y if batched else m.squeeze(y, 0) for y in results]

    def lines(self):
        for layer in range(self.module.num_layers):
            for way in ("", "_reverse")[:1 + self.module.bidirectional]:
                yield f"_l{layer}{way}"

    def split(self, state, batched):
        """[lines, b, n] as a tensor for each line; [lines, n] without a batch."""
        m, n = self.m, state.shape[0]
        parts = m.several(n)
        for i in range(n):
            part = m.slice(state, 0, i, 1)
            parts[i] = m.squeeze(part, 0) if batched else part
        return parts

    def joined(self, parts, n, batched):
        y = self.m.stack(n, parts, 0)
        return y if batched else self.m.squeeze(y, 1)

    def layers(self):
        m, module = self.m, self.module
        suffixes = list(self.lines())
        w = m.ffi.new("recurrent_weights[]", len(suffixes))
        proj = m.several(len(suffixes))
        for i, suffix in enumerate(suffixes):
            self.group(w[i], suffix)
            proj[i] = self.weight("weight_hr" + suffix)
        batched = self.x.rank == 3
        x = self.x if batched else m.unsqueeze(self.x, 0 if module.batch_first else 1)
        x = x if module.batch_first else m.transpose(x, 0, 1)
        desc = m.new("recurrent_desc", layers=module.num_layers, bidirectional=module.bidirectional,
                     dropout=module.dropout if module.training else 0.0)
        desc.kind = self.kind
        if module.proj_size:
            desc.w_proj = proj
        states = [self.split(s, batched) for s in self.states]
        if not states:
            batch = x.shape[0]
            widths = [module.proj_size or module.hidden_size] + [module.hidden_size] * (self.kind == 0)
            states = [m.ffi.new("mixp_tensor *[]", [m.full(m.lib.MIXP_F32, 2, [batch, n], 0.0) for _ in suffixes])
                      for n in widths]
        y = m.recurrent(x, states[0], states[1] if self.kind == 0 else m.ffi.NULL, w, desc)
        y = y if module.batch_first else m.transpose(y, 0, 1)
        y = y if batched else m.squeeze(y, 0 if module.batch_first else 1)
        return [y] + [self.joined(s, len(suffixes), batched) for s in states]

    def gradients(self):
        m, total = self.m, None
        for y in self.results:
            one = m.mean(m.sin(y), m.lib.MIXP_ALL, 0)
            total = one if total is None else m.add(total, one)
        m.backward(total)
        return [m.grad(t) for t in [self.x] + self.states + list(self.weights.values())]


def flat(y):
    """All tensors of a result."""
    return [t for part in y for t in flat(part)] if isinstance(y, (tuple, list)) else [y]


def of_torch(module, x, states):
    """Results and gradients in f64, in the order of Ours."""
    x = x.detach().clone().requires_grad_()
    given = [] if states is None else [s.detach().clone().requires_grad_() for s in flat([states])]
    args = [] if states is None else [tuple(given) if isinstance(states, tuple) else given[0]]
    y = flat([module(x, *args)])
    loss = sum(t.sin().mean() for t in y)
    inputs = [x] + given + list(module.parameters())
    return y, torch.autograd.grad(loss, inputs, allow_unused=True)


def differs(ours, truth):
    truth = torch.zeros_like(ours) if truth is None else truth.detach().double()
    if list(ours.shape) != list(truth.shape):
        return f"shape {list(ours.shape)}, PyTorch {list(truth.shape)}"
    error = (ours - truth).abs() - 1e-6 - 1e-5 * truth.abs()
    return f"{error.max().item():.1e} too far" if error.numel() and error.max() > 0 else ""


def run_sample(m, info, sample, training):
    torch.manual_seed(0)
    module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double().train(training)
    if training and getattr(module, "dropout", 0) and module.num_layers > 1:
        raise bridge.Missing("dropout while training: other random numbers")
    args = sample.forward_input.args
    if sample.forward_input.kwargs or not isinstance(args[0], torch.Tensor):
        raise bridge.Missing("other arguments")
    x, states = args[0].double(), args[1] if len(args) > 1 else None
    states = tuple(s.double() for s in states) if isinstance(states, tuple) else states
    states = states.double() if isinstance(states, torch.Tensor) else states
    results, gradients = of_torch(module, x, states)
    ours = Ours(m, module, x, states)
    why = [differs(m.read(a), b) for a, b in zip(ours.results, results)]
    if len(ours.results) != len(results):
        why.append(f"{len(ours.results)} results, PyTorch {len(results)}")
    why += [differs(a, b) for a, b in zip(ours.gradients(), gradients)]
    return next((w for w in why if w), "")


def main():
    torch.set_num_threads(1)
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.environ.get("BUILD", "build"), "shared")
    m = bridge.Mixprec(folder)
    agree = wrong = missing = 0
    print(f"PyTorch {torch.__version__}: results, states and gradients")
    for info in module_db:
        name = info.module_cls.__name__
        if name not in NAMES:
            continue
        lines, counts = [], [0, 0, 0]
        for training in ((True, False) if info.train_and_eval_differ else (True,)):
            for sample in info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False,
                                                  training=training):
                shown = f"{sample.constructor_input.args}, {sample.constructor_input.kwargs}"
                try:
                    why = run_sample(m, info, sample, training)
                    counts[1 if why else 0] += 1
                except (bridge.Missing, bridge.Refused) as reason:
                    why = str(reason)
                    counts[2] += 1
                if why:
                    lines.append(f"    {shown}: {why}")
        print(f"{name:10}{counts[0]:5} agree{counts[1]:5} wrong{counts[2]:5} without a counterpart")
        for line in lines:
            print(line)
        agree, wrong, missing = agree + counts[0], wrong + counts[1], missing + counts[2]
    print(f"{agree} passed, {wrong} failed, {missing} skipped")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
