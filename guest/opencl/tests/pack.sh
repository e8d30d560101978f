#!/bin/sh
# Packs the programs that `cargo xtask bench programs` runs, for a machine where nothing can be
# installed: `guest/opencl/tests/pack.sh OUT.tar.xz [PYTHON]` on Debian, after the command has run
# once here. PYTHON is the other machine's version (default: 3.12). There, as root:
#
#     tar -C / -xf OUT.tar.xz
#     . /opt/opencl-programs/environment
#     xtask bench programs --built FOLDER --vendors FOLDER --every 1 --jobs 8 --table FILE
set -eu
[ $# -ge 1 ] || { echo "usage: $0 OUT.tar.xz [PYTHON]" >&2; exit 2; }
out=$(realpath "$1")
python=${2:-3.12}
version=2024.3
piglit=/usr/lib/x86_64-linux-gnu/piglit
cache=${GANTRY_CACHE:-$HOME/.cache/gantry}/pyopencl-$version
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
home=$work/opt/opencl-programs
mkdir -p "$home/libraries"

set -- /usr/bin/clblast_test_* /usr/bin/clFFT-client /usr/bin/clpeak /usr/bin/hashcat /usr/bin/x264
# The C library and the OpenCL loader are those of the other machine.
ldd "$@" "$piglit/bin/cl-program-tester" | awk '/=> \//{print $3}' | sort -u |
    grep -vE '/(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|stdc\+\+|gcc_s|OpenCL))\.so' |
    xargs cp -L -t "$home/libraries"
tar -C / -cf - $(printf '%s\n' "$@" | cut -c2-) usr/share/hashcat usr/lib/hashcat |
    tar -C "$work" -xf -
tar -C / -cf - $(cd / && ls -d "${piglit#/}"/bin/cl-*) "${piglit#/}/lib" "${piglit#/}/tests/cl" \
    "${piglit#/}/generated_tests/cl" | tar -C "$work" -xf -

tests=$home/cache/pyopencl-$version
mkdir -p "$tests/environment/bin" "$tests/pyopencl-$version" "$home/python" "$home/wheels"
cp -r "$cache/pyopencl-$version/test" "$tests/pyopencl-$version/"
"$cache/environment/bin/python" -m pip download -q --only-binary=:all: --python-version "$python" \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d "$home/wheels" \
    "pyopencl==$version" mako pytest
for wheel in "$home"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$home/python"; done
rm -r "$home/wheels"
cat > "$tests/environment/bin/python" <<'EOF'
#!/bin/sh
PYTHONPATH=/opt/opencl-programs/python exec python3 "$@"
EOF
chmod +x "$tests/environment/bin/python"
cat > "$home/environment" <<'EOF'
export LD_LIBRARY_PATH=/opt/opencl-programs/libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export GANTRY_CACHE=/opt/opencl-programs/cache
EOF
tar -C "$work" -cf - . | xz -T0 -3 > "$out"
echo "$out: $(du -h "$out" | cut -f1)"
