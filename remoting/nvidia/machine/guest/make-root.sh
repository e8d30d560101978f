#!/bin/bash
# The files of a guest that runs CUDA programs: the C library and the CUDA toolkit's libraries of the machine that this
# runs on, programs built by nvcc, and Gantry's programs for guests. The driver's libraries are on a disk of their own.
#
#     FOLDER/make-root.sh BINARIES ROOT
#
# BINARIES has busybox (statically linked), gantry-agent, gantry-cuda and libgantry_nvidia_preload.so. ROOT is a folder,
# made anew. The programs are in ROOT/programs. A machine needs gcc and nvcc.
set -u
here=$(dirname "$(realpath "$0")")
binaries=$(realpath "${1:?usage: $0 BINARIES ROOT}")
root=${2:?usage: $0 BINARIES ROOT}
rm -rf "$root"
mkdir -p "$root"/{bin,dev,etc,lib/gantry,lib/x86_64-linux-gnu,lib64,proc,programs,results,run,sys,tmp,usr}
root=$(realpath "$root")
libraries=$root/lib/x86_64-linux-gnu
ln -s ../lib "$root/usr/lib"
ln -s ../bin "$root/usr/bin"
ln -s bin "$root/sbin"
export PATH=$PATH:/usr/local/cuda/bin

# Programs, each by a compiler of its own.
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cp "$here"/programs/* "$here"/../programs/*.{cu,h} "$here"/../{driver.c,runtime.cu} "$build"
cd "$build" || exit 1
flags='-O2 -std=c++17 -arch=native'
for name in *.cu; do
  case $name in
    cooperative.cu) more='-rdc=true -lcudadevrt' ;;
    residual.cu) more=-lcudnn ;;
    compiler.cu) more='-lnvrtc -lcuda' ;;
    *) more= ;;
  esac
  nvcc $flags -o "$root/programs/${name%.cu}" $name $more -lcublas -lcublasLt -lcufft -lcusolver -lcurand -lcusparse &
done
nvcc $flags -cudart shared -o "$root/programs/runtime-shared" runtime.cu &
for folder in /opt/nvidia/nsight-compute/*/extras/samples/*/; do
  name=$(basename "$folder")
  [ ! -e "$folder/$name.cu" ] || nvcc $flags -o "$root/programs/sample-$name" "$folder/$name.cu" &
done
for name in first figures driver; do gcc -O1 -w -o "$root/programs/$name" $name.c -ldl; done
wait

cp "$binaries"/{gantry-agent,gantry-cuda,busybox} "$root/bin"
cp "$binaries/libgantry_nvidia_preload.so" "$root/lib/gantry"
mkdir "$root/lib/cuda"
cp "$binaries"/libgantry_cuda.so "$root/lib/cuda/libcuda.so.1"
cp "$here/init" "$root/init"
cp "$here/list.txt" "$root/programs"
chmod -R go+rX,u+w "$root"

# Each library that something needs, and those that cuDNN and others open by name.
cuda=$(realpath /usr/local/cuda/lib64)
cudnn=$(dirname "$(ldconfig -p | sed -n 's/.*libcudnn\.so\.9 .*=> //p' | head -1)")
for name in "$cuda"/libnvJitLink.so.13 "$cuda"/libnvrtc-builtins.so.13.0 "$cudnn"/libcudnn_*.so.9; do
  [ ! -e "$name" ] || cp -L "$name" "$libraries"
done
LD_LIBRARY_PATH=$cuda ldd "$root"/programs/* "$root"/bin/* "$libraries"/* "$root"/lib/gantry/* 2>/dev/null |
  sed -n 's/.*=> \(\/[^ ]*\) (.*/\1/p' | sort -u | while read -r file; do
    [ -e "$libraries/$(basename "$file")" ] || case $file in
      "$root"/* | */libcuda.so* | */libnvidia-*) ;;
      *) cp -L "$file" "$libraries" ;;
    esac
  done
cp -L /lib64/ld-linux-x86-64.so.2 "$root/lib64"
ln -s busybox "$root/bin/sh"
# Ubuntu's is a script around the program.
if [ -e /sbin/ldconfig.real ]; then cp /sbin/ldconfig.real "$root/bin/ldconfig"; else cp /sbin/ldconfig "$root/bin/ldconfig"; fi
