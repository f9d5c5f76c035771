#!/usr/bin/env python3
"""show.py - one page with the curves and the table of what tests/bench/show.sh ran: FOLDER/show.html."""
import html
import json
import math
import os
import re
import sys

WAYS = [("fp32", "fp32", "#57606a", ""), ("bf16", "bf16", "#8250df", "6 3"),
        ("fp16", "fp16, no scaler", "#bf3989", "2 3"), ("scaler", "fp16, scaler", "#cf222e", "8 3 2 3"),
        ("guard", "fp16, scaler, guard", "#1a7f37", ""), ("torch-fp32", "PyTorch fp32", "#57606a", "1 3"),
        ("torch-bf16", "PyTorch bf16", "#8250df", "1 3"), ("torch-fp16", "PyTorch fp16", "#bf3989", "1 3"),
        ("torch-scaler", "PyTorch fp16, GradScaler", "#cf222e", "1 3")]
TITLES = {
    "batch": ("GPT-2's batch", "A loss averaged over 524,288 tokens makes gradients that fp16 flushes to zero."),
    "atmosphere": ("One atmosphere", "Barometers in pascals: 101,325 is beyond fp16's 65,504."),
    "gemma": ("Gemma's block", "gate times up passes 65,504 before the down projection."),
    "year": ("A year", "2023.37 as a feature: nothing overflows, but fp16 and bf16 have no room for the fraction.")}
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 260, 52, 34


def read_log(path):
    points = []
    with open(path) as f:
        for line in f:
            step, loss = line.split()
            points.append((int(step), float(loss)))
    return points


def read_metrics(path):
    points = []
    if os.path.exists(path):
        with open(path) as f:
            for line in f:
                row = json.loads(line)
                if "loss" in row and "step" in row and isinstance(row["loss"], (int, float)):
                    points.append((row["step"], row["loss"]))
    return points


def smooth(points, span=20):
    """Means of `span` steps; a mean with a loss that is not finite is left out."""
    if len(points) < 4 * span:
        return [p for p in points if math.isfinite(p[1])]
    out = []
    for i in range(0, len(points), span):
        block = points[i:i + span]
        mean = sum(p[1] for p in block) / len(block)
        if math.isfinite(mean):
            out.append((block[-1][0], mean))
    return out


def curves(folder, name):
    """The first seed's curve of each way."""
    found = {}
    for way, _, _, _ in WAYS:
        pattern = r"gpt-%s-\d+$" if name == "batch" else re.escape(name) + r"-%s-\d+\.log$"
        names = sorted(f for f in os.listdir(folder) if re.match(pattern % re.escape(way), f))
        if names:
            path = os.path.join(folder, names[0])
            found[way] = smooth(read_metrics(os.path.join(path, "metrics.jsonl")) if name == "batch" else read_log(path))
    return found


def chart(found, title):
    points = [p for line in found.values() for p in line]
    if not points:
        return ""
    last, top = max(p[0] for p in points), max(p[1] for p in points)
    x = lambda step: LEFT + (WIDTH - LEFT - 10) * step / last
    y = lambda loss: 8 + (HEIGHT - BOTTOM - 8) * (1 - loss / top)
    parts = ['<svg viewBox="0 0 %d %d" role="img" aria-label="%s: loss by step">' % (WIDTH, HEIGHT, html.escape(title))]
    for k in range(5):
        loss = top * k / 4
        parts.append('<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" class="grid"/><text x="%d" y="%.1f" class="y">%.3g</text>'
                     % (LEFT, WIDTH - 10, y(loss), y(loss), LEFT - 6, y(loss) + 4, loss))
    for k in range(4):
        step = last * (k + 1) / 4
        parts.append('<text x="%.1f" y="%d" class="x">%d</text>' % (x(step), HEIGHT - 18, step))
    parts.append('<text x="%d" y="%d" class="x">step</text><text x="4" y="%d" class="y" transform="rotate(-90 12 %d)">loss</text>'
                 % (LEFT + 6, HEIGHT - 4, HEIGHT // 2, HEIGHT // 2))
    for way, label, colour, dashes in WAYS:
        line = found.get(way)
        if line and not way.startswith("torch"):
            path = " ".join("%.1f,%.1f" % (x(s), y(v)) for s, v in line)
            parts.append('<polyline points="%s" stroke="%s" stroke-dasharray="%s" class="curve"/>' % (path, colour, dashes))
            if line[-1][0] < last:
                parts.append('<text x="%.1f" y="%.1f" fill="%s">&#10007; %s</text>'
                             % (x(line[-1][0]) + 3, y(line[-1][1]) + 4, colour, label))
        elif way in found and not line and not way.startswith("torch"):
            parts.append('<text x="%d" y="%d" fill="%s">&#10007; %s: never finite</text>'
                         % (WIDTH // 2, 40 + 14 * (way == "scaler"), colour, label))
    return "".join(parts) + "</svg>"


def rows_of(folder):
    """{model: {way: [(loss, note), ...]}} from the table."""
    rows = {}
    with open(os.path.join(folder, "table")) as f:
        for line in f:
            m = re.match(r"(\w+) ([\w-]+) seed (\d+): (.*)", line)
            if m:
                loss = re.search(r"(?:loss|val) (-?nan|[\d.e+-]+)", m.group(4))
                skipped = re.search(r"skipped (\d+)", m.group(4))
                value = float(loss.group(1).replace("-nan", "nan")) if loss else math.nan
                rows.setdefault(m.group(1), {}).setdefault(m.group(2), []).append(
                    (value, skipped.group(1) if skipped else ""))
    return rows


def table(ways):
    out = ["<table><thead><tr><th>way</th><th>loss, mean (seeds: %d)</th><th>lowest to highest</th><th>steps skipped</th>"
           "</tr></thead><tbody>" % max(len(v) for v in ways.values())]
    for way, label, colour, _ in WAYS:
        if way in ways:
            losses = [v[0] for v in ways[way]]
            bad = not all(map(math.isfinite, losses))
            mean = "NaN" if bad else "%.4f" % (sum(losses) / len(losses))
            spread = "" if bad else "%.4f to %.4f" % (min(losses), max(losses))
            skipped = ", ".join(sorted({v[1] for v in ways[way] if v[1]}, key=int))
            out.append('<tr><td><i style="background:%s"></i>%s</td><td%s>%s</td><td>%s</td><td>%s</td></tr>'
                       % (colour, label, ' class="bad"' if bad else "", mean, spread, skipped))
    return "".join(out) + "</tbody></table>"


STYLE = """
:root { --ink: #1c2127; --paper: #fff; --quiet: #5a6572; --line: #d9dee4 }
@media (prefers-color-scheme: dark) { :root { --ink: #dde3ea; --paper: #14181d; --quiet: #96a2b0; --line: #323a44 } }
body { margin: 0 auto; max-width: 46rem; padding: 1rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
       background: var(--paper) }
svg { width: 100%; height: auto } svg text { font: 11px system-ui, sans-serif; fill: var(--quiet) }
svg text[fill] { fill: revert-layer }
.grid { stroke: var(--line) } .curve { fill: none; stroke-width: 2 } .x { text-anchor: middle } .y { text-anchor: end }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .2rem .6rem .2rem 0;
        border-bottom: 1px solid var(--line) }
i { display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 2px }
.bad { color: #cf222e; font-weight: 600 }
"""


def main(folder):
    rows = rows_of(folder)
    body = []
    for name, (title, text) in TITLES.items():
        if name in rows:
            body.append("<h2>%s</h2><p>%s</p>%s%s" % (title, text, chart(curves(folder, name), title), table(rows[name])))
    path = os.path.join(folder, "show.html")
    with open(path, "w") as f:
        f.write('<!doctype html><html lang="en"><head><meta charset="utf-8">'
                '<meta name="viewport" content="width=device-width, initial-scale=1"><title>mixprec: what fp16 loses</title>'
                "<style>%s</style></head><body><h1>What fp16 loses, and what brings it back</h1>"
                "<p>Four models in which nothing is planted. Curves are those of the first seed.</p>%s</body></html>\n"
                % (STYLE, "".join(body)))
    print("open " + path)


main(sys.argv[1])
