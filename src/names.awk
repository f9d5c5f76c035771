# names.awk - puts the rows of pytorch_names.txt into the table of docs/pytorch.md.
# SPDX-License-Identifier: MIT OR Unlicense
#
#     awk -f src/names.awk src/pytorch_names.txt docs/pytorch.md          (make pack does it)
BEGIN { FS = " *[|] *" }
NR == FNR {
    if (!/^#/ && NF) rows = rows "| `" $1 "` | " ($2 == "-" ? "not here" : "`" $2 "`") " | " $3 " |\n"
    next
}
/^<!-- end of the names/ { inside = 0 }
!inside { print }
/^<!-- made from/ { printf "| PyTorch | mixprec | |\n|---|---|---|\n%s", rows; inside = 1 }
