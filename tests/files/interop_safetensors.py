#!/usr/bin/env python3
"""interop_safetensors.py - exchanges safetensors files with the format's own library.
SPDX-License-Identifier: MIT OR Unlicense

  interop_safetensors.py [PATH_OF_test_checkpoint]     (default: $BUILD/test_checkpoint)

Needs numpy and safetensors; exits with 77, skipped, without them.
"""
import json
import os
import random
import struct
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import safetensors
    import safetensors.numpy
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

program = os.path.abspath(sys.argv[1] if len(sys.argv) > 1
                          else os.path.join(os.environ.get("BUILD", "build"), "test_checkpoint"))
passed = failed = 0


def check(name, condition):
    global passed, failed
    if condition:
        passed += 1
    else:
        failed += 1
    print("ok  " if condition else "FAIL", name)


def header_of(path):
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:8 + n]), data[8 + n:]


def listing(path):
    run = subprocess.run([program, "--read", path], capture_output=True)
    lines = run.stdout.decode().splitlines() if run.returncode == 0 else []
    return run.returncode, {line.rsplit("|", 3)[0]: line.rsplit("|", 3)[1:] for line in lines}


def ours_read_by_the_library(folder):
    path = os.path.join(folder, "ours.safetensors")
    check("write", subprocess.run([program, "--write", path]).returncode == 0)
    with safetensors.safe_open(path, framework="np") as f:
        check("metadata", f.metadata() == {"format": "pt"})
        names = set(f.keys())
    header, data = header_of(path)
    check("names", names == set(header) - {"__metadata__"} and len(names) == 18)
    for name in sorted(names):      # names look like: a/F32 e-acute quote backslash tab
        word = name[2:].split()[0]
        begin, end = header[name]["data_offsets"]
        check(f"{word}: name, dtype and bytes", name == f'a/{word} \u00e9"\\\t'
              and header[name]["dtype"] == word and data[begin:end] == bytes(range(1, end - begin + 1)))
    # The library writes the same tensors to the same bytes.
    plain = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1",
             "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1"}
    for word, dtype in plain.items():
        with safetensors.safe_open(path, framework="np") as f:
            name = next(n for n in names if n[2:].split()[0] == word)
            want = np.frombuffer(bytes(range(1, 6 * int(dtype[1]) + 1)), "<" + dtype).reshape(2, 3)
            got = f.get_tensor(name)
            check(f"{word}: values", got.dtype == want.dtype and np.array_equal(got, want))
    words = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
             "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
             "U8": "uint8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
             "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
    pieces = {n: np.frombuffer(data[slice(*header[n]["data_offsets"])], "u1") for n in names}
    tensors = {}
    for name, piece in pieces.items():
        dtype, shape = words[header[name]["dtype"]], header[name]["shape"]
        if hasattr(safetensors, "TensorSpec"):      # since 0.8
            tensors[name] = safetensors.TensorSpec(dtype=dtype, shape=shape, data_len=piece.nbytes,
                                                   data_ptr=piece.ctypes.data)
        else:
            tensors[name] = {"dtype": dtype, "shape": shape, "data": piece.tobytes()}
    try:
        theirs = safetensors.serialize(tensors, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:      # an older library knows fewer dtypes
        print("skip same bytes:", error)
        return 1
    check("the same bytes as the library's", theirs == open(path, "rb").read())
    return 0


def theirs_read_by_us(folder):
    path = os.path.join(folder, "theirs.safetensors")
    rng = np.random.default_rng(1)
    tensors = {f"{dtype} \u4e16": rng.integers(0, 100, (3, 2, 5)).astype(dtype)
               for dtype in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "bool")}
    tensors["scalar"] = np.array(2.5, "f4")
    tensors["empty"] = np.zeros((3, 0, 2), "f8")
    tensors["nan"] = np.array([np.nan, -np.inf, -0.0], "f2")
    safetensors.numpy.save_file(tensors, path, metadata={"format": "np", "x": "y"})
    status, got = listing(path)
    check("read", status == 0 and set(got) == set(tensors))
    for name, tensor in tensors.items():
        dtype, shape, data = got.get(name, ("", "", ""))
        check(f"{name}: shape and bytes", shape == ",".join(map(str, tensor.shape))
              and bytes.fromhex(data) == tensor.tobytes())


# Where mixprec is stricter, by its own comments.
STRICTER = ("unknown key", "appears twice", "two tensors have the name", "NUL",
            "too large", "rank above 8")

SEEDS = ({"a": ("F32", [2], [0, 8])}, {"a": ("U8", [3], [0, 3]), "b": ("I16", [0, 4], [3, 3])},
         {"w": ("F64", [1, 2], [0, 16]), "x\u00e9": ("BF16", [], [16, 18]), "q": ("F4", [6], [18, 21])},
         {"e": ("I64", [0], [0, 0]), "f": ("BOOL", [2, 2], [0, 4])})
NUMBERS = (0, 1, 2, 3, 4, 7, 8, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, 1.0, "1", None)


def mutated(rng):
    """A small file, with a number, a word or bytes of its header changed."""
    header = {name: {"dtype": d, "shape": list(s), "data_offsets": list(o)}
              for name, (d, s, o) in rng.choice(SEEDS).items()}
    size = max(value["data_offsets"][1] for value in header.values())
    for _ in range(rng.choice((0, 1, 1, 2))):
        value = header[rng.choice(list(header))]
        key = rng.choice(("dtype", "shape", "data_offsets"))
        if key == "dtype":
            value[key] = rng.choice(("F16", "F8_E4M3", "U64", "F6_E2M3", "C64", "f32", "", 3))
        elif value[key]:
            value[key][rng.randrange(len(value[key]))] = rng.choice(NUMBERS)
    if rng.random() < 0.2:
        header["__metadata__"] = rng.choice(({}, None, {"k": "v"}, {"k": 1}, [], "x"))
    text = bytearray(json.dumps(header, ensure_ascii=rng.random() < 0.5).encode())
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        at = rng.randrange(len(text))
        piece = rng.choice((b"", b" ", b"\n", b",", b"}", b"{", b'"', b"\\", b"\xff", b"0", b"-", b"\\u0000", b"e"))
        text[at:at + rng.randrange(2)] = piece
    data = bytes(size + rng.choice((0,) * 18 + (1, -1)) if size else 0)
    return struct.pack("<Q", len(text) + rng.choice((0,) * 18 + (1, -1))) + bytes(text) + data


def judged_alike(folder, n=4000):
    if not hasattr(safetensors, "TensorSpec"):
        print("skip judged alike: the library is older than 0.8 and knows fewer dtypes")
        return 1
    rng = random.Random(7)
    files, theirs = [], []
    for i in range(n):
        files.append(os.path.join(folder, f"m{i}"))
        content = mutated(rng)
        with open(files[-1], "wb") as f:
            f.write(content)
        try:
            safetensors.deserialize(content)
            theirs.append("")
        except Exception as error:      # SafetensorError, and what its layers raise
            theirs.append(str(error) or "refused")
    run = subprocess.run([program, "--judge"] + files, capture_output=True, check=True)
    ours = run.stdout.decode(errors="replace").split("\n")[:n]
    check("each file is judged", len(ours) == n)
    lax = [i for i in range(n) if not ours[i] and theirs[i]]
    strict = [i for i in range(n) if ours[i] and not theirs[i] and not any(s in ours[i] for s in STRICTER)]
    for i in (lax + strict)[:5]:
        print("  ", open(files[i], "rb").read(), "ours:", ours[i], "theirs:", theirs[i])
    check(f"of {n} files, {sum(1 for t in theirs if not t)} good by the library, none it refuses is read", not lax)
    check("none it reads is refused without a documented reason", not strict)
    return 0


with tempfile.TemporaryDirectory() as folder:
    skipped = ours_read_by_the_library(folder)
    theirs_read_by_us(folder)
    skipped += judged_alike(folder)
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(failed != 0)
