"""Disks of guests: XFS, whose page cache has large folios, from files wherever they are on this machine."""
import os
import subprocess


class Disk:
    """Files by their paths in the guest."""

    def __init__(self):
        self.entries = {}

    def add(self, path, source=None):
        """A file, with a link's target in its place; folders above it come along."""
        path = os.path.normpath(path)
        self.entries.setdefault(path, os.path.realpath(source or path))
        self.folder(os.path.dirname(path))

    def folder(self, path):
        """An empty folder, and those above it."""
        while path not in ("/", ""):
            self.entries.setdefault(path, None)
            path = os.path.dirname(path)

    def link(self, path, target):
        """A symbolic link."""
        self.entries.setdefault(path, ("link", target))
        self.folder(os.path.dirname(path))

    def tree(self, folder):
        """All files and links of a folder, as if it were the root."""
        for at, folders, files in os.walk(folder):
            inside = "/" + os.path.relpath(at, folder)
            self.folder(os.path.normpath(inside))
            for name in folders + files:
                path = os.path.normpath(os.path.join(inside, name))
                source = os.path.join(at, name)
                if os.path.islink(source):
                    self.link(path, os.readlink(source))
                elif os.path.isfile(source):
                    self.add(path, source)

    def size(self):
        """Bytes of all files."""
        return sum(os.path.getsize(entry) for entry in self.entries.values() if isinstance(entry, str))

    def prototype(self):
        """What `mkfs.xfs -p` reads."""
        below = {}
        for path in self.entries:
            below.setdefault(os.path.dirname(path), []).append(path)
        lines = ["none", "0 0", "d--755 0 0"]

        def write(folder):
            for path in sorted(below.get(folder, [])):
                entry, name = self.entries[path], os.path.basename(path)
                if entry is None:
                    lines.append(f"{name} d--755 0 0")
                    write(path)
                elif isinstance(entry, tuple):
                    lines.append(f"{name} l--777 0 0 {entry[1]}")
                else:
                    mode = "755" if os.access(entry, os.X_OK) else "644"
                    lines.append(f"{name} ---{mode} 0 0 {entry}")
            lines.append("$")

        write("/")
        return "\n".join(lines) + "\n"

    def write(self, image, binaries):
        """Writes the disk into a file that exists and has the disk's size, in place: a guest may have it already. Without
        checksums, which a guest whose kernel is emulated computes slowly."""
        prototype = image + ".prototype"
        with open(prototype, "w") as file:
            file.write(self.prototype())
        environment = dict(os.environ, LD_LIBRARY_PATH=os.path.join(binaries, "xfs"))
        command = [os.path.join(binaries, "xfs", "mkfs.xfs"), "-q", "-f", "-K", "-m", "crc=0", "-d", "agcount=2"]
        made = subprocess.run([*command, "-p", prototype, image], env=environment, capture_output=True, text=True)
        if made.returncode:
            raise OSError(f"cannot make the disk {image}: {made.stderr.strip()}")
