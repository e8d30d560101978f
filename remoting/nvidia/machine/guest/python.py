"""A Python program with all that it imports, as files of a guest's disk."""
import importlib.util
import os
import py_compile
import sys

from disk import Disk

# Not a checksum or a time of the source, which the disk does not keep: what is compiled is taken as it is.
UNCHECKED = (1).to_bytes(4, "little") + bytes(8)
# The driver's, which the guest has from a disk of its own.
DRIVER = ("libcuda.so", "libnvidia-", "libcudadebugger.so")


def add(disk, listed, root, work):
    """Adds the files that a list names, compiled modules, links to libraries and the interpreter, and what the guest's
    other programs need, of a root that `make-root.sh` has made."""
    os.makedirs(work)
    for name in ("bin", "lib", "lib64"):
        disk.link("/" + name, "usr/" + name)
    disk.link("/sbin", "usr/bin")
    for name in ("dev", "etc", "proc", "programs", "run", "sys", "tmp"):
        disk.folder("/" + name)
    disk.add("/init", os.path.join(root, "init"))
    for name in os.listdir(os.path.join(root, "bin")):
        disk.add("/usr/bin/" + name, os.path.join(root, "bin", name))
    for name in os.listdir(os.path.join(root, "lib/gantry")):
        disk.add("/usr/lib/gantry/" + name, os.path.join(root, "lib/gantry", name))
    driver = Disk()
    driver.tree(os.path.join(root, "driver"))
    for path, entry in driver.entries.items():
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
            cached = importlib.util.cache_from_source(path)
            if not os.path.exists(cached):
                cached = py_compile.compile(path, os.path.join(work, "one.pyc"))
            with open(cached, "rb") as file:
                data = file.read()
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
