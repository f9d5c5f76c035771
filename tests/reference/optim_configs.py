"""The configurations of PyTorch's own optimizer tests (optim_db), as fields of mixp_optimizer_desc.
SPDX-License-Identifier: MIT OR Unlicense"""
import types
import sys

import torch

try:
    import expecttest  # noqa: F401: PyTorch's test helpers import it, and these scripts need nothing of it
except ImportError:
    import unittest
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)
from torch.testing._internal.common_optimizers import optim_db  # noqa: E402

# PyTorch's keyword -> mixprec's field.
FIELDS = {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay", "momentum": "momentum",
          "dampening": "dampening", "nesterov": "nesterov", "maximize": "maximize", "alpha": "beta2",
          "amsgrad": "amsgrad", "centered": "centered", "decoupled_weight_decay": "decoupled",
          "lr_decay": "lr_decay", "initial_accumulator_value": "initial_sum",
          "momentum_decay": "momentum_decay"}
KINDS = ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Muon"]
RATES = {"original": 0, "match_rms_adamw": 1, "spectral_unclamped": 2}


def plain(value):
    """A number of a tensor of one element."""
    return value.item() if isinstance(value, torch.Tensor) else value


def configurations(info):
    """PyTorch's keywords of each configuration, those for CUDA included, as plain numbers."""
    for config in info.optim_inputs_func(device="cuda"):
        keywords = {k: plain(v) for k, v in config.kwargs.items() if k != "capturable"}
        if "betas" in keywords:
            keywords["betas"] = tuple(plain(b) for b in keywords["betas"])
        yield config.desc, keywords


def fields(cls, keywords):
    """mixprec's fields: PyTorch's defaults, then the keywords. Muon's own fields begin with muon_."""
    defaults = cls([torch.zeros(2, 2, requires_grad=True)], **keywords).defaults
    out = {}
    for name, value in defaults.items():
        value = plain(value)
        if name == "betas":
            out["beta1"], out["beta2"] = (plain(b) for b in value)
        elif name == "ns_coefficients":
            out["muon_a"], out["muon_b"], out["muon_c"] = value
        elif name == "ns_steps":
            out["muon_iterations"] = value
        elif name == "adjust_lr_fn":
            out["muon_rate"] = RATES[value or "original"]
        elif name in FIELDS and value is not None:
            out[FIELDS[name]] = value
    if cls is torch.optim.AdamW or cls is torch.optim.Adam:
        out.pop("decoupled", None)     # the kind says so
    return {k: float(v) if isinstance(v, float) else int(v) for k, v in out.items()}


def all_configurations():
    """(kind, description, keywords, fields) of every configuration of the kinds that mixprec has."""
    for info in sorted((i for i in optim_db if i.optim_cls.__name__ in KINDS),
                       key=lambda i: KINDS.index(i.optim_cls.__name__)):
        for description, keywords in configurations(info):
            yield info.optim_cls.__name__, description, keywords, fields(info.optim_cls, keywords)
