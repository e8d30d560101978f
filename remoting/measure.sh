#!/bin/sh
# Figures of OpenCL natively and through the driver, by turns, on any machine with an OpenCL
# driver: `remoting/measure.sh VENDORS [FOLDER [ROUNDS]]`. VENDORS is a folder with the .icd file of
# the host's driver; FOLDER holds gantry-accel, libgantry_opencl.so, libgantry_malloc.so (or not)
# and examples/opencl_figures (default: target/release). Nothing is built or downloaded. What is
# printed are medians of ROUNDS runs (default: 5), and what part of the native figure they are.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 VENDORS [FOLDER [ROUNDS]]" >&2; exit 2; }
# Some loaders want the slash; and this variable would add drivers to those of the folder.
vendors=$(realpath "$1")/
here=$(dirname "$(realpath "$0")")
unset OCL_ICD_FILENAMES
built=$(realpath "${2:-target/release}")
rounds=${3:-5}
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

# Runs the figures in each of the ways that are named (native, hook: with libgantry_malloc.so, others:
# through the pool), one after the other, so often, with a prefix such as taskset. What they print is in
# "$work/figures/NAME.ROUND".
turns() {
    names=$1
    often=$2
    shift 2
    rm -rf "$work/figures"
    mkdir "$work/figures"
    for round in $(seq "$often"); do
        for name in $names; do
            echo "# round $round of $often: $name" >&2
            case $name in
                native) native "$@" "$figures" ;;
                hook) remoted "$@" env "LD_PRELOAD=$built/libgantry_malloc.so" "$figures" --copies ;;
                *) remoted "$@" "$figures" ;;
            esac > "$work/figures/$name.$round"
        done
    done
}

# The medians of what is there, a column for each name.
table() {
    cat "$work"/figures/* | grep '^#' | sort -u
    (cd "$work/figures" && awk -F '\t' -v names="$1" -f "$here/medians.awk" ./*)
}

uname -srm
start env
columns="native gantry"
[ ! -e "$built/libgantry_malloc.so" ] || columns="$columns hook"
echo "== natively, through Gantry, and with ordinary allocations in the window: medians of $rounds runs"
turns "$columns" "$rounds"
table "$columns"
if command -v taskset > /dev/null && [ "$(nproc)" -gt 3 ]; then
    "$built/gantry-accel" distances > "$work/distances"
    near=$(sed -n 's/^near: //p' "$work/distances")
    echo "== processors: nanoseconds for a word there and back"
    cat "$work/distances"
    echo "== application and worker on processors $near: medians of 3 runs"
    start taskset -c "$near"
    turns "native gantry" 3 taskset -c "$near"
    table "native gantry"
fi
if command -v strace > /dev/null; then
    echo "== the application's system calls, all threads, start and end included"
    remoted strace -f -c -o "$work/calls" "$figures" > /dev/null
    head -12 "$work/calls"
fi
echo "== by a Unix socket without shared memory"
listen="--listen unix:$work/socket"
address=unix:$work/socket
start env
turns unix 1
table unix
if command -v openssl > /dev/null; then
    echo "== by TLS on this machine"
    sh "$here/certificates.sh" "$work" localhost guest
    port=${GANTRY_PORT:-17071}
    listen="--listen tcp:127.0.0.1:$port --tls-cert $work/localhost.pem"
    listen="$listen --tls-key $work/localhost.key --tls-client-ca $work/ca.pem"
    address=tls://localhost:$port
    export GANTRY_TLS_CA="$work/ca.pem"
    export GANTRY_TLS_CERT="$work/guest.pem" GANTRY_TLS_KEY="$work/guest.key"
    start env
    turns tls 1
    table tls
fi
