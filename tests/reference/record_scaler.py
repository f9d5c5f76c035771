"""Records loss scaling for test_reference.c: python3 record_scaler.py > scaler.h

First the rule alone, torch._amp_update_scale_, over patterns of clean (.) and overflowed (x)
steps. Then torch.amp.GradScaler with two optimizers, each with one parameter.
SPDX-License-Identifier: MIT OR Unlicense"""
import numpy as np
import torch
from generate import Generator, array, header, number

COUNT = 4           # elements in each of the two parameters
# scale, growth, backoff, interval, steps (a number: pseudo-random), share of overflows / 256
RULES = [
    (4.0, 2.0, 0.25, 2, "..x", 0),
    (128.0, 2.0, 0.5, 1, "..x.", 0),
    (128.0, 2.0, 0.5, 1, "x...", 0),
    (2.0 ** 124, 16.0, 0.5, 1, "..x", 0),       # growth to infinity: the scale stays
    (65536.0, 2.0, 0.5, 2000, 12, 64),
    (65536.0, 2.0, 0.5, 1, 60, 128),
    (65536.0, 2.0, 0.5, 3, 60, 48),
    (65536.0, 2.0, 0.5, 20, 60, 8),
    (1024.0, 1.7, 0.3, 2, 60, 40),              # inexact factors
    (3.0, 1.001, 0.999, 1, 60, 100),
    (2.0 ** -10, 8.0, 0.125, 4, 60, 40),
]
# name, init, interval, steps, batches a step, overflow at, in which, max_norm, unscale first
RUNS = [
    ("clean", 128.0, 1, 4, 1, -1, 0, 0.0, 0),
    ("one_skip", 128.0, 1, 4, 1, 2, 1, 0.0, 0),
    ("one_skip_unscaled", 128.0, 1, 4, 1, 2, 1, 0.0, 1),
    ("first_skips", 128.0, 1, 4, 1, 0, 0, 0.0, 0),
    ("accumulate", 128.0, 1, 4, 2, -1, 0, 0.0, 0),
    ("clip", 128.0, 2, 6, 1, 3, 0, 0.25, 1),
    ("default", 65536.0, 2000, 5, 1, 1, 1, 0.0, 0),
]


def rule(scale, growth, backoff, interval, steps, share, seed):
    if not isinstance(steps, str):
        g = Generator(100 + seed)
        steps = "".join("x" if g.next() >> 24 < share else "." for _ in range(steps))
    growth, backoff = float(np.float32(growth)), float(np.float32(backoff))  # mixprec's type
    s, t = torch.tensor([scale], dtype=torch.float32), torch.zeros(1, dtype=torch.int32)
    out = []
    for c in steps:
        found = torch.tensor([float(c == "x")])
        torch._amp_update_scale_(s, t, found, growth, backoff, interval)
        out.append((int(s.view(torch.int32)), int(t)))
    return steps, out


def run(_, init, interval, steps, batches, bad_step, bad_in, max_norm, unscale_first):
    """Gradients are set, scaled, as a backward pass would."""
    g = Generator(5)
    params = [torch.from_numpy(g.fill(1.0, COUNT)).requires_grad_() for _ in range(2)]
    opts = [torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1, fused=False, foreach=False)
            for p in params]
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval)
    scaler.scale(torch.zeros(1))
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = torch.zeros(COUNT)
            for _ in range(batches):
                p.grad += torch.from_numpy(g.fill(1.0, COUNT)) * scaler.get_scale()
            if step == bad_step and i == bad_in:
                p.grad[2] = float("inf")
        for p, opt in zip(params, opts):
            if unscale_first:
                scaler.unscale_(opt)
            if max_norm:
                torch.nn.utils.clip_grad_norm_([p], max_norm)
        for opt in opts:
            scaler.step(opt)
        scaler.update()
    saved = scaler.state_dict()
    return ([saved["scale"], float(saved["_growth_tracker"])] +
            [float(opt.state[p]["step"]) for p, opt in zip(params, opts)] +
            params[0].tolist() + params[1].tolist())


def main():
    header("record_scaler.py", "Sequences of loss scales, and small training runs.")
    print("typedef struct scaler_rule_case {\n    float scale, growth, backoff;\n"
          "    int interval;\n    const char *steps;\n} scaler_rule_case;")
    rules = [rule(*r, i) for i, r in enumerate(RULES)]
    print(f"#define SCALER_RULES {len(RULES)}")
    print("static const scaler_rule_case scaler_rules[SCALER_RULES] = {")
    for r, (steps, _) in zip(RULES, rules):
        print("    { " + ", ".join(number(np.float64(v)) + "f" for v in r[:3]) + f", {r[3]},")
        print(f'      "{steps}" }},')
    print("};\n/* After each step of each case, one by one: the scale's bits, the tracker. */")
    array("int", "scaler_bits", [b for _, out in rules for b, _ in out])
    array("int", "scaler_tracker", [t for _, out in rules for _, t in out])

    print("""
typedef struct scaler_run {
    const char *name;
    float init;
    int interval, steps, batches, bad_step, bad_in;
    double max_norm;
    int unscale_first;
    double want[12];    /* scale, tracker, steps of each optimizer, the two parameters */
} scaler_run;""")
    print(f"#define SCALER_COUNT {COUNT}\n#define SCALER_RUNS {len(RUNS)}")
    print("static const scaler_run scaler_runs[SCALER_RUNS] = {")
    for r in RUNS:
        want = [number(v) for v in run(*r)]
        print(f'    {{ "{r[0]}", {r[1]}f, ' + ", ".join(number(v) for v in r[2:]) + ",")
        print("      { " + ", ".join(want[:6]) + ",\n        " + ", ".join(want[6:]) + " } },")
    print("};\n#endif")


if __name__ == "__main__":
    main()
