#!/usr/bin/env python3
"""opinfo.py - PyTorch's own operator database (op_db) against mixprec's shared library.
SPDX-License-Identifier: MIT OR Unlicense

    make shared && python3 tests/tools/opinfo.py [options] [build/shared]
        --only NAME     the entries whose name contains NAME (may be repeated)
        --cap N         at most N samples of an entry in a dtype, taken evenly from all (default 200)
        --seed N        of the samples and directions (default: the day of the year, so that each day tries others)
        --forward       mixp_jvp, and the walk back through its result, instead of values and gradients
        --errors        the inputs at which PyTorch raises an error: "one call" then counts those without an error
        --wrong         prints each sample that is wrong or refused

Needs cffi, numpy, expecttest and torch: prints a skip and ends with 77 without them. The samples are PyTorch's:
sample_inputs and reference_inputs in f32, f16 and bf16, with their extremes, Inf and NaN.

The judge is PyTorch in f64 on the same rounded inputs. A sample's results, and the gradients of all its inputs for a
random weighting of the results, agree with the judge within the tolerances of torch.testing.assert_close for the dtype;
or ("close") their error is at most 4 times PyTorch's own in that dtype, or 2.5 epsilon of the largest value.

A line says how many samples of an entry agree by one call of mixprec or by several, are wrong, are refused with a typed
error, are empty tensors and refused, need an argument without a counterpart, or are dropped: too large, or beyond the
cap. Ends with 1 if a sample is wrong, or if a name of src/pytorch_names.txt that the database has is not an entry.
"""
import argparse
import collections
import itertools
import logging
import os
import re
import sys
import time
import warnings

try:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    import torch
    from torch.utils import _pytree as tree
    from torch.testing._internal.common_methods_invocations import op_db
    import bridge
    from opinfo_entries import ENTRIES, NOT_THERE, Places
except ImportError as error:
    print(f"skip PyTorch's operator database: {error}\n0 passed, 0 failed, 1 skipped")
    sys.exit(77)

TOLERANCE = {torch.float32: (1.3e-6, 1e-5), torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}
TOO_LARGE = 1000000
COLUMNS = ("samples", "one call", "several", "close", "wrong", "refused", "empty", "missing", "not judged", "dropped")

# Differences that the header's comments state, and count as agreeing: where an input is Inf or NaN, or in forward mode.
DOCUMENTED = {
    "nn.functional.elu": "the slope at a NaN is 1",
    "nn.functional.celu": "the slope of elu at a NaN is 1",
    "nn.functional.selu": "the slope of elu at a NaN is 1",
    "logaddexp": "the slopes of logsumexp at an Inf are NaN",
    "nn.functional.silu": "the slope at an Inf is its limit",
    "nn.functional.gelu": "the slope at an Inf is its limit",
    "nn.functional.prelu (forward)": "the derivative at 0 is that of the lower branch, as PyTorch's gradient is",
    "pow (forward)": "0 to the power 0: the derivative is 0, as PyTorch's gradient is",
    "nn.functional.elu (forward)": "the second derivative at 0 is that of the lower branch",
    "clamp": "by tensors it is mixp_maximum and mixp_minimum: at a NaN both operands get the gradient",
}


class Unjudged(Exception):
    """PyTorch has no result in f64 or in the dtype, or its choice among equal elements is free."""


def name_of(op):
    return op.name + ("." + op.variant_test_name if op.variant_test_name else "")


def all_with_gradients(op, sample):
    """Some makers of reference inputs cannot ask for gradients: all floats get one."""
    for t in leaves_of(sample)[0]:
        if op.supports_autograd and is_real(t):
            t.requires_grad_()
    return sample


def samples_of(op, dtype, options, tally):
    """PyTorch's samples by a seed, at most `cap` of them; the tally counts the others. reference_inputs repeats sample_inputs
    where an entry has none of its own."""
    torch.manual_seed(options.seed)
    found = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
    if op.reference_inputs_func is not None:
        more = op.reference_inputs("cpu", dtype, requires_grad=False)
        found = itertools.chain(found, (all_with_gradients(op, sample) for sample in more))
    small = []
    for sample in found:
        if size_of(leaves_of(sample)[0]) <= TOO_LARGE:
            small.append(sample)
        else:
            tally.add("dropped", "too large")
    step = max(1.0, len(small) / options.cap)
    kept = [small[int(i * step)] for i in range(min(len(small), options.cap))]
    tally.count["dropped"] += len(small) - len(kept)
    return kept


def leaves_of(sample):
    return tree.tree_flatten((sample.input, sample.args, sample.kwargs))


def is_real(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def has_gradient(t):
    return is_real(t) and t.requires_grad


def size_of(leaves):
    return sum(t.numel() for t in leaves if isinstance(t, torch.Tensor))


SEED = 0        # of directions and weights: the option's


def weights_for(results):
    """Weights of the results, the same for each side."""
    make = torch.Generator().manual_seed(SEED + 1)
    return [torch.randn(r.shape, generator=make, dtype=torch.float32) if is_real(r) else None for r in results]


def tensors_in(y):
    return [t for t in tree.tree_flatten(y)[0] if isinstance(t, torch.Tensor)]


# --- PyTorch's side ---

def copied(leaves, dtype):
    """Copies of the tensors, those of floats in dtype (None: their own)."""
    def one(t):
        if not isinstance(t, torch.Tensor):
            return t
        to = (dtype or t.dtype) if is_real(t) else t.dtype
        return t.detach().clone().to(to).requires_grad_(t.requires_grad)
    return [one(t) for t in leaves]


def called(op, leaves, spec):
    x, args, kwargs = tree.tree_unflatten(leaves, spec)
    if is_real(x) and x.dtype == torch.float64:     # the options of linear_cross_entropy do not take f64
        kwargs.pop("options", None)
    return tensors_in(op(x, *args, **kwargs))


def gradients(loss, inputs):
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs)]


def weighted(results):
    return [(r.to(torch.promote_types(r.dtype, torch.float32)) * w).sum()
            for r, w in zip(results, weights_for(results)) if w is not None and r.requires_grad]


def of_torch(op, leaves, spec, dtype):
    """The results, and the gradients of the inputs; None if no result depends on one."""
    leaves = copied(leaves, dtype)
    try:
        results = called(op, leaves, spec)
        if not results:
            raise Unjudged("no result")
        losses = weighted(results)
        return results, gradients(sum(losses), [t for t in leaves if has_gradient(t)]) if losses else None
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError) as error:
        raise Unjudged(str(error).split("\n")[0]) from error


# --- our side ---

class Ours:
    """One sample through the bridge."""
    def __init__(self, m, function, leaves, spec):
        m.begin()
        self.m = m
        made = [m.tensor(t, has_gradient(t)) if isinstance(t, torch.Tensor) else t for t in leaves]
        self.inputs = [t for t, of in zip(made, leaves) if has_gradient(of)]
        x, args, kwargs = tree.tree_unflatten(made, spec)
        results = function(m, x, *args, **kwargs)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        self.places = [r.dim if isinstance(r, Places) else None for r in results]
        self.results = [r.ids if isinstance(r, Places) else r for r in results]
        self.calls = m.calls

    def values(self):
        return [self.m.read(r) for r in self.results]

    def loss(self, weights):
        """The weighted sum of the results."""
        total = None
        for r, w in zip(self.results, weights):
            if w is None:
                continue
            one = self.m.sum(self.m.mul(r, self.m.tensor(w)), self.m.lib.MIXP_ALL, 0)
            total = one if total is None else self.m.add(total, one)
        return total

    def gradients(self, weights):
        self.m.backward(self.loss(weights))
        return [self.m.grad(t) for t in self.inputs]


# --- the judge ---

def judged(ours, truth, theirs, dtype):
    """equal, close or wrong."""
    if list(ours.shape) != list(truth.shape):
        return "wrong"
    if not truth.is_floating_point():
        return "equal" if torch.equal(ours.to(torch.int64), truth.to(torch.int64)) else "wrong"
    relative, absolute = TOLERANCE[dtype]
    truth, theirs = truth.detach(), theirs.detach().double()
    rounded, truth = truth.to(dtype).double(), truth.double()
    near = (ours - truth).abs() <= absolute + relative * truth.abs()
    near |= (ours == rounded) | (ours == truth) | (ours == theirs) | (ours.isnan() & (truth.isnan() | theirs.isnan()))
    if near.all():
        return "equal"
    finite = ours.isfinite() & truth.isfinite()
    if not (finite | near).all():
        return "wrong"
    ours, truth, theirs = ours[finite], truth[finite], theirs[finite]
    own = torch.where(theirs.isfinite(), (theirs - truth).abs(), torch.zeros_like(truth)).max()
    bound = max(4 * own.item(), 2.5 * torch.finfo(dtype).eps * truth.abs().max().item())
    return "close" if (ours - truth).abs().max().item() <= bound else "wrong"


def worst(kinds):
    return max(kinds, key=("equal", "close", "wrong").index, default="equal")


def all_judged(what, ours, truth, theirs, dtype):
    """The worst of several tensors, and which ones are wrong."""
    if len(ours) != len(truth):
        return "wrong", f"{len(ours)} {what}s, PyTorch {len(truth)}"
    kinds = [judged(o, t, p, dtype) for o, t, p in zip(ours, truth, theirs)]
    return worst(kinds), ", ".join(f"{what} {i}" for i, k in enumerate(kinds) if k == "wrong")


def tied(x, ours, theirs, dim):
    """Do both indices choose equal elements of x along dim?"""
    ours, theirs = (t if t.dim() == x.dim() else t.unsqueeze(dim) for t in (ours.to(torch.int64), theirs))
    if ours.shape != theirs.shape or ours.min() < 0 or ours.max() >= x.shape[dim]:
        return False
    return torch.equal(x.gather(dim, ours), x.gather(dim, theirs))


def settle_ties(ours, sample, values, truth, theirs):
    """Where a choice among equal elements is free, takes PyTorch's. Returns whether there was such a choice."""
    free = False
    for i, dim in enumerate(ours.places):
        if dim is None or i >= len(theirs) or torch.equal(values[i], theirs[i].to(torch.int64)):
            continue
        if tied(sample.input, values[i], theirs[i], dim):
            values[i], free = theirs[i].to(torch.int64), True
    for i, t in enumerate(theirs):      # the judge's indices may differ for the same reason
        if free and not is_real(t):
            truth[i] = t
    return free


def ours_or_zeros(ours, weights, truth):
    """Our gradients. Zeros where mixprec says that the results have none, if PyTorch's are zeros."""
    try:
        return ours.gradients(weights)
    except bridge.Refused as refused:
        if "nothing was recorded" in str(refused) and all(not g.any() for g in truth):
            return [g.double() for g in truth]
        raise


def run_values(m, op, function, sample, dtype):
    leaves, spec = leaves_of(sample)
    truth, true_gradients = of_torch(op, leaves, spec, torch.float64)
    theirs, their_gradients = of_torch(op, leaves, spec, None)
    ours = Ours(m, function, leaves, spec)
    values = ours.values()
    free = settle_ties(ours, sample, values, truth, theirs)
    kind, why = all_judged("result", values, truth, theirs, dtype)
    if true_gradients is not None and their_gradients is not None and not free and kind != "wrong":
        grads = ours_or_zeros(ours, weights_for(theirs), true_gradients)
        second, why = all_judged("gradient", grads, true_gradients, their_gradients, dtype)
        kind = worst((kind, second))
    return kind, why, ours.calls


# --- forward mode ---

def torch_tangent(op, leaves, spec, dtype, direction):
    """The derivative along a direction by two walks back, and the gradients of its weighted sum."""
    leaves = copied(leaves, dtype)
    inputs = [t for t in leaves if has_gradient(t)]
    try:
        y = called(op, leaves, spec)[0]
        ghost = torch.zeros_like(y, requires_grad=True)
        g = torch.autograd.grad(y, inputs[0], ghost, create_graph=True)[0]
        t = torch.autograd.grad(g, ghost, direction.to(g.dtype), create_graph=True)[0]
        losses = weighted([t])
        return t, gradients(losses[0], inputs) if losses else [torch.zeros_like(x) for x in inputs]
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError) as error:
        raise Unjudged(str(error).split("\n")[0]) from error


def run_forward(m, op, function, sample, dtype):
    leaves, spec = leaves_of(sample)
    first = next((t for t in leaves if has_gradient(t)), None)
    results = of_torch(op, leaves, spec, torch.float64)
    if not all(t.isfinite().all() for t in leaves if is_real(t)):
        raise Unjudged("derivatives at Inf and NaN")
    if first is None or results[1] is None or len(results[0]) != 1:
        raise Unjudged("not one result with a gradient")
    direction = torch.randn(first.shape, generator=torch.Generator().manual_seed(SEED + 2), dtype=torch.float32)
    truth, true_gradients = torch_tangent(op, leaves, spec, torch.float64, direction)
    theirs, their_gradients = torch_tangent(op, leaves, spec, None, direction)
    ours = Ours(m, function, leaves, spec)
    tangent = m.jvp(ours.results[0], ours.inputs[0], m.tensor(direction))
    kind, why = all_judged("tangent", [m.read(tangent)], [truth], [theirs], dtype)
    if kind != "wrong" and any(g.abs().max() > 0 for g in true_gradients if g.numel()):
        ours.results = [tangent]
        second, why = all_judged("gradient", ours.gradients(weights_for([theirs])), true_gradients, their_gradients, dtype)
        kind = worst((kind, second))
    return kind, why, ours.calls


# --- an entry ---

class Tally:
    def __init__(self):
        self.count = collections.Counter()
        self.why = collections.Counter()
        self.lines, self.more = [], []      # more: for --wrong

    def add(self, column, why="", line="", more=""):
        self.count[column] += 1
        if more:
            self.more.append(more)
        if why:
            self.why[why] += 1
        if line:
            self.lines.append(line)


def shown(leaves):
    return ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" if isinstance(t, torch.Tensor) else repr(t)[:40] for t in leaves)


def run_sample(m, op, sample, dtype, run, tally):
    """Puts one sample into its column."""
    name, leaves = name_of(op), leaves_of(sample)[0]
    empty = any(isinstance(t, torch.Tensor) and not t.numel() for t in leaves)
    odd = any(is_real(t) and not t.isfinite().all() for t in leaves)
    line = f"    {str(dtype)[6:]}: {shown(leaves)} {list(sample.kwargs)}"
    tally.add("samples")
    try:
        kind, why, calls = run(m, op, ENTRIES[name], sample, dtype)
    except bridge.Missing as missing:
        return tally.add("empty" if empty else "missing", "" if empty else str(missing))
    except bridge.Refused as refused:
        if empty:
            return tally.add("empty")
        return tally.add("refused", str(refused).split(":")[0], more=f"{line}: {refused}")
    except Unjudged as reason:
        return tally.add("not judged", more=f"{line}: {reason}")
    stated = DOCUMENTED.get(name if odd else name + (" (forward)" if run is run_forward else ""))
    if kind == "wrong" and stated:
        kind, why = "close", ""
        tally.why["documented: " + stated] += 1
    if kind == "wrong":
        return tally.add("wrong", "", f"{line}: {why}")
    tally.add("close" if kind == "close" else "one call" if calls <= 1 else "several")


def run_entry(m, op, options, run):
    tally = Tally()
    for dtype in (torch.float32,) if options.forward else TOLERANCE:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        for sample in samples_of(op, dtype, options, tally):
            run_sample(m, op, sample, dtype, run, tally)
    return tally


def run_errors(m, op):
    """What mixprec does at inputs at which PyTorch raises an error."""
    tally = Tally()
    for wrong in op.error_inputs("cpu"):
        leaves, spec = leaves_of(wrong.sample_input)
        tally.add("samples")
        try:
            Ours(m, ENTRIES[name_of(op)], leaves, spec)
        except bridge.Missing as missing:
            tally.add("missing", str(missing))
        except bridge.Refused as refused:
            tally.add("refused", str(refused).split(":")[0])
        except (TypeError, ValueError, IndexError, AttributeError, OverflowError, ZeroDivisionError, StopIteration):
            tally.add("missing", "arguments that C does not have")
        else:
            tally.add("one call", "", f"    no error: {shown(leaves)}: PyTorch: {str(wrong.error_regex)[:90]}")
    return tally


def row(name, tally):
    why = "; ".join(f"{text} {n}" for text, n in tally.why.most_common(6))
    return f"{name:54}" + "".join(f"{tally.count[c] or '-':>11}" for c in COLUMNS) + ("   " + why if why else "")


def names_without_entry():
    """PyTorch's names in src/pytorch_names.txt that the database has, and ENTRIES not."""
    here = os.path.dirname(os.path.abspath(__file__))
    known = {op.name for op in op_db}
    tried = {op.name for op in op_db if name_of(op) in ENTRIES or name_of(op) in NOT_THERE}
    with open(os.path.join(here, "..", "..", "src", "pytorch_names.txt"), encoding="utf-8") as text:
        names = {line.split("|")[0].strip() for line in text if line.startswith("torch.")}
    names = {re.sub(r"^torch\.(Tensor\.)?", "", name) for name in names}
    lost = sorted(name for name in names if name in known and name not in tried)
    for name in lost:
        print(f"{name}: src/pytorch_names.txt has it, tests/tools/opinfo_entries.py not: add an entry")
    return len(lost)


def main():
    parse = argparse.ArgumentParser()
    parse.add_argument("folder", nargs="?", default=os.path.join(os.environ.get("BUILD", "build"), "shared"))
    parse.add_argument("--only", action="append", default=[])
    parse.add_argument("--cap", type=int, default=200)
    parse.add_argument("--seed", type=int, default=time.localtime().tm_yday)
    parse.add_argument("--forward", action="store_true")
    parse.add_argument("--errors", action="store_true")
    parse.add_argument("--wrong", action="store_true")
    options = parse.parse_args()
    global SEED
    SEED = options.seed
    torch.set_num_threads(1)
    m = bridge.Mixprec(options.folder)
    run = run_forward if options.forward else run_values

    print(f"PyTorch {torch.__version__}, " + ("forward mode" if options.forward else "error inputs" if options.errors
                                              else "values and gradients") + f", seed {SEED}")
    print(f"{'entry':54}" + "".join(f"{c:>11}" for c in COLUMNS))
    total, kinds, others = Tally(), collections.Counter(), 0
    for op in op_db:
        name = name_of(op)
        if options.only and not any(part in name for part in options.only):
            continue
        if name not in ENTRIES:
            others += name not in NOT_THERE
            if name in NOT_THERE and not options.forward and not options.errors:
                n = sum(len(samples_of(op, d, options, Tally())) for d in TOLERANCE)
                print(f"{name:54}{n:>11}" + f"{'-':>11}" * 6 + f"{n:>11}{'-':>11}{'-':>11}   no operator: {NOT_THERE[name]}")
                total.count.update({"samples": n, "missing": n})
            continue
        if options.errors and op.error_inputs_func is None:
            continue
        tally = run_errors(m, op) if options.errors else run_entry(m, op, options, run)
        kinds["entries"] += 1
        total.count.update(tally.count)
        print(row(name, tally), flush=True)
        for line in tally.lines + (tally.more if options.wrong else []):
            print(line)
    print(row(f"all {kinds['entries']} entries", total))
    print(f"{others} more entries of the database have no operator in mixprec")
    if not options.only:
        total.count["wrong"] += names_without_entry()
    good = sum(total.count[c] for c in ("one call", "several", "close"))
    print(f"{good} passed, {total.count['wrong']} failed, {total.count['missing'] + total.count['empty']} skipped")
    return 1 if total.count["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
