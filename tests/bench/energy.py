"""Processor time and energy of one training run in fp32, bf16 and fp16.

    python3 tests/bench/energy.py TEXT [--steps N] [--rounds N] [--threads N] [--build build] [-- OPTION...]

build/trainer trains nanoGPT's CPU configuration (or what the OPTIONs say) on TEXT, in each dtype in turn: fp32; bf16 and
fp16 at levels 1 and 2. The table has medians: the processor's seconds of the whole run, those of the clock, and joules of
the processor's package where the system lets RAPL be read (/sys/class/powercap; Linux reserves it for root), with those
of an idle machine left in. A mean power is right only on a machine that does nothing else.
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import glob
import os
import statistics
import subprocess
import time


def joules():
    """Joules of all packages since some time; None if they cannot be read."""
    total = 0
    for path in glob.glob("/sys/class/powercap/*-rapl:[0-9]/energy_uj"):
        try:
            with open(path, encoding="ascii") as f:
                total += int(f.read())
        except OSError:
            return None
    return total / 1e6 if total else None


def run(command):
    """Seconds of the processor and of the clock, and joules."""
    before, energy = time.monotonic(), joules()
    p = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(p.pid, 0)
    if status:
        raise SystemExit(f"energy.py: {' '.join(command)} failed")
    after = joules()
    return usage.ru_utime + usage.ru_stime, time.monotonic() - before, after - energy if energy else float("nan")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("text")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--build", default="build")
    p.add_argument("options", nargs="*")
    a = p.parse_args()
    base = [os.path.join(a.build, "trainer"), "--preset", "char-cpu", *a.options, "--data", a.text, "--threads",
            str(a.threads), "--steps", str(a.steps), "--eval-every", "1000000", "--eval-batches", "1", "--quiet"]
    rows = {"fp32": ["--dtype", "fp32"]}
    for dtype in "bf16", "fp16":
        rows |= {f"{dtype}, level {level}": ["--dtype", dtype, "--level", str(level)] for level in (1, 2)}
    found = {name: [] for name in rows}
    for _ in range(a.rounds):
        for name, row in rows.items():
            found[name].append(run(base + row))
    print(f"{a.steps} steps, {a.threads} threads, {a.rounds} rounds, load {os.getloadavg()[0]:.1f}; "
          f"RAPL {'read' if joules() else 'cannot be read here'}")
    first = None
    for name, got in found.items():
        cpu, wall, energy = (statistics.median(x) for x in zip(*got))
        first = first or (cpu, energy)
        text = f"{name:15} processor {cpu:7.2f} s, {cpu / first[0]:.2f} of fp32's; clock {wall:7.2f} s"
        print(text + (f"; {energy:.0f} J, {energy / first[1]:.2f} of fp32's" if energy == energy else ""))


main()
