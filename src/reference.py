#!/usr/bin/env python3
"""reference.py - the API reference, one HTML page made from the comments of the public rooms.

    python3 src/reference.py >build/reference.html          or: make reference

It reads the public half in reading order, keeps each comment with the declarations below it, links every
public name, moves what only authors of devices and operators need to the end, and adds the functions of the
add-ons in examples/ and an index by PyTorch's names from src/pytorch_names.txt. Exit status 1: a name in
that file is neither in the header nor in an add-on, or a function has no comment of its own: it stands with
others below a comment that does not name it.
"""
import html
import os
import re
import sys
import textwrap

SRC = os.path.dirname(os.path.abspath(__file__))
ADDONS = ("conv.h", "ops.h", "recurrent.h", "compare.h")
NAME = re.compile(r"\b(?:mixp_[a-z0-9_]+|MIXP_[A-Z0-9_]+|MIXPREC_[A-Z0-9_]+)\b")

WORD = re.compile(r"\b[A-Za-z_]\w+\b")


class Entry:
    """A comment and the declarations below it."""

    def __init__(self, text):
        self.text = text
        self.code = []

    def names(self):
        return list(dict.fromkeys(name for code in self.code for name in declared(code)))


class Section:
    def __init__(self, title, text, authors):
        self.title = title
        self.text = text
        self.authors = authors
        self.entries = []


def public_rooms():
    with open(os.path.join(SRC, "mixprec.h")) as order:
        public = order.read().split("Stop here")[0]
    return re.findall(r'^#include "(.*)"$', public, re.M)


def comment_text(lines):
    """A block comment without its stars."""
    text = "\n".join(lines)
    text = re.sub(r"^/\*+ ?|\s*\*/\s*$", "", text)
    return re.sub(r"^ \*(?: |$)", "", text, flags=re.M).strip("\n")


def declared(code):
    """The public names that a piece of code declares."""
    first = code.split("\n")[0]
    if first.startswith("#define"):
        return re.findall(r"^#\s*define\s+(MIXP_\w+|mixp_\w+)", code, re.M)
    if first.startswith(("typedef struct", "typedef enum", "typedef union", "struct", "class")):
        names = re.findall(r"\b(mixp_\w+)\s*;\s*$", code) or re.findall(r"(?:struct|class) (mixp_\w+)", first)
        if "enum" in first:
            plain = re.sub(r"/\*.*?\*/", "", code, flags=re.S)
            names += re.findall(r"\b(MIXP_[A-Z0-9_]+)\b\s*(?:[,=}]|$)", plain, re.M)
        return names
    if first.startswith("typedef"):
        return re.findall(r"\(\*(mixp_\w+)\)", code) or re.findall(r"\b(mixp_\w+);", code)
    return re.findall(r"\b(\w+)\s*\(", code)[:1]


def signature(lines):
    """A declaration as users see it: inline functions without their bodies, and without the words that
    only set the linkage."""
    code = "\n".join(lines)
    if re.match(r"[A-Z]+_API |MIXPREC_HD |static ", code) and "{" in code:
        code = code[:code.index("{")].rstrip() + ";"
    code = re.sub(r"^([A-Z]+_API|MIXPREC_HD) +", "", code)
    if "{" not in code and not code.startswith("#"):
        code = re.sub(r"\n +", "\n    ", code)
    return re.sub(r"\n    struct mixpi_\w+ \{.*?\n    \} \w+;[^\n]*", "", code, flags=re.S)     # private fields


def without_comments(lines):
    """The lines with comments and strings blanked, also comments of several lines."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group(0))
    return re.sub(r"/\*.*?\*/|\"[^\"\n]*\"", blank, "\n".join(lines), flags=re.S).split("\n")


def chunk_end(plain, start):
    """The line behind the declaration that begins at `start`; `plain` has no comments."""
    depth = 0
    for i in range(start, len(plain)):
        line = plain[i].rstrip()
        depth += line.count("{") - line.count("}") + line.count("(") - line.count(")")
        if plain[start].startswith("#"):
            if not line.endswith("\\"):
                return i + 1
        elif depth == 0 and line.endswith((";", "}")):
            return i + 1
    return len(plain)


class Reader:
    def __init__(self):
        self.sections = []
        self.entry = None

    def begin(self, title, text, authors=False):
        self.sections.append(Section(title, text, authors))
        self.entry = None

    def comment(self, lines):
        banner = re.match(r"/\* ==== (\d+)\. ([A-Z]+)", lines[0])
        part = re.match(r"/\* --- (.*?) -{3,}", lines[0])
        if banner:
            self.begin(banner.group(2).capitalize(), comment_text(lines[1:]) if len(lines) > 1 else "")
        elif part:
            title = part.group(1)
            authors = "authors" in title or self.sections[-1].authors and "users" not in title
            base = self.sections[-1].title.split(": ")[0]
            title = re.sub(r": (users|see) .*", "", title)
            self.begin(base + ": " + title, comment_text(lines[1:]), authors)
        else:
            self.entry = Entry(comment_text(lines))
            self.sections[-1].entries.append(self.entry)

    def declaration(self, lines):
        code = signature(lines)
        if not declared(code) or re.search(r"\b(mixpi_\w+)\s*\(", code.split("\n")[0]):
            return
        if self.entry is None:
            self.entry = Entry("")
            self.sections[-1].entries.append(self.entry)
        self.entry.code.append(code)

    def room(self, path):
        with open(os.path.join(SRC, path)) as f:
            lines = f.read().split("\n")
        plain = without_comments(lines)
        i = 0
        while i < len(lines):
            if lines[i].startswith("/*"):
                end = i
                while "*/" not in lines[end]:
                    end += 1
                self.comment(lines[i:end + 1])
                i = end + 1
            elif re.match(r"#\s*(?!define)|\s*$|\}|extern \"C\"|MIXPI_\w+\([^;]*\)$", lines[i]):
                i += 1
            else:
                end = chunk_end(plain, i)
                self.declaration(lines[i:end])
                i = end


def addon(name):
    """The section of an add-on: what its first comment says, and its functions with their comments."""
    with open(os.path.join(SRC, "..", "examples", name)) as f:
        text = f.read()
    first = comment_text(text[:text.index("*/") + 2].split("\n"))
    section = Section("Add-on: examples/" + name, re.sub(r"^.*? - |\nSPDX.*", "", first), False)
    comment = r"(/\*(?:(?!\*/).)*?\*/\n)?"
    struct = r"typedef struct \w+ \{.*?\} \w+;"
    for match in re.finditer(comment + r"([A-Z]+_API [^{;]*\{|%s)" % struct, text, re.S):
        code = signature(match.group(2).split("\n"))
        if code.startswith("typedef") and not re.search(r"_API[^{]*\b%s\b" % re.findall(r"\w+", code)[-1], text):
            continue                            # only the add-on itself uses this struct
        if match.group(1) or not section.entries:
            section.entries.append(Entry(comment_text((match.group(1) or "").rstrip("\n").split("\n"))))
        section.entries[-1].code.append(code)
    return section


def manual():
    with open(os.path.join(SRC, "manual.h")) as f:
        text = comment_text(f.read().rstrip("\n").split("\n"))
    return re.sub(r"^SPDX.*\n", "", text, count=1, flags=re.M)


def linked(text, anchors, names=NAME):
    """Escaped text whose public names are links."""
    def link(match):
        name = match.group(0)
        return '<a href="#%s">%s</a>' % (name, name) if name in anchors else name
    return names.sub(link, html.escape(text, quote=False))


def paragraphs(text, anchors):
    """Prose as paragraphs; lines that are indented, as tables and code are, as they stand."""
    out = []
    for block in re.split(r"\n\s*\n", text):
        if not block.strip():
            continue
        tag = "pre" if all(re.match(r" {2,}|$", line) for line in block.split("\n")) else "p"
        lines = block if tag == "pre" else " ".join(line.strip() for line in block.split("\n"))
        out.append((tag, linked(lines, anchors)))
    joined = []                     # blocks that follow each other are one piece of code
    for tag, lines in out:
        if tag == "pre" and joined and joined[-1][0] == "pre":
            joined[-1] = (tag, joined[-1][1] + "\n\n" + lines)
        else:
            joined.append((tag, lines))
    return "\n".join("<%s>%s</%s>" % (tag, textwrap.dedent(lines) if tag == "pre" else lines, tag)
                     for tag, lines in joined)


def entry_html(entry, anchors):
    names = entry.names()
    places = [n for n in names if anchors[n] is entry]
    if not names:
        return '<div class="note">%s</div>' % paragraphs(entry.text, anchors)
    shown = [n for n in names if not n.startswith("MIXP_")] or names[:1]
    marks = "".join('<span id="%s"></span>' % n for n in places)
    code = "\n".join(linked(c, anchors, WORD) for c in entry.code)
    kind = "code" if re.search(r"\{|^#", "\n".join(entry.code), re.M) else "code prototype"
    return ('<article data-names="%s">%s<h3>%s</h3>\n%s\n<pre class="%s">%s</pre></article>'
            % (" ".join(names).lower(), marks, " ".join("<code>%s</code>" % n for n in shown),
               paragraphs(entry.text, anchors), kind, code))


def unnamed(entry):
    """Functions that stand below a comment with other functions, and that it does not name."""
    functions = [n for code in entry.code if "(" in code and not code.startswith(("typedef", "struct", "class", "#"))
                 for n in declared(code) if n.startswith("mixp_")]
    words = set(re.findall(r"\w+", entry.text))
    return [n for n in functions if len(functions) > 1 and not words & {n, n[5:], re.sub("^mixp_[a-z]+_", "_", n)}]


def pytorch_names():
    """Rows (PyTorch's name, our names or '-', note)."""
    rows = []
    with open(os.path.join(SRC, "pytorch_names.txt")) as f:
        for line in f:
            if line.strip() and not line.startswith("#"):
                theirs, ours, note = (line.rstrip("\n").split("|") + ["", ""])[:3]
                rows.append((theirs.strip(), ours.strip(), note.strip()))
    return sorted(rows, key=lambda row: row[0].lower())


def pytorch_html(rows, anchors):
    body = "".join(
        '<tr data-names="%s"><td><code>%s</code></td><td>%s</td><td>%s</td></tr>\n'
        % ((theirs + " " + ours).lower(), html.escape(theirs),
           "<code>%s</code>" % linked(ours, anchors, WORD) if ours != "-" else "not here",
           linked(note, anchors)) for theirs, ours, note in rows)
    return ('<section id="pytorch"><h2>From PyTorch\'s names</h2><table><thead><tr><th>PyTorch</th><th>mixprec</th>'
            "<th></th></tr></thead><tbody>%s</tbody></table></section>" % body)


STYLE = """
:root { --ink: #1c2127; --paper: #fff; --quiet: #5a6572; --line: #d9dee4; --code: #f4f6f8; --link: #0b5cad }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dde3ea; --paper: #14181d; --quiet: #96a2b0; --line: #323a44; --code: #1d232a; --link: #79b4f2 }
}
* { box-sizing: border-box }
html { scroll-padding-top: 4rem }
body { margin: 0; font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
a { color: var(--link); text-decoration: none } a:hover { text-decoration: underline }
header { position: sticky; top: 0; padding: .6rem 1rem; background: var(--paper); border-bottom: 1px solid var(--line);
         display: flex; gap: 1rem; align-items: center; flex-wrap: wrap; z-index: 1 }
header b { white-space: nowrap }
header input { flex: 1; min-width: 9rem; font: inherit; padding: .3rem .6rem; color: inherit; background: var(--code);
               border: 1px solid var(--line); border-radius: 6px }
#found { color: var(--quiet); font-size: .9rem }
main { max-width: 60rem; margin: 0 auto; padding: 1rem }
nav ul { columns: 16rem; padding-left: 1.2rem }
h2 { margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--line) }
h3 { margin: 2rem 0 .3rem; display: flex; flex-wrap: wrap; gap: .1rem 1rem }
h3 code { font-size: 1.2rem; font-weight: 600; overflow-wrap: anywhere }
pre, code { font: .84rem/1.45 ui-monospace, Menlo, Consolas, monospace }
p { overflow-wrap: anywhere }
pre { overflow-x: auto; padding: .7rem; background: var(--code); border-radius: 6px }
table { border-collapse: collapse; width: 100% } th { text-align: left }
td, th { padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
         overflow-wrap: anywhere }
main.searching { display: flex; flex-direction: column } .searching section { display: contents }
.again { display: none } .searching .again { display: block; order: 1 }
.hidden { display: none !important }
@media (max-width: 40rem) {
  pre.prototype { white-space: pre-wrap; overflow-wrap: anywhere }
  table, thead, tbody, tr, td { display: block } thead { display: none }
  td { border: 0; padding: 0 } tr { padding: .4rem 0; border-bottom: 1px solid var(--line) }
}
"""
SCRIPT = """
const field = document.getElementById('search'), found = document.getElementById('found');
const items = [...document.querySelectorAll('[data-names]')];
const rest = [...document.querySelectorAll('nav, .note, .lead, section > p, #manual')];
const sections = [...document.querySelectorAll('main section')];
for (const s of sections) {     /* a second heading, above the items that are found by their text */
  const heading = s.querySelector('h2').cloneNode(true);
  heading.className = 'again';
  heading.append(', in the text');
  s.querySelector('h2').after(heading);
}
function headings(s, searching) {
  const hits = s.querySelectorAll('[data-names]:not(.hidden)').length;
  let named = s.querySelectorAll('.named:not(.hidden)').length;
  if (named && s.querySelector('table')) named = hits;      /* a table is one item */
  s.classList.toggle('hidden', searching && !hits);
  s.querySelector('h2').classList.toggle('hidden', searching && !named);
  s.querySelector('.again').classList.toggle('hidden', !searching || named === hits);
}
function search() {
  const words = field.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let count = 0;
  for (const item of items) {
    const text = item.dataset.names + ' ' + (words.length && field.value.length > 3 ? item.textContent.toLowerCase() : '');
    const hit = words.every(word => text.includes(word));
    item.classList.toggle('hidden', !hit);
    item.classList.toggle('named', words.every(word => item.dataset.names.includes(word)));
    item.style.order = item.classList.contains('named') ? 0 : 1;    /* names come before other text */
    count += hit;
  }
  for (const part of rest) part.classList.toggle('hidden', words.length > 0);
  document.querySelector('main').classList.toggle('searching', words.length > 0);
  for (const s of sections) headings(s, words.length > 0);
  for (const table of document.querySelectorAll('table')) table.style.order = table.querySelector('.named') ? 0 : 1;
  found.textContent = words.length ? count + ' found' : '';
  document.getElementById('none').classList.toggle('hidden', !words.length || count > 0);
}
field.addEventListener('input', search);
document.addEventListener('keydown', e => {
  if (e.key === '/' && document.activeElement !== field) { e.preventDefault(); field.focus(); }
  if (e.key === 'Escape') { field.value = ''; search(); }
});
"""


def section_html(index, section, anchors):
    body = "\n".join(entry_html(e, anchors) for e in section.entries)
    return ('<section id="section-%d"><h2>%s</h2>\n<div class="lead">%s</div>\n%s</section>'
            % (index, html.escape(section.title), paragraphs(section.text, anchors), body))


def page(sections, rows, version):
    anchors = {}            # a name's place: the last entry, for a struct is named before it is defined
    for section in sections:
        for entry in section.entries:
            anchors.update((name, entry) for name in entry.names())
    ordered = [s for s in sections if not s.authors] + [s for s in sections if s.authors]
    ordered = [s for s in ordered if s.entries or s.text]
    contents = "".join('<li><a href="#section-%d">%s</a></li>' % (i, html.escape(s.title))
                       for i, s in enumerate(ordered))
    body = "\n".join(section_html(i, s, anchors) for i, s in enumerate(ordered))
    return anchors, """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>mixprec %s: reference</title><style>%s</style></head><body>
<header><b>mixprec %s</b><input id="search" type="search" placeholder="search (key /)" aria-label="search">
<span id="found" aria-live="polite"></span></header>
<main><p id="none" class="hidden">Nothing has this name. Try PyTorch's name, or a part of a word: "conv", "lstm",
"schedule". All that mixprec does not do stands at the end of the <a href="#manual">manual</a>.</p>
<nav aria-label="contents"><ul><li><a href="#pytorch">From PyTorch's names</a></li>
<li><a href="#manual">Manual</a></li>%s</ul></nav>
<section id="manual"><h2>Manual</h2>%s</section>
%s
%s
</main><script>%s</script></body></html>
""" % (version, STYLE, version, contents, paragraphs(manual(), anchors), body,
       pytorch_html(rows, anchors), SCRIPT)


def main():
    reader = Reader()
    for room in public_rooms():
        if room not in ("manual.h", "base.h"):
            reader.room(room)
    with open(os.path.join(SRC, "base.h")) as f:
        version = re.search(r'MIXPREC_VERSION "(.*)"', f.read()).group(1)
    rows = pytorch_names()
    anchors, text = page(reader.sections + [addon(name) for name in ADDONS], rows, version)
    sys.stdout.write(text)
    unknown = sorted({n for _, ours, note in rows for n in [ours] + NAME.findall(note)
                      if n != "-" and n not in anchors and not n.startswith("MIXPREC_")})
    borrowed = [name for section in reader.sections for entry in section.entries for name in unnamed(entry)]
    for name in unknown:
        print("src/pytorch_names.txt: %s is not in the header" % name, file=sys.stderr)
    for name in borrowed:
        print("%s has no comment of its own: give it one, or name it in the comment above it" % name, file=sys.stderr)
    return 1 if unknown or borrowed else 0


sys.exit(main())
