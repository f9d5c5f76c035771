#!/usr/bin/env python3
"""interop_llama.py - examples/llama.c beside transformers and peft: logits, losses, training, adapters, merged weights.
SPDX-License-Identifier: MIT OR Unlicense

  interop_llama.py [PATH_OF_test_llama]     (default: $BUILD/test_llama)

All in f32. A difference is relative to the largest number. Needs torch, transformers and peft; what is absent is
skipped and counted.
"""
import json
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
try:
    import peft
except ImportError:
    peft = None

root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(root, "tests", "support"))
import llama_models

program = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.environ.get("BUILD", "build"), "test_llama"))
tokens_file = os.path.join(root, "tests", "reference", "tokenizer.json")
passed = failed = skipped = 0
LIMIT = 1e-5


def check(name, condition):
    global passed, failed
    passed += bool(condition)
    failed += not condition
    print("ok  " if condition else "FAIL", name)


def skip(name):
    global skipped
    skipped += 1
    print("skip", name)


def run(*arguments):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.strip())
    return done


def ours(folder, ids, *more):
    """The logits of all tokens, and the loss of each token's successor."""
    done = run("--logits", folder, len(ids), *ids, *more)
    numbers = np.array([float(x) for x in done.stdout.split()] or [np.nan])
    return numbers[1:].reshape(len(ids), -1) if len(numbers) > 1 else numbers, numbers[0]


def apart(a, b):
    return np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max() if np.shape(a) == np.shape(b) else np.inf


def load(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def theirs(model, ids):
    x = torch.tensor([ids])
    with torch.no_grad():
        out = model.eval()(x, labels=x)
    return out.logits[0].numpy(), out.loss.item()


def agree(name, folder, ids, model=None, *more):
    want, want_loss = theirs(model or load(folder), ids)
    got, loss = ours(folder, ids, *more)
    off, off_loss = apart(got, want), abs(loss - want_loss) / want_loss
    check(f"{name}: logits {off:.1e}, loss {off_loss:.1e} off transformers", off < LIMIT and off_loss < LIMIT)


def losses(output):
    return [float(line.split()[3]) for line in output.splitlines() if line.startswith("step ")]


def text_of(tokenizer, n):
    """A text of n + 1 tokens: one row, the same in each step."""
    from tokenizers import Tokenizer
    t = Tokenizer.from_file(tokenizer)
    with open(os.path.join(root, "README.md")) as f:
        text = f.read()
    ids = t.encode(text).ids[:n + 1]
    text = t.decode(ids, skip_special_tokens=False)
    assert t.encode(text).ids == ids
    return text, ids


def their_training(model, ids, steps, lr):
    """torch's AdamW as llama.c has it: betas 0.9 and 0.999, clipped at a norm of 1, the rate falling to 0."""
    x, out = torch.tensor([ids]), []
    wanted = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(wanted, lr=lr, weight_decay=0)
    fall = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1 - step / steps)
    for _ in range(steps):
        loss = model.train()(x, labels=x).loss
        out.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        adamw.step()
        fall.step()
        adamw.zero_grad()
    return out


def train_whole(folder, scratch, text, ids):
    out = os.path.join(scratch, "whole")
    done = run("--run", folder, "--data", text, "--steps", 20, "--batch", 1, "--block", len(ids), "--lr", 1e-3, "--dtype", "fp32",
               "--sample", 0, "--out", out)
    model = load(folder)
    off = apart(losses(done.stdout), their_training(model, ids, 20, 1e-3))
    check(f"20 steps of all weights: losses {off:.1e} off", off < LIMIT)
    off = apart(theirs(load(out), ids)[0], theirs(model, ids)[0])
    check(f"20 steps of all weights: the saved model's logits {off:.1e} off", off < 10 * LIMIT)


def train_lora(folder, scratch, text, ids):
    """Both begin with the adapters that llama.c made and saved."""
    begin, end, merged = (os.path.join(scratch, name) for name in ("begin", "end", "merged"))
    common = ["--dtype", "fp32", "--sample", 0, "--targets", "q_proj,v_proj,mlp.*"]
    run("--run", folder, *common, "--lora", 4, "--alpha", 8, "--out", begin)
    done = run("--run", folder, *common, "--adapter", begin, "--data", text, "--steps", 20, "--batch", 1, "--block", len(ids),
               "--lr", 1e-3, "--out", end)
    model = peft.PeftModel.from_pretrained(load(folder), begin, is_trainable=True)
    trained = sum(p.requires_grad for p in model.parameters())
    check(f"peft reads the adapters: {trained} tensors", trained == 2 * 5 * 3)
    off = apart(losses(done.stdout), their_training(model, ids, 20, 1e-3))
    check(f"20 steps of LoRA: losses {off:.1e} off peft", off < LIMIT)
    again = peft.PeftModel.from_pretrained(load(folder), end)
    want = theirs(model, ids)[0]
    off = apart(theirs(again, ids)[0], want)
    check(f"20 steps of LoRA: the saved adapters' logits {off:.1e} off", off < LIMIT)
    agree("peft's adapters read back", folder, ids, again, "--adapter", end)
    run("--run", folder, *common, "--adapter", end, "--merge", 1, "--out", merged)
    off = apart(theirs(load(merged), ids)[0], theirs(again.merge_and_unload(), ids)[0])
    check(f"merged weights: logits {off:.1e} off peft's", off < LIMIT)


def saved_by_peft(folder, scratch, ids):
    """peft's own file: another order of names, and target_modules that are not whole names."""
    torch.manual_seed(3)
    settings = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["k_proj", "o_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(load(folder), settings)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.05)
    out = os.path.join(scratch, "by_peft")
    model.save_pretrained(out)
    agree("adapters that peft saved", folder, ids, model, "--adapter", out)


def chats(folder, scratch):
    """The row and the mask of a chat, against transformers' template with the mask of the assistant's words."""
    from tokenizers import Tokenizer
    t = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    chat = [dict(role="system", content="Be brief."), dict(role="user", content="What is bf16?"),
            dict(role="assistant", content="A number of 16 bits."), dict(role="user", content="Why?"),
            dict(role="assistant", content="It has the range of f32.")]
    path = os.path.join(scratch, "chat.jsonl")
    with open(path, "w") as f:
        f.write(json.dumps(dict(messages=chat)) + "\n")
    ids, counts = [], []
    for message in chat:
        for part, counted in (f"<|im_start|>{message['role']}\n", 0), (message["content"] + "<|im_end|>", 1), ("\n", 0):
            new = t.encode(part).ids
            ids += new
            counts += [counted and message["role"] == "assistant"] * len(new)
    check("a chat's parts are the tokens of the whole", ids == t.encode("".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat)).ids)
    labels = [i if c else -100 for i, c in zip(ids, counts)]
    x = torch.tensor([ids])
    with torch.no_grad():
        want = load(folder).eval()(x, labels=torch.tensor([labels])).loss.item()
    done = run("--run", folder, "--data", path, "--steps", 1, "--batch", 1, "--dtype", "fp32", "--sample", 0)
    got = (losses(done.stdout) or [np.nan])[0]
    check(f"a chat's loss {abs(got - want) / want:.1e} off", abs(got - want) / want < LIMIT)


def main():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 448, 40).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        for name, settings in {**llama_models.cases, **llama_models.ropes}.items():
            folder = os.path.join(scratch, name)
            llama_models.make(folder, tokens_file, **settings)
            agree(name, folder, ids)
        folder, text = os.path.join(scratch, "own head"), os.path.join(scratch, "text")
        try:
            words, row = text_of(tokens_file, 40)
            with open(text, "w") as f:
                f.write(words)
            train_whole(folder, scratch, text, row)
            chat_folder = os.path.join(scratch, "chat")
            llama_models.make(chat_folder, tokens_file)
            llama_models.smollm_tokenizer(os.path.join(chat_folder, "tokenizer.json"), os.path.join(root, "README.md"))
            chats(chat_folder, scratch)
        except ImportError as error:
            skip(f"training: {error}")
            row = None
        if peft and row:
            train_lora(folder, scratch, text, row)
            saved_by_peft(os.path.join(scratch, "tied"), scratch, ids)
        else:
            skip("adapters: peft or tokenizers is absent")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


sys.exit(main())
