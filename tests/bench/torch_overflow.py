"""PyTorch's fp16 autocast and GradScaler on the weights and batches of tests/programs/overflow.c.

    make build/overflow && build/overflow growth --export DIR && python3 tests/bench/torch_overflow.py DIR

Says that PyTorch is missing, and ends well, where it is. Trains in f32, in fp16 and in bf16 under
autocast on the CPU, whose rules for these operators are those of CUDA but for layer norm and
cross entropy, which are put in f32 here as CUDA does. Prints the rows of overflow.c's table.
SPDX-License-Identifier: MIT OR Unlicense
"""
import json
import math
import struct
import sys

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("PyTorch is missing: nothing to compare with")
    sys.exit(0)

LAYERS, WIDTH, HEADS, VOCAB, LENGTH, BATCH, STEPS, LAST = 3, 32, 2, 32, 16, 16, 600, 50
MIDDLE = f"h.{LAYERS // 2}."
LARGE = 366.0


def read_weights(path):
    """The f32 tensors of a safetensors file that are weights, by name."""
    with open(path, "rb") as f:
        data = f.read()
    (n,) = struct.unpack("<Q", data[:8])
    weights = {}
    for name, entry in json.loads(data[8:8 + n]).items():
        if name == "__metadata__" or name.split(".")[0] in ("mixprec", "scaler", "optimizer"):
            continue
        first, last = entry["data_offsets"]
        flat = torch.frombuffer(bytearray(data[8 + n + first:8 + n + last]), dtype=torch.float32)
        weights[name] = flat.reshape(entry["shape"]).clone().requires_grad_()
    return weights


def read_batches(path):
    with open(path, "rb") as f:
        flat = torch.frombuffer(bytearray(f.read()), dtype=torch.int32)
    return flat.reshape(STEPS, 2, BATCH, LENGTH).long()


def norm(w, name, x):
    return F.layer_norm(x.float(), (WIDTH,), w[name + ".w"], w[name + ".b"], 1e-5)


def linear(w, name, x):
    return F.linear(x, w[name + ".w"], w[name + ".b"])


def heads(x):
    return x.view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)


def loss_of(w, ids, targets):
    x = F.embedding(ids, w["tokens"]) + w["places"]
    for i in range(LAYERS):
        h = f"h.{i}."
        q, k, v = linear(w, h + "attn.qkv", norm(w, h + "norm1", x)).split(WIDTH, 2)
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
        x = x + linear(w, h + "attn.out", y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        y = F.gelu(linear(w, h + "mlp.up", norm(w, h + "norm2", x)), approximate="tanh")
        x = x + linear(w, h + "mlp.down", y)
    logits = F.linear(norm(w, "norm", x), w["tokens"])
    return F.cross_entropy(logits.float().view(-1, VOCAB), targets.reshape(-1))


def read_grown(path):
    with open(path, "rb") as f:
        return torch.frombuffer(bytearray(f.read()), dtype=torch.float32)


def grow(w, case, factor):
    """What was planted is in the weights that were read; this is what changes of it."""
    with torch.no_grad():
        if case == "growth":
            w[MIDDLE + "mlp.up.w"][-1, 0] = LARGE * factor
        if case == "logits":
            w[MIDDLE + "attn.qkv.w"][0, 0] = LARGE * factor


def freeze_planted(w, case):
    mlp, attention = MIDDLE + "mlp.", MIDDLE + "attn.qkv"
    if case != "logits":
        w[mlp + "up.w"].grad[-1] = 0
        w[mlp + "up.b"].grad[-1] = 0
        w[mlp + "down.w"].grad[:, -1] = 0
    if case == "growth":
        w[mlp + "up.w"].grad[:, 0] = 0
    if case == "logits":
        w[attention + ".w"].grad[:, 0] = 0
        for row in (0, WIDTH):
            w[attention + ".w"].grad[row] = 0
            w[attention + ".b"].grad[row] = 0
    if case != "planted":
        norm = MIDDLE + ("norm1" if case == "logits" else "norm2")
        w[norm + ".w"].grad[0] = 0
        w[norm + ".b"].grad[0] = 0


def train(folder, case, dtype):
    w = read_weights(folder + "/weights.safetensors")
    batches = read_batches(folder + "/batches.bin")
    grown = read_grown(folder + "/grown.bin")
    opt = torch.optim.AdamW(w.values(), lr=3e-3, weight_decay=0)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses, applied = [], 0
    for step in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = 3e-3 * max(0.01, 1 - 0.99 * applied / STEPS)
        grow(w, case, grown[step])
        opt.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = loss_of(w, batches[step, 0], batches[step, 1])
        scaler.scale(loss).backward()
        freeze_planted(w, case)
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        applied += before > 0 and scaler.get_scale() >= before
        losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST, applied, scaler.get_scale()


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: torch_overflow.py DIR, the one of overflow --export DIR")
    torch.manual_seed(0)
    with open(sys.argv[1] + "/case.txt") as f:
        case = f.read().strip()
    print(f"{case + ', PyTorch ' + torch.__version__:<30} {'loss':>10} {'applied':>8} {'skipped':>10} {'scale':>12}")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        loss, applied, scale = train(sys.argv[1], case, dtype)
        text = f"{loss:.4f}" if math.isfinite(loss) else "not finite"
        print(f"{str(dtype):<30} {text:>10} {applied:>8} {STEPS - applied:>10} {scale:>12g}")


if __name__ == "__main__":
    main()
