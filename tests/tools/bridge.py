"""bridge.py - calls the shared library from Python on tensors of PyTorch, for comparisons with PyTorch's own tests.
SPDX-License-Identifier: MIT OR Unlicense

    m = bridge.Mixprec("build/shared")     what `make shared` built
    m.begin()                              a step
    y = m.add(m.tensor(a), m.tensor(b))    mixp_add; raises Refused with the typed error
    m.read(y)                              a tensor of PyTorch: f64, or int64

A name that the library does not have raises Missing: no counterpart.
"""
import os
import re
import subprocess
import sys
import tempfile

import cffi
import torch

ADDONS = ("conv", "ops", "recurrent")


class Refused(Exception):
    """The library refused a call: its code and message."""


class Missing(Exception):
    """mixprec has no counterpart; the text says of what."""


def addon_text(name, root):
    """The declarations of an add-on, as cffi reads them: what stands before its implementation."""
    with open(os.path.join(root, "examples", name + ".h")) as file:
        text = file.read().split(f"#ifndef {name.upper()}_NO_IMPLEMENTATION", 1)[0]
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE).replace(name.upper() + "_API ", "")


def build_addons(folder, root):
    """Compiles the add-ons of examples/ into one library beside the shared library. Returns its declarations, and its path."""
    to = os.path.join(tempfile.mkdtemp(prefix="mixp_addons_"), "libaddons.so")
    source = '#include "mixprec.h"\n' + "".join(
        f'#define {n.upper()}_API extern __attribute__((visibility("default")))\n#include "examples/{n}.h"\n'
        for n in ADDONS)
    subprocess.run(["cc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-w", "-I" + root, "-x", "c", "-", "-x", "none", "-o", to,
                    "-L" + folder, "-lmixprec", "-lm", "-Wl,-rpath," + os.path.abspath(folder)],
                   input=source, text=True, check=True)
    return "".join(addon_text(n, root) for n in ADDONS), to


class Mixprec:
    DTYPES = {torch.float32: "MIXP_F32", torch.float16: "MIXP_F16", torch.bfloat16: "MIXP_BF16",
              torch.int32: "MIXP_I32", torch.uint8: "MIXP_U8"}

    def __init__(self, folder, addons=True):
        root = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
        self.ffi = cffi.FFI()
        with open(os.path.join(folder, "libmixprec.cdef")) as text:
            self.ffi.cdef(text.read())
        self.lib = self.ffi.dlopen(os.path.join(folder, "libmixprec.dylib" if sys.platform == "darwin" else "libmixprec.so"))
        self.more = None
        if addons:
            text, path = build_addons(folder, root)
            self.ffi.cdef(text)
            self.more = self.ffi.dlopen(path)
        self.dtypes = {d: getattr(self.lib, name) for d, name in self.DTYPES.items()}
        self.torch_dtypes = {v: k for k, v in self.dtypes.items()}
        self.ctx = self.lib.mixp_context_new(self.ffi.NULL)
        self.calls = 0

    # --- steps and tensors ---

    def begin(self):
        self.lib.mixp_context_clear_error(self.ctx)
        self.check(self.lib.mixp_step_begin(self.ctx))
        self.calls = 0

    def check(self, result):
        if result != self.lib.MIXP_OK:
            self.fail(result)

    def fail(self, result=None):
        why = self.ffi.new("const char **")
        code = self.lib.mixp_context_error(self.ctx, why)
        text = self.ffi.string(why[0]).decode() if why[0] else ""
        self.lib.mixp_context_clear_error(self.ctx)
        names = self.ffi.typeof("mixp_result").elements
        raise Refused(names.get(code or result or 0, "?") + ": " + text)

    def tensor(self, t, grad=False):
        """A tensor of this step with the numbers of t: i64 becomes i32, and bool becomes u8."""
        if t.dtype == torch.int64:
            t = t.to(torch.int32)
        if t.dtype == torch.bool:
            t = t.to(torch.uint8)
        if t.dtype not in self.dtypes:
            raise Missing(f"{str(t.dtype)[6:]} tensor")
        dense = torch.empty(max(t.numel(), 1), dtype=t.dtype)
        dense[:t.numel()] = t.detach().reshape(-1)
        data = bytes(dense.view(torch.uint8).numpy())
        y = self.lib.mixp_input(self.ctx, self.dtypes[t.dtype], t.dim(), list(t.shape), data)
        if y == self.ffi.NULL:
            self.fail()
        if grad:
            self.check(self.lib.mixp_tensor_set_requires_grad(y, 1))
        return y

    def read(self, t):
        """The numbers of t: f64, or int64."""
        real = self.torch_dtypes[t.dtype].is_floating_point
        to = torch.empty(shape(t), dtype=torch.float64 if real else self.torch_dtypes[t.dtype])
        if t.count:
            self.check(self.lib.mixp_read(t, self.ffi.cast("void *", to.data_ptr()),
                                          self.lib.MIXP_F64 if real else t.dtype, t.count))
        return to if real else to.to(torch.int64)

    def backward(self, loss):
        self.check(self.lib.mixp_backward(self.ctx, loss))

    def grad(self, t):
        """The gradient of t; zeros if it has none."""
        return self.read(t.grad) if t.grad != self.ffi.NULL else torch.zeros(shape(t), dtype=torch.float64)

    # --- calls ---

    def has(self, name):
        return hasattr(self.lib, "mixp_" + name) or hasattr(self.more, "mixp_" + name)

    def __getattr__(self, name):
        """mixp_NAME of the library or an add-on, or NAME of an add-on, with the context as its first argument."""
        function = (getattr(self.lib, "mixp_" + name, None) or getattr(self.more, "mixp_" + name, None)
                    or getattr(self.more, name, None))
        if function is None:
            raise Missing("no " + name)

        def call(*args):
            self.calls += 1
            try:
                y = function(self.ctx, *args)
            except TypeError as error:
                if "mixp_tensor *" in str(error):
                    raise Missing("a number in place of a tensor") from error
                raise
            if isinstance(y, int):
                self.check(y)
            elif y == self.ffi.NULL:
                self.fail()
            return y
        return call

    def new(self, kind, **fields):
        """A zeroed struct with these fields."""
        s = self.ffi.new(kind + " *")
        for name, value in fields.items():
            setattr(s, name, value)
        return s

    def several(self, n):
        return self.ffi.new("mixp_tensor *[]", n)


def shape(t):
    return [t.shape[i] for i in range(t.rank)]
