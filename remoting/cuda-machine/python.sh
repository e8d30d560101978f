#!/bin/bash
# Programs of Python natively and through Gantry, both at the same time, and what they print compared: a part of
# run.sh, whose variables and functions it uses. Nothing here is a figure. GANTRY_PYTHON names what is run, all by
# itself: `numba`, or some of the names below.
set -u
mkdir -p "$out/python"
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
numba() {
    local which
    case "${GANTRY_PYTHON:-numba}" in *numba*) ;; *) return ;; esac
    python3 -c 'import numba_cuda, pytest, xdist' 2>&1 || return
    for which in native remoted; do
        (cd "$work" && within "${GANTRY_NUMBA:-170}" "$work/torch-$which" -m pytest -p no:cacheprovider -v --tb=line -n 5 \
            -o consider_namespace_packages=true --benchmark-disable --pyargs numba.cuda.tests > "$out/python/numba.$which" 2>&1) &
    done
    wait
    for which in native remoted; do
        # With several processes: `[gw1] [ 3%] PASSED cudapy/test_x.py::Class::test`.
        grep -oE '(PASSED|FAILED|ERROR|SKIPPED|XFAIL) +[^ ]+::.*' "$out/python/numba.$which" | sed 's/ *$//' | sort -u > "$work/numba.$which"
        echo "numba $which: $(cut -d' ' -f1 "$work/numba.$which" | sort | uniq -c | tr '\n' ' ')"
    done
    local passed both
    passed=$(grep ^PASSED "$work/numba.native" | cut -d' ' -f2-)
    both=$(comm -12 <(grep ^PASSED "$work/numba.native" | sort) <(grep ^PASSED "$work/numba.remoted" | sort) | wc -l)
    echo "numba: natively passed $(grep -c . <<< "$passed"), through Gantry, too: $both; passed there and not here:"
    grep -E '^(FAILED|ERROR)' "$work/numba.remoted" | cut -d' ' -f2- | grep -Fx -f <(echo "$passed") | head -60
    grep -E '^(/|E |.*Error)' "$out/python/numba.remoted" | sort | uniq -c | sort -rn | head -30 | cut -c1-240
}
numba > "$work/numba.txt" 2>&1 &
programs=$here/programs
compare gpt-efficient "$programs/gpt.py" 12 --attention efficient
compare llama "$programs/llama.py"
compare core "$programs/core.py"
compare gpt-math-half "$programs/gpt.py" 4 --attention math --half
compare gpt-graph "$programs/gpt.py" 12 --graph
compare gpt-compile "$programs/gpt.py" 2 --compile
wait
cat "$work/numba.txt"
