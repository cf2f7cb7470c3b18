"""The exercises of the book, carried out: what the answers say is what happens."""
import contextlib
import io
import math
import re
import sys
import types
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import tinygpt as t
from conftest import GOLDEN, ROOT
from test_golden import play_training

SOURCE = Path(t.__file__).read_text(encoding="utf-8")
BOOK, ANSWERS = SOURCE.split("\n# ## The program\n")[0].split("\n# ## Answers\n")


def entries(text):
    """{'5a': its text on one line}"""
    found = {}
    for part in re.split(r"^# - \*\*(?=\d+[a-z]\.)", text, flags=re.M)[1:]:
        lines = re.split(r"\n(?!#)", part)[0].split("\n")
        name, first = lines[0].split(".** ")
        found[name] = " ".join([first] + [line.removeprefix("#").strip() for line in lines[1:]])
    return found


EXERCISES, ANSWER = entries(BOOK), entries(ANSWERS)
# What each exercise that changes the program changes: old text, new text
CHANGES = {
    "1b": [("        if f[best] < 2:", "        if f[best] < 1:"),
           ("            if f[pair] > 1:", "            if f[pair] > 0:")],
    "1c": [(r'r"| ?[^\W\d_]+"', r'r"|[^\W\d_]+"')],
    "2b": [("y = pieces[:, 1:]", "y = pieces[:, :-1]")],
    "3a": [("    db = column_sums(dY) ", "    db = column_sums(dY) / len(rows(dY)) ")],
    "3b": [("    e = x - x.max(axis=-1, keepdims=True)", "    e = x.copy()")],
    "4a": [("d_tok_emb[sorted_ids[runs]] = np.add.reduceat(rows(dX0)[order], runs)",
            "d_tok_emb[ids.ravel()] += rows(dX0)")],
    "4b": [("    X0 = token_rows + position_rows", "    X0 = token_rows + 0")],
    "5a": [("S = scores(Qh * (1 / math.sqrt(Qh.shape[-1])), Kh)", "S = scores(Qh, Kh)")],
    "5b": [("np.triu(np.full((T, T), -np.inf, dtype), 1)",
            "np.triu(np.full((T, T), -np.inf, dtype), 0)")],
    "6a": [("\n    X1 = X + Att   ", "\n    X1 = Att   ")],
    "7a": [("    dS = softmax_backward(A, dA)   ", "    dS = A * dA   ")],
    "8a": [("        mhat = m * (lr / (1 - self.beta1 ** self.t))", "        mhat = m * lr"),
           ("        vhat = v * (1 / (1 - self.beta2 ** self.t))", "        vhat = v * 1")],
    "8b": [("dlogits = rows(P) * (1 / n)", "dlogits = rows(P) * 1"), ("-= 1 / n ", "-= 1 ")],
    "10b": [("x = np.array(ids[-config.context:])", "x = np.array(ids[-config.max_context:])")]}
CHANGES["5a, mended"] = CHANGES["5a"] + [("dQK = np.multiply(dS, 1 / math.sqrt(dh), out=dS)", "dQK = dS")]


@cache
def altered(name):
    """A second tinygpt, with the changes of an exercise."""
    source = SOURCE
    for old, new in CHANGES.get(name, []):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = types.ModuleType("altered")
    module.__file__ = t.__file__
    sys.modules["altered"] = module                 # dataclasses look their module up
    try:
        exec(compile(source, "altered", "exec"), module.__dict__)
    finally:
        del sys.modules["altered"]
    return module


def changed_files(module):
    """The numbers of the cards whose demo prints something else."""
    changed = []
    for n, slug, *_ in t.cards():
        out = io.StringIO()
        with contextlib.redirect_stdout(out), np.errstate(all="ignore"), \
                contextlib.suppress(ValueError):    # what is not finite may be refused
            getattr(module, f"demo_{slug.replace('-', '_')}")()
        if out.getvalue() != (GOLDEN / f"{n:02d}-{slug}.txt").read_text(encoding="utf-8"):
            changed.append(n)
    return changed


def listed(answer):
    """The numbers of 'Golden files that change: 27, 49 to 51.'"""
    numbers = []
    for part in re.search(r"Golden files that change: ([\d, to]+)\.", answer)[1].split(", "):
        first, _, last = part.partition(" to ")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def wrong_arrays(module):
    """What `gradcheck` calls wrong."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        module.main(["gradcheck", "--samples", "8"])
    return {line.split()[0] for line in out.getvalue().splitlines() if line.endswith("WRONG")}


def block(l, names):
    return {f"block{l}.{name}" for name in names.split()}


BEFORE_SCORES = "ln1_g ln1_b wq bq wk"
ALL_BUT_BK = " ".join(name for name in t.BLOCK if name != "bk")
TABLES = {"tok_emb", "pos_emb"}


def test_two_or_three_exercises_for_each_chapter_and_an_answer_for_each():
    assert list(EXERCISES) == list(ANSWER)
    for chapter in range(1, 11):
        names = [name for name in EXERCISES if name[:-1] == str(chapter)]
        assert names == [f"{chapter}{letter}" for letter in "abc"[:len(names)]] and len(names) >= 2
        cell = "\n" + BOOK.split(f"# ### Exercises of chapter {chapter}\n")[1].split("\n\n")[0]
        assert set(entries(cell)) == set(names)


@pytest.mark.parametrize("name", [name for name, answer in ANSWER.items()
                                  if "Golden files that change" in answer])
def test_the_golden_files_that_change(name):
    assert changed_files(altered(name)) == listed(ANSWER[name])


@pytest.mark.parametrize("name", [name for name in CHANGES if name in ANSWER])
def test_how_the_transcript_of_the_training_changes(name, capsys):
    assert "but not in 1b and 3b, and in 5b its training fails" in ANSWERS.replace("\n# ", " ")
    if name == "5b":
        with pytest.raises(ValueError), np.errstate(all="ignore"):
            play_training(altered(name))
    else:
        play_training(altered(name))
        same = capsys.readouterr().out == (GOLDEN / "training.txt").read_text(encoding="utf-8")
        assert same == (name in ("1b", "3b"))


def test_without_a_change_no_golden_file_changes():
    assert changed_files(altered("")) == []


def test_1a_three_merges_by_hand():
    assert t.train_bpe_on_text("low low lower", 9) == [("l", "o"), ("lo", "w"), (" ", "low")]


def test_1b_pairs_that_occur_once():
    texts = re.findall(r"train_bpe_on_text\('(.+?)', (\d+)\)", SOURCE.split("def demo_apply_merge")[1]
                       .split("\n\n\n")[0])
    more = [text for text, n in texts if
            altered("1b").train_bpe_on_text(text, int(n)) != t.train_bpe_on_text(text, int(n))]
    assert len(more) == 4 and "four of the short texts" in ANSWER["1b"]
    assert set(more) > {"abcdef", "xabyab"}
    merges = altered("1b").train_bpe_on_text("abab b b", 6)
    assert t.apply_merges("abab", merges) == ["abab"]
    assert len(altered("1b").train_bpe_on_text(max(more, key=len), 9)) == 9
    for text in ("abcdef", "xabyab"):
        merges = altered("1b").train_bpe_on_text(text, 3)
        assert f"`{text}` becomes {', '.join(t.apply_merges(text, merges))}" in ANSWER["1b"]


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
    assert 0.95 * words < ids[1] - ids[0] < words       # nearly every word costs an id more


def test_2a_windows_and_targets():
    for stride, W, targets in ((4, 246, 996), (16, 62, 992)):
        _, y = t.make_windows(np.arange(1000), 16, stride)
        assert (len(y), len(np.unique(y)), y.max()) == (W, targets, targets)
    assert "246 windows" in ANSWER["2a"] and "= 62." in ANSWER["2a"]
    assert "996 and 992 of the ids are" in ANSWER["2a"]


def test_2b_a_model_that_copies(capsys):
    losses = []
    for module in (altered("2b"), t):
        module.demo_autoregressive_loop()
        losses.append(re.search(r"training loss ([\d.]+)", capsys.readouterr().out)[1])
    assert "falls to {} within 60 steps, where it was {}".format(*losses) in ANSWER["2b"]
    module, e = altered("2b"), t.example(61)
    xs, ys = module.make_windows(e.train_ids, 3, 1)
    optimizer = t.AdamW(e.params, weight_decay=0.0)
    for _ in range(60):
        optimizer.step(e.params, t.batch_loss_and_grads(e.params, xs, ys, e.config)[1], 0.05)
    assert np.array_equal(t.forward(e.params, xs, e.config)[0].argmax(-1), xs)      # it copies


def test_3a_the_biases_of_linear_layers_are_wrong():
    biases = "bq bv bo ff1_b ff2_b"
    assert wrong_arrays(altered("3a")) == block(0, biases) | block(1, biases) | {"head_b"}


def test_3c_gelu_as_printed_passes_the_gradient_check(monkeypatch):
    code = [line[8:] for line in ANSWERS.split("**3c.**")[1].split("- **4a.**")[0].splitlines()
            if line.startswith("#       ")]
    space = {"np": np, "math": math}
    exec("\n".join(code), space)
    Z = np.linspace(-3, 3, 25)
    u = np.sqrt(2 / np.pi) * (Z + 0.044715 * Z ** 3)
    np.testing.assert_allclose(space["gelu_forward"](Z), Z / 2 * (1 + np.tanh(u)), atol=1e-15)
    normal = [z * (1 + math.erf(z / math.sqrt(2))) / 2 for z in Z]      # what tanh stands for
    np.testing.assert_allclose(space["gelu_forward"](Z), normal, atol=1e-3)
    module = altered("")
    monkeypatch.setattr(module, "relu_forward", space["gelu_forward"])
    monkeypatch.setattr(module, "relu_backward", space["gelu_backward"])
    assert wrong_arrays(module) == set()
    monkeypatch.setattr(module, "relu_backward", t.relu_backward)
    assert wrong_arrays(module) != set()


def test_4a_only_a_check_in_which_a_token_comes_twice_notices():
    assert wrong_arrays(altered("4a")) == {"tok_emb"}
    assert len(set(t.example(49).x.tolist())) == 3


@pytest.mark.parametrize("layers, blind", [(1, True), (2, False)])
def test_4b_without_positions_one_block_does_not_see_the_order(layers, blind):
    module = altered("4b")
    config = module.ModelConfig(10, 3, 5, 4, 2, 6, layers)
    params = module.init_params(config, np.random.default_rng(0), np.float64)
    last = [module.forward(params, np.array(ids), config)[0][-1] for ids in ([1, 7, 8], [7, 1, 8])]
    assert np.allclose(*last, rtol=0, atol=1e-12) == blind


def test_5a_without_the_scaling():
    expected = TABLES | block(0, ALL_BUT_BK) | block(1, BEFORE_SCORES)
    assert wrong_arrays(altered("5a")) == expected
    assert wrong_arrays(altered("5a, mended")) == set()


def test_5b_position_0_attends_to_nothing():
    e = t.example(34)
    with np.errstate(invalid="ignore"):
        A = altered("5b").attention_weights(e.Qh, e.Kh)
    assert np.isnan(A[:, 0]).all() and np.isfinite(A[:, 1:]).all()
    for layers, rows_of_nan in ((1, [True, False, False]), (2, [True] * 3)):
        config = t.ModelConfig(10, 3, 5, 4, 2, 6, layers)
        params = t.init_params(config, np.random.default_rng(0), np.float64)
        with np.errstate(invalid="ignore"):
            logits, _ = altered("5b").forward(params, e.x, config)
            loss, grads = altered("5b").loss_and_grads(params, e.x, e.y, config)
        assert np.isnan(logits).all(axis=1).tolist() == rows_of_nan and np.isnan(loss)
        for name, g in grads.items():
            used = {"tok_emb": e.x, "pos_emb": range(3)}.get(name, range(len(g)))
            assert np.isnan(g[list(used)]).all() and not np.delete(g, used, axis=0).any()


def test_5c_two_gradients_by_hand():
    e = t.example(38)
    A, Q = e.A[0], e.Qh[0]
    dA = t.split_heads(e.dY @ e.block["wo"].T, 2)[0] @ e.Vh[0].T
    dS = t.softmax_backward(A, dA)
    average = (A[2] * dA[2]).sum()
    products = " + ".join(f"{a:.4f} · {b:.4f}" for a, b in zip(A[2], dA[2]))
    assert f"{products} = {average:.4f}" in ANSWER["5c"]
    assert f"{A[2, 0]:.4f} ({dA[2, 0]:.4f} - {average:.4f}) = {dS[2, 0]:.4f}" in ANSWER["5c"]
    dK = (dS[:, 1] * Q[:, 0]).sum() / math.sqrt(2)
    assert (f"({dS[1, 1]:.4f} · ({Q[1, 0]:.4f}) + ({dS[2, 1]:.4f}) · {Q[2, 0]:.4f}) / √2 = {dK:.4f}"
            in ANSWER["5c"])
    dKh = dS.T @ Q / math.sqrt(2)
    assert f"({dS[2, 2]:.4f} · {Q[2, 0]:.4f}) / √2 = {dKh[2, 0]:.4f}." in ANSWER["5c"]
    column = f"{dKh[0, 0]:.4f} - {-dKh[1, 0]:.4f} - {-dKh[2, 0]:.4f} = 0."
    assert column in ANSWER["5c"] and abs(dKh[:, 0].sum()) < 1e-12 and not dS[:2, 2].any()


def test_6a_without_the_residual_connection():
    assert wrong_arrays(altered("6a")) == TABLES | block(0, ALL_BUT_BK)


def test_6b_the_size_of_gpt_2():
    V, d = 50257, 768
    n = sum(math.prod(shape) for shape in
            t.param_shapes(t.ModelConfig(V, 1024, 1024, d, 12, 3072, 12)).values())
    assert ANSWER["6b"].startswith(f"{n:,}.") and f"{n - V * d - V:,}" in ANSWER["6b"]


def test_6c_a_table_used_twice_gets_two_gradients():
    e = t.example(46)

    def loss(E):
        return t.loss_and_grads(dict(e.params, tok_emb=E, head_w=E.T), e.x, e.y, e.config)
    E = e.params["tok_emb"]
    _, grads = loss(E)
    logits, cache = t.forward(dict(e.params, head_w=E.T), e.x, e.config)
    dlogits = t.cross_entropy_backward(t.cross_entropy_forward(logits, e.y)[1], e.y)
    dE = grads["tok_emb"] + dlogits.T @ cache["Xf"]
    np.testing.assert_allclose(dE, t.numerical_grad(lambda E: loss(E)[0], E.copy()), atol=1e-8)


def test_7a_without_the_sum_of_the_softmax():
    expected = TABLES | block(0, ALL_BUT_BK + " bk") | block(1, BEFORE_SCORES + " bk")
    assert wrong_arrays(altered("7a")) == expected


def test_7b_a_check_in_float32_fails():
    e = t.example(49)
    params = {name: W.astype(np.float32) for name, W in e.params.items()}
    worst = t.check_params(params, e.x, e.y, e.config, np.random.default_rng(0), 20)
    assert min(worst.values()) > 1e-4
    slopes = np.concatenate([abs(g[g != 0]) for g in e.grads.values()])
    assert 0.02 < 0.005 / np.median(slopes) < 0.1       # several percent


@pytest.mark.parametrize("beta2, corrected, plain", [(0.99, 0.01, 0.01), (0.999, 0.01, 0.0316)])
@pytest.mark.parametrize("g", [1e-3, -5.0])
def test_8a_the_first_step(g, beta2, corrected, plain):
    for module, expected in ((t, corrected), (altered("8a"), plain)):
        params = {"w": np.array([1.0])}
        module.AdamW(params, 0.9, beta2, 1e-12, 0.0).step(params, {"w": np.array([g])}, 0.01)
        assert 1 - params["w"][0] == pytest.approx(math.copysign(expected, g), rel=1e-3)


def test_8b_a_common_factor_of_all_gradients_cancels():
    assert "all arrays" not in ANSWER["8b"] and wrong_arrays(altered("8b")) > {"head_w", "tok_emb"}
    steps = []
    for factor in (1, 1000):
        params = {"w": np.ones(4)}
        optimizer = t.AdamW(params, eps=1e-12)
        for g in np.random.default_rng(0).normal(size=(20, 4)):
            optimizer.step(params, {"w": factor * g}, 0.01)
        steps.append(params["w"])
    np.testing.assert_allclose(*steps, rtol=1e-9)


def test_9a_a_mean_of_means():
    golden = (GOLDEN / "53-mini-batch.txt").read_text(encoding="utf-8")
    losses = [float(x) for x in re.findall(r"^window .* loss ([\d.]+)$", golden, re.M)]
    means = sum(losses[:2]) / 2, sum(losses[2:]) / 3
    for value in (*losses, *means, sum(means) / 2, sum(losses) / 5):
        assert f"{value:.4f}" in ANSWER["9a"]


def test_9b_the_last_batch():
    assert t.step_counts(1000, 16, 3) == (63, 189)
    x = np.zeros((1000, 1), int)
    *_, (last, _) = t.iterate_batches(x, x, 16, np.random.default_rng(0))
    assert len(last) == 8


def test_10a_two_temperatures():
    for temperature in (2, 0.5):
        p = t.next_probabilities(np.log([0.64, 0.16, 0.16, 0.04]), temperature)
        assert ", ".join(f"{x:.4f}" for x in p) in ANSWER["10a"]


def test_10c_top_1_and_temperature_0_differ_in_a_tie():
    z = [1.0, 3.0, 3.0]
    assert t.next_probabilities(z, top_k=1).tolist() == [0, 0.5, 0.5]
    assert t.next_probabilities(z, 0.0).tolist() == [0, 1, 0]
