"""llm.c's CPU contest: GPT-2 124M, 4 sequences of 64 tokens, f32, a step of training.

    python3 tests/bench/llmc.py FOLDER [--rounds N] [--steps N] [--threads N] [--build build]

FOLDER is a copy of llm.c in which its own train_gpt2 was built and its starter files lie. It runs as it is; mixprec's
trainer has the same tokens and sizes, and clips the gradients besides. Both run in turns on the same threads: 8 steps a
turn, behind a warm-up of two. The table has the medians: milliseconds of a step, and of the processor's time, which
other programs disturb less; with one thread no time of waiting counts.
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import os
import pty
import re
import signal
import statistics
import subprocess
import time

FIRST = 1                       # the step from whose end on time counts; llm.c validates before steps 0 and 10


def used(pid):
    """Seconds of the processor that a process has used."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(command, folder, step_of, threads, last):
    """Milliseconds of a step, and of its processor time."""
    master, slave = pty.openpty()           # a terminal: programs write line by line
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), TERM="dumb")
    p = subprocess.Popen(command, cwd=folder, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    at = {}
    with os.fdopen(master, errors="replace") as lines:
        try:
            for line in lines:
                step = step_of.search(line)
                if step and int(step[1]) in (FIRST, last):
                    at[int(step[1])] = time.monotonic(), used(p.pid)
                if last in at:
                    break
        except OSError:                     # the program has ended
            pass
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)
        p.wait()
    if last not in at or FIRST not in at:
        raise SystemExit(f"llmc.py: {command[0]} in {folder} printed no step {last}")
    return [1000 * (b - a) / (last - FIRST) for a, b in zip(at[FIRST], at[last])]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=8, choices=range(1, 9))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--build", default="build")
    a = p.parse_args()
    tokens = os.path.abspath(os.path.join(a.folder, "dev/data/tinyshakespeare/tiny_shakespeare_train.bin"))
    ours = [os.path.abspath(os.path.join(a.build, "trainer")), "--preset", "gpt2", "--batch", "4", "--block", "64",
            "--accumulate", "1", "--data", tokens, "--threads", str(a.threads), "--steps", "10", "--log-every", "1",
            "--eval-every", "1000000", "--eval-batches", "1", "--level", "1"]
    line = re.compile(r"^ *(\d+) .*\d\r?$")
    rows = {"llm.c fp32": (["./train_gpt2"], a.folder, re.compile(r"^step (\d+): train loss")),
            "mixprec fp32": (ours + ["--dtype", "fp32"], ".", line),
            "mixprec bf16": (ours + ["--dtype", "bf16"], ".", line)}
    found = {name: [] for name in rows}
    for _ in range(a.rounds):
        for name, row in rows.items():
            found[name].append(measure(*row, a.threads, FIRST + a.steps))
    print(f"{a.threads} threads, {a.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    base = [statistics.median(x) for x in zip(*found["llm.c fp32"])]
    for name, got in found.items():
        wall, cpu = (statistics.median(x) for x in zip(*got))
        least, most = min(x[0] for x in got), max(x[0] for x in got)
        print(f"{name:14} {wall:7.0f} ms a step [{least:.0f} {most:.0f}], {base[0] / wall:.2f} times as fast; "
              f"processor {cpu:.0f} ms, {base[1] / cpu:.2f} times")


main()
