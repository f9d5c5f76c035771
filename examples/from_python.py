"""from_python.py - trains a small network on numpy arrays, through the shared library, beside PyTorch if it is there.

    make shared && python3 examples/from_python.py [build/shared]          (needs cffi and numpy)

SPDX-License-Identifier: MIT OR Unlicense

libmixprec.cdef declares all of the API, so a call here is the call in C. A handle is a pointer; an array of numpy is
passed by its address. The library has no macros (MIXP_AUTOCAST): mixp_autocast_open and mixp_autocast_close
open and close a region."""
import math
import os
import sys

import cffi
import numpy as np

folder = sys.argv[1] if len(sys.argv) > 1 else "build/shared"
ffi = cffi.FFI()
with open(os.path.join(folder, "libmixprec.cdef")) as declarations:
    ffi.cdef(declarations.read())
lib = ffi.dlopen(os.path.join(folder, "libmixprec.dylib" if sys.platform == "darwin" else "libmixprec.so"))

# Two classes of points: inside and outside a ring. Weights and batches are the same for mixprec and PyTorch.
random = np.random.default_rng(1)
points = random.uniform(-1, 1, (4096, 2)).astype(np.float32)
labels = (np.abs(np.hypot(*points.T) - 0.6) < 0.2).astype(np.int32)
sizes = [(32, 2), (32,), (32, 32), (32,), (2, 32), (2,)]
weights = [random.uniform(-1, 1, s).astype(np.float32) / math.sqrt(s[-1] if len(s) > 1 else 32) for s in sizes]
STEPS, BATCH, RATE = 300, 256, 0.01


def batches():
    for step in range(STEPS):
        at = np.arange(step * BATCH, (step + 1) * BATCH) % len(points)
        yield points[at], labels[at]


def train(dtype):
    ctx = lib.mixp_context_new(ffi.NULL)
    scaler = lib.mixp_scaler_new(ctx, ffi.NULL)
    description = lib.mixp_adamw_defaults()
    description.lr = RATE
    opt = lib.mixp_optimizer_new(ctx, ffi.addressof(description))
    # A view has the array's own memory: training writes into the arrays of numpy.
    arrays = [w.copy() for w in weights]
    views = [lib.mixp_view(ctx, b"w%d" % i, lib.MIXP_F32, a.ndim, list(a.shape), ffi.from_buffer(a))
             for i, a in enumerate(arrays)]
    for w in views:
        lib.mixp_tensor_set_requires_grad(w, 1)
        lib.mixp_optimizer_add(opt, w, ffi.NULL)
    losses, why = [], ffi.new("const char **")
    for x, y in batches():
        lib.mixp_step_begin(ctx)
        lib.mixp_zero_grad(opt)
        region = lib.mixp_autocast_open(ctx, dtype)
        h = lib.mixp_input(ctx, lib.MIXP_F32, 2, list(x.shape), ffi.from_buffer(x))
        for i in (0, 2):
            h = lib.mixp_relu(ctx, lib.mixp_linear(ctx, h, views[i], views[i + 1]))
        h = lib.mixp_linear(ctx, h, views[4], views[5])
        target = lib.mixp_input(ctx, lib.MIXP_I32, 1, list(y.shape), ffi.from_buffer(y))
        loss = lib.mixp_cross_entropy(ctx, h, target, -100)
        lib.mixp_autocast_close(ctx, region)
        lib.mixp_backward(ctx, lib.mixp_scaler_scale(scaler, loss))
        lib.mixp_scaler_step(scaler, opt)
        lib.mixp_scaler_update(scaler)
        if lib.mixp_context_error(ctx, why) != lib.MIXP_OK:
            sys.exit(ffi.string(why[0]).decode())
        losses.append(lib.mixp_item(loss))
    lib.mixp_context_free(ctx)
    return losses, arrays


def train_torch():
    parameters = [torch.tensor(w, requires_grad=True) for w in weights]
    opt = torch.optim.AdamW(parameters, lr=RATE)
    losses = []
    for x, y in batches():
        opt.zero_grad()
        h = torch.from_numpy(x)
        for i in (0, 2):
            h = torch.relu(torch.nn.functional.linear(h, parameters[i], parameters[i + 1]))
        h = torch.nn.functional.linear(h, parameters[4], parameters[5])
        loss = torch.nn.functional.cross_entropy(h, torch.from_numpy(y).long())
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


for name, dtype in ("fp32", lib.MIXP_F32), ("fp16", lib.MIXP_F16):
    losses, arrays = train(dtype)
    hidden = np.maximum(np.maximum(points @ arrays[0].T + arrays[1], 0) @ arrays[2].T + arrays[3], 0)
    right = np.mean(np.argmax(hidden @ arrays[4].T + arrays[5], axis=1) == labels)
    print(f"mixprec {name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, numpy finds {100 * right:.1f} % right")
    if dtype == lib.MIXP_F32:
        exact = losses
try:
    import torch
except ImportError:
    print("PyTorch is not installed: nothing to compare with")
else:
    theirs = train_torch()
    print(f"PyTorch fp32: loss {theirs[0]:.4f} to {theirs[-1]:.4f}, at most "
          f"{max(abs(a - b) for a, b in zip(exact, theirs)):.1e} from mixprec's in {STEPS} steps")
