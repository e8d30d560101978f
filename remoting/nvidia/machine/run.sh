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
#   suspend   the driver's checkpoint of a program; the worker is killed, another one started, and the program goes on
#   gpus      two GPUs: peer copies, NCCL, a model trained by both
set -u
here=$(dirname "$(realpath "$0")")
binaries=$(realpath "${1:?usage: $0 BINARIES OUT [PART...]}")
mkdir -p "${2:?usage: $0 BINARIES OUT [PART...]}"
out=$(realpath "$2")
shift 2
parts=${*:-drv rt smi torch jax two kill files context}
work=$(mktemp -d)
chmod 755 "$work"
cp "$here"/*.* "$binaries"/gantry-nvidia "$binaries"/libgantry_nvidia_preload.so "$work"
cd "$work" || exit 1
export PATH=$PATH:/usr/local/cuda/bin XLA_PYTHON_CLIENT_PREALLOCATE=false
export XLA_FLAGS='--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0'
gcc -O1 -w -o drv driver.c -ldl || exit 1
nvcc -O2 -arch=native -cudart static -o rt runtime.cu || exit 1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader

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
    suspend)
      rm -f "$out/go" "$out/ready"
      timeout 120 python3 suspended.py "$out/ready.native" "$out/go" >"$out/suspend.native" 2>"$out/suspend.native.err" &
      native=$!
      through timeout 200 python3 suspended.py "$out/ready" "$out/go" >"$out/suspend.worker" 2>"$out/suspend.worker.err" &
      program=$!
      for _ in $(seq 600); do [ -e "$out/ready" ] || ! kill -0 $program 2>/dev/null && break; sleep .1; done
      process=$(cat "$out/ready")
      echo "suspend: running: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader), descriptors of the worker $(ls /proc/$worker/fd | wc -l)"
      through timeout 60 python3 suspend.py "$process" Lock Checkpoint 2>&1 | tee "$out/suspend.txt"
      echo "suspend: suspended: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader), descriptors of the worker $(ls /proc/$worker/fd | wc -l)"
      start_worker
      through timeout 60 python3 suspend.py "$process" Restore Unlock 2>&1 | tee -a "$out/suspend.txt"
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
    managed)
      gcc -O1 -w -o managed managed.c -ldl
      both managed ./managed
      ;;
    gpus) both gpus python3 two_gpus.py ;;
    *) echo "no part: $part" ;;
  esac
done
echo 'lines of the worker:'
cat "$out/worker.err"
