"""The gradient check against exact slopes and against sabotage, and the whole model without it."""
import numpy as np
import pytest

import tinygpt as t
from conftest import changed_module, run

T, d, H, B, F, V, L, Tmax = 5, 12, 3, 6, 7, 9, 2, 8     # they all differ, from d / H = 4 too


def random_params(rng, layers=L):
    """A configuration and parameters of moderate size, gains around 1."""
    config = t.ModelConfig(V, T, Tmax, d, H, F, layers)
    return config, {name: 0.4 * rng.standard_normal(shape) + name.endswith("_g")
                    for name, shape in t.param_shapes(config).items()}


def measured(f, x, h=1e-5):
    """Central differences of f() along every entry of x, which f reads."""
    slopes = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        kept = x[i]
        x[i] = kept + h
        slopes[i] = f()
        x[i] = kept - h
        slopes[i] -= f()
        x[i] = kept
    return slopes / (2 * h)


# The whole model

def test_every_parameter_along_directions_that_move_all_its_entries(rng):
    config, params = random_params(rng)
    x, y = rng.integers(0, V, (2, B, T))
    loss, grads = t.loss_and_grads(params, x, y, config)
    assert {name: g.shape for name, g in grads.items()} == t.param_shapes(config)
    for name, W in params.items():
        for direction in rng.standard_normal((3, *W.shape)):
            def f():
                logits, _ = t.forward(params | {name: W + along * direction}, x, config)
                return t.cross_entropy_forward(logits, y)[0]
            along = np.zeros(())
            assert f() == pytest.approx(loss, rel=1e-14)
            slope = (grads[name] * direction).sum()
            assert slope == pytest.approx(measured(f, along), rel=1e-6, abs=1e-8), name
    largest = {name: np.abs(g).max() for name, g in grads.items()}
    for l in range(L):                              # a key bias has none, a query bias has one
        assert largest[f"block{l}.bk"] < 1e-14 < 1e-5 < largest[f"block{l}.bq"]


# How the check measures

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


def test_the_relative_error_divides_by_the_larger_or_by_the_floor():
    a = np.array([1.0, 2.0, -2.0, 0.0, 1e-9, 0.0, 3.0])
    b = np.array([2.0, 1.0, 2.0, 4.0, 3e-9, 0.0, 3.0])
    np.testing.assert_allclose(t.relative_error(a, b), [0.5, 0.5, 2.0, 1.0, 0.2, 0.0, 0.0])
    np.testing.assert_allclose(t.relative_error(1.0, 1.5, eps=10.0), 0.05)


def wrong(worst):
    return {name for name, error in worst.items() if not error < 1e-4}


@pytest.fixture
def small(rng):
    """What check_params takes: one block, a window that repeats one id."""
    config, params = random_params(rng, layers=1)
    return params, np.full(T, 4), rng.integers(0, V, T), config


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
    ("embed_backward(dX, cache", "embed_backward(dX / 2, cache", set(), {"tok_emb", "pos_emb"},
     {"block0.ln1_g"}),
    ("dQh = dS @", "dQh = -dS @", {"attention", "block"},
     {"block1.wq", "block1.bq", "block1.ln1_g", "tok_emb"}, {"block1.wk", "block1.bv", "head_w"}),
    ("dXhat - row_mean(dXhat) - Xhat", "dXhat - Xhat", {"layer norm", "block"},
     {"block1.ff2_b", "block1.ln1_g", "block0.wq", "pos_emb"}, {"lnf_g", "head_w"}),
    ("dZ = dR * (Z > 0)", "dZ = dR * 1", {"relu", "feed-forward", "block"},
     {"block1.ff1_w", "block1.ff1_b", "block1.ln2_g", "tok_emb"}, {"block1.ff2_w", "head_w"})])
def test_a_sabotage_is_named(old, new, operations, named, right, capsys):
    module = changed_module((old, new))
    assert wrong(module.check_operations(0)) == operations
    assert module.main(["gradcheck", "--samples", "3"]) == 1
    found = {line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines()
             if line.endswith("WRONG")}
    assert found >= operations | named and not found & right
