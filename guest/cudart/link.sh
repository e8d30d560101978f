#!/bin/sh
# Links libcudart.so.13 from the archive that Cargo makes.
# usage: link.sh libgantry_cudart.a FOLDER
#
# A cdylib will not do: rustc gives the linker a version script without a name, which cannot be combined
# with another, and programs want each symbol in the version libcudart.so.13.
set -eu
here=$(dirname "$0")
# Every object of the archive is wanted, as nothing refers to entry points; what the map makes local and
# nothing uses goes.
cc -shared -o "$2/libcudart.so.13" -Wl,-soname,libcudart.so.13 -Wl,--version-script="$here/libcudart.map" \
    -Wl,--whole-archive "$1" -Wl,--no-whole-archive -Wl,--gc-sections -Wl,-z,now,-z,relro \
    -lgcc_s -lpthread -ldl -lm -lc
ln -sf libcudart.so.13 "$2/libcudart.so"
