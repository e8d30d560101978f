#!/bin/bash
# Compiles one of NVIDIA's samples as its CMakeLists.txt would, with a shared runtime library:
# `compile.sh SAMPLES -arch=ARCHITECTURE NAME`; what it is for is run.sh.
cd "$1/$3" || exit
arch=$2
common=$1/Common
libraries=
grep -q nvrtc CMakeLists.txt && libraries="-lnvrtc"
grep -q nvJitLink CMakeLists.txt && libraries="$libraries -lnvJitLink"
grep -q cublas CMakeLists.txt && libraries="$libraries -lcublas"
grep -qE 'cuda_driver|libcuda|-lcuda' CMakeLists.txt && libraries="$libraries -lcuda"
stubs=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")/lib64/stubs
[[ $3 == cdp* ]] && libraries="$libraries -rdc=true -lcudadevrt"
shopt -s nullglob
sources=(src/*.cpp src/*.cu)
for file in *.cu *.cpp *.c; do
    case $file in
        *.cu)
            # Loaded by the program, not linked.
            if grep -q nvrtc CMakeLists.txt; then continue; fi
            if grep -q fatbin CMakeLists.txt && [[ $file == *kernel*.cu ]]; then
                nvcc $arch -I"$common" -fatbin -o "${file%.cu}64.fatbin" "$file"
                nvcc -arch=compute_80 -I"$common" -ptx -o "${file%.cu}64.ptx" "$file"
                continue
            fi ;;
    esac
    sources+=("$file")
done
[ -d data ] && cp -n data/* . 2>/dev/null
nvcc $arch -std=c++17 -O2 -cudart shared -Xcompiler -fopenmp -I"$common" -I. -Iinc -L"$stubs" -o program \
    "${sources[@]}" $libraries > compile.log 2>&1
exit 0
