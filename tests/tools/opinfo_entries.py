"""opinfo_entries.py - what a C program writes for each entry of PyTorch's operator database.
SPDX-License-Identifier: MIT OR Unlicense

An entry takes the bridge, then the arguments of PyTorch's operator, whose tensors are mixprec's. It returns the results.
It raises Missing with the argument that has no counterpart. Indices are returned as Places, so that ties can be judged.
"""
import math

import cffi
import torch

from bridge import Missing, shape

ENTRIES = {}
# Entries of the database that mixprec has no operator for, with the reason.
NOT_THERE = {
    "kthvalue": "mixp_sort, then mixp_slice",
    "nn.functional.bilinear": "two products; rare",
    "nn.functional.triplet_margin_with_distance_loss": "a function as an argument",
    **dict.fromkeys(("arange", "full", "ones", "zeros", "item"), "no input that has a gradient"),
    **dict.fromkeys(("bernoulli", "multinomial", "randn"), "other random numbers"),
    **dict.fromkeys(("masked_select", "nonzero"), "no shape depends on values"),
    **dict.fromkeys(("clone", "to"), "mixp_copy, mixp_cast: see float, half, bfloat16"),
    "median": "mixp_sort, then mixp_slice: see sort",
    "repeat_interleave": "mixp_embedding: see index_select",
}


class Places:
    """Indices along dim of x: a result that PyTorch may give otherwise where elements are equal."""
    def __init__(self, ids, dim):
        self.ids, self.dim = ids, dim


def entry(*names):
    def put(function):
        for name in names:
            ENTRIES[name] = function
        return function
    return put


def is_tensor(x):
    return isinstance(x, cffi.FFI.CData)


def number(v):
    if isinstance(v, complex):
        raise Missing("complex number")
    return float(v)


def is_real(m, t):
    return m.torch_dtypes[t.dtype].is_floating_point


def pair(m, a, b):
    """Operands of arithmetic: integers beside floats become floats."""
    if is_real(m, a) and not is_real(m, b):
        b = m.cast(b, a.dtype)
    elif is_real(m, b) and not is_real(m, a):
        a = m.cast(a, b.dtype)
    return a, b


def scaled(m, x, by):
    return x if by == 1 else m.scale(x, number(by))


def back(m, y, x):
    """y in the dtype of x."""
    return y if y.dtype == x.dtype else m.cast(y, x.dtype)


def constant(m, v):
    return m.full(m.lib.MIXP_F32, 0, m.ffi.NULL, number(v))


def full_like(m, x, v):
    return m.full(x.dtype, x.rank, shape(x), number(v))


def reshaped(m, x, to):
    return m.reshape(x, len(to), list(to))


def axis(x, dim):
    """dim counted from 0; a scalar has dimensions 0 and -1, as in PyTorch."""
    return dim % max(x.rank, 1)


def along_last(m, f, x, dim):
    """f works over the last dimension: here over dim."""
    if x.rank < 2 or axis(x, dim) == x.rank - 1:
        return f(x)
    return m.transpose(f(m.transpose(x, dim, -1)), dim, -1)


def axes(x, dim):
    """The dimensions of a reduction; all of them for None and ()."""
    if not x.rank or dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(x.rank))
    return sorted(axis(x, d) for d in (dim if isinstance(dim, (tuple, list)) else [dim]))


def reduced(m, f, x, dim, keep):
    """f(x, dim, keep) over one dimension, all, or several, which become one."""
    over, kept = axes(x, dim), bool(keep)
    if len(over) == x.rank:
        y = f(x, m.lib.MIXP_ALL, 0)
        return reshaped(m, y, [1] * x.rank) if kept and x.rank else y
    if len(over) == 1:
        return f(x, over[0], int(kept))
    rest = [d for d in range(x.rank) if d not in over]
    y = m.permute(x, x.rank, rest + over)
    y = f(reshaped(m, y, [x.shape[d] for d in rest] + [math.prod(x.shape[d] for d in over)]), len(rest), 0)
    return reshaped(m, y, [1 if d in over else x.shape[d] for d in range(x.rank)]) if kept else y


# --- arithmetic of two ---

@entry("add", "__radd__")
def add(m, x, y, alpha=1):
    if is_tensor(x) and is_tensor(y):
        return m.add(*pair(m, x, scaled(m, y, alpha)))
    return m.add_scalar(x, number(alpha * y)) if is_tensor(x) else m.add_scalar(scaled(m, y, alpha), number(x))


@entry("sub")
def sub(m, x, y, alpha=1):
    if is_tensor(x) and is_tensor(y):
        return m.sub(*pair(m, x, scaled(m, y, alpha)))
    return m.add_scalar(x, number(-alpha * y)) if is_tensor(x) else m.rsub(scaled(m, y, alpha), number(x))


@entry("rsub", "__rsub__")
def rsub(m, x, y, alpha=1):
    return sub(m, y, x, alpha=alpha)


@entry("mul", "__rmul__")
def mul(m, x, y):
    if is_tensor(x) and is_tensor(y):
        return m.mul(*pair(m, x, y))
    return m.scale(x, number(y)) if is_tensor(x) else m.scale(y, number(x))


@entry("div.no_rounding_mode", "true_divide")
def div(m, x, y, rounding_mode=None):
    if is_tensor(x) and is_tensor(y):
        return m.div(*pair(m, x, y))
    if is_tensor(x):
        return back(m, m.div(x, constant(m, y)), x)
    return back(m, m.div(constant(m, x), y), y)


@entry("__rdiv__")
def rdiv(m, x, y):
    return div(m, y, x)


@entry("__rpow__")
def rpow(m, x, y):
    return power(m, y, x)


@entry("pow")
def power(m, x, y):
    if is_tensor(x) and is_tensor(y):
        return m.power(*pair(m, x, y))
    if is_tensor(x):
        return m.pow(x, number(y))
    return m.power(back(m, constant(m, x), y), y)


@entry("atan2")
def atan2(m, x, y):
    return m.atan2(*pair(m, x, y))


for ours, names in {"maximum": ("maximum", "max.binary"), "minimum": ("minimum", "min.binary")}.items():
    entry(*names)(lambda m, x, y, ours=ours: getattr(m, ours)(*pair(m, x, y)))


def compared(m, x, y, name):
    x, y = (t if is_tensor(t) else constant(m, t) for t in (x, y))
    return getattr(m, name)(x, y)


for name in ("eq", "ne", "gt", "ge", "lt", "le"):
    entry(name)(lambda m, x, y, name=name: compared(m, x, y, name))


@entry("clamp_min")
def clamp_min(m, x, low):
    return m.maximum(*pair(m, x, low)) if is_tensor(low) else m.clamp(x, number(low), math.inf)


@entry("clamp_max")
def clamp_max(m, x, high):
    return m.minimum(*pair(m, x, high)) if is_tensor(high) else m.clamp(x, -math.inf, number(high))


@entry("clamp")
def clamp(m, x, min=None, max=None):
    if not is_tensor(min) and not is_tensor(max):
        return m.clamp(x, -math.inf if min is None else number(min), math.inf if max is None else number(max))
    for bound, beside in ((min, clamp_min), (max, clamp_max)):
        x = x if bound is None else beside(m, x, bound)
    return x


@entry("addcmul")
def addcmul(m, x, a, b, value=1):
    return add(m, x, m.mul(*pair(m, a, b)), alpha=value)


@entry("addcdiv")
def addcdiv(m, x, a, b, value=1):
    if m.has("addcdiv"):
        return m.addcdiv(x, a, b, number(value))
    return add(m, x, m.div(*pair(m, a, b)), alpha=value)


@entry("lerp")
def lerp(m, x, y, weight):
    return m.add(x, mul(m, m.sub(y, x), weight))


@entry("where")
def where(m, x, mask, y):
    if not is_tensor(x) and not is_tensor(y):
        raise Missing("two numbers")
    if not is_tensor(x):
        x = back(m, constant(m, x), y)
    if not is_tensor(y):
        y = back(m, constant(m, y), x)
    return m.where(mask, *pair(m, x, y))


@entry("masked_fill")
def masked_fill(m, x, mask, value):
    if is_tensor(value):
        return m.where(mask, value, x)
    return m.masked_fill(x, mask, number(value))


# --- functions of one ---

for name in ("abs", "exp", "log", "log1p", "expm1", "neg", "cos", "sin", "sqrt", "square", "reciprocal", "sigmoid", "tanh",
             "erf", "log2", "log10", "acos", "asin", "tan", "sinh", "cosh", "erfinv"):
    entry(name)(lambda m, x, name=name: getattr(m, name)(x))
entry("atan")(lambda m, x: m.atan2(x, full_like(m, x, 1.0)))
entry("nn.functional.relu")(lambda m, x: m.relu(x))
entry("nn.functional.silu")(lambda m, x: m.silu(x))
entry("rsqrt")(lambda m, x: m.reciprocal(m.sqrt(x)) if x.dtype == m.lib.MIXP_F32 else
               back(m, m.reciprocal(m.sqrt(m.cast(x, m.lib.MIXP_F32))), x))
entry("nn.functional.gelu")(lambda m, x, approximate="none": m.gelu_tanh(x) if approximate == "tanh" else m.gelu(x))
entry("nn.functional.leaky_relu")(lambda m, x, negative_slope=0.01: m.leaky_relu(x, negative_slope))
entry("nn.functional.elu")(lambda m, x, alpha=1.0: m.elu(x, alpha))
entry("nn.functional.celu")(lambda m, x, alpha=1.0: wide(m, x, lambda t: scaled(m, m.elu(scaled(m, t, 1 / alpha), 1.0), alpha)))
entry("nn.functional.relu6")(lambda m, x: m.clamp(x, 0.0, 6.0))
entry("nn.functional.logsigmoid")(lambda m, x: m.neg(m.softplus(m.neg(x), 1.0)))
entry("nn.functional.mish")(lambda m, x: wide(m, x, lambda t: m.mul(t, m.tanh(m.softplus(t, 1.0)))))
entry("nn.functional.softsign")(lambda m, x: wide(m, x, lambda t: m.div(t, m.add_scalar(m.abs(t), 1.0))))


def wide(m, x, f):
    """f in f32, rounded once."""
    return f(x) if x.dtype == m.lib.MIXP_F32 else back(m, f(m.cast(x, m.lib.MIXP_F32)), x)


@entry("nn.functional.hardtanh")
def hardtanh(m, x, min_val=-1.0, max_val=1.0):
    return m.clamp(x, min_val, max_val)


@entry("nn.functional.prelu")
def prelu(m, x, weight):
    return m.prelu(x, weight)


@entry("nn.functional.softplus")
def softplus(m, x, beta=1, threshold=20):
    y = m.softplus(x, number(beta))
    if threshold >= 15:             # beyond the threshold PyTorch gives x: the same numbers from 15 on
        return y
    return m.where(m.gt(scaled(m, x, beta), constant(m, threshold)), x, y)


@entry("nn.functional.glu")
def glu(m, x, dim=-1):
    if x.shape[axis(x, dim)] % 2:
        raise Missing("an odd dimension")
    parts = m.several(2)
    m.split(x, dim, 2, parts)
    return m.mul(parts[0], m.sigmoid(parts[1]))


@entry("nn.functional.dropout")
def dropout(m, x, p=0.5, training=True, inplace=False):
    if training and 0 < p < 1:
        raise Missing("other random numbers")
    return m.dropout(x, p, int(training))


for name, dtype in {"float": "MIXP_F32", "half": "MIXP_F16", "bfloat16": "MIXP_BF16"}.items():
    entry(name)(lambda m, x, memory_format=None, dtype=dtype: m.cast(x, getattr(m.lib, dtype)))


# --- reductions ---

def same_dtype(dtype):
    if dtype is not None:
        raise Missing("dtype=")


@entry("sum")
def sum_(m, x, dim=None, keepdim=False, dtype=None):
    same_dtype(dtype)
    return reduced(m, m.sum, x, dim, keepdim)


@entry("mean")
def mean(m, x, dim=None, keepdim=False, dtype=None):
    same_dtype(dtype)
    return reduced(m, m.mean, x, dim, keepdim)


@entry("prod")
def prod(m, x, dim=None, keepdim=False, dtype=None):
    same_dtype(dtype)
    return reduced(m, m.prod, x, dim, keepdim)


@entry("cumsum")
def cumsum(m, x, dim, dtype=None):
    same_dtype(dtype)
    return m.cumsum(x, dim)


@entry("cumprod")
def cumprod(m, x, dim, dtype=None):
    same_dtype(dtype)
    return m.cumprod(x, dim) if x.rank else reshaped(m, m.cumprod(reshaped(m, x, [1]), 0), [])


def extreme(m, x, dim, keep, largest):
    """amax and amin share the gradient among equal elements: max of all does so, of one dimension not."""
    over = axes(x, dim)
    f = m.max if largest else m.min
    y = reduced(m, lambda t, d, k: f(t, d, k), x, dim, keep)
    if len(over) == x.rank:
        return y
    top = m.detach(reduced(m, f, x, dim, True))
    tied = m.cast(m.eq(x, top), m.lib.MIXP_F32)
    count = reduced(m, m.sum, tied, dim, True)
    y = reduced(m, m.sum, m.masked_fill(m.div(x, count), m.ne(x, top), 0.0), dim, keep)
    return back(m, y, x)


entry("amax")(lambda m, x, dim=None, keepdim=False: extreme(m, x, dim, keepdim, True))
entry("amin")(lambda m, x, dim=None, keepdim=False: extreme(m, x, dim, keepdim, False))
entry("max.reduction_no_dim")(lambda m, x: m.max(x, m.lib.MIXP_ALL, 0))
entry("min.reduction_no_dim")(lambda m, x: m.min(x, m.lib.MIXP_ALL, 0))


def with_index(m, x, dim, keep, value, index):
    if not x.rank:
        return m.reshape(x, 0, m.ffi.NULL), m.full(m.lib.MIXP_I32, 0, m.ffi.NULL, 0)
    return value(x, dim, int(keep)), Places(index(x, dim, int(keep)), dim if keep else None)


entry("max.reduction_with_dim")(lambda m, x, dim, keepdim=False: with_index(m, x, dim, keepdim, m.max, m.argmax))
entry("min.reduction_with_dim")(lambda m, x, dim, keepdim=False: with_index(m, x, dim, keepdim, m.min, m.argmin))
entry("argmax")(lambda m, x, dim=None, keepdim=False: reduced(m, m.argmax, x, dim, keepdim))
entry("argmin")(lambda m, x, dim=None, keepdim=False: reduced(m, m.argmin, x, dim, keepdim))


def spread(m, f, x, dim, unbiased, correction, keepdim):
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    if correction != int(correction):
        raise Missing("correction is not an integer")
    return reduced(m, lambda t, d, k: f(t, d, int(correction), k), x, dim, keepdim)


def spread_entry(name, ours, with_mean):
    def one(m, x, dim=None, unbiased=None, keepdim=False, correction=None):
        y = spread(m, getattr(m, ours), x, dim, unbiased, correction, keepdim)
        return (y, reduced(m, m.mean, x, None if isinstance(dim, bool) else dim, keepdim)) if with_mean else y
    entry(name, name + ".unbiased")(one)


for ours in ("var", "std"):
    spread_entry(ours, ours, False)
    spread_entry(ours + "_mean", ours, True)
entry("logsumexp")(lambda m, x, dim, keepdim=False: reduced(m, m.logsumexp, x, dim, keepdim))


@entry("linalg.vector_norm")
def vector_norm(m, x, ord=2, dim=None, keepdim=False, dtype=None):
    same_dtype(dtype)
    if ord == 2:
        return reduced(m, m.vector_norm, x, dim, keepdim)
    if m.has("norm"):
        return reduced(m, lambda t, d, k: m.norm(t, number(ord), d, k), x, dim, keepdim)
    if ord == 1:
        return reduced(m, m.sum, m.abs(x), dim, keepdim)
    if ord == math.inf:
        return extreme(m, m.abs(x), dim, keepdim, True)
    raise Missing(f"order {ord}")


@entry("norm", "norm.fro", "norm.inf")
def norm(m, x, p="fro", dim=None, keepdim=False, dtype=None):
    return vector_norm(m, x, 2 if p == "fro" else p, dim, keepdim, dtype)


# --- products ---

def times(m, a, b):
    return m.matmul(a, b, 0, 0)


for name in ("matmul", "mm", "bmm", "mv", "dot"):
    entry(name)(times)
entry("__rmatmul__")(lambda m, x, y: times(m, y, x))


@entry("addmm", "addmm.decomposed", "addmv", "baddbmm")
def addmm(m, x, a, b, beta=1, alpha=1):
    y = scaled(m, times(m, a, b), alpha)
    return y if beta == 0 else m.add(scaled(m, x, beta), y)


@entry("outer")
def outer(m, a, b):
    return m.mul(reshaped(m, a, [a.shape[0], 1]), b)


@entry("einsum")
def einsum(m, operands, equation):
    if len(operands) != 2:
        raise Missing(f"{len(operands)} operands")
    return m.einsum(equation.encode(), *operands)


@entry("nn.functional.linear")
def linear(m, x, w, b=None):
    if w.rank == 1:
        y = times(m, x, w)
        return y if b is None else m.add(y, b)
    if b is not None and b.rank != 1:
        return m.add(m.linear(x, w, m.ffi.NULL), b)
    one = x.rank == 1
    y = m.linear(reshaped(m, x, [1, x.shape[0]]) if one else x, w, m.ffi.NULL if b is None else b)
    return reshaped(m, y, [y.shape[1]]) if one else y


@entry("nn.functional.scaled_dot_product_attention")
def attention(m, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if dropout_p:
        raise Missing("dropout: other random numbers")
    if q.rank != k.rank or q.rank != v.rank:
        raise Missing("q, k and v of different ranks")
    if q.rank == 3:
        q, k, v = (m.unsqueeze(t, 1) for t in (q, k, v))
        y = attention(m, q, k, v, attn_mask, 0.0, is_causal, scale)
        return m.squeeze(y, 1)
    if attn_mask is not None and not is_real(m, attn_mask):
        minus = m.full(m.lib.MIXP_F32, attn_mask.rank, shape(attn_mask), -math.inf)
        attn_mask = m.where(attn_mask, constant(m, 0.0), minus)
    desc = m.new("mixp_attention_desc", causal=int(is_causal), scale=scale or 0.0)
    if attn_mask is not None:
        desc.mask = attn_mask
    return m.scaled_dot_product_attention(q, k, v, desc)


# --- rows ---

entry("softmax")(lambda m, x, dim, dtype=None: same_dtype(dtype) or along_last(m, m.softmax, x, dim))
entry("log_softmax")(lambda m, x, dim, dtype=None: same_dtype(dtype) or along_last(m, m.log_softmax, x, dim))
entry("nn.functional.softmin")(lambda m, x, dim, dtype=None: same_dtype(dtype) or along_last(m, m.softmax, m.neg(x), dim))


def norm_over(m, x, dims, weights, f):
    """A norm over the last dimensions: those of the weights; without weights, over their product."""
    dims, given = list(dims), [m.ffi.NULL if w is None else w for w in weights]
    if len(dims) == 1 or any(w is not None for w in weights):
        return f(x, *given)
    lead = shape(x)[:x.rank - len(dims)]
    return reshaped(m, f(reshaped(m, x, lead + [math.prod(dims)]), *given), shape(x))


@entry("nn.functional.layer_norm")
def layer_norm(m, x, dims, weight=None, bias=None, eps=1e-5):
    return norm_over(m, x, dims, (weight, bias), lambda t, w, b: m.layer_norm(t, w, b, eps))


@entry("nn.functional.rms_norm")
def rms_norm(m, x, dims, weight=None, eps=None):
    if eps is None:
        eps = torch.finfo(m.torch_dtypes[x.dtype]).eps
    return norm_over(m, x, dims, (weight,), lambda t, w: m.rms_norm(t, w, eps))


def ends(m, x, f):
    """The add-ons take [batch, channels, height, width]: here [batch, channels, ...]."""
    lead = shape(x)[:2]
    return reshaped(m, f(reshaped(m, x, lead + [1, math.prod(shape(x)[2:])])), shape(x))


@entry("nn.functional.group_norm")
def group_norm(m, x, groups, weight=None, bias=None, eps=1e-5):
    null = m.ffi.NULL
    return ends(m, x, lambda t: m.group_norm(t, groups, null if weight is None else weight,
                                             null if bias is None else bias, eps))


@entry("nn.functional.batch_norm")
def batch_norm(m, x, mean, variance, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    null = m.ffi.NULL
    if not training:
        per = [1, x.shape[1]] + [1] * (x.rank - 2)
        y = m.sub(x, reshaped(m, mean, per))
        y = m.div(y, m.sqrt(m.add_scalar(reshaped(m, variance, per), eps)))
        y = y if weight is None else m.mul(y, reshaped(m, weight, per))
        return y if bias is None else m.add(y, reshaped(m, bias, per))
    one = x.shape[1]
    weight = weight if weight is not None else m.full(m.lib.MIXP_F32, 1, [one], 1.0)
    bias = bias if bias is not None else m.full(m.lib.MIXP_F32, 1, [one], 0.0)
    return ends(m, x, lambda t: m.batch_norm(t, weight, bias, null, 1, eps))


@entry("nn.functional.instance_norm")
def instance_norm(m, x, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5):
    if running_mean is not None or not use_input_stats:
        raise Missing("running statistics")
    return group_norm(m, x, x.shape[1], weight, bias, eps)


@entry("nn.functional.normalize")
def normalize(m, x, p=2.0, dim=1, eps=1e-12):
    n = m.clamp(vector_norm(m, x, p, dim, True), eps, math.inf)
    return back(m, m.div(x, n), x)


@entry("nn.functional.cosine_similarity")
def cosine_similarity(m, a, b, dim=1, eps=1e-8):
    if not a.rank:
        raise Missing("rank 0")
    to = list(torch.broadcast_shapes(shape(a), shape(b)))
    a, b = (t if shape(t) == to else m.expand(t, len(to), to) for t in (a, b))

    def length(t):
        return m.clamp(m.vector_norm(t, dim, 1), eps, math.inf)
    return back(m, m.sum(m.mul(m.div(a, length(a)), m.div(b, length(b))), dim, 0), a)


@entry("nn.functional.pairwise_distance")
def pairwise_distance(m, a, b, p=2.0, eps=1e-6, keepdim=False):
    return vector_norm(m, m.add_scalar(m.sub(a, b), eps), p, -1, keepdim)


# --- shapes ---

entry("reshape", "view")(lambda m, x, to: reshaped(m, x, to))
entry("broadcast_to", "expand")(lambda m, x, to: m.expand(x, len(to), list(to)))
entry("permute")(lambda m, x, dims: m.permute(x, len(dims), [axis(x, d) for d in dims]))
entry("transpose")(lambda m, x, a, b: m.transpose(x, a, b))
entry("t")(lambda m, x: m.transpose(x, 0, 1) if x.rank == 2 else m.reshape(x, x.rank, shape(x)))
entry("unsqueeze")(lambda m, x, dim: m.unsqueeze(x, dim))
entry("select")(lambda m, x, dim, at: m.squeeze(m.slice(x, dim, at, 1), dim))


@entry("movedim")
def movedim(m, x, source, to):
    source, to = ([axis(x, d) for d in (s if isinstance(s, (tuple, list)) else [s])] for s in (source, to))
    dims = [d for d in range(x.rank) if d not in source]
    for at, d in sorted(zip(to, source)):
        dims.insert(at, d)
    return m.permute(x, x.rank, dims)


@entry("squeeze", "squeeze.multiple")
def squeeze(m, x, dim=None):
    if dim is None:
        return m.squeeze(x, m.lib.MIXP_ALL)
    for d in sorted((axis(x, d) for d in (dim if isinstance(dim, (tuple, list)) else [dim])), reverse=True):
        x = m.squeeze(x, d)
    return x


@entry("flatten")
def flatten(m, x, start_dim=0, end_dim=-1):
    if not x.rank:
        return reshaped(m, x, [1])
    first, last, sizes = axis(x, start_dim), axis(x, end_dim), shape(x)
    return reshaped(m, x, sizes[:first] + [math.prod(sizes[first:last + 1])] + sizes[last + 1:])


@entry("unflatten")
def unflatten(m, x, dim, sizes):
    dim, old = axis(x, dim), shape(x)
    known = math.prod(s for s in sizes if s != -1)
    sizes = [old[dim] // known if s == -1 else s for s in sizes]
    return reshaped(m, x, old[:dim] + sizes + old[dim + 1:])


@entry("flip")
def flip(m, x, dims):
    for d in dims:
        x = m.flip(x, d)
    return x


@entry("roll")
def roll(m, x, shifts, dims=None):
    if dims is None or dims == ():
        y = m.roll(reshaped(m, x, [x.count]), shifts if isinstance(shifts, int) else shifts[0], 0)
        return reshaped(m, y, shape(x))
    for s, d in zip(*(v if isinstance(v, (tuple, list)) else [v] for v in (shifts, dims))):
        x = m.roll(x, s, d)
    return x


entry("tril")(lambda m, x, diagonal=0: m.tril(x, diagonal))
entry("triu")(lambda m, x, diagonal=0: m.triu(x, diagonal))


@entry("constant_pad_nd", "nn.functional.pad.constant")
def pad(m, x, sizes, *rest, mode="constant", value=0.0):
    for v in rest:
        value = value if isinstance(v, str) else v
    if min(sizes, default=0) < 0:
        raise Missing("negative padding")
    for i in range(0, len(sizes), 2):
        if sizes[i] or sizes[i + 1]:
            x = m.pad(x, -1 - i // 2, sizes[i], sizes[i + 1], number(value or 0.0))
    return x


def split_to(m, x, dim, sizes):
    parts = m.several(len(sizes))
    m.split_sizes(x, dim, len(sizes), list(sizes), parts)
    return list(parts)


def pieces(n, size):
    return [min(size, n - at) for at in range(0, n, size)]


@entry("split", "split.list_args", "split_with_sizes")
def split(m, x, sizes, dim=0):
    return split_to(m, x, dim, pieces(x.shape[axis(x, dim)], sizes) if isinstance(sizes, int) else sizes)


@entry("chunk")
def chunk(m, x, n, dim=0):
    size = x.shape[axis(x, dim)]
    return split_to(m, x, dim, pieces(size, -(-size // n)))


@entry("unbind")
def unbind(m, x, dim=0):
    n = x.shape[axis(x, dim)]
    return [m.squeeze(t, dim) for t in split_to(m, x, dim, [1] * n)]


@entry("narrow")
def narrow(m, x, dim, start, length):
    if is_tensor(start):
        raise Missing("start is a tensor")
    return m.slice(x, dim, start, length)


def listed(m, tensors):
    return m.ffi.new("mixp_tensor *[]", list(tensors))


@entry("cat", "concat", "concatenate")
def cat(m, tensors, dim=0):
    tensors = [t for t in tensors if not (t.rank == 1 and t.shape[0] == 0)] or tensors[:1]
    return m.concat(len(tensors), listed(m, tensors), dim)


@entry("logaddexp")
def logaddexp(m, x, y):
    x, y = (m.expand(t, len(to), to) for to in [list(torch.broadcast_shapes(shape(x), shape(y)))] for t in (x, y))
    return back(m, m.logsumexp(m.stack(2, listed(m, [x, y]), 0), 0, 0), x)


@entry("cdist")
def cdist(m, x, y, p=2.0, compute_mode=None):
    return m.norm(m.sub(m.unsqueeze(x, -2), m.unsqueeze(y, -3)), number(p), -1, 0)


@entry("repeat")
def repeat(m, x, *times):
    times = list(times[0]) if len(times) == 1 and isinstance(times[0], (tuple, list)) else list(times)
    x = reshaped(m, x, [1] * (len(times) - x.rank) + shape(x))
    for dim, n in enumerate(times):
        if n == 0:
            raise Missing("0 times")
        x = m.concat(n, listed(m, [x] * n), dim)
    return x


def mask(m, x):
    """A mask of 0 and 1."""
    return m.ne(x, constant(m, 0)) if is_real(m, x) else x


entry("isnan")(lambda m, x: m.ne(x, x))
entry("logical_not")(lambda m, x: m.eq(mask(m, x), m.full(mask(m, x).dtype, 0, m.ffi.NULL, 0)))
entry("logical_and")(lambda m, x, y: m.gt(mask(m, x), logical_not(m, mask(m, y))))
entry("logical_or")(lambda m, x, y: m.ge(mask(m, x), logical_not(m, mask(m, y))))
entry("logical_xor")(lambda m, x, y: m.ne(mask(m, x), mask(m, y)))
logical_not = ENTRIES["logical_not"]
entry("nn.functional.selu")(lambda m, x: wide(m, x, lambda t: m.scale(m.elu(t, 1.6732632423543772), 1.0507009873554805)))
entry("stack")(lambda m, tensors, dim=0: m.stack(len(tensors), listed(m, tensors), dim))


# --- by index ---

@entry("gather")
def gather(m, x, dim, ids, sparse_grad=False):
    return m.gather(x, dim, ids)


@entry("take_along_dim")
def take_along_dim(m, x, ids, dim=None):
    if dim is None:
        return m.gather(reshaped(m, x, [x.count]), 0, reshaped(m, ids, [ids.count]))
    to = [ids.shape[i] if i == axis(x, dim) else max(ids.shape[i], x.shape[i]) for i in range(x.rank)]
    wide = [x.shape[i] if i == axis(x, dim) else to[i] for i in range(x.rank)]
    return m.gather(m.expand(x, x.rank, wide) if wide != shape(x) else x, dim,
                    m.expand(ids, ids.rank, to) if to != shape(ids) else ids)


@entry("index_select")
def index_select(m, x, dim, ids):
    if not x.rank:
        return m.gather(x, dim, reshaped(m, ids, []))
    dim, n = axis(x, dim), ids.count
    if dim == 0 and x.rank == 2:
        return m.embedding(x, reshaped(m, ids, [n]))
    to = shape(x)
    to[dim] = n
    return m.gather(x, dim, m.expand(reshaped(m, ids, [n if i == dim else 1 for i in range(x.rank)]), x.rank, to))


@entry("scatter_add")
def scatter_add(m, x, dim, ids, src):
    return m.scatter_add(x, dim, ids, src)


@entry("scatter")
def scatter(m, x, dim, ids, src, reduce=None):
    if reduce is not None:
        raise Missing("reduce=")
    if not is_tensor(src):
        src = m.full(x.dtype, ids.rank, shape(ids), number(src))
    return m.scatter(x, dim, ids, src)


@entry("index_add")
def index_add(m, x, dim, ids, src, alpha=1):
    return m.index_add(x, dim, reshaped(m, ids, [ids.count]), scaled(m, src, alpha))


@entry("searchsorted")
def searchsorted(m, edges, values, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        raise Missing("sorter")
    return m.searchsorted(edges, values, int(right or side == "right"))


def ordered(m, f, dim):
    """The values and the indices of f."""
    ids = m.several(1)
    values = f(ids)
    return values, Places(ids[0], dim)


@entry("sort")
def sort(m, x, dim=-1, descending=False, stable=False):
    return ordered(m, lambda ids: m.sort(x, dim, int(descending), ids), dim)


@entry("argsort")
def argsort(m, x, dim=-1, descending=False, stable=False):
    return sort(m, x, dim, descending)[1]


@entry("topk")
def topk(m, x, k, dim=-1, largest=True, sorted=True):
    return ordered(m, lambda ids: m.topk(x, k, dim, int(largest), ids), dim)


@entry("nn.functional.one_hot")
def one_hot(m, ids, num_classes=-1):
    if num_classes < 0:
        raise Missing("num_classes=-1")
    return m.one_hot(ids, num_classes, m.lib.MIXP_I32)


@entry("nn.functional.embedding")
def embedding(m, table, ids, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False):
    for name, on in {"max_norm": max_norm, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}.items():
        if on:
            raise Missing(name)
    return m.embedding(table, ids) if padding_idx is None else m.embedding_padded(table, ids, padding_idx)


# --- losses ---

def loss_options(m, reduction, **fields):
    """A mixp_loss_desc."""
    kind = getattr(m.lib, "MIXP_REDUCE_" + reduction.upper())
    given = {name: value for name, value in fields.items() if value is not None}
    return m.new("mixp_loss_desc", reduction=kind, **given)


def loss(m, name, x, y, reduction, **fields):
    return m.loss_apply(getattr(m.lib, "MIXP_OP_" + name), x, y, loss_options(m, reduction, **fields))


@entry("nn.functional.mse_loss")
def mse(m, x, y, reduction="mean"):
    return loss(m, "MSE", x, y, reduction)


@entry("nn.functional.l1_loss")
def l1(m, x, y, reduction="mean"):
    return loss(m, "L1", x, y, reduction)


@entry("nn.functional.smooth_l1_loss")
def smooth_l1(m, x, y, reduction="mean", beta=1.0):
    if not beta and reduction == "mean":
        return m.smooth_l1(x, y, 0.0)
    # In a description 0 is the default, 1, so a program that sums losses of beta 0 writes l1.
    return loss(m, "SMOOTH_L1", x, y, reduction, bound=beta) if beta else loss(m, "L1", x, y, reduction)


@entry("nn.functional.huber_loss")
def huber(m, x, y, reduction="mean", delta=1.0):
    return loss(m, "HUBER", x, y, reduction, bound=delta)


@entry("nn.functional.kl_div")
def kl_div(m, x, y, reduction="mean", log_target=False):
    return loss(m, "KL_DIV", x, y, reduction, log_target=int(log_target))


@entry("nn.functional.binary_cross_entropy")
def bce(m, x, y, weight=None, reduction="mean"):
    return loss(m, "BCE", x, y, reduction, weight=weight)


@entry("nn.functional.binary_cross_entropy_with_logits")
def bce_with_logits(m, x, y, weight=None, reduction="mean", pos_weight=None):
    return loss(m, "BCE_WITH_LOGITS", x, y, reduction, weight=weight, pos_weight=pos_weight)


def last(m, x):
    """Logits [batch, classes, ...] as [..., classes]."""
    return x if x.rank < 3 else m.permute(x, x.rank, [0] + list(range(2, x.rank)) + [1])


def ignored(m, targets, ignore_index):
    """The fields for ignore_index, which counts for indices only."""
    return {} if is_real(m, targets) or ignore_index == -100 else {"ignores": 1, "ignore": ignore_index}


@entry("nn.functional.cross_entropy")
def cross_entropy(m, x, targets, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0):
    targets = last(m, targets) if is_real(m, targets) else targets
    return loss(m, "CROSS_ENTROPY", last(m, x), targets, reduction, weight=weight, smoothing=label_smoothing,
                **ignored(m, targets, ignore_index))


@entry("nn.functional.nll_loss")
def nll(m, x, targets, weight=None, ignore_index=-100, reduction="mean"):
    return loss(m, "NLL", last(m, x), targets, reduction, weight=weight, **ignored(m, targets, ignore_index))


@entry("nn.functional.linear_cross_entropy", "nn.functional.linear_cross_entropy.chunked")
def linear_cross_entropy(m, x, w, targets, linear_bias=None, weight=None, reduction="mean", ignore_index=None,
                         label_smoothing=0.0, options=None):
    ignore_index = -100 if ignore_index is None else ignore_index
    if w.rank != 2 or is_real(m, targets):              # the two operators
        lead, size = shape(x)[:-1], shape(w)[:-1]
        bias = m.ffi.NULL if linear_bias is None else reshaped(m, linear_bias, [math.prod(size)])
        flat = reshaped(m, x, [math.prod(lead), x.shape[x.rank - 1]])
        y = m.linear(flat, reshaped(m, w, [math.prod(size), w.shape[w.rank - 1]]), bias)
        return cross_entropy(m, reshaped(m, y, lead + size), targets, weight, reduction, ignore_index, label_smoothing)
    return m.linear_cross_entropy_apply(x, w, targets, loss_options(
        m, reduction, bias=linear_bias, weight=weight, smoothing=label_smoothing, **ignored(m, targets, ignore_index)))


@entry("nn.functional.triplet_margin_loss")
def triplet_margin(m, a, p, n, margin=1.0, swap=False, reduction="mean"):
    return m.triplet_margin_apply(a, p, n, loss_options(m, reduction, margin=margin, swap=int(swap)))


def by_reduction(m, y, reduction):
    return y if reduction == "none" else (m.sum if reduction == "sum" else m.mean)(y, m.lib.MIXP_ALL, 0)


@entry("nn.functional.soft_margin_loss")
def soft_margin(m, x, y, reduction="mean"):
    return by_reduction(m, m.softplus(m.neg(m.mul(x, y)), 1.0), reduction)


@entry("nn.functional.margin_ranking_loss")
def margin_ranking(m, a, b, y, margin=0.0, reduction="mean"):
    d = m.add_scalar(m.mul(m.neg(y), m.sub(a, b)), margin)
    return by_reduction(m, m.clamp(d, 0.0, math.inf), reduction)


# --- images: the add-on examples/conv.h ---

def numbers_of(v, dims):
    """One number for each dimension of an image."""
    v = [v] if not isinstance(v, (tuple, list)) else list(v)
    return v * dims if len(v) == 1 else v


def batched(m, x, dims, f):
    """f of x with a batch, which PyTorch allows to be left out. f gives one tensor or several."""
    if x.rank == dims + 2:
        return f(x)
    y = f(m.unsqueeze(x, 0))
    return [m.squeeze(t, 0) for t in y] if isinstance(y, list) else m.squeeze(y, 0)


def convolved(m, function, x, w, bias, stride, padding, dilation, groups, output_padding=0):
    dims = w.rank - 2
    if isinstance(padding, str):
        padding = -1 if padding == "same" else 0        # CONV_SAME
    desc = m.new("conv_desc", groups=groups, stride=numbers_of(stride, dims), padding=numbers_of(padding, dims),
                 dilation=numbers_of(dilation, dims), output_padding=numbers_of(output_padding, dims))
    f = getattr(m, f"{function}{dims}d")
    return batched(m, x, dims, lambda b: f(b, w, m.ffi.NULL if bias is None else bias, desc))


@entry("nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d")
def conv(m, x, w, bias=None, stride=1, padding=0, dilation=1, groups=1):
    return convolved(m, "conv", x, w, bias, stride, padding, dilation, groups)


@entry("nn.functional.conv_transpose1d", "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d")
def conv_transpose(m, x, w, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    return convolved(m, "conv_transpose", x, w, bias, stride, padding, dilation, groups, output_padding)


def window(m, dims, size, stride, padding, **more):
    stride = 0 if stride in (None, ()) else stride      # 0: the size
    return m.new("pool_desc", size=numbers_of(size, dims), stride=numbers_of(stride, dims),
                 padding=numbers_of(padding, dims), **more)


def max_pool(dims):
    def run(m, x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        desc = window(m, dims, kernel_size, stride, padding, dilation=numbers_of(dilation, dims), ceil_mode=ceil_mode)
        at = m.several(1) if return_indices else m.ffi.NULL
        return batched(m, x, dims, lambda b: [m.max_pool(b, desc, at)] + ([at[0]] if return_indices else []))
    return run


def avg_pool(dims):
    def run(m, x, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
        desc = window(m, dims, kernel_size, stride, padding, ceil_mode=ceil_mode, image_only=not count_include_pad,
                      divisor=divisor_override or 0)
        return batched(m, x, dims, lambda b: m.avg_pool(b, desc))
    return run


def sizes_of(x, size, dims):
    """PyTorch's None keeps a size."""
    size = list(size) if isinstance(size, (tuple, list)) else [size] * dims
    if len(size) != dims or x.rank < dims:
        raise ValueError("sizes of another image")      # C would read beyond the array
    return [x.shape[x.rank - dims + i] if n is None else n for i, n in enumerate(size)]


def adaptive_max(dims):
    def run(m, x, output_size, return_indices=False):
        at = m.several(1) if return_indices else m.ffi.NULL
        size = sizes_of(x, output_size, dims)
        return batched(m, x, dims, lambda b: [m.adaptive_max_pool(b, size, at)] + ([at[0]] if return_indices else []))
    return run


def adaptive_avg(dims):
    def run(m, x, output_size):
        return batched(m, x, dims, lambda b: m.adaptive_avg_pool(b, sizes_of(x, output_size, dims)))
    return run


def max_unpool(dims):
    def run(m, x, indices, kernel_size, stride=None, padding=0, output_size=None):
        k, p = numbers_of(kernel_size, dims), numbers_of(padding, dims)
        s = k if stride in (None, ()) else numbers_of(stride, dims)
        size = [(n - 1) * s[i] - 2 * p[i] + k[i] for i, n in enumerate(shape(x)[-dims:])]
        size = list(output_size)[-dims:] if output_size is not None else size
        ids = m.unsqueeze(indices, 0) if indices.rank == dims + 1 else indices
        return batched(m, x, dims, lambda b: m.max_unpool(b, ids, size))
    return run


for d in (1, 2, 3):
    entry(f"nn.functional.max_unpool{d}d.grad")(max_unpool(d))
    entry(f"nn.functional.max_pool{d}d")(max_pool(d))
    entry(f"nn.functional.avg_pool{d}d")(avg_pool(d))
    entry(f"nn.functional.adaptive_max_pool{d}d")(adaptive_max(d))
    entry(f"nn.functional.adaptive_avg_pool{d}d")(adaptive_avg(d))


def resized(m, x, mode, size, scale_factor, align_corners=None):
    dims = x.rank - 2
    desc = m.new("interpolate_desc", mode=mode, align_corners=bool(align_corners))
    if size is not None:
        desc.size = numbers_of(size, dims)
    else:
        desc.scale = [float(v) for v in numbers_of(scale_factor, dims)]
    return m.interpolate(x, desc)


def interpolate(mode):
    def run(m, x, size=None, scale_factor=None, mode=mode, align_corners=None, recompute_scale_factor=None, antialias=False):
        kind = {"nearest": 0, "nearest-exact": 1, "linear": 2, "bilinear": 2, "trilinear": 2, "area": 3}.get(mode)
        if kind is None or antialias:
            raise Missing(f"mode {mode}" if kind is None else "antialias")
        if recompute_scale_factor and size is None:
            dims = x.rank - 2
            size = [math.floor(x.shape[2 + i] * v) for i, v in enumerate(numbers_of(scale_factor, dims))]
        return resized(m, x, kind, size, scale_factor, align_corners)
    return run


for kind in ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "area", "bicubic"):
    entry("nn.functional.interpolate." + kind)(interpolate(kind))
entry("nn.functional.upsample_nearest")(interpolate("nearest"))


@entry("nn.functional.upsample_bilinear")
def upsample_bilinear(m, x, size=None, scale_factor=None):
    return resized(m, x, 2, size, scale_factor, True)


def leading(m, x, f):
    """f of x whose leading dimensions are one batch."""
    lead = shape(x)[:-3]
    y = f(reshaped(m, x, [-1] + shape(x)[-3:]))
    return reshaped(m, y, lead + shape(y)[1:])


@entry("nn.functional.pixel_shuffle")
def pixel_shuffle(m, x, upscale_factor):
    return leading(m, x, lambda b: m.pixel_shuffle(b, upscale_factor))


@entry("nn.functional.pixel_unshuffle")
def pixel_unshuffle(m, x, downscale_factor):
    return leading(m, x, lambda b: m.pixel_unshuffle(b, downscale_factor))
