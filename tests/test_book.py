"""The book against itself, and what the README claims of it and of the corpus."""
import ast, contextlib, io, re, shlex, shutil, subprocess, sys, tokenize, tomllib
from collections import Counter

import numpy as np
import pytest

from conftest import GOLDEN, ROOT, changed_module, plain_environment, run_process, watch

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


def test_lines_fit_100_columns():
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

    def keep(names, found):
        for value in [*found.values()]:
            found = getattr(value, "__dict__", value if isinstance(value, dict) else {}) | found
        found = {key: x.shape for key, x in found.items() if isinstance(x, np.ndarray)}
        for name in names:
            calls.setdefault(name, []).append(found)

    t.column.cache_clear(), t.causal_mask.cache_clear()
    with contextlib.redirect_stdout(io.StringIO()):
        watch(keep, work)
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


# ---- the README and the corpus ------------------------------------------------------------------
README = (ROOT / "README.md").read_text(encoding="utf-8")
CORPUS = (ROOT / "corpus.txt").read_text(encoding="utf-8")
STORIES = [story.split("\n") for story in CORPUS.strip().split("\n\n")]


def test_the_corpus_is_as_large_as_the_readme_says_and_plain_text_of_stories_of_their_own():
    words = set(re.findall(r"[a-z]+", CORPUS.lower()))
    counted = {"short stories": len(STORIES), "KB": round(len(CORPUS.encode()) / 1000),
               "different words": len(words)}
    said = re.search(r"`corpus\.txt` \((.*?)\)", README, re.S)[1].replace("a thousand", "1,000")
    for about, number, unit in re.findall(
            r"(about )?([\d,]+)\s(short\sstories|KB|different\swords)", said):
        near = 0.1 if about else 0
        assert counted.pop(" ".join(unit.split())) == pytest.approx(
            int(number.replace(",", "")), rel=near)
    assert not counted, "the README says all three"
    assert set(CORPUS) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,?!'\"-\n")
    assert CORPUS.endswith((".\n", '"\n')) and "\n\n\n" not in CORPUS and "  " not in CORPUS
    titles = [title for title, *_ in STORIES]
    assert len(set(titles)) == len(titles) and not any(title[-1] in ".?!" for title in titles)
    assert all(len("\n".join(story)) > 600 for story in STORIES)
    sentences = Counter(sentence.strip(' "') for story in STORIES for line in story
                        for sentence in re.split(r'(?<=[.!?]"|.[.!?]) (?=["A-Z])', line))
    assert {s: n for s, n in sentences.items() if n > 3} == {}


def test_training_begins_with_the_numbers_the_readme_shows(tmp_path):
    printed = run_process("train", "--steps", 1, "--out", tmp_path / "model.npz").stderr
    shown = re.findall(r"[\d,]+ (?:characters|of [\d,]+ tokens|training windows|validation windows|"
                       r"parameters|steps per epoch)\b", " ".join(README.split()))
    assert shown and [text for text in shown if text not in printed] == []


def test_the_change_shown_in_the_readme_makes_the_difference_shown(tmp_path):
    changed, count = re.subn(r"\n    S /= math\.sqrt\(Qh\.shape\[-1\]\).*\(32\.1\)", "", SOURCE)
    assert count == 1
    (tmp_path / "tinygpt.py").write_text(changed, encoding="utf-8")
    shutil.copytree(GOLDEN, tmp_path / "golden")
    played = subprocess.run([sys.executable, "tinygpt.py", "demo", "--changed"], cwd=tmp_path,
                            capture_output=True, env=plain_environment(PYTHONUTF8="1"))
    printed, shown = (re.sub(r"of \d+", "of", text).splitlines() for text in (
        played.stdout.decode(), re.search(r"```diff\n(.*?)```", README, re.S)[1]))
    rest = iter(printed)                            # '...' stands for anything
    for line in shown:
        pattern = re.escape(line).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, text) for text in rest), line
    assert len(shown) > 4


def test_the_commands_and_options_of_the_readme_exist():
    text, parser = README.replace("\\\n", " "), t.build_parser()
    for command in re.findall(r"python tinygpt\.py((?: [^`\n]*)?)", text):
        parser.parse_args(shlex.split(command))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^    )make (\w+)", text, re.M):
        assert re.search(rf"^(?:[\w ]+ )?{target}\b[\w ]*:", makefile, re.M), target
    known = {option for command in parser._subparsers._group_actions[0].choices.values()
             for option in command._option_string_actions}
    assert set(re.findall(r"`(--[\w-]+)", text)) <= known


def test_the_card_index_of_the_readme():
    """Each card once, with its golden file; functions that help the main ones may be left out."""
    cards = {card.n: card for card in t.cards() if card.n}
    rows = re.findall(r"\| (\d+) \| \[(.+?)\]\(golden/(.+?)\) \|(.*?)(?=\|)", README)
    assert sorted(int(n) for n, *_ in rows) == list(cards)
    for card, title, path, functions in ((cards[int(n)], *row) for n, *row in rows):
        assert (title, path) == (card.title, t.golden_file(card).name)
        named = re.findall(r"`(\w+)`", functions)
        assert set(named) <= set(card.functions) and bool(named) == bool(card.functions)
    evenings = re.findall(r"^\| \d \| (\d+) to (\d+),", README, re.M)
    assert [n for a, b in evenings for n in range(int(a), int(b) + 1)] == list(cards)


def test_the_parameters_of_the_table_for_pytorch_are_those_of_a_model():
    table = README.split("with nanoGPT's names")[1].split("nanoGPT itself")[0]
    named = set()
    for row in re.findall(r"^\| `.*", table, re.M):
        for ours in row.strip("|").split("|")[::2]:
            block = "block0." * ("block0." in ours)
            named |= {block + name.removeprefix(block) for name in re.findall(r"`(.+?)`", ours)}
    assert named == set(t.param_shapes(t.ModelConfig(9, layers=1)))
