#!/usr/bin/env python3
"""conv.py - conv2d of examples/conv.h, forward and backward in fp32, and PyTorch's, turn by turn in one process.

    make bench-conv         or: python3 tests/bench/conv.py build/bench/libconv.so [ROUNDS [THREADS]]

Shapes of ResNet-18, batch 8, images of 32 and of 56; 2 threads each. Prints medians of ROUNDS turns, and the median,
lowest and highest of PyTorch's time over ours; then the medians of the forward and of the backward part. With THREADS 1,
time is the processor's, which a busy machine changes little:
OMP_NUM_THREADS=1 python3 tests/bench/conv.py build/bench/libconv.so 9 1

Each line ends with how many times as fast as one thread two would be by the loops' tasks: what of a step is shared, and
how evenly. It needs no second core.
"""
import ctypes
import statistics
import sys
import time

import numpy
import torch

lib = ctypes.CDLL(sys.argv[1])
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 9
threads = int(sys.argv[3]) if len(sys.argv) > 3 else 2
clock = time.process_time if threads == 1 else time.perf_counter
lib.layer_new.restype = ctypes.c_void_p
lib.layer_new.argtypes = [ctypes.c_int] + 4 * [ctypes.c_int64] + [ctypes.c_int] + 2 * [ctypes.c_void_p]
lib.layer_sum.restype = ctypes.c_double
lib.layer_forward.argtypes = lib.layer_backward.argtypes = [ctypes.c_void_p]
lib.layer_sum.argtypes = [ctypes.c_void_p]
lib.layer_two_threads.restype = ctypes.c_double
lib.layer_two_threads.argtypes = [ctypes.c_void_p, ctypes.c_int]
torch.set_num_threads(threads)
random = numpy.random.default_rng(1)
all_ratios = []

for size, channels in ((32, ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1))),
                       (56, ((64, 64, 1), (64, 128, 2), (128, 128, 2)))):
    for into, out, stride in channels:
        x = random.standard_normal((8, into, size, size), dtype=numpy.float32)
        w = random.standard_normal((out, into, 3, 3), dtype=numpy.float32) * 0.05
        ours = lib.layer_new(threads, 8, into, out, size, stride, x.ctypes.data, w.ctypes.data)
        tx, tw = torch.from_numpy(x).requires_grad_(), torch.from_numpy(w).requires_grad_()

        def mine():
            start = clock()
            lib.layer_forward(ours)
            forward = clock() - start
            lib.layer_backward(ours)
            return clock() - start, forward

        def theirs():
            start = clock()
            tx.grad = tw.grad = None
            mean = torch.nn.functional.conv2d(tx, tw, stride=stride, padding=1).mean()
            forward = clock() - start
            mean.backward()
            return clock() - start, forward

        same = torch.nn.functional.conv2d(tx, tw, stride=stride, padding=1).sum().item()
        assert abs(lib.layer_sum(ours) - same) < 1e-2 * (1 + abs(same)), "the results differ"
        mine(), mine(), theirs(), theirs()

        def rested(work):  # OpenMP's threads of the other library spin on for a while; a call wakes our own
            time.sleep(0.25 * (threads > 1))
            if threads > 1:
                work()
            return work()

        pairs = [(rested(mine), rested(theirs)) for _ in range(rounds)]
        ratios = sorted(b[0] / a[0] for a, b in pairs)
        forward = statistics.median(b[1] / a[1] for a, b in pairs)
        backward = statistics.median((b[0] - b[1]) / (a[0] - a[1]) for a, b in pairs)
        all_ratios.append(statistics.median(ratios))
        shared = lib.layer_new(2, 8, into, out, size, stride, x.ctypes.data, w.ctypes.data)
        print("%2d x %2d, %3d to %3d, stride %d: mixprec %7.2f ms, PyTorch %7.2f ms; PyTorch / mixprec %.2f (%.2f to %.2f);"
              " forward %.2f, backward %.2f; by tasks 2 threads %.2f"
              % (size, size, into, out, stride, 1e3 * statistics.median(p[0][0] for p in pairs),
                 1e3 * statistics.median(p[1][0] for p in pairs), all_ratios[-1], ratios[0], ratios[-1], forward, backward,
                 lib.layer_two_threads(shared, rounds)))
print("geometric mean of the medians: %.2f" % statistics.geometric_mean(all_ratios))
