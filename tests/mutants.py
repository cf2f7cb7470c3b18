"""Change the mathematics of the cards, one place at a time, and see which test notices.

A change is made in a copy of the project. First all demos are played against golden/; where none
prints anything else, the suite runs. Printed are those that no golden file saw, and both rates.
"""
import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tinygpt as t                                 # noqa: E402

PARTS = ("tinygpt.py", "golden", "tests", "corpus.txt", "README.md", "Makefile", ".ci")
OF_OPTIONS = ("train", "resolve", "run_generate", "run_look", "choice_of")
LIKELY = ("test_equations", "test_gradients", "test_pytorch", "test_program", "test_checkpoint")
SWAPS = """+ - | * / | // % | += -= | *= /= | < <= | > >= | == != | and or | max min | argmax argmin |
    maximum minimum | exp expm1 | log log1p | sqrt cbrt | cos sin | floor ceil | mean sum | any all |
    cumsum cumprod | zeros_like ones_like | zeros ones | triu tril | float32 float64 | right left |
    row_sums row_mean | stable heapsort | True False | _g _b | wq wk | wk wv | bq bk | bk bv |
    ln1 ln2 | ln1_g ln2_g | ln1_b ln2_b | ff1_b ff2_b""".split("|")
SWAPS = {a: b for pair in SWAPS[::-1] for a, b in (pair.split()[::-1], pair.split())} | {
    "**": "*", "@": "@", "in": "not in", "not in": "in", "is": "is not", "is not": "is"}
SIGNS = dict(Add="+", Sub="-", Mult="*", Div="/", FloorDiv="//", Mod="%", Pow="**", MatMult="@",
             Lt="<", LtE="<=", Gt=">", GtE=">=", Eq="==", NotEq="!=", In="in", NotIn="not in",
             Is="is", IsNot="is not", And="and", Or="or")
PLAY = """if "memory is bounded":
    import contextlib, io, sys
    with contextlib.suppress(ImportError):
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
if sys.argv[1] == "suite":
    import pytest
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
import tinygpt as t
for card in t.cards():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        getattr(t, card.demo)()
    if out.getvalue() != t.golden_file(card).read_text(encoding="utf-8"):
        sys.exit(f"FAILED {card.slug}")
"""
Change = namedtuple("Change", "id card line old new start end")         # start, end: of its bytes


def variants(node, parent, code, cut):
    """Yield (span, new text) for a node of code."""
    kind, value, (start, end) = type(node).__name__, getattr(node, "value", None), cut(node)
    if kind in ("BinOp", "BoolOp", "Compare", "AugAssign"):
        row = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        signs = node.ops if kind == "Compare" else [node.op] * (len(row) - 1)
        edges = [start]
        for left, sign in zip(row, signs):
            sign = SIGNS[type(sign).__name__] + "=" * (kind == "AugAssign")
            at = code(cut(left)[1], end, at=sign)
            edges += [at, at + len(sign)]
            yield (at, at + len(sign)), SWAPS[sign]
        sides = [code(a, b).strip() for a, b in zip(edges[::2], [*edges[1::2], end])]
        if sign == "@":
            yield (start, end), f"{sides[1]} @ {sides[0]}"
        for i in range(len(sides)) if kind in ("BinOp", "BoolOp") else []:      # one left out
            rest = f" {sign} ".join(sides[:i] + sides[i + 1:])
            yield (start, end), "-" * (sign == "-" and i == 0) + rest
    elif kind == "UnaryOp":
        yield (start, end), code(*cut(node.operand))
    elif kind == "Constant" and isinstance(value, (int, float)):
        new = 1 - value if getattr(parent, "arg", "") == "axis" else not value \
            if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 3 or 1.0
        yield (start, end), f"{new}"
    elif kind == "Constant" and value in SWAPS:
        yield (start, end), repr(SWAPS[value])
    elif kind == "Name" or kind == "Attribute":
        name = getattr(node, "id", getattr(node, "attr", ""))
        yield (end - len(name), end), "max" if code(start, end) == "sum" else SWAPS.get(name, name)
        if name == "T" and kind == "Attribute":
            yield (cut(value)[1], end), ""
    elif kind == "Call":
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("swapaxes", "copy", "astype", "ravel"):
            yield (cut(node.func.value)[1], end), ""
        elif name in ("reversed", "abs", "sqrt", "square"):
            yield (start, end), code(*cut(node.args[0]))
        for last, item in zip([*node.args, *node.keywords], [*node.args, *node.keywords][1:]):
            if isinstance(item, ast.keyword):
                yield (cut(last)[1], cut(item)[1]), ""
    elif kind == "Slice":
        for bound in filter(None, (node.lower, node.upper, node.step)):
            yield cut(bound), " "
            yield cut(bound), code(*cut(bound)) + " + 1"
    elif kind == "JoinedStr":                       # one of its lines left out
        yield from ((cut(node, at), '""') for at in re.finditer(r'rf?"[^"\n]*"', code(start, end)))
