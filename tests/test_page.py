"""The book as a page: whole, and its printed equations held to the code by running them."""
import itertools, math, re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import tinygpt as t
from conftest import run, watch

CARDS = t.cards()
FORMULAS = {tag: text for card in CARDS for tag, text in card.equations.items()}
COMPUTED = {tag for card in CARDS for *_, tags in card.tagged for tag in tags}

# ---- printed equations that are run -----------------------------------------------------------

LEFT_OUT = {
    "1.1 2.1 59.3": "a set", "3.1 4.1 7.1 43.1 45.1 53.1": "no equation but a list or a rule",
    "2.2 5.1 5.2 27.2 58.1 59.1": "words", "23.2 60.1 61.3": "a random draw",
    "59.2 59.4": "dots", "24.1 25.1 29.2": "says how an array is cut", "49.1": "a random choice",
    "45.2 46.1 46.2 46.3 46.4": "the order of the parts", "53.2 53.3": "a loop in time",
    "50.1 50.2 50.3 50.4 50.5 50.6 50.7": "the code changes these arrays in place"}
REDUCE = {"∑": sum, "max": max, "argmax": np.argmax, "mean": np.mean}


def spelled(tree):
    """The name that a tree spells, such as Xhat, fan_in, steps_per_epoch, ‖g‖ or p'; else ''."""
    if isinstance(tree, str):
        return tree
    kind, *names = tree[0], *map(spelled, tree[1:])
    if kind == "msub" and all(names) or kind == "msup" and names[1][:1] == "'":
        return names[0] + "_" * (kind == "msub") + names[1]
    if kind == "mover":
        return names[0] + {"^": "hat", "¯": "bar"}[names[1]]
    return "".join(names) if kind == "‖‖" or kind in ("row", "$x") and len(names) == 1 else ""


def split_at(row, *signs):
    """The items of a row, cut at these signs, as rows."""
    parts = [("row",)]
    for item in row[1:]:
        parts[-1:] = [parts[-1], ("row",)] if item in signs else [(*parts[-1], item)]
    return parts


def times(a, b):
    """Of numbers, of matrices, of stacks of matrices."""
    if np.ndim(a) == 3:
        return np.array([times(*pair) for pair in zip(a, b, strict=True)])
    if () in (np.shape(a), np.shape(b)):
        return a * b
    assert np.ndim(a) == np.ndim(b) == 2 and a.shape[1] == len(b)
    return np.array([[sum(a[i, k] * b[k, j] for k in range(len(b))) for j in range(b.shape[1])]
                     for i in range(len(a))])


OPERATIONS = {"=": lambda a, b: a == b, "<": lambda a, b: a < b, ">": lambda a, b: a > b,
              "≤": lambda a, b: a <= b, "≥": lambda a, b: a >= b, "\u2062": times, "·": times,
              "⊙": lambda a, b: a * b}


def called(function, row, env):
    """A sum or the like over its index from 0 or 1 on, or a function of what it is given."""
    if function[0] not in ("munder", "msub") or function[1] not in REDUCE:
        given = value(row, env)
        return value(function, env)(*given if "," in row else [given])
    letter, found = spelled(function[2]), []
    for n in range(50 * (f"'{letter}'" in str(row))):
        try:
            found.append(value(row, {**env, letter: n}))
        except (IndexError, KeyError):
            if n or found:
                break
    return REDUCE[function[1]](found) if found else [][0]


def row_value(row, env):
    """Of words, signs and factors; the loosest first."""
    of = lambda part: value(part, env)
    if " if " in row:
        first, condition, other = split_at(row, " if ", " else ")
        return of(first if of(condition) else other)
    if ":" in row:
        return slice(*(of(side) if len(side) > 1 else None for side in split_at(row, ":")))
    if "," in row:
        return [of(part) for part in split_at(row, ",")]
    if sign := {*"=<>≤≥"} & {*row}:
        return OPERATIONS[min(sign)](*map(of, split_at(row, *sign)))
    if {"+", "-"} & {*row}:
        *before, sign, last = row
        a, b = of(tuple(before)) if before[1:] else 0, of(last) * (-1 if sign == "-" else 1)
        assert () in (np.shape(a), np.shape(b)) or np.shape(a) == np.shape(b)
        return a + b
    first, *rest = row[1:]
    if not rest:
        return of(first)
    if first[0] in ("munder", "msub") and first[1] in REDUCE or callable(env.get(spelled(first))):
        return called(first, ("row", *rest[1:]), env)
    return OPERATIONS[rest[0]](of(first), of(("row", *rest[1:])))


def value(tree, env):
    """What a formula comes to, with loops over its indices; env has the names."""
    if spelled(tree) in env:
        return env[spelled(tree)]
    if isinstance(tree, str):
        return math.inf if tree == "∞" else float(tree)
    kind, first, *others = tree
    if kind in ("row", "$x"):
        return row_value(tree, env)
    if kind == "()":
        inner = value(others[0], env)
        return {"|": abs, "⌊": lambda x: math.floor(x + 1e-9), "⌈": math.ceil}.get(
            first, lambda x: x)(inner)
    if kind == "call" and (others[0][1] == "(" or first == "1"):
        return called(first, others[0][2], env) if first != "1" else value(others[0][2], env) * 1.0
    prime = others[-1] if others and others[-1] in ("'", "''") else ""      # p'_i
    array = value(first + prime if prime else first, env)
    if kind == "msqrt":
        return np.sqrt(array)
    if others and others[0] == "ᵀ":
        return np.swapaxes(array, -1, -2) if np.ndim(array) > 1 else array[None]
    if kind in ("mfrac", "msup"):
        return array / value(others[0], env) if kind == "mfrac" else array ** value(others[0], env)
    index = others[0][2] if kind == "call" else others[0]
    for one in split_at(index, ",") if "," in index else [index] if kind == "call" or \
            {"+", "-"} & {*index} else [("row", item) for item in index[1:]]:
        at = value(one, env)
        at = int(at) if isinstance(at, float) and at == int(at) else at
        array = array[at] if not isinstance(at, int) or at >= 0 else [][0]
    return array ** value(others[1], env) if kind == "msubsup" and not prime else array


def same(a, b):
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    b = b[0] if np.ndim(b) == 2 and len(b) == 1 else b      # 1ᵀ X
    return np.shape(b) in ((), np.shape(a)) and bool(np.allclose(a, b, rtol=1e-9, atol=1e-11))


def holds(part, env, after):
    """Is a printed equation true of these arrays, for each value of the indices on its left?"""
    row = t.Formula(part).tree
    left, *rights = split_at(row, "=", "←")
    rights = [("row", *row[len(left) + 1:])] if " if " in row else rights
    letters = {*re.findall(r"'([^\W\d])'", str(left))} - {
        *env, *re.findall(r"'∑', \('row', '(\w)'", str(left))}

    def size(letter):
        """How many values a letter has, the others being 0."""
        for n in range(50):
            try:
                value(left, {**env, **after, **dict.fromkeys(letters, 0), letter: n})
            except (IndexError, KeyError):
                return n

    sizes = [range(size(letter)) for letter in letters]
    return all(sizes) and all(
        same(value(left, {**env, **after, **now}), value(right, {**env, **now}))
        for at in itertools.product(*sizes) for now in [dict(zip(letters, at))]
        for right in rights if "..." not in str(right))


def cases():
    """{tag: [(names, names replaced)]} for the printed equations, from runs of the cards' code."""
    rng, ids, y = np.random.default_rng(5), np.array([3, 7, 3, 0, 9]), np.array([1, 4, 10, 4, 2])
    config = t.ModelConfig(11, context=5, max_context=7, width=6, heads=3, hidden=8, layers=2)
    params = {name: rng.normal(size=shape) for name, shape in t.param_shapes(config).items()}
    stream, x, logits = np.arange(40, 61) ** 2, rng.random(4), rng.normal(size=6)
    g, p = [rng.normal(size=3), rng.normal(size=2)], np.array([0.1, 0.3, 0.25, 0.05, 0.2, 0.1])
    clipped = {i: one.copy() for i, one in enumerate(g)}

    def work():
        t.loss_and_grads(params, ids, y, config)
        t.split_ids(stream, 0.3), t.make_windows(stream, 5, 3), t.xavier_uniform(rng, 4, 7)
        t.softmax_forward(logits), t.numerical_grad(lambda x: float((x ** 3).sum()), x, 1e-3)
        t.relative_error(3.0, -4.0), t.step_counts(17, 5, 3), t.head_size(6, 3)
        t.keep_top_k(p, 3), t.clip_grad_norm(clipped, 0.7), t.lr_schedule(9, 0.02, 0.003, 4, 16)

    seen = {}                                       # {function: its locals when it last returned}
    watch(lambda names, found: seen.update({names[-1]: {
        k: x.copy() if isinstance(x, np.ndarray) else x for k, x in found.items()}}), work)
    rate = lambda step: t.lr_schedule(step, 0.02, 0.003, 4, 16)
    a, b, out = (seen[name] for name in ("block_forward", "block_backward", "forward"))
    norm = lambda W, n: lambda X: t.layer_norm_forward(X, W[f"ln{n}_g"], W[f"ln{n}_b"])[0]
    norm_back = lambda n: lambda d: t.layer_norm_backward(d, b["cache"][f"ln{n}"])[0]
    windows = rng.integers(0, 11, (2, 3, 5))
    losses = {i + 1: t.loss_and_grads(params, *windows[:, i], config)[0] for i in range(3)}
    split = lambda M, H: np.array([[[M[i, int(h * 2 + c)] for c in range(2)] for i in range(5)]
                                   for h in range(int(H))])
    softmax = lambda S: np.exp(S) / np.array([[sum(map(math.exp, row))] for row in np.atleast_2d(S)]
                                             ).reshape(*np.shape(S)[:-1], 1)
    base = {"exp": np.exp, "log": np.log, "cos": math.cos, "max": max, "π": math.pi, "ε": t.EPS,
            "ReLU": lambda Z: np.where(Z > 0, Z, 0), "softmax": softmax, "split": split,
            "merge": lambda M: np.array([[M[c // 2][i, c % 2] for c in range(6)]
                                         for i in range(5)]), "T": 5, "d": 6, "H": 3, "hs": 2}
    greek = {"gamma": "γ", "beta": "β", "mu": "μ", "dgamma": "dγ", "dbeta": "dβ", "dwo": "dWo"}
    block = {"wq": "Wq", "wk": "Wk", "wv": "Wv", "wo": "Wo", "ff1_w": "W1", "ff1_b": "b1",
             "ff2_w": "W2", "ff2_b": "b2"}
    column = lambda *names: lambda e: {name: e[name][:, 0] for name in names}
    attention = {**seen["attention_forward"], "QK": seen["scores"]["QK"]}
    # card: what its equations name that its code does not, or by another name
    special = {
        6: {"ρ": 0.3, "N": 21}, 7: lambda e: {"start": 3, **{k: {3: e[k][1]} for k in "xy"}},
        8: {"windows": t.window_count(21, 5, 3), "N": 21, "stride": 3},
        16: lambda e: {k: e[k][1, 3] for k in ("dz", "dp", "p")},
        18: {"onehot": lambda y: np.eye(11)[y]}, 19: {"loss": 1.7, "perplexity": t.perplexity(1.7)},
        20: lambda e: {"σ": np.sqrt(e["variance"][:, 0]), **column("s", "μ")(e)}, 22: column("s"),
        26: {"E": params["tok_emb"], "Pos": params["pos_emb"],
             "X": lambda l: t.embed_forward(params, ids)},
        27: lambda e: {"dX": lambda l: e["dX0"], "dPos": e["d_pos_emb"]},
        **dict.fromkeys((30, 31, 32, 33, 35, 36), attention),
        34: lambda e: attention | {"S": e["S"]},
        38: lambda e: {"dM": dict(zip("qkv", (e["dQ"], e["dK"], e["dV"]))), "dW": {
            r: e[f"dw{r}"] for r in "qkv"}, "db": {r: e[f"db{r}"] for r in "qkv"}},
        41: {"LN1": norm(a["block"], 1), "LN2": norm(a["block"], 2),
             "Attention": lambda X: t.attention_forward(X, a["block"], 3, 5)[0],
             "FFN": lambda X: t.ffn_forward(X, a["block"])[0]},
        42: {"LN1_back": norm_back(1), "LN2_back": norm_back(2), "FFN_back":
             lambda d: t.ffn_backward(d, b["cache"]["ffn"], b["block"])[0], "Attention_back":
             lambda d: t.attention_backward(d, b["cache"]["attention"], b["block"])[0]},
        45: {"LNf": norm(params, "f"), "X": lambda l: out["X"], "L": 2, "Whead": params["head_w"],
             "bhead": params["head_b"]},
        47: {"δ": np.eye(4)}, 48: {"rel": t.relative_error, "ε": 1e-8},
        51: lambda e: {"g": g, "‖g‖": e["norm"], "c": 0.7}, 52: {
            "η": rate, "ηmax": 0.02, "ηmin": 0.003, "t_warm": 4, "t_total": 16},
        54: {"B": 5}, 55: {"val_loss": t.validation_loss(params, *windows, config), "M": 3,
                           "loss": losses},
        56: {"next": t.greedy(logits), "logits": logits}, 57: {
            "τ": 0.7, "logits": logits, "p": t.temperature_softmax(logits, 0.7)},
        58: lambda e: {"p'": e["kept"], "p''": t.keep_top_k(p, 3)},
        61: {"ids": [5, 1, 7, 2, 2, 9, 4], "context": 5, "x": [7, 2, 2, 9, 4],
             "forward": lambda x: t.forward(params, x, config)[0],
             "logits": t.forward(params, [7, 2, 2, 9, 4], config)[0][-1]}}
    found, flat = {}, lambda e: {k: v[0] if getattr(v, "ndim", 0) == 4 else v for k, v in e.items()}
    for card in CARDS:
        env = {**base, **{k: v for f in card.functions for k, v in seen.get(f, {}).items()}}
        env |= {"1": np.ones((5, 1))} if card.n in (11, 28, 37, 38, 39, 40, 45) else {}
        env |= {block.get(k, k): v for k, v in env.get("block", {}).items()} if card.n < 41 else {}
        env = flat({**env, **{new: env[old] for old, new in greek.items() if old in env}})
        more = special.get(card.n, {})
        env = flat(env | (more(env) if callable(more) else more))
        after = {33: {"S": seen["attention_weights"]["S"][0]}, 51: {"g": clipped}}.get(card.n, {})
        for tag in sorted({*card.equations} & COMPUTED - {*" ".join(LEFT_OUT).split()}):
            each = [env]
            if card.n in (31, 32, 33, 34, 35) or tag == "38.6":         # head by head
                each = [{k: v[h] if getattr(v, "ndim", 0) == 3 else v for k, v in env.items()}
                        for h in range(3)]
            elif tag in ("38.11", "38.12"):
                each = [env | {"r": r} for r in "qkv"]
            elif card.n == 52:
                each = [env | {"t": step} for step in ((1, 4) if tag == "52.1" else (9,))]
            found[tag] = [(one, {k: v[h] if k == "S" else v for k, v in after.items()})
                          for h, one in enumerate(each)]
    return found


CASES = cases()


def statements(tag):
    """The parts of a printed equation that say that something equals something."""
    parts = [part.strip("⇒ ,") for part in re.split(" {2,}(?![=-])(?<!= )", FORMULAS[tag])]
    return [re.sub(" {2,}only.*", "", part) for part in parts if re.search("[=←]", part)
            and not re.search(r"^\w = [\w-]+, \.{3}, |^\w+ mod", part)]


def runs(tag, part):
    try:
        with np.errstate(all="ignore"):
            return all(holds(part, *case) for case in CASES[tag])
    except Exception:                                       # it makes no sense
        return False


@pytest.mark.parametrize("tag", CASES)
def test_a_printed_equation_is_what_the_code_computes(tag):
    assert statements(tag)
    for part in statements(tag):
        assert all(holds(part, *case) for case in CASES[tag]), part


def test_every_computed_equation_is_run_or_left_out_with_a_reason():
    left_out = {*" ".join(LEFT_OUT).split()}
    assert {*CASES} | left_out == COMPUTED and not {*CASES} & left_out and len(CASES) >= 90


def changes(text):
    """The formula with one place changed: a sign, an index, a transpose, a factor."""
    swap = {"+": "-", "-": "+", "ᵀ": "", "²": "", "√": "", " / ": " · ", " · ": " / "}
    indices = sorted({*"".join(re.findall(r"_([cijktv]+)(?![a-z])", text))})
    rules = [(r"(?<= )[-+](?= )|(?<!\S)-(?=\S)|[ᵀ²√]| [·/] ", lambda old: [swap[old]]),
             (r"(?:(?<=_)|(?<=_[cijktv]))[cijktv](?=[cijktv]*(?![a-z]))", lambda old: indices),
             (r"\bd?[A-Z][a-z]?(?![\w(\[²ᵀ'])", lambda old: [f"{old}ᵀ"]),
             (r"(?<![\w.])\d+(?![\w.])", lambda old: [f"{int(old) + 1}"]),
             (r"(?<=[ (])\w+ (?=[\w(√∑])", lambda old: [""])]
    return {text[:m.start()] + new + text[m.end():] for rule, news in rules
            for m in re.finditer(rule, text) for new in news(m[0])} - {text}


def test_an_error_in_one_place_of_an_equation_is_noticed():
    tried = [(tag, new) for tag in CASES for part in statements(tag) for new in changes(part)]
    missed = [(tag, new) for tag, new in tried if runs(tag, new)]
    assert len(tried) > 400 and len(missed) < 0.05 * len(tried), missed


# ---- the page ---------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "book.html"
    result = run("book", "--out", path)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (0, "", 1)
    return path.read_text(encoding="utf-8")


def elements(page, *names):
    return [one for one in ET.fromstring(page).iter() if one.tag in names]


def test_the_page_is_well_formed_and_asks_for_nothing_outside_itself(page):
    assert len(page) < 1_500_000 and not re.search(r"(?:src|href)=\"[^#]|url\(|@import|://", page)
    levels = [int(one.tag[1]) for one in elements(page, "h1", "h2", "h3")]
    assert levels[0] == 1 == levels.count(1)
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:]))
    assert len(elements(page, "main")) == len(elements(page, "nav")) == 1


def test_each_place_has_one_name_and_each_link_leads_to_one(page):
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len({*ids})
    assert {*re.findall(r'href="#([^"]+)"', page)} <= {*ids}
    assert {f"eq-{tag}" for tag in FORMULAS} | {f"code-{tag}" for tag in COMPUTED} <= {*ids}
    assert {f"card-{card.n}" for card in CARDS if card.n} <= {*ids}


def test_each_demo_prints_on_the_page_what_its_golden_file_holds(page):
    printed = ["".join(one.itertext()) for one in elements(page, "samp")]
    assert printed == [t.golden_file(card).read_text(encoding="utf-8") for card in CARDS]


def test_formulas_carry_their_source_and_drawings_a_text(page):
    assert all(one.get("alttext") for one in elements(page, "math"))
    drawings = [one for one in elements(page, "pre") if "─" in (one.text or "")]
    assert drawings and all(one.get("aria-label") for one in drawings)
    assert {one.get("intent") for one in ET.fromstring(page).iter()} == {
        None, "transpose", "norm($x)"}


@pytest.mark.parametrize("name", ["page"])
def test_chosen_equations_as_mathml_and_latex(name, golden, page):
    shown = []
    for tag in "4.1 10.1 13.1 15.1 15.3 20.2 21.4 22.2 38.9 44.1 50.5 51.1 58.3".split():
        mathml, latex = t.equation(FORMULAS[tag])
        assert re.search(rf'id="eq-{re.escape(tag)}".*?<div>(.*?)</div>', page)[1] == mathml
        shown.append(f"{tag}\n{mathml}\n{latex}\n".replace("<mrow>", "\n<mrow>"))
    assert "\n".join(shown) == golden


@pytest.mark.parametrize("text", ["a + * b", "(a", "x_tj)", "1 / ", "√", "p = ,+"])
def test_a_formula_that_is_not_understood_names_its_line(text, tmp_path, monkeypatch):
    monkeypatch.setattr(t, "THIS", tmp_path / "book.py")
    t.THIS.write_text("#\n" * 11 + f"#     {text}\n", encoding="utf-8")
    with pytest.raises(t.BadInput, match="line 12: cannot read the formula"):
        t.equation(text)
