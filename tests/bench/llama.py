#!/usr/bin/env python3
"""llama.py - a step of examples/llama.c beside transformers' Llama in PyTorch, on the same cores, in turns.
SPDX-License-Identifier: MIT OR Unlicense

  llama.py LLAMA FOLDER [ROUNDS [THREADS [WAY]]]     LLAMA: build/llama; FOLDER: a model, such as
                                                     tests/support/llama_models.py makes; WAY: one of the three, such as LoRA

With one thread the times are processor time, which a busy machine disturbs least; with more threads they are of the clock.
One row of 512 tokens a step, AdamW on f32 weights, gradients clipped at a norm of 1: all weights in bf16 and fp32, and
LoRA of rank 8 on q_proj and v_proj in bf16. PyTorch runs autocast for bf16, with scaled_dot_product_attention. Each round
starts each program anew, with 4 steps to warm up and 4 that are timed; prints the median of each, its spread, the median of
the ratios of a round, and the memory of the process. Needs torch, transformers and peft.
"""
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

LENGTH, WARM, STEPS = 512, 4, 4   # the first steps touch new memory, on a virtual machine slowly
# with large pages and memory that is kept PyTorch is faster: see torch_gpt.py
TUNING = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=17179869184"}
WAYS = {"bf16, all weights": ("bf16", 0), "fp32, all weights": ("fp32", 0), "bf16, LoRA": ("bf16", 8)}


def torch_steps(folder, dtype, rank, threads):
    """In a process of its own: prints the milliseconds of a step and the megabytes of the process."""
    import torch
    import transformers
    clock = time.process_time if threads == 1 else time.perf_counter
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    kept = torch.bfloat16 if rank and dtype == "bf16" else torch.float32
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=kept, attn_implementation="sdpa")
    if rank:
        import peft
        model = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    wanted = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(wanted, lr=1e-4, weight_decay=0)
    x = torch.randint(0, 8000, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    for step in range(WARM + STEPS):
        if step == WARM:
            began = clock()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = model.train()(x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        adamw.step()
        adamw.zero_grad()
    print((clock() - began) / STEPS * 1e3, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def ours(program, folder, text, dtype, rank, threads):
    """llama.c says the tokens a second of each step. Of processor time the difference of two runs counts."""
    times = []
    for steps in (WARM, WARM + STEPS) if threads == 1 else (WARM + STEPS,):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([program, folder, "--data", text, "--steps", str(steps), "--batch", "1", "--block", str(LENGTH), "--dtype", dtype,
                               "--lora", str(rank), "--threads", str(threads), "--sample", "0", "--log-every", "1"],
                              capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    lines = [line.split() for line in done.stdout.splitlines()]
    megabytes = next(float(words[words.index("MB,") - 1]) for words in lines if "MB," in words)
    each = [LENGTH / float(words[words.index("tokens/s,") - 1]) for words in lines if words[:1] == ["step"]]
    seconds = (times[1] - times[0]) / STEPS if threads == 1 else statistics.mean(each[WARM:])
    return seconds * 1e3, megabytes


def main():
    program, folder = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    threads = int(sys.argv[4]) if len(sys.argv) > 4 else os.cpu_count()
    wanted = sys.argv[5] if len(sys.argv) > 5 else ""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        with open(os.path.join(root, "docs", "guide.md")) as f:
            text.write(f.read())
        text.flush()
        results = {}
        for turn in range(rounds):
            for name, (dtype, rank) in WAYS.items():
                if wanted not in name:
                    continue
                mine = ours(program, folder, text.name, dtype, rank, threads)
                done = subprocess.run([sys.executable, __file__, "--torch", folder, dtype, str(rank), str(threads)], capture_output=True, text=True,
                                      env={**os.environ, **TUNING})
                theirs = tuple(map(float, done.stdout.split())) if done.returncode == 0 else (float("nan"), 0.0)
                results.setdefault(name, []).append((mine, theirs))
                print(f"round {turn + 1}, {name}: {mine[0]:.0f} ms, PyTorch {theirs[0]:.0f} ms, load {os.getloadavg()[0]:.1f}", flush=True)
    print("| way | ms a step (least, most) | PyTorch | ratio | MB | PyTorch |\n|---|---|---|---|---|---|")
    for name, pairs in results.items():
        mine, theirs = [p[0][0] for p in pairs], [p[1][0] for p in pairs]
        print(f"| {name} | {statistics.median(mine):.0f} ({min(mine):.0f}, {max(mine):.0f}) | {statistics.median(theirs):.0f} ({min(theirs):.0f}, {max(theirs):.0f}) | "
              f"{statistics.median(b / a for a, b in zip(mine, theirs)):.2f} | {max(p[0][1] for p in pairs):.0f} | {max(p[1][1] for p in pairs):.0f} |")


if sys.argv[1] == "--torch":
    torch_steps(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
else:
    main()
