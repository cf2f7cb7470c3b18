"""The book against itself: order, numbers, tags, parts of a card, shapes, cells, Markdown."""
import ast
import contextlib
import io
import re
import sys
import tokenize
import tomllib

import numpy as np
import pytest

from conftest import ROOT, changed_module

t = changed_module()                                # as it stands in the file, whatever ran before
SOURCE = (ROOT / "tinygpt.py").read_text(encoding="utf-8")
LINES = SOURCE.splitlines()
BOOK = LINES[:LINES.index("# ## The program")]
HEADS = [i for i, line in enumerate(BOOK) if re.match(r"# ###? ", line)]
SECTIONS = {a + 1: BOOK[a:b] for a, b in zip(HEADS, HEADS[1:] + [len(BOOK)])}   # by line number
CARDS = t.cards()


def test_chapters_1_to_10_and_all_cards_stand_in_order():
    heads = [BOOK[i].lstrip("# ") for i in HEADS]
    for start, number in (("Chapter ", 10), ("Exercises of chapter ", 10), ("", None)):
        found = [int(n) for head in heads for n in re.findall(rf"^{start}(\d+)\b", head)]
        assert found == list(range(1, (number or len(found)) + 1))
    kinds = "".join("n" if head[0].isdigit() else head[0] for head in heads)
    assert re.search(r"(Cn+T?E){10}A", kinds), "cards, perhaps a section more, then exercises"
    assert [card.n for card in CARDS if card.n] == found and len(found) >= 61
    assert [card.slug for card in CARDS if not card.n] == ["training"]
    for card in CARDS:
        way = f" ({card.direction})" if LINES[card.line - 1].endswith(")") else ""
        assert LINES[card.line - 1] == f"# ### {f'{card.n}. ' * (card.n > 0)}{card.title}{way}"
        for way in {name.split("_")[-1] for name in card.functions} & {"forward", "backward"}:
            assert card.direction == way, card.title


def test_the_equations_of_a_card_stand_in_its_prose_once_and_in_order():
    found = re.findall(r"^#.*?\((\d+\.\d+)\)", "\n".join(BOOK), re.M)
    assert found == [number for card in CARDS for number in card.equations]
    for card in CARDS:
        assert list(card.equations) == [f"{card.n}.{k + 1}" for k in range(len(card.equations))]
        assert all(card.equations.values()) and bool(card.equations) == bool(card.n)


def test_a_code_tag_for_each_computed_equation_and_for_no_other():
    """In its card or a later one, at the end of the line; an equation with † is not computed."""
    computed, derived, tagged = set(), set(), set()
    for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline):
        numbers = re.findall(r"\((\d+\.\d+)\)", token.string) * (token.type == tokenize.COMMENT)
        if token.start[1] == 0:
            (derived if "†" in token.string else computed).update(numbers)
        elif numbers:
            assert set(numbers) <= computed, f"line {token.start[0]}: {numbers}"
            assert re.search(r"(\(\d+\.\d+\) ?)+$", token.string), f"line {token.start[0]}"
            tagged |= set(numbers)
    assert computed == tagged


def test_each_card_has_prose_equations_code_demo_and_guard_in_this_order():
    for card in CARDS:
        text = "\n".join(SECTIONS[card.line])
        assert re.match(r"# ### .+\n#\n# \w", text), f"{card.title}: no prose"
        parts = [rf"\({number}\)" for number in card.equations] + [
            "\n# %%\n", *(rf"\n(?:def|class) {name}\b" for name in card.functions),
            rf"\ndef {card.demo}\(\):", rf'\nif __name__ == "__main__": demo\({card.demo}\)']
        at = [re.search(part, text).start() for part in parts]
        assert at == sorted(at), f"{card.title}: not in the order of the book"


def test_lines_fit_100_columns_and_docstrings_of_the_book_name_no_other_card():
    assert [i for i, line in enumerate(LINES, 1) if len(line) > 100] == []


def test_only_numpy_is_imported_and_the_header_for_script_runners_says_so():
    nodes = list(ast.walk(ast.parse(SOURCE)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"numpy"}
    block = re.match(r"# /// script\n((?:#(?: .*)?\n)+?)# ///\n", SOURCE)[1]
    header = tomllib.loads("".join(line[2:] + "\n" for line in block.splitlines()))
    assert header == {"requires-python": ">=3.11", "dependencies": ["numpy>=1.26"]}


def letters(config, B):
    """{letter: size}; N ids, windows of them, M for validation."""
    V, T, Tmax, d, H, F, L = vars(config).values()
    return dict(V=V, T=T, Tmax=Tmax, d=d, H=H, F=F, L=L, B=B, hs=d // H, N=T + 60, windows=30, M=13)


def trace(work):
    """{name of a function or class: [{local: shape} of a call]} of all calls that work() makes."""
    calls = {}

    def keep(frame, event, arg):
        if event == "return" and frame.f_code.co_filename == t.cards.__code__.co_filename:
            found = dict(frame.f_locals)
            for value in frame.f_locals.values():
                found = getattr(value, "__dict__", value if isinstance(value, dict) else {}) | found
            found = {key: x.shape for key, x in found.items() if isinstance(x, np.ndarray)}
            for name in frame.f_code.co_qualname.split("."):
                calls.setdefault(name, []).append(found)

    t.column.cache_clear(), t.causal_mask.cache_clear()
    sys.setprofile(keep)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture(scope="module", params=[t.ModelConfig(37), t.ModelConfig(23, 5, 7, 12, 4, 17, 2)])
def traced(request):
    """Sizes by letter, the default ones or all different, and the calls of a run over the book."""
    config, rng = request.param, np.random.default_rng(0)
    s = letters(config, B=16 if config.context == 16 else 6)

    def work():
        params, ids = t.init_params(config, rng, np.float64), rng.integers(0, s["V"], s["N"])
        x, y = t.make_windows(ids, s["T"], 2)
        t.split_ids(ids, 0.1)
        batches = t.iterate_batches(x, y, s["B"], rng)
        t.loss_and_grads(params, x[0], y[0], config)
        next(t.training_steps(params, batches, config, t.AdamW(params), lambda t: 0.1, 1.0))
        t.validation_loss(params, x[:1], y[:1], config)
        t.validation_loss(params, x[:s["M"]], y[:s["M"]], config)
        t.head_columns(np.zeros((s["T"], s["d"])), s["H"], 1)
        for choice in (dict(temperature=0), dict(temperature=1.0, top_k=3, top_p=0.9)):
            t.generate(params, config, ids[:s["T"]], 1, rng, **choice)

    return s, trace(work)


def confirmed(seen, claims, sizes):
    """Is each claim met in some call in which all are? Letters that are no size are free."""
    met = set()
    for shapes in seen:
        free, right = dict(sizes), {}
        for i, (names, symbols) in enumerate(claims):
            for shape in [shapes[name] for name in names if name in shapes][:1]:
                shape = shape[1:] if "H" in symbols and shape[0] == 1 else shape    # one window
                right[i] = len(shape) == len(symbols) and all(
                    n == (int(x) if x.isdigit() else free.setdefault(x, n))
                    for x, n in zip(symbols, shape))
        met |= right.keys() if all(right.values()) else set()
    return len(met) == len(claims)


def test_shapes_in_the_prose_are_those_of_a_run(traced):
    """Lines such as 'X (T, d) = (16, 32)   (3, 4)': letters, default sizes, running example."""
    s, calls = traced
    written = letters(t.ModelConfig(1), 16) | {"V": "V", "M": "M"}, letters(t.example(1).config, 2)
    shape, everywhere = r"\((\w+,|\w+(?:, \w+)+)\)", sum(calls.values(), [])
    checked = 0
    for card in (card for card in CARDS if card.n):
        own = sum((calls.get(name, []) for name in card.functions), [])
        text = "\n".join(SECTIONS[card.line]).split("\n# %%")[0]
        found = re.findall(rf"\b((?:\w+, )*\w+) {shape}(?: = {shape}(?: +{shape})?)?", text)
        for name, groups in ((name, row[1:]) for row in found for name in row[0].split(", ")):
            symbols, *sizes = (re.findall(r"\w+", group) for group in groups)
            for size, known in zip(filter(None, sizes), written):
                assert size == [f"{known.get(x, x)}" for x in symbols], (card.n, name, groups)
            seen = own if any(name in shapes for shapes in own) else everywhere
            if own and (sizes[0] or any(name in shapes for shapes in seen)):
                assert confirmed(seen, [([name], symbols)], s), (card.n, name, groups)
                checked += 1
    assert checked > 100


def test_shapes_in_the_comments_are_those_of_a_run_and_of_the_demos(traced):
    """Of the assignments that end with a comment such as '# (T, d)'."""
    s, calls = traced
    demos, claims = trace(lambda: [getattr(t, card.demo)() for card in CARDS]), {}
    for node in ast.walk(ast.parse("\n".join(BOOK))):
        if isinstance(node, ast.FunctionDef):
            for targets, comment in re.findall(
                    r"^ +([^=#\n]+?) [-+*/]?= .*  # +(\([\w, ]*\)(?:, \([\w, ]*\))*)",
                    "\n".join(BOOK[node.lineno:node.end_lineno]), re.M):
                names = re.findall(r"(\w+)(?:\[.*?\])?(?:,|$)", targets)
                shapes = [re.findall(r"\w+", shape) for shape in re.findall(r"\(.*?\)", comment)]
                claims.setdefault(node.name, []).extend(
                    [(names, *shapes)] if len(shapes) == 1 else zip([[x] for x in names], shapes))
    for function, said in claims.items():
        assert confirmed(demos.get(function, []), said, {}), (function, said)
        assert function not in calls or confirmed(calls[function], said, s), (function, said)
    assert len(claims.keys() & calls.keys()) > 30


def test_cell_by_cell_every_demo_plays_under_its_card(capsys):
    """As in a notebook: no __file__, no later cell known yet, no command line in the way."""
    space, played = {"__name__": "__main__", "get_ipython": None}, []
    for cell in re.split(r"^# %%.*$", SOURCE, flags=re.M):
        exec(compile(cell, "cell", "exec"), space)
        played.append(capsys.readouterr().out)
    assert [out for out in played if out] == [
        t.golden_file(card).read_text(encoding="utf-8") for card in CARDS]
    assert space["main"](["gradcheck", "--samples", "1"]) == 0


def strays(cell):
    """What CommonMark reads as markup in a Markdown cell, but for its headings, lists and code."""
    found, listed = [], False
    for block in re.split(r"\n(?:#\n)+", cell.strip()):
        text = re.sub("^# ?", "", block, flags=re.M)
        listed = text.startswith("- ") or listed and text.startswith("  ")
        if re.fullmatch(rf"(?: {{{6 if listed else 4}}}.*\n?)+", text):
            continue
        start = r"^- (\*\*\d+[a-z]\.\*\*)?" if listed else r"^#+ (\d+\. )?"
        text = re.sub(start, "", text, flags=re.M)
        text = re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "!", text, flags=re.S)
        found += re.findall(r"(?m)(?:^ *(?:[-+*]|1[.)])|\A *\d+[.)])(?: |$).*|^ *>.*|^ *[-=*_]+$|"
                            r"<[a-zA-Z/!?].*|\]\(.*|`.*|\$.*|&#?\w+;|~~|\\[^\w\s]", text)
        found += re.findall(r"(?s)(?:(?<!\w)\*(?=\S)|\*(?=\w)).*?(?<=\S)\*|"
                            r"(?<!\w)_(?=\S).*?(?<=\S)_(?!\w)", text)
    return found


def test_no_accidental_markup_in_a_markdown_cell():
    assert all(map(strays, ("# a *b* c", "# (a_b) _c_", "# a\n# - b", "# <unk>", "# a\n#     *b*")))
    cells = re.findall(r"^# %% \[markdown\]\n((?:#.*\n)+)", SOURCE, re.M)
    assert [stray for cell in cells for stray in strays(cell)] == []
