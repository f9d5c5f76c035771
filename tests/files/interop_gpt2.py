#!/usr/bin/env python3
"""interop_gpt2.py - exchanges GPT-2's weights with transformers: the logits agree.
SPDX-License-Identifier: MIT OR Unlicense

  interop_gpt2.py [PATH_OF_test_gpt2]     (default: $BUILD/test_gpt2)

Needs torch and transformers; exits with 77, skipped, without them.
"""
import os
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

program = os.path.abspath(sys.argv[1] if len(sys.argv) > 1
                          else os.path.join(os.environ.get("BUILD", "build"), "test_gpt2"))
passed = failed = 0


def check(name, condition):
    global passed, failed
    if condition:
        passed += 1
    else:
        failed += 1
    print("ok  " if condition else "FAIL", name)


def ours(folder, ids):
    run = subprocess.run([program, "--logits", folder] + [str(i) for i in ids],
                         capture_output=True, text=True)
    if run.returncode:
        print(run.stderr.strip())
        return None
    numbers = [float(line) for line in run.stdout.split()]
    return np.array(numbers).reshape(len(ids), -1)


def agree(name, folder, ids):
    """Both in f32, against the same model in f64: within a few roundings of it."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).float().eval()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].double().numpy()
        truth = model.double()(torch.tensor([ids])).logits[0].numpy()
    got = ours(folder, ids)
    if got is None or got.shape != truth.shape:
        check(f"{name}: logits", False)
        return
    size = np.abs(truth).max()
    off, their_off = np.abs(got - truth).max() / size, np.abs(theirs - truth).max() / size
    check(f"{name}: {off:.1e} off f64, transformers {their_off:.1e}",
          off < max(8 * their_off, 2e-6))


def random_model(folder, dtype, **more):
    torch.manual_seed(1)
    settings = dict(vocab_size=71, n_positions=24, n_embd=48, n_layer=3, n_head=4,
                    bos_token_id=None, eos_token_id=None)
    settings.update(more)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    with torch.no_grad():
        for p in model.parameters():        # biases begin as zeros, and would hide
            p.add_(torch.randn_like(p) * 0.1)
    model.to(dtype).save_pretrained(folder)


def trained(folder, text, *more):
    run = subprocess.run([program, "--run", "--data", text, "--layers", "2", "--heads", "2",
                          "--width", "32", "--block", "16", "--steps", "40", "--eval-batches", "1",
                          "--lr", "1e-2", "--device", "cpu", "--threads", "1", "--quiet",
                          "--export", folder, *more], capture_output=True, text=True)
    check(f"export {' '.join(more)}", run.returncode == 0)


def main():
    transformers.utils.logging.disable_progress_bar()
    rng = np.random.default_rng(2)
    with tempfile.TemporaryDirectory() as root:
        cases = {"f32": dict(dtype=torch.float32), "f16": dict(dtype=torch.float16),
                 "bf16": dict(dtype=torch.bfloat16),
                 "gelu": dict(dtype=torch.float32, activation_function="gelu"),
                 "own head": dict(dtype=torch.float32, tie_word_embeddings=False)}
        for name, settings in cases.items():
            folder = os.path.join(root, name.replace(" ", "_"))
            random_model(folder, **settings)
            agree(f"read, {name}", folder, rng.integers(0, 71, 24).tolist())
        text = os.path.join(root, "text")
        with open(text, "w") as f:
            f.write("".join(f"the fox {n % 7} jumps over {n % 11} dogs.\n" for n in range(200)))
        for name, more in {"plain": [], "biases": ["--bias", "on", "--dtype", "bf16"],
                           "tanh": ["--activation", "gelu-tanh", "--head", "own"]}.items():
            folder = os.path.join(root, "to_" + name)
            trained(folder, text, *more)
            agree(f"written, {name}", folder, rng.integers(0, 20, 16).tolist())
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


sys.exit(main())
