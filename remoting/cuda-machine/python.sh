#!/bin/bash
# Programs of Python natively and through Gantry, both at the same time, and what they print compared: a part of
# run.sh, whose variables and functions it uses. Nothing here is a figure. GANTRY_PYTHON names what is run, all by
# itself: `numba`, or some of the names below.
set -u
export LC_ALL=C
mkdir -p "$out/python"
# Packages that the machine may lack.
for wheel in "$here"/wheels/*.whl; do [ ! -e "$wheel" ] || PYTHONPATH=$wheel:${PYTHONPATH:-}; done
export PYTHONPATH=${PYTHONPATH:-}
# What begins with `loss` is compared.
compare() {
    local name=$1 which both=()
    shift
    case "${GANTRY_PYTHON:-$name}" in *"$name"*) ;; *) return ;; esac
    for which in native remoted; do
        TORCHINDUCTOR_CACHE_DIR=$work/inductor.$which TRITON_CACHE_DIR=$work/triton.$which \
            within 150 "$work/torch-$which" "$@" > "$out/python/$name.$which" 2> "$out/python/$name.$which.err" &
        both+=($!)
    done
    wait "${both[@]}"
    local lines
    lines=$(grep -c ^loss "$out/python/$name.native")
    if [ "$lines" -gt 0 ] && cmp -s <(grep ^loss "$out/python/$name.native") <(grep ^loss "$out/python/$name.remoted"); then
        echo "$name: $lines lines are equal; native $(grep '^# [0-9]' "$out/python/$name.native"), through Gantry $(grep '^# [0-9]' "$out/python/$name.remoted")"
    else
        echo "$name: the lines differ, or there are none: $lines"
        diff <(grep ^loss "$out/python/$name.native") <(grep ^loss "$out/python/$name.remoted") | head -6
        for which in native remoted; do tail -4 "$out/python/$name.$which.err" | cut -c1-300 | sed "s/^/    $which: /"; done
    fi
}
# The tests of a package by unittest, a process for each file: a fault ends no more than that. pytest takes
# Numba's files for those of the package `cuda`.
units() {
    local name=$1 package=$2 which
    case "${GANTRY_PYTHON:-$name}" in *"$name"*) ;; *) return ;; esac
    "$work/torch-native" "$here/programs/units.py" --list "$package" > "$work/$name.files" 2> "$work/$name.err" ||
        { echo "$name: no tests: $(tail -1 "$work/$name.err")"; return; }
    for which in native remoted; do
        within "${GANTRY_UNITS:-240}" xargs -P "${GANTRY_UNIT_JOBS:-5}" -I FILE \
            env PYTHONPATH="$here/programs/python:$PYTHONPATH" \
            timeout -k 3 100 "$work/torch-$which" "$here/programs/units.py" FILE \
            < "$work/$name.files" > "$out/python/$name.$which" 2> "$out/python/$name.$which.err" &
    done
    wait
    local passed="$work/$name.passed"
    for which in native remoted; do
        echo "$name $which: of $(wc -l < "$work/$name.files") files: $(cut -d' ' -f1 "$out/python/$name.$which" | grep -xE 'PASSED|FAILED|ERROR|SKIPPED' | sort | uniq -c | tr '\n' ' ')"
        grep ^PASSED "$out/python/$name.$which" | cut -d' ' -f2 | sort -u > "$passed.$which"
    done
    echo "$name: natively passed $(wc -l < "$passed.native"), through Gantry, too: $(comm -12 "$passed.native" "$passed.remoted" | wc -l); passed there and not here:"
    comm -23 "$passed.native" "$passed.remoted" | head -80
    echo "$name: why others fail natively:"
    grep -hE '^(FAILED|ERROR) ' "$out/python/$name.native" | cut -d' ' -f3- | sed 's/[0-9]\+/N/g' | sort | uniq -c | sort -rn | head -12 | cut -c1-200
    grep -hE '^(FAILED|ERROR) ' "$out/python/$name.remoted" | grep -F -f <(comm -23 "$passed.native" "$passed.remoted") |
        cut -d' ' -f3- | sort | uniq -c | sort -rn | head -30 | cut -c1-240
}
units numba numba.cuda.tests > "$work/numba.txt" 2>&1 &
programs=$here/programs
compare gpt-efficient "$programs/gpt.py" 12 --attention efficient
compare llama "$programs/llama.py"
compare core "$programs/core.py"
compare gpt-math-half "$programs/gpt.py" 4 --attention math --half
compare gpt-graph "$programs/gpt.py" 12 --graph
compare gpt-compile "$programs/gpt.py" 2 --compile
wait
cat "$work/numba.txt"
