"""Records derivatives along directions for jvp_cases.h: python3 record_jvp.py > jvp.h

In float64, by torch.func.jvp: the tangent of y where every real input moves along a direction of its
own; the gradients of sum(tangent * w), by autograd; and the tangent of the tangent. Inputs, directions
and w are exact in f16 and bf16.
SPDX-License-Identifier: MIT OR Unlicense"""
import torch
from torch.func import jvp
from torch.nn import functional as F
from generate import Generator, array, header
from record_operators import make


def mlp(act):
    return lambda x, v, b, w: F.linear(act(F.linear(x, v, b)), w)


def huber(x, t, bound):
    """PyTorch's huber_loss has no second derivative in forward mode."""
    d = x - t
    return torch.where(d.abs() < bound, d * d / 2, bound * (d.abs() - bound / 2)).mean()


# name, inputs, call
CASES = [
    ("tanh", "s3,4", torch.tanh),
    ("sigmoid", "s3,4", torch.sigmoid),
    ("silu", "s3,4", F.silu),
    ("gelu", "s3,4", F.gelu),
    ("gelu_tanh", "s3,4", lambda x: F.gelu(x, approximate="tanh")),
    ("exp", "s3,4", torch.exp),
    ("expm1", "s3,4", torch.expm1),
    ("log", "q3,4", torch.log),
    ("log1p", "q3,4", torch.log1p),
    ("sqrt", "q3,4", torch.sqrt),
    ("square", "s3,4", torch.square),
    ("cube", "s3,4", lambda x: x ** 3),
    ("power", "q3,4", lambda x: x ** 1.5),
    ("reciprocal", "q3,4", torch.reciprocal),
    ("sin", "s3,4", torch.sin),
    ("cos", "s3,4", torch.cos),
    ("erf", "s3,4", torch.erf),
    ("softplus", "s3,4", lambda x: F.softplus(x, 2.0)),
    ("soft_cap", "s3,4", lambda x: 1.5 * torch.tanh(x / 1.5)),
    ("relu", "s5,4", torch.relu),
    ("relu_squared", "s5,4", lambda x: torch.relu(x) ** 2),
    ("leaky_relu", "s5,4", lambda x: F.leaky_relu(x, 0.125)),
    ("elu", "s5,4", lambda x: F.elu(x, 1.5)),
    ("abs", "s5,4", torch.abs),
    ("clamp", "s5,4", lambda x: x.clamp(-0.5, 1.0)),
    ("scale", "s1,4", lambda x: x * 1.25),
    ("neg", "s1", lambda x: -x),
    ("add_scalar", "s3", lambda x: x + 2.0),
    ("rsub", "s3", lambda x: 2.0 - x),
    ("add", "s3,1,2 s4,1", torch.add),
    ("sub", "s4,1 s3,1,2", torch.sub),
    ("mul", "s3,4 s4", torch.mul),
    ("mul_itself", "s3,4", lambda x: x * x * x),
    ("div", "s3,4 q3,1", torch.div),
    ("maximum", "s9,4 s4", torch.maximum),
    ("minimum", "s9,1 s9,4", torch.minimum),
    ("swiglu", "s3,4 s3,4", lambda a, b: F.silu(a) * b),
    ("linear", "s2,3,4 s5,4 s5", F.linear),
    ("linear_bare", "s3,4 s5,4", F.linear),
    ("matmul", "s2,3,4 s4,5", torch.matmul),
    ("matmul_a", "s2,4,3 s1,4,5", lambda a, b: a.mT @ b),
    ("matmul_b", "s3,4 s2,5,4", lambda a, b: a @ b.mT),
    ("matmul_vector", "s4 s4", torch.matmul),
    ("sum", "s3,4", torch.sum),
    ("sum_first", "s3,4", lambda x: x.sum(0, keepdim=True)),
    ("mean", "s3,4", lambda x: x.mean(-1)),
    ("reshape", "s3,4", lambda x: x.reshape(2, 6) ** 2),
    ("transpose", "s2,3,4", lambda x: x.transpose(0, 2) ** 2),
    ("permute", "s2,3,4", lambda x: x.permute(1, 2, 0) ** 2),
    ("flip", "s3,4", lambda x: x.flip(1) ** 2),
    ("expand", "s3,1", lambda x: (x ** 2).expand(2, 3, 4)),
    ("pad", "s3,2", lambda x: F.pad(x, (1, 2), value=3.0) ** 2),
    ("concat", "s3,2 t3,1 s3,3", lambda *x: torch.cat(x, 1) ** 2),
    ("stack", "s3 s3", lambda *x: torch.stack(x, 1) ** 2),
    ("slice", "s3,6", lambda x: x[:, 2:5] ** 2),
    ("where", "s5,4 s4", lambda a, b: torch.where(a > 0.5, a * b, b)),
    ("masked_fill", "s5,4", lambda x: (x ** 2).masked_fill(x > 0.5, 7.0)),
    ("gather", "s6,4 i3,4", lambda x, i: (x ** 2).gather(0, i.long())),
    ("embedding", "s6,3 i4", lambda x, i: F.embedding(i.long(), x) ** 2),
    ("scatter_add", "s6,2 i9,2 s9,2", lambda x, i, s: (x ** 2).scatter_add(0, i.long(), s ** 2)),
    ("index_add", "s6,2 i9 s9,2", lambda x, i, s: (x ** 2).index_add(0, i.long(), s ** 2)),
    ("cumsum", "s3,4", lambda x: (x ** 2).cumsum(1)),
    ("detach", "s3,4", lambda x: x * x.detach()),
    ("var", "s3,6", lambda x: x.var(-1)),
    ("std", "s3,6", lambda x: x.std(-1)),
    ("norm", "s3,6", lambda x: x.norm(dim=-1)),
    ("logsumexp", "s3,6", lambda x: x.logsumexp(-1)),
    ("unused", "s3,4 s3,4", lambda a, b: torch.tanh(a)),
    ("mlp_tanh", "s4,1 s6,1 s6 s1,6", mlp(torch.tanh)),
    ("mlp_gelu", "s4,2 s6,2 s6 s3,6", mlp(F.gelu)),
    ("mlp_silu", "s4,2 s6,2 s6 s3,6", mlp(F.silu)),
    ("log2", "q3,4", torch.log2),
    ("log10", "q3,4", torch.log10),
    ("acos", "s3,4", lambda x: torch.acos(x * 0.25)),
    ("asin", "s3,4", lambda x: torch.asin(x * 0.25)),
    ("tan", "s3,4", lambda x: torch.tan(x * 0.25)),
    ("sinh", "s3,4", torch.sinh),
    ("cosh", "s3,4", torch.cosh),
    ("erfinv", "s3,4", lambda x: torch.erfinv(x * 0.25)),
    ("power_pair", "q3,4 s3,1", torch.pow),
    ("atan2", "s3,4 q4", torch.atan2),
    ("prelu", "s2,3,4 s3", lambda x, w: torch.where(x > 0, x, w[:, None] * x)),
    ("cumprod", "s3,5", lambda x: x.cumprod(1)),
    ("norm_3", "s3,6", lambda x: torch.linalg.vector_norm(x, 3, -1)),
    ("triu", "s4,5", lambda x: torch.triu(x ** 2, 1)),
    ("einsum", "s3,4 s2,4", lambda a, b: torch.einsum("ij,kj->ki", a, b)),
    ("softmax", "s3,6", lambda x: x.softmax(-1)),
    ("log_softmax", "s3,6", lambda x: x.log_softmax(-1)),
    ("cross_entropy", "s5,6 i5", lambda x, i: F.cross_entropy(x, i.long())),
    ("cross_entropy_smooth", "s7,6 i7", lambda x, i: F.cross_entropy(x, i.long(), ignore_index=2,
                                                                     label_smoothing=0.25)),
    ("mse", "s3,4 s3,4", F.mse_loss),
    ("huber", "s5,4 s5,4", lambda x, t: huber(x, t, 0.75)),
    ("smooth_l1", "s5,4 s5,4", lambda x, t: huber(x, t, 0.75) / 0.75),
    ("bce_with_logits", "s3,4 q3,4", F.binary_cross_entropy_with_logits),
]


def along(call, inputs, directions):
    """The function of the real inputs that gives the tangent."""
    real = [a.is_floating_point() and a.requires_grad for a in inputs]

    def merged(*x):
        x = list(x)
        return call(*[x.pop(0) if r else a.detach() for a, r in zip(inputs, real)])
    return [a.detach() for a, r in zip(inputs, real) if r], lambda *x: jvp(merged, x, directions)[1]


def numbers(t, like):
    """PyTorch has tensors of zeros that have no memory."""
    return [0.0] * like.numel() if t is None or t._is_zerotensor() else t.reshape(-1).tolist()


def main():
    torch.set_num_threads(1)
    header("record_jvp.py", "Derivatives along directions, their gradients, and second derivatives.")
    print("/* inputs: as in operators.h. count: of y. */")
    print("typedef struct jvp_case { const char *name, *inputs; int count; } jvp_case;")
    print(f"#define JVP_CASES {len(CASES)}\nstatic const jvp_case jvp_cases[JVP_CASES] = {{")
    values = []
    for i, (name, specs, call) in enumerate(CASES):
        g = Generator(900 + i)
        inputs = [make(g, s) for s in specs.split()]
        directions = tuple(torch.from_numpy(g.short(*a.shape)).double() for a in inputs if a.requires_grad)
        w = torch.from_numpy(g.short(*call(*inputs).shape)).double()
        x, tangent = along(call, inputs, directions)
        second = jvp(tangent, tuple(x), directions)[1]
        leaves = [a.clone().requires_grad_() for a in x]
        first = tangent(*leaves)
        grads = torch.autograd.grad((first * w).sum(), leaves, allow_unused=True) if first.requires_grad else \
            [None] * len(leaves)
        values += numbers(first, w)
        for a, grad in zip(leaves, grads):
            values += numbers(grad, a)
        values += numbers(second, w)
        print(f'    {{ "{name}", "{specs}", {first.numel()} }},')
    print("};\n/* Of each case: the tangent, the gradients of sum(tangent * w), the tangent of the tangent. */")
    array("double", "jvp_values", values)
    print("#endif")


if __name__ == "__main__":
    main()
