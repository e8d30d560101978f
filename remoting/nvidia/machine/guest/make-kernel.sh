#!/bin/bash
# A guest's kernel for run.sh, from a tarball of Linux 6.1 such as Debian's linux-source-6.1 has:
#
#     FOLDER/make-kernel.sh TARBALL OUT
#
# OUT/vmlinux.xz is what run.sh takes. kernel.config has what differs from the kernel's defaults; kernel.patch is for a KVM
# that runs ring 3 only by the processor, and emulates ring 0: README.md. Needs flex, bison, bc, libelf-dev and xz.
set -eu
here=$(dirname "$(realpath "$0")")
tarball=$(realpath "${1:?usage: $0 TARBALL OUT}")
mkdir -p "${2:?usage: $0 TARBALL OUT}"
out=$(realpath "$2")
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
tar -xf "$tarball" -C "$source" --strip-components=1
cd "$source"
patch -p1 <"$here/kernel.patch"
cp "$here/kernel.config" .config
make olddefconfig >/dev/null
make -j"$(nproc)" vmlinux
strip -o "$out/vmlinux" vmlinux
xz -T0 -f "$out/vmlinux"
