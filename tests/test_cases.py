"""Cases that have tripped programs of this kind, by the values they should give."""
import io
import os
import subprocess
import sys

import numpy as np
import pytest

import tinygpt as t
from conftest import ROOT
from test_program import SMALL, folder, refused, run     # noqa: F401


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12)


# ---- text and tokenizer -----------------------------------------------------------------------

@pytest.mark.parametrize("hash_seed", ["0", "1", "2", "random"])
def test_ties_do_not_depend_on_the_order_of_a_dict(hash_seed):
    code = "import tinygpt as t; print([t.train_bpe_on_text(x, 3) for x in ('nmlknmlk', 'cabacaba')])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                         env={**os.environ, "PYTHONHASHSEED": hash_seed}).stdout
    assert eval(out) == [[("l", "k"), ("m", "lk"), ("n", "mlk")],
                         [("a", "b"), ("ab", "a"), ("c", "aba")]]


@pytest.mark.parametrize("text, merges, tokens, V", [
    ("abababab", ["ab", "abab"], ["abab", "abab"], 5), ("abcdef", [], list("abcdef"), 7),
    ("a", [], ["a"], 2)])
def test_more_merges_than_the_text_supports(text, merges, tokens, V):
    tokenizer = t.build_tokenizer(text, 100)
    assert ["".join(pair) for pair in tokenizer.merges] == merges
    assert [tokenizer.itos[i] for i in tokenizer.encode(text)] == tokens
    assert len(tokenizer.itos) == V                 # <unk> included


def test_the_embedding_has_a_row_for_each_token_that_there_is(tmp_path):
    (tmp_path / "text.txt").write_text("abababab " * 40)
    result = run("train", "--text", "text.txt", "--merges", 100, "--context", 3, "--steps", 1,
                 cwd=tmp_path)
    checkpoint = t.load_checkpoint(tmp_path / "tinygpt.npz")
    assert result.stderr.count("asked for") == 1
    assert len(checkpoint.params["tok_emb"]) == len(checkpoint.tokenizer.itos)


def test_merges_are_replayed_by_rank():
    yz = [("y", "z"), ("x", "y")]
    assert t.apply_merges("xyz", yz) == ["x", "yz"]
    assert t.apply_merges("xyzxy", yz) == ["x", "yz", "xy"]
    merges = [("s", "s"), ("i", "ss"), ("i", "s"), ("p", "p")]
    assert t.apply_merges("mississippi", merges) == ["m", "iss", "iss", "i", "pp", "i"]
    merges = t.train_bpe_on_text("yzyyzyzy", 2)
    assert t.apply_merges("yzyyzyzy", merges) == ["yzy", "yz", "yzy"]


def test_training_and_encoding_cut_the_text_alike():
    text = "at a cat\nat a hat\nat a mat\n"
    tokenizer = t.build_tokenizer(text, 6)
    words = [list(word) for word in t.PRE_TOKEN.findall(text)]
    for pair in tokenizer.merges:
        words = [t.merge_tokens(word, pair) for word in words]
    for tokenizer in (tokenizer, t.Tokenizer(tokenizer.itos, tokenizer.merges)):
        assert [tokenizer.itos[i] for i in tokenizer.encode(text)] == sum(words, [])
    assert not any(c in token[1:] for token in tokenizer.itos[1:] for c in " \n")


@pytest.mark.parametrize("merges", [0, 50])
@pytest.mark.parametrize("text", ["  x", "a\tb", "\n\n\n", "x  ", " ", "", "e\u0301\u00e9",
                                  "\U0001F468\u200d\U0001F469\u200d\U0001F467 e\u0301 \u00e9"])
def test_round_trip_of_awkward_text(text, merges):
    every = "  x a\tb \n\n\n e\u0301\u00e9 \U0001F468\u200d\U0001F469\u200d\U0001F467 " * 3
    tokenizer = t.build_tokenizer(every, merges)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    if merges == 0:
        assert len(tokenizer.encode(text)) == len(text)


def test_an_unknown_character_is_never_dropped():
    tokenizer = t.build_tokenizer("abcdef \n", 0)
    assert tokenizer.encode("fa?ce") != tokenizer.encode("face")
    assert tokenizer.decode(tokenizer.encode("fa?ce")) == "fa<unk>ce"
    assert tokenizer.unknown("FACE?") == ["F", "A", "C", "E", "?"]


@pytest.mark.parametrize("data", [b"ab\r\nab\r\n", b"ab\rab\r", b"\xef\xbb\xbfab\n"])
def test_one_vocabulary_for_all_line_ends(data, tmp_path):
    (tmp_path / "text.txt").write_bytes(data)
    text = t.read_text(tmp_path / "text.txt")
    assert set(t.build_tokenizer(text, 0).itos) == {"<unk>", "\n", "a", "b"}


# ---- windows, split, batches ------------------------------------------------------------------

@pytest.mark.parametrize("N, T, k, W", [(8, 8, 1, 0), (9, 8, 1, 1), (10, 8, 1, 2), (10, 4, 1, 6),
                                        (10, 4, 2, 3), (10, 4, 4, 2), (13, 4, 4, 3), (13, 4, 5, 2),
                                        (13, 4, 13, 1), (100, 8, 1, 92)])
def test_how_many_windows(N, T, k, W):
    x, y = t.make_windows(np.arange(N), T, k)
    assert x.shape == y.shape == (W, T) and t.window_count(N, T, k) == W
    assert np.array_equal(y, x + 1)
    if (N, T, k) == (13, 4, 4):
        assert sorted(y.ravel()) == list(range(1, 13))
    if (N, T, k) == (13, 4, 5):
        assert set(range(1, 13)) - set(y.ravel()) == {5, 10, 11, 12}


def test_no_validation_text_is_trained_on():
    train_ids, val_ids = t.split_ids(range(100), 0.1)
    (x, y), (val_x, val_y) = t.make_windows(train_ids, 8, 1), t.make_windows(val_ids, 8, 1)
    assert len(x) == 82 and y.max() == 89 and len(val_x) == 2 and val_x.min() == 90


def test_fewer_windows_than_a_batch(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefg" * 2)
    result = run("train", "--text", "text.txt", "--merges", 0, "--context", 4, "--stride", 4,
                 "--val-fraction", 0, "--batch", 8, "--steps", 5, cwd=tmp_path)
    assert result.returncode == 0 and "3 training windows" in result.stderr
    assert t.load_checkpoint(tmp_path / "tinygpt.npz").step == 5
    x = np.arange(14).reshape(7, 2)
    sizes = [len(xb) for xb, _ in t.iterate_batches(x, x, 3, np.random.default_rng(0))]
    assert sizes == [3, 3, 1]


# ---- sampling ---------------------------------------------------------------------------------

def test_top_k_ends_and_ties():
    z = [1.5, 0.5, 0.5, 0.5, -1.0]
    p = t.next_probabilities(z)
    close(t.next_probabilities(z, top_k=1), [1, 0, 0, 0, 0])
    close(t.next_probabilities(z, top_k=2),
          [0.47536689, 0.17487770, 0.17487770, 0.17487770, 0])
    for k in (0, 5, 100):
        close(t.next_probabilities(z, top_k=k), p)


def test_top_p_keeps_the_token_that_crosses():
    p = np.log([0.05, 0.36, 0.48, 0.11])
    np.testing.assert_allclose(t.next_probabilities(p, top_p=0.9),
                               [0, 0.37894737, 0.50526316, 0.11578947], atol=1e-8)
    p = np.array([0.5, 0.25, 0.125, 0.125])
    for top_p, kept in ((0.49, 1), (0.5, 1), (0.75, 2), (0.76, 3), (1e-9, 1), (1, 4)):
        assert np.count_nonzero(t.keep_top_p(p, top_p)) == kept
    np.testing.assert_allclose(t.keep_top_p(p, 0.76), [4 / 7, 2 / 7, 1 / 7, 0])
    assert (t.next_probabilities(np.linspace(0, 12, 1000, dtype=np.float32)) > 0).all()


def test_order_of_temperature_top_k_and_top_p():
    z = np.log([0.44, 0.32, 0.16, 0.08])
    np.testing.assert_allclose(t.next_probabilities(z, 2.0),
                               [0.34695394, 0.29588331, 0.20922110, 0.14794166], rtol=1e-6)
    assert np.count_nonzero(t.next_probabilities(z, 2.0, 0, 0.7)) == 3
    np.testing.assert_allclose(t.next_probabilities(z, 1.0, 2)[:2], [0.57894737, 0.42105263])
    assert np.flatnonzero(t.next_probabilities(z, 1.0, 2, 0.5)).tolist() == [0]
    assert np.flatnonzero(t.next_probabilities(z, 1.0, 1, 0.1)).tolist() == [0]


def test_float32_logits_can_always_be_drawn_from():
    rng = np.random.default_rng(0)
    for p in ([1 / 3] * 3, [0.1, 0.2, 0.3, 0.4]):
        z = np.log(np.array(p, np.float32))
        drawn = np.bincount([t.sample_next(z, rng) for _ in range(4000)], minlength=len(p)) / 4000
        error = 4 * np.sqrt(np.array(p) * (1 - np.array(p)) / 4000)
        assert (abs(drawn - p) < error).all()


def test_masking_leaves_nothing_behind():
    close(t.next_probabilities([-20, -30, -40], top_k=1), [1, 0, 0])
    A = t.attention_weights(*np.random.default_rng(0).normal(size=(2, 1, 3, 4)))
    assert (A[:, np.triu_indices(3, 1)[0], np.triu_indices(3, 1)[1]] == 0).all()
    close(A.sum(-1), 1)


@pytest.mark.parametrize("z", [[np.nan, 1, 2], [np.inf, 0, 0], [-np.inf] * 3])
def test_logits_that_are_not_finite(z):
    for temperature in (0, 1):
        with pytest.raises(ValueError, match="not finite"):
            t.sample_next(np.array(z), np.random.default_rng(0), temperature)
    close(t.next_probabilities([-np.inf, 0, 0]), [0, 0.5, 0.5])


def test_prompts_longer_than_the_context():
    config = t.ModelConfig(11, 8, 8, width=6, heads=2, hidden=7, layers=1)
    params = t.init_params(config, np.random.default_rng(0))
    prompt = np.random.default_rng(1).integers(0, 11, 20).tolist()
    long, short = (t.generate(params, config, ids, 5, np.random.default_rng(2))
                   for ids in (prompt, prompt[-8:]))
    assert long[:20] == prompt and long[20:] == short[8:]
    assert len(t.generate(params, config, [1], 13, np.random.default_rng(2))) == 14
    with pytest.raises(ValueError, match=r"1 to 8 .*got 9"):
        t.forward(params, np.ones(9, int), config)


# ---- model numerics ---------------------------------------------------------------------------

def test_layer_norm_values():
    x = np.array([[2.0, 4.0, 4.0, 10.0]])
    Y, cache = t.layer_norm_forward(x, np.ones(4), np.zeros(4))
    np.testing.assert_allclose(Y[0], [-0.99999944, -0.33333315, -0.33333315, 1.66666574], rtol=1e-6)
    dX, _, _ = t.layer_norm_backward(np.array([[0.0, 1.0, 0.0, -1.0]]), cache)
    np.testing.assert_allclose(dX[0], [-0.16666639, 0.27777769, -0.05555546, -0.05555583],
                               rtol=1e-6)


def test_attention_values():
    S = np.array([[0, 7], [np.log(1), np.log(4)]])
    close(t.softmax_forward(t.causal_mask(S)), [[1, 0], [0.2, 0.8]])
    q, k = np.array([[[1.0, 1, 0, 2]]]), np.array([[[2.0, 0, 1, 1]]])
    close(t.scaled_scores(q, k), 2)


def test_cross_entropy_values():
    loss, P = t.cross_entropy_forward(np.array([[2.0, 1, 0]]), np.array([0]))
    close(loss, 0.40760596)
    np.testing.assert_allclose(t.cross_entropy_backward(P, np.array([0]))[0],
                               [-0.33475904, 0.24472847, 0.09003057], rtol=1e-6)
    for z, y, value in (([0, -1000], 1, 1000), ([1000, 0], 0, 0), ([0] * 65, 3, 4.17438727)):
        close(t.cross_entropy_forward(np.array([z], float), np.array([y]))[0], value)
    z = np.array([[5e7, 5e7]], np.float32)
    assert t.cross_entropy_forward(z, np.array([1]))[0] == pytest.approx(0.6931472, rel=1e-4)


def test_first_loss_is_near_the_log_of_the_vocabulary():
    config = t.ModelConfig(65)
    params = t.init_params(config, np.random.default_rng(0))
    x, y = np.random.default_rng(1).integers(0, 65, (2, 16, 16))
    assert abs(t.loss_and_grads(params, x, y, config)[0] - np.log(65)) < 0.6


def test_repeated_ids_add_up():
    params = {"tok_emb": np.zeros((3, 1)), "pos_emb": np.zeros((3, 1))}
    dX = np.array([[[1.0], [2], [4]], [[8.0], [16], [32]]])
    d_tok, _ = t.embed_backward(dX, np.array([[2, 0, 2], [2, 1, 0]]), params)
    assert d_tok.ravel().tolist() == [34, 16, 13]


# ---- optimizer --------------------------------------------------------------------------------

def test_adamw_values():
    params = {"w": np.array([[2.0]])}
    optimizer = t.AdamW(params, 0.9, 0.99, 1e-8, 0.2)
    for g, value in ((0.3, 1.9860000003), (-0.1, 1.9780185484), (0.2, 1.9680219132)):
        optimizer.step(params, {"w": np.array([[g]])}, 0.01)
        assert params["w"].item() == pytest.approx(value, abs=1e-9)
    params = {"w": np.array([[2.0]]), "b": np.array([2.0])}
    t.AdamW(params, 0.9, 0.99, 1e-8, 0.2).step(params, {k: 0 * w for k, w in params.items()}, 0.01)
    assert params["w"].item() == pytest.approx(1.996) and params["b"].item() == 2.0


def test_clipping_values():
    for limit, a, b in ((3.5, [1, -1.5], 3), (7, [2, -3], 6), (8, [2, -3], 6)):
        grads = {"a": np.array([2.0, -3.0]), "b": np.array([[6.0]])}
        assert t.clip_grad_norm(grads, limit) == 7
        close(grads["a"], a), close(grads["b"], b)
    for value, norm, after in ((3e19, 6e19, 0.5), (1e-23, 2e-23, 1e-23), (0, 0, 0)):
        grads = {"a": np.full(4, value, np.float32)}
        assert t.clip_grad_norm(grads, 1.0) == pytest.approx(norm, rel=1e-6)
        np.testing.assert_allclose(grads["a"], np.float32(after), rtol=1e-6)
    for value in (np.inf, np.nan):
        grads = {"a": np.array([value, 1.0])}
        assert not np.isfinite(t.clip_grad_norm(grads, 1.0)) and grads["a"][1] == 1


# ---- terminal ---------------------------------------------------------------------------------

class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_control_characters_are_escaped_on_a_terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    t.print_text("a\x1b[2Jb\x08\tc\n\r")
    assert screen.getvalue() == "a\\x1b[2Jb\\x08\tc\n\\r\n"


def test_the_live_line_fits_the_terminal_and_ends_clean(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    clock = iter(np.arange(0, 99, 0.5))
    monkeypatch.setattr(t.time, "monotonic", lambda: next(clock))
    monkeypatch.setenv("COLUMNS", "70")
    say = t.Progress()
    for step in range(1, 6):
        say.step(step, 5, 3.0 - step / 10, 0.01, 256)
    say.measured(2.5, 3.0)
    text = screen.getvalue()
    assert text.endswith("\n") and text.count("\n") == 1
    parts = text.split("\r")
    assert len(parts) == 11 and all(len(part) < 70 for part in parts[:-1])
    assert [f"step {i} of 5" in text for i in range(1, 7)] == [True] * 5 + [False]
    assert "validation 2.500" in text and "perplexity 12.2" in text
    assert "bits per character 1.202" in text


def test_look_shows_tokens_attention_and_next_tokens(folder):      # noqa: F811
    result = run("look", "--model", folder / "model.npz", "--prompt", "the hen", "--top-k", 2)
    assert result.returncode == 0 and result.stderr == "" and "\x1b" not in result.stdout
    checkpoint = t.load_checkpoint(folder / "model.npz")
    ids = np.array(checkpoint.tokenizer.encode("the hen"))
    logits, cache = t.forward(checkpoint.params, ids, checkpoint.config)
    p = t.next_probabilities(logits[-1])
    q = t.next_probabilities(logits[-1], 0.8, 2)
    best = int(np.argmax(p))
    assert f"{p[best]:6.1%}" in result.stdout and f"{q[best]:6.1%}" in result.stdout
    for i, token in enumerate(ids):
        assert f"id {token:5}" in result.stdout
        if i:
            loss = t.cross_entropy_forward(logits[i - 1:i], ids[i:i + 1])[0]
            assert f"{loss:8.3f}" in result.stdout
    assert result.stdout.count("block 0, head") == 3
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    refused(run("look", "--model", "no.npz"), "no.npz")


def test_an_undecodable_prompt_is_no_traceback(folder):            # noqa: F811
    result = subprocess.run([sys.executable, str(ROOT / "tinygpt.py"), "generate", "--model",
                             str(folder / "model.npz"), "--tokens", "2", "--prompt", b"a\xffb"],
                            capture_output=True)
    assert result.returncode == 0 and b"Traceback" not in result.stderr


def test_zero_of_what_may_be_zero(folder):                         # noqa: F811
    for option in ("--merges", "--warmup", "--weight-decay", "--clip", "--eval-every", "--lr",
                   "--val-fraction", "--epochs", "--seed"):
        result = run("train", "--text", "text.txt", "--out", "zero.npz", *SMALL, "--steps", 2,
                     option, 0, cwd=folder)
        assert result.returncode == 0, (option, result.stderr)


@pytest.mark.parametrize("stretch", [1, 2, 5, 7])
def test_the_optimizer_gives_the_same_whatever_the_length_of_a_stretch(stretch, monkeypatch):
    rng = np.random.default_rng(0)
    start = {"b": rng.normal(size=3), "w": rng.normal(size=(2, 3)), "c": rng.normal(size=2),
             "v": rng.normal(size=(3, 1))}
    results = []
    for length in (10 ** 6, stretch):
        monkeypatch.setattr(t, "STRETCH", length)
        params = {name: W.copy() for name, W in start.items()}
        optimizer = t.AdamW(params, weight_decay=0.3)
        for _ in range(3):
            optimizer.step(params, {name: 1 + W for name, W in start.items()}, 0.1)
        results.append(params)
    assert all(np.array_equal(results[0][name], results[1][name]) for name in start)
