#!/bin/bash
# The programs of programs/list.txt natively and through the worker, on a machine with an NVIDIA GPU of branch 580 and
# the packages that they use; outputs are compared byte by byte:
#
#     FOLDER/programs.sh BINARIES OUT [SECONDS [NAME...]]
#
# BINARIES has gantry-nvidia and libgantry_nvidia_preload.so, and wheels of what the machine lacks (filecheck and
# expecttest, which tests of Numba and PyTorch import); OUT is a folder for outputs. After SECONDS (default: 550) nothing
# more is begun. NAME: a program, or a kind; without, all. JOBS (8) programs run at a time, each within LIMIT (100)
# seconds a side. Root is needed to hide the device files from the programs; the worker is nobody. Some programs need
# two GPUs, and fail natively with one.
#
#   equal                 exit codes and outputs are the same
#   differs               they are not. The program runs once more through a worker of its own, whose messages are shown
#   fails natively        so that nothing is compared
#   differs from itself   two native runs have different outputs
#   left out              no time was left
#
# OUT/programs.md is a table of all.
set -u
here=$(dirname "$(realpath "$0")")
binaries=$(realpath "${1:?usage: $0 BINARIES OUT [SECONDS [NAME...]]}")
mkdir -p "${2:?usage: $0 BINARIES OUT [SECONDS [NAME...]]}"
out=$(realpath "$2")
export END=$(($(date +%s) + ${3:-550}))
shift $(($# < 3 ? $# : 3))
work=$(mktemp -d)
chmod 755 "$work"
cp -r "$here"/*.* "$here"/programs/* "$binaries"/gantry-nvidia "$binaries"/libgantry_nvidia_preload.so "$work"
cd "$work" || exit 1
export work out LIMIT=${LIMIT:-100}
export PATH=$PATH:/usr/local/cuda/bin XLA_PYTHON_CLIENT_PREALLOCATE=false CUBLAS_WORKSPACE_CONFIG=:4096:8
export XLA_FLAGS='--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0'
export OMP_NUM_THREADS=2 OPENBLAS_NUM_THREADS=2 PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TF_CPP_MIN_LOG_LEVEL=3 TORCHINDUCTOR_COMPILE_THREADS=2 TMPDIR=$work/tmp COLUMNS=100
# Numba still looks for what NumPy has no more.
export PYTHONPATH=$here/../../cuda-machine/python
for wheel in "$binaries"/*.whl; do [ ! -e "$wheel" ] || PYTHONPATH=$PYTHONPATH:$wheel; done
mkdir -p "$work/tmp" "$out/native" "$out/worker" "$out/again" "$out/alone" "$out/lines"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader

# The programs in C and C++ are built meanwhile.
build() {
  local flags='-O2 -std=c++17 -arch=native' libraries='-lcublas -lcufft -lcusolver -lcurand -lcusparse' name folder
  for name in products fourier solver generators rows textures graphs managed shared memory runtime; do
    nvcc $flags -o $name $name.cu $libraries &
  done
  nvcc $flags -cudart shared -o runtime-shared runtime.cu &
  nvcc $flags -rdc=true -o cooperative cooperative.cu -lcudadevrt &
  gcc -O1 -w -o driver driver.c -ldl &
  for folder in /opt/nvidia/nsight-compute/*/extras/samples/*/; do
    name=$(basename "$folder")
    [ -e "$folder/$name.cu" ] && nvcc $flags -o "sample-$name" "$folder/$name.cu" &
  done
  wait
  : >built
}
build >"$out/build.txt" 2>&1 &

. ./worker.sh
start_worker
trap 'kill $worker 2>/dev/null; rm -rf "$work"' EXIT
grep -E 'Uid|CapEff|Seccomp:' /proc/$worker/status | tr '\n' ' '; echo

# SIDE NAME COMMAND: keeps what the program prints; its exit code and its seconds are in CODE and TOOK.
side() {
  local begin=$EPOCHREALTIME
  $4 timeout -k 5 "$LIMIT" bash -c "$3" >"$out/$1/$2" 2>"$out/$1/$2.err" </dev/null
  CODE=$?
  TOOK=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begin }")
}
# The line of a program.
one() {
  local name kind author command native native_took verdict
  IFS='|' read -r name kind author command <<<"${1// | /|}"
  if [ "$(date +%s)" -ge "$END" ]; then
    verdict='left out'
  else
    while [ "${command:0:2}" = ./ ] && [ ! -e built ]; do sleep .5; done
    side native "$name" "$command" ''
    native=$CODE native_took=$TOOK
    if [ $native != 0 ]; then
      verdict='fails natively'
      CODE=- TOOK=-
    else
      side worker "$name" "$command" through
      if [ $CODE = 0 ] && cmp -s "$out/native/$name" "$out/worker/$name"; then
        verdict=equal
      else
        local code=$CODE took=$TOOK
        side again "$name" "$command" ''
        if [ $CODE = 0 ] && ! cmp -s "$out/native/$name" "$out/again/$name"; then
          verdict='differs from itself'
        else
          verdict=differs
          alone "$name" "$command"
        fi
        CODE=$code TOOK=$took
      fi
    fi
  fi
  echo "$name|$kind|$author|$verdict|${native:--}|${CODE:--}|${native_took:--}|${TOOK:--}" >"$out/lines/$name"
  echo "$verdict: $name (exit codes ${native:--}, ${CODE:--}; ${native_took:--} s, ${TOOK:--} s)"
  if [ "$verdict" = differs ]; then
    diff "$out/native/$name" "$out/worker/$name" | head -4 | cut -c1-160 | sed 's/^/    /'
    grep -v '^ *$' "$out/worker/$name.err" | tail -2 | cut -c1-200 | sed 's/^/    /'
    sort "$out/alone/$name.worker" | uniq -c | sort -rn | head -5 | cut -c1-160 | sed 's/^/    worker: /'
  elif [ "$verdict" = 'fails natively' ]; then
    grep -v '^ *$' "$out/native/$name.err" | tail -1 | cut -c1-200 | sed 's/^/    /'
  fi
}
# Through a worker of its own: which of its messages are due to this program.
alone() {
  local folder=$work/alone.$1 own
  mkdir -m 755 "$folder"
  chown nobody "$folder"
  setpriv --reuid nobody --regid nogroup --clear-groups "$work/gantry-nvidia" --socket "$folder/nvidia.sock" \
    2>"$out/alone/$1.worker" &
  own=$!
  for _ in $(seq 50); do [ -S "$folder/nvidia.sock" ] && break; sleep .1; done
  local shared=$GANTRY_NVIDIA_SOCKET
  export GANTRY_NVIDIA_SOCKET=$folder/nvidia.sock
  side alone "$1" "$2" through
  export GANTRY_NVIDIA_SOCKET=$shared
  kill "$own"
}
export -f side one alone hidden through

list() { # those that run beside others, or alone
  local line name kind
  grep -v '^#' list.txt | while IFS= read -r line; do
    IFS='|' read -r name kind _ <<<"${line// | /|}"
    case "$kind" in *', alone') [ "$1" = alone ] ;; *) [ "$1" = beside ] ;; esac || continue
    [ -z "${names:-}" ] || [[ "$names" = *"|$name|"* ]] || [[ "$names" = *"|${kind%, alone}|"* ]] || continue
    printf '%s\0' "$line"
  done
}
names=$(printf '%s|' "$@")
[ "$names" = '|' ] && names= || names="|$names"
list beside | xargs -0 -P "${JOBS:-8}" -I LINE bash -c 'printf "%s\n" "$(one "$0")"' LINE
list alone | xargs -0 -I LINE bash -c 'printf "%s\n" "$(one "$0")"' LINE

{
  echo '| program | kind | written by | result | native | through the worker |'
  echo '|---|---|---|---|---|---|'
  cat "$out"/lines/* | awk -F'|' '{ sub(/, alone/, "", $2); print "| " $1 " | " $2 " | " $3 " | " $4 " | " $7 " s | " $8 " s |" }'
} >"$out/programs.md"
cat "$out"/lines/* | awk -F'|' '{ sub(/, alone/, "", $2); all[$2]++; count[$4]++; if ($4 == "equal") equal[$2]++; if ($4 != "fails natively" && $4 != "differs from itself" && $4 != "left out") ran[$2]++ }
  END { for (kind in all) printf "%s: %d of %d that run natively (%d listed)\n", kind, equal[kind], ran[kind], all[kind]; for (what in count) printf "total %s: %d\n", what, count[what] }' | sort
echo 'lines of the worker:'
sort "$out/worker.err" | uniq -c | sort -rn | head -60
kill -0 $worker && echo "the worker still runs, descriptors: $(ls /proc/$worker/fd | wc -l)"
sleep 1
nvidia-smi --query-gpu=memory.used --format=csv,noheader
