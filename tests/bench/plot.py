"""Draws what growth.sh measured: one SVG of the optimizer phase, one of training steps.

    python3 plot.py growth.txt          writes growth_optimizer.svg and growth_step.svg beside it

Both axes are logarithmic: what is flat costs the same at every size, and a factor is the same
distance everywhere. Needs nothing but Python.
SPDX-License-Identifier: MIT OR Unlicense"""
import math
import sys
from html import escape

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")   # Okabe, Ito
PARTS = {"whole step": 5, "GEMM": 0, "attention": 1, "elementwise": 2, "optimizer": 3}  # columns
WIDTH, HEIGHT = 440, 420                    # of a panel
LEFT, RIGHT, TOP, BOTTOM = 68, 16, 84, 58   # its margins


def number(x):
    """1000 as 1000, 1e5 as a power of ten."""
    e = round(math.log10(x))
    if e >= 5 and math.isclose(x, 10.0 ** e):
        return "10" + "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(d)] for d in str(e))
    return f"{x:g}"


class Axis:
    """A logarithmic scale from `low` to `high`, drawn from pixel `begin` to `end`."""

    def __init__(self, values, begin, end, ticks=None):
        low, high = min(values), max(values)
        steps = [m * 10.0 ** e for e in range(-6, 14) for m in (1, 2, 5)]
        if ticks:                           # a grid of sizes: each is a tick
            low, high = low / 1.15, high * 1.15
        else:                               # room above and below, up to the next round number
            low = max(s for s in steps if s <= low / 1.05)
            high = min(s for s in steps if s >= high * 1.05)
        self.low, self.high, self.begin, self.end = low, high, begin, end
        inside = [s for s in steps if low * 0.999 <= s <= high * 1.001]
        self.ticks = ticks or inside
        wide = math.log10(high / low) > 2.5 and not ticks
        self.labelled = [t for t in self.ticks
                         if not wide or math.isclose(math.log10(t) % 1, 0, abs_tol=1e-6)]

    def __call__(self, value):
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.begin + share * (self.end - self.begin)


def text(x, y, what, size=12, anchor="middle", more=""):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{more}>'
            f'{escape(what)}</text>')


def legend(names, left):
    """Up to three names a row, above the plot."""
    out = []
    for i, name in enumerate(names):
        x, y = left + LEFT + i % 3 * 118, TOP - 34 + i // 3 * 17
        out.append(f'<line x1="{x}" y1="{y - 4}" x2="{x + 18}" y2="{y - 4}" '
                   f'stroke="{COLOURS[i]}" stroke-width="2.5"/>')
        out.append(text(x + 23, y, name, 12, "start"))
    return out


def axes(x, y, left, x_title, y_title):
    bottom, right, out = HEIGHT - BOTTOM, left + WIDTH - RIGHT, []
    for t in x.ticks:
        out.append(f'<line x1="{x(t):.1f}" y1="{TOP}" x2="{x(t):.1f}" y2="{bottom}" class="grid"/>')
    for t in y.ticks:
        out.append(f'<line x1="{left + LEFT}" y1="{y(t):.1f}" x2="{right}" y2="{y(t):.1f}" '
                   'class="grid"/>')
    out += [text(x(t), bottom + 18, number(t)) for t in x.labelled]
    out += [text(left + LEFT - 7, y(t) + 4, number(t), 12, "end") for t in y.labelled]
    out.append(f'<rect x="{left + LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
               f'height="{bottom - TOP}" fill="none" stroke="#444"/>')
    middle = (TOP + bottom) / 2
    out.append(text((left + LEFT + right) / 2, bottom + 42, x_title, 13))
    out.append(text(left + 16, middle, y_title, 13, "middle",
                    f' transform="rotate(-90 {left + 16} {middle})"'))
    return out


def panel(left, title, x_title, y_title, series):
    """series: {name: [(x, y)]}, each a line with a dot a point."""
    points = [p for line in series.values() for p in line]
    sizes = sorted({p[0] for p in points})
    x = Axis(sizes, left + LEFT, left + WIDTH - RIGHT, sizes)
    y = Axis([p[1] for p in points], HEIGHT - BOTTOM, TOP)
    out = axes(x, y, left, x_title, y_title) + legend(series, left)
    out.append(text(left + LEFT, 26, title, 15, "start", ' font-weight="bold"'))
    for colour, line in zip(COLOURS, series.values()):
        at = [(f"{x(a):.1f}", f"{y(b):.1f}") for a, b in line]
        path = " ".join(",".join(p) for p in at)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{a}" cy="{b}" r="3" fill="{colour}"/>' for a, b in at]
    return out


def write(path, panels):
    width = WIDTH * len(panels)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" '
             f'width="{width}" height="{HEIGHT}" font-family="sans-serif" fill="#222">',
             "<style>.grid { stroke: #ddd; stroke-width: 1 }</style>",
             f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>']
    for i, p in enumerate(panels):
        lines += panel(i * WIDTH, *p)
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join(lines + ["</svg>", ""]))
    print(path)


def optimizer_panel(rows):
    series = {}
    for n, tensors, ns in rows:
        name = f"{tensors:g} tensor{'s' * (tensors > 1)}"
        series.setdefault(name, []).append((n, ns))
    return ("Optimizer phase: gather, clip, AdamW", "parameters",
            "nanoseconds a parameter and step", series)


def step_panel(rows, sweep):
    """Against width a token's cost is that of its parameters: there it is drawn for each of them.
    Host code, far below 1 %, is left out."""
    chosen = sorted(r[1:] for r in rows if r[0] == sweep)
    unit = (lambda r: 1e3 / r[1]) if sweep == "width" else (lambda r: 1)
    series = {name: [(r[0], r[2 + i] * unit(r)) for r in chosen if r[2 + i] > 0]
              for name, i in PARTS.items()}
    name = {"width": "width", "length": "sequence length", "batch": "batch size"}[sweep]
    return (f"Training step against {name}",
            {"width": "width", "length": "tokens in a sequence", "batch": "sequences"}[sweep],
            "nanoseconds a token and parameter" if sweep == "width" else "microseconds a token",
            series)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python3 plot.py growth.txt")
    stem = sys.argv[1].rsplit(".", 1)[0]
    optimizer, step = [], []
    with open(sys.argv[1], encoding="utf-8") as f:
        for line in f:
            word = line.split()
            if word[:1] == ["optimizer"]:
                optimizer.append(tuple(map(float, word[1:])))
            elif word[:1] == ["step"]:
                step.append((word[1],) + tuple(map(float, word[2:])))
    if optimizer:
        write(f"{stem}_optimizer.svg", [optimizer_panel(optimizer)])
    if step:
        write(f"{stem}_step.svg", [step_panel(step, s) for s in ("width", "length", "batch")])


if __name__ == "__main__":
    main()
