"""The kernels of one step, from ncu's CSV of gpu__time_duration: launches and milliseconds of each, the largest first.

    python3 ncu_sums.py FILE
SPDX-License-Identifier: MIT OR Unlicense"""
import collections
import csv
import re
import sys

MS = {"ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1, "msecond": 1}


def main():
    with open(sys.argv[1], errors="replace") as file:
        rows = list(csv.reader(line for line in file if line.startswith('"')))
    if not rows:
        sys.exit("ncu wrote no row")
    name, unit, value = (rows[0].index(key) for key in ("Kernel Name", "Metric Unit", "Metric Value"))
    sums, calls = collections.Counter(), collections.Counter()
    for row in rows[1:]:
        kernel = re.sub(r"\(anonymous namespace\)::|^void ", "", row[name])[:60]
        sums[kernel] += float(row[value].replace(",", "")) * MS[row[unit]]
        calls[kernel] += 1
    print(f"NCU: {sum(calls.values())} launches, {sum(sums.values()):.2f} ms")
    for kernel, ms in sums.most_common(22):
        print(f"  {ms:8.3f} ms {calls[kernel]:4} x {kernel}")


if __name__ == "__main__":
    main()
