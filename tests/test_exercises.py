"""The exercises of the book, carried out, and learning by doing: what is said is what happens."""
import contextlib, io, math, re, shutil, subprocess, sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import mutants
import tinygpt as t
from conftest import GOLDEN, PROGRAM, ROOT, changed_module, plain_environment, refused, run, wrong

SOURCE = Path(PROGRAM).read_text(encoding="utf-8")
LINES = SOURCE.split("\n")
BOOK, ANSWERS = SOURCE.split("\n# ## Answers\n")
ANSWERS = ANSWERS.split("\n# ## ")[0]


def entries(text):
    """{'5a': its text on one line}"""
    found = {}
    for part in re.split(r"^# - \*\*(?=\d+[a-z]\.)", text, flags=re.M)[1:]:
        name, text = re.split(r"\n(?!#)", part)[0].split(".** ", 1)
        found[name] = " ".join(line.removeprefix("#").strip() for line in text.split("\n"))
    return found


EXERCISES, ANSWER = entries(BOOK), entries(ANSWERS)
# What each exercise that changes the program changes: old text, new text
CHANGES = {
    "1b": [("heap and heap[0][0] < -1:", "heap and heap[0][0] < 0:")],
    "1c": [(r'r"| ?[^\W\d_]+"', r'r"|[^\W\d_]+"')],
    "2b": [("    y = pieces[:, 1:] ", "    y = pieces[:, :-1] ")],
    "3a": [("    db = column_sums(dY) ", "    db = column_sums(dY) / len(dY) ")],
    "3b": [("    e = np.exp(z - z.max(axis=-1, keepdims=True))", "    e = np.exp(z)")],
    "4a": [("np.add.at(d_tok_emb, ids.ravel(), dX0)", "d_tok_emb[ids.ravel()] += dX0")],
    "4b": [("    X0 = token_rows + position_rows", "    X0 = token_rows")],
    "5a": [("    S /= math.sqrt(Qh.shape[-1])", "    S")],
    "5b": [("np.triu(np.full((T, T), -np.inf, dtype), 1)",
            "np.triu(np.full((T, T), -np.inf, dtype), 0)")],
    "6a": [("\n    Xmid = X + Att   ", "\n    Xmid = Att   ")],
    "7a": [("    dS = softmax_backward(dA, A)      ", "    dS = A * dA      ")],
    "7b": [("worst = check_params(e.params, ", "worst = check_params({name: W.astype(np.float32) "
            "for name, W in e.params.items()}, ")],
    "8a": [("            mhat = m / (1 - self.beta1 ** self.t)", "            mhat = m"),
           ("            vhat = v / (1 - self.beta2 ** self.t)", "            vhat = v")],
    "8b": [("    dlogits /= y.size", "    dlogits")],
    "10b": [("x = np.array(ids[-config.context:])", "x = np.array(ids[-config.max_context:])")]}
CHANGES["5a, mended"] = CHANGES["5a"] + [("dQh = dS @ Kh / math.sqrt(hs)", "dQh = dS @ Kh"),
                                         ("@ Qh / math.sqrt(hs) ", "@ Qh ")]


@cache
def altered(name):
    """A second tinygpt, with the changes of an exercise."""
    return changed_module(*CHANGES[name])


def played(module, demo):
    """What a demo prints, and whether it ends; what is not finite may be refused."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), np.errstate(all="ignore"):
        try:
            getattr(module, demo)()
        except (ValueError, FloatingPointError):
            return out.getvalue(), False
    return out.getvalue(), True


def listed(answer):
    """The numbers of 'Golden files that change: 27, 49 to 51.'"""
    numbers = []
    for part in re.search(r"Golden files that change: ([\d, to]+)\.", answer)[1].split(", "):
        first, _, last = part.partition(" to ")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def block(l, names):
    return {f"block{l}.{name}" for name in names.split()}


BIASES, BEFORE_SCORES = "bq bv bo ff1_b ff2_b", "ln1_g ln1_b wq bq wk"
ALL_BUT_BK = " ".join(name for name in t.BLOCK if name != "bk")
TABLES = {"tok_emb", "pos_emb"}
# The arrays that the gradient check calls wrong, and the operations where the answer names them
WRONG = {
    "3a": (block(0, BIASES) | block(1, BIASES) | {"head_b"},
           {"linear", "attention", "feed-forward", "block"}),
    "4a": ({"tok_emb"}, {"embedding"}),
    "5a": (TABLES | block(0, ALL_BUT_BK) | block(1, BEFORE_SCORES), None),
    "5a, mended": (set(), set()),
    "6a": (TABLES | block(0, ALL_BUT_BK), None),
    "7a": (TABLES | block(0, ALL_BUT_BK + " bk") | block(1, BEFORE_SCORES + " bk"), None),
    "8b": ({name for name in t.param_shapes(t.ModelConfig(9, layers=2)) if name[7:] != "bk"},
           {"cross-entropy"})}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_gradient_check_calls_wrong(name):
    arrays, operations = WRONG[name]
    assert wrong(altered(name).check_model(0, 4)) == arrays
    assert operations is None or wrong(altered(name).check_operations(0)) == operations


def test_two_or_three_exercises_for_each_chapter_and_an_answer_for_each():
    assert list(EXERCISES) == list(ANSWER)
    for chapter in range(1, 11):
        names = [name for name in EXERCISES if name[:-1] == str(chapter)]
        assert names == [f"{chapter}{letter}" for letter in "abc"[:len(names)]] and len(names) >= 2
        cell = "\n" + BOOK.split(f"# ### Exercises of chapter {chapter}\n")[1].split("\n\n")[0]
        assert set(entries(cell)) == set(names)


@pytest.mark.parametrize("name", [name for name in EXERCISES if name in CHANGES])
def test_the_code_that_an_exercise_names_is_there_or_is_to_be_written(name):
    code = re.sub("(?m)^#.*$", "", BOOK) + "".join(new for _, new in CHANGES[name])
    for snippet in re.findall("`(.+?)`", EXERCISES[name]):
        assert snippet in code or snippet.startswith("python tinygpt.py"), snippet


@pytest.mark.parametrize("name", [name for name, answer in ANSWER.items()
                                  if "Golden files that change" in answer])
def test_the_golden_files_that_change(name):
    changed, stopped = set(), set()
    for card in t.cards():
        out, ended = played(altered(name), card.demo)
        if out != t.golden_file(card).read_text(encoding="utf-8"):
            changed.add(card.n or card.slug)
        if not ended:
            stopped.add(card.n or card.slug)
    same, fails = re.search(r"golden/training.txt` changes too, but not in (.+?), and in (\w+) its",
                            ANSWERS.replace("\n# ", " ")).groups()
    training = set() if name in re.split(", | and ", same) else {"training"}
    assert changed == set(listed(ANSWER[name])) | training
    assert stopped == ({61, "training"} if name == fails else set())


def test_answers_that_are_a_few_numbers():
    # 1a
    assert t.train_bpe_on_text("low low lower", 9) == [("l", "o"), ("lo", "w"), (" ", "low")]
    for stride, W, targets in ((4, 246, 996), (16, 62, 992)):     # 2a
        _, y = t.make_windows(np.arange(1000), 16, stride)
        assert (len(y), len(np.unique(y)), y.max()) == (W, targets, targets)
    for text in ("246 windows", "= 62.", "996 and 992 of the ids are"):
        assert text in ANSWER["2a"]
    assert len(set(t.example(49).x.tolist())) == 3          # 4a: no token comes twice
    V, d = 50257, 768                                       # 6b
    n = sum(math.prod(shape) for shape in
            t.param_shapes(t.ModelConfig(V, 1024, 1024, d, 12, 3072, 12)).values())
    assert ANSWER["6b"].startswith(f"{n:,}.") and f"{n - V * d - V:,}" in ANSWER["6b"]
    golden = (GOLDEN / "53-mini-batch.txt").read_text(encoding="utf-8")
    losses = [float(x) for x in re.findall(r"^window .* loss ([\d.]+)$", golden, re.M)]
    means = sum(losses[:2]) / 2, sum(losses[2:]) / 3
    for value in (*losses, *means, sum(means) / 2, sum(losses) / 5):
        assert f"{value:.4f}" in ANSWER["9a"]
    assert t.step_counts(1000, 16, 3) == (63, 189)          # 9b
    x = np.zeros((1000, 1), int)
    assert len([*t.iterate_batches(x, x, 16, np.random.default_rng(0))][-1][0]) == 8
    for temperature in (2, 0.5):                            # 10a
        p = t.next_probabilities(np.log([0.64, 0.16, 0.16, 0.04]), temperature)
        assert ", ".join(f"{x:.4f}" for x in p) in ANSWER["10a"]
    z = np.array([1.0, 3, 3])                               # 10c
    assert t.next_probabilities(z, top_k=1).tolist() == [0, 0.5, 0.5]
    assert t.next_probabilities(z, 0.0).tolist() == [0, 1, 0]


def test_1b_pairs_that_occur_once():
    texts = re.findall(r"^([ a-z]+), (\d+): \[", (GOLDEN / "03-apply-merge.txt").read_text(), re.M)
    merges = {text: altered("1b").train_bpe_on_text(text, int(n)) for text, n in texts}
    for text in ("abcdef", "xabyab"):
        assert f"`{text}` becomes {', '.join(t.apply_merges(text, merges[text]))}" in ANSWER["1b"]


def test_1c_the_blank_as_a_pre_token():
    module, e = altered("1c"), t.example(5)
    tokenizer = module.build_tokenizer(e.text, e.n_merges)
    assert tokenizer.decode(tokenizer.encode(e.text)) == e.text
    before = len(t.build_tokenizer(e.text, e.n_merges).encode(e.text))
    assert f"has {len(tokenizer.encode(e.text))} ids, where it had {before}" in ANSWER["1c"]
    assert f"merges are now {', '.join(a + b for a, b in tokenizer.merges)}," in ANSWER["1c"]
    corpus = (ROOT / "corpus.txt").read_text(encoding="utf-8")
    ids = [len(m.build_tokenizer(corpus, 1700).encode(corpus)) for m in (t, module)]
    words = len(re.findall(r" [^\W\d_]", corpus))
    assert 0.9 * words < ids[1] - ids[0] < words        # nearly every word costs an id more


def test_2b_a_model_that_copies():
    outs = [played(m, "demo_autoregressive_loop")[0] for m in (altered("2b"), t)]
    losses = [re.search(r"training loss ([\d.]+)", out)[1] for out in outs]
    assert "falls to {} within 60 steps, where it was {}".format(*losses) in ANSWER["2b"]
    assert f"after 60 steps: 's{15 * 'he'}'" in outs[0]             # the last token again and again


def test_3c_gelu_as_printed_passes_the_gradient_check(monkeypatch):
    code = [line[8:] for line in ANSWERS.split("**3c.**")[1].split("**4a.**")[0].splitlines()
            if line.startswith("#       ")]
    space = {"np": np, "math": math}
    exec("\n".join(code), space)
    Z = np.linspace(-3, 3, 25)
    u = np.sqrt(2 / np.pi) * (Z + 0.044715 * Z ** 3)
    np.testing.assert_allclose(space["gelu_forward"](Z), Z / 2 * (1 + np.tanh(u)), atol=1e-15)
    monkeypatch.setattr(t, "relu_forward", space["gelu_forward"])
    assert "relu" in wrong(t.check_operations(0))
    assert block(1, "ff1_w ff1_b") <= wrong(t.check_model(0, 4))
    monkeypatch.setattr(t, "relu_backward", space["gelu_backward"])
    assert not wrong(t.check_operations(0) | t.check_model(0, 4))


@pytest.mark.parametrize("layers, blind", [(1, True), (2, False)])
def test_4b_without_positions_one_block_does_not_see_the_order(layers, blind):
    config = t.ModelConfig(10, 3, 5, 4, 2, 6, layers)
    params = t.init_params(config, np.random.default_rng(0), np.float64)
    last = [altered("4b").forward(params, ids, config)[0][-1] for ids in ([1, 7, 8], [7, 1, 8])]
    assert np.allclose(*last, rtol=0, atol=1e-12) == blind


def test_5b_position_0_attends_to_nothing():
    module, e = altered("5b"), t.example(34)
    with np.errstate(invalid="ignore"):
        A = module.attention_weights(e.S)
        assert np.isnan(A[..., 0, :]).all() and np.isfinite(A[..., 1:, :]).all()
        for layers, rows_of_nan in ((1, [True, False, False]), (2, [True] * 3)):
            config = t.ModelConfig(10, 3, 5, 4, 2, 6, layers)
            params = t.init_params(config, np.random.default_rng(0), np.float64)
            logits, _ = module.forward(params, e.x, config)
            loss, grads = module.loss_and_grads(params, e.x, e.y, config)
            assert np.isnan(logits).all(axis=1).tolist() == rows_of_nan and np.isnan(loss)
            for name, g in grads.items():
                used = {"tok_emb": e.x, "pos_emb": range(3)}.get(name, range(len(g)))
                assert np.isnan(g[list(used)]).all() and not np.delete(g, used, axis=0).any()


def test_5c_two_gradients_by_hand():
    e = t.example(38)
    [A, _], [Q, _], [V, _] = e.A[0], e.Qh[0], e.Vh[0]
    dA = t.split_heads(e.dY @ e.block["wo"].T, 2, 3)[0, 0] @ V.T
    dS = t.softmax_backward(dA, A)
    dK = dS.T @ Q / math.sqrt(2)
    average = (A[2] * dA[2]).sum()
    products = " + ".join(f"{a:.4f} · {b:.4f}" for a, b in zip(A[2], dA[2]))
    for text in (
            f"{products} = {average:.4f}",
            f"{A[2, 0]:.4f} ({dA[2, 0]:.4f} - {average:.4f}) = {dS[2, 0]:.4f}",
            f"({dS[1, 1]:.4f} · ({Q[1, 0]:.4f}) + ({dS[2, 1]:.4f}) · {Q[2, 0]:.4f}) / √2 = "
            f"{dK[1, 0]:.4f}",
            f"({dS[2, 2]:.4f} · {Q[2, 0]:.4f}) / √2 = {dK[2, 0]:.4f}.",
            f"{dK[0, 0]:.4f} - {-dK[1, 0]:.4f} - {-dK[2, 0]:.4f} = 0."):
        assert text in ANSWER["5c"]
    assert abs(dK[:, 0].sum()) < 1e-12 and not dS[:2, 2].any()


def test_the_table_of_card_42():
    """The gradient of the first block's input beside that of the last one's output."""
    def ratio(module, layers, seed):
        rng, config, caches = np.random.default_rng(seed), module.ModelConfig(65, layers=layers), []
        params = module.init_params(config, rng, np.float64)
        X = module.embed_forward(params, rng.integers(0, 65, 16))
        for l in range(layers):
            X, cache = module.block_forward(X, module.block_params(params, l), 2, 16)
            caches.append(cache)
        dY = dX = rng.normal(size=X.shape)
        for l in reversed(range(layers)):
            dX, _ = module.block_backward(dX, caches[l], module.block_params(params, l))
        return math.sqrt((dX ** 2).sum() / (dY ** 2).sum())

    path = [(f"\n    {a} = {b} + {c}  ", f"\n    {a} = {c}  ") for a, b, c in (
        ("Xmid", "X", "Att"), ("Y", "Xmid", "Ff"), ("dXmid", "dY", "dXmid_branch"),
        ("dX", "dXmid", "dX_branch"))]
    kinds = [changed_module(*changes) for changes in ([], path, [], path)]
    for module in kinds[2:]:
        module.layer_norm_forward = lambda X, gamma, beta: (X, None)
        module.layer_norm_backward = lambda dY, cache: (dY, 0, 0)
    for layers in (24, 48):
        row = re.search(rf"(?m)^#     {layers}  +(.+ to .+)", SOURCE)[1].split("  ")
        printed = [cell.split(" to ") for cell in map(str.strip, row) if cell]
        for module, (low, high) in zip(kinds, printed, strict=True):
            found = [ratio(module, layers, seed) for seed in range(5)]
            assert float(low) == pytest.approx(min(found), rel=0.25)
            assert float(high) == pytest.approx(max(found), rel=0.25)


def test_6c_a_table_used_twice_gets_two_gradients():
    e = t.example(46)

    def loss(E):
        return t.loss_and_grads(dict(e.params, tok_emb=E, head_w=E.T), e.x, e.y, e.config)
    E = e.params["tok_emb"]
    logits, cache = t.forward(dict(e.params, head_w=E.T), e.x, e.config)
    dlogits = t.cross_entropy_backward(t.cross_entropy_forward(logits, e.y)[1], e.y)
    dE = loss(E)[1]["tok_emb"] + dlogits.T @ cache["Xf"]
    np.testing.assert_allclose(dE, t.numerical_grad(lambda E: loss(E)[0], E.copy()), atol=1e-8)


def test_7b_a_check_in_float32_fails():
    out, _ = played(altered("7b"), "demo_check_params")
    assert "error below 1e-4\n" not in out.split("six inputs")[0] and "1e-4: False\n" in out
    slopes = np.concatenate([abs(g[g != 0]) for g in t.example(49).grads.values()])
    assert 0.02 < 0.005 / np.median(slopes) < 0.1       # several percent


@pytest.mark.parametrize("beta2, corrected, plain", [(0.99, 0.01, 0.01), (0.999, 0.01, 0.0316)])
@pytest.mark.parametrize("g", [1e-3, -5.0])
def test_8a_the_first_step(g, beta2, corrected, plain):
    for module, expected in ((t, corrected), (altered("8a"), plain)):
        params = {"w": np.array([1.0])}
        module.AdamW(params, 0.9, beta2, 1e-12, 0.0).step(params, {"w": np.array([g])}, 0.01)
        assert 1 - params["w"][0] == pytest.approx(math.copysign(expected, g), rel=1e-3)


def test_8b_all_gradients_are_clipped():
    cut = []
    for module in (t, altered("8b")):
        rows = re.findall(r"^ +\d+ .* ([\d.]+)$", played(module, "demo_training")[0], re.M)
        cut.append(sum(float(norm) > 1 for norm in rows))
    assert "in {} of the 20 steps, and now in all".format(*cut) in ANSWER["8b"] and cut[1] == 20


# ---- learning by doing: cards taken out, faults told and hunted, parts left out ---------------
WORTH = re.findall(r"(?m)^\|.* \d\.\d{3} \|$", (ROOT / "README.md").read_text("utf-8"))
assert len(WORTH) == 9, "the rows of the README's table"


@pytest.mark.parametrize("card", t.cards(), ids=lambda card: card.slug)
def test_a_blanked_card_says_what_is_missing(card, known={*LINES}):
    result, computed = run("blank", card.slug), card.equations.keys() - card.derived
    if not computed:
        return refused(result, card.slug)
    new = [line for line in result.stdout.split("\n") if line not in known]
    said = [re.match(r" +raise BadInput\(.to be written: (.+).\)  +# .*", line)[1] for line in new]
    assert {*re.findall(r"\((\d+\.\d+)\) ", " ".join(said))} == computed
    with pytest.raises(ValueError, match=rf"^to be written: \({card.n}\.\d+\) ."):
        getattr(changed_module((SOURCE, result.stdout)), card.demo)()


def test_a_blanked_file_elsewhere(tmp_path):
    def mine(*args, cwd=tmp_path):
        return subprocess.run([sys.executable, tmp_path / "mine.py", *args], cwd=cwd, text=True,
                              capture_output=True, env=plain_environment(PYTHONUTF8="1"))

    assert run("blank", "15", "58", "--out", "mine.py", cwd=tmp_path).returncode == 0
    refused(run("blank", "16", "--out", "mine.py", cwd=tmp_path), "mine.py", "exists")
    for args in (["demo", "34"], ["gradcheck"], ["train", "--text", ROOT / "corpus.txt"]):
        assert (result := mine(*args)).returncode == 2 and "Traceback" not in result.stderr
        assert result.stderr.splitlines()[-1].startswith("tinygpt: to be written: (15.1) e_i = exp")
    refused(mine("demo", "--changed", "15"), "no folder golden", str(tmp_path))
    for cwd in (ROOT, "/"):
        assert "Stopped: 15, 34 at" in mine("demo", "--changed", "15", "34", cwd=cwd).stdout
        shutil.copytree(GOLDEN, tmp_path / "golden", dirs_exist_ok=True)


@pytest.mark.parametrize("names", [[], [card.slug for card in t.cards()]], ids=["all", "named"])
def test_the_book_as_it_stands_is_right(names):
    assert run("demo", "--changed", *names).stdout == (
        "0 of 62 demos print something else than golden/ has: right\ngradcheck: all agree\n")


@pytest.mark.parametrize("card, old, new, words", [
    ("12", "dW = X.T @ dY ", "dW = dY.T @ X ", "dW (6, 4): transposed"),
    ("12", "dX = dY @ W.T ", "dX = dY @ W ", "Stopped: 12, gradcheck at line "),
    ("11", "    Y = X @ W + b ", "    Y = X @ W - b ",
     "Y (3, 6): row 0, column 0 is -0.61 in place of -0.21"),
    ("38", "dQh = dS @ Kh / math.sqrt(hs)", "dQh = dS @ Kh", "all numbers are 1.414 times"),
    ("16", "    dz = p * (dp", "    dz = -p * (dp", "all numbers are -1 (sign) times"),
    ("15", "p = e / row_sums(e)", "p = e", "p (3, 3): row 0, column 0 is 0.2 in place of 0.125"),
    ("52", "lr_max * t", "lr_max / t", "2  η = 0.001250  #####' in place of 't =  2  η = 0.005")])
def test_what_is_wrong_is_told(card, old, new, words, capsys):
    assert changed_module((old, new)).main(["demo", "--changed", card]) == 1
    assert words in (out := capsys.readouterr().out) and len(out.splitlines()) < 13
    assert ("gradcheck" in out) == (card not in ("11", "15", "52"))


@pytest.mark.parametrize("level, first, last, seeds", [     # seeds that need few trials
    ("hard", 1, 61, (9, 10)), ("easy", 24, 38, (1,))])
def test_a_hunt(level, first, last, seeds, tmp_path):
    faults = set()
    for seed in seeds:
        path = mutants.hunt(seed, level, first, last, tmp_path)
        lines = path.read_text(encoding="utf-8").split("\n")
        [i] = [i for i, pair in enumerate(zip(LINES, lines, strict=True)) if len({*pair}) == 2]
        [equation, *_] = re.findall(r"\((\d+)(\.\d+)\)", lines[i])
        assert int(equation[0]) in range(first, last + 1)
        for answer in (f"{i + 1}", "".join(equation), "show"):
            assert f" line {i + 1}\n- {LINES[i]}\n+ " in mutants.verdict(path, answer)
        assert mutants.verdict(path, "99.1").startswith("No, ")
        faults.add(lines[i])
    assert len(faults) == len(seeds)


@pytest.mark.parametrize("row", WORTH, ids=lambda row: row.split("|")[1].strip())
def test_the_parts_that_the_readme_leaves_out_can_be_left_out(row):
    """Forward and backward alike, so that the gradients are right; the options exist."""
    source = SOURCE
    for tag, new in re.findall(r"(\d+\.\d+) `(.+?)`", row):
        source, n = re.subn(rf"(?m)^( +)\S.*?(?=  #.*\({tag}\))", rf"\1{new}", source)
        assert n == 1
    module = changed_module((SOURCE, source))
    assert max((module.check_operations(0) | module.check_model(0, 3)).values()) < 1e-4
    t.build_parser().parse_args(["train", *" ".join(re.findall(r"`(--.+?)`", row)).split()])
