"""Each forward card read a second time, slowly, and the values that a reader of it may expect."""
import math
import random
import re
import subprocess
import sys
import unicodedata
from fractions import Fraction
from itertools import islice, product

import numpy as np
import pytest

import tinygpt as t
from conftest import GOLDEN, ROOT, plain_environment
from tinygpt import AdamW, batch_loss_and_grads     # as in the book: a training replaces them in t

# All sizes differ, so that a swapped axis cannot hide behind equal numbers. Random inputs are
# read-only, so that a function that writes into its arguments fails wherever it is called.
T, d, hs, H, B, F, V, L, Tmax = 5, 12, 4, 3, 6, 10, 11, 2, 7
CONFIG = t.ModelConfig(V, context=T, max_context=Tmax, width=d, heads=H, hidden=F, layers=L)
BLOCK_SHAPES = dict(
    ln1_g=(d,), ln1_b=(d,), wq=(d, d), bq=(d,), wk=(d, d), bk=(d,), wv=(d, d), bv=(d,),
    wo=(d, d), bo=(d,), ln2_g=(d,), ln2_b=(d,), ff1_w=(d, F), ff1_b=(F,), ff2_w=(F, d), ff2_b=(d,))
SHAPES = (dict(tok_emb=(V, d), pos_emb=(Tmax, d))
          | {f"block{l}.{name}": s for l in range(L) for name, s in BLOCK_SHAPES.items()}
          | dict(lnf_g=(d,), lnf_b=(d,), head_w=(d, V), head_b=(V,)))


@pytest.fixture(params=[(), (B,)], ids=["window", "batch"])
def lead(request):
    """What stands before T in the shape of ids; a matrix has the windows below each other."""
    return request.param


def frozen(x):
    """x with every array in it read-only."""
    if isinstance(x, np.ndarray):
        x.flags.writeable = False
    elif isinstance(x, (dict, list, tuple)):
        for part in x.values() if isinstance(x, dict) else x:
            frozen(part)
    return x


def rand(rng, *shape, dtype=np.float64):
    return frozen(rng.standard_normal(shape).astype(dtype))


def rand_ids(rng, *shape, high=V):
    return frozen(rng.integers(0, high, shape))


def rand_arrays(rng, shapes, dtype=np.float64):
    return {name: rand(rng, *shape, dtype=dtype) for name, shape in shapes.items()}


def close(actual, expected, rtol=1e-12, atol=1e-12):
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def all_close(actual, expected, **tolerances):
    assert actual.keys() == expected.keys()
    for name in expected:
        close(actual[name], expected[name], **tolerances)


def same(a, b):
    """Bit for bit; b may have more names."""
    return all(np.array_equal(a[name], b[name]) for name in a)


def copies(arrays):
    return {name: np.array(a) for name, a in arrays.items()}


def by_window(slow, lead, *arrays):
    """slow(window, ...) for each window of tall matrices or of ids, one below the other."""
    parts = [np.split(np.reshape(a, (-1, *a.shape[len(lead or [0]) if a.dtype.kind == "i" else 1:])
                                 if a.dtype.kind != "i" else a.ravel()), math.prod(lead))
             for a in arrays]
    return np.concatenate([slow(*windows) for windows in zip(*parts)])
