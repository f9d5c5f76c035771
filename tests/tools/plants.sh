# plants.sh - faults planted in lines of a source file; mutation.sh and mutation_c.sh read it. The lines are listed in
# tests/tools/plants.txt by their text, so that the products carry no marks.
# SPDX-License-Identifier: MIT OR Unlicense

# plant_line FILE NAME: the number of the line; fails, and says why, unless there is one.
plant_line() {
    awk -v product="${1##*/}" -v name="$2" '
        function bare(text) { sub(/^ +/, "", text); sub(/ +$/, "", text); return text }
        FNR == 1 { file++ }
        file == 1 && stage == 0 && $0 == name { stage = 1; next }
        file == 1 && stage == 1 {
            head = "in " product
            if (substr($0, 1, length(head)) != head) { stage = 0; next }
            anchor = substr($0, length(head) + 8)
            stage = 2
            next
        }
        file == 1 && stage == 2 { text = bare($0); stage = 3 }
        file == 1 { next }
        { line = bare($0) }
        anchor != "" && line == anchor { anchors++; after = FNR; taken = 0 }
        line == text && (anchor == "" || after && !taken) { found++; number = FNR; taken = 1 }
        END {
            if (stage != 3) print "not in tests/tools/plants.txt: " name
            else if (anchor != "" && anchors != 1) print "this line is not there once: " anchor
            else if (found != 1) print "this line is there " found + 0 " times: " text
            else { print number; exit 0 }
            exit 1
        }' tests/tools/plants.txt "$1"
}

# plant_apply FILE NAME SED OUT: FILE with the sed commands SED run on the line of that name, as OUT.
# Says what is wrong with the plant, if anything.
plant_apply() {
    plant_at=$(plant_line "$1" "$2") || { echo "$plant_at"; return 1; }
    printf '%s\n' "$plant_at{" "$3" '}' >"$4.sed"
    sed -f "$4.sed" "$1" >"$4" || return 1
    ! cmp -s "$1" "$4" || { echo "its sed commands change nothing: $3"; return 1; }
}

# plant_names FILE: the names of the lines listed for it, one a line, sorted.
plant_names() {
    awk -v head="in ${1##*/}" '$0 == head || index($0, head " after ") == 1 { print last } { last = $0 }' tests/tools/plants.txt | sort
}
