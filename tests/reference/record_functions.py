"""Records the operators that record_operators.py does not have, with their gradients, for
test_functions.c: python3 record_functions.py > functions.h

As there, inputs are exact in f32, f16 and bf16, one float64 run is the truth for all of them, and
the gradients are those of sum(y * dy). Beside it stands how far PyTorch's own results in each dtype
lie from that truth.
SPDX-License-Identifier: MIT OR Unlicense"""
import torch
from torch.nn import functional as F
from generate import Generator, array, header
from record_operators import VOCAB, make


def rope(x, d, first, interleaved, base=10000.0):
    """RoFormer, section 3.4.2, as models compute it: sines and cosines in the dtype of x."""
    b, t, c = x.shape
    angle = torch.outer(torch.arange(first, first + t).double(),
                        base ** (-torch.arange(0, d, 2).double() / d))
    cos, sin = (f(angle).to(x.dtype)[:, None, :] for f in (torch.cos, torch.sin))
    x = x.view(b, t, c // d, d)
    p, q = ((x[..., 0::2], x[..., 1::2]) if interleaved
            else (x[..., :d // 2], x[..., d // 2:]))
    y = (p * cos - q * sin, q * cos + p * sin)
    y = torch.stack(y, -1).flatten(3) if interleaved else torch.cat(y, -1)
    return y.reshape(b, t, c)


def swiglu_packed(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


# name, inputs, call. Inputs as in record_operators.py, and m: a mask.
CASES = [
    ("maximum", "s2,3,4 s3,1", torch.maximum),
    ("minimum", "s4 s3,4", torch.minimum),
    ("maximum_of_equals", "s8", lambda x: torch.maximum(x, x.clone())),
    ("swiglu", "s15,8 s15,8", lambda a, b: F.silu(a) * b),
    ("swiglu_broadcast", "s3,1,4 s2,1", lambda a, b: F.silu(a) * b),
    ("swiglu_packed", "s15,16", swiglu_packed),
    ("neg", "s8", torch.neg),
    ("abs", "s12", torch.abs),
    ("sin", "s120", torch.sin),
    ("cos", "s120", torch.cos),
    ("clamp", "s16", lambda x: torch.clamp(x, -0.5, 0.75)),
    ("relu_squared", "s60", lambda x: F.relu(x).square()),
    ("soft_cap", "s160", lambda x: 1.5 * torch.tanh(x / 1.5)),
    ("l1", "s3,4 s3,4", F.l1_loss),
    ("smooth_l1", "s3,4 s3,4", lambda x, t: F.smooth_l1_loss(x, t, beta=0.5)),
    ("huber", "s3,4 t3,4", lambda x, t: F.huber_loss(x, t, delta=0.75)),
    ("kl_div", "s3,4 t3,4", lambda x, t: F.kl_div(x, t, reduction="batchmean")),
    ("kl_div_log", "s3,4 t3,4",
     lambda x, t: F.kl_div(x, t, reduction="batchmean", log_target=True)),
    ("max_0", "s5,4", lambda x: x.max(0).values),
    ("max_last", "s3,9", lambda x: x.max(-1, keepdim=True).values),
    ("max_middle", "s2,5,3", lambda x: x.max(1).values),
    ("max_all", "s4,5", torch.max),
    ("max_of_equals", "s2,1", lambda x: x.expand(2, 5).max()),
    ("gather_0", "s6,3 i2,3", lambda x, ids: x.gather(0, ids.long())),
    ("gather_1", "s3,6 i3,4", lambda x, ids: x.gather(1, ids.long())),
    ("gather_one", "s5,6 i5,1", lambda x, ids: x.gather(1, ids.long())),
    ("where", "m3,4 s3,4 s4", torch.where),
    ("where_column", "m3,1 s2,3,4 s1", torch.where),
    ("masked_fill", "s3,4 m4", lambda x, m: x.masked_fill(m, -2.5)),
    ("rope", "s2,9,16", lambda x: rope(x, 4, 0, False)),
    ("rope_interleaved", "s2,7,16", lambda x: rope(x, 8, 7, True)),
    ("cross_entropy_smooth", "s5,6 i5",
     lambda x, t: F.cross_entropy(x, t.long(), label_smoothing=0.125)),
    ("cross_entropy_smooth_ignore", "s7,6 j7",
     lambda x, t: F.cross_entropy(x, t.long(), label_smoothing=0.25)),
    ("matmul_broadcast", "s2,1,3,4 s5,4,2", torch.matmul),
    ("matmul_first_shared", "s3,4 s2,4,2", torch.matmul),
    ("matmul_both_ways", "s2,1,2,3 s1,3,3,2", torch.matmul),
    ("matmul_vector", "s2,3,4 s4", torch.matmul),
    ("matmul_by_vector", "s4 s2,4,3", torch.matmul),
    ("matmul_dot", "s7 s7", torch.matmul),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_input(g, spec):
    if spec[0] != "m":
        return make(g, spec)
    return torch.from_numpy(g.ints(2, *[int(n) for n in spec[1:].split(",")])) != 0


def run(call, inputs, dy, dtype):
    """y and the gradients, all in one list of float64."""
    cast = [a.detach().to(dtype).requires_grad_(a.requires_grad)
            if a.is_floating_point() else a for a in inputs]
    y = call(*cast)
    (y.to(dtype) * dy.to(dtype)).sum().backward()
    values = y.detach().double().reshape(-1).tolist()
    for a in cast:
        if a.requires_grad:
            values += a.grad.double().reshape(-1).tolist()
    return values, y.numel()


def main():
    torch.set_num_threads(1)
    header("record_functions.py", "More operators and their gradients.")
    print("/* inputs: as in operators.h, and m, a mask. count: of y. off: how far PyTorch's y, and its\n"
          " * gradients, are from the truth in f32, f16, bf16: the largest |a - b| / max(1, |b|). */")
    print("typedef struct function_case {\n    const char *name, *inputs;\n    int count;\n"
          "    double off[3][2];\n} function_case;")
    print(f"#define FUNCTION_CASES {len(CASES)}")
    print("static const function_case function_cases[FUNCTION_CASES] = {")
    values = []
    for i, (name, specs, call) in enumerate(CASES):
        g = Generator(400 + i)
        inputs = [make_input(g, s) for s in specs.split()]
        dy = torch.from_numpy(g.short(*call(*inputs).shape)).double()
        want, count = run(call, inputs, dy, torch.float64)
        off = []
        for dtype in DTYPES:
            got, _ = run(call, inputs, dy, dtype)
            far = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(got, want)]
            off.append((max(far[:count]), max(far[count:])))
        values += want
        text = ", ".join("{ %.3g, %.3g }" % pair for pair in off)
        print(f'    {{ "{name}", "{specs}", {count},\n      {{ {text} }} }},')
    print("};\n/* Of each case: y, then the gradient of each input that has one. */")
    array("double", "function_values", values)
    print("#endif")


if __name__ == "__main__":
    main()
