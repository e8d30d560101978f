#!/bin/bash
# Puts everything that run.sh needs into a folder, for a machine with an NVIDIA GPU where nothing of this
# repository can be built: `pack.sh FOLDER [SAMPLES]`. SAMPLES is a checkout of NVIDIA's cuda-samples, of
# which those that samples.txt names are taken along, as sources. GANTRY_WHEELS is a folder of Python packages that
# the machine may lack (filecheck, of which some of Numba's tests make use). GANTRY_SUITES is a folder of other
# projects' tests, of which suites.sh says what it runs: cuda-python, triton and torch, each with the packages that it needs
# in `site`. Builds release programs with Cargo.
set -eu
here=$(dirname "$(realpath "$0")")
root=$(realpath "$here/../..")
folder=${1:?usage: $0 FOLDER [SAMPLES]}
samples=${2:-}
target=${CARGO_TARGET_DIR:-$root/target}
mkdir -p "$folder"
folder=$(realpath "$folder")
rm -rf "$folder/guest" "$folder/programs" "$folder/tests" "$folder/strace" "$folder/samples"* "$folder/suites"* "$folder/wheels"
mkdir -p "$folder/guest" "$folder/programs" "$folder/tests"
cd "$root"
cargo build --release --quiet -p remoting-pool -p gantry-cuda -p gantry-cudart
cp "$target/release/gantry-accel" "$folder/gantry-accel"
cp "$target/release/libgantry_cuda.so" "$folder/guest/"
cargo build --release --quiet -p gantry-cuda-run -p gantry-smi -p gantry-nvml
cp "$target/release/gantry-cuda" "$target/release/gantry-smi" "$folder/"
cp "$target/release/libgantry_nvml.so" "$folder/guest/"
cp "$target/release/libgantry_cuda_audit.so" "$folder/guest/"
guest/cudart/link.sh "$target/release/libgantry_cudart.a" "$folder/guest"
if [ -e guest/cublas/link.sh ]; then
    cargo build --release --quiet -p gantry-cublas
    guest/cublas/link.sh "$target/release/libgantry_cublas.a" "$folder/guest"
fi
# The programs that test the stand-in driver, and those that do so through Gantry.
built=$(cargo test --no-run --quiet --message-format=json -p remoting-pool -p gantry-cuda-driver --test cuda)
program() {
    echo "$built" | sed -n "s|.*\"package_id\":\"[^\"]*/$1#.*\"executable\":\"\([^\"]*/deps/[^\"]*\)\".*|\1|p" | tail -1
}
cp "$(program tests/cuda-driver)" "$folder/tests/native"
cp "$(program remoting/pool)" "$folder/tests/remoted"
realpath "$target/debug/gantry-accel" > "$folder/tests/built"
find "$folder" -type f \( -name 'gantry-accel' -o -name gantry-cuda -o -name gantry-smi -o -name '*.so*' -o -path '*/tests/native' -o -path '*/tests/remoted' \) \
    -exec strip --strip-unneeded {} + 2> /dev/null || true
cp "$here/run.sh" "$here/python.sh" "$here/suites.sh" "$here/compile.sh" "$here/../medians.awk" "$folder/"
cp -r "$here"/*.c "$here"/*.cu "$here"/*.py "$here/python" "$here/fork" "$folder/programs/"
sed -n 's/.*symbol: "\(cu[^"]*\)".*/\1/p' remoting/cuda-definition/src/driver/entry_points.rs | sort -u \
    > "$folder/programs/entry-points.txt"
if command -v strace > /dev/null; then
    mkdir -p "$folder/strace"
    cp "$(command -v strace)" "$folder/strace/"
    ldd "$(command -v strace)" | sed -n 's/.*=> \(.*\/lib\(unwind[^ ]*\|lzma[^ ]*\)\) .*/\1/p' |
        xargs -r cp -Lt "$folder/strace"
fi
if [ -n "$samples" ]; then
    mkdir -p "$folder/samples/Common"
    cp "$samples"/Common/*.h "$samples"/Common/*.cpp "$folder/samples/Common/"
    while read -r name; do
        cp -r "$samples"/Samples/*/"$name" "$folder/samples/"
    done < "$here/samples.txt"
    tar -czf "$folder/samples.tar.gz" -C "$folder" samples
    rm -r "$folder/samples"
fi
if [ -n "${GANTRY_WHEELS:-}" ]; then
    mkdir -p "$folder/wheels"
    cp "$GANTRY_WHEELS"/*.whl "$folder/wheels/"
fi
[ -z "${GANTRY_SUITES:-}" ] || tar -czf "$folder/suites.tar.gz" -C "$GANTRY_SUITES" .
du -sh "$folder"
