"""Records optimizer steps for test_reference.c: python3 record_optimizers.py > optimizers.h

Each case starts from the same weights and sees the same gradients (generate.py). The
parameters after each step are recorded from float64, the truth, and from PyTorch's fused
implementation in float32, whose distance shows how far rounding alone goes.
Gradients span 2^-24 to 2^0, so that eps matters. Then clip_grad_norm_.
SPDX-License-Identifier: MIT OR Unlicense"""
import numpy as np
import torch
from generate import Generator, array, header, number

COUNT, STEPS = 8, 6
# name, kind, lr, beta1 | momentum, beta2 | dampening, eps, weight_decay, nesterov, max_norm
CASES = [
    ("adamw_default", "adamw", 1e-3, 0.9, 0.999, 1e-8, 0.01, 0, 0.0),
    ("adamw_nanogpt", "adamw", 6e-2, 0.9, 0.95, 1e-8, 0.1, 0, 1.0),
    ("adamw_beta1_0", "adamw", 1e-2, 0.0, 0.999, 1e-8, 0.01, 0, 0.0),
    ("adamw_betas_0", "adamw", 1e-2, 0.0, 0.0, 1e-3, 0.0, 0, 0.0),
    ("adamw_eps_0", "adamw", 1e-2, 0.9, 0.99, 0.0, 0.5, 0, 0.0),
    ("adamw_eps_large", "adamw", 1e-1, 0.8, 0.9, 1e-2, 0.01, 0, 0.25),
    ("adam_default", "adam", 1e-3, 0.9, 0.999, 1e-8, 0.0, 0, 0.0),
    ("adam_decay", "adam", 1e-2, 0.9, 0.99, 1e-6, 0.1, 0, 0.0),
    ("sgd_plain", "sgd", 1e-1, 0.0, 0.0, 0.0, 0.0, 0, 0.0),
    ("sgd_decay", "sgd", 1e-1, 0.0, 0.0, 0.0, 0.1, 0, 0.5),
    ("sgd_momentum", "sgd", 1e-1, 0.9, 0.0, 0.0, 0.0, 0, 0.0),
    ("sgd_dampening", "sgd", 1e-1, 0.9, 0.5, 0.0, 0.01, 0, 0.0),
    ("sgd_nesterov", "sgd", 1e-1, 0.9, 0.0, 0.0, 0.01, 1, 1.0),
]


def gradient(g):
    return g.fill(1.0, COUNT) * np.float32(2.0) ** -g.ints(25, COUNT).astype(np.float32)


def optimizer(case, p, **how):
    _, kind, lr, a, b, eps, decay, nesterov, _ = case
    if kind == "sgd":
        return torch.optim.SGD(p, lr=lr, momentum=a, dampening=b, weight_decay=decay,
                               nesterov=bool(nesterov), **how)
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return make(p, lr=lr, betas=(a, b), eps=eps, weight_decay=decay, **how)


def run(case, dtype, **how):
    g = Generator(3)
    p = torch.from_numpy(g.fill(1.0, COUNT)).to(dtype).requires_grad_()
    opt = optimizer(case, [p], **how)
    out = []
    for _ in range(STEPS):
        p.grad = torch.from_numpy(gradient(g)).to(dtype)
        if case[-1]:
            torch.nn.utils.clip_grad_norm_([p], case[-1])
        opt.step()
        out += p.detach().double().tolist()
    return out


def clipping():
    """Two tensors, from far above max_norm to exactly zero."""
    rows = []
    for exponent in (4, 0, -1, -8, -40, None):
        g = Generator(4)
        p = [torch.zeros(5), torch.zeros(3)]
        for a in p:
            grad = torch.from_numpy(g.fill(1.0, a.numel())).double()
            a.grad = (grad * (0.0 if exponent is None else 2.0 ** exponent)).float()
        norm = torch.nn.utils.clip_grad_norm_(p, 1.0)
        rows.append([0.0 if exponent is None else 2.0 ** exponent, float(norm)] +
                    p[0].grad.tolist() + p[1].grad.tolist())
    return rows


def main():
    torch.set_num_threads(1)
    header("record_optimizers.py", "Parameters after each step of several optimizers.")
    print(f"#define OPT_COUNT {COUNT}\n#define OPT_STEPS {STEPS}\n#define OPT_CASES {len(CASES)}")
    print("""
typedef struct opt_case {
    const char *name, *kind;
    double lr, a, b, eps, weight_decay;  /* a, b: betas; of sgd momentum and dampening */
    int nesterov;
    double max_norm;
} opt_case;
static const opt_case opt_cases[OPT_CASES] = {""")
    for c in CASES:
        print(f'    {{ "{c[0]}", "{c[1]}", ' + ", ".join(number(v) for v in c[2:]) + " },")
    print("};")
    exact = [run(c, torch.float64) for c in CASES]
    fused = [run(c, torch.float32, fused=True) for c in CASES]
    plain = [run(c, torch.float32, foreach=False, fused=False) for c in CASES]
    differ = sum(x != y for f, p in zip(fused, plain) for x, y in zip(f, p))
    print("/* [case][step][element] */")
    array("double", "opt_f64", [v for r in exact for v in r], 12)
    print(f"/* Fused; {differ} of these values differ from the plain implementation's. */")
    array("double", "opt_f32", [v for r in fused for v in r])
    print("/* How far those float32 values are from float64, at most, per case. */")
    array("double", "opt_spread", [max(abs(x - y) for x, y in zip(f, e))
                                   for f, e in zip(fused, exact)], 2)
    print("\n/* Per row: factor on the gradients, norm, gradients after clip_grad_norm_ to 1. */")
    rows = clipping()
    print(f"#define OPT_CLIPS {len(rows)}")
    array("double", "opt_clip", [v for r in rows for v in r])
    print("#endif")


if __name__ == "__main__":
    main()
