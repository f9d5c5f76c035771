"""Records the small operators for test_differential.c: python3 record_small.py > small.h

One float64 run is the truth; the gradients are those of sum(y * dy). Beside it stands how far
PyTorch's own results are from that truth in f32, f16 and bf16, and in f16 and bf16 under autocast.
Autocast is CUDA's: a fake tensor on a "cuda" device tells whether the operator runs in f32 there, and
then the CPU runs it in f32. Inputs are exact in all dtypes; those of kind e hold NaN, Inf, zeros of
both signs, and numbers near both ends of f16.
SPDX-License-Identifier: MIT OR Unlicense"""
import math
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from generate import Generator, array, header
from record_operators import make

EDGES = [math.nan, math.inf, -math.inf, 0.0, -0.0, 61440.0, -61440.0, 2.0 ** -14, -2.0 ** -24, 1.0]


def order(x, descending):
    """Stable, where torch.topk promises no order of equal elements."""
    return torch.sort(x, dim=-1, descending=descending, stable=True)


def pick(x, descending, k):
    return x.gather(-1, order(x.detach(), descending).indices[..., :k])


def elu(x):
    """One by one: at a NaN, PyTorch's vector code gives a slope of NaN, its scalar code and CUDA's 1."""
    return torch.cat([F.elu(v, 1.5) for v in x.reshape(-1).split(1)]).reshape(x.shape)


# name, inputs, call; a name that begins with ! has no gradient.
CASES = [
    ("square", "e4,1,10", torch.square),
    ("reciprocal", "e4,1,10", torch.reciprocal),
    ("log1p", "e4,1,10", torch.log1p),
    ("expm1", "e4,1,10", torch.expm1),
    ("erf", "e4,1,10", torch.erf),
    ("erf_near", "s160", torch.erf),
    ("softplus", "e4,1,10", lambda x: F.softplus(x, 2.0)),
    ("softplus_near", "s160", lambda x: F.softplus(x, 0.5)),
    ("leaky_relu", "e4,1,10", lambda x: F.leaky_relu(x, 0.125)),
    ("elu", "e4,1,10", elu),
    ("add_scalar", "e4,1,10", lambda x: x + 2.75),
    ("rsub", "e4,1,10", lambda x: 2.75 - x),
    ("square_one", "s1,1", torch.square),
    ("log1p_scalar", "p1", torch.log1p),
    ("detach", "e10", lambda x: x * x.detach()),
    ("permute", "e2,1,4,3", lambda x: x.permute(2, 0, 3, 1)),
    ("flip_first", "e3,4", lambda x: x.flip(0)),
    ("flip_last", "e3,1,4", lambda x: x.flip(-1)),
    ("flip_one", "e3,1,4", lambda x: x.flip(1)),
    ("expand", "e3,1,4", lambda x: x.expand(2, -1, 5, 4)),
    ("expand_one", "s1", lambda x: x.expand(3, 7)),
    ("pad_first", "e3,4", lambda x: F.pad(x, (0, 0, 2, 1), value=-2.5)),
    ("pad_last", "e3,1", lambda x: F.pad(x, (0, 3), value=math.inf)),
    ("squeeze", "e3,1,4", lambda x: x.squeeze(1)),
    ("squeeze_all", "e1,4,1", torch.squeeze),
    ("unsqueeze", "e3,4", lambda x: x.unsqueeze(-1)),
    ("stack_middle", "e2,3 e2,3 s2,3", lambda *x: torch.stack(x, 1)),
    ("stack_last", "e4 s4", lambda *x: torch.stack(x, -1)),
    ("split_sizes", "e3,7", lambda x: torch.cat(x.split([1, 4, 2], 1)[::-1], 1)),
    ("min_first", "e3,10", lambda x: x.min(0).values),
    ("min_last", "e10,3", lambda x: x.min(-1, keepdim=True).values),
    ("min_all", "s5,9", torch.min),
    ("min_of_equals", "s2,1", lambda x: x.expand(2, 5).min()),
    ("!argmin_first", "e3,10", lambda x: x.argmin(0)),
    ("!argmin_last", "e10,3", lambda x: x.argmin(-1)),
    ("!argmin_all", "s5,9", torch.argmin),
    ("logsumexp_last", "e10,3", lambda x: x.logsumexp(-1)),
    ("logsumexp_first", "s30,3", lambda x: x.logsumexp(0, keepdim=True)),
    ("logsumexp_middle", "s4,1,5", lambda x: x.logsumexp(1)),
    ("logsumexp_all", "s5,9", lambda x: x.logsumexp((0, 1))),
    ("var_last", "s6,30", lambda x: x.var(-1)),
    ("var_first", "s30,4", lambda x: x.var(0, correction=0, keepdim=True)),
    ("var_edges", "e10,3", lambda x: x.var(-1)),
    ("var_one", "s4,1", lambda x: x.var(1, correction=0)),
    ("var_none", "s4,1", lambda x: x.var(1)),
    ("var_all", "s5,9", lambda x: x.var()),
    ("std_last", "s6,30", lambda x: x.std(-1)),
    ("std_edges", "e10,3", lambda x: x.std(-1)),
    ("std_equals", "s3,1", lambda x: x.expand(3, 4).std(-1)),
    ("std_all", "s5,9", lambda x: x.std(correction=0)),
    ("norm_last", "s6,30", lambda x: x.norm(dim=-1)),
    ("norm_edges", "e10,3", lambda x: x.norm(dim=-1)),
    ("norm_one", "s4,1", lambda x: x.norm(dim=1, keepdim=True)),
    ("norm_all", "s5,9", lambda x: x.norm()),
    ("prod_last", "s5,7", lambda x: x.prod(-1)),
    ("prod_first", "s6,3", lambda x: x.prod(0, keepdim=True)),
    ("prod_one", "s4,1", lambda x: x.prod(1)),
    ("prod_all", "s3,4", torch.prod),
    ("!prod_edges", "e10,3", lambda x: x.prod(-1)),
    ("cumsum_last", "s4,20", lambda x: x.cumsum(-1)),
    ("cumsum_first", "s20,3", lambda x: x.cumsum(0)),
    ("cumsum_one", "s4,1,3", lambda x: x.cumsum(1)),
    ("cumsum_edges", "e10,3", lambda x: x.cumsum(-1)),
    ("!eq", "e20,1 e20", torch.eq),
    ("!ne", "e20,1 e20", torch.ne),
    ("!gt", "e20,1 e20", torch.gt),
    ("!ge", "e20,1 e20", torch.ge),
    ("!lt", "e20,1 e20", torch.lt),
    ("!le", "e20,1 e20", torch.le),
    ("!one_hot", "i4,1", lambda ids: F.one_hot(ids.long(), 6)),
    ("scatter_first", "e6,3 i20,3 s20,3", lambda x, i, s: x.scatter_add(0, i.long(), s)),
    ("scatter_last", "s2,6 i2,9 e2,9", lambda x, i, s: x.scatter_add(-1, i.long(), s)),
    ("scatter_one", "s6,1 i1,1 s1,1", lambda x, i, s: x.scatter_add(0, i.long(), s)),
    ("index_first", "e6,3 i20 s20,3", lambda x, i, s: x.index_add(0, i.long(), s)),
    ("index_last", "s1,6 i5 e1,5", lambda x, i, s: x.index_add(1, i.long(), s)),
    ("topk_largest", "e5,9", lambda x: pick(x, True, 3)),
    ("topk_smallest", "e5,9", lambda x: pick(x, False, 4)),
    ("topk_one", "s4,1", lambda x: pick(x, True, 1)),
    ("sort_up", "e3,40", lambda x: pick(x, False, 40)),
    ("sort_down", "e3,40", lambda x: pick(x, True, 40)),
    ("!topk_places", "e5,9", lambda x: order(x, True).indices[..., :3]),
    ("!sort_places", "e3,40", lambda x: order(x, False).indices),
    ("!sort_places_down", "e3,40", lambda x: order(x, True).indices),
    ("!cast_bytes", "u3,4", lambda x: x),
    ("!cast_integers", "n12", lambda x: x),
    ("nll", "e6,6 i6", lambda x, t: F.nll_loss(x, t.long())),
    ("nll_ignore", "s7,6 j7", lambda x, t: F.nll_loss(x, t.long())),
    ("triplet", "s4,5 s4,5 s4,5", F.triplet_margin_loss),
    ("triplet_one", "s3,1 s3,1 s3,1", lambda *x: F.triplet_margin_loss(*x, margin=0.25)),
    ("log2", "e4,1,10", torch.log2),
    ("log10", "e4,1,10", torch.log10),
    ("acos", "e4,1,10", lambda x: torch.acos(x * 0.25)),
    ("asin", "e4,1,10", lambda x: torch.asin(x * 0.25)),
    ("tan", "s4,10", lambda x: torch.tan(x * 0.5)),
    ("sinh", "s4,10", torch.sinh),
    ("cosh", "s4,10", torch.cosh),
    ("erfinv", "s4,10", lambda x: torch.erfinv(x * 0.25)),
    ("power", "p5,8 s5,1", torch.pow),
    ("power_edges", "e10,1 e10", torch.pow),
    ("atan2", "e10,1 e10", torch.atan2),
    ("prelu", "e2,3,4 s3", F.prelu),
    ("prelu_one", "e3,4 s1", F.prelu),
    ("addcdiv", "s3,4 s3,1 p4", lambda x, a, b: torch.addcdiv(x, a, b, value=0.5)),
    ("cumprod_last", "s4,7", lambda x: x.cumprod(-1)),
    ("cumprod_zeros", "s6,4", lambda x: torch.relu(x).cumprod(0)),
    ("order_3", "s6,30", lambda x: torch.linalg.vector_norm(x, 3, -1)),
    ("order_1", "s6,30", lambda x: torch.linalg.vector_norm(x, 1, 0)),
    ("order_low", "s6,9", lambda x: torch.linalg.vector_norm(torch.relu(x), 1.5, -1, keepdim=True)),
    ("order_below", "s6,9", lambda x: torch.linalg.vector_norm(x, -2, -1)),
    ("order_most", "s6,9", lambda x: torch.linalg.vector_norm(x, math.inf, None)),
    ("tril", "e2,5,4", torch.tril),
    ("triu", "e5,6", lambda x: torch.triu(x, -1)),
    ("roll_first", "e3,4", lambda x: x.roll(2, 0)),
    ("roll_last", "e3,4", lambda x: x.roll(-1, -1)),
    ("einsum_batch", "s2,3,4 s2,4,5", lambda a, b: torch.einsum("bij,bjk->bik", a, b)),
    ("einsum_heads", "s2,3,2,4 s2,5,2,4", lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b)),
    ("einsum_implicit", "s3,4 s5,4", lambda a, b: torch.einsum("ki, ji", a, b)),
    ("einsum_sums", "s3,4,2 s2,6", lambda a, b: torch.einsum("abc,cd->b", a, b)),
    ("einsum_outer", "s3 s4", lambda a, b: torch.einsum("i,j->ji", a, b)),
    ("!searched", "s6 s2,5", lambda e, v: torch.searchsorted(e.sort().values, v)),
]
HALVES = [torch.float16, torch.bfloat16]
INTEGERS = [0, 1, -1, 255, 2047, -2048, 65504, 16777217, -16777219, 2 ** 31 - 1, -2 ** 31, 77777777]


def make_input(g, spec):
    shape = [int(n) for n in spec[1:].split(",")]
    if spec[0] == "u":
        return torch.from_numpy(g.ints(256, *shape))
    if spec[0] == "n":
        return torch.tensor(INTEGERS).reshape(shape)
    if spec[0] != "e":
        return make(g, spec)
    x = torch.from_numpy(g.short(*shape)).double()
    flat = x.view(-1)
    for i in range(1, flat.numel(), 3):
        flat[i] = EDGES[i // 3 % len(EDGES)]
    return x.requires_grad_()


def runs_in_f32(call, inputs):
    """Does CUDA's autocast run it in f32?"""
    with FakeTensorMode():
        fake = [torch.empty(a.shape, device="cuda",
                            dtype=torch.float16 if a.is_floating_point() else a.dtype)
                for a in inputs]
        torch.set_autocast_dtype("cuda", torch.float16)
        torch.set_autocast_enabled("cuda", True)
        try:
            return call(*fake).dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", False)


def run(call, inputs, dy, dtype, wide=False):
    """y, and the gradients one after another, as float64."""
    cast = [a.detach().to(dtype).requires_grad_(a.requires_grad)
            if a.is_floating_point() else a for a in inputs]
    used = [a.float() if wide and a.is_floating_point() else a for a in cast]
    y = call(*used)
    if not any(a.is_floating_point() for a in inputs) and y.dtype == torch.int64:
        y = y.to(dtype)
    grads = []
    if dy is not None:
        y.backward(dy.to(y.dtype))
        grads = [v for a in cast if a.requires_grad for v in a.grad.double().reshape(-1).tolist()]
    return y.detach().double().reshape(-1).tolist(), grads


def kind(v):
    return 0 if math.isfinite(v) else 3 if math.isnan(v) else 1 if v > 0 else 2


def far(got, want, most):
    """The largest |a - b| / max(1, |b|), and how many are of another kind: not finite where the truth
    is, or the reverse. Above `most`, the dtype's largest number, an Inf is right."""
    off, lost = 0.0, 0
    for a, b in zip(got, want):
        b = b if not math.isfinite(b) or abs(b) <= most else math.copysign(math.inf, b)
        if kind(a) != kind(b):
            lost += 1
        elif math.isfinite(b):
            off = max(off, abs(a - b) / max(1.0, abs(b)))
    return off, lost


def largest(dtype):
    """Above this number a float64 rounds to Inf."""
    return {torch.float32: 3.4028235677973366e38, torch.float16: 65519.99,
            torch.bfloat16: 3.3961775292304601e38}[dtype]


def pairs(off, which):
    if not any(a[which] or b[which] for a, b in off):
        return "{ { 0, 0 } }"
    return "{ " + ", ".join("{ %.3g, %.3g }" % (a[which], b[which]) for a, b in off) + " }"


def main():
    torch.set_num_threads(1)
    torch._C._ensureCUDADeviceGuardSet()
    header("record_small.py", "Small operators and their gradients, edge values included.")
    print("/* inputs: as in operators.h; e signed with edge values, u bytes, n integers (against_torch.h).\n"
          " * count: of y. wide: autocast runs it in f32. off: how far PyTorch's y, and its gradients, are\n"
          " * from the truth in f32, f16, bf16, and in f16 and bf16 under autocast; lost: how many of them are\n"
          " * not finite where the truth is, or the reverse. A name with ! has no gradient. */")
    print("typedef struct small_case {\n    const char *name, *inputs;\n    int count, wide;\n"
          "    double off[5][2];\n    int lost[5][2];\n} small_case;")
    print(f"#define SMALL_CASES {len(CASES)}")
    print("static const small_case small_cases[SMALL_CASES] = {")
    values = []
    for i, (name, specs, call) in enumerate(CASES):
        g = Generator(600 + i)
        inputs = [make_input(g, s) for s in specs.split()]
        shape = call(*inputs).shape
        dy = None if name[0] == "!" else torch.from_numpy(g.short(*shape)).double()
        wide = runs_in_f32(call, inputs)
        want = run(call, inputs, dy, torch.float64)
        runs = [(d, d, run(call, inputs, dy, d)) for d in [torch.float32] + HALVES]
        runs += [(torch.float32 if wide else d, d, run(call, inputs, dy, d, wide)) for d in HALVES]
        off = [(far(got[0], want[0], largest(dy_of)), far(got[1], want[1], largest(d)))
               for dy_of, d, got in runs]
        values += want[0] + want[1]
        print(f'    {{ "{name}", "{specs}", {len(want[0])}, {int(wide)},\n      {pairs(off, 0)},\n'
              f'      {pairs(off, 1)} }},')
    print("};\n/* Of each case: y, then the gradient of each input that has one. */")
    array("double", "small_values", values)
    print("#endif")


if __name__ == "__main__":
    main()
