#!/bin/bash
# Other projects' tests and samples natively and through the worker, on a machine with an NVIDIA GPU of branch 580:
#
#     FOLDER/suites.sh BINARIES OUT SUITES [SECONDS]
#
# BINARIES has gantry-nvidia and libgantry_nvidia_preload.so. SUITES is a folder, or a tar archive of one, with checkouts:
# cupy (tests), jax (tests, conftest.py), samples (NVIDIA's cuda-samples) and library-samples (NVIDIA's CUDALibrarySamples).
# After SECONDS (540) nothing more is begun. Root is needed to hide the device files; the worker is nobody.
#
# Tests are a fixed sample: those whose CRC-32 of the name, modulo 1000, is below SAMPLE_CUPY (30) and SAMPLE_JAX (40).
# What passes natively and not through the worker is run once more, by itself, on both sides.
# Samples are compiled by nvcc and run three times, twice natively; those that differ from themselves natively are compared
# without their numbers.
set -u
here=$(dirname "$(realpath "$0")")
binaries=$(realpath "${1:?usage: $0 BINARIES OUT SUITES [SECONDS]}")
mkdir -p "${2:?usage: $0 BINARIES OUT SUITES [SECONDS]}"
out=$(realpath "$2")
suites=$(realpath "${3:?usage: $0 BINARIES OUT SUITES [SECONDS]}")
export END=$(($(date +%s) + ${4:-540}))
work=$(mktemp -d)
chmod 755 "$work"
cp -r "$here"/*.* "$here"/../../cuda-machine/outcomes.py "$binaries"/gantry-nvidia "$binaries"/libgantry_nvidia_preload.so "$work"
cd "$work" || exit 1
if [ -d "$suites" ]; then cp -r "$suites" suites; else mkdir suites && tar -xf "$suites" -C suites; fi
export work out PATH=$PATH:/usr/local/cuda/bin XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_FLAGS='--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0' JAX_SKIP_SLOW_TESTS=1
export OMP_NUM_THREADS=2 OPENBLAS_NUM_THREADS=2 PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0
. ./worker.sh
start_worker
trap 'kill $worker 2>/dev/null; rm -rf "$work"' EXIT
export -f hidden through
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
left() { local seconds=$((END - $(date +%s))); echo $((seconds > 1 ? seconds : 1)); }
on() { if [ "$1" = worker ]; then shift; through "$@"; else shift; "$@"; fi; }
export -f left on

# SIDE FOLDER OUTCOMES ARGUMENTS...
tests() {
  local side=$1 outcomes=$3
  cd "$work/suites/$2" || return
  shift 3
  PYTHONPATH=$work GANTRY_OUTCOMES=$outcomes CUPY_CACHE_DIR=$work/cupy-$side on "$side" \
    timeout -k 5 "$(left)" python3 -m pytest -q -p outcomes -p no:cacheprovider -p no:benchmark --timeout 100 "$@" </dev/null
}
passed() { comm -23 <(sed -n 's/^PASSED\t\([^\t]*\)\t.*/\1/p' "$1" | sort -u) <(sed -n 's/^FAILED\t\([^\t]*\)\t.*/\1/p' "$1" | sort -u); }
export -f tests passed

# NAME SAMPLE JOBS FOLDER ARGUMENTS...
suite() {
  local name=$1 sample=$2 jobs=$3 folder=$4 side test
  shift 4
  for side in native worker; do
    GANTRY_SAMPLE=$sample tests $side "$folder" "$out/$name.$side" -n "$jobs" "$@" >"$out/$name.$side.log" 2>&1 &
  done
  wait
  touch "$out/$name".{native,worker}
  for side in native worker; do passed "$out/$name.$side" >"$out/$name.$side.passed"; done
  # What one side did not come to says nothing.
  cut -f2 "$out/$name.worker" | sort -u | comm -12 - "$out/$name.native.passed" >"$out/$name.both"
  comm -23 "$out/$name.both" "$out/$name.worker.passed" >"$out/$name.differ"
  echo "$name: $(sort -u "$out/$name.both" | wc -l) ran on both sides and passed natively, $(comm -12 "$out/$name.both" "$out/$name.worker.passed" | wc -l) of them through the worker"
  for side in native worker; do tail -1 "$out/$name.$side.log"; done
  head -20 "$out/$name.differ" | while read -r test; do
    for side in native worker; do tests $side "$folder" "$out/$name.again.$side" "$test" >>"$out/$name.again.log" 2>&1; done
    echo "  $test: again natively $(grep -F "$test" "$out/$name.again.native" | cut -f1), through the worker $(grep -F "$test" "$out/$name.again.worker" | cut -f1,3)"
  done
}

# FOLDER: its sources as one program.
build() {
  local name=${1//\//_} sources
  sources=$(find "$1" -maxdepth 1 \( -name '*.cu' -o -name '*.cpp' \))
  [ -n "$sources" ] && [ "$(left)" -gt 60 ] || return
  grep -q 'int main' $sources || return
  if timeout 100 nvcc -O1 -std=c++17 -arch=native --extended-lambda -rdc=true -w -I suites/samples/Common -I "$(dirname "$1")/utils" -I "$(dirname "$1")/../utils" \
    -o "programs/$name" $sources -lcublas -lcublasLt -lcufft -lcurand -lcusolver -lcusparse -lnvrtc -lnppc -lnppif -lnppisu -lnvjpeg -lcudadevrt -lcuda \
    >"$out/build/$name.log" 2>&1; then
    echo "$name $1"
  fi
}
# NAME FOLDER
run() {
  local turn code
  cd "$2" || return
  [ "$(left)" -gt 5 ] || { echo "left out: $1"; return; }
  for turn in native again worker; do
    on ${turn/again/native} timeout -k 2 60 "$work/programs/$1" >"$out/samples/$1.$turn" 2>&1 </dev/null
    code=$?
    echo "exit code $code" >>"$out/samples/$1.$turn"
    [ $turn != native ] || [ $code = 0 ] || { echo "fails natively ($code): $1"; return; }
  done
  cd "$out/samples" || return
  if cmp -s "$1.native" "$1.worker"; then echo "equal: $1"; return; fi
  if cmp -s "$1.native" "$1.again"; then echo "DIFFERENT: $1: $(diff "$1.native" "$1.worker" | sed 1d | head -2 | tr '\n' ' ' | cut -c1-200)"; return; fi
  for turn in native again worker; do sed -E 's/[-+]?[0-9][0-9.e+-]*//g; s/ +/ /g' "$1.$turn" >"$1.$turn.words"; done
  if cmp -s "$1.native.words" "$1.worker.words"; then echo "equal but for numbers that differ natively: $1"
  elif ! cmp -s "$1.native.words" "$1.again.words"; then echo "differs from itself: $1"
  else echo "DIFFERENT: $1: $(diff "$1.native.words" "$1.worker.words" | sed 1d | head -2 | tr '\n' ' ' | cut -c1-200)"; fi
}
export -f build run
samples() {
  mkdir -p programs "$out/build" "$out/samples"
  find "$@" -mindepth 1 -type d | sort | xargs -P 8 -I FOLDER bash -c 'build FOLDER' >"$out/built.txt"
  xargs -P 5 -L 1 bash -c 'run "$0" "$1"' <"$out/built.txt" >"$out/samples.txt"
  echo "samples: $(wc -l <"$out/built.txt") were built"
  cut -d: -f1 "$out/samples.txt" | sed 's/ (.*//' | sort | uniq -c
  grep DIFFERENT "$out/samples.txt"
}

suite cupy "${SAMPLE_CUPY:-30}" 2 cupy/tests/cupy_tests linalg_tests fft_tests core_tests random_tests sorting_tests >"$work/cupy.txt" 2>&1 &
suite jax "${SAMPLE_JAX:-40}" 3 jax tests/lax_test.py tests/linalg_test.py >"$work/jax.txt" 2>&1 &
samples suites/samples/Samples suites/library-samples >"$work/samples.txt" 2>&1 &
wait $(jobs -p | grep -vx "$worker")
cat "$work/cupy.txt" "$work/jax.txt" "$work/samples.txt"
echo 'lines of the worker:'
sort "$out/worker.err" | uniq -c | sort -rn | head -40
