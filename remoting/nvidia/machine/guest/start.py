"""Runs a Python program where a system call takes as long as thousands of instructions:

    start.py [--list FILE] PROGRAM

Its modules come from the file PROGRAM.modules, if there is one, so that they are not looked for. With --list, the files
that the program has opened or mapped are written there at its end, which is what a guest needs, and its modules to
FILE.modules.
"""
import marshal
import os
import sys
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from importlib.util import spec_from_file_location

# Behind a file's name: its modules.
MODULES = ".modules"


class Loader(SourceFileLoader):
    """Has a module's code."""

    def __init__(self, name, path, code):
        super().__init__(name, path)
        self.code = code

    def get_code(self, fullname):
        return marshal.loads(self.code)


class Finder:
    """Knows modules by name: file, folder of a package, and code, which libraries lack."""

    def __init__(self, known):
        self.known = known

    def find_spec(self, name, path=None, target=None):
        found = self.known.get(name)
        if not found:
            return None
        file, folder, code = found
        loader = ExtensionFileLoader(name, file) if code is None else Loader(name, file, code)
        places = None if folder is None else [folder]
        return spec_from_file_location(name, file, loader=loader, submodule_search_locations=places)


def modules():
    """This process's modules: names, files, and folders of packages."""
    for name, module in sorted(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or spec.name != name or not spec.has_location:
            continue
        places = list(spec.submodule_search_locations or [])
        if type(spec.loader) in (SourceFileLoader, ExtensionFileLoader) and len(places) < 2:
            yield [name, spec.origin, *places]


def list_files(path, opened):
    """Writes what this process needs."""
    known = list(modules())
    files = opened | {module[1] for module in known}
    with open("/proc/self/maps") as maps:
        files |= {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
    with open(path, "w") as file:
        file.writelines(name + "\n" for name in sorted(files) if os.path.isfile(name))
    with open(path + MODULES, "w") as file:
        file.writelines("\t".join(module) + "\n" for module in known)


def run(program):
    """Runs a program. The interpreter maps and unmaps memory for frames whenever calls cross the end of a block. This
    function's frame is so large that its block has room for all."""
    with open(program) as file:
        code = compile(file.read(), program, "exec")
    exec(code, sys.modules["__main__"].__dict__)


run.__code__ = run.__code__.replace(co_stacksize=5 << 16)


def main():
    arguments, listed, opened = sys.argv[1:], None, set()
    if arguments[0] == "--list":
        listed, arguments = arguments[1], arguments[2:]
        sys.addaudithook(lambda event, values: event == "open" and isinstance(values[0], str) and opened.add(values[0]))
    sys.argv = arguments
    known = arguments[0] + MODULES
    if os.path.exists(known):
        with open(known, "rb") as file:
            sys.meta_path.insert(0, Finder(marshal.loads(file.read())))
        # There are no links to folders in the paths of these modules. PyTorch asks for each, and each folder is looked at.
        os.path.realpath = lambda path, **_: os.path.abspath(path)
    run(arguments[0])
    if listed:
        list_files(listed, opened)


if __name__ == "__main__":
    main()
