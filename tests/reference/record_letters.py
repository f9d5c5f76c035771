#!/usr/bin/env python3
# record_letters.py - the letters, numbers and spaces of Unicode, as regular expressions of tokenizers name
# them: \p{L}, \p{N} and \s. Writes examples/trainer/letters.h. Needs unicodedataplus, whose version is that of the
# regular expressions of tokenizers 0.23: no newer one, whose letters that library would cut as signs.
# SPDX-License-Identifier: MIT OR Unlicense
import sys
import unicodedataplus as unicodedata

SPACES = [9, 10, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]


def ranges(of):
    begin, found = None, []
    for code in range(0x110001):
        inside = code < 0x110000 and of(code)
        if inside and begin is None:
            begin = code
        if not inside and begin is not None:
            found.append((begin, code - 1))
            begin = None
    return found


def table(out, name, what, of):
    out.write("\n/* %s */\nstatic const uint32_t %s[][2] = {\n" % (what, name))
    line = "   "
    for first, last in ranges(of):
        pair = " {0x%X, 0x%X}," % (first, last)
        if len(line) + len(pair) > 100:
            out.write(line + "\n")
            line = "   "
        line += pair
    out.write(line.rstrip(",") + "};\n")


with open(sys.argv[1], "w") as out:
    out.write("/* letters.h - the letters, numbers and spaces of Unicode %s, first and last of each range:\n"
              " * a part of trainer.c, written by tests/reference/record_letters.py\n"
              " * SPDX-License-Identifier: MIT OR Unlicense\n */\n"
              "#ifndef TRAINER_LETTERS_H\n#define TRAINER_LETTERS_H\n\n#include <stdint.h>\n" % unicodedata.unidata_version)
    table(out, "letter_ranges", "\\\\p{L}".replace("\\\\", "\\"), lambda c: unicodedata.category(chr(c))[0] == "L")
    table(out, "number_ranges", "\\p{N}", lambda c: unicodedata.category(chr(c))[0] == "N")
    table(out, "space_ranges", "\\s", lambda c: c in SPACES)
    table(out, "mark_ranges", "\\p{M}", lambda c: unicodedata.category(chr(c))[0] == "M")
    out.write("\n#endif\n")
