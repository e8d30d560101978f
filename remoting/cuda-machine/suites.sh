#!/bin/bash
# Test suites of other projects, as far as they were packed (suites.tar.gz), natively and through Gantry at the same
# time: a part of run.sh, whose variables and functions it uses. What passed natively and not through Gantry is run
# again on both sides, each test by itself. GANTRY_SUITES names suites, where not all are to be run;
# GANTRY_SUITE_SECONDS is the limit of each.
set -u
export LC_ALL=C
mkdir -p "$out/suites"
tar -xzf "$here/suites.tar.gz" -C "$work"
seconds=${GANTRY_SUITE_SECONDS:-240}
# One run: `tests NATIVE_OR_REMOTED FOLDER FILE ARGUMENTS`. A test that hangs ends its process, not the run.
tests() {
    local which=$1 folder=$2 file=$3
    shift 3
    cd "$work/$folder" || return
    PYTHONPATH=$work/${folder%%/*}/site:$here/programs GANTRY_OUTCOMES=$file PYTHONDONTWRITEBYTECODE=1 \
        TRITON_CACHE_DIR=$work/suites.triton.$which TORCHINDUCTOR_CACHE_DIR=$work/suites.inductor.$which \
        "$work/torch-$which" -m pytest -q -p outcomes -p no:cacheprovider --rootdir . --timeout 100 --timeout-method thread "$@" < /dev/null
}
again() {
    local which
    for which in native remoted; do
        timeout -k 3 120 bash -c 'tests "$@"' - $which "$2" "$1.again.$which" "$3" > "$(mktemp "$1.again.$which.log.XXXX")" 2>&1
    done
}
# Something may go wrong when a test has passed.
passed() {
    comm -23 <(sed -n 's/^PASSED\t\([^\t]*\)\t.*/\1/p' "$1" | sort -u) <(sed -n 's/^FAILED\t\([^\t]*\)\t.*/\1/p' "$1" | sort -u)
}
export -f tests again
# `suite NAME JOBS MOST FOLDER ARGUMENTS`: so many processes on each side, so many tests of one function.
suite() {
    local name=$1 jobs=$2 most=$3 folder=$4 which file=$out/suites/$1
    shift 4
    case " ${GANTRY_SUITES:-$name} " in *" $name "*) ;; *) return ;; esac
    [ -d "$work/$folder" ] || return
    for which in native remoted; do
        GANTRY_MOST=$most within "$seconds" bash -c 'tests "$@"' - $which "$folder" "$file.$which" -n "$jobs" --max-worker-restart 200 "$@" \
            > "$file.$which.log" 2>&1 &
    done
    wait
    touch "$file.native" "$file.remoted" "$file.again.native" "$file.again.remoted"
    for which in native remoted; do
        echo "$name $which: $(cut -f1 "$file.$which" | sort | uniq -c | tr '\n' ' ') $(tail -1 "$file.$which.log" | cut -c1-150)"
        passed "$file.$which" > "$file.passed.$which"
    done
    # What was not reached says nothing.
    cut -f2 "$file.remoted" | sort -u | comm -12 - "$file.passed.native" > "$file.both"
    comm -23 "$file.both" "$file.passed.remoted" > "$file.differ"
    echo "$name: ran on both sides and passed natively $(wc -l < "$file.both"), through Gantry, too, $(comm -12 "$file.both" "$file.passed.remoted" | wc -l)"
    head -60 "$file.differ" | tr '\n' '\0' | within 150 xargs -0 -r -P 6 -I TEST bash -c 'again "$@"' - "$file" "$folder" TEST
    cat "$file".again.native.log.* > "$file.again.native.log" 2> /dev/null
    cat "$file".again.remoted.log.* > "$file.again.remoted.log" 2> /dev/null
    rm -f "$file".again.*.log.*
    echo "$name: of $(wc -l < "$file.differ") run again, each by itself, pass through Gantry then:"
    passed "$file.again.remoted" | tee "$file.later" | wc -l
    echo "$name: pass natively and not here:"
    local test reason
    comm -23 "$file.differ" "$file.later" | while IFS= read -r test; do
        reason=$(grep -hF "$(printf '\t%s\t' "$test")" "$file.again.remoted" "$file.remoted" | grep ^FAILED | head -1 | cut -f3 | cut -c1-300)
        passed "$file.again.native" | grep -qxF "$test" || reason="(not seen again natively) $reason"
        echo "$test: ${reason:-skipped}"
    done
}
{
    suite bindings 2 0 cuda-python/cuda_bindings/tests test_cuda.py test_nvrtc.py test_nvjitlink.py test_nvvm.py \
        test_utils.py test_kernelParams.py nvml
    suite core 2 0 cuda-python/cuda_core/tests --ignore cython --ignore example_tests
} > "$work/suites.python" 2>&1 &
suite triton 5 "${GANTRY_MOST:-4}" triton/python/test unit/language unit/runtime unit/cuda > "$work/suites.triton" 2>&1 &
suite torch 2 0 torch/test test_cuda.py test_cuda_primary_ctx.py test_cuda_trace.py test_matmul_cuda.py > "$work/suites.torch" 2>&1 &
wait
cat "$work/suites.python" "$work/suites.triton" "$work/suites.torch"
