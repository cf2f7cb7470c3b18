"""The gradients of the whole model, the check of them, and what PyTorch found."""
import re
from dataclasses import replace

import numpy as np
import pytest

import tinygpt as t
from conftest import CONFIG, GOLDEN, changed_module, random_params, run, wrong

B, V, T = 6, CONFIG.vocab_size, CONFIG.context


def test_every_parameter_along_directions_that_move_all_its_entries(rng):
    params, (x, y) = random_params(rng), rng.integers(0, V, (2, B, T))
    loss, grads = t.loss_and_grads(params, x, y, CONFIG)
    assert {name: g.shape for name, g in grads.items()} == t.param_shapes(CONFIG)
    for name, W in params.items():
        for direction in rng.standard_normal((3, *W.shape)):
            def f(h):
                logits, _ = t.forward(params | {name: W + h * direction}, x, CONFIG)
                return t.cross_entropy_forward(logits, y)[0]
            assert f(0) == pytest.approx(loss, rel=1e-14)
            slope = (f(1e-5) - f(-1e-5)) / 2e-5
            assert (grads[name] * direction).sum() == pytest.approx(slope, rel=1e-6, abs=1e-8), name
    largest = {name: np.abs(g).max() for name, g in grads.items()}
    for l in range(CONFIG.layers):                  # a key bias has none, a query bias has one
        assert largest[f"block{l}.bk"] < 1e-14 < 1e-5 < largest[f"block{l}.bq"]


@pytest.mark.parametrize("h", [0.5, 0.25])
def test_the_numerical_gradient_steps_the_same_way_on_both_sides(h):
    x, cubes = np.array([3.0, -2.0]), lambda x: float((x ** 3).sum())
    assert t.numerical_grad(cubes, x, h).tolist() == [27 + h * h, 12 + h * h]   # exact
    assert t.slope(cubes, x, 1, h) == 12 + h * h


def test_the_numerical_gradient_moves_the_array_itself_and_restores_it_exactly(rng):
    whole = 10 ** rng.uniform(-9, 0, (4, 6))        # (x - h) + h is not x where x is small
    x, before = whole[1:, ::2].T, whole.copy()      # a view: a flat copy would feel no step
    slopes = t.numerical_grad(lambda _: float(np.sin(whole).sum()), x)
    np.testing.assert_allclose(slopes, np.cos(x), rtol=1e-7, atol=1e-9)
    assert np.array_equal(whole, before)


@pytest.fixture
def small(rng):
    """What check_params takes: one block, a window that repeats one id."""
    config = replace(CONFIG, layers=1)
    return random_params(rng, config), np.full(T, 4), rng.integers(0, V, T), config


def test_the_check_passes_right_gradients_and_restores_what_it_moved(small, rng):
    params, x, y, config = small
    before = [a.copy() for a in (*params.values(), x, y)]
    worst = t.check_params(*small, rng, samples=6)
    assert list(worst) == list(params) and not wrong(worst)
    assert all(map(np.array_equal, (*params.values(), x, y), before))   # exactly


@pytest.mark.parametrize("name, factor, term", [
    ("head_b", 1.01, 0), ("block0.bq", 1.01, 0), ("block0.ff2_b", 1.01, 0),
    ("head_b", 1, 1), ("block0.bk", 1, 1e-7), ("tok_emb", 1.01, 0), ("pos_emb", 1.01, 0)])
def test_what_one_entry_tells_by_name(name, factor, term, small, rng, monkeypatch):
    """Gradients one percent off, terms of the loss without one; of the tables, rows in use."""
    right = t.loss_and_grads

    def spoiled(params, *args):
        loss, grads = right(params, *args)
        return loss + term * (params[name] ** 2).sum(), grads | {name: factor * grads[name]}
    monkeypatch.setattr(t, "loss_and_grads", spoiled)
    assert wrong(t.check_params(*small, rng, samples=1)) == {name}


def test_a_bend_within_the_step_raises_no_alarm(small, rng):
    params, x, _, config = small
    _, cache = t.forward(params, x, config)
    params["block0.ff1_b"] -= cache["blocks"][0]["ffn"]["Z"][0] - 9e-6
    assert not wrong(t.check_params(*small, rng, samples=6))


def test_gradcheck_raises_no_false_alarm_for_many_seeds():
    assert run("gradcheck", "--samples", 3).returncode == 0
    for seed in (*range(8), 408):                   # 408: a bend of relu within the step
        assert not wrong(t.check_operations(seed) | t.check_model(seed, 3)), seed


@pytest.mark.parametrize("old, new, operations, named, right", [
    ("db = column_sums(dY) ", "db = column_sums(dY) * np.nan ",
     {"linear", "attention", "feed-forward", "block"}, {"block0.bv", "head_b"}, {"lnf_b"}),
    ("dQh = dS @", "dQh = -dS @", {"attention", "block"},
     {"block1.wq", "block1.bq", "block1.ln1_g", "tok_emb"}, {"block1.wk", "block1.bv", "head_w"}),
    ("dXhat - row_mean(dXhat) - Xhat", "dXhat - Xhat", {"layer norm", "block"},
     {"block1.ff2_b", "block1.ln1_g", "block0.wq", "pos_emb"}, {"lnf_g", "head_w"})])
def test_a_sabotage_is_named(old, new, operations, named, right, capsys):
    module = changed_module((old, new))
    assert wrong(module.check_operations(0)) == operations
    assert module.main(["gradcheck", "--samples", "3"]) == 1
    found = {line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines()
             if line.endswith("WRONG")}
    assert found >= operations | named and not found & right


# What PyTorch found, in golden/pytorch.txt, whose head says how it was made
def witness(title):
    """{name: array} of a model of the file."""
    text = (GOLDEN / "pytorch.txt").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^((?:d )?[a-z][\w.]*)((?: \d+)*)\n((?:[-\d].*\n)+)",
                      text.split(f"\n=== {title}\n")[1].split("\n=== ")[0])
    return {name: np.array(numbers.split(), float).reshape([int(n) for n in shape.split()])
            for name, shape, numbers in rows}


def sines():
    """The parameters and sizes of the model of that name, by the rule of the file."""
    config = t.ModelConfig(vocab_size=11, context=5, max_context=7, width=6, heads=3, hidden=10,
                           layers=2)
    params, n = {}, 0
    for name, shape in t.param_shapes(config).items():
        numbers = n + 1 + np.arange(np.prod(shape)).reshape(shape)
        params[name] = 0.8 * np.sin(numbers * numbers) + name.endswith("_g")
        n = numbers.max()
    return params, config


@pytest.mark.parametrize("title", ["example", "sines"])
def test_loss_logits_and_every_gradient_are_those_of_pytorch(title):
    want, example = witness(title), t.example(46)
    params, config = (example.params, example.config) if title == "example" else sines()
    x, y = (want.pop(name).astype(int) for name in "xy")
    if title == "example":
        assert (x == example.x).all() and (y == example.y).all()
    got = {"logits": t.forward(params, x, config)[0]}
    got["loss"], grads = t.loss_and_grads(params, x, y, config)
    got |= {f"d {name}": gradient for name, gradient in grads.items()}
    assert got.keys() == want.keys()
    for name, W in want.items():
        assert np.shape(got[name]) == W.shape, name
        largest = max(np.abs(W).max(), 1e-6)        # where all is rounding, an array is 0
        assert np.abs(got[name] - W).max() <= 1e-9 * largest, name
