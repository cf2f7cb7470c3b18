"""Each equation read a second time, slowly: plain loops over indices against the module's arrays.

All sizes differ, so that a swapped axis cannot hide behind equal numbers. The random inputs are
read-only, so that a function that writes into its arguments fails wherever it is called.
"""

import math
import random
import re
import unicodedata
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

import tinygpt as t
from conftest import ROOT

T, d, dh, H, B, F, V, L, Tmax = 5, 8, 4, 2, 6, 10, 11, 3, 7
CONFIG = t.ModelConfig(
    vocab_size=V, context=T, max_context=Tmax, width=d, heads=H, hidden=F, layers=L
)
BLOCK_SHAPES = dict(
    ln1_g=(d,), ln1_b=(d,), wq=(d, d), bq=(d,), wk=(d, d), bk=(d,), wv=(d, d), bv=(d,),
    wo=(d, d), bo=(d,), ln2_g=(d,), ln2_b=(d,), ff1_w=(d, F), ff1_b=(F,), ff2_w=(F, d), ff2_b=(d,),
)  # fmt: skip
SHAPES = (
    dict(tok_emb=(V, d), pos_emb=(Tmax, d))
    | {f"block{l}.{name}": s for l in range(L) for name, s in BLOCK_SHAPES.items()}
    | dict(lnf_g=(d,), lnf_b=(d,), head_w=(d, V), head_b=(V,))
)


# Helpers


@pytest.fixture
def rng():
    return np.random.default_rng(2024)


@pytest.fixture(params=[(), (B,), (2, 3)], ids=["window", "batch", "two-leading-axes"])
def lead(request):
    return request.param


def frozen(a):
    a = np.array(a)
    a.flags.writeable = False
    return a


def rand(rng, *shape):
    return frozen(rng.standard_normal(shape))


def rand_ids(rng, *shape, high=V):
    return frozen(rng.integers(0, high, shape))


def rand_block(rng):
    return {name: rand(rng, *shape) for name, shape in BLOCK_SHAPES.items()}


def rand_params(rng, dtype=np.float64):
    return {name: frozen(rand(rng, *shape).astype(dtype)) for name, shape in SHAPES.items()}


def close(actual, expected, rtol=1e-12, atol=1e-12):
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def all_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        close(actual[name], expected[name])


def per_window(slow, lead, *arrays):
    """slow(window, ...) for every index of the leading axes, put together again."""
    results = [slow(*(a[i] for a in arrays)) for i in np.ndindex(lead)]
    return np.reshape(results, lead + np.shape(results[0]))


def sum_of(dicts):
    return {name: sum(one[name] for one in dicts) for name in dicts[0]}


# 1 to 5: tokenizer


def slow_pre_tokens(text):
    """The alternatives of the GPT-2 pattern, tried by hand from left to right."""

    def kind(ch):
        letter = unicodedata.category(ch)[0]
        return " " if ch.isspace() else letter if letter in "LN" else "other"

    out, i = [], 0
    while i < len(text):
        ending = next((e for e in "'s 't 're 've 'm 'll 'd".split() if text.startswith(e, i)), None)
        start = i + (text[i] == " " and i + 1 < len(text) and kind(text[i + 1]) != " ")
        end = start + 1
        while end < len(text) and kind(text[end]) == kind(text[start]):
            end += 1
        if ending:
            end = i + len(ending)
        elif kind(text[start]) == " " and end < len(text) and end - start > 1:
            end -= 1  # the last blank goes with what follows
        out.append(text[i:end])
        i = end
    return out


def slow_merge(tokens, pair):
    if len(tokens) < 2:
        return list(tokens)
    if (tokens[0], tokens[1]) == pair:
        return [pair[0] + pair[1]] + slow_merge(tokens[2:], pair)
    return [tokens[0]] + slow_merge(tokens[1:], pair)


def slow_train(word_counts, n_merges):
    """Recounts every pair before every merge. Gives the merges and the final tokens by word."""
    tokens = {word: list(word) for word in word_counts}
    merges = []
    while len(merges) < n_merges:
        counts = {}
        for word, n in word_counts.items():
            for i in range(len(tokens[word]) - 1):
                pair = tokens[word][i], tokens[word][i + 1]
                counts[pair] = counts.get(pair, 0) + n
        if max(counts.values(), default=0) < 2:
            break
        pair = sorted(counts, key=lambda pair: (-counts[pair], pair))[0]
        merges.append(pair)
        tokens = {word: slow_merge(toks, pair) for word, toks in tokens.items()}
    return merges, tokens


def found_pre_tokens(text):
    return [match.group(0) for match in re.finditer(t.PRE_TOKEN, text)]


def merges_of(text, n):
    return [tuple(pair) for pair in t.train_bpe_on_text(text, n)]


def tokens_of(tokenizer, text):
    return [tokenizer.itos[i] for i in tokenizer.encode(text)]


STRANGE = list("ab zZ09_-.,'\"?\t\n\r\v\x00\x1b\x1c\x85\xa0²½") + [
    "\u00e9", "\u0301", "\u0663", "\u200d", "\u2028", "\u3000", "\ufeff", "\u4e2d", "\U0001f468",
]  # fmt: skip
AWKWARD = [
    "  x", "a\tb", "\n\n\n", "x  ", " ", "", "e\u0301\u00e9", "\r\n \r", "don't  we'll",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f468\u200d\U0001f469 e\u0301 \u00e9 ",
]  # fmt: skip
CATS = "at a cat\nat a hat\nat a mat\n"


@pytest.mark.parametrize("text, expected", [
    ("Hello world!", ["Hello", " world", "!"]),
    ("a  b", ["a", " ", " b"]),
    ("a\n\n b", ["a", "\n\n", " b"]),
    ("x1 22y", ["x", "1", " 22", "y"]),
    ("it's", ["it", "'s"]),
    ("   ", ["   "]),
    ("a_b", ["a", "_", "b"]),
])  # fmt: skip
def test_pre_tokens_are_cut_as_in_gpt2(text, expected):
    assert found_pre_tokens(text) == slow_pre_tokens(text) == expected


def test_pre_tokens_of_random_text_equal_the_slow_reading():
    rnd = random.Random(1)
    for _ in range(500):
        text = "".join(rnd.choice("absdtlm'' \n\t  .,_-!017\u00e9\u0301\u4e2d") for _ in range(25))
        assert found_pre_tokens(text) == slow_pre_tokens(text)


def test_pre_tokens_cover_every_character_exactly_once():
    rnd = random.Random(2)
    for _ in range(500):
        text = "".join(rnd.choice(STRANGE) for _ in range(rnd.randrange(30)))
        assert "".join(found_pre_tokens(text)) == text
        assert "" not in found_pre_tokens(text)


def test_words_are_counted_and_stay_in_order_of_first_sight():
    text = "the cat, the dog; the cat and the other dog"
    expected = []
    for word in slow_pre_tokens(text):
        if word not in [w for w, _ in expected]:
            expected.append((word, slow_pre_tokens(text).count(word)))
    assert list(t.count_words(text).items()) == expected


def test_merging_goes_left_to_right_and_jumps_over_both_tokens():
    assert list(t.merge_tokens(["a", "a", "a"], ("a", "a"))) == ["aa", "a"]
    assert list(t.merge_tokens(list("abcab"), ("a", "b"))) == ["ab", "c", "ab"]
    assert list(t.merge_tokens(["ab", "a", "b"], ("a", "b"))) == ["ab", "ab"]
    assert list(t.merge_tokens([], ("a", "b"))) == []


def test_merging_equals_the_slow_reading_and_keeps_its_input():
    for word in product("ab", repeat=8):
        for pair in product("ab", repeat=2):
            tokens = list(word)
            assert list(t.merge_tokens(tokens, pair)) == slow_merge(word, pair)
            assert tokens == list(word)


@pytest.mark.parametrize("text, merges", [
    ("nmlknmlk", ["l k", "m lk", "n mlk"]),
    ("cabacaba", ["a b", "ab a", "c aba"]),
    ("yzyyzyzy", ["y z", "yz y"]),
    ("abababab", ["a b", "ab ab"]),
    ("aaa", ["a a"]),
    ("abcdef", []),
    ("a", []),
    ("", []),
])  # fmt: skip
def test_ties_go_to_the_smallest_pair_and_training_stops_at_pairs_seen_once(text, merges):
    assert merges_of(text, 100) == [tuple(pair.split()) for pair in merges]


def test_overlapping_pairs_count_at_every_place():
    # (a, a) occurs at 4 places but fits in only twice, (b, c) occurs at 3 places.
    assert [tuple(m) for m in t.train_bpe({"aaaaa": 1, "bc": 3}, 1)] == [("a", "a")]


def test_pairs_never_cross_from_one_word_to_the_next():
    assert [tuple(m) for m in t.train_bpe({"ab": 1, "ba": 1}, 5)] == []


def test_all_short_strings_over_two_letters_train_as_with_recounting():
    for n in range(11):
        for letters in product("ab", repeat=n):
            text = "".join(letters)
            merges, tokens = slow_train({text: 1}, 6)
            assert merges_of(text, 6) == merges
            assert list(t.apply_merges(text, merges)) == tokens[text]


def test_weighted_words_train_as_with_recounting():
    rnd = random.Random(3)
    for _ in range(150):
        words = ["".join(rnd.choice("aabc") for _ in range(rnd.randint(1, 9))) for _ in range(12)]
        counts = {word: rnd.randint(1, 4) for word in words}
        merges, tokens = slow_train(counts, 15)
        assert [tuple(m) for m in t.train_bpe(counts, 15)] == merges
        for word in counts:
            assert list(t.apply_merges(word, merges)) == tokens[word]


@pytest.mark.parametrize("word, expected", [
    ("xyz", "x yz"),
    ("xyzxy", "x yz xy"),
    ("mississippi", "m iss iss i pp i"),
])  # fmt: skip
def test_encoding_replays_merges_by_rank(word, expected):
    merges = [("y", "z"), ("x", "y"), ("s", "s"), ("i", "ss"), ("i", "s"), ("p", "p")]
    assert list(t.apply_merges(word, merges)) == expected.split()


@pytest.mark.parametrize("n_merges", [0, 1, 6, 40])
@pytest.mark.parametrize("text", [CATS, "yzyyzyzy", "banana bandana, a banana and 1001 nights" * 2])
def test_encoding_the_training_text_gives_the_tokens_training_ended_with(text, n_merges):
    words = slow_pre_tokens(text)
    counts = {word: words.count(word) for word in words}
    tokens = slow_train(counts, n_merges)[1]
    trained = t.build_tokenizer(text, n_merges)     # has kept the ids of the training text
    loaded = t.Tokenizer(trained.itos, trained.merges)
    for tokenizer in (trained, loaded):
        assert tokens_of(tokenizer, text) == [token for word in words for token in tokens[word]]


def test_a_loaded_tokenizer_encodes_the_corpus_as_the_trained_one_does():
    text = (ROOT / "corpus.txt").read_text(encoding="utf-8")
    trained = t.build_tokenizer(text, 1700)
    assert trained.encode(text) == t.Tokenizer(trained.itos, trained.merges).encode(text)


def test_no_token_has_a_blank_or_line_end_inside():
    tokenizer = t.build_tokenizer(CATS * 3, 50)
    assert len(tokenizer.merges) > 5
    assert not [token for token in tokenizer.itos if len(token) > 1 and re.search(r"\s", token[1:])]


def test_vocabulary_is_unknown_then_characters_by_first_sight_then_merged_tokens():
    text = "zebra bazaar zebra bazaar"
    merges = merges_of(text, 7)
    expected = ["<unk>"]
    for token in list(text) + [a + b for a, b in merges]:
        if token not in expected:
            expected.append(token)
    tokenizer = t.build_tokenizer(text, 7)
    assert len(merges) == 7
    assert [tuple(pair) for pair in tokenizer.merges] == merges
    assert list(tokenizer.itos) == expected
    assert tokenizer.stoi == {token: i for i, token in enumerate(expected)}


def test_early_stop_leaves_no_unreachable_token():
    tokenizer = t.build_tokenizer("abababab", 100)
    assert list(tokenizer.itos) == ["<unk>", "a", "b", "ab", "abab"]
    assert tokens_of(tokenizer, "abababab") == ["abab", "abab"]


@pytest.mark.parametrize("n_merges", [0, 50])
@pytest.mark.parametrize("text", AWKWARD, ids=ascii)
def test_awkward_text_survives_the_round_trip(text, n_merges):
    tokenizer = t.build_tokenizer("\n".join(AWKWARD) + "\n" + "\t".join(AWKWARD), n_merges)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert type(ids) is list and all(type(i) is int for i in ids)
    assert 0 not in ids


def test_random_strange_text_survives_the_round_trip():
    rnd = random.Random(4)
    tokenizer = t.build_tokenizer("".join(rnd.choice(STRANGE) for _ in range(4000)), 50)
    for _ in range(100):
        text = "".join(rnd.choice(STRANGE) for _ in range(20))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_merges_each_character_is_a_token_and_nothing_is_normalised():
    text = "\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u00e9"
    tokenizer = t.build_tokenizer(text, 0)
    assert tokens_of(tokenizer, text) == list(text)
    assert len(tokenizer.encode(text)) == 10 and len(tokenizer.itos) == 8 + 1


def test_unknown_characters_become_id_0_and_do_not_vanish():
    tokenizer = t.build_tokenizer("face cafe\n", 3)
    ids = tokenizer.encode("fa?ce \U0001f468")
    assert ids.count(0) == 2
    assert tokenizer.decode(ids) == "fa<unk>ce <unk>"
    assert tokenizer.decode([0]) == "<unk>"


# 6 to 9, 54: data


@pytest.mark.parametrize("rho", ["0", "0.05", "0.1", "0.2", "0.25", "0.3", "0.5", "0.7", "0.9"])
def test_split_rounds_the_exact_product_down(rho):
    for n in range(200):
        ids = np.arange(n)
        train, val = t.split_ids(ids, float(rho))
        cut = math.floor((1 - Fraction(rho)) * n)
        assert len(train) == cut
        np.testing.assert_array_equal(np.concatenate([train, val]), ids)


def test_split_survives_a_product_that_falls_short_of_a_whole_number():
    assert int((1 - 0.9) * 10) == 0  # the trap
    train, val = t.split_ids(np.arange(10), 0.9)
    assert list(train) == [0] and list(val) == list(range(1, 10))


@pytest.mark.parametrize("n, size, stride, count", [
    (8, 8, 1, 0), (9, 8, 1, 1), (10, 8, 1, 2), (10, 4, 1, 6), (10, 4, 2, 3), (10, 4, 4, 2),
    (13, 4, 4, 3), (13, 4, 5, 2), (13, 4, 13, 1), (100, 8, 1, 92), (3, 8, 1, 0), (3, 8, 2, 0),
])  # fmt: skip
def test_window_count_and_windows_agree(n, size, stride, count):
    x, y = t.make_windows(np.arange(n), size, stride)
    assert t.window_count(n, size, stride) == count
    assert x.shape == y.shape == (count, size)


def test_windows_equal_the_slow_reading(rng):
    for n, size, stride in product(range(4, 15), range(1, 5), range(1, 7)):
        ids = rand_ids(rng, n)
        starts = [s for s in range(n) if s % stride == 0 and s < n - size]
        x, y = t.make_windows(ids, size, stride)
        assert t.window_count(n, size, stride) == len(starts)
        assert x.tolist() == [[ids[s + i] for i in range(size)] for s in starts]
        assert y.tolist() == [[ids[s + i + 1] for i in range(size)] for s in starts]


def test_stride_of_one_window_makes_each_later_token_a_target_once():
    assert sorted(t.make_windows(np.arange(13), 4, 4)[1].ravel()) == list(range(1, 13))


@pytest.mark.parametrize("stride", [0, -1])
def test_stride_below_one_is_refused(stride):
    with pytest.raises(ValueError):
        t.make_windows(np.arange(20), 4, stride)


def test_split_before_windows_keeps_the_two_parts_apart():
    train, val = t.split_ids(np.arange(100), 0.1)
    train_x, train_y = t.make_windows(train, 8, 1)
    val_x, val_y = t.make_windows(val, 8, 1)
    assert len(train_x) == 82 and max(train_x.max(), train_y.max()) == 89
    assert len(val_x) == 2 and min(val_x.min(), val_y.min()) == 90


@pytest.mark.parametrize("windows, batch", [(7, 3), (6, 3), (3, 8), (1, 1), (50, 7)])
def test_one_pass_shows_each_window_once_and_keeps_x_with_its_y(windows, batch):
    x = frozen(np.arange(windows * T).reshape(windows, T))
    y = frozen(x + 1000)
    batches = list(t.iterate_batches(x, y, batch, np.random.default_rng(5)))
    full, rest = divmod(windows, batch)
    assert [len(xb) for xb, _ in batches] == [batch] * full + [rest] * (rest > 0)
    assert all(np.array_equal(xb + 1000, yb) for xb, yb in batches)
    seen = np.concatenate([xb for xb, _ in batches])
    assert sorted(map(tuple, seen)) == sorted(map(tuple, x))


def test_order_of_batches_is_shuffled_and_fixed_by_the_generator():
    x = frozen(np.arange(50)[:, None])
    rng = np.random.default_rng(6)
    first, second = ([*np.concatenate([b for b, _ in t.iterate_batches(x, x, 8, rng)])[:, 0]]
                     for _ in range(2))  # fmt: skip
    same = [b for b, _ in t.iterate_batches(x, x, 8, np.random.default_rng(6))]
    assert first == [*np.concatenate(same)[:, 0]]
    assert first != sorted(first) and first != second


@pytest.mark.parametrize("windows, batch, epochs", [(7, 3, 2), (6, 3, 5), (3, 8, 1), (1, 1, 9)])
def test_step_counts_round_the_short_batch_up(windows, batch, epochs):
    per_epoch = len(range(0, windows, batch))
    assert tuple(t.step_counts(windows, batch, epochs)) == (per_epoch, epochs * per_epoch)


# 10 to 12: linear layer


def slow_linear(X, W, b):
    return np.array([
        [b[j] + sum(X[i, k] * W[k, j] for k in range(W.shape[0])) for j in range(W.shape[1])]
        for i in range(len(X))
    ])  # fmt: skip


def slow_linear_backward(dY, X, W):
    dX, dW, db = np.zeros(X.shape), np.zeros(W.shape), np.zeros(W.shape[1])
    for i, j in np.ndindex(dY.shape):
        db[j] += dY[i, j]
        for k in range(W.shape[0]):
            dX[i, k] += dY[i, j] * W[k, j]
            dW[k, j] += dY[i, j] * X[i, k]
    return dX, dW, db


def test_linear_forward(rng, lead):
    X, W, b = rand(rng, *lead, T, d), rand(rng, d, F), rand(rng, F)
    close(t.linear_forward(X, W, b), per_window(lambda x: slow_linear(x, W, b), lead, X))


def test_linear_backward(rng, lead):
    X, W, dY = rand(rng, *lead, T, d), rand(rng, d, F), rand(rng, *lead, T, F)
    slow = slow_linear_backward(dY.reshape(-1, F), X.reshape(-1, d), W)
    dX, dW, db = t.linear_backward(dY, X, W)
    close(dX, slow[0].reshape(X.shape))
    close(dW, slow[1])
    close(db, slow[2])


# 13, 14: ReLU


def test_relu_and_its_gradient(rng, lead):
    Z, dA = rand(rng, *lead, T, F), rand(rng, *lead, T, F)
    A, dZ = np.zeros(Z.shape), np.zeros(Z.shape)
    for i in np.ndindex(Z.shape):
        if Z[i] > 0:
            A[i], dZ[i] = Z[i], dA[i]
    close(t.relu_forward(Z), A)
    close(t.relu_backward(dA, Z), dZ)


def test_relu_gradient_is_zero_at_zero_and_asks_the_input_only():
    Z, dA = np.array([-1.0, 0.0, 2.0, 3.0]), np.array([5.0, 5.0, -5.0, 0.0])
    assert t.relu_backward(dA, Z).tolist() == [0, 0, -5, 0]


# 15, 16: softmax


def slow_softmax(row):
    e = [math.exp(x - max(row)) for x in row]
    return np.array([x / math.fsum(e) for x in e])


def slow_softmax_backward(p, dp):
    jacobian = [[p[i] * ((i == j) - p[j]) for j in range(len(p))] for i in range(len(p))]
    return np.array([sum(dp[i] * jacobian[i][j] for i in range(len(p))) for j in range(len(p))])


def test_softmax_and_its_gradient(rng, lead):
    x, dp = rand(rng, *lead, T, V), rand(rng, *lead, T, V)
    p = t.softmax_forward(x)
    close(p, per_window(slow_softmax, lead + (T,), x))
    slow = per_window(slow_softmax_backward, lead + (T,), p, dp)
    close(t.softmax_backward(frozen(p), dp), slow)


def test_softmax_of_very_large_scores():
    with np.errstate(all="raise", under="ignore"):
        close(t.softmax_forward(np.array([1000.0, 999.0])), slow_softmax([1.0, 0.0]))
        close(t.softmax_forward(np.array([-1e5, -1e5 - 1])), slow_softmax([1.0, 0.0]))


def test_softmax_gives_masked_places_exactly_nothing():
    x = np.array([[0.0, -np.inf], [-np.inf, -7.0]])
    assert t.softmax_forward(x).tolist() == [[1, 0], [0, 1]]


# 17 to 19: cross-entropy, perplexity


def slow_cross_entropy(logits, y):
    P = np.array([slow_softmax(row) for row in logits])
    return -sum(math.log(P[i, y[i]]) for i in range(len(y))) / len(y), P


def slow_cross_entropy_backward(P, y):
    n = len(y)
    return np.array([[(P[i, v] - (v == y[i])) / n for v in range(P.shape[1])] for i in range(n)])


def test_cross_entropy_and_its_gradient(rng, lead):
    logits, y = rand(rng, *lead, T, V), rand_ids(rng, *lead, T)
    loss, P = t.cross_entropy_forward(logits, y)
    slow_loss, slow_P = slow_cross_entropy(logits.reshape(-1, V), y.ravel())
    close(loss, slow_loss)
    close(P, slow_P.reshape(logits.shape))
    slow = slow_cross_entropy_backward(slow_P, y.ravel())
    close(t.cross_entropy_backward(frozen(P), y), slow.reshape(logits.shape))


@pytest.mark.parametrize("logits, target, loss, gradient", [
    ([2.0, 1.0, 0.0], 0, 0.40760596444438, [-0.33475904, 0.24472847, 0.09003057]),
    ([0.0, -1000.0], 1, 1000.0, [1.0, -1.0]),
    ([1000.0, 0.0], 0, 0.0, [0.0, 0.0]),
    ([-np.inf, 0.0, 0.0], 2, math.log(2), [0.0, 0.5, -0.5]),
    ([0.0] * 65, 7, 4.174387269895637, [1 / 65] * 7 + [-64 / 65] + [1 / 65] * 57),
])  # fmt: skip
def test_cross_entropy_of_extreme_logits(logits, target, loss, gradient):
    y = np.array([target])
    actual, P = t.cross_entropy_forward(np.array([logits]), y)
    close(actual, loss)
    close(t.cross_entropy_backward(P, y), [gradient], atol=1e-8)


def test_cross_entropy_keeps_the_answer_beside_huge_float32_logits():
    loss, _ = t.cross_entropy_forward(np.full((1, 2), 5e7, np.float32), np.array([1]))
    assert loss == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("target", [-1, V, V + 5])
def test_cross_entropy_refuses_targets_outside_the_vocabulary(rng, target):
    with pytest.raises(ValueError):
        t.cross_entropy_forward(rng.standard_normal((3, V)), np.array([0, target, 1]))


@pytest.mark.parametrize("shape", [(0,), (0, T)])
def test_cross_entropy_refuses_an_empty_batch(shape):
    with pytest.raises(ValueError):
        t.cross_entropy_forward(np.zeros(shape + (V,)), np.zeros(shape, int))


def test_perplexity_counts_equally_likely_choices():
    assert t.perplexity(math.log(V)) == pytest.approx(V, rel=1e-14)
    assert t.perplexity(0.0) == 1


# 20 to 22: LayerNorm


def slow_layer_norm(row, gamma, beta):
    """The row Y, its normalised form Xhat, and s."""
    n = len(row)
    mean = sum(row) / n
    s = 1 / math.sqrt(sum((x - mean) ** 2 for x in row) / n + 1e-5)
    Xhat = [(x - mean) * s for x in row]
    return np.array([gamma[i] * Xhat[i] + beta[i] for i in range(n)]), Xhat, s


def slow_layer_norm_backward(dY, X, gamma, beta):
    """Through the d-by-d matrix of derivatives that the module never builds (21.5)."""
    dX, dgamma, dbeta = np.zeros(X.shape), np.zeros(gamma.shape), np.zeros(beta.shape)
    n = len(gamma)
    for r in range(len(X)):
        _, Xhat, s = slow_layer_norm(X[r], gamma, beta)
        for i in range(n):
            dgamma[i] += dY[r, i] * Xhat[i]
            dbeta[i] += dY[r, i]
            for j in range(n):
                slope = s * ((i == j) - 1 / n - Xhat[i] * Xhat[j] / n)
                dX[r, j] += dY[r, i] * gamma[i] * slope
    return dX, dgamma, dbeta


def test_layer_norm_forward(rng, lead):
    X, gamma, beta = rand(rng, *lead, T, d), rand(rng, d), rand(rng, d)
    Y, _ = t.layer_norm_forward(X, gamma, beta)
    close(Y, per_window(lambda x: slow_layer_norm(x, gamma, beta)[0], lead + (T,), X))


def test_layer_norm_backward(rng, lead):
    X, gamma, beta, dY = rand(rng, *lead, T, d), rand(rng, d), rand(rng, d), rand(rng, *lead, T, d)
    slow = slow_layer_norm_backward(dY.reshape(-1, d), X.reshape(-1, d), gamma, beta)
    dX, dgamma, dbeta = t.layer_norm_backward(dY, t.layer_norm_forward(X, gamma, beta)[1])
    close(dX, slow[0].reshape(X.shape))
    close(dgamma, slow[1])
    close(dbeta, slow[2])


def test_layer_norm_by_hand():
    # Dividing by n - 1 would give [-0.866, -0.289, -0.289, 1.443].
    Y, cache = t.layer_norm_forward(np.array([[2.0, 4.0, 4.0, 10.0]]), np.ones(4), np.zeros(4))
    close(Y, [[-0.99999944, -0.33333315, -0.33333315, 1.66666574]], atol=1e-8)
    dX, _, _ = t.layer_norm_backward(np.array([[0.0, 1.0, 0.0, -1.0]]), cache)
    close(dX, [[-0.16666639, 0.27777769, -0.05555546, -0.05555583]], atol=1e-8)


def test_epsilon_sits_inside_the_root():
    Y, _ = t.layer_norm_forward(np.array([[0.001, -0.001]]), np.ones(2), np.zeros(2))
    close(Y[0, 0], 0.001 / math.sqrt(1e-6 + 1e-5))


def test_layer_norm_of_a_constant_row_is_beta():
    Y, _ = t.layer_norm_forward(np.full((1, 3), 7.0), np.full(3, 2.0), np.array([1.0, 2.0, 3.0]))
    close(Y, [[1.0, 2.0, 3.0]])


# 23, 43, 44: starting values and their number


@pytest.mark.parametrize("fan_in, fan_out", [(300, 500), (700, 90)])
def test_xavier_fills_its_interval_evenly(rng, fan_in, fan_out):
    W = t.xavier_uniform(rng, fan_in, fan_out)
    a = math.sqrt(6 / (fan_in + fan_out))
    assert W.shape == (fan_in, fan_out)
    assert 0.999 * a < np.abs(W).max() <= a
    assert abs(W.mean()) < 0.02 * a
    assert W.var() == pytest.approx(2 / (fan_in + fan_out), rel=0.02)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_starting_values(dtype):
    params = t.init_params(CONFIG, np.random.default_rng(7), dtype)
    assert {name: w.shape for name, w in params.items()} == SHAPES
    for name, w in params.items():
        assert w.dtype == dtype
        if w.ndim == 2:
            a = math.sqrt(6 / sum(w.shape))
            assert 0.6 * a < np.abs(w).max() <= a * (1 + 1e-6)
            assert np.unique(w).size > 0.9 * w.size
        else:
            assert np.all(w == (1 if name.endswith("_g") else 0))


def test_starting_values_follow_the_seed_and_no_two_matrices_are_alike():
    first, same, other = (t.init_params(CONFIG, np.random.default_rng(s)) for s in (7, 7, 8))
    matrices = [name for name, shape in SHAPES.items() if len(shape) == 2]
    for name in matrices:
        assert first[name].dtype == np.float32
        assert np.array_equal(first[name], same[name])
        assert not np.array_equal(first[name], other[name])
    assert len({first[name].tobytes() for name in matrices}) == len(matrices)


@pytest.mark.parametrize("config", [
    CONFIG, t.ModelConfig(vocab_size=65), t.ModelConfig(vocab_size=9, width=12, heads=3, layers=1),
])  # fmt: skip
def test_parameter_count_by_formula_and_by_counting(config):
    w, h, v = config.width, config.hidden, config.vocab_size
    block = 4 * w * w + 2 * w * h + h + 9 * w
    total = (2 * w + 1) * v + (config.max_context + 2) * w + config.layers * block
    params = t.init_params(config, np.random.default_rng(0))
    assert t.count_params(params) == total == sum(1 for w in params.values() for _ in w.flat)


def test_a_block_of_the_default_sizes_has_12704_numbers():
    config = t.ModelConfig(vocab_size=9)
    params = t.init_params(config, np.random.default_rng(0))
    assert t.count_params(t.block_params(params, 1)) == 12704


def test_block_params_are_the_arrays_of_that_block(rng):
    params = rand_params(rng)
    for l in range(L):
        p = t.block_params(params, l)
        assert p.keys() == BLOCK_SHAPES.keys()
        assert all(np.array_equal(p[name], params[f"block{l}.{name}"]) for name in p)


def test_block_1_is_not_mixed_up_with_block_10():
    params = {f"block{l}.{name}": np.full(1, l) for l in (1, 10) for name in BLOCK_SHAPES}
    assert all(p[0] == 1 for p in t.block_params(params, 1).values())


# 24 to 27: embeddings


def slow_embed(E, P, ids):
    return np.array([[E[v, j] + P[i, j] for j in range(E.shape[1])] for i, v in enumerate(ids)])


def slow_embed_backward(dX, ids, E, P):
    dE, dP = np.zeros(E.shape), np.zeros(P.shape)
    for i, v in enumerate(ids):
        for j in range(E.shape[1]):
            dE[v, j] += dX[i, j]
            dP[i, j] += dX[i, j]
    return dict(tok_emb=dE, pos_emb=dP)


@pytest.mark.parametrize("length", [1, T, Tmax])
def test_embedding_and_its_gradient_with_repeated_ids(rng, lead, length):
    params = dict(tok_emb=rand(rng, V, d), pos_emb=rand(rng, Tmax, d))
    ids = rand_ids(rng, *lead, length, high=3)  # few ids, so that they repeat
    dX = rand(rng, *lead, length, d)
    slow = per_window(lambda i: slow_embed(*params.values(), i), lead, ids)
    close(t.embed_forward(params, ids), slow)
    d_tok, d_pos = t.embed_backward(dX, ids, params)
    slow = [slow_embed_backward(dX[i], ids[i], *params.values()) for i in np.ndindex(lead)]
    all_close(dict(tok_emb=d_tok, pos_emb=d_pos), sum_of(slow))


def test_repeated_ids_add_up_by_hand():
    ids = np.array([[2, 0, 2], [2, 1, 0]])
    dX = np.array([[1.0, 2, 4], [8, 16, 32]])[..., None]
    params = dict(tok_emb=np.zeros((3, 1)), pos_emb=np.zeros((4, 1)))
    d_tok, d_pos = t.embed_backward(dX, ids, params)
    assert d_tok.ravel().tolist() == [34, 16, 13]
    assert d_pos.ravel().tolist() == [9, 18, 36, 0]


@pytest.mark.parametrize("bad", [-1, V])
def test_ids_outside_the_vocabulary_are_refused(rng, bad):
    params, ids = rand_params(rng), np.array([[1, 2, bad]])
    for call in (lambda: t.embed_forward(params, ids), lambda: t.forward(params, ids, CONFIG)):
        with pytest.raises(ValueError):
            call()


# 28 to 38: attention


def slow_split(M, heads):
    width = M.shape[1] // heads
    return np.array([
        [[M[i, h * width + c] for c in range(width)] for i in range(len(M))] for h in range(heads)
    ])  # fmt: skip


def slow_scores(Qh, Kh):
    """The raw dot products q · k, with no scale and no mask."""
    heads, n, width = Qh.shape
    S = np.zeros((heads, n, n))
    for h, i, j, c in product(range(heads), range(n), range(n), range(width)):
        S[h, i, j] += Qh[h, i, c] * Kh[h, j, c]
    return S


def slow_weights(Qh, Kh):
    """Each row spread over the keys up to its own place; the later ones are never looked at."""
    S = slow_scores(Qh, Kh) / math.sqrt(Qh.shape[2])
    A = np.zeros(S.shape)
    for h, i in product(range(len(S)), range(S.shape[1])):
        A[h, i, : i + 1] = slow_softmax(S[h, i, : i + 1])
    return A


def slow_weighted_values(A, Vh):
    heads, n, width = Vh.shape
    out = np.zeros(Vh.shape)
    for h, i, j, c in product(range(heads), range(n), range(n), range(width)):
        out[h, i, c] += A[h, i, j] * Vh[h, j, c]
    return out


def slow_attention(Xn, p, heads):
    Qh, Kh, Vh = (slow_split(slow_linear(Xn, p["w" + n], p["b" + n]), heads) for n in "qkv")
    A = slow_weights(Qh, Kh)
    mixed = slow_weighted_values(A, Vh)
    O = np.array([[mixed[h, i, c] for h in range(heads) for c in range(Vh.shape[2])]
                  for i in range(len(Xn))])  # fmt: skip
    return slow_linear(O, p["wo"], p["bo"]), dict(Xn=Xn, Qh=Qh, Kh=Kh, Vh=Vh, A=A, O=O)


def slow_attention_backward(dOut, cache, p):
    Xn, Qh, Kh, Vh, A, O = (cache[name] for name in ("Xn", "Qh", "Kh", "Vh", "A", "O"))
    heads, n, width = Qh.shape
    dO, dwo, dbo = slow_linear_backward(dOut, O, p["wo"])
    dQ, dK, dV = (np.zeros(dO.shape) for _ in "qkv")
    for h, i in product(range(heads), range(n)):
        own = range(h * width, (h + 1) * width)  # columns of head h
        dA = [sum(dO[i, c] * Vh[h, j, c - own[0]] for c in own) for j in range(i + 1)]
        dS = slow_softmax_backward(A[h, i, : i + 1], dA)
        for j, c in product(range(i + 1), own):
            dV[j, c] += A[h, i, j] * dO[i, c]
            dQ[i, c] += dS[j] * Kh[h, j, c - own[0]] / math.sqrt(width)
            dK[j, c] += dS[j] * Qh[h, i, c - own[0]] / math.sqrt(width)
    dXn, grads = np.zeros(Xn.shape), dict(wo=dwo, bo=dbo)
    for name, dM in zip("qkv", (dQ, dK, dV)):
        part, grads["w" + name], grads["b" + name] = slow_linear_backward(dM, Xn, p["w" + name])
        dXn += part
    return dXn, grads


@pytest.fixture
def heads_qkv(rng, lead):
    return [rand(rng, *lead, H, T, dh) for _ in range(3)]


def test_projections(rng, lead):
    Xn, p = rand(rng, *lead, T, d), rand_block(rng)
    for name, M in zip("qkv", t.project_qkv(Xn, p), strict=True):
        W, b = p["w" + name], p["b" + name]
        close(M, per_window(lambda x: slow_linear(x, W, b), lead, Xn))


def test_head_width_divides_or_is_refused():
    assert t.head_width(8, 2) == 4 and t.head_width(6, 6) == 1
    with pytest.raises(ValueError, match="10") as error:
        t.head_width(10, 3)
    assert "3" in str(error.value)
    with pytest.raises(ValueError):
        t.head_width(10, 0)


@pytest.mark.parametrize("heads", [1, 2, 4, d])
def test_splitting_and_merging_heads(rng, lead, heads):
    M = rand(rng, *lead, T, d)
    Mh = t.split_heads(M, heads)
    close(Mh, per_window(lambda m: slow_split(m, heads), lead, M))
    np.testing.assert_array_equal(t.merge_heads(frozen(Mh)), M)


def test_scores_and_their_scale(heads_qkv, lead):
    Qh, Kh, _ = heads_qkv
    slow = per_window(slow_scores, lead, Qh, Kh)
    close(t.scores(Qh, Kh), slow)
    close(t.scaled_scores(Qh, Kh), slow / math.sqrt(dh))


def test_scale_is_the_root_of_the_head_width_by_hand():
    q, k = np.array([[[1.0, 1, 0, 2]]]), np.array([[[2.0, 0, 1, 1]]])
    assert t.scaled_scores(q, k).item() == 2.0  # 4 / √4, though the model may be 8 wide


def test_causal_mask_returns_a_copy_without_the_later_keys(rng, lead):
    S = rand(rng, *lead, H, T, T)
    masked = t.causal_mask(S)
    assert masked.shape == S.shape
    for i in np.ndindex(S.shape):
        assert masked[i] == (S[i] if i[-1] <= i[-2] else -np.inf)


def test_attention_weights(heads_qkv, lead):
    Qh, Kh, _ = heads_qkv
    A = t.attention_weights(Qh, Kh)
    close(A, per_window(slow_weights, lead, Qh, Kh))
    assert np.all(A[..., np.triu(np.ones((T, T), bool), 1)] == 0)


def test_mask_then_softmax_by_hand():
    S = np.array([[0.0, 7.0], [math.log(1), math.log(4)]])
    close(t.softmax_forward(t.causal_mask(S)), [[1.0, 0.0], [0.2, 0.8]])


def test_weighted_values(rng, heads_qkv, lead):
    A, Vh = rand(rng, *lead, H, T, T), heads_qkv[2]
    close(t.weighted_values(A, Vh), per_window(slow_weighted_values, lead, A, Vh))


def test_attention_forward_and_what_it_keeps(rng, lead):
    Xn, p = rand(rng, *lead, T, d), rand_block(rng)
    out, cache = t.attention_forward(Xn, p, H)
    close(out, per_window(lambda x: slow_attention(x, p, H)[0], lead, Xn))
    for name in ("Xn", "Qh", "Kh", "Vh", "A", "O"):
        close(cache[name], per_window(lambda x: slow_attention(x, p, H)[1][name], lead, Xn))


def test_attention_backward(rng, lead):
    Xn, p, dOut = rand(rng, *lead, T, d), rand_block(rng), rand(rng, *lead, T, d)
    dXn, grads = t.attention_backward(dOut, t.attention_forward(Xn, p, H)[1], p)
    slow = [slow_attention_backward(dOut[i], slow_attention(Xn[i], p, H)[1], p)
            for i in np.ndindex(lead)]  # fmt: skip
    close(dXn, np.reshape([one for one, _ in slow], Xn.shape))
    all_close(grads, sum_of([one for _, one in slow]))


# 39 to 42: feed-forward network, block


def slow_ffn(Xn, p):
    Z = slow_linear(Xn, p["ff1_w"], p["ff1_b"])
    A = np.array([[max(0.0, z) for z in row] for row in Z])
    return slow_linear(A, p["ff2_w"], p["ff2_b"]), dict(Xn=Xn, Z=Z, A=A)


def slow_ffn_backward(dOut, cache, p):
    grads = {}
    dA, grads["ff2_w"], grads["ff2_b"] = slow_linear_backward(dOut, cache["A"], p["ff2_w"])
    dZ = np.array([[dA[i, j] if z > 0 else 0 for j, z in enumerate(row)]
                   for i, row in enumerate(cache["Z"])])  # fmt: skip
    dXn, grads["ff1_w"], grads["ff1_b"] = slow_linear_backward(dZ, cache["Xn"], p["ff1_w"])
    return dXn, grads


def slow_norm_rows(X, gamma, beta):
    return np.array([slow_layer_norm(row, gamma, beta)[0] for row in X])


def slow_block(X, p, heads):
    att, att_cache = slow_attention(slow_norm_rows(X, p["ln1_g"], p["ln1_b"]), p, heads)
    X1 = X + att
    ff, ffn_cache = slow_ffn(slow_norm_rows(X1, p["ln2_g"], p["ln2_b"]), p)
    return X1 + ff, (X, att_cache, X1, ffn_cache)


def slow_block_backward(dY, cache, p):
    X, att_cache, X1, ffn_cache = cache
    dXn2, grads = slow_ffn_backward(dY, ffn_cache, p)
    back = slow_layer_norm_backward(dXn2, X1, p["ln2_g"], p["ln2_b"])
    dX1 = dY + back[0]
    dXn, more = slow_attention_backward(dX1, att_cache, p)
    grads |= more | dict(ln2_g=back[1], ln2_b=back[2])
    back = slow_layer_norm_backward(dXn, X, p["ln1_g"], p["ln1_b"])
    return dX1 + back[0], grads | dict(ln1_g=back[1], ln1_b=back[2])


def test_ffn_forward_and_what_it_keeps(rng, lead):
    Xn, p = rand(rng, *lead, T, d), rand_block(rng)
    Ff, cache = t.ffn_forward(Xn, p)
    close(Ff, per_window(lambda x: slow_ffn(x, p)[0], lead, Xn))
    for name in ("Xn", "Z", "A"):
        close(cache[name], per_window(lambda x: slow_ffn(x, p)[1][name], lead, Xn))


def test_ffn_backward(rng, lead):
    Xn, p, dOut = rand(rng, *lead, T, d), rand_block(rng), rand(rng, *lead, T, d)
    dXn, grads = t.ffn_backward(dOut, t.ffn_forward(Xn, p)[1], p)
    slow = [slow_ffn_backward(dOut[i], slow_ffn(Xn[i], p)[1], p) for i in np.ndindex(lead)]
    close(dXn, np.reshape([one for one, _ in slow], Xn.shape))
    all_close(grads, sum_of([one for _, one in slow]))


def test_block_forward(rng, lead):
    X, p = rand(rng, *lead, T, d), rand_block(rng)
    close(t.block_forward(X, p, H)[0], per_window(lambda x: slow_block(x, p, H)[0], lead, X))


def test_block_backward(rng, lead):
    X, p, dY = rand(rng, *lead, T, d), rand_block(rng), rand(rng, *lead, T, d)
    dX, grads = t.block_backward(dY, t.block_forward(X, p, H)[1], p)
    slow = [slow_block_backward(dY[i], slow_block(X[i], p, H)[1], p) for i in np.ndindex(lead)]
    assert grads.keys() == BLOCK_SHAPES.keys()
    close(dX, np.reshape([one for one, _ in slow], X.shape))
    all_close(grads, sum_of([one for _, one in slow]))


# 45, 46, 53, 55: the whole model


def slow_forward(params, ids):
    X = slow_embed(params["tok_emb"], params["pos_emb"], ids)
    caches = []
    for l in range(L):
        p = {name: params[f"block{l}.{name}"] for name in BLOCK_SHAPES}
        X, cache = slow_block(X, p, H)
        caches.append((p, cache))
    Xf = slow_norm_rows(X, params["lnf_g"], params["lnf_b"])
    return slow_linear(Xf, params["head_w"], params["head_b"]), (caches, X, Xf)


def slow_loss_and_grads(params, ids, y):
    """One window."""
    logits, (caches, X, Xf) = slow_forward(params, ids)
    loss, P = slow_cross_entropy(logits, y)
    g = {}
    dXf, g["head_w"], g["head_b"] = slow_linear_backward(
        slow_cross_entropy_backward(P, y), Xf, params["head_w"]
    )
    dX, g["lnf_g"], g["lnf_b"] = slow_layer_norm_backward(dXf, X, params["lnf_g"], params["lnf_b"])
    for l in reversed(range(L)):
        dX, grads = slow_block_backward(dX, caches[l][1], caches[l][0])
        g |= {f"block{l}.{name}": grads[name] for name in grads}
    return loss, g | slow_embed_backward(dX, ids, params["tok_emb"], params["pos_emb"])


def mean_over_windows(results):
    losses, grads = zip(*results)
    return sum(losses) / len(losses), {k: g / len(losses) for k, g in sum_of(grads).items()}


@pytest.mark.parametrize("length", [1, 3, T, Tmax])
def test_forward_equals_the_slow_reading(rng, lead, length):
    params, ids = rand_params(rng), rand_ids(rng, *lead, length)
    logits, _ = t.forward(params, ids, CONFIG)
    close(logits, per_window(lambda i: slow_forward(params, i)[0], lead, ids), rtol=1e-10)


def test_loss_and_grads_equal_the_slow_reading(rng, lead):
    params, x, y = rand_params(rng), rand_ids(rng, *lead, T), rand_ids(rng, *lead, T)
    loss, grads = t.loss_and_grads(params, x, y, CONFIG)
    slow_loss, slow_grads = mean_over_windows(
        [slow_loss_and_grads(params, x[i], y[i]) for i in np.ndindex(lead)]
    )
    close(loss, slow_loss)
    assert {name: g.shape for name, g in grads.items()} == SHAPES
    all_close(grads, slow_grads)


def test_position_rows_past_the_window_have_no_gradient(rng):
    params, x = rand_params(rng), rand_ids(rng, 2, T)
    grads = t.loss_and_grads(params, x, x, CONFIG)[1]
    assert np.all(grads["pos_emb"][T:] == 0) and np.all(grads["pos_emb"][:T] != 0)


def test_changing_a_token_leaves_earlier_positions_alone_bit_for_bit(rng, lead):
    params, ids = rand_params(rng), rand_ids(rng, *lead, T)
    before, _ = t.forward(params, ids, CONFIG)
    for place in range(T):
        changed = ids.copy()
        changed[..., place] = (changed[..., place] + 1) % V
        after, _ = t.forward(params, changed, CONFIG)
        assert np.array_equal(after[..., :place, :], before[..., :place, :])
        assert np.all(np.any(after[..., place:, :] != before[..., place:, :], axis=-1))


@pytest.mark.parametrize("rows, length", [(8, 9), (1, 3)])  # one row alone would be repeated
def test_too_long_an_input_is_refused_with_both_lengths(rows, length):
    config = t.ModelConfig(
        vocab_size=30, context=rows, max_context=rows, width=4, heads=2, hidden=6, layers=1
    )
    params = t.init_params(config, np.random.default_rng(0))
    with pytest.raises(ValueError) as error:
        t.forward(params, np.zeros(length, int), config)
    assert {str(rows), str(length)} <= set(re.findall(r"\d+", str(error.value)))
    assert "broadcast" not in str(error.value)  # the sum's own complaint explains nothing


@pytest.mark.parametrize("windows", [1, 2, 5, 37])
def test_batch_loss_and_gradients_are_means_over_the_windows(rng, windows):
    params, x, y = rand_params(rng), rand_ids(rng, windows, T), rand_ids(rng, windows, T)
    loss, grads = t.batch_loss_and_grads(params, x, y, CONFIG)
    slow_loss, slow_grads = mean_over_windows(
        [t.loss_and_grads(params, x[i], y[i], CONFIG) for i in range(windows)]
    )
    close(loss, slow_loss)
    all_close(grads, slow_grads)


def test_a_large_batch_equals_one_pass_over_it_and_comes_out_the_same_twice(rng):
    config = t.ModelConfig(vocab_size=33, context=16, width=64, heads=4, hidden=96, layers=1)
    params = t.init_params(config, rng, np.float64)
    x, y = rand_ids(rng, 128, 16, high=33), rand_ids(rng, 128, 16, high=33)
    loss, grads = t.batch_loss_and_grads(params, x, y, config)
    again, grads_again = t.batch_loss_and_grads(params, x, y, config)
    whole, whole_grads = t.loss_and_grads(params, x, y, config)
    close(loss, whole)
    all_close(grads, whole_grads)
    assert again == loss
    assert all(np.array_equal(grads[name], grads_again[name]) for name in grads)


@pytest.mark.parametrize("name", ["loss_and_grads", "batch_loss_and_grads", "validation_loss"])
def test_no_windows_are_refused(rng, name):
    empty = np.zeros((0, T), int)
    with pytest.raises(ValueError):
        getattr(t, name)(rand_params(rng), empty, empty, CONFIG)


@pytest.mark.parametrize("name", ["loss_and_grads", "batch_loss_and_grads"])
def test_a_later_call_does_not_overwrite_an_earlier_result(rng, name):
    params, x, y = rand_params(rng), rand_ids(rng, 2, B, T), rand_ids(rng, 2, B, T)
    _, grads = getattr(t, name)(params, x[0], y[0], CONFIG)
    kept = {name: g.copy() for name, g in grads.items()}
    getattr(t, name)(params, x[1], y[1], CONFIG)
    assert all(np.array_equal(grads[name], kept[name]) for name in kept)


@pytest.mark.parametrize("windows", [1, 7, 70, 300])
def test_validation_loss_is_the_mean_over_windows(rng, windows):
    params, x, y = rand_params(rng), rand_ids(rng, windows, T), rand_ids(rng, windows, T)
    total = 0.0
    for i in range(windows):
        logits, _ = t.forward(params, x[i], CONFIG)
        total += slow_cross_entropy(logits, y[i])[0]
    close(t.validation_loss(params, x, y, CONFIG), total / windows)


# 50 to 52: optimizer


def slow_adamw(w, grads, rates, beta1, beta2, eps, decay):
    """One number through all steps; gives it with its two moments."""
    m = v = 0.0
    for step, (g, lr) in enumerate(zip(grads, rates), start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        u = (m / (1 - beta1**step)) / (math.sqrt(v / (1 - beta2**step)) + eps)
        w = w - lr * (u + decay * w)
    return w, m, v


@pytest.mark.parametrize("dtype, rtol", [(np.float64, 1e-12), (np.float32, 2e-5)])
def test_adamw_equals_the_slow_reading(rng, dtype, rtol):
    shapes = dict(a=(3, 4), b=(5,), c=(2, 3, 2))
    # Gradients as small as eps show on which side of the root it stands.
    scale = dict(a=1.0, b=1e-8, c=1e3)
    start = {k: rng.standard_normal(s).astype(dtype) for k, s in shapes.items()}
    grads = [{k: frozen((rng.standard_normal(s) * scale[k]).astype(dtype))
              for k, s in shapes.items()} for _ in range(5)]  # fmt: skip
    rates = [0.1, 0.2, 0.05, 0.3, 0.1]
    params = {k: w.copy() for k, w in start.items()}
    arrays = dict(params)
    optimizer = t.AdamW(params, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.3)
    for g, lr in zip(grads, rates):
        optimizer.step(params, g, lr)
    assert optimizer.t == 5
    for k in shapes:
        assert arrays[k] is params[k]  # changed in place
        assert params[k].dtype == optimizer.m[k].dtype == optimizer.v[k].dtype == dtype
        for i in np.ndindex(shapes[k]):
            decay = 0.3 if len(shapes[k]) > 1 else 0.0
            history = [float(g[k][i]) for g in grads]
            slow = slow_adamw(float(start[k][i]), history, rates, 0.8, 0.9, 1e-8, decay)
            fast = float(params[k][i]), float(optimizer.m[k][i]), float(optimizer.v[k][i])
            assert fast == pytest.approx(slow, rel=rtol, abs=rtol * 1e-3 * scale[k] ** 2)


def test_adamw_by_hand():
    params = dict(w=np.array([[2.0]]))
    optimizer = t.AdamW(params, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.2)
    for gradient, expected in ((0.3, 1.9860000003), (-0.1, 1.9780185484), (0.2, 1.9680219132)):
        optimizer.step(params, dict(w=np.array([[gradient]])), 0.01)
        assert params["w"].item() == pytest.approx(expected, abs=1e-10)


def test_decay_shrinks_matrices_and_leaves_vectors_alone_bit_for_bit(rng):
    names = [name for name in SHAPES if name.startswith("block0.")] + ["tok_emb", "pos_emb"]
    params = {name: rng.standard_normal(SHAPES[name]) for name in names}
    before = {name: w.copy() for name, w in params.items()}
    optimizer = t.AdamW(params, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.2)
    optimizer.step(params, {name: np.zeros_like(w) for name, w in params.items()}, 0.01)
    for name in names:
        if before[name].ndim == 2:
            close(params[name], before[name] * (1 - 0.01 * 0.2))
        else:
            assert np.array_equal(params[name], before[name])


def test_moments_start_at_zero_and_a_rate_of_zero_changes_no_parameter(rng):
    params = t.init_params(CONFIG, rng, np.float64)
    before = {name: w.copy() for name, w in params.items()}
    optimizer = t.AdamW(params, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.2)
    assert optimizer.t == 0 and optimizer.m.keys() == optimizer.v.keys() == SHAPES.keys()
    assert not any(np.any(moment[k]) for moment in (optimizer.m, optimizer.v) for k in SHAPES)
    optimizer.step(params, {name: np.ones_like(w) for name, w in params.items()}, 0.0)
    assert all(np.array_equal(params[name], before[name]) for name in SHAPES)
    assert all(np.all(optimizer.m[name] != 0) for name in SHAPES)


def test_parameters_from_init_step_like_a_plain_dict(rng):
    params = t.init_params(CONFIG, rng, np.float64)
    plain = {name: np.array(w) for name, w in params.items()}
    grads = {name: rand(rng, *w.shape) for name, w in plain.items()}
    for some in (params, plain):
        optimizer = t.AdamW(some, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.2)
        for _ in range(3):
            optimizer.step(some, grads, 0.01)
    all_close(dict(params), plain)


@pytest.mark.parametrize("limit", [3.5, 7.0, 8.0])
def test_clipping_uses_one_norm_for_all_arrays_and_never_scales_up(limit):
    grads = dict(a=np.array([2.0, -3.0]), b=np.array([[6.0]]))
    arrays = dict(grads)
    assert t.clip_grad_norm(grads, limit) == pytest.approx(7.0, rel=1e-12)
    factor = 0.5 if limit == 3.5 else 1.0
    close(arrays["a"], [2 * factor, -3 * factor])
    close(arrays["b"], [[6 * factor]])


def test_clipping_equals_the_slow_reading(rng):
    grads = {k: rng.standard_normal(s) for k, s in dict(a=(3, 4), b=(5,), c=(2, 1, 3)).items()}
    before = {k: g.copy() for k, g in grads.items()}
    norm = math.sqrt(math.fsum(x * x for g in before.values() for x in g.flat))
    assert t.clip_grad_norm(grads, 0.7) == pytest.approx(norm, rel=1e-13)
    all_close(grads, {k: g * 0.7 / norm for k, g in before.items()})


@pytest.mark.parametrize("value, limit, norm, after", [
    (0.0, 1.0, 0.0, 0.0), (3e19, 1.0, 6e19, 0.5), (1e-23, 1.0, 2e-23, 1e-23), (1.0, 5.0, 2.0, 1.0),
])  # fmt: skip
def test_clipping_survives_zeros_overflow_and_underflow_in_float32(value, limit, norm, after):
    grads = dict(a=np.full(3, value, np.float32), b=np.full((1, 1), value, np.float32))
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        assert t.clip_grad_norm(grads, limit) == pytest.approx(norm, rel=1e-6)
    for g in grads.values():
        assert g.dtype == np.float32
        np.testing.assert_allclose(g, np.float32(after), rtol=1e-6 if norm > limit else 0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_clipping_reports_a_norm_that_is_not_finite_and_spreads_it_no_further(bad):
    grads = dict(a=np.array([bad, 1.0]), b=np.array([2.0]))
    assert not math.isfinite(t.clip_grad_norm(grads, 1.0))
    assert grads["a"][1] == 1.0 and grads["b"][0] == 2.0


def slow_schedule(step, high, low, warmup, total):
    if step <= warmup:
        return high * step / warmup
    way = min(1.0, (step - warmup) / (total - warmup)) if total > warmup else 1.0
    return low + (high - low) * math.cos(math.pi * way / 2) ** 2  # (1 + cos 2a) / 2 = cos² a


@pytest.mark.parametrize("warmup, total", [(4, 10), (0, 10), (1, 2), (10, 10), (0, 1)])
def test_learning_rate_equals_the_slow_reading_and_stays_at_the_minimum(warmup, total):
    for step in range(1, 2 * total + 3):
        slow = slow_schedule(step, 0.3, 0.02, warmup, total)
        assert t.lr_schedule(step, 0.3, 0.02, warmup, total) == pytest.approx(slow, rel=1e-12)


def test_learning_rate_at_its_ends():
    assert t.lr_schedule(1, 0.3, 0.02, 4, 10) == pytest.approx(0.075)
    assert t.lr_schedule(4, 0.3, 0.02, 4, 10) == pytest.approx(0.3)
    assert t.lr_schedule(7, 0.3, 0.02, 4, 10) == pytest.approx(0.16)
    assert t.lr_schedule(10, 0.3, 0.02, 4, 10) == pytest.approx(0.02)
    assert t.lr_schedule(15, 0.3, 0.02, 4, 10) == pytest.approx(0.02)


# 56 to 60: sampling


class FixedDraw:
    """Stands in for a generator whose next number is known."""

    def __init__(self, number):
        self.number, self.calls = number, 0

    def random(self):
        self.calls += 1
        return self.number


BELOW_ONE = np.nextafter(1.0, 0.0)


def slow_top_k(p, k):
    cut = sorted(p, reverse=True)[k - 1] if 0 < k < len(p) else 0.0
    total = sum(x for x in p if x >= cut)
    return [x / total if x >= cut else 0.0 for x in p]


def slow_top_p(p, top_p):
    total, kept = 0.0, []
    for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
        kept.append(i)
        total += p[i]
        if total >= top_p and top_p < 1:
            break
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


def logs(*p):
    return np.log(p)


def test_top_k_and_top_p_equal_the_slow_reading(rng):
    for _ in range(200):
        p = frozen(rng.dirichlet(np.full(V, 0.5)).round(1) + 0.01)  # rounding makes ties
        p = frozen(p / p.sum())
        k, top_p = int(rng.integers(0, V + 3)), float(rng.uniform(0.01, 1))
        close(t.keep_top_k(p, k), slow_top_k(p, k))
        close(t.keep_top_p(p, top_p), slow_top_p(p, top_p))


@pytest.mark.parametrize("k, expected", [
    (1, [1, 0, 0, 0, 0]),
    (2, [0.47536689, 0.17487770, 0.17487770, 0.17487770, 0]),
    (5, None), (100, None), (0, None),
])  # fmt: skip
def test_top_k_keeps_ties_and_is_off_at_zero_and_past_the_vocabulary(k, expected):
    logits = np.array([1.5, 0.5, 0.5, 0.5, -1.0])
    full = slow_softmax(logits)
    p = t.next_probabilities(logits, 1.0, k, 1.0)
    close(p, full if expected is None else expected, atol=1e-8)
    assert expected or np.array_equal(t.keep_top_k(frozen(full), k), full)


def test_top_k_below_zero_is_refused():
    with pytest.raises(ValueError):
        t.keep_top_k(np.array([0.5, 0.5]), -1)
    with pytest.raises(ValueError):
        t.next_probabilities(np.zeros(3), 1.0, -1, 1.0)


@pytest.mark.parametrize("p, top_p, expected", [
    ([0.05, 0.36, 0.48, 0.11], 0.9, [0, 0.37894737, 0.50526316, 0.11578947]),
    ([0.5, 0.25, 0.125, 0.125], 0.49, [1, 0, 0, 0]),
    ([0.5, 0.25, 0.125, 0.125], 0.5, [1, 0, 0, 0]),
    ([0.5, 0.25, 0.125, 0.125], 0.75, [0.66666667, 0.33333333, 0, 0]),
    ([0.5, 0.25, 0.125, 0.125], 0.76, [0.57142857, 0.28571429, 0.14285714, 0]),
    ([0.5, 0.25, 0.125, 0.125], 1e-9, [1, 0, 0, 0]),
    ([0.25, 0.25, 0.25, 0.25], 0.5, [0.5, 0.5, 0, 0]),
    ([0.125, 0.25, 0.5, 0.125], 0.8, [1 / 7, 2 / 7, 4 / 7, 0]),
])  # fmt: skip
def test_top_p_keeps_the_token_that_reaches_the_threshold(p, top_p, expected):
    close(t.keep_top_p(frozen(p), top_p), expected, atol=1e-8)


def test_top_p_of_one_changes_nothing():
    logits = np.linspace(0, 12, 1000).astype(np.float32)
    p = t.next_probabilities(logits, 1.0, 0, 1.0)
    assert np.all(p > 0)
    assert np.array_equal(t.keep_top_p(frozen(p), 1.0), p)


def test_top_p_keeps_all_when_rounding_stops_the_total_short_of_it(rng):
    while True:
        p = np.sort(rng.dirichlet(np.ones(100)))[::-1]
        if np.cumsum(p)[-1] < BELOW_ONE:
            break
    close(t.keep_top_p(frozen(p), BELOW_ONE), p, rtol=1e-10)


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.1, math.nan, math.inf])
def test_top_p_outside_its_range_is_refused(top_p):
    with pytest.raises(ValueError):
        t.keep_top_p(np.array([0.5, 0.5]), top_p)
    with pytest.raises(ValueError):
        t.next_probabilities(np.zeros(3), 1.0, 0, top_p)


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, math.nan, math.inf])
def test_temperature_outside_its_range_is_refused(temperature):
    with pytest.raises(ValueError):
        t.next_probabilities(np.zeros(3), temperature, 0, 1.0)
    with pytest.raises(ValueError):
        t.sample_next(np.zeros(3), np.random.default_rng(0), temperature)


@pytest.mark.parametrize("logits", [
    [math.nan, 1, 2], [math.inf, 0, 0], [-math.inf] * 3, [math.nan, math.inf, 0],
])  # fmt: skip
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_logits_that_are_not_finite_are_refused(logits, temperature):
    with pytest.raises(ValueError):
        t.next_probabilities(np.array(logits), 1.0, 0, 1.0)
    with pytest.raises(ValueError):
        t.sample_next(np.array(logits), np.random.default_rng(0), temperature)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_temperature_divides_the_logits_in_float64(rng, dtype):
    logits = frozen(rng.standard_normal(V).astype(dtype))
    for temperature in (0.3, 1.0, 2.5):
        p = t.next_probabilities(logits, temperature, 0, 1.0)
        assert p.dtype == np.float64
        close(p, slow_softmax([float(z) / temperature for z in logits]))
        assert abs(p.sum() - 1) < 1e-12
    close(t.next_probabilities(np.array([3.0, 5.0, 4.0]), 2e-6, 0, 1.0), [0.0, 1.0, 0.0])


def test_masked_logits_have_probability_zero_and_the_others_keep_their_order():
    close(t.next_probabilities(np.array([-np.inf, 0.0, 0.0]), 1.0, 0, 1.0), [0, 0.5, 0.5])
    close(t.next_probabilities(np.array([-20.0, -30.0, -40.0]), 1.0, 1, 1.0), [1.0, 0.0, 0.0])


@pytest.mark.parametrize("temperature, k, top_p, expected", [
    (2.0, 0, 1.0, [0.34695394, 0.29588331, 0.20922110, 0.14794166]),
    (2.0, 0, 0.7, [0.40719505, 0.34725710, 0.24554785, 0]),
    (1.0, 2, 1.0, [0.57894737, 0.42105263, 0, 0]),
    (1.0, 2, 0.5, [1, 0, 0, 0]),
    (1.0, 1, 0.1, [1, 0, 0, 0]),
])  # fmt: skip
def test_temperature_comes_first_then_top_k_then_top_p(temperature, k, top_p, expected):
    p = t.next_probabilities(logs(0.44, 0.32, 0.16, 0.08), temperature, k, top_p)
    close(p, expected, atol=1e-8)


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 9.9e-7])
def test_greedy_takes_the_first_largest_logit_and_draws_nothing(temperature):
    draw = FixedDraw(0.999)
    with np.errstate(all="raise"):
        chosen = t.sample_next(np.array([2.0, 5.0, 5.0]), draw, temperature)
    assert (chosen, draw.calls) == (1, 0)
    assert type(chosen) is int


def test_one_draw_is_held_against_the_running_sum(rng):
    for _ in range(200):
        logits, seed = rand(rng, V), int(rng.integers(1000))
        options = dict(temperature=float(rng.uniform(0.2, 2)), top_k=7, top_p=0.9)
        generator, same = np.random.default_rng(seed), np.random.default_rng(seed)
        chosen = t.sample_next(logits, generator, **options)
        draw, total, slow = same.random(), 0.0, -1
        while draw >= total:
            slow += 1
            total += t.next_probabilities(logits, *options.values())[slow]
        assert type(chosen) is int and chosen == slow
        assert generator.random() == same.random()


@pytest.mark.parametrize("number, expected", [(0.0, 1), (0.4999, 1), (0.5, 2), (BELOW_ONE, 2)])
def test_a_draw_at_either_end_never_hits_an_impossible_token(number, expected):
    logits = np.array([-np.inf, 0.0, 0.0, -np.inf])
    assert t.sample_next(logits, FixedDraw(number)) == expected


def test_a_running_sum_that_ends_below_the_draw_still_gives_a_possible_token(rng):
    short = 0
    for _ in range(50):
        logits = np.append(rng.standard_normal(300), -np.inf)
        p = t.next_probabilities(logits, 1.0, 0, 1.0)
        short += np.cumsum(p)[-1] < BELOW_ONE
        assert p[t.sample_next(logits, FixedDraw(BELOW_ONE))] > 0
    assert short > 0


@pytest.mark.parametrize("logits, options", [
    (np.log(np.array([1 / 3, 1 / 3, 1 / 3], np.float32)), {}),
    (np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32)), {}),
    (logs(0.44, 0.32, 0.16, 0.08), dict(temperature=2.0, top_k=3, top_p=0.8)),
])  # fmt: skip
def test_tokens_come_out_with_their_probabilities(logits, options):
    n, rng = 4_000, np.random.default_rng(8)
    full = dict(temperature=1.0, top_k=0, top_p=1.0) | options
    p = t.next_probabilities(logits, *full.values())
    counts = np.bincount([t.sample_next(logits, rng, **full) for _ in range(n)], minlength=len(p))
    assert np.all(np.abs(counts / n - p) <= 4 * np.sqrt(p * (1 - p) / n))


def test_200_random_float32_rows_can_all_be_drawn_from(rng):
    for _ in range(200):
        logits = rng.standard_normal(100).astype(np.float32)
        assert 0 <= t.sample_next(logits, rng) < 100


# 61: the loop


def slow_generate(params, ids, n_tokens, rng, **options):
    ids = list(ids)
    for _ in range(n_tokens):
        logits, _ = t.forward(params, np.array(ids[-T:]), CONFIG)
        ids.append(t.sample_next(logits[-1], rng, **options))
    return ids


def run(params, ids, n_tokens, seed=9, temperature=1.0, top_k=0, top_p=1.0):
    rng = np.random.default_rng(seed)
    return [*map(int, t.generate(params, CONFIG, ids, n_tokens, rng, temperature, top_k, top_p))]


@pytest.mark.parametrize("length", [1, T - 1, T, T + 1, 20])
@pytest.mark.parametrize("options", [
    dict(temperature=0.0), dict(temperature=1.0), dict(temperature=0.8, top_k=4, top_p=0.9),
])  # fmt: skip
def test_generation_equals_the_slow_loop(length, options):
    rng = np.random.default_rng(37)  # with most seeds greedy text is one token for ever
    params, prompt = rand_params(rng), [int(i) for i in rand_ids(rng, length)]
    slow = slow_generate(params, prompt, 13, np.random.default_rng(9), **options)
    assert run(params, prompt, 13, **options) == slow
    assert len(set(slow[length:])) > 1


def test_generation_reads_only_the_last_context_ids(rng):
    params, prompt = rand_params(rng), [int(i) for i in rand_ids(rng, 20)]
    assert run(params, prompt, 5)[20:] == run(params, prompt[-T:], 5)[T:]


def test_generation_never_reads_position_rows_past_the_context(rng):
    params, prompt = rand_params(rng), [int(i) for i in rand_ids(rng, Tmax)]
    other = dict(params, pos_emb=np.where(np.arange(Tmax)[:, None] < T, params["pos_emb"], 1e3))
    assert run(params, prompt, 10) == run(other, prompt, 10)


def test_generation_leaves_the_prompt_alone_and_follows_the_seed(rng):
    params, prompt = rand_params(rng), [1, 2, 3]
    first, same, other = (run(params, prompt, 30, seed=s, temperature=3.0) for s in (1, 1, 2))
    assert prompt == [1, 2, 3] == first[:3]
    assert first == same != other
    assert run(params, prompt, 0) == prompt


def test_an_empty_prompt_is_refused(rng):
    with pytest.raises(ValueError):
        run(rand_params(rng), [], 3)


# float32 stays float32


def float_arrays(result):
    if isinstance(result, np.ndarray) and result.dtype.kind == "f":
        yield result
    elif isinstance(result, dict):
        yield from float_arrays(tuple(result.values()))
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from float_arrays(part)


def float32_calls():
    rng = np.random.default_rng(10)

    def f(*shape):
        return frozen(rand(rng, *shape).astype(np.float32))

    X, Z, S, ids = f(B, T, d), f(B, T, F), f(B, H, T, T), rand_ids(rng, B, T)
    Qh, Kh, Vh = (f(B, H, T, dh) for _ in "qkv")
    p, params = {k: f(*s) for k, s in BLOCK_SHAPES.items()}, rand_params(rng, np.float32)
    return {
        "linear_forward": lambda: t.linear_forward(X, p["ff1_w"], p["ff1_b"]),
        "linear_backward": lambda: t.linear_backward(Z, X, p["ff1_w"]),
        "relu_forward": lambda: t.relu_forward(Z),
        "relu_backward": lambda: t.relu_backward(Z, Z),
        "softmax_forward": lambda: t.softmax_forward(S),
        "softmax_backward": lambda: t.softmax_backward(S, S),
        "cross_entropy_forward": lambda: t.cross_entropy_forward(Z, ids % F),
        "cross_entropy_backward": lambda: t.cross_entropy_backward(Z, ids % F),
        "layer_norm_forward": lambda: t.layer_norm_forward(X, p["ln1_g"], p["ln1_b"]),
        "layer_norm_backward": lambda: t.layer_norm_backward(
            X, t.layer_norm_forward(X, p["ln1_g"], p["ln1_b"])[1]
        ),
        "embed_forward": lambda: t.embed_forward(params, ids),
        "embed_backward": lambda: t.embed_backward(X, ids, params),
        "project_qkv": lambda: t.project_qkv(X, p),
        "split_heads": lambda: t.split_heads(X, H),
        "merge_heads": lambda: t.merge_heads(Qh),
        "scores": lambda: t.scores(Qh, Kh),
        "scaled_scores": lambda: t.scaled_scores(Qh, Kh),
        "causal_mask": lambda: t.causal_mask(S),
        "attention_weights": lambda: t.attention_weights(Qh, Kh),
        "weighted_values": lambda: t.weighted_values(S, Vh),
        "attention_forward": lambda: t.attention_forward(X, p, H),
        "attention_backward": lambda: t.attention_backward(X, t.attention_forward(X, p, H)[1], p),
        "ffn_forward": lambda: t.ffn_forward(X, p),
        "ffn_backward": lambda: t.ffn_backward(X, t.ffn_forward(X, p)[1], p),
        "block_forward": lambda: t.block_forward(X, p, H),
        "block_backward": lambda: t.block_backward(X, t.block_forward(X, p, H)[1], p),
        "forward": lambda: t.forward(params, ids, CONFIG),
        "loss_and_grads": lambda: t.loss_and_grads(params, ids, ids, CONFIG),
        "batch_loss_and_grads": lambda: t.batch_loss_and_grads(params, ids, ids, CONFIG),
    }


@pytest.mark.parametrize("name", float32_calls())
def test_float32_in_gives_float32_out(name):
    arrays = list(float_arrays(float32_calls()[name]()))
    assert arrays and all(a.dtype == np.float32 for a in arrays)


def test_float32_gradients_are_close_to_float64_ones(rng):
    params, x, y = rand_params(rng, np.float32), rand_ids(rng, B, T), rand_ids(rng, B, T)
    wide = {name: w.astype(np.float64) for name, w in params.items()}
    loss, grads = t.batch_loss_and_grads(params, x, y, CONFIG)
    wide_loss, wide_grads = t.batch_loss_and_grads(wide, x, y, CONFIG)
    assert loss == pytest.approx(wide_loss, rel=1e-4)
    for name in grads:
        close(grads[name], wide_grads[name], rtol=1e-3, atol=1e-4)
