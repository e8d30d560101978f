#!/bin/sh
# Links libcudart.so.13 from the archive that Cargo has built.
# usage: link.sh libgantry_cudart.a FOLDER
#
# A cdylib is not suitable: rustc passes the linker a version script without a version name, which cannot be
# combined with another, and programs require each symbol with the version libcudart.so.13.
set -eu
here=$(dirname "$0")
# Every object of the archive is linked, since nothing refers to entry points. Symbols that the map makes
# local and that nothing uses are removed.
${CC:-cc} -shared -o "$2/libcudart.so.13" -Wl,-soname,libcudart.so.13 -Wl,--version-script="$here/libcudart.map" \
    -Wl,--whole-archive "$1" -Wl,--no-whole-archive -Wl,--gc-sections -Wl,-z,now,-z,relro -Wl,--strip-debug \
    -lgcc_s -lpthread -ldl -lm -lc
ln -sf libcudart.so.13 "$2/libcudart.so"
