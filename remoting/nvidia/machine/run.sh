#!/bin/bash
# The same programs natively and through the worker, beside each other, on a machine with an NVIDIA GPU of branch 580,
# nvcc, and perhaps PyTorch and JAX:
#
#     FOLDER/run.sh BINARIES OUT [PART...]
#
# BINARIES has gantry-nvidia and libgantry_nvidia_preload.so; OUT is a folder for outputs. Root is needed to hide the
# device files from the programs; the worker is nobody. Parts:
#
#   drv       driver API: copies, PTX, events, registered memory, memory exported to a second process, pools
#   rt        runtime API, statically linked: graph, pinned memory
#   smi       nvidia-smi: devices and a query
#   torch     PyTorch: ResNet-18 with cuDNN, FFT, linear algebra, attention, pinned memory, a graph
#   jax       JAX without autotuning, which chooses kernels by their times
#   two       drv, while another one runs
#   kill      kill -9 of a program: GPU memory and descriptors of the worker
#   files     device files of a program that uses the GPU
#   context   times of a context, seven times by turns
#   managed   managed memory by the driver API
#   quota     a program that takes all it gets of 8 GiB
#   suspend   the driver's checkpoint of a program; the worker is killed, another one started, and the program goes on
#   alone     a program without a worker is suspended and resumed by gantry-checkpoint
#   suspensions  the same amid training, $SUSPENSIONS times (20), each time with another worker
#   moves     the same, $MOVES times (10), with workers of two GPUs by turns
#   gpus      two GPUs: peer copies, NCCL, a model trained by both
#   figures   what calls, copies and PyTorch's steps take, $TURNS times (7) by turns: a table of medians
#   checkpoint  how long programs with 1, 8 and 32 GiB of device memory are suspended and resumed, by gantry-checkpoint natively
#             and in a native context, and by $CUDA_CHECKPOINT, NVIDIA's program, if that is given
#   some      the last of several GPUs alone, by gantry-nvidia --gpu
set -u
here=$(dirname "$(realpath "$0")")
binaries=$(realpath "${1:?usage: $0 BINARIES OUT [PART...]}")
mkdir -p "${2:?usage: $0 BINARIES OUT [PART...]}"
out=$(realpath "$2")
shift 2
parts=${*:-drv rt smi torch jax two kill files context}
work=$(mktemp -d)
chmod 755 "$work"
cp -r "$here"/*.* "$here/guest" "$binaries"/{gantry-nvidia,gantry-checkpoint,libgantry_nvidia_preload.so} "$work"
cd "$work" || exit 1
export PATH=$PATH:/usr/local/cuda/bin XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_FLAGS='--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0'
gcc -O1 -w -o drv driver.c -ldl || exit 1
nvcc -O2 -arch=native -cudart static -o rt runtime.cu || exit 1
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader

. ./worker.sh
start_worker
trap 'kill $worker 2>/dev/null; rm -rf "$work"' EXIT
grep -E 'Uid|CapEff|Seccomp:' /proc/$worker/status | tr '\n' ' '; echo

# NAME COMMAND...: natively, then through the worker; outputs compared byte by byte.
both() {
  local name=$1 native worker_code
  shift
  timeout 150 "$@" >"$out/$name.native" 2>"$out/$name.native.err"
  native=$?
  through timeout 150 "$@" >"$out/$name.worker" 2>"$out/$name.worker.err"
  worker_code=$?
  if [ $native = $worker_code ] && cmp -s "$out/$name.native" "$out/$name.worker"; then
    echo "equal: $name (exit code $native)"
  else
    echo "DIFFERENT: $name (exit codes $native, $worker_code)"
    diff "$out/$name.native" "$out/$name.worker" | head -12
    tail -4 "$out/$name.worker.err"
  fi
  for side in native worker; do sed -n "s/^TIME/  $side:/p" "$out/$name.$side.err"; done
}

# Seconds of processors that the worker and its children took.
processor_time() { cat /proc/$worker/stat /proc/$worker/task/*/children 2>/dev/null | awk -v tick="$(getconf CLK_TCK)" 'NR == 1 { print ($14 + $15 + $16 + $17) / tick }'; }

# NAME COUNT [GPU...]: a program is suspended amid training, each time its worker is killed, and another one is started, for
# the next of these GPUs.
amid_training() {
  local name=$1 count=$2 step
  local gpus=("${@:3}")
  # Options of the worker of this round.
  options() { [ ${#gpus[@]} = 0 ] || echo --gpu "${gpus[$1 % ${#gpus[@]}]}"; }
  rm -f "$out/stop" "$out/training"
  start_worker $(options 0)
  through timeout 500 python3 suspensions.py "$out/training" "$out/stop" >"$out/$name.worker" 2>"$out/$name.worker.err" &
  program=$!
  for _ in $(seq 600); do [ -e "$out/training" ] || ! kill -0 $program 2>/dev/null && break; sleep .1; done
  process=$(cat "$out/training")
  for round in $(seq "$count"); do
    through ./gantry-checkpoint suspend "$process"
    steps=$(wc -l <"$out/$name.worker")
    echo "round $round after $steps steps: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader | paste -sd " "), device files of the worker $(find /proc/$worker/fd -lname '/dev/nvidia*' | wc -l)"
    start_worker $(options $round)
    through ./gantry-checkpoint resume --all
    # Some steps before the next one.
    for _ in $(seq 100); do [ "$(wc -l <"$out/$name.worker")" -gt $((steps + round % 7)) ] && break; sleep .1; done
    kill -0 $program 2>/dev/null || break
  done >"$out/$name.txt" 2>&1
  : >"$out/stop"
  wait $program
  echo "$name: exit code $?, $(grep -c ' suspended in ' "$out/$name.txt") suspended, $(grep -c ' resumed in ' "$out/$name.txt") resumed"
  for step in suspended resumed; do
    sed -n "s/.* $step in \([0-9.]*\) s.*/\1/p" "$out/$name.txt" | sort -n | awk -v step=$step '{ t[NR] = $1 } END { if (NR) print "  " step ": " t[1] ", median " t[int((NR + 1) / 2)] ", most " t[NR] " s" }'
  done
  sed -n 's/^round [0-9]* after [0-9]* steps/  suspended/p' "$out/$name.txt" | sort | uniq -c
  timeout 300 python3 suspensions.py "$(grep -c ^step "$out/$name.worker")" >"$out/$name.native" 2>"$out/$name.native.err"
  if cmp "$out/$name.native" "$out/$name.worker"; then
    echo "equal: $name, $(grep -c ^step "$out/$name.worker") steps"
  else
    echo "DIFFERENT: $name"
    grep -v '^ *$' "$out/$name.worker.err" | tail -5
  fi
}

echo "hidden, without the library: $(hidden ./drv 2>/dev/null | head -1)"
for part in $parts; do
  case $part in
    drv) both drv ./drv ;;
    rt) both rt ./rt ;;
    smi)
      both smi-list nvidia-smi -L
      both smi-query nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv
      ;;
    torch) both torch python3 training.py ;;
    jax) both jax python3 transforms.py ;;
    two) through ./drv >"$out/other" 2>&1 & both two ./drv; wait $! ;;
    kill)
      before=$(ls /proc/$worker/fd | wc -l)
      through timeout -s KILL 1 ./drv >/dev/null 2>&1
      sleep 2
      echo "after kill -9: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader), descriptors of the worker $before then $(ls /proc/$worker/fd | wc -l)"
      ;;
    files) through python3 files.py 2>/dev/null ;;
    context)
      for _ in 1 2 3 4 5 6 7; do
        for side in '' through; do
          $side ./drv 2>&1 >/dev/null | grep -oE '(cuInit|cuCtxCreate|launch|H2D|total) [0-9.]+' | tr '\n' ' '
          echo "${side:-native}"
        done
      done
      ;;
    quota)
      start_worker --memory 8192
      through timeout 100 python3 quota.py 2>"$out/quota.err" &
      program=$!
      for _ in $(seq 200); do
        used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits)
        [ "${most:-0}" -ge "$used" ] || most=$used
        kill -0 $program 2>/dev/null || break
        sleep .1
      done
      wait $program
      echo "quota: exit code $?, at most $most MiB in use by nvidia-smi"
      start_worker
      ;;
    suspend)
      rm -f "$out/go" "$out/ready"
      timeout 120 python3 suspended.py "$out/ready.native" "$out/go" >"$out/suspend.native" 2>"$out/suspend.native.err" &
      native=$!
      through timeout 200 python3 suspended.py "$out/ready" "$out/go" >"$out/suspend.worker" 2>"$out/suspend.worker.err" &
      program=$!
      for _ in $(seq 600); do [ -e "$out/ready" ] || ! kill -0 $program 2>/dev/null && break; sleep .1; done
      process=$(cat "$out/ready")
      echo "suspend: running: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader), descriptors of the worker $(ls /proc/$worker/fd | wc -l)"
      through ./gantry-checkpoint suspend "$process" 2>&1 | tee "$out/suspend.txt"
      echo "suspend: suspended: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader), descriptors of the worker $(ls /proc/$worker/fd | wc -l)"
      start_worker
      through ./gantry-checkpoint resume --all 2>&1 | tee -a "$out/suspend.txt"
      : >"$out/go"
      wait $program
      echo "suspend: exit code $?"
      wait $native
      if cmp "$out/suspend.native" "$out/suspend.worker"; then echo 'equal: suspend'; else
        echo 'DIFFERENT: suspend'
        diff "$out/suspend.native" "$out/suspend.worker"
        grep -v '^ *$' "$out/suspend.worker.err" | tail -5
      fi
      ;;
    alone)
      rm -f "$out/go" "$out/ready"
      timeout 200 python3 suspended.py "$out/ready" "$out/go" >"$out/alone.suspended" 2>"$out/alone.err" &
      program=$!
      for _ in $(seq 600); do [ -e "$out/ready" ] || ! kill -0 $program 2>/dev/null && break; sleep .1; done
      ./gantry-checkpoint list
      ./gantry-checkpoint suspend --released --all
      ./gantry-checkpoint list
      echo "alone: suspended: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader), $(find /proc/$(cat "$out/ready")/fd -lname '/dev/nvidia*' | wc -l) device files"
      ./gantry-checkpoint resume --all
      : >"$out/go"
      wait $program
      echo "alone: exit code $?"
      : >"$out/ready"
      python3 suspended.py "$out/ready.native" "$out/go" >"$out/alone.native"
      if cmp "$out/alone.native" "$out/alone.suspended"; then echo 'equal: alone'; else
        echo 'DIFFERENT: alone'
        diff "$out/alone.native" "$out/alone.suspended"
      fi
      ;;
    suspensions) amid_training suspensions "${SUSPENSIONS:-20}" ;;
    moves) amid_training moves "${MOVES:-10}" 0 1 ;;
    managed)
      gcc -O1 -w -o managed managed.c -ldl
      both managed ./managed
      ;;
    figures)
      gcc -O1 -w -o figures guest/programs/figures.c -ldl
      mkdir -p "$out/figures"
      for turn in $(seq "${TURNS:-7}"); do
        for side in native worker; do
          for program in './figures 1024' 'python3 speed.py'; do
            before=$(processor_time)
            $([ $side = native ] || echo through) timeout 150 $program 2>>"$out/figures.err" || echo "figures: $program failed" >&2
            [ "$program" = './figures 1024' ] || echo "figure processor-time-of-worker $(echo "$(processor_time) $before" | awk '{ print $1 - $2, 0 }') s"
          done | sed -n 's/^figure \([^ ]*\) \([^ ]*\) \([^ ]*\) \(.*\)/\1 \2 \4\n\1-P99 \3 \4/p' >"$out/figures/$side.$turn"
        done
      done
      awk -v names='native worker' -f "$here/../../medians.awk" "$out"/figures/* | tee "$out/figures.md"
      ;;
    checkpoint)
      for gib in ${GIB:-1 1 1 8 8 8 32}; do
        for way in native worker theirs; do
          [ $way != theirs ] || [ -n "${CUDA_CHECKPOINT:-}" ] || continue
          rm -f "$out/go" "$out/ready"
          side=$([ $way != worker ] || echo through)
          $side timeout 200 python3 held.py "$out/ready" "$out/go" "$gib" >"$out/held" 2>>"$out/held.err" &
          program=$!
          for _ in $(seq 600); do [ -e "$out/ready" ] || ! kill -0 $program 2>/dev/null && break; sleep .1; done
          process=$(cat "$out/ready")
          begin=$(date +%s.%N)
          if [ $way = theirs ]; then "$CUDA_CHECKPOINT" --toggle --pid "$process"; else $side ./gantry-checkpoint suspend "$process" >>"$out/checkpoint.txt" 2>&1; fi
          middle=$(date +%s.%N)
          used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader)
          later=$(date +%s.%N)
          if [ $way = theirs ]; then "$CUDA_CHECKPOINT" --toggle --pid "$process"; else $side ./gantry-checkpoint resume "$process" >>"$out/checkpoint.txt" 2>&1; fi
          end=$(date +%s.%N)
          : >"$out/go"
          wait $program
          echo "$way $gib GiB: suspended in $(echo "$middle $begin" | awk '{ printf "%.2f", $1 - $2 }') s, $used, resumed in $(echo "$end $later" | awk '{ printf "%.2f", $1 - $2 }') s, exit code $?, $(cat "$out/held")"
        done
      done
      ;;
    gpus) both gpus python3 two_gpus.py ;;
    some)
      uuid=$(nvidia-smi --query-gpu=uuid --format=csv,noheader | tail -1)
      start_worker --gpu "$uuid"
      echo "some: $uuid of $(nvidia-smi -L | wc -l) GPUs"
      ask='import torch; print(torch.cuda.device_count(), "GPU-%s" % torch.cuda.get_device_properties(0).uuid, torch.arange(9, device="cuda").sum().item())'
      CUDA_VISIBLE_DEVICES=$uuid timeout 100 python3 -c "$ask" >"$out/some.native" 2>"$out/some.native.err"
      through timeout 100 python3 -c "$ask" >"$out/some.worker" 2>"$out/some.worker.err"
      cat "$out/some.worker"
      through nvidia-smi --query-gpu=uuid --format=csv,noheader | tee "$out/some.smi"
      if cmp "$out/some.native" "$out/some.worker" && [ "$(cat "$out/some.smi")" = "$uuid" ]; then echo 'equal: some'; else echo 'DIFFERENT: some'; fi
      if CUDA_VISIBLE_DEVICES=1 through ./drv >"$out/some.other" 2>&1; then echo 'some: ANOTHER GPU IS SERVED'; else tail -1 "$out/some.other"; fi
      start_worker
      ;;
    *) echo "no part: $part" ;;
  esac
done
echo 'lines of the worker:'
cat "$out/worker.err"
