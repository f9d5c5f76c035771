"""PyTorch's time for one GPT training step on the CPU, the peer of mixprec's own bench.

    python3 torch_gpt.py [--model char|gpt2] [--dtype f32|f16|bf16] [--threads N] [--steps N] [--compile]

char is nanoGPT's CPU configuration of Shakespeare: 4 layers, 4 heads, 128 wide, block 64,
batch 12, vocabulary 65. gpt2 is the 124M model at batch 4, 64 tokens. One step is zero_grad,
forward, backward, unscale (f16), clip at 1.0, fused AdamW; --compile takes the model through
torch.compile first. For PyTorch's best numbers, start
it with the environment it prints when that is missing.
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import os
import statistics
import time
import torch
from torch import nn
from torch.nn import functional as F

MODELS = {  # layers, heads, width, block, vocabulary, biases, batch, tokens, GELU
    "char": (4, 4, 128, 64, 65, False, 12, 64, "none"),
    "gpt2": (12, 12, 768, 1024, 50257, True, 4, 64, "tanh"),
}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TUNING = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592:"
                            "glibc.malloc.trim_threshold=17179869184"}


class Block(nn.Module):
    def __init__(self, heads, width, bias, gelu):
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (a.view(b, t, self.heads, c // self.heads).transpose(1, 2)
                   for a in self.qkv(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate=self.gelu))


class GPT(nn.Module):
    def __init__(self, model):
        super().__init__()
        layers, heads, width, block, vocab, bias, _, _, gelu = MODELS[model]
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(heads, width, bias, gelu) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, bias=bias)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                down = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if down else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model, lr=1e-3, betas=(0.9, 0.99)):
    """Decay on the matrices only, as nanoGPT."""
    p = list(model.parameters())
    groups = [{"params": [a for a in p if a.dim() >= 2], "weight_decay": 0.1},
              {"params": [a for a in p if a.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def train_step(model, opt, scaler, dtype, ids, targets, device="cpu"):
    opt.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        loss = model(ids, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    return loss.detach()


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--model", default="char", choices=MODELS)
    args.add_argument("--dtype", default="f32", choices=DTYPES)
    args.add_argument("--threads", type=int, default=os.cpu_count())
    args.add_argument("--steps", type=int, default=0, help="0: 100 of char, 8 of gpt2")
    args.add_argument("--warmup", type=int, default=3)
    args.add_argument("--compile", action="store_true")
    a = args.parse_args()
    for name, value in TUNING.items():
        if os.environ.get(name) != value:
            print(f"hint: {name}={value} python3 {__file__} ...")
    torch.set_num_threads(a.threads)
    torch.manual_seed(1337)
    model, dtype = GPT(a.model), DTYPES[a.dtype]
    opt = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    vocab, batch, tokens = MODELS[a.model][4], MODELS[a.model][6], MODELS[a.model][7]
    steps = a.steps or (100 if a.model == "char" else 8)
    run, how = (torch.compile(model), "compiled") if a.compile else (model, "eager")
    times = []
    for i in range(a.warmup + steps):
        text = torch.randint(vocab, (batch, tokens + 1))
        start = time.perf_counter()
        loss = float(train_step(run, opt, scaler, dtype, text[:, :-1], text[:, 1:]))
        if i >= a.warmup:
            times.append(1e3 * (time.perf_counter() - start))
    median = statistics.median(times)
    print(f"torch {torch.__version__} {a.model} {a.dtype} {how} {a.threads} threads, "
          f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {steps} steps: "
          f"{median:.2f} ms [{min(times):.2f} {max(times):.2f}], "
          f"{batch * tokens / median * 1e3:.0f} tokens/s, loss {loss:.4f}")


if __name__ == "__main__":
    main()
