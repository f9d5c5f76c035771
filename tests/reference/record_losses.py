#!/usr/bin/env python3
"""Records losses with options, and their gradients, from PyTorch in f64.

    python3 tests/reference/record_losses.py > tests/reference/losses.h

Inputs are f32 numbers. Each case has the loss's name, its reduction and its options; a result that is
not reduced is weighted by `mix` before the gradients are taken. tests/support/loss_cases.h reads the file.
SPDX-License-Identifier: MIT OR Unlicense
"""
import itertools
import torch
import torch.nn.functional as F

ROWS, COLS = 4, 5
torch.manual_seed(11)
f32 = lambda *shape: torch.randn(*shape).float()
data = {
    "x": f32(ROWS, COLS) * 2,
    "probs": torch.softmax(f32(ROWS, COLS), -1),
    "unit": torch.rand(ROWS, COLS).float() * 0.9 + 0.05,
    "other": f32(ROWS, COLS),
    "third": f32(ROWS, COLS),
    "classes": torch.rand(COLS).float() * 2 + 0.25,
    "weights": torch.rand(ROWS, COLS).float() + 0.5,
    "mix": f32(ROWS, COLS),
    "in": f32(ROWS, 3),
    "w": f32(COLS, 3),
    "b": f32(COLS),
}
ids = torch.tensor([1, 3, 0, 4])
SMOOTHING, BOUND, MARGIN, IGNORED = 0.15, 0.7, 0.4, 3
REDUCTIONS = {"MEAN": "mean", "SUM": "sum", "NONE": "none", "BATCHMEAN": "batchmean"}


def numbers(t, n=ROWS * COLS):
    """Further elements of the C array are 0."""
    flat = [] if t is None else [v + 0.0 for v in t.detach().flatten().tolist()]
    assert len(flat) <= n
    flat = flat or [0.0]
    return "{ " + ", ".join("%.10g" % v for v in flat) + " }"


def leaf(name):
    return data[name].double().requires_grad_(True)


def case(op, reduction, options, loss, x, second):
    """Prints one row: the loss, the gradient of x, and that of the second tensor."""
    mix = data["mix"].double()
    if loss.dim():
        total = (loss * (mix[:, 0] if loss.dim() == 1 else mix)).sum()
    else:
        total = loss
    grads = torch.autograd.grad(total, [x] + ([second] if second is not None else []))
    print('    { "%s", MIXP_REDUCE_%s, %s,\n      %s,\n      %s,\n      %s },' % (
        op, reduction, " | ".join(options) or "0", numbers(loss), numbers(grads[0]),
        numbers(grads[1] if second is not None else None)))


def subsets(*names):
    return [c for n in range(len(names) + 1) for c in itertools.combinations(names, n)]


print("/* losses.h - losses with options, recorded from PyTorch %s in f64 by record_losses.py." %
      torch.__version__.split("+")[0])
print(" * SPDX-License-Identifier: MIT OR Unlicense\n */")
print("enum { LOSS_ROWS = %d, LOSS_COLS = %d, LOSS_COUNT = %d };" % (ROWS, COLS, ROWS * COLS))
print("enum { WEIGHT = 1, SMOOTHING = 2, IGNORE = 4, POS_WEIGHT = 8, PROBS = 16, LOG_TARGET = 32, SWAP = 64, BIAS = 128,")
print("       BOUND = 256, MARGIN = 512 };")
for name, value in (("smoothing", SMOOTHING), ("bound", BOUND), ("margin", MARGIN)):
    print("static const float loss_%s = %sf;" % (name, value))
print("static const int32_t loss_ignored = %d, loss_ids[LOSS_ROWS] = { %s };" % (
    IGNORED, ", ".join(str(i) for i in ids.tolist())))
for name, t in data.items():
    print("static const float loss_%s[] = { %s };" % (name, ", ".join("%.9gf" % v if "." in "%.9g" % v or "e" in "%.9g" % v else "%.9g.0f" % v for v in t.flatten().tolist())))
print("typedef struct loss_case {")
print("    const char *op;\n    mixp_reduction reduction;\n    int options;")
print("    double value[LOSS_COUNT], dx[LOSS_COUNT], dt[LOSS_COUNT];  /* dt: of the second tensor */\n} loss_case;")
print("static const loss_case loss_cases[] = {")
plain = ("MEAN", "SUM", "NONE")
for r in plain:
    for o in subsets("WEIGHT", "SMOOTHING", "IGNORE"):
        kw = dict(weight=data["classes"].double() if "WEIGHT" in o else None,
                  label_smoothing=SMOOTHING if "SMOOTHING" in o else 0.0,
                  ignore_index=IGNORED if "IGNORE" in o else -100, reduction=REDUCTIONS[r])
        x = leaf("x")
        case("cross_entropy", r, o, F.cross_entropy(x, ids, **kw), x, None)
        if "SMOOTHING" not in o:
            x = leaf("x")
            kw.pop("label_smoothing")
            case("nll", r, o, F.nll_loss(x, ids, **kw), x, None)
            kw["label_smoothing"] = 0.0
        for bias in ((), ("BIAS",)):
            x, w = leaf("in"), leaf("w")
            b = data["b"].double() if bias else None
            case("linear_cross_entropy", r, o + bias, F.cross_entropy(F.linear(x, w, b), ids, **kw), x, w)
    for o in subsets("WEIGHT", "SMOOTHING"):
        x, t = leaf("x"), leaf("probs")
        loss = F.cross_entropy(x, t, weight=data["classes"].double() if "WEIGHT" in o else None,
                               label_smoothing=SMOOTHING if "SMOOTHING" in o else 0.0, reduction=REDUCTIONS[r])
        case("cross_entropy", r, o + ("PROBS",), loss, x, t)
    for op, f, kw in (("mse", F.mse_loss, {}), ("l1", F.l1_loss, {}), ("smooth_l1", F.smooth_l1_loss, {}),
                      ("huber", F.huber_loss, {}), ("smooth_l1", F.smooth_l1_loss, {"beta": BOUND}),
                      ("huber", F.huber_loss, {"delta": BOUND})):
        x, t = leaf("x"), leaf("other")
        case(op, r, ("BOUND",) if kw else (), f(x, t, reduction=REDUCTIONS[r], **kw), x, t)
    for o in subsets("WEIGHT", "POS_WEIGHT"):
        x, t = leaf("x"), leaf("unit")
        loss = F.binary_cross_entropy_with_logits(
            x, t, weight=data["weights"].double() if "WEIGHT" in o else None,
            pos_weight=data["classes"].double() if "POS_WEIGHT" in o else None, reduction=REDUCTIONS[r])
        case("bce_with_logits", r, o, loss, x, t)
    for o in subsets("WEIGHT"):
        x, t = leaf("unit"), leaf("probs")
        loss = F.binary_cross_entropy(x, t, weight=data["weights"].double() if o else None, reduction=REDUCTIONS[r])
        case("bce", r, o, loss, x, t)
    for o in subsets("SWAP", "MARGIN"):
        x, t = leaf("x"), leaf("other")
        loss = F.triplet_margin_loss(x, t, data["third"].double(), swap="SWAP" in o,
                                     margin=MARGIN if "MARGIN" in o else 1.0, reduction=REDUCTIONS[r])
        case("triplet_margin", r, o, loss, x, t)
for r in plain + ("BATCHMEAN",):
    for o in subsets("LOG_TARGET"):
        x, t = leaf("x"), leaf("other" if o else "probs")
        case("kl_div", r, o, F.kl_div(x, t, log_target=bool(o), reduction=REDUCTIONS[r]), x, t)
print("};")
