"""Records the training of a tiny GPT for test_reference.c: python3 record_gpt.py > gpt.h

The model is nanoGPT's: tied embeddings, pre-norm blocks, no biases, no dropout, erf GELU.
Weights and batches come from generate.py. AdamW, decay on matrices only, clip at 1.0.
float64 is the truth; the distance of PyTorch's own float32 from it shows what rounding
does. Under autocast the CPU takes the same dtypes as CUDA in this model, because the
residual stream and so every layer norm stay float32. `overflow` starts from a scale that is
far too high: 8 skips, then training.
SPDX-License-Identifier: MIT OR Unlicense"""
import torch
from torch.nn import functional as F
from generate import Generator, array, header

LAYERS, HEADS, WIDTH, BLOCK, BATCH, VOCAB = 2, 2, 32, 16, 4, 65
STEPS, BATCHES = 20, 4


def parameters(dtype):
    g = Generator(1)
    shapes = [(VOCAB, WIDTH), (BLOCK, WIDTH)]
    for _ in range(LAYERS):
        shapes += [(WIDTH,), (3 * WIDTH, WIDTH), (WIDTH, WIDTH),
                   (WIDTH,), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    shapes += [(WIDTH,)]
    return [(torch.ones(s) if len(s) == 1 else torch.from_numpy(g.fill(2.0 ** -3, *s)))
            .to(dtype).requires_grad_() for s in shapes]


def loss_of(p, ids, targets):
    b, t = ids.shape
    x = F.embedding(ids, p[0]) + p[1][:t]
    for i in range(LAYERS):
        ln1, qkv, proj, ln2, up, down = p[2 + 6 * i:8 + 6 * i]
        q, k, v = F.linear(F.layer_norm(x, (WIDTH,), ln1), qkv).split(WIDTH, dim=2)
        q, k, v = (a.view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2) for a in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(y.transpose(1, 2).reshape(b, t, WIDTH), proj)
        x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (WIDTH,), ln2), up)), down)
    logits = F.linear(F.layer_norm(x, (WIDTH,), p[-1]), p[0])
    return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


def train(dtype=torch.float32, low=None, init_scale=0.0):
    p = parameters(dtype)
    g = Generator(2)
    groups = [{"params": [a for a in p if a.dim() >= 2], "weight_decay": 0.1},
              {"params": [a for a in p if a.dim() < 2], "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), eps=1e-8)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale or 1.0, enabled=init_scale > 0)
    texts = torch.from_numpy(g.ints(VOCAB, BATCHES, BATCH, BLOCK + 1))
    losses, norms, scales = [], [], []
    for step in range(STEPS):
        text = texts[step % BATCHES]
        with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            loss = loss_of(p, text[:, :-1], text[:, 1:])
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norms.append(float(torch.nn.utils.clip_grad_norm_(p, 1.0)))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
    return losses, norms, scales, [float(a.detach().double().square().sum()) for a in p]


def main():
    torch.set_num_threads(1)
    header("record_gpt.py", "The first training steps of a tiny GPT.")
    for name in ("LAYERS", "HEADS", "WIDTH", "BLOCK", "BATCH", "VOCAB", "STEPS", "BATCHES"):
        print(f"#define GPT_{name} {globals()[name]}")
    exact = train(torch.float64)
    single = train(torch.float32)
    worst = max(abs(a - b) / b for a, b in zip(single[0], exact[0]))
    print(f"\n/* PyTorch's own float32 is within {worst:.1e} of these losses, relatively. */")
    array("double", "gpt_loss_f64", exact[0], 12)
    array("double", "gpt_norm_f64", exact[1], 12)
    print("/* The sum of squares of each parameter after the last step. */")
    array("double", "gpt_final_f64", exact[3], 12)
    array("double", "gpt_loss_f32", single[0])
    for name, low, scale in (("f16", torch.float16, 2.0 ** 16), ("bf16", torch.bfloat16, 0.0),
                             ("overflow", torch.float16, 2.0 ** 27)):
        losses, norms, scales, _ = train(torch.float32, low, scale)
        print(f"/* autocast to {low}, scale from {scale:.0f} (0: no GradScaler) */")
        array("double", f"gpt_loss_{name}", losses)
        if scale:
            array("double", f"gpt_scale_{name}", scales)
    print("#endif")


if __name__ == "__main__":
    main()
