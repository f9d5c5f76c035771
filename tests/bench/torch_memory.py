"""PyTorch's memory for GPT training steps on the CPU: one line of numbers for memory.sh.

    python3 torch_memory.py [--model char|medium|gpt2] [--dtype f32|f16|bf16]

Prints MiB of parameters, gradients, optimizer state, low copies of weights (autocast's cache),
activations (all else that autograd saves for the backward pass, each storage once), and the
process: the peak of its resident memory over two steps, less what it was after training a minute
model, so that neither PyTorch's libraries nor their first use count. "-" where the system does
not tell. (Without oneDNN kernels for it, f16 takes minutes.)
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import torch
from torch_gpt import DTYPES, GPT, MODELS, make_optimizer, train_step

# Added to the table that GPT reads: what only this script measures.
MODELS["minute"] = (1, 1, 8, 8, 65, False, 1, 8, "none")
MODELS["medium"] = (6, 6, 384, 256, 65, False, 16, 256, "none")
MODELS["gpt2"] = (12, 12, 768, 64, 50257, True, 4, 64, "tanh")
VIEWS = ("ToCopyBackward0", "TBackward0", "ViewBackward0", "TransposeBackward0",
         "AsStridedBackward0", "UnsafeViewBackward0")


def resident(field):
    """VmRSS or VmHWM of this process in MiB, or None."""
    try:
        with open("/proc/self/status", encoding="ascii") as f:
            return next(float(a.split()[1]) / 1024 for a in f if a.startswith(field))
    except (OSError, StopIteration):
        return None


def of_weight(t):
    """Whether t is a parameter, or a cast or view of one."""
    f = t.grad_fn
    while f is not None and f.name() in VIEWS:
        f = f.next_functions[0][0]
    return t.grad_fn is not None and f is not None and "AccumulateGrad" in f.name()


def saved_bytes(model, step):
    """What autograd saves in one step: (low copies of weights, activations)."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (of_weight(t), storage.nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step()
    return tuple(sum(n for w, n in seen.values() if w == of) for of in (True, False))


def make(name, dtype):
    """A model's training step, the model, and its optimizer."""
    model = GPT(name)
    opt = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    vocab, batch, tokens = MODELS[name][4], MODELS[name][6], MODELS[name][7]

    def step():
        text = torch.randint(vocab, (batch, tokens + 1))
        return train_step(model, opt, scaler, dtype, text[:, :-1], text[:, 1:])

    return step, model, opt


def main():
    args = argparse.ArgumentParser()
    args.add_argument("--model", default="char", choices=("char", "medium", "gpt2"))
    args.add_argument("--dtype", default="f32", choices=DTYPES)
    args.add_argument("--threads", type=int, default=1)
    a = args.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(1337)
    small = make("minute", DTYPES[a.dtype])[0]
    small()
    small()
    before = resident("VmRSS")
    step, model, opt = make(a.model, DTYPES[a.dtype])
    step()                      # the first makes gradients and optimizer state
    saved = saved_bytes(model, step)
    peak = resident("VmHWM")
    params = list(model.parameters())
    state = [s for p in params for s in opt.state[p].values() if torch.is_tensor(s)]
    sizes = [sum(t.nbytes for t in ts) for ts in (params, [p.grad for p in params], state)]
    mib = [n / 2**20 for n in sizes + list(saved)]
    process = "-" if before is None or peak is None else f"{peak - before:.2f}"
    print(" ".join(f"{n:.2f}" for n in mib), process)


if __name__ == "__main__":
    main()
