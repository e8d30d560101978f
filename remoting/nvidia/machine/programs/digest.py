"""What programs print: hashes of arrays, so that two runs can be compared byte by byte."""
import hashlib
import sys

import numpy


def host(array):
    """An array of PyTorch, CuPy or JAX as one of NumPy."""
    if hasattr(array, "detach"):
        array = array.detach()
        if array.layout is not __import__("torch").strided:
            array = array.to_dense()
        array = array.resolve_conj().resolve_neg().cpu()
        # NumPy has no such types.
        if str(array.dtype) == "torch.complex32":
            array = __import__("torch").view_as_real(array)
        elif "float8" in str(array.dtype) or "bfloat16" in str(array.dtype):
            array = array.float()
        return array.numpy()
    if hasattr(array, "toarray"):
        array = array.toarray()
    if hasattr(array, "get"):
        array = array.get()
    return numpy.asarray(array)


def show(name, *arrays):
    """Prints a name and the hash of some arrays: of types, shapes and values."""
    digest = hashlib.sha1()
    for array in map(host, arrays):
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(numpy.ascontiguousarray(array).tobytes())
    print(name, digest.hexdigest()[:16], flush=True)


def run(programs):
    """Runs the function that the command line names."""
    programs[sys.argv[1]]()
