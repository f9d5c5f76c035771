"""PyTorch's schedules, and chains of them, beside the fields of mixp_schedule that say the same.
SPDX-License-Identifier: MIT OR Unlicense"""
import warnings

import torch
from torch.optim import lr_scheduler as s

LR = 0.1
# name; kind; fields; PyTorch's schedule of an optimizer whose lr is `base` times LR.
CASES = [
    ("StepLR", "STEP", {"every": 30, "gamma": 0.3}, lambda o: s.StepLR(o, 30, 0.3)),
    ("MultiStepLR", "MULTI_STEP", {"milestones": [30, 80, 81, 150], "gamma": 0.3},
     lambda o: s.MultiStepLR(o, [30, 80, 81, 150], 0.3)),
    ("MultiStepLR twice", "MULTI_STEP", {"milestones": [40, 90, 90], "gamma": 0.5},
     lambda o: s.MultiStepLR(o, [90, 40, 90], 0.5)),
    ("ExponentialLR", "EXPONENTIAL", {"gamma": 0.97}, lambda o: s.ExponentialLR(o, 0.97)),
    ("CosineAnnealingLR", "COSINE", {"total": 200, "min_factor": 0.05},
     lambda o: s.CosineAnnealingLR(o, 200, eta_min=0.05 * LR)),
    ("CosineAnnealingLR rises again", "WAVE", {"total": 37, "min_factor": 0.05},
     lambda o: s.CosineAnnealingLR(o, 37, eta_min=0.05 * LR)),
    ("CosineAnnealingWarmRestarts", "RESTARTS", {"every": 17, "min_factor": 0.01},
     lambda o: s.CosineAnnealingWarmRestarts(o, 17, eta_min=0.01 * LR)),
    ("CosineAnnealingWarmRestarts T_mult", "RESTARTS", {"every": 7, "growth": 2, "min_factor": 0.01},
     lambda o: s.CosineAnnealingWarmRestarts(o, 7, T_mult=2, eta_min=0.01 * LR)),
    ("PolynomialLR", "POLYNOMIAL", {"total": 150, "power": 0.9}, lambda o: s.PolynomialLR(o, 150, 0.9)),
    ("PolynomialLR 2", "POLYNOMIAL", {"total": 190, "power": 2.0}, lambda o: s.PolynomialLR(o, 190, 2.0)),
    ("PolynomialLR 2.5", "POLYNOMIAL", {"total": 190, "power": 2.5}, lambda o: s.PolynomialLR(o, 190, 2.5)),
    ("PolynomialLR 1", "LINEAR", {"total": 190}, lambda o: s.PolynomialLR(o, 190)),
    ("LinearLR", "CONSTANT", {"warmup": 5, "start_factor": 1 / 3}, lambda o: s.LinearLR(o)),
    ("LinearLR own start", "CONSTANT", {"warmup": 50, "start_factor": 0.01},
     lambda o: s.LinearLR(o, 0.01, 1.0, 50)),
    ("LinearLR down", "LINEAR", {"total": 120, "min_factor": 0.25}, lambda o: s.LinearLR(o, 1.0, 0.25, 120)),
    ("LinearLR between", "LINEAR", {"total": 120, "min_factor": 0.5, "base": 0.8},
     lambda o: s.LinearLR(o, 0.8, 0.4, 120)),
    ("ConstantLR", "MULTI_STEP", {"milestones": [25], "gamma": 4.0, "base": 0.25},
     lambda o: s.ConstantLR(o, 0.25, 25)),
    ("CyclicLR", "CYCLIC", {"every": 20, "min_factor": 0.1, "gamma": 1.0},
     lambda o: s.CyclicLR(o, 0.1 * LR, LR, 20, cycle_momentum=False)),
    ("CyclicLR triangular2", "CYCLIC", {"every": 12, "decay": 18, "min_factor": 0.1, "gamma": 0.5},
     lambda o: s.CyclicLR(o, 0.1 * LR, LR, 12, 18, mode="triangular2", cycle_momentum=False)),
    ("CyclicLR exp_range", "CYCLIC_EXP", {"every": 20, "min_factor": 0.1, "gamma": 0.99},
     lambda o: s.CyclicLR(o, 0.1 * LR, LR, 20, mode="exp_range", gamma=0.99, cycle_momentum=False)),
    ("OneCycleLR", "ONE_CYCLE", {"total": 200, "warmup": 60, "min_factor": 4e-6},
     lambda o: s.OneCycleLR(o, LR, 200, cycle_momentum=False)),
    ("OneCycleLR linear", "ONE_CYCLE", {"total": 200, "warmup": 60, "min_factor": 4e-6, "linear": 1},
     lambda o: s.OneCycleLR(o, LR, 200, anneal_strategy="linear", cycle_momentum=False)),
    ("OneCycleLR fraction", "ONE_CYCLE", {"total": 201, "pct_start": 0.3, "min_factor": 4e-6},
     lambda o: s.OneCycleLR(o, LR, 201, cycle_momentum=False)),
    ("OneCycleLR three_phase", "ONE_CYCLE",
     {"total": 200, "pct_start": 0.33, "min_factor": 0.001, "start_factor": 0.1, "three_phase": 1},
     lambda o: s.OneCycleLR(o, LR, 200, pct_start=0.33, div_factor=10, final_div_factor=100,
                            three_phase=True, cycle_momentum=False)),
    ("OneCycleLR three_phase linear", "ONE_CYCLE",
     {"total": 200, "warmup": 80, "min_factor": 0.001, "start_factor": 0.1, "three_phase": 1, "linear": 1},
     lambda o: s.OneCycleLR(o, LR, 200, pct_start=0.4, div_factor=10, final_div_factor=100,
                            three_phase=True, anneal_strategy="linear", cycle_momentum=False)),
    ("warm-up, cosine", "COSINE", {"warmup": 20, "total": 200, "min_factor": 0.1},
     lambda o: s.SequentialLR(o, [s.LinearLR(o, 1 / 21, 1.0, 20),
                                  s.CosineAnnealingLR(o, 180, eta_min=0.1 * LR)], [20])),
    ("warm-up, stable, decay", "WSD", {"warmup": 10, "total": 190, "decay": 60, "min_factor": 0.2},
     lambda o: s.SequentialLR(o, [s.LinearLR(o, 1 / 11, 1.0, 10), s.ConstantLR(o, 1.0, 1),
                                  s.LinearLR(o, 1.0, 0.2, 60)], [10, 130])),
    ("LambdaLR", "FUNCTION", {}, lambda o: s.LambdaLR(o, own)),
]
FIELDS = ["warmup", "total", "every", "decay", "growth", "linear", "three_phase"]
NUMBERS = ["min_factor", "gamma", "start_factor", "power", "pct_start"]


def own(step):
    """A schedule of one's own, which the tests write again."""
    return 1.0 / (1.0 + 0.05 * step)


def rates(make, steps):
    """The learning rate of each of PyTorch's steps."""
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = make(opt)
        out = []
        for _ in range(steps):
            out.append(opt.param_groups[0]["lr"])
            opt.step()
            if len(out) < steps:
                schedule.step()
    return out
