"""Records autocast's table for test_reference.c: python3 record_autocast.py > autocast.h

The result's dtype of each operator of record_operators.py, per input dtypes, inside
torch.autocast("cuda"). No GPU is needed: fake tensors on a "cuda" device go through the
real dispatcher and CUDA's autocast policy, and only the kernels are left out.
SPDX-License-Identifier: MIT OR Unlicense"""
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from generate import header
from record_operators import OPS

LETTER = {torch.float32: "s", torch.float16: "h", torch.bfloat16: "b"}
DTYPE = {v: k for k, v in LETTER.items()}
INPUTS = {1: "s h b", 2: "ss hh bb sh hs sb bs hb", 3: "sss hhh bbb shs hsh hss"}


def result(call, specs, letters, region):
    letters, inputs = iter(letters), []
    for spec in specs:
        dtype = torch.int64 if spec[0] in "ij" else DTYPE[next(letters)]
        shape = [int(n) for n in spec[1:].split(",")]
        inputs.append(torch.empty(shape, dtype=dtype, device="cuda"))
    torch.set_autocast_dtype("cuda", region)
    torch.set_autocast_enabled("cuda", True)
    try:
        return LETTER[call(*inputs).dtype]
    except RuntimeError:
        return "-"
    finally:
        torch.set_autocast_enabled("cuda", False)


def main():
    torch._C._ensureCUDADeviceGuardSet()
    header("record_autocast.py", "Result dtypes under autocast on CUDA.")
    print("/* s f32, h f16, b bf16, - an error. in: the floating inputs' dtypes, one call per\n"
          " * word. Then the results' dtypes, call by call, in an f16 and in a bf16 region. */")
    print("typedef struct autocast_row { const char *op, *inputs, *in, *f16, *bf16; } "
          "autocast_row;")
    print(f"#define AUTOCAST_ROWS {len(OPS)}")
    print("static const autocast_row autocast_rows[AUTOCAST_ROWS] = {")
    with FakeTensorMode():
        for name, inputs, call in OPS:
            specs = inputs.split()
            words = INPUTS[sum(s[0] not in "ij" for s in specs)]
            columns = ["".join(result(call, specs, w, region) for w in words.split())
                       for region in (torch.float16, torch.bfloat16)]
            print('    { "' + '", "'.join([name, inputs, words] + columns) + '" },')
    print("};\n#endif")


if __name__ == "__main__":
    main()
