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
from itertools import count
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
PARTS = ["tinygpt.py", "golden", "tests", "corpus.txt", "README.md", "Makefile", ".ci"]
sys.path.insert(0, str(ROOT))

import tinygpt as t                                 # noqa: E402

OF_OPTIONS = ["train", "resolve", "run_generate", "run_look", "choice_of"]
SWAPS = "+ -, * /, // %, += -=, *= /=, < <=, > >=, == !=, in not_in, is is_not, and or, max min, " \
    "maximum minimum, argmax argmin, exp expm1, log log1p, sqrt cbrt, cos sin, floor ceil, sum max," \
    "mean sum, cumsum cumprod, zeros_like ones_like, zeros ones, triu tril, float32 float64, " \
    "row_sums row_mean, any all, right left, stable heapsort, True False, _g _b, wq wk, wk wv, " \
    "bq bk, bk bv, ln1_g ln2_g, ln1_b ln2_b, ff1_b ff2_b, ln1 ln2"
SWAPS = {a.replace("_n", " n"): b.replace("_n", " n") for pair in SWAPS.split(",")
         for a, b in (pair.split()[::-1], pair.split())} | {"**": "*", "@": "@", "sum": "mean"}
SIGNS = dict(Add="+", Sub="-", Mult="*", Div="/", FloorDiv="//", Mod="%", Pow="**", MatMult="@",
             Lt="<", LtE="<=", Gt=">", GtE=">=", Eq="==", NotEq="!=", In="in", NotIn="not in",
             Is="is", IsNot="is not", And="and", Or="or")
Change = namedtuple("Change", "id card line old new start end source")


def replacements(node, parent, text, cut):
    """Yield (what, new text) for a node of code; what is a node or a span (start, end)."""
    kind, value = type(node).__name__, getattr(node, "value", None)
    start, end = cut(node)
    if kind in ("BinOp", "BoolOp", "Compare", "AugAssign"):
        row = {"BinOp": lambda: [node.left, node.right], "BoolOp": lambda: node.values,
               "Compare": lambda: [node.left, *node.comparators],
               "AugAssign": lambda: [node.target, value]}[kind]()
        signs = node.ops if kind == "Compare" else [node.op] * (len(row) - 1)
        edges, in_place = [start], "=" * (kind == "AugAssign")
        for left, right, sign in zip(row, row[1:], signs):
            sign = SIGNS[type(sign).__name__] + in_place
            at = text.index(sign.encode(), cut(left)[1])
            edges += [at, at + len(sign)]
            yield (at, at + len(sign)), SWAPS[sign]
        sides = [text[a:b].decode().strip() for a, b in zip(edges[::2], [*edges[1::2], end])]
        if sign == "@":
            yield node, f"{sides[1]} @ {sides[0]}"
        elif kind in ("BinOp", "BoolOp"):           # one of them left out
            for i in range(len(sides)):
                rest = f" {sign} ".join(sides[:i] + sides[i + 1:])
                yield node, "-" * (sign == "-" and i == 0) + rest
    elif kind == "UnaryOp":
        yield node, text[slice(*cut(node.operand))].decode()
    elif kind == "Constant" and value is not None:
        axis = getattr(parent, "arg", "") == "axis"
        yield node, (repr(SWAPS.get(value, value)) if isinstance(value, str) else
                     str(not value) if isinstance(value, bool) else f"{3 * value or 1.0}" if
                     isinstance(value, float) else f"{1 - value if axis else value + 1}")
    elif kind == "Name":
        yield node, {"sum": "max"}.get(node.id, SWAPS.get(node.id, node.id))
    elif kind == "Attribute":
        yield (end - len(node.attr), end), SWAPS.get(node.attr, node.attr)
        yield node, text[slice(*cut(value))].decode() if node.attr == "T" else ""
    elif kind == "Call":
        if getattr(node.func, "attr", "") in ("swapaxes", "copy", "astype", "ravel"):
            yield (cut(node.func.value)[1], end), ""
        if getattr(node.func, "id", "") in ("reversed", "float", "int", "abs"):
            yield node, text[slice(*cut(node.args[0]))].decode()
    elif kind == "Slice":
        for bound in filter(None, (node.lower, node.upper, node.step)):
            yield bound, " "
            yield bound, text[slice(*cut(bound))].decode() + " + 1"
    elif kind == "JoinedStr" and node.lineno < node.end_lineno:         # a line of it left out
        yield from ((found.span(), '""') for found in re.compile(rb'rf?"[^"\n]*"').finditer(
            text, start, end))
    if kind in ("AugAssign", "Continue", "Break") or kind == "Expr" and isinstance(value, ast.Call) \
            or kind == "Assign" and isinstance(node.targets[0], ast.Subscript):
        yield node, "pass"
    for test in [*getattr(node, "ifs", []), getattr(node, "test", None)]:
        if isinstance(test, (ast.Name, ast.Call)):
            yield test, "True"


def options_left_out(node, defaults, text, cut):
    """Yield the same for a node of the program: an option at its default, or taken out."""
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("s", "options"):
        yield node, repr(defaults[node.attr])
    if isinstance(node, ast.comprehension) and getattr(node.iter, "id", "") in ("OPTIONS", "CHOICE"):
        for key in getattr(t, node.iter.id):
            yield node.iter, f"[k for k in {node.iter.id} if k != {key!r}]"


def changes(source):
    """[Change, ...]; card is "1" to "61", "loop", "check" (the whole check) or "program"."""
    text, card, cards, found = source.encode(), None, [None], {}
    for line in source.split("\n"):
        if heading := re.match(r"# ##+ (?:(\d+)\. )?.*?(\w+)(?: \(\w+\))?$", line):
            if card is not None or heading[1]:
                card = "program" if card == "program" else heading[1] or heading[2]
        cards.append(card)
    starts = [0, 0, *(found.end() for found in re.finditer(b"\n", text))]
    def cut(node):
        return (starts[node.lineno] + node.col_offset, starts[node.end_lineno] + node.end_col_offset
                ) if hasattr(node, "lineno") else (0, 0)
    defaults = vars(t.parse(["generate"])) | vars(t.parse(["train"]))
    defaults |= vars(t.resolve(t.parse(["train"]), {})[1])

    def visit(node, parent, kinds):
        for kind in kinds:
            for what, new in kind(node):
                a, b = what if isinstance(what, tuple) else cut(what)
                old = text[a:b].decode()
                new += "\n" * (old.count("\n") - new.count("\n"))       # lines stay where they are
                if new not in ("", old) or b - a > 1:
                    found[a, b, new] = old
