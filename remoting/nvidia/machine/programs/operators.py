"""Operators of PyTorch with the sample inputs of its own tests (torch.testing), on the GPU: hashes of results.

    operators.py [--compile] WORD...      those whose names begin with one of the words

--compile: compiled by torch.compile, which writes kernels for Triton; two inputs each."""
import itertools
import sys
import warnings

import deterministic
import torch

sys.argv, words = sys.argv[:1], tuple(sys.argv[1:])
warnings.simplefilter("ignore")

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from digest import show  # noqa: E402

# What has no value, or another one each time.
LEFT_OUT = ("empty", "new_empty", "torch.empty")
compiled = "--compile" in words
MOST = 2 if compiled else 10
worked = 0
for op in op_db:
    if not op.name.startswith(words) or op.name.startswith(LEFT_OUT):
        continue
    kinds = op.supported_dtypes("cuda")
    kind = torch.float32 if torch.float32 in kinds else sorted(kinds, key=str)[0]
    name = op.name + ("." + op.variant_test_name if op.variant_test_name else "")
    torch.manual_seed(0)
    try:
        for at, sample in enumerate(itertools.islice(op.sample_inputs("cuda", kind), MOST)):
            torch.manual_seed(at)
            try:
                function = torch.compile(op.op) if compiled else op
                result = function(sample.input, *sample.args, **sample.kwargs)
                arrays = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                show(f"{name} {at}", *arrays)
                worked += 1
            except Exception as error:
                print(name, at, type(error).__name__)
    except Exception as error:
        print(name, type(error).__name__)
print("results:", worked)
sys.exit(worked == 0)
