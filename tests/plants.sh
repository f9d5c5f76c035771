# plants.sh - faults planted at markers in a source file; mutation.sh and mutation_c.sh read it.
# SPDX-License-Identifier: MIT OR Unlicense
#
# A marker is a comment, /* plant: NAME */, at the end of a line, or alone on the line before.

# plant_apply FILE MARKER SED OUT: FILE with the sed commands SED run on the marked line, as OUT.
# Says what is wrong with the plant, if anything.
plant_apply() {
    if [ "$(grep -c "/\* plant: $2 \*/" "$1")" -ne 1 ]; then
        echo "its marker is not in $1 once: $2"
        return 1
    fi
    { printf '%s\n' "/\\/\\* plant: $2 \\*\\//{" '/^ *\/\* [^/]*\*\/ *$/n' "$3" '}'
    } >"$4.sed"
    sed -f "$4.sed" "$1" >"$4" || return 1
    ! cmp -s "$1" "$4" || { echo "its sed commands change nothing: $3"; return 1; }
}

# plant_markers FILE: the names of its markers, one a line, sorted.
plant_markers() {
    sed -n 's/.*\/\* plant: \([a-z0-9_]*\) \*\/.*/\1/p' "$1" | sort
}
