# What run.sh, programs.sh and two.sh share: a worker, and programs with the device files hidden. Needs $work, a folder of
# which everybody may read, with the worker's program and library, and $out.

mkdir -m 755 "$work/socket"
chown nobody "$work/socket"
export GANTRY_NVIDIA_SOCKET=$work/socket/nvidia.sock
worker=

# Starts the worker as nobody, with these options; $worker is its process. Another one is stopped first.
start_worker() {
  [ -z "$worker" ] || { kill -9 "$worker"; wait "$worker" 2>/dev/null; }
  setpriv --reuid nobody --regid nogroup --clear-groups "$work/gantry-nvidia" --socket "$GANTRY_NVIDIA_SOCKET" "$@" \
    2>>"$out/worker.err" &
  worker=$!
  for _ in $(seq 100); do
    # A socket that nobody listens on any longer is still a file.
    [ -S "$GANTRY_NVIDIA_SOCKET" ] && grep -q "$GANTRY_NVIDIA_SOCKET" /proc/net/unix && return
    sleep .1
  done
  echo 'the worker does not listen'
}

# Runs a program with an empty file over each device file.
hidden() {
  unshare -m bash -c '
    mount --make-rprivate /
    : >"$1/empty"
    for file in /dev/nvidia*; do
      if [ -d "$file" ]; then mount -t tmpfs none "$file"; else mount --bind "$1/empty" "$file"; fi
    done
    shift
    exec "$@"' hidden "$work" "$@"
}
through() { hidden env LD_PRELOAD="$work/libgantry_nvidia_preload.so" "$@"; }
