"""Each forward card read a second time, slowly, and the values that a reader of it may expect."""
import math
import random
import re
import subprocess
import sys
import unicodedata
from fractions import Fraction
from itertools import islice, product

import numpy as np
import pytest

import tinygpt as t
from conftest import GOLDEN, ROOT, plain_environment
from tinygpt import AdamW, batch_loss_and_grads     # as in the book: a training replaces them in t

# All sizes differ, so that a swapped axis cannot hide behind equal numbers. Random inputs are
# read-only, so that a function that writes into its arguments fails wherever it is called.
T, d, hs, H, B, F, V, L, Tmax = 5, 12, 4, 3, 6, 10, 11, 2, 7
CONFIG = t.ModelConfig(V, context=T, max_context=Tmax, width=d, heads=H, hidden=F, layers=L)
BLOCK_SHAPES = dict(
    ln1_g=(d,), ln1_b=(d,), wq=(d, d), bq=(d,), wk=(d, d), bk=(d,), wv=(d, d), bv=(d,),
    wo=(d, d), bo=(d,), ln2_g=(d,), ln2_b=(d,), ff1_w=(d, F), ff1_b=(F,), ff2_w=(F, d), ff2_b=(d,))
SHAPES = (dict(tok_emb=(V, d), pos_emb=(Tmax, d))
          | {f"block{l}.{name}": s for l in range(L) for name, s in BLOCK_SHAPES.items()}
          | dict(lnf_g=(d,), lnf_b=(d,), head_w=(d, V), head_b=(V,)))


@pytest.fixture(params=[(), (B,)], ids=["window", "batch"])
def lead(request):
    """What stands before T in the shape of ids; a matrix has its windows one below the other."""
    return request.param


def frozen(x):
    """x with every array in it read-only."""
    if isinstance(x, np.ndarray):
        x.flags.writeable = False
    elif isinstance(x, (dict, list, tuple)):
        for part in x.values() if isinstance(x, dict) else x:
            frozen(part)
    return x


def rand(rng, *shape, dtype=np.float64):
    return frozen(rng.standard_normal(shape).astype(dtype))


def rand_ids(rng, *shape, high=V):
    return frozen(rng.integers(0, high, shape))


def rand_arrays(rng, shapes, dtype=np.float64):
    return {name: rand(rng, *shape, dtype=dtype) for name, shape in shapes.items()}


def copies(arrays):
    return {name: np.array(a) for name, a in arrays.items()}


def close(actual, expected, rtol=1e-12, atol=1e-12):
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def all_close(actual, expected, **tolerances):
    assert actual.keys() == expected.keys()
    for name in expected:
        close(actual[name], expected[name], **tolerances)


def all_same(actual, expected):
    """Bit for bit, for the names in expected."""
    for name in expected:
        assert np.array_equal(actual[name], expected[name]), name


# 1 to 5: tokenizer


def slow_pre_tokens(text):
    """The alternatives of the pattern, tried by hand from left to right."""

    def mark(char):
        return unicodedata.category(char)[0] == "M" or char in "\u200c\u200d"

    def kind(char):
        if char.isspace():
            return " "
        return {"L": "letter", "N": "digit"}.get(unicodedata.category(char)[0], "other")

    out, i = [], 0
    while i < len(text):
        ending = next((e for e in "'s 't 're 've 'm 'll 'd".split() if text.startswith(e, i)), None)
        start = i + (text[i] == " " and i + 1 < len(text) and kind(text[i + 1]) != " ")
        end = start + 1
        while end < len(text) and (kind(text[end]) == kind(text[start]) or
                                   kind(text[start]) == "letter" and mark(text[end])):
            end += 1
        if ending:
            end = i + len(ending)
        elif kind(text[start]) == " " and end < len(text) and end - start > 1:
            end -= 1                                # the last blank goes with what follows
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
    """Counts every pair anew before every merge. Gives the merges and the last tokens by word."""
    tokens, merges = {word: list(word) for word in word_counts}, []
    while len(merges) < n_merges:
        counts = {}
        for word, n in word_counts.items():
            for pair in zip(tokens[word], tokens[word][1:]):
                counts[pair] = counts.get(pair, 0) + n
        if max(counts.values(), default=0) < 2:
            break
        merges.append(min(counts, key=lambda pair: (-counts[pair], pair)))
        tokens = {word: slow_merge(some, merges[-1]) for word, some in tokens.items()}
    return merges, tokens


def tokens_of(tokenizer, text):
    return [tokenizer.itos[i] for i in tokenizer.encode(text)]


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
AWKWARD = ["  x", "a\tb", "\n\n\n", "x  ", " ", "", "e\u0301\u00e9", "\r\n \r", "don't  we'll",
           FAMILY, FAMILY + " e\u0301 \u00e9", "\u0301a", "हिन्दी की किताब", "مَرْحَبًا", "ภาษาไทยที่นี่",
           "เ\u0e19\u0e49\u0e33", "क्‍ष नी‌म", "\u845b\U000e0100飾"]
STRANGE = list("ab zZ09_-.,'\"?\t\n\r\v\x00\x1b\x1c\x85\xa0²½é中") + [
    "\u0301", "\u0663", "\u200d", "\u2028", "\u3000", "\ufeff", "\u093f", FAMILY[0]]
CATS = "at a cat\nat a hat\nat a mat\n"


@pytest.mark.parametrize("text, expected", [
    ("Hello world!", ["Hello", " world", "!"]), ("a  b", ["a", " ", " b"]),
    ("a\n\n b", ["a", "\n\n", " b"]), ("x1 22y", ["x", "1", " 22", "y"]), ("it's", ["it", "'s"]),
    ("   ", ["   "]), ("a_b", ["a", "_", "b"]), ("'the", ["'t", "he"]), ("we'll", ["we", "'ll"]),
    ("हिन्दी की किताब", ["हिन्दी", " की", " किताब"]), ("مَرْحَبًا", ["مَرْحَبًا"]), ("e\u0301t", ["e\u0301t"])])
def test_pre_tokens_are_cut_as_in_gpt2_and_marks_stay_with_their_word(text, expected):
    assert t.PRE_TOKEN.findall(text) == slow_pre_tokens(text) == expected


@pytest.mark.parametrize("letters", ["absdtlm'' \n\t  .,_-!017\u00e9\u0301\u4e2d",
                                     "हिदकी \u0301\u200d\u200c.1'sa"])
def test_pre_tokens_of_random_text_equal_the_slow_reading(letters):
    rnd = random.Random(1)
    for _ in range(400):
        text = "".join(rnd.choice(letters) for _ in range(25))
        assert t.PRE_TOKEN.findall(text) == slow_pre_tokens(text)


def test_every_mark_of_every_script_stays_with_the_letter_before_it():
    marks = [char for char in map(chr, range(sys.maxunicode + 1))
             if unicodedata.category(char)[0] == "M"]
    assert [m for m in marks if t.PRE_TOKEN.findall(f"a{m}b") != [f"a{m}b"]] == []


def test_pre_tokens_cover_every_character_exactly_once():
    rnd = random.Random(2)
    for _ in range(400):
        pieces = t.PRE_TOKEN.findall(text := "".join(rnd.choices(STRANGE, k=rnd.randrange(30))))
        assert "".join(pieces) == text and "" not in pieces


def test_words_are_counted_and_stay_in_order_of_first_sight():
    text = "the cat, the dog; the cat and the other dog"
    words = slow_pre_tokens(text)
    assert list(t.count_words(text).items()) == [(w, words.count(w)) for w in dict.fromkeys(words)]


def test_merging_goes_left_to_right_jumps_over_both_tokens_and_keeps_its_input():
    assert t.merge_tokens(["a", "a", "a"], ("a", "a")) == ["aa", "a"]
    assert t.merge_tokens(["ab", "a", "b"], ("a", "b")) == ["ab", "ab"]
    assert t.merge_tokens([], ("a", "b")) == []
    for word, pair in product(product("ab", repeat=8), product("ab", repeat=2)):
        tokens = list(word)
        assert t.merge_tokens(tokens, pair) == slow_merge(word, pair)
        assert tokens == list(word)


@pytest.mark.parametrize("text, merges", [
    ("nmlknmlk", ["l k", "m lk", "n mlk"]), ("cabacaba", ["a b", "ab a", "c aba"]),
    ("yzyyzyzy", ["y z", "yz y"]), ("abababab", ["a b", "ab ab"]), ("aaa", ["a a"]),
    ("abcdef", []), ("a", []), ("", [])])
def test_ties_go_to_the_smallest_pair_and_training_stops_at_pairs_seen_once(text, merges):
    assert t.train_bpe_on_text(text, 100) == [tuple(pair.split()) for pair in merges]


def test_the_merges_do_not_depend_on_the_order_of_a_set():
    code = f"import tinygpt as t; print(t.train_bpe_on_text({'nmlk cabacaba dcba' * 4!r}, 30))"
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                             cwd=ROOT, env=plain_environment(PYTHONHASHSEED=seed)) for seed in "12"]
    assert runs[0].communicate()[0] == runs[1].communicate()[0] != ""


def test_pairs_count_at_overlapping_places_and_never_from_word_to_word():
    assert t.train_bpe({"aaaaa": 1, "bc": 3}, 1) == [("a", "a")]    # 4 places, though 2 at most fit
    assert t.train_bpe({"ab": 1, "ba": 1}, 5) == []


def test_all_short_strings_over_two_letters_train_as_with_recounting():
    for text in ("".join(letters) for n in range(11) for letters in product("ab", repeat=n)):
        merges, tokens = slow_train({text: 1}, 6)
        assert t.train_bpe_on_text(text, 6) == merges
        assert t.apply_merges(text, merges) == tokens[text]


def test_weighted_words_train_as_with_recounting():
    rnd = random.Random(3)
    for _ in range(150):
        words = ["".join(rnd.choices("aabc", k=rnd.randint(1, 9))) for _ in range(12)]
        counts = {word: rnd.randint(1, 4) for word in words}
        merges, tokens = slow_train(counts, 15)
        assert t.train_bpe(counts, 15) == merges
        assert {word: t.apply_merges(word, merges) for word in counts} == tokens


@pytest.mark.parametrize("word, expected", [
    ("xyz", "x yz"), ("xyzxy", "x yz xy"), ("mississippi", "m iss iss i pp i")])
def test_encoding_replays_merges_by_rank(word, expected):
    merges = [("y", "z"), ("x", "y"), ("s", "s"), ("i", "ss"), ("i", "s"), ("p", "p")]
    assert t.apply_merges(word, merges) == expected.split()


@pytest.mark.parametrize("n_merges", [0, 1, 6, 40])
@pytest.mark.parametrize("text", [CATS, "yzyyzyzy", "banana bandana, a banana and 1001 nights" * 2])
def test_encoding_the_training_text_gives_the_tokens_training_ended_with(text, n_merges):
    words = slow_pre_tokens(text)
    tokens = slow_train({word: words.count(word) for word in words}, n_merges)[1]
    trained = t.build_tokenizer(text, n_merges)
    for tokenizer in (trained, t.Tokenizer(trained.itos, trained.merges)):      # and one loaded
        assert tokens_of(tokenizer, text) == [token for word in words for token in tokens[word]]
    assert not re.search(r"\S\s", "".join(f"\n{token}" for token in trained.itos).replace("\n", ""))


def test_a_loaded_tokenizer_encodes_a_longer_text_as_the_trained_one_does():
    text = (ROOT / "corpus.txt").read_text(encoding="utf-8")[:40_000]
    trained = t.build_tokenizer(text, 700)
    assert len(trained.merges) == 700
    assert trained.encode(text) == t.Tokenizer(trained.itos, trained.merges).encode(text)


def lines_run(function, *args):
    """How many lines of Python run, which tells the amount of work without a clock."""
    lines, before = 0, sys.gettrace()

    def count(*_):
        nonlocal lines
        lines += 1
        return count
    sys.settrace(count)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return lines


def test_a_text_without_blanks_takes_time_in_proportion_to_its_length():
    rnd = random.Random(4)
    texts = ["".join(rnd.choices("ACGT", k=n)) for n in (1500, 3000)]
    tokenizer = t.build_tokenizer(texts[1], 40)
    for work in (lambda text: t.build_tokenizer(text, 40),
                 lambda text: t.Tokenizer(tokenizer.itos, tokenizer.merges).encode(text)):
        short, long = (lines_run(work, text) for text in texts)
        assert 1.5 < long / short < 2.5


def test_vocabulary_is_unknown_then_characters_by_first_sight_then_merged_tokens():
    text = "zebra bazaar zebra bazaar"
    merges = t.train_bpe_on_text(text, 7)
    tokenizer = t.build_tokenizer(text, 7)
    assert len(merges) == 7 and tokenizer.merges == merges
    assert tokenizer.itos == list(dict.fromkeys(["<unk>", *text, *(a + b for a, b in merges)]))
    assert tokenizer.stoi == {token: i for i, token in enumerate(tokenizer.itos)}
    early = t.build_tokenizer("abababab", 100)              # no token that nothing reaches
    assert early.itos == ["<unk>", "a", "b", "ab", "abab"]


@pytest.mark.parametrize("n_merges", [0, 50])
@pytest.mark.parametrize("text", AWKWARD, ids=ascii)
def test_awkward_text_survives_the_round_trip(text, n_merges):
    tokenizer = t.build_tokenizer("\n".join(AWKWARD) + "\n" + "\t".join(AWKWARD), n_merges)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert type(ids) is list and all(type(i) is int and i > 0 for i in ids)


def test_random_strange_text_survives_the_round_trip():
    rnd = random.Random(5)
    tokenizer = t.build_tokenizer("".join(rnd.choices(STRANGE, k=4000)), 50)
    for _ in range(100):
        text = "".join(rnd.choices(STRANGE, k=20))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_merges_each_character_is_a_token_and_nothing_is_normalised():
    text = FAMILY + " e\u0301 \u00e9"
    tokenizer = t.build_tokenizer(text, 0)
    assert tokens_of(tokenizer, text) == list(text)
    assert len(tokenizer.encode(text)) == 10 and len(tokenizer.itos) == 8 + 1


def test_unknown_characters_become_id_0_and_do_not_vanish():
    tokenizer = t.build_tokenizer("face cafe\n", 3)
    ids = tokenizer.encode("fa?ce \U0001f468")
    assert ids.count(0) == 2 and tokenizer.decode(ids) == "fa<unk>ce <unk>"
    assert tokenizer.unknown("F?ace?") == ["F", "?"]
    for bad in (-1, len(tokenizer.itos)):
        with pytest.raises(ValueError, match=str(bad)):
            tokenizer.decode([1, bad])


# 6 to 9, 54: data


@pytest.mark.parametrize("rho", ["0", "0.05", "0.1", "0.2", "0.25", "0.3", "0.5", "0.7", "0.9"])
def test_split_rounds_the_exact_product_down(rho):
    for n in range(200):                            # int((1 - 0.9) * 10) would be 0
        train, val = t.split_ids(range(n), float(rho))
        assert len(train) == math.floor((1 - Fraction(rho)) * n)
        assert [*train, *val] == list(range(n))


@pytest.mark.parametrize("rho", [-0.1, 1.0, 1.5, math.nan])
def test_a_share_that_leaves_nothing_to_train_on_is_refused(rho):
    with pytest.raises(ValueError, match=str(rho)):
        t.split_ids(range(9), rho)


@pytest.mark.parametrize("n, size, stride, count", [
    (8, 8, 1, 0), (9, 8, 1, 1), (10, 8, 1, 2), (10, 4, 1, 6), (10, 4, 2, 3), (10, 4, 4, 2),
    (13, 4, 4, 3), (13, 4, 5, 2), (13, 4, 13, 1), (100, 8, 1, 92), (3, 8, 1, 0), (3, 8, 2, 0)])
def test_how_many_windows(n, size, stride, count):
    x, y = t.make_windows(np.arange(n), size, stride)
    assert t.window_count(n, size, stride) == count
    assert x.shape == y.shape == (count, size)
    if (n, size, stride) == (13, 4, 4):
        assert sorted(y.ravel()) == list(range(1, 13))      # each later token once


def test_windows_equal_the_slow_reading(rng):
    for n, size, stride in product(range(4, 15), range(1, 5), range(1, 7)):
        ids = rand_ids(rng, n)
        starts = [s for s in range(n) if s % stride == 0 and s < n - size]
        x, y = t.make_windows(ids, size, stride)
        assert t.window_count(n, size, stride) == len(starts)
        assert x.tolist() == [[ids[s + i] for i in range(size)] for s in starts]
        assert y.tolist() == [[ids[s + i + 1] for i in range(size)] for s in starts]


@pytest.mark.parametrize("size, stride", [(4, 0), (4, -1), (0, 1)])
def test_windows_without_length_or_stride_are_refused(size, stride):
    with pytest.raises(ValueError):
        t.make_windows(np.arange(20), size, stride)


def test_split_before_windows_keeps_the_two_parts_apart():
    (x, y), (val_x, _) = (t.make_windows(part, 8, 1) for part in t.split_ids(range(100), 0.1))
    assert len(x) == 82 and y.max() == 89 and len(val_x) == 2 and val_x.min() == 90


@pytest.mark.parametrize("windows, batch", [(7, 3), (6, 3), (3, 8), (1, 1), (50, 7)])
def test_one_pass_shows_each_window_once_and_keeps_x_with_its_y(windows, batch):
    x = frozen(np.arange(windows * T).reshape(windows, T))
    batches = list(t.iterate_batches(x, frozen(x + 1000), batch, np.random.default_rng(5)))
    full, rest = divmod(windows, batch)
    assert [len(xb) for xb, _ in batches] == [batch] * full + [rest] * (rest > 0)
    assert all(np.array_equal(xb + 1000, yb) for xb, yb in batches)
    assert sorted(row.tolist() for xb, _ in batches for row in xb) == x.tolist()
    assert t.step_counts(windows, batch, 3) == (len(batches), 3 * len(batches))
    with pytest.raises(ValueError):
        next(t.iterate_batches(x, x, 0, None))


def test_each_epoch_has_every_window_once_in_an_order_of_its_own_that_the_seed_fixes():
    x = frozen(np.arange(50)[:, None])

    def epochs(seed):                               # three, of 7 batches each
        batches = t.epoch_after_epoch(x, x, 8, np.random.default_rng(seed))
        return [np.concatenate([xb for xb, _ in islice(batches, 7)]).ravel().tolist()
                for _ in range(3)]
    orders = epochs(6)
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({*map(tuple, orders), tuple(range(50))}) == 4
    assert epochs(6) == orders != epochs(7)


# 11 to 20: operations


def slow_linear(X, W, b):
    return np.array([[b[j] + sum(row[k] * W[k, j] for k in range(len(W))) for j in range(len(b))]
                     for row in X])


def slow_softmax(row):
    e = [math.exp(z - max(row)) for z in row]
    return np.array([one / math.fsum(e) for one in e])


def slow_layer_norm(X, gamma, beta):
    Y = np.zeros(X.shape)
    for r, row in enumerate(X):
        mean = math.fsum(row) / len(row)
        root = math.sqrt(math.fsum((x - mean) ** 2 for x in row) / len(row) + 1e-5)
        Y[r] = [gamma[i] * (x - mean) / root + beta[i] for i, x in enumerate(row)]
    return Y


def slow_cross_entropy(logits, y):
    P = np.array([slow_softmax(row) for row in logits])
    return -math.fsum(math.log(P[i, y[i]]) for i in range(len(y))) / len(y), P


def test_linear_relu_and_layer_norm_equal_the_slow_reading(rng):
    X, W, b, gamma, beta = (rand(rng, *s) for s in ((B * T, d), (d, F), (F,), (d,), (d,)))
    Z = t.linear_forward(X, W, b)
    close(Z, slow_linear(X, W, b))
    close(t.relu_forward(frozen(Z)), [[z if z > 0 else 0 for z in row] for row in Z])
    close(t.layer_norm_forward(X, gamma, beta)[0], slow_layer_norm(X, gamma, beta))


def test_relu_gradient_is_zero_at_zero_and_asks_the_input_only():
    Z, dR = frozen(np.array([-1.0, 0.0, 2.0, 3.0])), frozen(np.array([5.0, 5.0, -5.0, 0.0]))
    assert t.relu_backward(dR, Z).tolist() == [0, 0, -5, 0]


@pytest.mark.parametrize("shape", [(V,), (T, V), (B, H, T, V)])
def test_softmax_equals_the_slow_reading(rng, shape):
    z = rand(rng, *shape)
    slow = [slow_softmax(row) for row in z.reshape(-1, V)]
    close(t.softmax_forward(z), np.reshape(slow, shape))


def test_softmax_of_very_large_and_of_masked_scores():
    with np.errstate(all="raise", under="ignore"):
        close(t.softmax_forward(np.array([1000.0, 999.0])), slow_softmax([1.0, 0.0]))
        close(t.softmax_forward(np.array([-1e5, -1e5 - 1])), slow_softmax([1.0, 0.0]))
    x = np.array([[0.0, -np.inf], [-np.inf, -7.0]])
    assert t.softmax_forward(x).tolist() == [[1, 0], [0, 1]]


def test_cross_entropy_equals_the_slow_reading(rng, lead):
    logits, y = rand(rng, math.prod(lead) * T, V), rand_ids(rng, *lead, T)
    loss, P = t.cross_entropy_forward(logits, y)
    slow_loss, slow_P = slow_cross_entropy(logits, y.ravel())
    close(loss, slow_loss)
    close(P, slow_P)


@pytest.mark.parametrize("logits, target, loss, gradient", [
    ([2.0, 1.0, 0.0], 0, 0.40760596444438, [-0.33475904, 0.24472847, 0.09003057]),
    ([0.0, -1000.0], 1, 1000.0, [1.0, -1.0]),
    ([1000.0, 0.0], 0, 0.0, [0.0, 0.0]),
    ([-np.inf, 0.0, 0.0], 2, math.log(2), [0.0, 0.5, -0.5]),
    ([0.0] * 65, 7, 4.174387269895637, [1 / 65] * 7 + [-64 / 65] + [1 / 65] * 57)])
def test_cross_entropy_of_extreme_logits(logits, target, loss, gradient):
    y = np.array([target])
    actual, P = t.cross_entropy_forward(np.array([logits]), y)
    close(actual, loss)
    close(t.cross_entropy_backward(P, y), [gradient], atol=1e-8)


def test_cross_entropy_keeps_the_answer_beside_huge_float32_logits():
    loss, _ = t.cross_entropy_forward(np.full((1, 2), 5e7, np.float32), np.array([1]))
    assert loss == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("targets", [[0, -1, 1], [0, V, 1], []])
def test_cross_entropy_refuses_targets_outside_the_vocabulary_and_none_at_all(targets):
    with pytest.raises(ValueError):
        t.cross_entropy_forward(np.zeros((len(targets), V)), np.array(targets, int))


def test_perplexity_counts_equally_likely_choices():
    assert t.perplexity(math.log(V)) == pytest.approx(V, rel=1e-14)
    assert t.perplexity(0.0) == 1 and t.perplexity(1e4) == math.inf


def test_layer_norm_by_hand():
    # Dividing by n - 1 would give [-0.866, -0.289, -0.289, 1.443].
    Y, cache = t.layer_norm_forward(np.array([[2.0, 4.0, 4.0, 10.0]]), np.ones(4), np.zeros(4))
    close(Y, [[-0.99999944, -0.33333315, -0.33333315, 1.66666574]], atol=1e-8)
    dX, _, _ = t.layer_norm_backward(np.array([[0.0, 1.0, 0.0, -1.0]]), cache)
    close(dX, [[-0.16666639, 0.27777769, -0.05555546, -0.05555583]], atol=1e-8)
    Y, _ = t.layer_norm_forward(np.array([[0.001, -0.001]]), np.ones(2), np.zeros(2))
    close(Y[0, 0], 0.001 / math.sqrt(1e-6 + 1e-5))          # epsilon inside the root
    Y, _ = t.layer_norm_forward(np.full((1, 3), 7.0), np.full(3, 2.0), np.array([1.0, 2.0, 3.0]))
    close(Y, [[1.0, 2.0, 3.0]], atol=1e-9)                  # a constant row


# 23, 43, 44: starting values and their number


@pytest.mark.parametrize("fan_in, fan_out", [(300, 500), (700, 90)])
def test_xavier_fills_its_interval_evenly(rng, fan_in, fan_out):
    W = t.xavier_uniform(rng, fan_in, fan_out)
    a = math.sqrt(6 / (fan_in + fan_out))
    assert W.shape == (fan_in, fan_out) and 0.999 * a < np.abs(W).max() <= a
    assert abs(W.mean()) < 0.02 * a
    assert W.var() == pytest.approx(2 / (fan_in + fan_out), rel=0.02)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_starting_values(dtype):
    first, again, other = (t.init_params(CONFIG, np.random.default_rng(s), *[dtype] * (
        dtype != np.float32)) for s in (7, 7, 8))           # float32 if nothing is said
    assert {name: W.shape for name, W in first.items()} == SHAPES
    for name, W in first.items():
        assert W.dtype == dtype and np.array_equal(W, again[name])
        if W.ndim == 2:
            a = math.sqrt(6 / sum(W.shape))
            assert 0.6 * a < np.abs(W).max() <= a * (1 + 1e-6)
            assert np.unique(W).size > 0.9 * W.size and not np.array_equal(W, other[name])
        else:
            assert np.all(W == (1 if name.endswith("_g") else 0))
    matrices = [W.tobytes() for W in first.values() if W.ndim == 2]
    assert len(set(matrices)) == len(matrices)


def test_first_loss_is_near_the_log_of_the_vocabulary(rng):
    config, (x, y) = t.ModelConfig(65), rand_ids(rng, 2, 16, 16, high=65)
    assert abs(t.loss_and_grads(t.init_params(config, rng), x, y, config)[0] - math.log(65)) < 0.6


@pytest.mark.parametrize("config", [CONFIG, t.ModelConfig(65), t.ModelConfig(9, width=12, heads=3)])
def test_parameter_count_by_formula_and_by_counting(config):
    w, h, v = config.width, config.hidden, config.vocab_size
    block = 4 * w * w + 2 * w * h + h + 9 * w               # 12,704 at the default sizes
    total = (2 * w + 1) * v + (config.max_context + 2) * w + config.layers * block
    params = t.init_params(config, np.random.default_rng(0))
    assert t.count_params(params) == total == sum(1 for W in params.values() for _ in W.flat)
    assert t.count_params(t.block_params(params, 1)) == block


def test_block_params_are_the_arrays_of_that_block():
    params = {f"block{l}.{name}": (l, name) for l in (1, 10) for name in BLOCK_SHAPES}
    for l in (1, 10):
        assert t.block_params(params, l) == {name: (l, name) for name in BLOCK_SHAPES}


# 24 to 45: the model


def slow_embed(params, ids):
    E, P = params["tok_emb"], params["pos_emb"]
    return np.array([[E[v, j] + P[i, j] for j in range(d)] for i, v in enumerate(ids)])


def slow_attention(Xn, p, heads):
    """One window, head by head and query by query; later keys are never looked at."""
    Q, K, M = (slow_linear(Xn, p["w" + name], p["b" + name]) for name in "qkv")
    O, width = np.zeros(Q.shape), Q.shape[1] // heads
    for h, i in product(range(heads), range(len(Xn))):
        own = range(h * width, (h + 1) * width)             # columns of head h
        a = slow_softmax([sum(Q[i, c] * K[j, c] for c in own) / math.sqrt(width)
                          for j in range(i + 1)])
        for c in own:
            O[i, c] = sum(a[j] * M[j, c] for j in range(i + 1))
    return slow_linear(O, p["wo"], p["bo"])


def slow_ffn(Xn, p):
    Z = slow_linear(Xn, p["ff1_w"], p["ff1_b"])
    return slow_linear([[max(0.0, z) for z in row] for row in Z], p["ff2_w"], p["ff2_b"])


def slow_block(X, p, heads):
    Xmid = X + slow_attention(slow_layer_norm(X, p["ln1_g"], p["ln1_b"]), p, heads)
    return Xmid + slow_ffn(slow_layer_norm(Xmid, p["ln2_g"], p["ln2_b"]), p)


def slow_forward(params, ids):
    X = slow_embed(params, ids)
    for l in range(L):
        X = slow_block(X, {name: params[f"block{l}.{name}"] for name in BLOCK_SHAPES}, H)
    Xf = slow_layer_norm(X, params["lnf_g"], params["lnf_b"])
    return slow_linear(Xf, params["head_w"], params["head_b"])


@pytest.mark.parametrize("length", [1, T, Tmax])
def test_embedding_equals_the_slow_reading(rng, lead, length):
    params, ids = rand_arrays(rng, SHAPES), rand_ids(rng, *lead, length)
    close(t.embed_forward(params, ids),
          np.concatenate([slow_embed(params, row) for row in ids.reshape(-1, length)]))


def test_repeated_ids_add_up_by_hand():
    ids = frozen(np.array([[2, 0, 2], [2, 1, 0]]))
    dX0 = frozen(np.array([[1.0], [2], [4], [8], [16], [32]]))
    params = frozen(dict(tok_emb=np.zeros((3, 1)), pos_emb=np.zeros((4, 1))))
    d_tok_emb, d_pos_emb = t.embed_backward(dX0, ids, params)
    assert d_tok_emb.ravel().tolist() == [34, 16, 13]
    assert d_pos_emb.ravel().tolist() == [9, 18, 36, 0]


@pytest.mark.parametrize("bad", [-1, V])
def test_ids_outside_the_vocabulary_are_refused(rng, bad):
    params, ids = rand_arrays(rng, SHAPES), np.array([[1, 2, bad]])
    for call in (lambda: t.embed_forward(params, ids), lambda: t.forward(params, ids, CONFIG)):
        with pytest.raises(ValueError, match=str(bad)):
            call()


@pytest.mark.parametrize("heads", [1, 2, 3, d])
def test_splitting_and_merging_heads(rng, lead, heads):
    M, width = rand(rng, math.prod(lead) * T, d), d // heads
    Mh = t.split_heads(M, heads, T)
    assert Mh.shape == (math.prod(lead), heads, T, width)
    for b, h, i, c in np.ndindex(Mh.shape):
        assert Mh[b, h, i, c] == M[b * T + i, h * width + c]
    assert np.array_equal(t.merge_heads(frozen(Mh)), M)
    assert np.array_equal(t.head_columns(M, heads, heads - 1), M[:, d - width:])


@pytest.mark.parametrize("heads", [5, 0])
def test_a_width_that_the_heads_cannot_share_is_refused_with_both_numbers(heads):
    with pytest.raises(ValueError, match=f"{d}.* {heads} "):
        t.split_heads(np.zeros((T, d)), heads, T)
    with pytest.raises(ValueError, match=rf"{d}.*\b{heads}\b|heads.* {heads}"):
        t.ModelConfig(9, width=d, heads=heads)


def test_the_steps_of_attention_equal_the_slow_reading(rng, lead):
    n, p = math.prod(lead), rand_arrays(rng, BLOCK_SHAPES)
    Xn, Qh, Kh, Vh = rand(rng, n * T, d), *rand(rng, 3, n, H, T, hs)
    S, A = rand(rng, 2, n, H, T, T)
    for name, M in zip("qkv", t.project_qkv(Xn, p), strict=True):
        close(M, slow_linear(Xn, p["w" + name], p["b" + name]))
    dots, weights, mixed = np.zeros(S.shape), np.zeros(S.shape), np.zeros(Vh.shape)
    for b, h, i in np.ndindex(n, H, T):
        dots[b, h, i] = [sum(Qh[b, h, i, c] * Kh[b, h, j, c] for c in range(hs)) for j in range(T)]
        weights[b, h, i, :i + 1] = slow_softmax(S[b, h, i, :i + 1])
        mixed[b, h, i] = sum(A[b, h, i, j] * Vh[b, h, j] for j in range(T))
    close(t.scores(Qh, Kh), dots)
    close(t.scaled_scores(Qh, Kh), dots / 2)                # √4, though the model is 12 wide
    close(t.attention_weights(S), weights)
    assert np.all(t.attention_weights(S)[..., np.triu(np.ones((T, T), bool), 1)] == 0)
    close(t.weighted_values(A, Vh), mixed)
    mask = t.causal_mask(T, S.dtype)
    assert all(mask[i, j] == (0 if j <= i else -np.inf) for i, j in np.ndindex(T, T))


def test_mask_then_softmax_by_hand():
    S = np.array([[0.0, 7.0], [math.log(1), math.log(4)]])
    close(t.attention_weights(S), [[1.0, 0.0], [0.2, 0.8]])
    q, k = np.array([[[1.0, 1, 0, 2]]]), np.array([[[2.0, 0, 1, 1]]])
    assert t.scaled_scores(q, k).item() == 2.0


@pytest.mark.parametrize("name, slow, more", [
    ("attention", slow_attention, (H,)), ("ffn", slow_ffn, ()), ("block", slow_block, (H,))])
def test_layers_equal_the_slow_reading_window_by_window(rng, lead, name, slow, more):
    X, p = rand(rng, math.prod(lead) * T, d), rand_arrays(rng, BLOCK_SHAPES)
    out, _ = getattr(t, f"{name}_forward")(X, p, *more, *[T] * len(more))
    close(out, np.concatenate([slow(part, p, *more) for part in np.split(X, math.prod(lead))]))


@pytest.mark.parametrize("length", [1, 3, T, Tmax])
def test_forward_equals_the_slow_reading_window_by_window(rng, lead, length):
    params, ids = rand_arrays(rng, SHAPES), rand_ids(rng, *lead, length)
    slow = [slow_forward(params, row) for row in ids.reshape(-1, length)]
    close(t.forward(params, ids, CONFIG)[0], np.concatenate(slow), rtol=1e-10)


def test_changing_a_token_leaves_earlier_positions_alone_bit_for_bit(rng, lead):
    params, ids = rand_arrays(rng, SHAPES), rand_ids(rng, *lead, T)
    before = t.forward(params, ids, CONFIG)[0].reshape(*lead, T, V)
    for place in range(T):
        changed = ids.copy()
        changed[..., place] = (changed[..., place] + 1) % V
        after = t.forward(params, changed, CONFIG)[0].reshape(*lead, T, V)
        assert np.array_equal(after[..., :place, :], before[..., :place, :])
        assert np.all(np.any(after[..., place:, :] != before[..., place:, :], axis=-1))


@pytest.mark.parametrize("rows, length", [(8, 9), (1, 3), (8, 0)])  # one row would be repeated
def test_too_long_or_empty_an_input_is_refused_with_both_lengths(rows, length):
    config = t.ModelConfig(30, rows, rows, width=4, heads=2, hidden=6, layers=1)
    params = t.init_params(config, np.random.default_rng(0))
    with pytest.raises(ValueError, match=rf"\b{rows}\b.*\b{length}\b"):
        t.forward(params, np.zeros(length, int), config)


# float32 stays float32, gradients have the shape of what they belong to, inputs are left alone


def float_arrays(result):
    if isinstance(result, (dict, tuple, list)):
        for part in result.values() if isinstance(result, dict) else result:
            yield from float_arrays(part)
    elif np.ndim(result) and result.dtype.kind == "f":
        yield result


def shapes_of(result):
    if isinstance(result, dict):
        return {name: shapes_of(part) for name, part in result.items()}
    return [shapes_of(part) for part in result] if isinstance(result, tuple) else result.shape


def every_call(rng, lead, dtype):
    """(name, what it gives, what its gradients are the gradients of, if it gives gradients)."""
    n = math.prod(lead)
    X, Z, S = (rand(rng, *s, dtype=dtype) for s in ((n * T, d), (n * T, F), (n, H, T, T)))
    p, params = rand_arrays(rng, BLOCK_SHAPES, dtype), rand_arrays(rng, SHAPES, dtype)
    W, b, gamma, beta, ids = p["ff1_w"], p["ff1_b"], p["ln1_g"], p["ln1_b"], rand_ids(rng, *lead, T)
    _, P = cross_entropy = frozen(t.cross_entropy_forward(Z, ids % F))
    norm, attention, ffn, block = map(frozen, (
        t.layer_norm_forward(X, gamma, beta), t.attention_forward(X, p, H, T),
        t.ffn_forward(X, p), t.block_forward(X, p, H, T)))
    tables = {name: params[name] for name in ("tok_emb", "pos_emb")}
    own = {name: p[name] for name in "wq bq wk bk wv bv wo bo".split()}
    ffn_own = {name: W for name, W in p.items() if name.startswith("ff")}
    yield from (
        ("linear", t.linear_forward(X, W, b), None), ("relu", t.relu_forward(Z), None),
        ("softmax", t.softmax_forward(S), None), ("cross-entropy", cross_entropy, None),
        ("layer norm", norm, None), ("embed", t.embed_forward(params, ids), None),
        ("attention", attention, None), ("ffn", ffn, None), ("block", block, None),
        ("forward", t.forward(params, ids, CONFIG), None),
        ("linear back", t.linear_backward(Z, X, W), (X, W, b)),
        ("relu back", t.relu_backward(Z, Z), Z), ("softmax back", t.softmax_backward(S, S), S),
        ("cross-entropy back", t.cross_entropy_backward(P, ids % F), P),
        ("layer norm back", t.layer_norm_backward(X, norm[1]), (X, gamma, beta)),
        ("embed back", t.embed_backward(X, ids, params), tuple(tables.values())),
        ("attention back", t.attention_backward(X, attention[1], p), (X, own)),
        ("ffn back", t.ffn_backward(X, ffn[1], p), (X, ffn_own)),
        ("block back", t.block_backward(X, block[1], p), (X, p)),
        ("model", t.loss_and_grads(params, ids, ids, CONFIG)[1], params))
    if lead:
        for parts in (1, 4):
            _, grads = batch_loss_and_grads(params, ids, ids, CONFIG, parts)
            yield f"batch in {parts}", grads, params
        yield "halves", t.in_halves(params, ids, ids, CONFIG)[1], params


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_results_have_the_type_of_the_inputs_and_gradients_their_shapes(rng, lead, dtype):
    for name, result, of in every_call(rng, lead, dtype):
        arrays = list(float_arrays(result))
        assert arrays and all(a.dtype == dtype for a in arrays), name
        assert of is None or shapes_of(result) == shapes_of(of), name


def test_float32_gradients_are_close_to_float64_ones(rng):
    params = rand_arrays(rng, SHAPES, np.float32)
    x, y = rand_ids(rng, 2, B, T)
    wide = {name: W.astype(np.float64) for name, W in params.items()}
    loss, grads = t.loss_and_grads(params, x, y, CONFIG)
    wide_loss, wide_grads = t.loss_and_grads(wide, x, y, CONFIG)
    assert type(loss) is type(wide_loss) is float and loss == pytest.approx(wide_loss, rel=1e-4)
    all_close(grads, wide_grads, rtol=1e-3, atol=1e-4)


# 53, 55 and the halves of a large batch


@pytest.mark.parametrize("parts", [1, 2, 3, 4, B])
def test_a_batch_in_parts_of_any_size_gives_the_means_over_its_windows(rng, parts):
    params, (x, y) = rand_arrays(rng, SHAPES), rand_ids(rng, 2, B, T)
    loss, grads = batch_loss_and_grads(params, x, y, CONFIG, parts)
    each = [t.loss_and_grads(params, *window, CONFIG) for window in zip(x, y)]
    close(loss, sum(one for one, _ in each) / B)
    all_close(grads, {name: sum(g[name] for _, g in each) / B for name in SHAPES})


@pytest.mark.parametrize("windows", [1, 31, 32, 33, 65])
def test_validation_loss_is_the_mean_over_all_windows(rng, windows):
    params, (x, y) = rand_arrays(rng, SHAPES), rand_ids(rng, 2, windows, T)
    losses = [t.cross_entropy_forward(t.forward(params, xj, CONFIG)[0], yj)[0]
              for xj, yj in zip(x, y)]
    loss = t.validation_loss(params, x, y, CONFIG)
    assert type(loss) is float and loss == pytest.approx(sum(losses) / windows, rel=1e-12)


@pytest.mark.parametrize("function", [
    t.loss_and_grads, batch_loss_and_grads, t.in_halves, t.validation_loss])
def test_no_windows_are_refused(rng, function):
    empty = np.zeros((0, T), int)
    with pytest.raises(ValueError):
        function(rand_arrays(rng, SHAPES), empty, empty, CONFIG)


@pytest.mark.parametrize("function", [t.loss_and_grads, batch_loss_and_grads, t.in_halves])
def test_a_later_call_does_not_overwrite_an_earlier_result(rng, function):
    params, (x, y) = rand_arrays(rng, SHAPES), rand_ids(rng, 2, B, T)
    _, grads = function(params, x, y, CONFIG)
    kept = copies(grads)
    function(params, y, x, CONFIG)
    all_same(grads, kept)


WIDE = t.ModelConfig(13, context=32, max_context=32, width=64, heads=4, hidden=48, layers=1)
LARGE_BATCH = t.LARGE // (WIDE.context * WIDE.width)        # so many windows are worth two threads


def wide_batch(windows, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rand_ids(rng, 2, windows, WIDE.context, high=WIDE.vocab_size)
    return t.init_params(WIDE, rng, np.float64), x, y, WIDE


@pytest.mark.parametrize("more", [0, 1])
def test_halves_of_a_large_batch_give_what_two_parts_give_and_the_same_each_time(more):
    batch = wide_batch(LARGE_BATCH + more)
    loss, grads = t.in_halves(*batch)
    expected, expected_grads = batch_loss_and_grads(*batch, 2)
    close(loss, expected)
    all_close(grads, expected_grads)
    for _ in range(3):
        again, grads_again = t.in_halves(*batch)
        assert again == loss and list(grads_again) == list(batch[0])
        all_same(grads_again, grads)


@pytest.mark.parametrize("row", [0, -1])
def test_a_bad_id_in_either_half_is_refused_and_the_next_batch_is_right(row):
    params, x, y, config = batch = wide_batch(LARGE_BATCH)
    loss, _ = t.in_halves(*batch)
    bad = x.copy()
    bad[row, 0] = config.vocab_size
    for inputs in ((bad, y), (x, bad)):
        with pytest.raises(ValueError, match="from 0 to 12"):
            t.in_halves(params, *inputs, config)
        assert t.in_halves(*batch)[0] == loss


def test_a_batch_is_cut_by_its_size_alone(monkeypatch):
    right, sizes = t.loss_and_grads, []
    monkeypatch.setattr(t, "loss_and_grads", lambda *args: sizes.append(len(args[1])) or right(*args))
    for windows, cut in ((LARGE_BATCH - 1, 1), (LARGE_BATCH, 2), (LARGE_BATCH + 1, 2)):
        sizes.clear()
        t.in_halves(*wide_batch(windows))
        assert len(sizes) == cut and sum(sizes) == windows and max(sizes) - min(sizes) <= 1


# 50 to 52: optimizer


def slow_adamw(w, gradients, rates, beta1, beta2, eps, decay):
    """One number through all steps; gives it with its two running means."""
    m = v = 0.0
    for step, (g, lr) in enumerate(zip(gradients, rates), start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        u = (m / (1 - beta1 ** step)) / (math.sqrt(v / (1 - beta2 ** step)) + eps)
        w = w - lr * (u + decay * w)
    return w, m, v


@pytest.mark.parametrize("optimizer", [AdamW, t.LongAdamW])
@pytest.mark.parametrize("dtype, rtol", [(np.float64, 1e-12), (np.float32, 2e-5)])
@pytest.mark.parametrize("settings", [(0.8, 0.95, 1e-7, 0.3), ()], ids=["given", "defaults"])
def test_adamw_equals_the_slow_reading(rng, optimizer, dtype, rtol, settings):
    shapes, scale = dict(a=(3, 4), b=(5,), c=(2, 3, 2)), dict(a=1.0, b=1e-7, c=1e3)
    # Gradients as small as eps show on which side of the root it stands.
    grads = [{k: frozen((rng.standard_normal(s) * scale[k]).astype(dtype))
              for k, s in shapes.items()} for _ in range(5)]
    start, rates = rand_arrays(rng, shapes, dtype), [0.1, 0.2, 0.05, 0.3, 0.1]
    params = copies(start)
    adam = optimizer(params, *settings)
    arrays = dict(params)
    assert adam.t == 0 and not any(np.any(means[k]) for means in (adam.m, adam.v) for k in shapes)
    for g, lr in zip(grads, rates):
        adam.step(params, g, lr)
    assert adam.t == 5
    beta1, beta2, eps, decay = settings or (0.9, 0.99, 1e-8, 0.1)
    for k in shapes:
        assert arrays[k] is params[k]                       # changed in place
        assert params[k].dtype == adam.m[k].dtype == adam.v[k].dtype == dtype
        for i in np.ndindex(shapes[k]):
            slow = slow_adamw(float(start[k][i]), [float(g[k][i]) for g in grads], rates,
                              beta1, beta2, eps, decay if len(shapes[k]) > 1 else 0.0)
            fast = float(params[k][i]), float(adam.m[k][i]), float(adam.v[k][i])
            assert fast == pytest.approx(slow, rel=rtol, abs=rtol * 1e-3 * scale[k] ** 2)


def test_adamw_by_hand():
    params = dict(w=np.array([[2.0]]))
    optimizer = AdamW(params, weight_decay=0.2)
    for gradient, expected in ((0.3, 1.9860000003), (-0.1, 1.9780185484), (0.2, 1.9680219132)):
        optimizer.step(params, dict(w=np.array([[gradient]])), 0.01)
        assert params["w"].item() == pytest.approx(expected, abs=1e-10)


def test_decay_shrinks_matrices_and_leaves_vectors_alone_and_a_rate_of_zero_all(rng):
    params = copies(rand_arrays(rng, SHAPES))
    before, zeros = copies(params), {name: np.zeros_like(W) for name, W in params.items()}
    AdamW(params, weight_decay=0.2).step(params, {name: 1 + g for name, g in zeros.items()}, 0.0)
    all_same(params, before)
    AdamW(params, weight_decay=0.2).step(params, zeros, 0.01)
    all_same(params, {name: W for name, W in before.items() if W.ndim == 1})
    all_close(params, {name: W * (1 - 0.01 * 0.2 * (W.ndim == 2)) for name, W in before.items()})


@pytest.mark.parametrize("length", [1, 2, 5, 7, 10 ** 6])
@pytest.mark.parametrize("shapes", [
    dict(b=(3,), w=(2, 3), c=(2,), z=(3, 1), s=(1, 2, 2)), dict(w=(2, 3), z=(3, 1)), dict(b=(3,))])
def test_long_arrays_give_bit_for_bit_what_adamw_gives(rng, monkeypatch, shapes, length):
    monkeypatch.setattr(t.LongAdamW, "stretch", length)
    start = rand_arrays(rng, shapes, np.float32)
    means = {name: np.abs(W) for name, W in start.items()}
    results = []
    for optimizer in (AdamW, t.LongAdamW):
        params = copies(start)
        adam = optimizer(params, 0.8, 0.95, 1e-7, weight_decay=0.3)
        for name in start:                                  # as after a resumption
            adam.m[name][...], adam.v[name][...] = start[name], means[name]
        adam.t = 4
        for _ in range(3):
            adam.step(params, {name: start[name] * 2 for name in reversed(start)}, 0.1)
        results.append([params, adam.m, adam.v])
        assert adam.t == 7 and list(params) == list(start)
    for book, fast in zip(*results):
        all_same(fast, book)


@pytest.mark.parametrize("name", ["adamw", "mini_batch", "training", "autoregressive_loop"])
def test_what_is_there_for_speed_can_stand_in_for_what_the_book_says(monkeypatch, capsys, name):
    monkeypatch.setattr(t, "AdamW", t.LongAdamW)            # as prepare_for_training does
    monkeypatch.setattr(t, "batch_loss_and_grads", t.in_halves)
    getattr(t, f"demo_{name}")()
    [file] = GOLDEN.glob(f"*{name.replace('_', '-')}.txt")
    assert capsys.readouterr().out == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("limit, factor", [(3.5, 0.5), (7.0, 1.0), (8.0, 1.0), (math.inf, 1.0)])
def test_clipping_uses_one_norm_for_all_arrays_and_never_scales_up(limit, factor):
    grads = dict(a=np.array([2.0, -3.0]), b=np.array([[6.0]]))
    arrays = dict(grads)
    assert t.clip_grad_norm(grads, limit) == pytest.approx(7.0, rel=1e-12)
    close(arrays["a"], [2 * factor, -3 * factor])
    close(arrays["b"], [[6 * factor]])


def test_clipping_equals_the_slow_reading(rng):
    grads = copies(rand_arrays(rng, dict(a=(3, 4), b=(5,), c=(2, 1, 3))))
    before = copies(grads)
    norm = math.sqrt(math.fsum(x * x for g in before.values() for x in g.flat))
    assert t.clip_grad_norm(grads, 0.7) == pytest.approx(norm, rel=1e-13)
    all_close(grads, {k: g * 0.7 / norm for k, g in before.items()})


@pytest.mark.parametrize("value, limit, norm, after", [
    (0.0, 1.0, 0.0, 0.0), (3e19, 1.0, 6e19, 0.5), (1e-23, 1.0, 2e-23, 1e-23), (1.0, 5.0, 2.0, 1.0)])
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


@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
def test_clipping_to_no_length_is_refused(limit):
    with pytest.raises(ValueError, match=str(limit)):
        t.clip_grad_norm(dict(a=np.ones(2)), limit)


@pytest.mark.parametrize("warmup, total", [(4, 10), (0, 10), (1, 2), (10, 10), (0, 1)])
def test_learning_rate_equals_the_slow_reading_and_stays_at_the_minimum(warmup, total):
    for step in range(1, 2 * total + 3):
        way = min(1.0, (step - warmup) / (total - warmup)) if total > warmup else 1.0
        slow = (0.3 * step / warmup if step <= warmup else
                0.02 + 0.28 * math.cos(math.pi * way / 2) ** 2)     # (1 + cos 2a) / 2 = cos² a
        assert t.lr_schedule(step, 0.3, 0.02, warmup, total) == pytest.approx(slow, rel=1e-12)


@pytest.mark.parametrize("step, rate", [(1, 0.075), (4, 0.3), (7, 0.16), (10, 0.02), (15, 0.02)])
def test_learning_rate_by_hand(step, rate):
    assert t.lr_schedule(step, 0.3, 0.02, 4, 10) == pytest.approx(rate)


# The training loop


def test_training_steps_are_clipped_scheduled_and_taken_in_order_and_go_on_from_t(rng):
    batches = [rand_ids(rng, 2, b, T) for b in (B, B, 2)]
    params, by_hand = (t.init_params(CONFIG, np.random.default_rng(1)) for _ in range(2))
    optimizer, other = AdamW(params), AdamW(by_hand)
    optimizer.t = other.t = 7
    steps = t.training_steps(params, iter(batches), CONFIG, optimizer, lambda t: t / 1000, 0.25)
    for expected_t, (x, y) in enumerate(batches, start=8):
        expected_loss, grads = t.loss_and_grads(by_hand, x, y, CONFIG)
        expected_norm = t.clip_grad_norm(grads, 0.25)
        other.step(by_hand, grads, expected_t / 1000)
        step, loss, lr, norm = next(steps)
        assert (step, lr) == (expected_t, expected_t / 1000) and expected_norm > 0.25
        assert (loss, norm) == pytest.approx((expected_loss, expected_norm), rel=1e-6)
        all_close(params, by_hand, rtol=1e-4, atol=1e-6)
    assert next(steps, "the end") == "the end"


@pytest.mark.parametrize("name, value", [("head_b", math.nan), ("head_w", 1e160)])
def test_a_loss_or_norm_that_is_not_finite_stops_training_before_the_step(rng, name, value):
    params, (x, y) = t.init_params(CONFIG, rng, np.float64), rand_ids(rng, 2, B, T)
    optimizer = AdamW(params)
    steps = t.training_steps(params, [(x, y)] * 9, CONFIG, optimizer, lambda t: 0.1, math.inf)
    next(steps)
    params[name][..., 1] = value                            # of 1e160 the loss is finite
    before = [copies(arrays) for arrays in (params, optimizer.m, optimizer.v)]
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match="step 2"):
        assert math.isfinite(t.loss_and_grads(params, x, y, CONFIG)[0]) == (value == 1e160)
        next(steps)
    assert optimizer.t == 1
    for now, then in zip((params, optimizer.m, optimizer.v), before):
        all(np.testing.assert_array_equal(now[k], then[k]) for k in then)


# 56 to 60: sampling


class FixedDraw:
    """Stands in for a generator whose next number is known."""

    def __init__(self, number):
        self.number = number

    def random(self):
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


def test_top_k_and_top_p_equal_the_slow_reading(rng):
    for _ in range(200):
        p = rng.dirichlet(np.full(V, 0.5)).round(1) + 0.01          # rounding makes ties
        p = frozen(p / p.sum())
        k, top_p = int(rng.integers(0, V + 3)), float(rng.uniform(0.01, 1))
        close(t.keep_top_k(p, k), slow_top_k(p, k))
        close(t.keep_top_p(p, top_p), slow_top_p(p, top_p))


@pytest.mark.parametrize("k, expected", [
    (1, [1, 0, 0, 0, 0]), (2, [0.47536689, 0.17487770, 0.17487770, 0.17487770, 0]),
    (5, None), (100, None), (0, None)])
def test_top_k_keeps_ties_and_is_off_at_zero_and_past_the_vocabulary(k, expected):
    logits = np.array([1.5, 0.5, 0.5, 0.5, -1.0])
    p = t.next_probabilities(logits, top_k=k)
    close(p, slow_softmax(logits) if expected is None else expected, atol=1e-8)
    assert expected or np.array_equal(p, t.next_probabilities(logits))


@pytest.mark.parametrize("p, top_p, expected", [
    ([0.05, 0.36, 0.48, 0.11], 0.9, [0, 0.37894737, 0.50526316, 0.11578947]),
    ([0.5, 0.25, 0.125, 0.125], 0.49, [1, 0, 0, 0]),
    ([0.5, 0.25, 0.125, 0.125], 0.5, [1, 0, 0, 0]),
    ([0.5, 0.25, 0.125, 0.125], 0.75, [0.66666667, 0.33333333, 0, 0]),
    ([0.5, 0.25, 0.125, 0.125], 0.76, [0.57142857, 0.28571429, 0.14285714, 0]),
    ([0.5, 0.25, 0.125, 0.125], 1e-9, [1, 0, 0, 0]),
    ([0.25, 0.25, 0.25, 0.25], 0.5, [0.5, 0.5, 0, 0]),
    ([0.125, 0.25, 0.5, 0.125], 0.8, [1 / 7, 2 / 7, 4 / 7, 0]),
    ([0.7, 0.2, 0.1], 0.9, [7 / 9, 2 / 9, 0]), ([0.1, 0.3, 0.6], 0.9, [0, 1 / 3, 2 / 3])])
def test_top_p_keeps_the_token_that_reaches_the_threshold(p, top_p, expected):
    close(t.keep_top_p(frozen(np.array(p)), top_p), expected, atol=1e-8)


def test_top_p_of_one_changes_nothing_and_just_below_one_nearly_nothing():
    logits = np.linspace(0, 12, 1000).astype(np.float32)
    p = frozen(t.next_probabilities(logits))
    assert np.all(p > 0) and np.array_equal(t.keep_top_p(p, 1.0), p)
    close(t.keep_top_p(p, BELOW_ONE), p, rtol=1e-10)


@pytest.mark.parametrize("choice", [
    *(dict(top_p=bad) for bad in (0.0, -0.1, 1.1, math.nan, math.inf)), dict(top_k=-1),
    *(dict(temperature=bad) for bad in (-1.0, -1e-9, math.nan, math.inf))])
def test_a_choice_outside_its_range_is_refused(choice):
    for temperature in (0, 1):
        with pytest.raises(ValueError, match=str(*choice.values())):
            t.next_probabilities(np.zeros(3), **dict(temperature=temperature) | choice)
    with pytest.raises(ValueError):
        t.sample_next(np.zeros(3), np.random.default_rng(0), **choice)


@pytest.mark.parametrize("logits", [
    [math.nan, 1, 2], [math.inf, 0, 0], [-math.inf] * 3, [math.nan, math.inf, 0]])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_logits_that_are_not_finite_are_refused(logits, temperature):
    with pytest.raises(ValueError, match="not finite"):
        t.sample_next(np.array(logits), np.random.default_rng(0), temperature=temperature)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_temperature_divides_the_logits_in_float64(rng, dtype):
    logits = rand(rng, V, dtype=dtype)
    for temperature in (0.3, 1.0, 2.5):
        p = t.next_probabilities(logits, temperature)
        assert p.dtype == np.float64
        close(p, slow_softmax([float(z) / temperature for z in logits]))
        assert abs(p.sum() - 1) < 1e-12
    close(t.next_probabilities(np.array([3.0, 5.0, 4.0]), 2e-6), [0.0, 1.0, 0.0])


def test_masked_logits_have_probability_zero_and_the_others_keep_their_order():
    close(t.next_probabilities(np.array([-np.inf, 0.0, 0.0])), [0, 0.5, 0.5])
    close(t.next_probabilities(np.array([-20.0, -30.0, -40.0]), top_k=1), [1.0, 0.0, 0.0])


@pytest.mark.parametrize("temperature, k, top_p, expected", [
    (2.0, 0, 1.0, [0.34695394, 0.29588331, 0.20922110, 0.14794166]),
    (2.0, 0, 0.7, [0.40719505, 0.34725710, 0.24554785, 0]),
    (1.0, 2, 1.0, [0.57894737, 0.42105263, 0, 0]),
    (1.0, 2, 0.5, [1, 0, 0, 0]), (1.0, 1, 0.1, [1, 0, 0, 0])])
def test_temperature_comes_first_then_top_k_then_top_p(temperature, k, top_p, expected):
    logits = np.log([0.44, 0.32, 0.16, 0.08])
    close(t.next_probabilities(logits, temperature, k, top_p), expected, atol=1e-8)


@pytest.mark.parametrize("temperature", [0, 1e-7, 9.9e-7])
@pytest.mark.parametrize("number", [0.0, BELOW_ONE])
def test_greedy_takes_the_first_largest_logit_whatever_is_drawn(temperature, number):
    with np.errstate(all="raise"):
        chosen = t.sample_next(np.array([2.0, 5.0, 5.0]), FixedDraw(number), temperature=temperature)
    assert chosen == 1 and type(chosen) is int


def test_one_draw_is_held_against_the_running_sum(rng):
    for _ in range(200):
        logits, seed = rand(rng, V), int(rng.integers(1000))
        choice = dict(temperature=float(rng.uniform(0.2, 2)), top_k=7, top_p=0.9)
        generator, twin = np.random.default_rng(seed), np.random.default_rng(seed)
        chosen = t.sample_next(logits, generator, **choice)
        p, draw, slow = t.next_probabilities(logits, **choice), twin.random(), 0
        while draw >= sum(p[:slow + 1]):
            slow += 1
        assert type(chosen) is int and chosen == slow
        assert generator.random() == twin.random()


@pytest.mark.parametrize("number, expected", [(0.0, 1), (0.4999, 1), (0.5, 2), (BELOW_ONE, 2)])
def test_a_draw_at_either_end_never_hits_an_impossible_token(number, expected):
    assert t.sample_next(np.array([-np.inf, 0.0, 0.0, -np.inf]), FixedDraw(number)) == expected


def test_a_running_sum_that_ends_below_the_draw_still_gives_a_possible_token(rng):
    short = 0
    for _ in range(50):
        logits = np.append(rng.standard_normal(300), -np.inf)
        p = t.next_probabilities(logits)
        short += np.cumsum(p)[-1] < BELOW_ONE
        assert p[t.sample_next(logits, FixedDraw(BELOW_ONE))] > 0
    assert short > 0


@pytest.mark.parametrize("logits, choice", [
    (np.log(np.array([1 / 3, 1 / 3, 1 / 3], np.float32)), {}),
    (np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32)), {}),
    (np.log([0.44, 0.32, 0.16, 0.08]), dict(temperature=2.0, top_k=3, top_p=0.8))])
def test_tokens_come_out_with_their_probabilities(logits, choice):
    n, rng, p = 4_000, np.random.default_rng(8), t.next_probabilities(logits, **choice)
    counts = np.bincount([t.sample_next(logits, rng, **choice) for _ in range(n)], minlength=len(p))
    assert np.all(np.abs(counts / n - p) <= 4 * np.sqrt(p * (1 - p) / n))


# 61: the loop


def write(params, ids, n_tokens, seed=9, **choice):
    return t.generate(params, CONFIG, ids, n_tokens, np.random.default_rng(seed), **choice)


@pytest.mark.parametrize("length", [1, T - 1, T, T + 1, 20])
@pytest.mark.parametrize("choice", [
    dict(temperature=0.0), {}, dict(temperature=0.8, top_k=4, top_p=0.9)])
def test_generation_reads_the_last_context_ids_and_takes_one_draw_a_token(length, choice):
    rng = np.random.default_rng(37)        # with most, greedy text is one token for ever
    params, prompt = rand_arrays(rng, SHAPES), rand_ids(rng, length).tolist()
    slow, draws = list(prompt), np.random.default_rng(9)
    for _ in range(13):
        logits, _ = t.forward(params, np.array(slow[-T:]), CONFIG)
        slow.append(t.sample_next(logits[-1], draws, **choice))
    ids = write(params, prompt, 13, **choice)
    assert ids == slow and len(set(ids[length:])) > 1 and all(type(i) is int for i in ids)
    assert write(params, prompt[-T:], 13, **choice)[-13:] == ids[-13:]


def test_generation_never_reads_position_rows_past_the_context(rng):
    params, prompt = rand_arrays(rng, SHAPES), rand_ids(rng, Tmax)
    other = dict(params, pos_emb=np.where(np.arange(Tmax)[:, None] < T, params["pos_emb"], 1e3))
    assert write(params, prompt, 10) == write(other, prompt, 10)


def test_generation_leaves_the_prompt_alone_and_follows_the_seed(rng):
    params, prompt = rand_arrays(rng, SHAPES), [1, 2, 3]
    first, again, other = (write(params, prompt, 30, seed, temperature=3.0) for seed in (1, 1, 2))
    assert prompt == [1, 2, 3] == first[:3] and first == again != other
    assert write(params, prompt, 0) == prompt


@pytest.mark.parametrize("ids, n_tokens", [([], 3), ([1], -1)])
def test_an_empty_prompt_and_a_negative_length_are_refused(rng, ids, n_tokens):
    with pytest.raises(ValueError):
        write(rand_arrays(rng, SHAPES), ids, n_tokens)
