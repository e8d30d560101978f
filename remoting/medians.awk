# Medians of figures as a table: files NAME.ROUND with lines of a name, a value and a unit. `names` has the
# columns in order; the others are compared with the first if that is "native".
function median(list, value, count, i, j, held) {
    count = split(list, value, " ")
    for (i = 2; i <= count; i++) {
        held = value[i] + 0
        for (j = i - 1; j > 0 && value[j] + 0 > held; j--) value[j + 1] = value[j]
        value[j + 1] = held
    }
    return count % 2 ? value[(count + 1) / 2] : (value[count / 2] + value[count / 2 + 1]) / 2
}
FNR == 1 { name = FILENAME; sub(/^.*\//, "", name); sub(/[.][0-9]+$/, "", name) }
NF == 3 {
    if (!($1 in unit)) { unit[$1] = $3; line[++lines] = $1 }
    all[$1, name] = all[$1, name] " " $2
}
END {
    columns = split(names, column, " ")
    title = "| what |"; rule = "|---|"
    for (c = 1; c <= columns; c++) {
        title = title " " column[c] " |"; rule = rule "---|"
        if (c > 1 && column[1] == "native") { title = title " ratio |"; rule = rule "---|" }
    }
    print title; print rule
    for (l = 1; l <= lines; l++) {
        what = line[l]
        row = "| " what ", " unit[what] " |"
        for (c = 1; c <= columns; c++) {
            there = (what SUBSEP column[c]) in all
            here = there ? median(all[what, column[c]]) : 0
            row = row " " (there ? here : "") " |"
            if (c == 1) native = here
            if (c > 1 && column[1] == "native")
                row = row " " (there && native > 0 ? sprintf("%.3f", here / native) : "") " |"
        }
        print row
    }
}
