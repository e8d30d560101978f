#!/bin/sh
# Links libcublas.so.13 and libcublasLt.so.13 from the archive that Cargo has built.
# usage: link.sh libgantry_cublas.a FOLDER
#
# As for the runtime library (guest/cudart/link.sh), a cdylib is not suitable. Each library is stripped of
# what it does not export.
set -eu
here=$(dirname "$0")
for name in libcublasLt libcublas; do
    ${CC:-cc} -shared -o "$2/$name.so.13" -Wl,-soname,$name.so.13 -Wl,--version-script="$here/$name.map" \
        -Wl,--whole-archive "$1" -Wl,--no-whole-archive -Wl,--gc-sections -Wl,-z,now,-z,relro -Wl,--strip-debug \
        -lgcc_s -lpthread -ldl -lm -lc
    ln -sf $name.so.13 "$2/$name.so"
done
