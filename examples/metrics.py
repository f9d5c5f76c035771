#!/usr/bin/env python3
"""metrics.py - sends a run's metrics.jsonl to TensorBoard or W&B, through their own packages.

    python3 examples/metrics.py run                     then: tensorboard --logdir run/tensorboard
    python3 examples/metrics.py run --wandb PROJECT
    python3 examples/metrics.py run --follow            follows a run in progress, until Ctrl-C
SPDX-License-Identifier: MIT OR Unlicense"""
import argparse
import json
import os
import sys
import time

OWN = ".mixprec"           # ends the names of the event files that this program writes


def stop(text):
    sys.exit("metrics.py: " + text)


def rows_of(path, follow):
    """The steps of a log, one dictionary each. follow: waits for more, also where a resumed run has replaced
    the log. No step comes twice."""
    done, log, rest = -1, None, ""
    while True:
        if log is None:
            log, rest = open(path, encoding="utf-8", errors="replace"), ""
        text = log.read()
        lines = (rest + text).split("\n")
        rest = lines.pop()                              # a line that is being written
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:                          # a power cut may damage a line
                continue
            # other lines are the header, events, shares and costs
            if isinstance(row, dict) and "scale" in row and row["step"] > done:
                done = row["step"]
                yield row
        if not follow:
            return
        if not text:
            time.sleep(0.5)
            if os.path.exists(path) and os.stat(path).st_ino != os.fstat(log.fileno()).st_ino:
                log.close()
                log = None


def to_wandb(rows, project, name):
    try:
        import wandb
    except ImportError:
        stop("the package wandb is missing: python3 -m pip install wandb")
    run = wandb.init(project=project, name=name)
    try:
        for row in rows:
            run.log(row, step=row["step"])
    finally:
        run.finish()


def to_tensorboard(rows, folder):
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        stop("the package tensorboard is missing: python3 -m pip install tensorboard")
    if os.path.islink(folder):
        stop(folder + " is a symbolic link: remove it")
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):     # only what an earlier call wrote: others may log there, too
        if name.endswith(OWN):
            os.remove(os.path.join(folder, name))
    log = EventFileWriter(folder, filename_suffix=OWN)
    try:
        for row in rows:
            values = [Summary.Value(tag=k, simple_value=float("nan") if v is None else v)
                      for k, v in row.items() if k not in ("step", "time")]
            log.add_event(Event(step=row["step"], wall_time=row.get("time", 0), summary=Summary(value=values)))
            log.flush()
    finally:
        log.close()


def main():
    parser = argparse.ArgumentParser(description="Feeds a run's metrics.jsonl to TensorBoard or W&B.")
    parser.add_argument("folder", help="of the run: --out of the trainer")
    parser.add_argument("--wandb", metavar="PROJECT", help="to W&B; default: TensorBoard, in FOLDER/tensorboard")
    parser.add_argument("--follow", action="store_true", help="go on with a run in progress, until Ctrl-C")
    given = parser.parse_args()
    path = os.path.join(given.folder, "metrics.jsonl")
    if not os.path.isfile(path):
        stop("there is no %s: name the folder that the trainer has as --out" % path)
    rows = rows_of(path, given.follow)
    try:
        if given.wandb:
            to_wandb(rows, given.wandb, os.path.basename(os.path.abspath(given.folder)))
        else:
            to_tensorboard(rows, os.path.join(given.folder, "tensorboard"))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        stop(str(error))


if __name__ == "__main__":
    main()
