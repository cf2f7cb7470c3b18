"""The values that a reader may count on; what the printed equations do not say is read slowly."""
import math, random, sys, trace, unicodedata
from copy import deepcopy
from fractions import Fraction
from itertools import islice, product
from types import SimpleNamespace

import numpy as np
import pytest

import tinygpt as t
from conftest import CONFIG, ROOT, random_params
from tinygpt import AdamW, batch_loss_and_grads     # as in the book: a training replaces them in t

# Random inputs are read-only: a function that writes into its arguments fails wherever it runs.
V, T, Tmax, d, H, F, L = vars(CONFIG).values()
B = 6
CORPUS = (ROOT / "corpus.txt").read_text(encoding="utf-8")[:5000]
# Texts and probabilities that have tripped programs of this kind.
FAMILY, HINDI = "\U0001f468\u200d\U0001f469\u200d\U0001f467", "हिन्दी"
AWKWARD = ["  x", "a\tb", "\n\n\n", "x  ", " ", "", "e\u0301\u00e9", "\r\n \r", "don't  we'll",
           FAMILY + " e\u0301 \u00e9", "\u0301a", f"{HINDI} की", "ที่นี่"]
STRANGE = [*"ab zZ09_-.,'\"?sdtlm\t\n\r\v\x00\x1b\x1c\x85\xa0²½é中", "\u0301", "\u0663", "\u200d",
           "\u2028", "\u3000", "\ufeff", "\u093f", "\u0939", FAMILY[0]]
BELOW_ONE = np.nextafter(1.0, 0.0)
HALVES, FOUR = [0.5, 0.25, 0.125, 0.125], [0.44, 0.32, 0.16, 0.08]
FIRST, TIES = [1, 0, 0, 0], np.exp([1.5, 0.5, 0.5, 0.5, -1])


@pytest.fixture(params=[(), (B,)], ids=["window", "batch"])
def lead(request):                                  # what stands before T in the shape of ids
    return request.param


def arrays_in(x):
    if isinstance(x, np.ndarray):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return [array for part in parts for array in arrays_in(part)]


def frozen(x):                                      # x with every array in it read-only
    for array in arrays_in(x):
        array.flags.writeable = False
    return x


def rand(rng, *shape):
    return frozen(rng.standard_normal(shape))


def rand_ids(rng, *shape):
    return frozen(rng.integers(0, V, shape))


def rand_params(rng, dtype=np.float64):
    return frozen({name: W.astype(dtype) for name, W in random_params(rng).items()})


def close(actual, expected, rtol=1e-12, atol=1e-12):
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        return [close(actual[name], expected[name], rtol, atol) for name in expected]
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


# Cards 1 to 5: the tokenizer
def slow_merge(tokens, pair):
    if len(tokens) < 2:
        return list(tokens)
    n = 2 if tuple(tokens[:2]) == pair else 1
    return ["".join(tokens[:n])] + slow_merge(tokens[n:], pair)


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


@pytest.mark.parametrize("text, cut", [
    ("Hello world!", "Hello| world|!"), ("a  b", "a| | b"), ("a\n\n b", "a|\n\n| b"), (" \t",) * 2,
    ("x1 22y", "x|1| 22|y"), ("it's", "it|'s"), ("a_b", "a|_|b"), ("'the we'll", "'t|he| we|'ll"),
    ("an an\nor an", "an| an|\n|or| an"), ("1\u0301e\u0301t", "1|\u0301|e\u0301t"),
    (f"{HINDI} की.", f"{HINDI}| की|."), ("don't  we'll", "don|'t| | we|'ll"),
    ("\u0301a", "\u0301|a"),
    ("\r\n \r", "\r\n \r"), (f"{FAMILY} e", f"{FAMILY}| e"), (" 've\u00bd_", " '|ve\u00bd|_")])
def test_pre_tokens_are_cut_as_in_gpt2_but_marks_stay_with_their_word(text, cut):
    words = cut.split("|")
    assert t.PRE_TOKEN.findall(text) == words
    assert list(t.count_words(text).items()) == [(w, words.count(w)) for w in dict.fromkeys(words)]


@pytest.mark.parametrize("n_merges", [0, 50])
def test_awkward_and_random_text_comes_back_and_is_not_normalised(n_merges):
    rnd = random.Random(1)
    texts = AWKWARD + ["".join(rnd.choices(STRANGE, k=rnd.randrange(30))) for _ in range(1000)]
    trained = t.build_tokenizer("\n".join(texts), n_merges)
    tokenizer = t.Tokenizer(trained.itos, trained.merges)
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and (n_merges or len(ids) == len(text))
        assert type(ids) is list and all(type(i) is int and i > 0 for i in ids)


def test_every_mark_of_every_script_stays_with_the_letter_before_it():
    words = [f"a{char}b" for char in map(chr, range(sys.maxunicode + 1))
             if unicodedata.category(char)[0] == "M"]
    assert [word for word in words if t.PRE_TOKEN.findall(word) != [word]] == []


def test_merging_learning_and_encoding_equal_counting_anew_before_every_merge():
    for word, pair in product(product("ab", repeat=8), product("ab", repeat=2)):
        tokens = list(word)
        assert t.merge_tokens(tokens, pair) == slow_merge(word, pair) and tokens == list(word)
    rnd = random.Random(3)
    short = [["".join(word)] for n in range(11) for word in product("ab", repeat=n)]
    for words in short + [["".join(rnd.choices("aabc", k=rnd.randint(1, 9))) for _ in range(12)]
                          for _ in range(150)]:
        counts = {word: rnd.randint(1, 4) for word in words} if words[1:] else {words[0]: 1}
        merges, tokens = slow_train(counts, 15)
        assert t.train_bpe(counts, 15) == merges
        assert {word: t.apply_merges(word, merges) for word in counts} == tokens
    merges = [("y", "z"), ("x", "y"), ("s", "s"), ("i", "ss"), ("i", "s"), ("p", "p")]
    for tokens in ("x yz", "x yz xy", "m iss iss i pp i"):  # by rank, not by length
        assert t.apply_merges(tokens.replace(" ", ""), merges) == tokens.split()


@pytest.mark.parametrize("n_merges", [0, 6, 40])
@pytest.mark.parametrize("text", [
    "at a cat\nat a hat\n", "yzyyzyzy", "nmlknmlk", "aaa", "ab\nba", "", CORPUS], ids=len)
def test_a_text_becomes_the_tokens_that_training_on_it_ended_with(text, n_merges):
    words = t.PRE_TOKEN.findall(text)
    merges, tokens = slow_train({word: words.count(word) for word in words}, n_merges)
    trained = t.build_tokenizer(text, n_merges)
    assert t.train_bpe_on_text(text, n_merges) == trained.merges == merges
    assert trained.itos == ["<unk>", *dict.fromkeys(text), *map("".join, merges)]
    for tokenizer in (trained, t.Tokenizer(trained.itos, trained.merges)):      # and one loaded
        ids = tokenizer.encode(text)
        assert [tokenizer.itos[i] for i in ids] == [tok for word in words for tok in tokens[word]]
    assert not any(b[0].isspace() and not a[-1].isspace() for a, b in merges)


def test_unknown_characters_become_id_0_and_do_not_vanish():
    tokenizer = t.build_tokenizer("face cafe\n", 3)
    ids = tokenizer.encode("fa?ce \U0001f468")
    assert ids.count(0) == 2 and tokenizer.decode(ids) == "fa<unk>ce <unk>"
    assert tokenizer.unknown("F?ace?") == ["F", "?"]
    for bad in (-1, len(tokenizer.itos)):
        with pytest.raises(ValueError, match=str(bad)):
            tokenizer.decode([1, bad])


def test_a_text_without_blanks_takes_work_in_proportion_to_its_length():
    rnd = random.Random(4)
    texts = ["".join(rnd.choices("ACGT", k=n)) for n in (1500, 3000)]
    tokenizer = t.build_tokenizer(texts[1], 40)

    def lines_run(work, text):                      # tells the amount of work without a clock
        tracer = trace.Trace(count=True, trace=False)
        tracer.runfunc(work, text)
        return sum(tracer.results().counts.values())
    for work in (lambda text: t.build_tokenizer(text, 40),
                 lambda text: t.Tokenizer(tokenizer.itos, tokenizer.merges).encode(text)):
        assert 1.5 < lines_run(work, texts[1]) / lines_run(work, texts[0]) < 2.5


# Cards 6 to 9 and 54: the data
def test_split_rounds_the_exact_product_down():
    for share, n in product("0 0.05 0.1 0.2 0.25 0.3 0.5 0.7 0.9".split(), range(200)):
        train, val = t.split_ids(range(n), float(share))    # int((1 - 0.9) * 10) would be 0
        assert len(train) == math.floor((1 - Fraction(share)) * n)
        assert [*train, *val] == list(range(n))
    for bad in (-0.1, 1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=str(bad)):
            t.split_ids(range(9), bad)


def test_windows_of_every_size_and_stride(rng):
    for n, size, stride in product(range(4, 15), range(1, 5), range(1, 7)):
        ids = rand_ids(rng, n)
        starts = [s for s in range(n) if s % stride == 0 and s < n - size]
        x, y = t.make_windows(ids, size, stride)
        assert x.shape == y.shape == (t.window_count(n, size, stride), size)
        assert x.tolist() == [[ids[s + i] for i in range(size)] for s in starts]
        assert y.tolist() == [[ids[s + i + 1] for i in range(size)] for s in starts]
    for size, stride in ((4, 0), (4, -1), (0, 1)):
        with pytest.raises(ValueError):
            t.make_windows(np.arange(20), size, stride)


@pytest.mark.parametrize("windows, batch", [(7, 3), (6, 3), (3, 8), (1, 1), (50, 8)])
def test_each_epoch_has_every_window_once_with_its_targets_in_an_order_of_its_own(windows, batch):
    x = frozen(np.arange(windows * T).reshape(windows, T))
    steps, orders = -(-windows // batch), []
    endless = t.epoch_after_epoch(x, frozen(x + 1000), batch, np.random.default_rng(6))
    for batches in (islice(endless, steps), islice(endless, steps),
                    t.iterate_batches(x, x + 1000, batch, np.random.default_rng(6)),
                    t.iterate_batches(x, x + 1000, batch, np.random.default_rng(7))):
        xs, ys = zip(*batches)
        assert [*map(len, xs)] == ([batch] * (windows // batch) + [windows % batch])[:steps]
        assert np.array_equal(np.concatenate(xs) + 1000, np.concatenate(ys))
        orders.append([row[0] // T for xb in xs for row in xb])
        assert sorted(orders[-1]) == list(range(windows))
    assert orders[2] == orders[0] and t.step_counts(windows, batch, 3) == (steps, 3 * steps)
    assert windows < 50 or len({*map(tuple, orders), tuple(range(50))}) == 4


# Cards 11 to 44: operations and starting values
@pytest.mark.parametrize("logits, target, loss, gradient", [
    ([0.0, -1000.0], 1, 1000.0, [1.0, -1.0]), ([1000.0, 0.0], 0, 0.0, [0.0, 0.0]),
    ([-np.inf, 0.0, 0.0], 2, math.log(2), [0.0, 0.5, -0.5]),
    (np.full(2, 5e7, np.float32), 1, math.log(2), [0.5, -0.5])])
def test_cross_entropy_of_extreme_logits(logits, target, loss, gradient):
    y = np.array([target])
    actual, P = t.cross_entropy_forward(np.array([logits]), y)
    assert type(actual) is float and actual == pytest.approx(loss)
    close(t.cross_entropy_backward(P, y), [gradient], atol=1e-7)


def test_extreme_scores_constant_rows_bad_targets_and_perplexity():
    with np.errstate(all="raise", under="ignore"):
        for z in ([1000.0, 999.0], [-1e5, -1e5 - 1]):
            close(t.softmax_forward(np.array(z)), [1 / (1 + 1 / math.e), 1 / (1 + math.e)])
    assert t.softmax_forward(np.array([[0, -np.inf], [-np.inf, -7]])).tolist() == [[1, 0], [0, 1]]
    Y, _ = t.layer_norm_forward(np.full((1, 3), 7.0), np.full(3, 2.0), np.arange(3.0))
    close(Y, [[0.0, 1.0, 2.0]], atol=1e-9)
    assert t.relu_backward(np.array([5, 5, -5]), np.array([-1, 0, 2])).tolist() == [0, 0, -5]
    for targets in ([0, -1, 1], [0, V, 1], []):
        with pytest.raises(ValueError):
            t.cross_entropy_forward(np.zeros((len(targets), V)), np.array(targets, int))
    assert t.perplexity(0.0) == 1 and t.perplexity(1e4) == math.inf


@pytest.mark.parametrize("dtype", [(), (np.float64,)])
def test_starting_values_fill_their_interval_follow_the_seed_and_are_never_alike(rng, dtype):
    W, a = t.xavier_uniform(rng, 700, 90), math.sqrt(6 / 790)
    assert W.shape == (700, 90) and 0.999 * a < np.abs(W).max() <= a
    assert abs(W.mean()) < 0.02 * a and W.var() == pytest.approx(a * a / 3, rel=0.02)
    first, again, other = (t.init_params(CONFIG, np.random.default_rng(seed), *dtype)
                           for seed in (7, 7, 8))
    for name, W in first.items():
        assert W.dtype == (dtype or (np.float32,))[0] and np.array_equal(W, again[name])
        if W.ndim == 2:
            a = math.sqrt(6 / sum(W.shape))
            assert 0.6 * a < np.abs(W).max() <= a * (1 + 1e-6) and np.unique(W).size > 0.9 * W.size
            assert not np.array_equal(W, other[name])
        else:
            assert np.all(W == (1 if name.endswith("_g") else 0))
    assert len({W.tobytes() for W in first.values() if W.ndim == 2}) == 2 + 6 * L + 1
    loss, _ = t.loss_and_grads(first, *rand_ids(rng, 2, 40, T), CONFIG)
    assert abs(loss - math.log(V)) < 0.6


# Cards 24 to 46: the model
@pytest.mark.parametrize("heads", [1, 2, 3, d])
def test_splitting_and_merging_heads(rng, lead, heads):
    M = rand(rng, math.prod(lead) * T, d)
    Mh = t.split_heads(M, heads, T)
    assert Mh.shape == (math.prod(lead), heads, T, d // heads)
    assert np.array_equal(np.vstack([np.hstack(window) for window in Mh]), M)
    assert np.array_equal(t.merge_heads(frozen(Mh)), M)
    assert np.array_equal(np.hstack([t.head_columns(M, heads, h) for h in range(heads)]), M)
    for bad in (5, 0):
        with pytest.raises(ValueError, match=rf"\b{d}\b.*\b{bad}\b"):
            t.split_heads(M, bad, T)


@pytest.mark.parametrize("length", [1, 3, T, Tmax])
def test_a_batch_gives_what_its_windows_give_one_by_one(rng, length):
    """One window is held to the printed equations, and to PyTorch, in files of their own."""
    params = rand_params(rng)
    p = t.block_params(params, 0)
    ids, X = rand_ids(rng, B, length), rand(rng, B * length, d)
    for whole, each in (
            (t.attention_forward(X, p, H, length),
             lambda X, ids: t.attention_forward(X, p, H, len(X))),
            (t.block_forward(X, p, H, length), lambda X, ids: t.block_forward(X, p, H, len(X))),
            (t.forward(params, ids, CONFIG), lambda X, ids: t.forward(params, ids, CONFIG))):
        windows = zip(X.reshape(B, length, d), ids)
        close(whole[0], np.concatenate([each(*window)[0] for window in windows]), rtol=1e-10)
    mask, scores = t.causal_mask(T, np.float64), np.array([[0.0, 7.0], [0.0, math.log(4)]])
    assert all(mask[i, j] == (0 if j <= i else -np.inf) for i, j in np.ndindex(T, T))
    assert not mask.flags.writeable and not t.column(3, 1, np.float64).flags.writeable
    close(t.attention_weights(scores), [[1.0, 0.0], [0.2, 0.8]])


def test_later_tokens_change_nothing_before_them(rng, lead):
    params, ids = rand_params(rng), rand_ids(rng, *lead, Tmax)
    logits = t.forward(params, ids, CONFIG)[0].reshape(*lead, Tmax, V)
    for place in range(Tmax):
        changed = ids.copy()
        changed[..., place] = (changed[..., place] + 1) % V
        after = t.forward(params, changed, CONFIG)[0].reshape(*lead, Tmax, V)
        assert np.array_equal(after[..., :place, :], logits[..., :place, :])    # bit for bit
        assert np.all(np.any(after[..., place:, :] != logits[..., place:, :], axis=-1))
        short = t.forward(params, ids[..., :place + 1], CONFIG)[0]
        close(short.reshape(*lead, place + 1, V), logits[..., :place + 1, :], rtol=1e-10)


def test_ids_outside_the_vocabulary_bad_lengths_and_no_windows_are_refused(rng):
    params, one = dict(rand_params(rng)), t.ModelConfig(V, 1, 1, d, H, F, L)
    for function in (t.loss_and_grads, batch_loss_and_grads, t.in_halves, t.validation_loss):
        with pytest.raises(t.BadInput):
            function(params, np.zeros((0, T), int), np.zeros((0, T), int), CONFIG)
    for ids, config, numbers in (([1, -1], CONFIG, (V - 1, -1)), ([1, V], CONFIG, (V - 1, V)),
                                 ([], CONFIG, (Tmax, 0)), ([1] * 8, CONFIG, (Tmax, 8)),
                                 ([1] * 3, one, (1, 3))):   # addition would repeat a single row
        params["pos_emb"] = params["pos_emb"][:config.max_context]
        with pytest.raises(ValueError, match="%d\\b.* %d\\b" % numbers):
            t.forward(params, np.array(ids, int), config)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_function_keeps_the_type_and_writes_into_no_input(rng, lead, dtype, monkeypatch):
    def watched(function):
        def call(*args):
            called.add(function)
            result = frozen(function(*frozen(args)))
            assert all(a.dtype == dtype for a in arrays_in(result) if a.dtype.kind == "f"), function
            return result
        return call
    called = set()
    for name, function in list(vars(t).items()):
        if name.endswith(("_forward", "_backward")):
            monkeypatch.setattr(t, name, watched(function))
    params, x, y = rand_params(rng, dtype), *rand_ids(rng, 2, *lead, T)
    loss, grads = t.loss_and_grads(params, x, y, CONFIG)
    assert type(loss) is float and len(called) >= 18        # 9 pairs
    assert {g.dtype for g in grads.values()} == {np.dtype(dtype)}


# Cards 53 and 55, and the two halves of a large batch
def test_batches_in_parts_of_any_size_and_validation_give_the_means_over_the_windows(rng):
    params, (x, y) = rand_params(rng), rand_ids(rng, 2, 65, T)
    losses, each = zip(*(t.loss_and_grads(params, *window, CONFIG) for window in zip(x, y)))
    batch = params, x, y, CONFIG
    np.testing.assert_equal(batch_loss_and_grads(*batch), t.loss_and_grads(*batch))     # one part
    for parts in (1, 2, 3, 4, B):
        loss, grads = batch_loss_and_grads(params, x[:B], y[:B], CONFIG, parts)
        close(loss, sum(losses[:B]) / B)
        close(grads, {name: sum(g[name] for g in each[:B]) / B for name in params})
    for M in (1, 31, 32, 33, 65):
        loss = t.validation_loss(params, x[:M], y[:M], CONFIG)
        assert type(loss) is float and loss == pytest.approx(sum(losses[:M]) / M, rel=1e-12)


@pytest.mark.parametrize("size, parts", [(6, [5]), (6, [3, 3]), (6, [3, 4]), (1, [1]), (1, [1, 1])])
def test_halves_of_a_large_batch_give_what_two_parts_give(rng, monkeypatch, size, parts):
    params, (x, y) = rand_params(rng, np.float32), rand_ids(rng, 2, sum(parts), T)
    expected = batch_loss_and_grads(params, x, y, CONFIG, len(parts))
    whole, seen = t.loss_and_grads, []
    monkeypatch.setattr(t, "LARGE", size * T * d)
    monkeypatch.setattr(t, "loss_and_grads", lambda *a: seen.append(len(a[1])) or whole(*a))
    loss, grads = t.in_halves(params, x, y, CONFIG)
    assert sorted(seen) == parts and loss == pytest.approx(expected[0], rel=1e-5)
    close(grads, expected[1], rtol=1e-4, atol=1e-5)
    assert list(grads) == list(params) and all(g.dtype == np.float32 for g in grads.values())
    for row, i in product((0, -1), (0, 1)):
        bad = [x.copy(), y.copy()]
        bad[i][row, 0] = V
        with pytest.raises(ValueError, match=f"from 0 to {V - 1}"):
            t.in_halves(params, *bad, CONFIG)
    np.testing.assert_equal(t.in_halves(params, x, y, CONFIG), (loss, grads))   # it goes on


# Cards 50 to 52: the optimizer
@pytest.mark.parametrize("dtype, rtol", [(np.float64, 1e-12), (np.float32, 2e-5)])
@pytest.mark.parametrize("settings", [(0.8, 0.95, 1e-7, 0.3), ()], ids=["given", "defaults"])
def test_adamw_equals_the_slow_reading(rng, dtype, rtol, settings):
    shapes, scale = dict(a=(3, 4), b=(5,), c=(2, 3, 2)), dict(a=1.0, b=1e-7, c=1e3)
    # Gradients as small as eps show on which side of the root it stands.
    start, *grads = ({name: rand(rng, *s).astype(dtype) * (scale[name] if i else 1)
                      for name, s in shapes.items()} for i in range(6))
    params, rates = deepcopy(start), [0.1, 0.2, 0.05, 0.3, 0.1]
    optimizer, arrays = AdamW(params, *settings), dict(params)
    for g, lr in zip(grads, rates):
        optimizer.step(params, frozen(g), lr)
    beta1, beta2, eps, decay = settings or (0.9, 0.99, 1e-8, 0.1)
    for name, w in start.items():
        w, m, v = w.astype(float), 0.0, 0.0
        for step, (g, lr) in enumerate(zip(grads, rates), start=1):
            m = beta1 * m + (1 - beta1) * g[name].astype(float)
            v = beta2 * v + (1 - beta2) * g[name].astype(float) ** 2
            u = (m / (1 - beta1 ** step)) / (np.sqrt(v / (1 - beta2 ** step)) + eps)
            w = w - lr * (u + (decay * w if w.ndim > 1 else 0.0))
        assert arrays[name] is params[name]                 # in place
        for fast, slow in zip((params[name], optimizer.m[name], optimizer.v[name]), (w, m, v)):
            assert fast.dtype == dtype
            close(fast, slow, rtol, rtol * 1e-3 * scale[name] ** 2)
    assert optimizer.t == 5


@pytest.mark.parametrize("shapes", [
    dict(b=(3,), w=(2, 3), c=(2,), z=(3, 1), s=(1, 2, 2)), dict(w=(2, 3), z=(3, 1)), dict(b=(3,))])
def test_long_arrays_give_bit_for_bit_what_adamw_gives(rng, shapes):
    start = frozen({name: rand(rng, *s).astype(np.float32) for name, s in shapes.items()})
    results = []
    for kind in (AdamW, t.LongAdamW):
        params = deepcopy(start)
        optimizer = kind(params, 0.8, 0.95, 1e-7, weight_decay=0.3)
        assert not any(np.any(optimizer.m[name]) for name in start)
        for name, W in start.items():                       # as after a resumption
            optimizer.m[name][...], optimizer.v[name][...] = W, W * W
        optimizer.t = 4
        for _ in range(3):
            optimizer.step(params, {name: start[name] * 2 for name in reversed(start)}, 0.1)
        assert optimizer.t == 7 and list(params) == list(start)
        results.append([[a[name] for name in start] for a in (params, optimizer.m, optimizer.v)])
    np.testing.assert_equal(*results)


@pytest.mark.parametrize("a, b, limit, norm, factor", [
    ([2, -3], 6, 3.5, 7, 0.5), ([2, -3], 6, 7, 7, 1), ([2, -3], 6, math.inf, 7, 1),
    ([0] * 3, 0, 1, 0, 1), ([np.inf, 1], 2, 1, np.inf, 1), ([np.nan], 2, 1, np.nan, 1)])
def test_clipping_uses_one_norm_for_all_arrays_and_never_scales_up(a, b, limit, norm, factor):
    for dtype in (np.float32, np.float64):
        grads = dict(a=np.array(a, dtype), b=np.array([[b]], dtype))
        arrays, expected = dict(grads), {name: g * dtype(factor) for name, g in grads.items()}
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            assert t.clip_grad_norm(grads, limit) == pytest.approx(norm, nan_ok=True)
        close(arrays, expected, rtol=1e-6 * (factor < 1), atol=0)           # changed in place
        assert all(g.dtype == dtype for g in arrays.values())
    for bad in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match=str(bad)):
            t.clip_grad_norm(dict(a=np.ones(2)), bad)


@pytest.mark.parametrize("warmup, total", [(4, 10), (0, 10), (1, 2), (10, 10), (0, 1)])
def test_learning_rate_equals_the_slow_reading_and_stays_at_the_minimum(warmup, total):
    for step in range(1, 2 * total + 3):
        way = min(1.0, (step - warmup) / (total - warmup)) if total > warmup else 1.0
        slow = (0.3 * step / warmup if step <= warmup else
                0.02 + 0.28 * math.cos(math.pi * way / 2) ** 2)     # (1 + cos 2a) / 2 = cos² a
        assert t.lr_schedule(step, 0.3, 0.02, warmup, total) == pytest.approx(slow, rel=1e-12)


# The training loop
@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e160])     # both, the loss, the norm
def test_a_loss_or_norm_that_is_not_finite_stops_training_before_the_step(rng, value):
    params, (x, y) = t.init_params(CONFIG, rng, np.float64), rand_ids(rng, 2, B, T)
    optimizer = AdamW(params)
    steps = t.training_steps(params, [(x, y)] * 9, CONFIG, optimizer, lambda t: 0.1, math.inf)
    next(steps)
    params["head_w" if value == 1e160 else "head_b"][..., y[0, 0]] = value
    now = params, optimizer.m, optimizer.v
    before = deepcopy(now)
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match="step 2"):
        assert math.isfinite(t.loss_and_grads(params, x, y, CONFIG)[0]) == (value == 1e160)
        next(steps)
    np.testing.assert_equal(now, before)
    assert optimizer.t == 1


# Cards 56 to 61: the choice of a token, and the loop
def slow_choice(logits, temperature, k, top_p):
    p = [math.exp(z / temperature) for z in logits.tolist()]
    cut = sorted(p, reverse=True)[k - 1] if 0 < k < len(p) else 0.0
    p = [x / sum(x for x in p if x >= cut) if x >= cut else 0.0 for x in p]
    total, kept = 0.0, []
    for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
        if total < top_p:
            kept, total = kept + [i], total + p[i]
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


def test_temperature_top_k_and_top_p_equal_the_slow_reading_in_float64(rng):
    for i in range(200):
        dtype = (np.float32, np.float64)[i % 2]
        logits = frozen(rng.standard_normal(V).round(1).astype(dtype))      # rounding makes ties
        choice = rng.uniform(0.3, 2.5), int(rng.integers(0, V + 3)), rng.uniform(0.01, 1)
        close(p := t.next_probabilities(logits, *choice), slow_choice(logits, *choice))
        assert p.dtype == np.float64
    p = frozen(t.next_probabilities(np.linspace(0, 40, 1000).astype(np.float32)))
    assert np.all(p > 0) and np.array_equal(t.keep_top_p(p, 1.0), p)
    close(t.keep_top_p(p, BELOW_ONE), p, rtol=1e-10)
    for short in ([0.7, 0.2, 0.1], [0.1, 0.3, 0.6]):        # 0.7 + 0.2 and 0.6 + 0.3 fall short
        assert np.count_nonzero(t.keep_top_p(frozen(np.array(short)), 0.9)) == 2


@pytest.mark.parametrize("p, choice, expected", [
    (TIES, dict(top_k=1), [1, 0, 0, 0, 0]), (TIES, dict(top_k=5), TIES / TIES.sum()),
    (TIES, dict(top_k=2), [0.47536689, 0.17487770, 0.17487770, 0.17487770, 0]),
    (HALVES, dict(top_p=0.49), FIRST), (HALVES, dict(top_p=0.5), FIRST),
    (HALVES, dict(top_p=0.75), [2 / 3, 1 / 3, 0, 0]), (HALVES, dict(top_p=1e-9), FIRST),
    (HALVES, dict(top_p=0.76), [4 / 7, 2 / 7, 1 / 7, 0]), (HALVES, dict(temperature=0), FIRST),
    (FOUR, dict(temperature=2e-6), FIRST), (FOUR, dict(top_k=2, top_p=0.5), FIRST),
    (np.exp([-20, -30, -40]), dict(top_k=1), [1, 0, 0]), ([0, 1, 1], {}, [0, 0.5, 0.5])])
def test_choices_at_their_edges_and_with_ties(p, choice, expected):
    with np.errstate(divide="ignore"):
        logits = np.log(p)
    close(t.next_probabilities(logits, **choice), expected, atol=1e-8)


def test_choices_outside_their_range_and_logits_that_are_not_finite_are_refused(rng):
    for name, bad in (("top_p", (0.0, -0.1, 1.1, math.nan, math.inf)), ("top_k", [-1]),
                      ("temperature", (-1.0, -1e-9, math.nan, math.inf))):
        for value, temperature in product(bad, (0, 1)):
            with pytest.raises(ValueError, match=str(value)):
                t.next_probabilities(np.zeros(3), **dict(temperature=temperature) | {name: value})
    for logits in ([math.nan, 1, 2], [math.inf, 0, 0], [-math.inf] * 3, [math.nan, math.inf, 0]):
        for temperature in (0, 1):
            with pytest.raises(ValueError, match="not finite"):
                t.sample_next(np.array(logits), rng, temperature=temperature)


@pytest.mark.parametrize("number", [0.0, 0.4999, 0.5, BELOW_ONE])
def test_greedy_takes_the_first_largest_logit_and_no_draw_hits_an_impossible_token(rng, number):
    draw = SimpleNamespace(random=lambda: number)
    for temperature in (0, 1e-7, 9.9e-7):
        with np.errstate(all="raise"):
            chosen = t.sample_next(np.array([2.0, 5.0, 5.0]), draw, temperature=temperature)
        assert chosen == 1 and type(chosen) is int
    logits = np.array([-np.inf, 0.0, 0.0, -np.inf])
    assert t.sample_next(logits, draw) == (1 if number < 0.5 else 2)
    for seed in range(50):
        logits = np.append(rng.standard_normal(300), -np.inf)
        p = t.next_probabilities(logits, 1.5, top_k=70, top_p=0.9)
        chosen = t.sample_next(logits, draw, temperature=1.5, top_k=70, top_p=0.9)
        assert type(chosen) is int and p[chosen] > 0        # though the sum may end below the draw
        assert sum(p[:chosen]) - 1e-9 <= number < sum(p[:chosen + 1]) + 1e-9


@pytest.mark.parametrize("length", [1, T - 1, T, T + 1, 20])
@pytest.mark.parametrize("choice", [
    dict(temperature=0), dict(temperature=3.0), dict(temperature=2.0, top_k=6, top_p=0.9)])
def test_generation_reads_the_last_context_ids_and_takes_one_draw_a_token(length, choice):
    rng = np.random.default_rng(50)                 # with most, greedy text is one token for ever
    params, prompt = rand_params(rng), rand_ids(rng, length).tolist()
    expected, draws = list(prompt), np.random.default_rng(9)
    for _ in range(13):
        logits, _ = t.forward(params, np.array(expected[-T:]), CONFIG)
        expected.append(t.sample_next(logits[-1], draws, **choice))
    ids = t.generate(params, CONFIG, prompt, 13, np.random.default_rng(9), **choice)
    assert ids == expected and all(type(i) is int for i in ids) and len(set(ids[length:])) > 1
    assert prompt == ids[:length] == t.generate(params, CONFIG, prompt, 0, rng)
    for bad, n_tokens in (([], 3), (prompt, -1)):
        with pytest.raises(ValueError):
            t.generate(params, CONFIG, bad, n_tokens, rng)
