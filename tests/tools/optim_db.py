#!/usr/bin/env python3
"""optim_db.py - the configurations of PyTorch's own optimizer tests, and its schedules, against the shared library.
SPDX-License-Identifier: MIT OR Unlicense

    make shared && python3 tests/tools/optim_db.py [build/shared]

Needs cffi, numpy and torch: prints a skip and ends with 77 without them. Each configuration of optim_db of the kinds
that mixprec has trains two matrices for 20 steps; the judge is PyTorch in f64. A configuration agrees if its largest
distance from the judge is at most twice that of PyTorch's own f32 plus 6e-8 (Muon: its f32 iteration from a PyTorch
whose iteration is in f32). Each schedule of tests/reference/schedule_cases.py agrees if its 200 rates are within 1e-12
of lr. Prints a line for each, and how many agree; ends with 1 if one does not."""
import logging
import os
import sys
import warnings

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [here, os.path.join(here, "..", "reference")]
try:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    import torch
    import bridge
    import schedule_cases as schedules
    from optim_configs import all_configurations
except ImportError as error:
    print(f"skip PyTorch's optimizers and schedules: {error}\n0 passed, 0 failed, 1 skipped")
    sys.exit(77)

STEPS, SHAPES = 20, ((12, 8), (5, 9))


def exact_iteration(grad, ns_coefficients, ns_steps, eps):
    """PyTorch's iteration of Muon, without its bfloat16."""
    a, b, c = ns_coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


def inputs(dtype):
    generator = torch.Generator().manual_seed(3)
    for shape in SHAPES:
        start = torch.rand(shape, generator=generator) * 2 - 1
        grads = torch.randn((STEPS, *shape), generator=generator)
        shift = torch.randint(0, 20, (STEPS, *shape), generator=generator)
        yield start.to(dtype), (grads * torch.exp2(-shift.float())).to(dtype)


def pytorch(kind, keywords, dtype):
    starts, grads = zip(*inputs(dtype))
    params = [s.clone().requires_grad_() for s in starts]
    opt = getattr(torch.optim, kind)(params, **keywords)
    for step in range(STEPS):
        for p, g in zip(params, grads):
            p.grad = g[step].clone()
        opt.step()
    return [p.detach().double() for p in params]


def ours(m, kind, fields):
    lib, ffi = m.lib, m.ffi
    desc = getattr(lib, f"mixp_{kind.lower()}_defaults")()
    for name, value in fields.items():
        of, name = (desc.muon, name[5:]) if name.startswith("muon_") else (desc, name)
        setattr(of, name, value)
    if kind == "Muon":
        desc.muon.f32 = 1
    ctx = lib.mixp_context_new(ffi.NULL)
    opt = lib.mixp_optimizer_new(ctx, ffi.addressof(desc))
    arrays = [(s.clone().numpy(), torch.empty_like(s).numpy(), g.numpy()) for s, g in inputs(torch.float32)]
    for i, (w, g, _) in enumerate(arrays):
        views = [lib.mixp_view(ctx, f"{n}{i}".encode(), lib.MIXP_F32, 2, list(a.shape), ffi.from_buffer(a))
                 for n, a in (("w", w), ("g", g))]
        if lib.mixp_optimizer_add(opt, *views) != lib.MIXP_OK:
            why = ffi.new("const char **")
            lib.mixp_context_error(ctx, why)
            raise bridge.Refused(ffi.string(why[0]).decode())
    for step in range(STEPS):
        for _, g, all_grads in arrays:
            g[:] = all_grads[step]
        lib.mixp_optimizer_step(opt)
    out = [torch.from_numpy(w.copy()).double() for w, _, _ in arrays]
    lib.mixp_context_free(ctx)
    return out


def distance(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b))


def optimizers(m):
    bad = total = 0
    torch.optim._muon._zeropower_via_newtonschulz = exact_iteration
    for kind, description, keywords, fields in all_configurations():
        exact = pytorch(kind, keywords, torch.float64)
        peer = distance(pytorch(kind, keywords, torch.float32), exact)
        away = distance(ours(m, kind, fields), exact)
        agrees = away <= 2 * peer + 6e-8
        bad, total = bad + (not agrees), total + 1
        print(f"{'ok  ' if agrees else 'FAIL'} {kind}: {description:52} {away:8.1e} from f64; PyTorch's f32 {peer:8.1e}")
    return bad, total


def schedule_of(m, kind, fields, keep):
    s = m.ffi.new("mixp_schedule *")
    s.kind = getattr(m.lib, "MIXP_SCHEDULE_" + kind)
    for name, value in fields.items():
        if name == "milestones":
            s.milestones[0:len(value)] = value
        elif name != "base":
            setattr(s, name, value)
    if kind == "FUNCTION":
        keep.append(m.ffi.callback("double(void *, int64_t)", lambda _, applied: schedules.own(applied)))
        s.factor = keep[-1]
    return s


def rates(m):
    bad = total = 0
    keep = []
    for name, kind, fields, make in schedules.CASES:
        s = schedule_of(m, kind, fields, keep)
        lr = schedules.LR * fields.get("base", 1.0)
        torch_rates = schedules.rates(make, 200)
        away = max(abs(m.lib.mixpi_schedule_lr(s, lr, i) - r) for i, r in enumerate(torch_rates))
        agrees = away <= 1e-12 * schedules.LR
        bad, total = bad + (not agrees), total + 1
        print(f"{'ok  ' if agrees else 'FAIL'} {name:40} {kind:12} {away:8.1e} from PyTorch in 200 steps")
    return bad, total


def main():
    torch.set_num_threads(1)
    m = bridge.Mixprec(sys.argv[1] if len(sys.argv) > 1 else "build/shared", addons=False)
    counts = [optimizers(m), rates(m)]
    bad, total = (sum(c) for c in zip(*counts))
    print(f"{total - bad} passed, {bad} failed, 0 skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
