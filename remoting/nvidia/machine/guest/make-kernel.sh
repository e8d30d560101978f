#!/bin/bash
# A guest's kernel for run.py, from a tarball of Linux 6.1 such as Debian's linux-source-6.1 has:
#
#     FOLDER/make-kernel.sh TARBALL OUT
#
# OUT gets vmlinux.xz, System.map.xz, and kernel.txt, which has what /proc/version says in a guest that runs it: the
# recipe's checksum is in it. kernel.config has what differs from the kernel's defaults; kernel.patch is for a KVM that
# runs ring 3 only by the processor, and emulates ring 0: README.md. Needs flex, bison, bc, libelf-dev and xz.
set -eu
here=$(dirname "$(realpath "$0")")
tarball=$(realpath "${1:?usage: $0 TARBALL OUT}")
mkdir -p "${2:?usage: $0 TARBALL OUT}"
out=$(realpath "$2")
recipe=$(cat "$here/kernel.config" "$here/kernel.patch" | sha256sum | cut -c1-16)
export KBUILD_BUILD_USER=gantry KBUILD_BUILD_HOST=recipe KBUILD_BUILD_VERSION=1 KBUILD_BUILD_TIMESTAMP=$recipe
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
tar -xf "$tarball" -C "$source" --strip-components=1
cd "$source"
patch -p1 <"$here/kernel.patch"
cp "$here/kernel.config" .config
make olddefconfig >/dev/null
make -j"$(nproc)" vmlinux
strip -o "$out/vmlinux" vmlinux
strings -n 20 vmlinux | grep -m 1 '^Linux version .*#1 ' >"$out/kernel.txt"
cp System.map "$out"
xz -T0 -f "$out/vmlinux" "$out/System.map"
