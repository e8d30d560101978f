"""Primitives of JAX with the inputs of its own tests, on the GPU: hashes of results.

    harnesses.py WORD...      those whose names begin with one of the words, at most 250"""
import sys

import numpy

sys.argv, words = sys.argv[:1], tuple(sys.argv[1:])
import jax  # noqa: E402
from jax._src.internal_test_util.test_harnesses import all_harnesses  # noqa: E402

from digest import show  # noqa: E402

chosen = [h for h in all_harnesses if h.fullname.startswith(words) and h.filter("gpu")]
worked = 0
for harness in chosen[:: -(-len(chosen) // 250) or 1]:
    try:
        result = jax.jit(harness.dyn_fun)(*harness.dyn_args_maker(numpy.random.RandomState(0)))
        leaves = [leaf for leaf in jax.tree.leaves(result) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)]
        show(harness.fullname, *leaves)
        worked += 1
    except Exception as error:
        print(harness.fullname, type(error).__name__)
print("results:", worked)
sys.exit(worked == 0)
