"""Records attention with q, k, v apart for test_attention_apart.c: python3 record_attention.py >
attention.h

Inputs are exact in f32, f16 and bf16 (generate.py): q, k, v, then dy, then the mask. Values of the
small cases are those of float64; of all without a cap, the root mean square error of PyTorch's own
f32, f16 and bf16 against float64 is recorded, of y and of the three gradients together.
SPDX-License-Identifier: MIT OR Unlicense"""
import torch
from torch.nn import functional as F
from generate import Generator, array, header

# name; b, t, keys, heads, kv_heads, d; causal, past; softcap; mask; lengths. mask: its axes of
# [b, heads, t, keys], '' none; every fifth is -Inf, and '!' hides all of the second query's.
CASES = [
    ("cross", 2, 3, 5, 2, 2, 4, 0, 0, 0.0, "", None),
    ("causal_shorter", 1, 3, 5, 2, 2, 4, 1, 0, 0.0, "", None),
    ("causal_longer", 1, 5, 3, 1, 1, 4, 1, 0, 0.0, "", None),
    ("causal_past", 1, 3, 5, 2, 2, 4, 1, 2, 0.0, "", None),
    ("grouped", 2, 4, 4, 4, 2, 4, 1, 0, 0.0, "", None),
    ("multi_query", 1, 3, 6, 3, 1, 4, 0, 0, 0.0, "", None),
    ("mask_keys", 2, 3, 5, 2, 2, 4, 0, 0, 0.0, "bk", None),
    ("mask_scores", 2, 3, 5, 2, 2, 4, 0, 0, 0.0, "tk", None),
    ("mask_all", 2, 3, 5, 2, 1, 4, 0, 0, 0.0, "bhtk", None),
    ("mask_rows", 1, 3, 5, 2, 2, 4, 0, 0, 0.0, "ht", None),
    ("hidden_row", 2, 3, 5, 2, 2, 4, 0, 0, 0.0, "tk!", None),
    ("lengths", 2, 3, 5, 2, 2, 4, 0, 0, 0.0, "", [2, 4]),
    ("capped", 1, 3, 5, 2, 2, 4, 1, 2, 1.5, "tk", None),
    ("long", 1, 65, 130, 4, 2, 32, 0, 0, 0.0, "bk", None),
    ("long_causal", 1, 130, 130, 2, 2, 64, 1, 0, 0.0, "", None),
]
SMALL = 128     # values of y: of those with no more, all values are recorded


def mask_of(g, case, dtype):
    _, b, t, keys, heads, _, _, causal, past, _, axes, lengths = case
    full = dict(b=b, h=heads, t=t, k=keys)
    mask = None
    if axes:
        mask = torch.from_numpy(g.short(*(full[a] if a in axes else 1 for a in "bhtk"))).to(dtype)
        mask.view(-1)[3::5] = -torch.inf
        if "!" in axes:
            mask[:, :, 1] = -torch.inf
    add = torch.zeros(b, heads, t, keys, dtype=dtype) if mask is None else mask
    at, key = torch.arange(t)[:, None], torch.arange(keys)
    if causal and (past or axes):
        add = add.masked_fill(key > at + past, -torch.inf)
    if lengths:
        add = add.masked_fill(key >= torch.tensor(lengths)[:, None, None, None], -torch.inf)
    return add if axes or past or lengths else None


def attend(case, seed, dtype):
    """y and the gradients of q, k, v, in [b, t, heads, d]."""
    _, b, t, keys, heads, kv_heads, d, causal, _, cap, _, _ = case
    g = Generator(seed)
    q, k, v = (torch.from_numpy(g.short(b, n, h, d)).to(dtype).requires_grad_()
               for n, h in ((t, heads), (keys, kv_heads), (keys, kv_heads)))
    dy = torch.from_numpy(g.short(b, t, heads, d)).to(dtype)
    mask = mask_of(g, case, dtype)
    h = [a.transpose(1, 2) for a in (q, k, v)]
    if cap:
        h = [a.repeat_interleave(heads // a.shape[1], 1) for a in h]
        s = cap * torch.tanh(h[0] @ h[1].mT / d ** 0.5 / cap)
        y = (s + mask).softmax(-1) @ h[2]
    else:
        y = F.scaled_dot_product_attention(*h, attn_mask=mask, enable_gqa=heads != kv_heads,
                                           is_causal=bool(causal) and mask is None)
    y = y.transpose(1, 2)
    y.backward(dy)
    return [a.detach().double().reshape(-1) for a in (y, q.grad, k.grad, v.grad)]


def rms(got, want):
    return (got - want).square().mean().sqrt().item()


def main():
    torch.set_num_threads(1)
    header("record_attention.py", "Attention with q, k and v apart.")
    print("/* rms: PyTorch's own error against float64 in f32, f16 and bf16, of y and of all\n"
          " * gradients; 0: none is recorded. values: y, dq, dk, dv follow in attention_values. */")
    print("typedef struct attention_case {\n"
          "    const char *name, *mask;\n"
          "    int    b, t, keys, heads, kv_heads, d, causal, past;\n"
          "    double softcap;\n"
          "    int    lengths[2], values;\n"
          "    double rms[3][2];\n"
          "} attention_case;")
    print(f"#define ATTENTION_CASES {len(CASES)}")
    print("static const attention_case attention_cases[ATTENTION_CASES] = {")
    values = []
    for i, case in enumerate(CASES):
        name, b, t, keys, heads, kv_heads, d, causal, past, cap, axes, lengths = case
        want = attend(case, 500 + i, torch.float64)
        errors = []
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            if cap:
                errors.append("{ 0, 0 }")
                continue
            got = attend(case, 500 + i, dtype)
            errors.append("{ %.3g, %.3g }" % (rms(got[0], want[0]),
                                              rms(torch.cat(got[1:]), torch.cat(want[1:]))))
        small = want[0].numel() <= SMALL
        if small:
            for a in want:
                values += a.tolist()
        print(f'    {{ "{name}", "{axes}", {b}, {t}, {keys}, {heads}, {kv_heads}, {d}, {causal}, '
              f'{past}, {cap},\n      {{ {", ".join(str(n) for n in lengths or [-1, -1])} }}, '
              f'{int(small)}, {{ {", ".join(errors)} }} }},')
    print("};")
    array("double", "attention_values", values)
    print("#endif")


if __name__ == "__main__":
    main()
