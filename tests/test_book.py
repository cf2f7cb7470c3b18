"""The book against itself: order, numbers, tags, stated shapes, the README's index."""
import ast
import builtins
import dis
import inspect
import io
import re
import sys
import tokenize
import tomllib
from pathlib import Path

import numpy as np
import pytest

import tinygpt as t
from conftest import GOLDEN, ROOT

SOURCE = Path(t.__file__).read_text(encoding="utf-8")
LINES = SOURCE.splitlines()
CHAPTERS = {
    "Tokenizer": "pre-tokens pair-frequency apply-merge vocabulary encode-decode",
    "Data": "split windows window-count batches",
    "Operations": "matmul linear linear-backward relu relu-backward softmax softmax-backward "
                  "cross-entropy cross-entropy-backward perplexity layernorm layernorm-derivation "
                  "layernorm-backward xavier",
    "Embeddings": "token-embedding position-embedding embedding-sum embedding-backward",
    "Attention": "qkv heads split-heads scores scaling causal-mask attention-softmax "
                 "weighted-values merge-heads output-projection attention-backward",
    "Transformer": "ffn ffn-backward block residual-backward init parameter-count model-forward "
                   "model-backward",
    "Gradient check": "central-difference relative-error check-params",
    "Optimizer": "adamw clipping schedule",
    "Training": "mini-batch step-counts validation-loss",
    "Generation": "greedy temperature top-k top-p random-choice autoregressive-loop"}
TITLES = """Pre-tokens and word counts; Pair frequency and the best pair; Applying a merge;
The vocabulary; Encode and decode; The split; Sliding windows; Window count; Shuffling and batching;
Matrix multiplication; Linear layer; Linear layer, backward; ReLU; ReLU, backward; Softmax;
Softmax, backward; Cross-entropy; Cross-entropy, backward; Perplexity; LayerNorm;
Deriving the backward formula; LayerNorm, backward; Xavier uniform initialisation; Token embedding;
Positional embedding; Embedding sum; Embedding backward; Q, K, V projections; Heads;
Splitting into heads; Scores; Scaling by sqrt(d_h); Causal mask; Softmax per row; Weighted values;
Merging heads; Output projection; Attention backward; Feed-forward network, forward;
Feed-forward network, backward; Pre-LN block, forward; Residual connections, backward;
Starting values of the parameters; Parameter count; Whole model, forward; Whole model, backward;
Central difference; Relative error; Checking every parameter; AdamW update; Gradient clipping;
Learning-rate schedule; Mini-batch loss and gradient; Step counts; Validation loss; Greedy guard;
Temperature; Top-k; Top-p; Random choice; Autoregressive loop"""
# How many equations each card has, in order
EQUATIONS = [1, 2, 1, 1, 2, 1, 4, 1, 1, 3, 1, 4, 1, 2, 3, 2, 4, 2, 1, 5, 7, 4, 3, 1, 1, 2, 3, 3, 2,
             1, 1, 1, 1, 2, 2, 1, 1, 14, 4, 7, 7, 8, 1, 2, 5, 4, 1, 1, 1, 7, 2, 3, 5, 2, 1, 1, 1, 3,
             4, 1, 3]
CARDS = t.cards()


def sections():
    """{card number: (its lines, number of its first line)}; the last one ends at the program."""
    end = LINES.index("# ## The program")
    starts = [line - 1 for *_, line, _ in CARDS] + [end]
    return {card[0]: (LINES[a:b], a + 1) for card, a, b in zip(CARDS, starts, starts[1:])}


def tags():
    """Equation numbers with their lines: defined in prose, marked as not computed, and in code."""
    prose, derived, code = [], set(), []
    for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline):
        if token.type == tokenize.COMMENT:
            found = [(number, token.start[0])
                     for number in re.findall(r"\((\d+\.\d+)\)", token.string)]
            if token.start[1] == 0:
                prose += found
                derived |= {n for n, _ in found if re.search(rf"† \({re.escape(n)}\)$",
                                                              token.string)}
            else:
                code += found
    return prose, derived, code


def test_61_cards_in_ten_chapters_in_order():
    chapters = re.findall(r"^# ## Chapter (\d+)\. (.+)$", SOURCE, re.M)
    assert chapters == [(str(i), name) for i, name in enumerate(CHAPTERS, 1)]
    headings = re.findall(r"^# ##(?: Chapter \d+\. |# \d+\. )(.+)$", SOURCE, re.M)
    titles = iter(title.strip() for title in TITLES.replace("\n", " ").split(";"))
    wanted = [heading for name, slugs in CHAPTERS.items()
              for heading in [name] + [next(titles) for _ in slugs.split()]]
    assert [re.sub(r" \((forward|backward)\)$", "", h) for h in headings] == wanted
    slugs = " ".join(CHAPTERS.values()).split()
    assert [(n, slug) for n, slug, *_ in CARDS] == list(enumerate(slugs, 1))


def test_every_heading_says_its_direction():
    backward = {12, 14, 16, 18, 21, 22, 27, 38, 40, 42, 46}
    neither = {1, 2, 3, 4, 5, 6, 7, 8, 9, 19, 23, 43, 44, *range(47, 62)}
    for n, _, _, direction, *_ in CARDS:
        assert direction == ("backward" if n in backward else "" if n in neither else "forward"), n


def test_every_equation_stands_once_in_the_prose_of_its_card():
    prose, _, _ = tags()
    numbers = [number for number, _ in prose]
    assert len(numbers) == len(set(numbers)) == sum(EQUATIONS) == 166
    assert set(numbers) == {f"{n}.{k}" for n, count in enumerate(EQUATIONS, 1)
                            for k in range(1, count + 1)}
    for number, line in prose:
        lines, first = sections()[int(number.split(".")[0])]
        assert first <= line < first + len(lines), f"{number} stands in another card"
        assert LINES[line - 1].endswith(f"({number})"), f"{number} is not at the end of its line"


def test_a_code_tag_for_each_computed_equation_and_for_no_other():
    prose, derived, code = tags()
    assert {n for n, _ in code} == {n for n, _ in prose} - derived
    for number, line in code:
        assert re.search(r"(\(\d+\.\d+\),? ?)+(, .*)?$", LINES[line - 1]), f"line {line}"


def test_each_section_has_prose_equations_shapes_code_demo_and_guard():
    for n, slug, *_ in CARDS:
        lines, _ = sections()[n]
        text = "\n".join(lines)
        name = f"demo_{slug.replace('-', '_')}"
        order = [text.index(f"({n}.1)"), text.index("# Shapes"), text.index("\n# %%\n"),
                 text.index(f"def {name}():"),
                 text.index(f'if __name__ == "__main__": demo({name})')]
        assert order == sorted(order), f"card {n} is not in the order of the template"
        assert sum(line.startswith("# ") for line in lines) >= 8, f"card {n} has little prose"


def test_lines_are_at_most_100_columns_wide():
    assert [i for i, line in enumerate(LINES, 1) if len(line) > 100] == []


def test_public_functions_have_docstrings_that_name_a_card_of_their_section():
    for n, _, _, _, functions, *_ in CARDS:
        for name in functions.split(", ") if functions else []:
            doc = inspect.getdoc(getattr(t, name)) or ""
            named = {int(x) for a, b in re.findall(r"cards? (\d+)(?: (?:to|and) (\d+))?", doc)
                     for x in (a, b) if x} if doc else set()
            assert doc, f"{name} has no docstring"
            assert not named or min(named) <= n <= max(named) or name == "Tokenizer", (name, named)


def test_imports_are_the_standard_library_and_numpy():
    names = {alias.name.split(".")[0] for node in ast.walk(ast.parse(SOURCE))
             if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module.split(".")[0] for node in ast.walk(ast.parse(SOURCE))
              if isinstance(node, ast.ImportFrom)}
    assert names - set(sys.stdlib_module_names) == {"numpy"}


def test_the_header_for_script_runners_is_toml():
    """As its specification reads it: the lines between /// script and ///, without their '# '."""
    block = re.match(r"# /// script\n((?:#(?: .*)?\n)+?)# ///\n", SOURCE)[1]
    header = tomllib.loads("".join(line[2:] + "\n" for line in block.splitlines()))
    assert header == {"requires-python": ">=3.11", "dependencies": ["numpy>=1.26"]}


def test_every_global_name_exists():
    """What only a rare branch uses is imported and spelled right too."""
    def codes(code):
        yield code
        for const in code.co_consts:
            if inspect.iscode(const):
                yield from codes(const)
    steps = [(step.opname, step.argval) for code in codes(compile(SOURCE, "tinygpt.py", "exec"))
             for step in dis.get_instructions(code)]
    used = {name for opname, name in steps if opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    made = {name for opname, name in steps if opname == "STORE_NAME"}
    known = {*vars(t), *made, *dir(builtins)}
    assert used - known <= {"__name__", "__annotations__"} and "shutil" in used


# ---- shapes -----------------------------------------------------------------------------------

SIZES = {"default": dict(V=37, T=16, Tmax=32, d=32, H=2, F=128, L=2, B=16),
         "all different": dict(V=23, T=5, Tmax=7, d=12, H=4, F=17, L=2, B=6)}


@pytest.fixture(scope="module", params=SIZES)
def traced(request):
    """sizes, and {function: [locals of a call: {name: shape}]} of one run over every function."""
    s = dict(SIZES[request.param])
    s["dh"] = s["d"] // s["H"]
    config = t.ModelConfig(s["V"], s["T"], s["Tmax"], s["d"], s["H"], s["F"], s["L"])
    params = t.init_params(config, np.random.default_rng(0), np.float64)
    ids = np.random.default_rng(1).integers(0, s["V"], s["T"] + 60)
    calls = {}

    def trace(frame, event, arg):
        if event == "return" and frame.f_code.co_filename == t.__file__:
            shapes = {}
            for name, value in frame.f_locals.items():
                for key, array in (value.items() if isinstance(value, dict) else [(name, value)]):
                    if isinstance(array, np.ndarray):
                        shapes[key] = array.shape
            owner = frame.f_locals.get("self")
            function = type(owner).__name__ if owner is not None else frame.f_code.co_name
            calls.setdefault(function, []).append(shapes)

    t.later_keys.cache_clear()
    sys.setprofile(trace)
    try:
        x, y = t.make_windows(ids, s["T"], 2)
        s["N"], s["W"] = len(ids), len(x)
        t.split_ids(ids, 0.1)
        xb, yb = next(t.iterate_batches(x, y, s["B"], np.random.default_rng(2)))
        _, grads = t.loss_and_grads(params, x[0], y[0], config)
        t.batch_loss_and_grads(params, xb, yb, config)
        t.validation_loss(params, x, y, config)
        t.clip_grad_norm(grads, 1.0)
        t.AdamW(params).step(params, grads, 0.01)
        t.head_columns(np.zeros((s["T"], s["d"])), s["H"], 1)
        t.xavier_uniform(np.random.default_rng(0), s["d"], s["F"])
        t.init_params(config, np.random.default_rng(0))
        t.generate(params, config, ids[:s["T"]], 1, np.random.default_rng(0), 1.0, 3, 0.9)
    finally:
        sys.setprofile(None)
    return request.param, s, calls


def stated(lines):
    """[(name, symbols, sizes)] of the shape lines '#     X (T, d) = (16, 32)'."""
    found = []
    for line in lines:
        if match := re.match(r"#     (\w+) \(([^()]*)\) = \(([^()]*)\)", line):
            found.append((match[1], *(tuple(part.strip() for part in group.split(",") if
                                            part.strip()) for group in match.groups()[1:])))
    return found


def test_shapes_in_the_prose_are_those_of_a_run(traced):
    which, s, calls = traced
    count = 0
    for n, _, _, _, functions, *_ in CARDS:
        seen = [shapes for f in functions.split(", ") for shapes in calls.get(f, [])]
        for name, symbols, sizes in stated(sections()[n][0]):
            wanted = tuple(1 if symbol == "1" else s[symbol] for symbol in symbols)
            if which == "default":
                written = tuple(s[size] if size in s else int(size) for size in sizes)
                assert written == wanted, f"card {n}: {name} {symbols} = {sizes}"
            assert any(shapes.get(name) == wanted for shapes in seen), \
                f"card {n}: no {name} of shape {symbols} = {wanted} in {functions}"
            count += 1
    assert count > 100


def comments():
    """{function: [(local, symbols)]} of the lines of code that end with a shape."""
    found, tree = {}, ast.parse(SOURCE)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(("demo_", "example")):
            for line in LINES[node.lineno:node.end_lineno]:
                if match := re.match(r"\s+(\w+) (?:[-+*/]?=) .*#\s+\(([A-Za-z, 1]+)\)", line):
                    symbols = tuple(p.strip() for p in match[2].split(",") if p.strip())
                    if all(re.fullmatch(r"\w+", symbol) for symbol in symbols):
                        found.setdefault(node.name, []).append((match[1], symbols))
    return found


def fits(shapes, comments, sizes):
    """Do the locals of a call have the commented shapes? Letters that are no size are free."""
    free = {}
    for name, symbols in comments:
        if name not in shapes:
            continue
        if len(shapes[name]) != len(symbols):
            return False
        for symbol, size in zip(symbols, shapes[name]):
            want = 1 if symbol == "1" else sizes.get(symbol) or free.setdefault(symbol, size)
            if want != size:
                return False
    return any(name in shapes for name, _ in comments)


def test_shapes_in_the_comments_are_those_of_a_run(traced):
    _, s, calls = traced
    checked = 0
    for function, lines in comments().items():
        owner = {"step": "AdamW"}.get(function, function)
        if owner in calls:
            assert any(fits(shapes, lines, s) for shapes in calls[owner]), (function, lines)
            checked += len(lines)
    assert checked > 60


def test_the_shape_tests_can_fail():
    assert not fits({"X": (3, 4)}, [("X", ("d", "T"))], {"T": 3, "d": 4})
    assert fits({"X": (3, 4)}, [("X", ("T", "d"))], {"T": 3, "d": 4})
    assert not fits({"X": (3, 4), "Y": (5, 3)}, [("X", ("a", "c")), ("Y", ("c", "a"))], {})


# ---- golden files and README ------------------------------------------------------------------

def test_a_golden_file_for_each_card_and_no_other():
    wanted = [f"{n:02d}-{slug}.txt" for n, slug, *_ in CARDS] + ["training.txt"]
    assert sorted(path.name for path in GOLDEN.iterdir()) == wanted


def test_the_card_index_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| (\d+) \| \[(.+?)\]\((.+?)\) \|(.*?)(?=\|)", readme)
    rows = sorted(((n, title, path, names.strip()) for n, title, path, names in rows),
                  key=lambda row: int(row[0]))
    assert rows == [(str(n), title, f"golden/{n:02d}-{slug}.txt",
                     ", ".join(f"`{f}`" for f in functions.split(", ") if f))
                    for n, slug, title, _, functions, *_ in CARDS]


# ---- as a notebook ----------------------------------------------------------------------------

def test_cell_by_cell_every_demo_plays_under_its_card(capsys):
    """As in a notebook: no __file__, no later cell known yet, no command line in the way."""
    space = {"__name__": "__main__", "get_ipython": None}
    played = []
    for cell in re.split(r"^# %%.*$", SOURCE, flags=re.M):
        module = type(sys)("__main__")              # dataclasses look their module up
        real, sys.modules["__main__"] = sys.modules["__main__"], module
        try:
            exec(compile(cell, "cell", "exec"), space)
        finally:
            sys.modules["__main__"] = real
        played.append(capsys.readouterr().out)
    golden = [path.read_text(encoding="utf-8") for path in sorted(GOLDEN.glob("[0-9]*.txt"))]
    assert [out for out in played if out] == golden
