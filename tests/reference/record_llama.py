"""Records Llama-like models of transformers and LoRA of peft for test_llama.c: python3 record_llama.py > llama.h

Weights come from generate.py, in the order of `names`: multiples of 1/128 below 1, which f32, f16 and bf16 hold as
they are. Models run in float64. Of all logits, two of each token are kept. Needs torch, transformers, peft, tokenizers.
SPDX-License-Identifier: MIT OR Unlicense"""
import json
import os
import tempfile
import numpy as np
import peft
import tokenizers
import torch
import transformers
from generate import Generator, array, header

LAYERS, HEADS, WIDTH, INNER, VOCAB, POSITIONS, LENGTH = 2, 4, 32, 48, 424, 16, 24
TEXT = "the gradient of the loss"
STEPS, RANK, ALPHA = 20, 2, 4
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=10000.0)
CASES = {
    "tied": dict(tie_word_embeddings=True, num_key_value_heads=2),
    "biases": dict(tie_word_embeddings=False, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "llama3": dict(tie_word_embeddings=False, num_key_value_heads=1, head_dim=12, rope_parameters=dict(
        rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32,
        rope_theta=5000.0)),
    "linear": dict(tie_word_embeddings=True, num_key_value_heads=2, rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=10000.0)),
    "dynamic": dict(tie_word_embeddings=True, num_key_value_heads=2, rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)),
    "yarn": dict(tie_word_embeddings=True, num_key_value_heads=2, rope_parameters=YARN),
}


def names(case):
    d = case.get("head_dim", WIDTH // HEADS)
    q, kv = HEADS * d, case["num_key_value_heads"] * d
    yield "model.embed_tokens.weight", (VOCAB, WIDTH)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (WIDTH,)
        yield p + "post_attention_layernorm.weight", (WIDTH,)
        for name, rows, cols in (("self_attn.q_proj", q, WIDTH), ("self_attn.k_proj", kv, WIDTH), ("self_attn.v_proj", kv, WIDTH),
                                 ("self_attn.o_proj", WIDTH, q), ("mlp.gate_proj", INNER, WIDTH), ("mlp.up_proj", INNER, WIDTH),
                                 ("mlp.down_proj", WIDTH, INNER)):
            yield p + name + ".weight", (rows, cols)
            if case.get("attention_bias"):
                yield p + name + ".bias", (rows,)
    yield "model.norm.weight", (WIDTH,)
    if not case["tie_word_embeddings"]:
        yield "lm_head.weight", (VOCAB, WIDTH)


def model(case):
    sizes = transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
                                     num_attention_heads=HEADS, max_position_embeddings=POSITIONS, rms_norm_eps=1e-5,
                                     attn_implementation="eager", **case)
    m = transformers.LlamaForCausalLM(sizes).to(torch.float64).eval()
    g = Generator(7)
    weights = {name: torch.from_numpy(g.short(*shape) / 2).to(torch.float64) for name, shape in names(case)}
    missing, extra = m.load_state_dict(weights, strict=False)
    assert not extra and set(missing) <= {"lm_head.weight"}
    return m


def show(name, case):
    ids = torch.from_numpy(Generator(8).ints(VOCAB, 1, LENGTH))
    with torch.no_grad():
        out = model(case)(ids, labels=ids)
    logits = out.logits[0].numpy()
    kept = [logits[t, (37 * t + 101 * k) % VOCAB] for t in range(LENGTH) for k in range(2)]
    array("double", f"llama_{name}", np.array([out.loss.item()] + kept), 12)


def lora():
    """The losses of 20 steps with torch's AdamW, from adapters of the generator; the rate falls from 1e-2 to 0."""
    case = CASES["tied"]
    ids = tokenizers.Tokenizer.from_file(os.path.join(os.path.dirname(__file__), "tokenizer.json")).encode(TEXT).ids
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    m = peft.get_peft_model(model(case), settings).to(torch.float64)
    g = Generator(9)
    with torch.no_grad():
        for i in range(LAYERS):
            layer = m.base_model.model.model.layers[i]
            for part in layer.self_attn.q_proj, layer.mlp.down_proj:
                for side in part.lora_A, part.lora_B:
                    w = side["default"].weight
                    w.copy_(torch.from_numpy(g.short(*w.shape) / 8).to(torch.float64))
    wanted = [p for p in m.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(wanted, lr=1e-2, weight_decay=0)
    fall = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1 - step / STEPS)
    x, losses = torch.tensor([ids]), []
    for _ in range(STEPS):
        loss = m.train()(x, labels=x).loss
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        adamw.step()
        fall.step()
        adamw.zero_grad()
    array("double", "llama_lora", np.array(losses), 12)


def main():
    header("record_llama.py", f"Llama-like models of transformers {transformers.__version__}, LoRA of peft {peft.__version__}.")
    for name in ("LAYERS", "HEADS", "WIDTH", "INNER", "VOCAB", "POSITIONS", "LENGTH", "STEPS", "RANK", "ALPHA"):
        print(f"#define LLAMA_{name} {globals()[name]}")
    print(f'#define LLAMA_TEXT "{TEXT}"')
    print("\n/* The mean loss of the next tokens, then two logits of each token. */")
    for name, case in CASES.items():
        show(name, case)
    lora()
    print("#endif")


if __name__ == "__main__":
    main()
