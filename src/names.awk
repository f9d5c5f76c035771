# names.awk - puts the rows of pytorch_names.txt into the table of docs/pytorch.md. A function's row has its parameters.
# SPDX-License-Identifier: MIT OR Unlicense
#
#     awk -f src/names.awk mixprec.h src/pytorch_names.txt docs/pytorch.md          (make pack does it)
BEGIN { FS = " *[|] *" }

# The header: "MIXPREC_API mixp_result mixp_read(const mixp_tensor *t, ...);" gives parameters["mixp_read"] = "t, ...".
FILENAME ~ /mixprec\.h$/ {
    if (/^MIXPREC_API/) text = ""
    text = text " " $0
    if (!/[;{]/) next
    if (text ~ /^ MIXPREC_API/ && text ~ /;/ && match(text, /mixp_[a-z0-9_]+ *\(.*\)/)) declare(substr(text, RSTART, RLENGTH))
    text = ""
    next
}
function declare(call, name, n, i, part, list) {
    name = call
    sub(/ *\(.*/, "", name)
    sub(/^[^(]*\(/, "", call)
    sub(/\)[^)]*$/, "", call)
    if (call ~ /[()]/ || name in parameters) return         # a parameter that is a function
    n = split(call, part, /, */)
    for (i = 1; i <= n; i++) {
        gsub(/\[[^]]*\]/, "", part[i])
        sub(/.*[ *]/, "", part[i])
        list = list (i > 1 ? ", " : "") part[i]
    }
    parameters[name] = list == "void" ? "" : list
}

FILENAME ~ /pytorch_names/ {
    if (/^#/ || !NF) next
    ours = $2 == "-" ? "not here" : "`" $2 ($2 in parameters ? "(" parameters[$2] ")" : "") "`"
    rows = rows "| `" $1 "` | " ours " | " $3 " |\n"
    next
}
/^<!-- end of the names/ { inside = 0 }
!inside { print }
/^<!-- made from/ { printf "| PyTorch | mixprec | |\n|---|---|---|\n%s", rows; inside = 1 }
