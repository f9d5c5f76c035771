# every_call.awk - one C function for each public function of mixprec.h and of the add-ons, which calls it with the
# arguments of every_call.txt, one of them replaced.
# SPDX-License-Identifier: MIT OR Unlicense
#
#     awk -f every_call.awk every_call.txt PREPROCESSED >every_call.h
#
# PREPROCESSED: the headers after cc -E, where MIXPREC_API and all that begins a public declaration is EVERY. A function
# or a parameter that every_call.txt does not know ends the program with 1.

function stop(text) { print "every_call: " text >"/dev/stderr"; failed = 1 }
function trim(text) { gsub(/[ \t]+/, " ", text); sub(/^ /, "", text); sub(/ $/, "", text); return text }

# --- every_call.txt ----------------------------------------------------------------------
FILENAME ~ /\.txt$/ {
    if ($0 ~ /^(#|$)/) next
    if (/ = /) {
        at = index($0, " = ")
        key = trim(substr($0, 1, at - 1))
        value[key] = trim(substr($0, at + 3))
        if (key ~ /^[a-z_0-9]+:/) {
            split(key, part, /[:. ]/)
            if (index(variants[part[1]] " ", " " part[2] " ") == 0) variants[part[1]] = variants[part[1]] " " part[2]
        }
    } else {
        for (i = 2; i <= NF; i++) { word[$1 " " $i] = 1; words[$1 " " $i] = FNR }
    }
    next
}

# --- declarations ------------------------------------------------------------------------
/^#/ { next }

# The numbers and pointers among the fields of a struct: those of structs inside it, too.
function field(of, name, type) {
    if (name ~ /\[/ && (type in list || type == "pointer")) return
    sub(/\[.*/, "", name)
    if (type ~ /^(float|double|int|int32_t|int64_t|pointer)$/)
        fields[of] = fields[of] "    { \"" name "\", offsetof(" of ", " name "), EVERY_OF_" toupper(type) " },\n"
    else if (type in list)
        for (i_of[of] = split(list[type], inner, /;/); i_of[of] > 0; i_of[of]--)
            if (split(inner[i_of[of]], pair, / /) == 2) field(of, name "." pair[2], pair[1])
}
/^typedef struct [a-z_0-9]+ \{/ { struct = $3; record = ""; sub(/^[^{]*\{/, "") }
struct {
    record = record " " $0
    if (/^}/ || /} [a-z_0-9]+;/) {
        sub(/}.*/, "", record)
        for (k = split(record, lines, /;/); k > 0; k--) {
            if (lines[k] ~ /[({]/) continue
            sub(/^ +/, "", lines[k])
            sub(/^(const|struct) +/, "", lines[k])
            type = lines[k] ~ /\*/ ? "pointer" : lines[k]
            sub(/ .*/, "", type)
            sub(/^[a-z_0-9]+ +/, "", lines[k])
            gsub(/\*|const /, "", lines[k])
            for (j = split(lines[k], each, / *, */); j > 0; j--) {
                sub(/^ +/, "", each[j])
                sub(/ +$/, "", each[j])
                if (each[j] != "") { list[struct] = list[struct] type " " each[j] ";"; field(struct, each[j], type) }
            }
        }
        struct = ""
        next
    }
    next
}
{ text = text $0 " " }
/[;{}]/ {
    while (match(text, /EVERY[^;{}]*[;{]/)) {
        found = substr(text, RSTART, RLENGTH - 1)
        text = substr(text, RSTART + RLENGTH)
        declared(found)
    }
    text = ""
}

# The name of a parameter, and its type.
function name_of(p) {
    if (match(p, /\(\*[a-z_0-9]+\)/)) return substr(p, RSTART + 2, RLENGTH - 3)
    match(p, /[a-z_0-9A-Z]+$/)
    return substr(p, RSTART)
}
function type_of(p, name) {
    if (p ~ /\(\*/) return p
    return trim(substr(p, 1, length(p) - length(name)))
}

function typed_name(type, name) { return type ~ /\*$/ ? type name : type ~ /\(/ ? type : type " " name }

# The argument: of this function, of all with this type and name, or of the type.
function argument(f, type, name) {
    if (f "." name in value) return value[f "." name]
    used[typed_name(type, name)] = used[type] = 1
    if (typed_name(type, name) in value) return value[typed_name(type, name)]
    if (type in value) return value[type]
    stop(f ": no argument for '" type "' '" name "': add a line to every_call.txt")
    return "0"
}

function declared(line,    open, f, result, n, i, c, depth, k, kinds) {
    gsub(/(__extension__|inline|static|EVERY(_UNUSED)?) /, "", line)
    line = trim(line)
    open = index(line, "(")
    if (open < 2) return
    f = substr(line, 1, open - 1)
    match(f, /[a-z_0-9A-Z]+$/)
    result = trim(substr(f, 1, RSTART - 1))
    f = substr(f, RSTART)
    if (f ~ /^mixpi_/ || f in seen) return
    seen[f] = 1
    count++

    # Its parameters.
    line = substr(line, open + 1)
    sub(/\)[^)]*$/, "", line)
    n = 1
    params[1] = ""
    for (i = 1; i <= length(line); i++) {
        c = substr(line, i, 1)
        depth += (c == "(") - (c == ")")
        if (c == "," && !depth) params[++n] = ""
        else params[n] = params[n] c
    }
    if (trim(line) == "void") n = 0
    made(f, f, result, n)
    for (k = split(variants[f], kinds, / /); k > 0; k--)
        if (kinds[k] != "") made(f, f ":" kinds[k], result, n)
}

# A C function, and its row. key: the function, or FUNCTION:VARIANT.
function made(f, key, result, n,    i, p, name, type, arg, call, names, kind, c_name, has_before) {
    for (i = 1; i <= n; i++) {
        p = trim(params[i])
        if (p == "...") { call = call ", \"new\""; continue }
        sub(/\[[^]]*\]$/, "", p)
        name = name_of(p)
        type = type_of(p, name)
        arg = (key "." name) in value ? value[key "." name] : argument(f, type, name)
        if (p ~ /\*/ || arg ~ /^every_/) kind = type ~ /^(const )?mixp_tensor \*$/ ? "TENSOR" : "POINTER"
        else if (type ~ /^(float|double)$/) kind = toupper(type)
        else if (type ~ /^(int|int32_t|int64_t|uint64_t|uint32_t|size_t|mixp_[a-z0-9_]*)$/ && arg !~ /^w\./)
            kind = ("size " name in word) || ("size " f "." name in word) ? "SIZE" : "WHOLE"
        else kind = "FIXED"
        call = call (i > 1 ? ", " : "") kind "(" (i - 1) ", " type_name(type) ", " arg ")"
        names = names (i > 1 ? ", " : "") "{ \"" name "\", EVERY_" kind ", " \
                ("optional " f "." name in word ? 1 : "required " f "." name in word || "required " f in word ? 2 : 0) ", " \
                fields_of(type, arg) " }"
        params_known[f "." name] = 1
    }
    call = f "(" call ")"
    if (result == "mixp_tensor *") call = "TENSOR_RESULT(" call ")"
    else if (result == "mixp_result") call = "CODE_RESULT(" call ")"
    else if (result ~ /\*$/) call = "POINTER_RESULT(" call ")"
    else call = call "; NO_RESULT"
    c_name = key
    sub(/:/, "__", c_name)
    body = body "static int every_" c_name "(void) { " call "; }\n"
    has_before = key " before" in value ? key : f " before" in value ? f : ""
    if (has_before == key) body = body "static void before_" c_name "(void) { " value[key " before"] " }\n"
    rows = rows "    { \"" key "\", every_" c_name ", " (has_before == "" ? "NULL" : "before_" (has_before == key ? c_name : f)) \
           ", EVERY_IN_" toupper(f " in" in value ? value[f " in"] : "CALL") ", " ("fails " f in word ? 1 : 0) ", " \
           ("finds " f in word ? "EVERY_OTHER" : result == "mixp_tensor *" ? "EVERY_MADE" : result == "mixp_result" ? "EVERY_CODE" : "EVERY_OTHER") \
           ", " n ", { " (n ? names : "{ NULL, EVERY_FIXED, 0, NULL, NULL, 0 }") " } },\n"
}

# The fields of the struct that a pointer leads to, and where it is.
function fields_of(type, arg) {
    gsub(/^const | \*$/, "", type)
    if (!(type in fields) || arg !~ /^&w\./) return "NULL, NULL, 0"
    tables[type] = 1
    return "every_of_" type ", " arg ", " ("sized " type in word ? 1 : 0)
}
function type_name(type) { return type ~ /\*|\(/ ? "void" : type }

END {
    if (count < 300) stop("only " count " functions found")
    for (i in value) {
        split(i, part, /[ .:]/)
        if (i ~ /^[a-z_0-9]+([.:]| (before|in)$)/ && !(part[1] in seen)) stop(i ": no function of this name")
        if (i !~ /[.:]/ && i !~ / (before|in)$/ && !(i in used)) stop(i ": no parameter needs this line")
        if (i ~ /^[a-z_0-9]+\.[a-z_0-9]+$/ && !(i in params_known)) stop(i ": the function has no such parameter")
    }
    for (i in word) {
        split(i, part, / /)
        if (part[1] ~ /^(optional|required|fails|finds)$/ && part[2] !~ /^\*/ && !(part[2] in seen) && !(part[2] in params_known))
            stop(i ": nothing of this name")
    }
    print "/* Made by every_call.awk. */"
    for (i in tables) print "static const every_field every_of_" i "[] = {\n" fields[i] "    { NULL, 0, 0 } };"
    print body
    print "static const every_row every_rows[] = {"
    printf "%s", rows
    print "};"
    exit failed
}
