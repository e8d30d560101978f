#!/bin/sh
# Figures of OpenCL natively and through the driver, in one run, on any machine with an OpenCL
# driver: `remoting/measure.sh VENDORS [FOLDER]`. VENDORS is a folder with the .icd file of the
# host's driver; FOLDER holds gantry-accel, libgantry_opencl.so and examples/opencl_figures
# (default: target/release). Nothing is built or downloaded.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 VENDORS [FOLDER]" >&2; exit 2; }
# Some loaders want the slash; and this variable would add drivers to those of the folder.
vendors=$(realpath "$1")/
unset OCL_ICD_FILENAMES
built=$(realpath "${2:-target/release}")
work=$(mktemp -d)
trap 'kill "$pool" 2>/dev/null || true; rm -rf "$work"' EXIT
mkdir "$work/vendors"
echo "$built/libgantry_opencl.so" > "$work/vendors/gantry.icd"
OCL_ICD_VENDORS=$vendors "$built/gantry-accel" serve --socket "$work/socket" --cache "$work" &
pool=$!
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -S "$work/socket" ] || sleep 1; done
uname -srm
echo "== native"
GANTRY_OPENCL=off OCL_ICD_VENDORS=$vendors "$built/examples/opencl_figures"
echo "== through Gantry"
GANTRY_OPENCL=$work/socket OCL_ICD_VENDORS=$work/vendors/ "$built/examples/opencl_figures"
if command -v strace > /dev/null; then
    echo "== the application's system calls, all threads, start and end included"
    GANTRY_OPENCL=$work/socket OCL_ICD_VENDORS=$work/vendors/ \
        strace -f -c -o "$work/calls" "$built/examples/opencl_figures" > /dev/null
    head -12 "$work/calls"
fi
