#!/bin/sh
# Figures of OpenCL natively and through the driver, in one run, on any machine with an OpenCL
# driver: `remoting/measure.sh VENDORS [FOLDER]`. VENDORS is a folder with the .icd file of the
# host's driver; FOLDER holds gantry-accel, libgantry_opencl.so, libgantry_malloc.so (or not) and
# examples/opencl_figures (default: target/release). Nothing is built or downloaded.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 VENDORS [FOLDER]" >&2; exit 2; }
# Some loaders want the slash; and this variable would add drivers to those of the folder.
vendors=$(realpath "$1")/
here=$(dirname "$(realpath "$0")")
unset OCL_ICD_FILENAMES
built=$(realpath "${2:-target/release}")
figures=$built/examples/opencl_figures
work=$(mktemp -d)
pool=
trap '[ -z "$pool" ] || kill "$pool" 2>/dev/null || true; rm -rf "$work"' EXIT
mkdir "$work/vendors"
echo "$built/libgantry_opencl.so" > "$work/vendors/gantry.icd"

# A pool of workers that listens as "$listen" says, started by "$@" (such as taskset).
start() {
    [ -z "$pool" ] || { kill "$pool"; wait "$pool" 2>/dev/null || true; }
    rm -f "$work/socket"
    # shellcheck disable=SC2086
    OCL_ICD_VENDORS=$vendors "$@" "$built/gantry-accel" serve $listen --cache "$work" &
    pool=$!
    case $listen in
        *tcp:*) sleep 5 ;;
        *) for _ in 1 2 3 4 5 6 7 8 9 10; do [ -S "$work/socket" ] || sleep 1; done ;;
    esac
}
listen="--socket $work/socket"
address=$work/socket

# An application that is served by it.
remoted() {
    GANTRY_OPENCL=$address OCL_ICD_VENDORS=$work/vendors/ "$@"
}

native() {
    GANTRY_OPENCL=off OCL_ICD_VENDORS=$vendors "$@"
}

uname -srm
echo "== native"
native "$figures"
echo "== through Gantry"
start env
remoted "$figures"
if [ -e "$built/libgantry_malloc.so" ]; then
    echo "== copies through Gantry, ordinary allocations in the window"
    remoted env "LD_PRELOAD=$built/libgantry_malloc.so" "$figures" --copies
fi
if command -v taskset > /dev/null && [ "$(nproc)" -gt 3 ]; then
    "$built/gantry-accel" distances > "$work/distances"
    near=$(sed -n 's/^near: //p' "$work/distances")
    echo "== processors: nanoseconds for a word there and back"
    cat "$work/distances"
    echo "== native, on processors $near"
    native taskset -c "$near" "$figures"
    echo "== through Gantry, application and worker on processors $near"
    start taskset -c "$near"
    remoted taskset -c "$near" "$figures"
fi
if command -v strace > /dev/null; then
    echo "== the application's system calls, all threads, start and end included"
    remoted strace -f -c -o "$work/calls" "$figures" > /dev/null
    head -12 "$work/calls"
fi
echo "== through Gantry, by a Unix socket without shared memory"
listen="--listen unix:$work/socket"
address=unix:$work/socket
start env
remoted "$figures"
if command -v openssl > /dev/null; then
    echo "== through Gantry, by TLS on this machine"
    sh "$here/certificates.sh" "$work" localhost guest
    port=${GANTRY_PORT:-17071}
    listen="--listen tcp:127.0.0.1:$port --tls-cert $work/localhost.pem"
    listen="$listen --tls-key $work/localhost.key --tls-client-ca $work/ca.pem"
    address=tls://localhost:$port
    export GANTRY_TLS_CA="$work/ca.pem"
    export GANTRY_TLS_CERT="$work/guest.pem" GANTRY_TLS_KEY="$work/guest.key"
    start env
    remoted "$figures"
fi
