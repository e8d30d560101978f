#!/bin/bash
# CUDA programs in Linux guests through native contexts, on a machine with an NVIDIA GPU of branch 580, nvcc and KVM;
# the same programs natively beside it, outputs compared byte by byte:
#
#     FOLDER/run.sh BINARIES OUT [SECONDS [NAME...]]
#
# BINARIES has gantry, gantry-nvidia, gantry-agent, gantry-cuda, libgantry_nvidia_preload.so, a statically linked busybox,
# and a guest's kernel with virtio, ext4, Unix sockets and uio_pci_generic built in: vmlinux or vmlinux.xz (README.md).
# OUT is a folder for outputs. After SECONDS (default: 540) VMs that still run are killed. NAME: a program of list.txt;
# without, all. VMS (3) guests of MEMORY (1G) share the programs, the GPU and gantry-nvidia; a program that runs longer than
# LIMIT (90) seconds is killed. WINDOW (4G), PAGES (64M): of the accelerator. CMDLINE: added to the
# guest's command line. Root is needed to hand the worker to nobody.
#
# OUT/programs.md is a table of all, OUT/N.console what guest N prints.
set -u
here=$(dirname "$(realpath "$0")")
binaries=$(realpath "${1:?usage: $0 BINARIES OUT [SECONDS [NAME...]]}")
mkdir -p "${2:?usage: $0 BINARIES OUT [SECONDS [NAME...]]}"
out=$(realpath "$2")
end=$((SECONDS + ${3:-540}))
shift $(($# < 3 ? $# : 3))
only=$(IFS=,; echo "$*")
vms=${VMS:-3}
work=$(mktemp -d)
chmod 755 "$work"
running=()
trap 'kill -9 "${running[@]}" 2>/dev/null; rm -rf "$work"' EXIT
export PATH=$PATH:/usr/local/cuda/bin:/usr/local/nvidia/bin CUDA_CACHE_DISABLE=1
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader

"$here/make-root.sh" "$binaries" "$work/root" 2>"$out/root.err" || { tail -5 "$out/root.err"; exit 1; }
cp "$binaries"/{gantry,gantry-nvidia} "$work"
"$work/gantry-nvidia" driver-image "$work/driver.img" >"$out/driver.txt" || exit 1
if [ -e "$binaries/vmlinux" ]; then cp "$binaries/vmlinux" "$work"; else xz -dc "$binaries/vmlinux.xz" >"$work/vmlinux"; fi
echo "root disk made after $SECONDS s"

# From noxsave on, all is for a KVM that emulates ring 0 (README.md). There, pages are cleared slowly: no huge pages, and
# the C library gives back no memory that it takes again.
cmdline="console=ttyS0 quiet loglevel=5 root=/dev/vda ro init=/init panic=-1 random.trust_cpu=on mitigations=off noxsave \
tsc=reliable no_timer_check transparent_hugepage=never initcall_blacklist=blake2s_mod_init \
clearcpuid=cx16,smap,smep,popcnt,fsgsbase,invpcid,pcid,umip,rdtscp,xsave,erms,fsrm \
GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM:\
glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=4294967295:glibc.malloc.arena_max=1 \
PARTS=$vms LIMIT=${LIMIT:-90} ONLY=$only ${CMDLINE:-}"

mkdir -m 755 "$work/socket"
chown nobody "$work/socket"
setpriv --reuid nobody --regid nogroup --clear-groups "$work/gantry-nvidia" --vm "$work/socket/vm.sock" ${WORKER:-} \
  >"$out/worker.err" 2>&1 &
running+=($!)
for _ in $(seq 100); do [ -S "$work/socket/vm.sock" ] && break; sleep .1; done

# Starts guest PART.
start() {
  mke2fs -q -t ext4 -O ^has_journal,^metadata_csum "$work/$1.img" 64M
  "$work/gantry" --kernel "$work/vmlinux" --cmdline "$cmdline PART=$1" --cpus boot=1 --memory "size=${MEMORY:-1G}" \
    --disk "path=$work/root.img,readonly=on" "path=$work/$1.img" "path=$work/driver.img,readonly=on" \
    --serial "file=$out/$1.console" --console off \
    --accel "api=nvidia,socket=$work/socket/vm.sock,window=${WINDOW:-4G},pages=${PAGES:-64M}" \
    >"$out/$1.gantry" 2>&1 </dev/null &
  guest[$1]=$!
  running+=($!)
}
declare -a guest
for part in $(seq 0 $((vms - 1))); do start "$part"; done

# Natively meanwhile.
mkdir -p "$out/native" "$out/guest"
native() {
  local name command code begin=$EPOCHREALTIME
  IFS='|' read -r name command <<<"${1// | /|}"
  cd "$work/root/programs" || exit
  timeout 60 $command >"$out/native/$name" 2>"$out/native/$name.err" </dev/null
  code=$?
  echo "$code $(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begin }")" >"$out/native/$name.code"
}
export -f native
export work out
list() {
  local line
  grep -v '^#' "$here/list.txt" | while IFS= read -r line; do
    [ -n "$only" ] && [[ ",$only," != *",${line%% |*},"* ]] || printf '%s\0' "$line"
  done
}
list | xargs -0 -P 4 -I LINE bash -c 'native "$0"' LINE
echo "natively run after $SECONDS s"

# The guests end by themselves, or are killed. A gantry that has ended leaves no VM.
for part in $(seq 0 $((vms - 1))); do
  while kill -0 "${guest[$part]}" 2>/dev/null && [ $SECONDS -lt $end ]; do sleep .5; done
  if kill -9 "${guest[$part]}" 2>/dev/null; then echo "guest $part: killed"; else
    wait "${guest[$part]}"
    echo "guest $part: exit code $? after $SECONDS s"
  fi
  mkdir -p "$work/results.$part"
  debugfs -R "rdump / $work/results.$part" "$work/$part.img" >/dev/null 2>&1
  find "$work/results.$part" -maxdepth 1 -type f -exec cp {} "$out/guest" \;
  [ ! -e "$out/guest/agent.log" ] || mv "$out/guest/agent.log" "$out/$part.agent"
done

{
  echo '| program | result | native | guest |'
  echo '|---|---|---|---|'
  list | while IFS='|' read -r -d '' name _; do
    name=${name% }
    read -r code took <"$out/native/$name.code"
    line=$(grep -ahE "GUEST program $name [0-9]" "$out"/*.console | tail -1 | tr -d '\r')
    guest_code=$(cat "$out/guest/$name.code" 2>/dev/null)
    if [ "$code" != 0 ]; then result="fails natively ($code)"
    elif [ -z "$guest_code" ]; then result='not run'
    elif [ "$guest_code" != 0 ]; then result="exit code $guest_code"
    elif cmp -s "$out/native/$name" "$out/guest/$name"; then result=equal
    else result=differs; fi
    echo "| $name | $result | $took s | $(awk '{ if (NF >= 6) printf "%.1f s", $6 - $5; else print "-" }' <<<"${line:--}") |"
  done
} >"$out/programs.md"
for part in $(seq 0 $((vms - 1))); do
  echo "== guest $part"
  tr -d '\r' <"$out/$part.console" | tail -n 40 | cut -c1-200
  tail -n 5 "$out/$part.gantry" | cut -c1-300
done
echo '== worker'
sort "$out/worker.err" | uniq -c | sort -rn | head -20 | cut -c1-300
cat "$out/programs.md"
grep -c '| equal |' "$out/programs.md" | sed 's/$/ equal/'
nvidia-smi --query-gpu=memory.used --format=csv,noheader
