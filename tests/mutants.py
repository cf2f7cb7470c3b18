"""Change the mathematics of the cards, one place at a time, and see which test notices.

Each change is made in a copy. First all demos are played against golden/; where none prints
anything else, the suite runs, but for the tests of the exercises, which look at the text of
lines. Printed are the changes that no golden file saw, and the rates.
"""
import argparse, ast, os, random, re, shutil, subprocess, sys, tempfile
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from conftest import ROOT, t
import test_page

SWAPS = """Add Sub, Mult Div, FloorDiv Mod, Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, And Or,
    max min, argmax argmin, maximum minimum, exp expm1, log log1p, sqrt cbrt, cos sin, floor ceil,
    mean sum, row_sums row_mean, cumsum cumprod, zeros ones, zeros_like ones_like, triu tril,
    float32 float64, right left, stable heapsort, wq wk, wk wv, bq bk, bk bv, _g _b, ln1 ln2,
    ln1_g ln2_g, ln1_b ln2_b, ff1_b ff2_b, Pow Mult""".split(",")
SWAPS = {a: b for pair in SWAPS[::-1] for a, b in (pair.split()[::-1], pair.split())}
# refusals: the conditions of what raises; printed: the text of the equations that test_page runs
KINDS = ("cards", "refusals", "check", "program", "printed")
Change = namedtuple("Change", "id kind card line old new start end")    # start, end: of its bytes


def variants(node, defaults):
    """Yield nodes to stand in the place of a node; where defaults are given, of options only."""
    swapped = lambda op: getattr(ast, SWAPS[type(op).__name__])()
    put = lambda row, i, *new: [*row[:i], *new, *row[i + 1:]]
    match node:
        case ast.Attribute(ast.Name("s" | "options"), name, ast.Load()) if name in (defaults or {}):
            yield ast.Constant(defaults[name])
        case ast.Name("OPTIONS") if defaults:       # one of them forgotten
            for key in t.OPTIONS:
                yield ast.Name(f"{{k: v for k, v in OPTIONS.items() if k != {key!r}}}")
        case ast.Name("CHOICE") if defaults:
            for key, *_ in t.CHOICE:
                yield ast.Name(f"[row for row in CHOICE if row[0] != {key!r}]")
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
            yield ast.Constant({bool: not n, int: n + 1, float: float(f"{n * 3 or 1:g}")}[type(n)])
        case ast.Constant(name) | ast.Name(name) if name in SWAPS:
            yield type(node)(SWAPS[name])
        case ast.Attribute(value, name) if name in SWAPS:
            yield ast.Attribute(value, SWAPS[name])


def changes(source):
    """[Change, ...] of a source; card is "1" to "61", "loop", "check", "program", "printed"."""
    data, cards, result = source.encode(), [""], []
    for line in source.split("\n"):                 # the card of each line, by the heading above it
        found = re.match(r"# ##+ (?:(\d+)\. |The .*?(loop|check|program)$)", line)
        cards.append(found and (found[1] or found[2]) or cards[-1])
    starts = [0, 0, *(end.end() for end in re.finditer(b"\n", data))]
    cut = lambda n: (starts[n.lineno] + n.col_offset, starts[n.end_lineno] + n.end_col_offset)
    every = lambda *nodes: {node for top in nodes for node in ast.walk(top)}
    parse = t.build_parser().parse_args
    usual = vars(o := parse(["train"])) | vars(t.resolve(o, {})[1]) | vars(parse(["generate"])) \
        | {"choice": {key: default for key, default, *_ in t.CHOICE}}
    del usual["run"]                                # the command is no choice of its own
    for top in ast.parse(source).body:
        card, name = cards[top.lineno], getattr(top, "name", ast.unparse(top).split(" ")[0])
        if not (name in ("train", "resolve", "run_generate", "run_look", "main")
                if card == "program" else card and name[:5] != "demo_" and
                isinstance(top, (ast.FunctionDef, ast.ClassDef, ast.Assign))):
            continue
        lines = re.compile(rb'[ (](rf?".*?")').finditer(data, *cut(top)) if name.isupper() else []
        found = {(*at.span(1), '""', "cards") for at in lines}      # a line of a pattern left out
        dead = every(*(n for n in every(top) if isinstance(n, (ast.Raise, ast.JoinedStr))))
        tests = every(*(n.test for n in every(top) if isinstance(n, ast.If) and n.body[0] in dead))
        for node in every(top) - dead:
            kind = card if card in KINDS else KINDS[node in tests]
            found |= {(*cut(node), ast.unparse(new), kind)          # of -1 only the sign
                      for new in variants(node, usual if kind == "program" else None)
                      if ast.unparse(new) != ast.unparse(node) and data[cut(node)[0] - 1] != 45}
        for i, (start, end, new, kind) in enumerate(sorted(found), 1):
            line, old = data.count(b"\n", 0, start) + 1, data[start:end].decode()
            new += "\n" * old.count("\n")           # no other line moves
            result.append(Change(f"{name}-{i}", kind, card, line, old, new, start, end))
    for tag, part in ((tag, part) for tag in test_page.CASES for part in test_page.statements(tag)):
        at = source.rindex(part, 0, source.index(f"({tag})\n"))
        line, start = source.count("\n", 0, at) + 1, len(source[:at].encode())
        result += [Change(f"{tag}-{i}", "printed", "printed", line, part, new, start,
                          start + len(part.encode()))
                   for i, new in enumerate(sorted(test_page.changes(part)), 1)]
    return result


def who_sees(source, kind="cards"):
    """Who notices a source (bytes): "golden", the name of a test, or "" for nobody."""
    first = "program checkpoint" if kind == "program" else "equations gradients"
    files = sorted((path.stem[5:] not in first, f"tests/{path.name}")
                   for path in ROOT.glob("tests/test_*.py")
                   if path.stem != "test_exercises")
    suite = ["-m", "pytest", "-xqp", "no:cacheprovider", *(name for _, name in files)]
    texts = [t.golden_file(card).read_text(encoding="utf-8") for card in t.cards()]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(
            ".git", ".venv", "__pycache__", "*.npz*"))
        Path(folder, "tinygpt.py").write_bytes(source)
        for args in filter(None, (["tinygpt.py", "demo"] * (kind != "program"), suite)):
            bounds = f'ulimit -v 4194304; ulimit -t {120 if args is suite else 20}; exec "$@"'
            played = subprocess.run(                # an endless loop comes to an end
                ["sh", "-c", bounds, "sh", sys.executable, *args], cwd=folder, capture_output=True,
                stdin=subprocess.DEVNULL, encoding="utf-8", env=os.environ | {"PYTHONUTF8": "1"})
            out, wrong = played.stdout, played.returncode != 0
            if args is not suite and (wrong or re.split(r"(?:^|\n)=== .*\n", out)[1:] != texts):
                return "golden"
            if wrong and "assert source.count(old) == 1" not in out:    # that saw the text only
                return [*re.findall("^(?:FAILED|ERROR) (\\S+)", out, re.M), "a crash or no end"][0]
    return ""


def hunt(seed, level="", first=1, last=61, folder=ROOT):
    """Write hunt-SEED.py, the book with a fault in an equation's line of these cards; its path.

    level: "hard", one golden file notices; "easy", six or more do; "", any number. Seeds that
    differ by less than 12 have no fault in common.
    """
    data, path = (ROOT / "tinygpt.py").read_bytes(), folder / f"hunt-{seed}.py"
    lines, texts = data.decode().split("\n"), [
        t.golden_file(card).read_text("utf-8") for card in t.cards()]
    some = [c for c in changes(data.decode()) if c.kind == "cards" and c.new.strip() != "pass"
            and c.card.isdigit() and first <= int(c.card) <= last and "\n" not in c.old
            and re.search(r"  #.*\(\d+\.\d+\)$", lines[c.line - 1])]
    random.Random(0).shuffle(some)
    times = Counter()                               # each line once, before one comes again
    some.sort(key=lambda c: times.update([c.line]) or times[c.line])
    some, turn = some[seed % 12::12], seed // 12 * 7
    for c in [some[(turn + i) % len(some)] for i in range(len(some))]:
        new = re.sub(r"^(1 \*|0 \+) | ([*/] 1|[-+] 0)$", "", c.new).replace("'", '"')
        copy = (data[:c.start] + new.encode() + data[c.end:]).decode().split("\n")
        code, comment = copy[c.line - 1].split("  #", 1)
        code = re.sub(r"(?<![\w.\])])\(([\w.]+)\)", r"\1", code)       # (1) * is a bare 1 *
        column = lines[c.line - 1].index("  #")     # of the comment, which is not to move
        copy[c.line - 1] = f"{code.rstrip():{column}}  #{comment}"
        path.write_text("\n".join(copy), encoding="utf-8")
        played = subprocess.run(
            ["sh", "-c", 'ulimit -t 20; exec "$@"', "sh", sys.executable, path, "demo"],
            capture_output=True, encoding="utf-8", env=os.environ | {"PYTHONUTF8": "1"})
        outs = re.split(r"(?:^|\n)=== .*\n", played.stdout)[1:]
        n = sum(map(str.__ne__, outs, texts)) if played.returncode == 0 else 0
        if n and level in ("", "hard" if n == 1 else "easy" if n > 5 else None):
            return path
    path.unlink(missing_ok=True)
    sys.exit(f"seed {seed} has no such fault: take another")


def verdict(path, answer):
    """Whether a hunt's fault is in this line, or in that of this equation; "show" shows it."""
    pairs = zip(*(file.read_text("utf-8").split("\n") for file in (ROOT / "tinygpt.py", path)))
    for i, (old, new) in enumerate(pairs, 1):
        if old != new and answer in ("show", f"{i}", *re.findall(r"\((\d+\.\d+)\)", old)):
            return f"{'Look' if answer == 'show' else 'Yes'}: line {i}\n- {old}\n+ {new}"
    return f"No, the fault is not {answer}. Go on, or end the hunt with ANSWER=show"


if __name__ == "__main__" and sys.argv[1:2] == ["hunt"]:
    seed, level, among, answer = sys.argv[2:]
    path = ROOT / f"hunt-{seed}.py" if answer else \
        hunt(int(seed), level, *map(int, among.split("-")))
    print(verdict(path, answer) if answer else f"""One line of {path.name} is wrong. Which?
  python {path.name} demo --changed
  python {path.name} gradcheck
  make hunt SEED={seed} ANSWER=...      an equation such as 38.9, or the number of a line""")
    sys.exit()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="CARD",
                        help="1 to 61, loop, program, printed; not in all: check")
    for name, n in (("--sample", 10 ** 6), ("--seed", 0), ("--jobs", 2)):
        parser.add_argument(name, type=int, default=n, metavar="N")
    options, data, seen = parser.parse_args(), (ROOT / "tinygpt.py").read_bytes(), Counter()
    chosen = [c for c in changes(data.decode())
              if options.only == c.card or not options.only and c.card != "check"]
    drawn = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    look = lambda c: who_sees(data[:c.start] + c.new.encode() + data[c.end:], c.kind) \
        if c.kind != "printed" else "test_page" * (not test_page.runs(c.id.split("-")[0], c.new))
    if options.only != "printed" and (who := who_sees(data)):
        sys.exit(f"without any change, this fails: {who}")
    with ThreadPoolExecutor(options.jobs) as pool:
        for c, who in zip(drawn := sorted(drawn, key=chosen.index), pool.map(look, drawn)):
            seen.update([c.kind, (c.kind, who), (c.kind, who > "")])
            if who != "golden":
                print(f"{c.id}: {c.old} -> {c.new.strip()}   in line {c.line}: "
                      f"{data.decode().splitlines()[c.line - 1].split('  #')[0].strip()}\n"
                      f"    {who or 'NOBODY'}", flush=True)
    for kind in filter(seen.get, KINDS):
        print(f"{kind}: {seen[kind]} changes, {seen[kind, 'golden'] / seen[kind]:.1%} seen by a "
              f"golden file, {seen[kind, True] / seen[kind]:.1%} by any test")
