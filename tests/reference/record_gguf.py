"""Records a small GGUF file of the gguf package for test_gguf.c: python3 record_gguf.py > gguf_file.h

One value of each kind that gguf.h writes, and one tensor of each type. Values come from generate.py.
SPDX-License-Identifier: MIT OR Unlicense"""
import os
import tempfile
import gguf
from importlib.metadata import version
from generate import Generator, header

Q = gguf.GGMLQuantizationType


def main():
    header("record_gguf.py", f"A file of the gguf package {version('gguf')}.")
    g = Generator(5)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file.gguf")
        w = gguf.GGUFWriter(path, "llama")
        w.add_uint32("test.u32", 4000000000)
        w.add_float32("test.float", 0.1)
        w.add_bool("test.bool", True)
        w.add_string("test.text", "naïve")
        w.add_array("test.texts", ["a", "", "bcd"])
        w.add_array("test.numbers", [-1, 7])
        for name, kind, shape in (("blk.0.attn_q.weight", Q.Q8_0, (3, 64)), ("token_embd.weight", Q.F16, (2, 5)),
                                  ("output.weight", Q.BF16, (3, 3)), ("output_norm.weight", Q.F32, (5,))):
            x = g.fill(4.0, *shape)
            if kind == Q.Q8_0:
                x[1, :32] = 0
                x[2, 3] = 2.5 / 127 * 127
            w.add_tensor(name, gguf.quantize(x, kind), raw_dtype=kind)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        with open(path, "rb") as f:
            data = f.read()
    print("static const unsigned char gguf_file[] = {")
    for i in range(0, len(data), 24):
        print("    " + ", ".join(map(str, data[i:i + 24])) + ",")
    print("};\n#endif")


if __name__ == "__main__":
    main()
