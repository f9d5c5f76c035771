"""Records Muon and RMSprop for test_muon.c: python3 record_muon.py > muon.h

Muon: weights after 100 steps of torch.optim.Muon, as it is, whose Newton-Schulz iteration is in
bf16, and with the same iteration in float32. Every matrix starts from the same numbers and sees the
same gradients (generate.py), whatever the case. RMSprop: weights after 40 steps.
SPDX-License-Identifier: MIT OR Unlicense"""
import numpy as np
import torch
from generate import Generator, array, header, number

STEPS, RMS_COUNT, RMS_STEPS = 100, 16, 40
SHAPES = [(8, 12), (14, 6), (9, 9)]
# name, lr, momentum, weight_decay, nesterov, adjust_lr_fn
CASES = [
    ("default", 1e-2, 0.95, 0.1, True, "original"),
    ("match_rms", 1e-2, 0.9, 0.1, True, "match_rms_adamw"),
    ("plain", 1e-2, 0.3, 0.0, False, "original"),
    ("spectral", 1e-2, 0.95, 0.1, True, "spectral_unclamped"),
]
RATES = ["original", "match_rms_adamw", "spectral_unclamped"]     # of mixp_muon_rate
# lr, alpha, eps, weight_decay, momentum
RMS_CASES = [(1e-2, 0.99, 1e-8, 0.0, 0.0), (1e-2, 0.9, 1e-3, 0.1, 0.9)]


def in_float32(grad, ns_coefficients, ns_steps, eps):
    """PyTorch's iteration, without its bfloat16."""
    a, b, c = ns_coefficients
    x = grad.to(torch.float32, copy=True)
    if grad.size(0) > grad.size(1):
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if grad.size(0) > grad.size(1) else x


def muon(case):
    _, lr, momentum, decay, nesterov, adjust = case
    g = Generator(7)
    params = [torch.from_numpy(g.fill(1.0, *s)).requires_grad_() for s in SHAPES]
    opt = torch.optim.Muon(params, lr=lr, momentum=momentum, weight_decay=decay,
                           nesterov=nesterov, adjust_lr_fn=adjust)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.from_numpy(g.fill(1.0, *p.shape))
        opt.step()
    return np.concatenate([p.detach().numpy().ravel() for p in params])


def rmsprop(case):
    lr, alpha, eps, decay, momentum = case
    g = Generator(9)
    p = torch.from_numpy(g.fill(1.0, RMS_COUNT)).requires_grad_()
    opt = torch.optim.RMSprop([p], lr=lr, alpha=alpha, eps=eps, weight_decay=decay,
                              momentum=momentum)
    for _ in range(RMS_STEPS):
        p.grad = torch.from_numpy(g.fill(1.0, RMS_COUNT))
        opt.step()
    return p.detach().numpy()


header("record_muon.py", "Weights after 100 steps of Muon, and after 40 of RMSprop.")
print(f"#define MUON_STEPS {STEPS}\n#define MUON_CASES {len(CASES)}")
print(f"#define MUON_SHAPES {len(SHAPES)}\n#define MUON_ALL {sum(a * b for a, b in SHAPES)}")
print(f"#define RMS_STEPS {RMS_STEPS}\n#define RMS_COUNT {RMS_COUNT}")
print(f"#define RMS_CASES {len(RMS_CASES)}\n")
print("static const int muon_shapes[MUON_SHAPES][2] = {")
print(",\n".join("    { %d, %d }" % s for s in SHAPES) + "\n};\n")
print("typedef struct muon_case {\n    const char *name;\n    double lr, momentum, decay;\n"
      "    int nesterov, rate;\n} muon_case;")
print("static const muon_case muon_cases[MUON_CASES] = {")
for name, lr, momentum, decay, nesterov, adjust in CASES:
    print(f'    {{ "{name}", {number(lr)}, {number(momentum)}, {number(decay)}, {int(nesterov)}, '
          f'{RATES.index(adjust)} }},')
print("};")
array("double", "muon_bf16", np.concatenate([muon(c) for c in CASES]))
torch.optim._muon._zeropower_via_newtonschulz = in_float32
array("double", "muon_f32", np.concatenate([muon(c) for c in CASES]))
print("\ntypedef struct rms_case { double lr, alpha, eps, decay, momentum; } rms_case;")
print("static const rms_case rms_cases[RMS_CASES] = {")
for case in RMS_CASES:
    print("    { " + ", ".join(number(v) for v in case) + " },")
print("};")
array("double", "rms_after", np.concatenate([rmsprop(c) for c in RMS_CASES]))
print("#endif")
