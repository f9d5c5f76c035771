"""Records the logits of a small GPT-2 of transformers for test_gpt2.c: python3 record_gpt2.py > gpt2.h

Weights come from generate.py, in the order of GPT-2's own names, in the layout of its files (linear
layers are [in, out]). They are multiples of 1/128 below 1, which f32, f16 and bf16 hold as they are.
The model runs in float64; both of its activations.
SPDX-License-Identifier: MIT OR Unlicense"""
import torch
import transformers
from generate import Generator, array, header

LAYERS, HEADS, WIDTH, POSITIONS, VOCAB, BATCH, LENGTH = 2, 2, 16, 12, 29, 2, 8


def names():
    yield "wte.weight", (VOCAB, WIDTH)
    yield "wpe.weight", (POSITIONS, WIDTH)
    for i in range(LAYERS):
        for name, rows, cols in (("ln_1", WIDTH, 0), ("attn.c_attn", WIDTH, 3 * WIDTH),
                                 ("attn.c_proj", WIDTH, WIDTH), ("ln_2", WIDTH, 0),
                                 ("mlp.c_fc", WIDTH, 4 * WIDTH), ("mlp.c_proj", 4 * WIDTH, WIDTH)):
            yield f"h.{i}.{name}.weight", (rows, cols) if cols else (rows,)
            yield f"h.{i}.{name}.bias", (cols or rows,)
    yield "ln_f.weight", (WIDTH,)
    yield "ln_f.bias", (WIDTH,)


def weights():
    g = Generator(7)
    for name, shape in names():
        yield name, torch.from_numpy(g.short(*shape) / 2).to(torch.float64)


def logits(activation, ids):
    sizes = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        activation_function=activation, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(sizes).to(torch.float64).eval()
    missing, extra = model.transformer.load_state_dict(dict(weights()), strict=False)
    assert not extra and all(name.endswith(("attn.bias", "attn.masked_bias")) for name in missing)
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


def main():
    header("record_gpt2.py", f"Logits of a small GPT-2 of transformers {transformers.__version__}.")
    for name in ("LAYERS", "HEADS", "WIDTH", "POSITIONS", "VOCAB", "BATCH", "LENGTH"):
        print(f"#define GPT2_{name} {globals()[name]}")
    print()
    tokens = Generator(8).ints(VOCAB, BATCH, LENGTH)
    for name in ("gelu_new", "gelu"):
        array("double", f"gpt2_logits_{name}", logits(name, tokens).ravel(), 12)
    print("#endif")


if __name__ == "__main__":
    main()
