# bars.awk - draws a log of bench_cuda or torch_cuda.py as SVG: milliseconds of a step, or how much of a copy's
# speed a kernel reaches. Exit status 1 when there is nothing to draw.
# SPDX-License-Identifier: MIT OR Unlicense
#
#     awk -f tests/bench/bars.awk TABLE.txt >TABLE.svg
function escaped(text) {
    gsub(/&/, "\\&amp;", text)
    gsub(/</, "\\&lt;", text)
    gsub(/>/, "\\&gt;", text)
    return text
}
function add(label, x, color) {
    sub(/ +$/, "", label)
    labels[++n] = label
    values[n] = x
    colors[n] = color
    if (x > most) most = x
}
{ sub(/; model .*/, "") }            # what a kernel should take, by the model of the GPU
/^torch /                           { torch = 1 }
/^mixprec /                         { torch = 0 }
/^GPT-2 .* ms \[/ {
    split($0, half, / ms \[/)
    words = split(half[1], word, / +/)
    label = word[2]
    for (i = 3; i < words; i++) label = label " " word[i]
    unit = "ms a step"
    add((torch ? "PyTorch: " : "") label, word[words] + 0, torch ? "#d55e00" : "#0072b2")
}
/ GB\/s, the copy .* of it$/ {
    name = substr($0, 1, 30)
    unit = "of the speed of a copy"
    add((torch ? "PyTorch: " : "") name, $(NF - 2) + 0, torch ? "#d55e00" : "#0072b2")
}
END {
    if (!n) exit 1
    if (most <= 0) most = 1
    printf "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"900\" height=\"%d\" " \
           "font-family=\"sans-serif\" font-size=\"12\">\n", 40 + 20 * n
    print "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    printf "<text x=\"10\" y=\"20\" font-weight=\"bold\">%s</text>\n", unit
    for (i = 1; i <= n; i++) {
        y = 20 + 20 * i
        printf "<text x=\"10\" y=\"%d\">%s</text>", y + 12, escaped(labels[i])
        printf "<rect x=\"420\" y=\"%d\" width=\"%.1f\" height=\"14\" fill=\"%s\"/>", y,
               400 * values[i] / most, colors[i]
        printf "<text x=\"%.1f\" y=\"%d\">%.4g</text>\n", 426 + 400 * values[i] / most, y + 12,
               values[i]
    }
    print "</svg>"
}
