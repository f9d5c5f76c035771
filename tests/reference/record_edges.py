# record_edges.py - what PyTorch does where a gradient or a value is a matter of choice: at the bounds
# of clamp, with NaN in maximum and minimum, with a target of 0 in kl_div, where a mask of finite
# numbers covers a query. tests/cpu/test_numerics.c holds what 2.15.0 printed; up to 2.14 clamp passed
# the gradient at its bounds.
# SPDX-License-Identifier: MIT OR Unlicense
import torch
import torch.nn.functional as F

nan, inf = float("nan"), float("inf")


def slopes(f, *inputs):
    inputs = [torch.tensor(x, requires_grad=True) for x in inputs]
    f(*inputs).sum().backward()
    return [x.grad.tolist() for x in inputs]


print("PyTorch", torch.__version__)
x = [-2.0, -1.0, 0.0, 1.0, 2.0, inf, -inf, nan]
print("clamp", x)
for low, high in ((-1, 1), (-1, None), (None, 1)):
    print("  from", low, "to", high, slopes(lambda t: torch.clamp(t, low, high), x))
a, b = [nan, 1.0, nan, inf, 1.0], [1.0, nan, nan, inf, 0.0]
print("of", a, "and", b)
print("  maximum", slopes(torch.maximum, a, b))
print("  minimum", slopes(torch.minimum, a, b))
x, target = [nan, inf, -inf, -1.0, nan, 1.0], [0.0, 0.0, 0.0, 0.0, 1.0, -1.0]
print("kl_div of", x, "against", target)
print(" ", F.kl_div(torch.tensor(x), torch.tensor(target), reduction="none").tolist())

# A query that a finite mask covers whole: fused kernels keep the logarithm of the sum of its
# exponentials beside the mask, where f32 has no room for it.
q = torch.tensor([[[1.0, -0.5], [0.25, 2.0]]])
k = torch.tensor([[[0.5, 1.0], [-1.0, 0.25], [2.0, -0.5], [0.75, 0.75]]])
v = torch.tensor([[[1.0, 2.0], [-1.0, 0.5], [0.25, -2.0], [3.0, 1.0]]])
dy = torch.tensor([[[1.0, -1.0], [0.5, 2.0]]])
for number in (-1e9, -3.4028234663852886e38):
    mask = torch.tensor([[0.0] * 4, [number] * 4])
    x = [t.clone().requires_grad_() for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*(t[:, None] for t in x), attn_mask=mask)[:, 0]
    y.backward(dy)
    print("attention, the second query covered by", number)
    print("  y", y.flatten().tolist())
    for name, t in zip("qkv", x):
        print("  d" + name, t.grad.flatten().tolist())
