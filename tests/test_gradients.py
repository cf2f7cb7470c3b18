"""Every backward function against central differences, and the gradient check against sabotage.

The upstream gradient is random: one that is constant along a row would be mapped to zero by the
softmax, and zeros would pass for right. All sizes differ (only the batch is as large as L).
"""

import numpy as np
import pytest

import tinygpt as t

T, d, dh, H, B, F, V, L, Tmax = 5, 12, 4, 3, 2, 7, 11, 2, 6
BLOCK_SHAPES = dict(
    ln1_g=(d,), ln1_b=(d,), wq=(d, d), bq=(d,), wk=(d, d), bk=(d,), wv=(d, d), bv=(d,),
    wo=(d, d), bo=(d,), ln2_g=(d,), ln2_b=(d,), ff1_w=(d, F), ff1_b=(F,), ff2_w=(F, d), ff2_b=(d,),
)  # fmt: skip


# Helpers


def shapes(layers):
    blocks = {f"block{l}.{n}": s for l in range(layers) for n, s in BLOCK_SHAPES.items()}
    ends = dict(lnf_g=(d,), lnf_b=(d,), head_w=(d, V), head_b=(V,))
    return dict(tok_emb=(V, d), pos_emb=(Tmax, d)) | blocks | ends


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture(params=[(), (2, 3)], ids=["window", "two-leading-axes"])
def lead(request):
    return request.param


def rand_arrays(rng, shapes):
    """Weights of a size that keeps the slopes moderate, gains around 1."""
    return {
        name: 0.4 * rng.standard_normal(shape) + name.endswith("_g")
        for name, shape in shapes.items()
    }


def slow_gradient(f, x, h=1e-5):
    """Central differences over every entry of x; f takes nothing and reads x itself."""
    slopes = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        kept = x[i]
        x[i] = kept + h
        above = f()
        x[i] = kept - h
        below = f()
        x[i] = kept
        slopes[i] = (above - below) / (2 * h)
    return slopes


def assert_slopes(f, x, gradient, name=""):
    assert np.shape(gradient) == x.shape, name
    np.testing.assert_allclose(gradient, slow_gradient(f, x), rtol=1e-6, atol=1e-8, err_msg=name)


def assert_all_slopes(f, arrays, grads):
    assert grads.keys() == arrays.keys()
    for name in arrays:
        assert_slopes(f, arrays[name], grads[name], name)


def assert_off_the_kink(Z):
    """Where a ReLU input lies at 0, a difference across the kink says nothing."""
    assert np.abs(Z).min() > 1e-4


# One function at a time: loss = sum(out * dout)


def test_linear_backward(rng, lead):
    X, W, b = rng.standard_normal(lead + (T, d)), rng.standard_normal((d, F)), np.ones(F)
    dY = rng.standard_normal(lead + (T, F))
    grads = t.linear_backward(dY, X, W)
    for x, gradient in zip((X, W, b), grads, strict=True):
        assert_slopes(lambda: np.sum(t.linear_forward(X, W, b) * dY), x, gradient)


def test_relu_backward(rng, lead):
    Z, dA = rng.standard_normal(lead + (T, F)), rng.standard_normal(lead + (T, F))
    assert_off_the_kink(Z)
    assert_slopes(lambda: np.sum(t.relu_forward(Z) * dA), Z, t.relu_backward(dA, Z))


def test_softmax_backward(rng, lead):
    x, dp = rng.standard_normal(lead + (T, V)), rng.standard_normal(lead + (T, V))
    dx = t.softmax_backward(t.softmax_forward(x), dp)
    assert_slopes(lambda: np.sum(t.softmax_forward(x) * dp), x, dx)


def test_cross_entropy_backward(rng, lead):
    logits, y = rng.standard_normal(lead + (T, V)), rng.integers(0, V, lead + (T,))
    dlogits = t.cross_entropy_backward(t.cross_entropy_forward(logits, y)[1], y)
    assert_slopes(lambda: t.cross_entropy_forward(logits, y)[0], logits, dlogits)


def test_layer_norm_backward(rng, lead):
    X, dY = rng.standard_normal(lead + (T, d)), rng.standard_normal(lead + (T, d))
    gamma, beta = rng.standard_normal(d), rng.standard_normal(d)
    grads = t.layer_norm_backward(dY, t.layer_norm_forward(X, gamma, beta)[1])
    for x, gradient in zip((X, gamma, beta), grads, strict=True):
        assert_slopes(lambda: np.sum(t.layer_norm_forward(X, gamma, beta)[0] * dY), x, gradient)


def test_embed_backward(rng, lead):
    params = rand_arrays(rng, dict(tok_emb=(V, d), pos_emb=(Tmax, d)))
    ids = rng.integers(0, 4, lead + (T,))  # few ids, so that they repeat
    dX = rng.standard_normal(lead + (T, d))
    grads = dict(zip(("tok_emb", "pos_emb"), t.embed_backward(dX, ids, params), strict=True))
    assert_all_slopes(lambda: np.sum(t.embed_forward(params, ids) * dX), params, grads)


@pytest.fixture
def layer(rng, lead):
    """Input, block parameters and upstream gradient for one of the three composed layers."""
    X, dY = rng.standard_normal(lead + (T, d)), rng.standard_normal(lead + (T, d))
    return X, rand_arrays(rng, BLOCK_SHAPES), dY


def test_attention_backward(layer):
    Xn, p, dOut = layer
    dXn, grads = t.attention_backward(dOut, t.attention_forward(Xn, p, H)[1], p)
    own = {name: p[name] for name in ("wq", "bq", "wk", "bk", "wv", "bv", "wo", "bo")}
    assert_all_slopes(
        lambda: np.sum(t.attention_forward(Xn, p, H)[0] * dOut), {"X": Xn} | own, {"X": dXn} | grads
    )


def test_ffn_backward(layer):
    Xn, p, dOut = layer
    _, cache = t.ffn_forward(Xn, p)
    assert_off_the_kink(cache["Z"])
    dXn, grads = t.ffn_backward(dOut, cache, p)
    own = {name: p[name] for name in ("ff1_w", "ff1_b", "ff2_w", "ff2_b")}
    assert_all_slopes(
        lambda: np.sum(t.ffn_forward(Xn, p)[0] * dOut), {"X": Xn} | own, {"X": dXn} | grads
    )


def block_relu_inputs(X, p):
    Xn, _ = t.layer_norm_forward(X, p["ln1_g"], p["ln1_b"])
    X1 = X + t.attention_forward(Xn, p, H)[0]
    return t.ffn_forward(t.layer_norm_forward(X1, p["ln2_g"], p["ln2_b"])[0], p)[1]["Z"]


def test_block_backward(layer):
    X, p, dY = layer
    assert_off_the_kink(block_relu_inputs(X, p))
    dX, grads = t.block_backward(dY, t.block_forward(X, p, H)[1], p)
    assert_all_slopes(
        lambda: np.sum(t.block_forward(X, p, H)[0] * dY), {"X": X} | p, {"X": dX} | grads
    )


def test_key_bias_has_no_gradient_though_the_query_bias_has(layer):
    Xn, p, dOut = layer
    _, grads = t.attention_backward(dOut, t.attention_forward(Xn, p, H)[1], p)
    assert np.abs(grads["bk"]).max() < 1e-12 < 1e-3 < np.abs(grads["bq"]).max()


def test_rows_of_softmax_layer_norm_and_cross_entropy_gradients_sum_to_zero(rng, lead):
    x, up = rng.standard_normal(lead + (T, d)), rng.standard_normal(lead + (T, d))
    p, y = t.softmax_forward(x), rng.integers(0, d, lead + (T,))
    dX, _, _ = t.layer_norm_backward(up, t.layer_norm_forward(x, up[..., :1, :].mean(), 0 * up)[1])
    for gradient in (t.softmax_backward(p, up), t.cross_entropy_backward(p, y), dX):
        assert np.abs(gradient.sum(axis=-1)).max() < 1e-12 < 1e-3 < np.abs(gradient).max()


# The whole model


class Model:
    """Small random parameters with a batch of windows in which ids repeat."""

    def __init__(self, layers, seed):
        rng = np.random.default_rng(seed)
        self.config = t.ModelConfig(
            vocab_size=V, context=T, max_context=Tmax, width=d, heads=H, hidden=F, layers=layers
        )
        self.params = rand_arrays(rng, shapes(layers))
        self.x, self.y = rng.integers(0, V, (2, B, T))
        X = t.embed_forward(self.params, self.x)
        for l in range(layers):
            p = t.block_params(self.params, l)
            assert_off_the_kink(block_relu_inputs(X, p))
            X, _ = t.block_forward(X, p, H)

    def loss(self):
        logits, _ = t.forward(self.params, self.x, self.config)
        return t.cross_entropy_forward(logits, self.y)[0]

    def loss_and_grads(self):
        return t.loss_and_grads(self.params, self.x, self.y, self.config)

    def check(self, samples=6, **options):
        rng = np.random.default_rng(12)
        return t.check_params(
            self.params, self.x, self.y, self.config, rng, samples=samples, **options
        )


@pytest.fixture(scope="module")
def model_and_grads():
    model = Model(layers=L, seed=13)
    return model, model.loss_and_grads()[1]


@pytest.mark.parametrize("name", shapes(L))
def test_every_entry_of_every_parameter(model_and_grads, name):
    model, grads = model_and_grads
    assert_slopes(model.loss, model.params[name], grads[name], name)


def test_the_loss_that_is_returned_is_the_loss_that_is_differentiated(model_and_grads):
    model, grads = model_and_grads
    assert grads.keys() == model.params.keys()
    assert model.loss_and_grads()[0] == pytest.approx(model.loss(), rel=1e-14)


def test_key_biases_have_no_gradient_in_any_block(model_and_grads):
    _, grads = model_and_grads
    for l in range(L):
        assert np.abs(grads[f"block{l}.bk"]).max() < 1e-14
        assert np.abs(grads[f"block{l}.bq"]).max() > 1e-5


@pytest.mark.parametrize("name", ["attention", "ffn", "block"])
def test_backward_twice_from_one_forward_gives_the_same(layer, name):
    X, p, dY = layer
    forward, backward = getattr(t, f"{name}_forward"), getattr(t, f"{name}_backward")
    _, cache = forward(X, p, *([H] if name != "ffn" else []))
    dX, grads = backward(dY, cache, p)
    kept = {"X": dX.copy()} | {k: g.copy() for k, g in grads.items()}
    dX, grads = backward(dY, cache, p)
    assert all(np.array_equal(kept[k], g) for k, g in ({"X": dX} | grads).items())


def test_backward_of_the_model_twice_gives_the_same():
    model = Model(layers=L, seed=13)
    first = {name: g.copy() for name, g in model.loss_and_grads()[1].items()}
    t.loss_and_grads(model.params, model.y, model.x, model.config)  # nothing of it may linger
    second = model.loss_and_grads()[1]
    assert all(np.array_equal(first[name], second[name]) for name in first)


# The numerical gradient and the measure of error


@pytest.mark.parametrize("h", [0.5, 0.25])
def test_numerical_gradient_steps_the_same_way_on_both_sides(h):
    x = np.array([3.0, -2.0])
    slopes = t.numerical_grad(lambda x: float(np.sum(x**3)), x, h)
    assert slopes.tolist() == [27 + h * h, 12 + h * h]  # exact in these numbers


def test_numerical_gradient_of_each_entry(rng):
    x, c = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 3, 4))
    slopes = t.numerical_grad(lambda x: float(np.sum(c * np.sin(x))), x)
    assert slopes.shape == x.shape
    np.testing.assert_allclose(slopes, c * np.cos(x), rtol=1e-7, atol=1e-9)


def test_numerical_gradient_changes_the_array_itself_and_restores_it_exactly(rng):
    x = rng.standard_normal((3, 4))
    before = x.copy()
    slopes = t.numerical_grad(lambda _: float(np.sum(x**2)), x)  # f reads the outer x
    np.testing.assert_allclose(slopes, 2 * before, rtol=1e-7, atol=1e-9)
    assert np.array_equal(x, before)


def test_numerical_gradient_of_an_array_that_is_a_view(rng):
    whole = rng.standard_normal((4, 6))
    x = whole[1:, ::2].T  # not contiguous: a flattened copy would feel none of the steps
    before = whole.copy()
    slopes = t.numerical_grad(lambda x: float(np.sum(x**2)), x)
    np.testing.assert_allclose(slopes, 2 * before[1:, ::2].T, rtol=1e-7, atol=1e-9)
    assert np.array_equal(whole, before)


def test_relative_error_divides_by_the_larger_or_by_the_floor():
    a = np.array([1.0, 2.0, -2.0, 0.0, 1e-9, 0.0, 3.0])
    b = np.array([2.0, 1.0, 2.0, 4.0, 3e-9, 0.0, 3.0])
    expected = [0.5, 0.5, 2.0, 1.0, 0.2, 0.0, 0.0]
    np.testing.assert_allclose(t.relative_error(a, b), expected, rtol=1e-12)
    np.testing.assert_allclose(t.relative_error(1.0, 1.5, eps=10.0), 0.05, rtol=1e-12)


# The gradient check can fail


WRONG = 5e-3  # far above the noise of right gradients, below the mildest sabotage
NOISE = 1e-5


def key_bias(name):
    """Its gradient is zero: both numbers are noise, and their ratio means little."""
    return name.endswith(".bk")


def wrong_names(worst):
    return {name for name, error in worst.items() if error > WRONG and not key_bias(name)}


def block_names(*names):
    return {f"block0.{name}" for name in names}


BELOW_ATTENTION = block_names("ln1_g", "ln1_b") | {"tok_emb", "pos_emb"}


@pytest.fixture
def model():
    return Model(layers=1, seed=14)


def test_check_passes_right_gradients_of_every_parameter():
    model = Model(layers=L, seed=13)
    worst = model.check()
    assert worst.keys() == model.params.keys()
    assert not {name for name, e in worst.items() if e > NOISE and not key_bias(name)}
    assert all(worst[f"block{l}.bk"] < 0.05 for l in range(L))
    assert max(worst.values()) > 0


def test_check_leaves_parameters_and_windows_as_they_were(model):
    arrays = model.params | dict(x=model.x, y=model.y)
    before = {name: a.copy() for name, a in arrays.items()}
    model.check()
    assert all(np.array_equal(arrays[name], before[name]) for name in arrays)


def test_check_uses_its_step(model):
    assert max(model.check(h=0.3).values()) > 100 * NOISE


def sabotage_grads(monkeypatch, change):
    right = t.loss_and_grads

    def wrong(*args, **kwargs):
        loss, grads = right(*args, **kwargs)
        grads = dict(grads)
        change(grads)
        return loss, grads

    monkeypatch.setattr(t, "loss_and_grads", wrong)


@pytest.mark.parametrize("name", ["head_b", "block0.bq", "block0.ff1_b"])
def test_check_names_one_bias_that_is_one_percent_off(model, monkeypatch, name):
    sabotage_grads(monkeypatch, lambda grads: grads.update({name: grads[name] * 1.01}))
    worst = model.check()
    assert wrong_names(worst) == {name}
    assert worst[name] == pytest.approx(0.01 / 1.01, rel=1e-2)


def test_check_names_a_key_bias_with_a_gradient(model, monkeypatch):
    sabotage_grads(monkeypatch, lambda g: g.update({"block0.bk": g["block0.bk"] + 1e-4}))
    worst = model.check()
    assert worst["block0.bk"] > 0.9
    assert wrong_names(worst) == set()


def test_check_names_a_position_table_with_one_row_lost(model, monkeypatch):
    def lose(grads):
        grads["pos_emb"] = grads["pos_emb"].copy()
        grads["pos_emb"][1] = 0

    sabotage_grads(monkeypatch, lose)
    assert wrong_names(model.check(samples=20)) == {"pos_emb"}


def test_check_names_a_token_table_that_keeps_one_of_several_contributions(model, monkeypatch):
    right = t.embed_backward

    def wrong(dX, ids, params):
        d_tok, d_pos = right(dX, ids, params)
        d_tok = np.zeros_like(d_tok)
        d_tok[ids] += dX
        return d_tok, d_pos

    assert np.unique(model.x).size < model.x.size
    monkeypatch.setattr(t, "embed_backward", wrong)
    assert wrong_names(model.check(samples=20)) == {"tok_emb"}


def test_check_names_all_below_a_layer_norm_without_its_mean_terms(model, monkeypatch):
    forward, backward = t.layer_norm_forward, t.layer_norm_backward
    seen = []

    def remember(X, gamma, beta):
        Y, cache = forward(X, gamma, beta)
        seen.append((cache, X.copy(), gamma.copy()))
        return Y, cache

    def wrong(dY, cache):
        X, gamma = next((X, gamma) for other, X, gamma in reversed(seen) if other is cache)
        _, dgamma, dbeta = backward(dY, cache)
        return dY * gamma / np.sqrt(X.var(axis=-1, keepdims=True) + 1e-5), dgamma, dbeta

    monkeypatch.setattr(t, "layer_norm_forward", remember)
    monkeypatch.setattr(t, "layer_norm_backward", wrong)
    above = {"lnf_g", "lnf_b", "head_w", "head_b"}
    right = above | {name for name in model.params if key_bias(name)}
    assert wrong_names(model.check()) == model.params.keys() - right


def sabotage_attention_cache(monkeypatch, change):
    right = t.attention_backward

    def wrong(dOut, cache, p):
        return right(dOut, cache | change(cache), p)

    monkeypatch.setattr(t, "attention_backward", wrong)


def test_check_names_queries_and_keys_when_the_scale_is_missing(model, monkeypatch):
    # √dh times too large, as if nobody had divided
    sabotage_attention_cache(
        monkeypatch, lambda c: dict(Qh=c["Qh"] * np.sqrt(dh), Kh=c["Kh"] * np.sqrt(dh))
    )
    assert wrong_names(model.check()) == block_names("wq", "bq", "wk") | BELOW_ATTENTION


def test_check_names_the_value_weights_too_when_the_causal_mask_is_missing(model, monkeypatch):
    sabotage_attention_cache(
        monkeypatch, lambda c: dict(A=t.softmax_forward(t.scaled_scores(c["Qh"], c["Kh"])))
    )
    # bv stays right: rows of weights that sum to 1 pass a shift of all values on unchanged.
    named = block_names("wq", "bq", "wk", "wv") | BELOW_ATTENTION
    assert wrong_names(model.check()) == named


def test_check_names_what_lies_below_a_lost_residual_path(model, monkeypatch):
    right = t.block_backward

    def wrong(dY, cache, p):
        dY = dY.copy()
        dX, grads = right(dY, cache, p)
        return dX - dY, grads

    monkeypatch.setattr(t, "block_backward", wrong)
    assert wrong_names(model.check()) == {"tok_emb", "pos_emb"}


def test_check_names_the_first_layer_when_relu_lets_everything_through(model, monkeypatch):
    right = t.ffn_backward
    monkeypatch.setattr(
        t, "ffn_backward", lambda dOut, cache, p: right(dOut, cache | dict(Z=cache["Z"] ** 2), p)
    )
    wrong = wrong_names(model.check())
    assert block_names("ff1_w", "ff1_b", "ln2_g", "ln2_b") <= wrong
    assert not wrong & (block_names("ff2_w", "ff2_b") | {"lnf_g", "head_w"})


def test_check_names_everything_when_the_mean_over_positions_is_forgotten(model, monkeypatch):
    right = t.cross_entropy_backward
    monkeypatch.setattr(t, "cross_entropy_backward", lambda P, y, *n: right(P, y, *n) * y.size)
    assert wrong_names(model.check()) == {name for name in model.params if not key_bias(name)}
