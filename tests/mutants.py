"""Change the mathematics of the cards, one place at a time, and see which test notices.

Each change is made in a copy of the project. First all demos are played against golden/; where
none prints anything else, the suite runs. Printed are the changes that no golden file saw.
"""
import argparse, ast, contextlib, os, random, re, shutil, subprocess, sys, tempfile
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conftest import ROOT, t

SWAPS = """Add Sub, Mult Div, FloorDiv Mod, Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, And Or,
    max min, argmax argmin, maximum minimum, exp expm1, log log1p, sqrt cbrt, cos sin, floor ceil,
    mean sum, row_sums row_mean, cumsum cumprod, any all, zeros ones, zeros_like ones_like,
    triu tril, float32 float64, right left, stable heapsort, _g _b, wq wk, wk wv, bq bk, bk bv,
    ln1 ln2, ln1_g ln2_g, ln1_b ln2_b, ff1_b ff2_b, Pow Mult""".split(",")
SWAPS = {a: b for pair in SWAPS[::-1] for a, b in (pair.split()[::-1], pair.split())}
OF_OPTIONS = ("train", "resolve", "run_generate", "run_look", "parse")      # of the program
KINDS = ("cards", "refusals", "check", "program")   # refusals: the conditions of what raises
Change = namedtuple("Change", "id kind card line old new start end")    # start, end: of its bytes


def variants(node, defaults):
    """Yield nodes to stand in the place of a node; where defaults are given, of options only."""
    swapped = lambda op: getattr(ast, SWAPS[type(op).__name__])()
    put = lambda row, i, *new: [*row[:i], *new, *row[i + 1:]]
    match node:
        case ast.Attribute(ast.Name("s" | "options"), name) if defaults:
            yield ast.Constant(defaults[name])
        case ast.Name("OPTIONS" | "CHOICE" as name) if defaults:        # one of them forgotten
            for key in getattr(t, name):
                yield ast.Name(f"{{k: v for k, v in {name}.items() if k != {key!r}}}")
        case _ if defaults:
            return
        case ast.BinOp(left, ast.MatMult() as op, right):
            yield ast.BinOp(right, op, left)
        case ast.BinOp(left, op, right):            # the operator turned, a side left out
            one = ast.Constant(int(type(op) not in (ast.Add, ast.Sub)))
            for row in ((left, swapped(op), right), (one, op, right), (left, op, one)):
                yield ast.BinOp(*row)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(swapped(op), values)
            yield from (ast.BoolOp(op, put(values, i)) for i in range(len(values)))
        case ast.Compare(left, ops, right):
            for i, op in enumerate(ops):
                yield ast.Compare(left, put(ops, i, swapped(op)), right)
        case ast.AugAssign(target, op, value):
            yield from (ast.AugAssign(target, swapped(op), value), ast.Pass())
        case ast.Continue() | ast.Break() | ast.Expr(ast.Call()) | ast.Assign([ast.Subscript()]):
            yield ast.Pass()
        case ast.UnaryOp(_, value) | ast.Attribute(value, "T") \
                | ast.Call(ast.Attribute(value, "swapaxes" | "copy" | "astype" | "ravel")) \
                | ast.Call(ast.Name("reversed") | ast.Attribute(_, "abs" | "sqrt"), [value]):
            yield value
        case ast.Call(function, args, keywords):
            yield from (ast.Call(function, args, put(keywords, i)) for i in range(len(keywords)))
        case ast.Slice():
            for i, bound in enumerate(row := [node.lower, node.upper, node.step]):
                more = ast.BinOp(bound, ast.Add(), ast.Constant(1))
                yield from (ast.Slice(*put(row, i, new)) for new in (None, more) if bound)
        case ast.keyword("axis", ast.Constant(n)):
            yield ast.keyword("axis", ast.Constant(1 - n))
        case ast.Constant(bool() | int() | float() as n):
            yield ast.Constant(not n if isinstance(n, bool) else n + 1 if isinstance(n, int)
                               else float(f"{n * 3 or 1:g}"))
        case ast.Constant(name) | ast.Name(name) if name in SWAPS:
            yield type(node)(SWAPS[name])
        case ast.Attribute(value, name) if name in SWAPS:
            yield ast.Attribute(value, SWAPS[name])


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
    every = lambda *nodes: {node for top in nodes for node in ast.walk(top)}
    train, generate = t.parse(["train"]), t.parse(["generate"])
    defaults = vars(train) | vars(t.resolve(train, {})[1]) | vars(generate)
    for top in ast.parse(source).body:
        name, card, (a, b), found = getattr(top, "name", ""), cards[top.lineno], cut(top), set()
        if not (name in OF_OPTIONS if card == "program" else card and name[:5] != "demo_" and
                isinstance(top, (ast.FunctionDef, ast.ClassDef, ast.Assign))):
            continue
        dead = every(*(n for n in every(top) if isinstance(n, (ast.Raise, ast.JoinedStr))))
        tests = every(*(n.test for n in every(top) if isinstance(n, ast.If) and n.body[0] in dead))
        for node in every(top) - dead:
            kind = card if card in KINDS else KINDS[node in tests]
            found |= {(*cut(node), ast.unparse(new), kind)
                      for new in variants(node, defaults if kind == "program" else None)
                      if ast.unparse(new) != ast.unparse(node)}
        if isinstance(top, ast.Assign):             # a line of a pattern left out
            found |= {(*at.span(1), '""', "cards")
                      for at in re.compile(rb'[ (](rf?"[^"\n]*")').finditer(data, a, b)}
        for start, end, new, kind in sorted(found):
            line, old = data.count(b"\n", 0, start) + 1, data[start:end].decode()
            new += "\n" * old.count("\n")           # no other line moves
            with contextlib.suppress(SyntaxError):
                ast.parse((data[a:start] + new.encode() + data[end:b]).decode())
                if data[start - 1:start] != b"-":   # of -1 only the sign is changed
                    numbers[card] += 1
                    name = f"{card}-{numbers[card]}"
                    result.append(Change(name, kind, card, line, old, new, start, end))
    return result


def who_sees(source, kind="cards", suite=True):
    """Who notices a source (bytes): "golden", the name of a test, or "" for nobody."""
    first = "program checkpoint" if kind == "program" else "equations gradients pytorch"
    rank = lambda name: (name in "exercises book", name not in first, name)
    names = sorted((path.stem[5:] for path in ROOT.glob("tests/test_*.py")), key=rank)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(
            ".git", ".venv", "__pycache__", "*.npz*"))
        Path(folder, "tinygpt.py").write_bytes(source)

        def run(seconds, *args):                    # bounded: a change may make an endless loop
            bounds = f'ulimit -v 4194304; ulimit -t {seconds}; exec "$@"'
            return subprocess.run(
                ["sh", "-c", bounds, "sh", sys.executable, *args], cwd=folder, capture_output=True,
                stdin=subprocess.DEVNULL, encoding="utf-8", errors="replace",
                env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"})

        if kind != "program":
            texts = [t.golden_file(card).read_text(encoding="utf-8") for card in t.cards()]
            played = run(20, "tinygpt.py", "demo")
            if played.returncode or re.split(r"(?:^|\n)=== .*\n", played.stdout)[1:] != texts:
                return "golden"
        if not suite:
            return ""
        played = run(60, "-m", "pytest", "-xqp", "no:cacheprovider",
                     *(f"tests/test_{name}.py" for name in names))
    if played.returncode == 0 or "assert source.count(old) == 1" in played.stdout:
        return ""                                   # the last: it saw the text, not what it does
    return [*re.findall(r"^(?:FAILED|ERROR) (\S+)", played.stdout, re.M), "a crash, or no end"][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="CARD", help="1 to 61, loop, check or program")
    parser.add_argument("--sample", type=int, default=10 ** 6, metavar="N", help="N of them")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which N")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="N at a time")
    parser.add_argument("--golden", action="store_true", help="play the demos only")
    parser.add_argument("--list", action="store_true", help="name the changes only")
    options, data, seen = parser.parse_args(), (ROOT / "tinygpt.py").read_bytes(), Counter()
    chosen = [c for c in changes(data.decode()) if options.only in (None, c.card)]
    drawn = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    look = lambda source, kind: "" if options.list else who_sees(source, kind, not options.golden)
    if who := look(data, "cards"):
        sys.exit(f"without any change, this fails: {who}")
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [(c, pool.submit(look, data[:c.start] + c.new.encode() + data[c.end:], c.kind))
                for c in sorted(drawn, key=chosen.index)]
        for c, job in jobs:
            seen.update([c.kind, (c.kind, job.result()), (c.kind, job.result() > "")])
            if job.result() != "golden":
                line = data.decode().splitlines()[c.line - 1].split("  #")[0].strip()
                print(f"{c.id}: {c.old} -> {c.new.strip()}   in line {c.line}: {line}\n"
                      f"    {job.result() or 'NOBODY'}", flush=True)
    for kind in filter(seen.get, KINDS):
        print(f"{kind}: {seen[kind]} changes, {seen[kind, 'golden'] / seen[kind]:.1%} seen by a "
              f"golden file, {seen[kind, True] / seen[kind]:.1%} by any test")


if __name__ == "__main__":
    main()
