"""Records operators and their gradients for test_reference.c: python3 record_operators.py >
operators.h

Inputs are exact in f32, f16 and bf16 (generate.py), so one float64 run is the truth for
all of them. The gradients are those of sum(y * dy).
SPDX-License-Identifier: MIT OR Unlicense"""
import numpy as np
import torch
from torch.nn import functional as F
from generate import Generator, array, header

VOCAB = 6


def attention(qkv, causal, scale=None):
    b, t, c = qkv.shape
    q, k, v = (a.view(b, t, 2, c // 6).transpose(1, 2) for a in qkv.split(c // 3, dim=2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    return y.transpose(1, 2).reshape(b, t, c // 3)


# name, inputs, call. Inputs: s signed, p positive, t in [0,1) without a gradient, q the same
# with a gradient, i ids, j ids of which every third is -100; then the shape.
OPS = [
    ("linear", "s2,3,5 s4,5 s4", F.linear),
    ("linear_no_bias", "s3,5 s4,5", F.linear),
    ("matmul", "s2,3,4 s2,4,3", torch.matmul),
    ("matmul_trans_a", "s2,4,3 s2,4,2", lambda a, b: a.mT @ b),
    ("matmul_trans_b", "s2,2,4 s3,4", lambda a, b: a @ b.mT),
    ("attention_causal", "s2,5,12", lambda x: attention(x, True)),
    ("attention_full", "s1,5,12", lambda x: attention(x, False)),
    ("attention_scaled", "s1,4,12", lambda x: attention(x, True, 0.25)),
    ("add", "s2,3,4 s3,1", torch.add),
    ("sub", "s4 s3,4", torch.sub),
    ("mul", "s2,1,4 s3,1", torch.mul),
    ("div", "s2,3,2 p3,1", torch.div),
    ("scale", "s6", lambda x: x * 0.75),
    ("relu", "s12", F.relu),
    ("gelu", "s16", F.gelu),
    ("gelu_tanh", "s16", lambda x: F.gelu(x, approximate="tanh")),
    ("silu", "s16", F.silu),
    ("tanh", "s16", torch.tanh),
    ("sigmoid", "s16", torch.sigmoid),
    ("sqrt", "p8", torch.sqrt),
    ("exp", "s8", torch.exp),
    ("log", "p8", torch.log),
    ("pow_3", "s8", lambda x: x.pow(3)),
    ("pow_half", "p8", lambda x: x.pow(0.5)),
    ("sum_0", "s3,4", lambda x: x.sum(0)),
    ("sum_keep", "s2,3,2", lambda x: x.sum(1, keepdim=True)),
    ("sum_all", "s3,4", torch.sum),
    ("mean_last", "s3,4", lambda x: x.mean(-1)),
    ("softmax", "s3,5", lambda x: x.softmax(-1)),
    ("log_softmax", "s3,5", lambda x: x.log_softmax(-1)),
    ("layer_norm", "s3,8 s8 s8", lambda x, g, b: F.layer_norm(x, (8,), g, b)),
    ("layer_norm_plain", "s2,8", lambda x: F.layer_norm(x, (8,))),
    ("rms_norm", "s3,8 s8", lambda x, g: F.rms_norm(x, (8,), g, 1e-5)),
    ("embedding", "s6,3 i2,4", lambda w, ids: F.embedding(ids, w)),
    ("cross_entropy", "s5,6 i5", F.cross_entropy),
    ("cross_entropy_ignore", "s7,6 j7", F.cross_entropy),
    ("mse", "s3,4 t3,4", F.mse_loss),
    ("bce_with_logits", "s3,4 t3,4", F.binary_cross_entropy_with_logits),
    ("bce", "q3,4 t3,4", F.binary_cross_entropy),
    ("dropout_0", "s6", lambda x: F.dropout(x, 0.0)),
    ("reshape", "s2,6", lambda x: x.reshape(3, 4)),
    ("transpose", "s2,3,4", lambda x: x.transpose(0, 2)),
    ("concat", "s2,3 s2,2", lambda a, b: torch.cat([a, b], 1)),
]


def make(g, spec):
    kind, shape = spec[0], [int(n) for n in spec[1:].split(",")]
    if kind in "ij":
        ids = g.ints(VOCAB, *shape)
        if kind == "j":
            ids.reshape(-1)[::3] = -100
        return torch.from_numpy(ids)
    v = g.short(*shape)
    v = np.abs(v) + 1 / 64 if kind == "p" else (v + 2) / 4 if kind in "tq" else v
    v = np.maximum(v, 1 / 8) if kind == "q" else v
    return torch.from_numpy(v).double().requires_grad_(kind in "spq")


def main():
    torch.set_num_threads(1)
    header("record_operators.py", "Operators and their gradients.")
    print("/* inputs: s signed, p positive, t in [0,1) without a gradient, q in [1/8,1) with\n"
          " * one, i ids, j ids of which every third is -100; then the shape. count: of y. */")
    print("typedef struct op_case { const char *name, *inputs; int count; } op_case;")
    print(f"#define OP_VOCAB {VOCAB}\n#define OP_CASES {len(OPS)}")
    print("static const op_case op_cases[OP_CASES] = {")
    values = []
    for i, (name, specs, call) in enumerate(OPS):
        g = Generator(200 + i)
        inputs = [make(g, s) for s in specs.split()]
        y = call(*inputs)
        dy = torch.from_numpy(g.short(*y.shape)).double()
        (y * dy).sum().backward()
        values += y.detach().reshape(-1).tolist()
        for a in inputs:
            if a.requires_grad:
                values += a.grad.reshape(-1).tolist()
        print(f'    {{ "{name}", "{specs}", {y.numel()} }},')
    print("};\n/* Of each case: y, then the gradient of each input that has one. */")
    array("double", "op_values", values)
    print("#endif")


if __name__ == "__main__":
    main()
