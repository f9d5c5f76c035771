#!/usr/bin/env python3
# metrics.py - feeds a run's metrics.jsonl to TensorBoard or W&B, through their own packages
# SPDX-License-Identifier: MIT OR Unlicense
#
#     python3 examples/metrics.py run                   then: tensorboard --logdir run/tensorboard
#     python3 examples/metrics.py run --wandb PROJECT
import json, os, shutil, sys

folder, project = sys.argv[1], sys.argv[3] if "--wandb" in sys.argv else None
rows = [json.loads(line) for line in open(os.path.join(folder, "metrics.jsonl")) if line.endswith("}\n")]
rows = [row for row in rows if "scale" in row]          # other lines: header, events, shares, costs
if project:
    import wandb
    run = wandb.init(project=project, name=os.path.basename(os.path.abspath(folder)))
    for row in rows: run.log(row, step=row["step"])
    run.finish()
else:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    shutil.rmtree(os.path.join(folder, "tensorboard"), ignore_errors=True)
    log = EventFileWriter(os.path.join(folder, "tensorboard"))
    for row in rows:
        values = [Summary.Value(tag=k, simple_value=float("nan") if v is None else v)
                  for k, v in row.items() if k not in ("step", "time")]
        log.add_event(Event(step=row["step"], wall_time=row.get("time", 0), summary=Summary(value=values)))
    log.close()
