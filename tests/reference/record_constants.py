# record_constants.py - which scalar constants PyTorch refuses because a dtype cannot hold them. Writes
# constants.h, which tests/core/autocast/test_constants.c reads: python record_constants.py >constants.h
# SPDX-License-Identifier: MIT OR Unlicense
import torch
import torch.nn.functional as F

inf, nan = float("inf"), float("nan")
mask = torch.tensor([True, False, False])
operators = {
    "masked_fill": lambda x, v: x.masked_fill(mask, v),
    "pad": lambda x, v: F.pad(x, (1, 1), value=v),
    "clamp_low": lambda x, v: x.clamp(min=v),
    "clamp_high": lambda x, v: x.clamp(max=v),
    "full": lambda x, v: torch.full((3,), v, dtype=x.dtype),
    "fill": lambda x, v: torch.empty(3, dtype=x.dtype).fill_(v),
    "add_scalar": lambda x, v: x + v,
    "rsub": lambda x, v: v - x,
    "scale": lambda x, v: x * v,
    "leaky_relu": lambda x, v: F.leaky_relu(x, v),
    "uniform_low": lambda x, v: torch.empty_like(x).uniform_(v, 1),
    "uniform_high": lambda x, v: torch.empty_like(x).uniform_(0, v),
    "normal": lambda x, v: torch.empty_like(x).normal_(v, 1),
    "normal_std": lambda x, v: torch.empty_like(x).normal_(0, v),
}
values = {
    torch.float16: (65504.0, 65520.0, -65520.0, 1e9, -1e9, inf, -inf, nan),
    torch.bfloat16: (65520.0, -1e9, 3.3895313892515355e38, 3.4e38, -3.4e38, inf, -inf, nan),
    torch.float32: (-1e9, 3.4e38, inf, -inf),
}
names = {torch.float16: "MIXP_F16", torch.bfloat16: "MIXP_BF16", torch.float32: "MIXP_F32"}
print(f"""/* Scalar constants and dtypes: does PyTorch refuse the call?
 * Recorded by record_constants.py with PyTorch {torch.__version__.split("+")[0]}; not edited by hand.
 * SPDX-License-Identifier: MIT OR Unlicense */
#include <math.h>
typedef struct constant_case {{ const char *op; mixp_dtype dtype; double value; int refused; }} constant_case;
static const constant_case constant_cases[] = {{""")
for name, f in operators.items():
    for dtype, some in values.items():
        for value in some:
            try:
                f(torch.tensor([1.0, 2.0, -3.0], dtype=dtype), value)
                refused = 0
            except RuntimeError:
                refused = 1
            text = {"inf": "HUGE_VAL", "-inf": "-HUGE_VAL", "nan": "NAN"}.get(repr(value), repr(value))
            print(f'    {{ "{name}", {names[dtype]}, {text}, {refused} }},')
print("};")
