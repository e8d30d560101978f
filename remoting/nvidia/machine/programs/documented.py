"""Runs the examples in the documentation of installed modules, on the GPU, and prints what they print.

    documented.py MODULE...

Their authors wrote them for any device: here arrays are made on the GPU unless they say otherwise."""
import contextlib
import doctest
import importlib
import io
import os
import random
import re
import sys
import tempfile
import warnings

import numpy

# What examples must not do here.
LEFT_OUT = re.compile(r"download|pretrained|urlopen|open\(|save\(|load\(|distributed|init_process_group|torchrun|matplotlib|"
                      r"plt\.|timeit|perf_counter|input\(|getsizeof|empty\(|empty_like|profiler|invariants|devices?\(\)|memory")
ADDRESS = re.compile(r"0x[0-9a-f]+|\bat [0-9a-f]{8,}")


def seed():
    random.seed(0)
    numpy.random.seed(0)
    for name in ("torch", "cupy"):
        if name in sys.modules:
            module = sys.modules[name]
            (module.manual_seed if name == "torch" else module.random.seed)(0)


def own(name):
    """The examples of a module, each once."""
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {}
    with contextlib.suppress(ValueError, TypeError):
        found = {test.name: test for test in finder.find(module, name)}
    # Functions that are written in C, and those that a package has from elsewhere.
    for key, value in vars(module).items():
        text = getattr(value, "__doc__", None)
        known = f"{name}.{key}"
        if callable(value) and isinstance(text, str) and ">>> " in text and known not in found and key[0] != "_":
            with contextlib.suppress(ValueError):
                found[known] = doctest.DocTestParser().get_doctest(text, dict(vars(module)), known, None, None)
    return [found[key] for key in sorted(found) if found[key].examples]


def main():
    warnings.simplefilter("ignore")
    sys.argv, names = sys.argv[:1], sys.argv[1:]
    if any(name.split(".")[0].startswith("torch") for name in names):
        import deterministic
        import torch

        torch.set_default_device("cuda")
    worked = 0
    os.chdir(tempfile.mkdtemp())
    for name in names:
        for test in own(name):
            if LEFT_OUT.search("".join(example.source for example in test.examples)):
                continue
            seed()
            scope = {"np": numpy, "numpy": numpy, **test.globs}
            for other in ("torch", "cupy", "jax"):
                if other in sys.modules:
                    scope.setdefault(other, sys.modules[other])
            print("==", test.name, flush=True)
            for example in test.examples:
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                    try:
                        exec(compile(example.source, test.name, "single", dont_inherit=True), scope)
                        worked += 1
                    except Exception as error:
                        print(type(error).__name__, file=printed)
                print(ADDRESS.sub("ADDRESS", printed.getvalue()), end="", flush=True)
    print("examples that worked:", worked)
    sys.exit(worked == 0)


if __name__ == "__main__":
    main()
