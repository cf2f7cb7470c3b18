"""Change the mathematics of the cards, one place at a time, and see which test notices.

Each change is made in a copy of the project. First all demos are played against golden/; where
none prints anything else, the suite runs. Printed are the changes that no golden file saw.
"""
import argparse, ast, contextlib, os, random, re, shutil, subprocess, sys, tempfile
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tinygpt as t                                 # noqa: E402

SWAPS = """Add Sub, Mult Div, FloorDiv Mod, Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, And Or,
    max min, argmax argmin, maximum minimum, exp expm1, log log1p, sqrt cbrt, cos sin, floor ceil,
    mean sum, row_sums row_mean, cumsum cumprod, any all, zeros ones, zeros_like ones_like,
    triu tril, float32 float64, right left, stable heapsort, _g _b, wq wk, wk wv, bq bk, bk bv,
    ln1 ln2, ln1_g ln2_g, ln1_b ln2_b, ff1_b ff2_b, Pow Mult, BitOr BitAnd""".split(",")
SWAPS = {a: b for pair in SWAPS[::-1] for a, b in (pair.split()[::-1], pair.split())}
# kind: cards; refusals, the conditions of what raises; check, the whole check of chapter 7; program
Change = namedtuple("Change", "id kind card line old new start end")    # start, end: of its bytes


def variants(node):
    """Yield nodes to stand in the place of a node of the mathematics."""
    swapped = lambda op: getattr(ast, SWAPS[type(op).__name__])()
    put = lambda row, i, *new: [*row[:i], *new, *row[i + 1:]]
    match node:
        case ast.BinOp(left, ast.MatMult() as op, right):
            yield ast.BinOp(right, op, left)
        case ast.BinOp(left, op, right):
            one = ast.Constant(int(type(op) not in (ast.Add, ast.Sub)))
            yield from map(ast.BinOp, (left, one, left), (swapped(op), op, op), (right, right, one))
        case ast.BoolOp(op, values):
            yield ast.BoolOp(swapped(op), values)
            yield from (ast.BoolOp(op, put(values, i)) for i in range(len(values)))
        case ast.Compare(left, ops, right):
            yield from (ast.Compare(left, put(ops, i, swapped(op)), right)
                        for i, op in enumerate(ops))
        case ast.AugAssign(target, op, value):
            yield from (ast.AugAssign(target, swapped(op), value), ast.Pass())
        case ast.Continue() | ast.Break() | ast.Expr(ast.Call()) | ast.Assign([ast.Subscript()]):
            yield ast.Pass()
        case ast.UnaryOp(_, value) | ast.Attribute(value, "T") \
                | ast.Call(ast.Attribute(value, "swapaxes" | "copy" | "astype" | "ravel")) \
                | ast.Call(ast.Name("reversed") | ast.Attribute(_, "abs" | "sqrt"), [value]):
            yield value
        case ast.Slice():
            for i, bound in enumerate(row := [node.lower, node.upper, node.step]):
                more = ast.BinOp(bound, ast.Add(), ast.Constant(1))
                yield from (ast.Slice(*put(row, i, new)) for new in (None, more) if bound)
        case ast.keyword("axis", ast.Constant(n)):
            yield ast.keyword("axis", ast.Constant(1 - n))
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as n):
            yield ast.Constant(n + 1 if isinstance(n, int) else float(f"{n * 3 or 1:g}"))
        case ast.Constant(name) | ast.Name(name) if name in SWAPS:
            yield type(node)(SWAPS[name])
    if isinstance(node, ast.Attribute) and node.attr in SWAPS:
        yield ast.Attribute(node.value, SWAPS[node.attr])
    for i in range(len(node.keywords)) if isinstance(node, ast.Call) else []:
        yield ast.Call(node.func, node.args, put(node.keywords, i))


def of_options(node, defaults):
    """Yield the same for the program: an option at its default, or taken out."""
    match node:
        case ast.Attribute(ast.Name("s" | "options"), name):
            yield ast.Constant(defaults[name])
        case ast.Name("OPTIONS" | "CHOICE" as name):
            for key in getattr(t, name):
                yield ast.Name(f"{{k: v for k, v in {name}.items() if k != {key!r}}}")


def changes(source):
    """[Change, ...] of a source; card is "1" to "61", "loop", "check" or "program"."""
    data, cards, numbers, result = source.encode(), [""], Counter(), []
    for line in source.split("\n"):                 # the card of each line, by the heading above
        found = re.match(r"# ##+ (?:(\d+)\. )?.*?(\w+)(?: \(\w+\))?$", line)
        cards.append(cards[-1] if not found or cards[-1] == "program" else
                     found[1] or (cards[-1] and found[2]))
    starts = [0, 0, *(end.end() for end in re.finditer(b"\n", data))]
    cut = lambda node: (starts[node.lineno] + node.col_offset,
                        starts[node.end_lineno] + node.end_col_offset)
    train, generate = t.parse(["train"]), t.parse(["generate"])
    defaults = vars(train) | vars(t.resolve(train, {})[1]) | vars(generate)
    for top in ast.parse(source).body:
        name, card, (a, b), found = getattr(top, "name", ""), cards[top.lineno], cut(top), set()
        every = lambda *nodes: {node for top in nodes for node in ast.walk(top)}
        if not card or name[:5] == "demo_" or card == "program" and name not in (
                "train", "resolve", "run_generate", "run_look", "parse"):
            continue
        dead = every(*(n for n in every(top) if isinstance(n, (ast.Raise, ast.JoinedStr))))
        tests = every(*(n.test for n in every(top) if isinstance(n, ast.If) and n.body[0] in dead))
        for node in every(top) - dead if type(top) in (ast.FunctionDef, ast.ClassDef, ast.Assign) else []:
            kind = card if card in ("check", "program") else "refusals" if node in tests else "cards"
            news = of_options(node, defaults) if card == "program" else variants(node)
            found |= {(*cut(node), kind, ast.unparse(new)) for new in news}
        if isinstance(top, ast.Assign):             # a line of a pattern left out
            found |= {(*at.span(1), "cards", '""')
                      for at in re.compile(rb'[ (](rf?"[^"\n]*")').finditer(data, a, b)}
        ...
