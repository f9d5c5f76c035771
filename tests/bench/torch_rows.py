"""Does PyTorch compute a sequence to the same bits in any batch, and token by token?

    python3 tests/bench/torch_rows.py [--threads N]

The peer of tests/core/operators/test_any_batch.c, whose answer for mixprec is yes. A GPT of nanoGPT's CPU
configuration, with random weights, gives the log-probability of each next token: of all 12 sequences at
once, of each sequence by itself, and of each token after its prefix, as generation does. The table has the
share of log-probabilities whose bits differ, and the ratios of the probabilities.
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import torch
from torch.nn import functional as F
from torch_gpt import DTYPES, GPT, MODELS


def log_p(model, ids, targets, dtype):
    """As GPT.forward, without the mean."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        x = model.wte(ids) + model.wpe.weight[:ids.shape[1]]
        for block in model.blocks:
            x = block(x)
        logits = F.linear(model.ln_f(x), model.wte.weight)
    return F.log_softmax(logits.float(), -1).gather(-1, targets[..., None])[..., 0]


def row(name, dtype, got, want):
    ratio = (got.double() - want.double()).exp()
    share = (got != want).double().mean().item()
    print(f"{name:8} {dtype:5} {100 * share:6.1f} % differ    ratio {ratio.min():.6f} to {ratio.max():.6f}", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(p.parse_args().threads)
    torch.manual_seed(1)
    model, (*_, vocab, _, batch, tokens, _) = GPT("char"), MODELS["char"]
    for weight in model.parameters():       # as large as those of a trained model
        weight.data *= 4 if weight.dim() > 1 else 1
    ids, targets = (torch.randint(vocab, (batch, tokens)) for _ in range(2))
    print(f"PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    for name, dtype in DTYPES.items():
        want = log_p(model, ids, targets, dtype).detach()       # as in training: with a graph
        with torch.no_grad():
            alone = torch.cat([log_p(model, ids[i:i + 1], targets[i:i + 1], dtype) for i in range(batch)])
            steps = torch.cat([log_p(model, ids[:1, :t], targets[:1, :t], dtype)[:, -1:] for t in range(1, tokens + 1)], 1)
        row("alone", name, alone, want)
        row("prefixes", name, steps, want[:1])


main()
