"""A Python program with all that it imports, as files of a guest's disk."""
import functools
import importlib.util
import marshal
import os
import py_compile
import sys

import start
from disk import Disk

# Not a checksum or a time of the source, which the disk does not keep: what is compiled is taken as it is.
UNCHECKED = (1).to_bytes(4, "little") + bytes(8)
PRELOADED = "libgantry_nvidia_preload.so"
# The driver's, which the guest has from a disk of its own.
DRIVER = ("libcuda.so", "libnvidia-", "libcudadebugger.so")


@functools.cache
def code(path, work):
    """A compiled module."""
    cached = importlib.util.cache_from_source(path)
    if not os.path.exists(cached):
        cached = py_compile.compile(path, os.path.join(work, "one.pyc"))
    with open(cached, "rb") as file:
        return file.read()


def bundle(listed, work):
    """All modules of a list in one file, as `start.py` reads it."""
    known = {}
    with open(listed + start.MODULES) as file:
        for line in file:
            name, path, *folder = line.rstrip("\n").split("\t")
            place = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            folder = os.path.realpath(folder[0]) if folder else None
            known[name] = (place, folder, code(path, work)[16:] if path.endswith(".py") else None)
    path = os.path.join(work, "modules")
    with open(path, "wb") as file:
        marshal.dump(known, file)
    return path


def add(disk, program, listed, binaries, driver, work):
    """Adds a program, the files that its list names, compiled modules, links to libraries and the interpreter, Gantry's
    programs for guests, and libraries of the driver."""
    os.makedirs(work)
    for name in ("bin", "lib", "lib64"):
        disk.link("/" + name, "usr/" + name)
    disk.link("/sbin", "usr/bin")
    for name in ("dev", "etc", "proc", "programs", "run", "sys", "tmp"):
        disk.folder("/" + name)
    here, place = os.path.dirname(os.path.realpath(__file__)), os.path.join("/programs", os.path.basename(program))
    disk.add("/init", os.path.join(here, "init"))
    disk.add("/programs/start.py", os.path.join(here, "start.py"))
    disk.add(place, program)
    disk.add(place + start.MODULES, bundle(listed, work))
    for name in ("busybox", "gantry-agent", "gantry-cuda"):
        disk.add("/usr/bin/" + name, os.path.join(binaries, name))
    disk.link("/usr/bin/sh", "busybox")
    disk.add("/usr/lib/gantry/" + PRELOADED, os.path.join(binaries, PRELOADED))
    libraries = Disk()
    libraries.tree(driver)
    for path, entry in libraries.entries.items():
        disk.entries["/driver" + path] = entry
    disk.folder("/driver")
    with open(listed) as file:
        paths = {line.strip() for line in file}
    paths |= {sys.executable, os.path.join(sys.prefix, "pyvenv.cfg"), os.__file__, "/lib64/ld-linux-x86-64.so.2"}
    # What is looked for without being opened.
    for path in list(paths):
        if path.endswith("/torch/__init__.py"):
            folder = os.path.join(os.path.dirname(path), "bin")
            paths |= {os.path.join(folder, name) for name in os.listdir(folder)}
    for path in sorted(paths):
        if not os.path.isfile(path) or path.startswith(("/proc/", "/dev/", "/sys/", "/tmp/")):
            continue
        name = os.path.basename(path)
        if name.startswith(DRIVER) or name.endswith(".pyc"):
            continue
        folder = os.path.realpath(os.path.dirname(path))
        disk.add(os.path.join(folder, name), path)
        if name.endswith(".py"):
            data = code(path, work)
            compiled = os.path.join(work, str(len(disk.entries)))
            with open(compiled, "wb") as file:
                file.write(data[:4] + UNCHECKED + data[16:])
            disk.add(importlib.util.cache_from_source(os.path.join(folder, name)), compiled)
        elif ".so" in name:
            real = os.path.realpath(path)
            for other in os.listdir(folder):
                link = os.path.join(folder, other)
                if os.path.islink(link) and os.path.realpath(link) == real:
                    disk.link(link, os.path.relpath(real, folder))
