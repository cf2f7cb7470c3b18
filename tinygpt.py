# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=1.26"]
# ///
"""tinygpt: a complete GPT in one file, a book to be read and a program to be run."""
import math
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from types import SimpleNamespace

try:
    import numpy as np
    found = np.__version__
except ModuleNotFoundError:
    found = "none"
if sys.version_info < (3, 11) or found == "none" or np.lib.NumpyVersion(found) < "1.26.0":
    print("tinygpt needs Python 3.11 and NumPy 1.26 or newer (python -m pip install 'numpy>=1.26');"
          f" here are Python {sys.version.split()[0]}, NumPy {found}", file=sys.stderr)
    raise SystemExit(2)

# %% [markdown]
# # tinygpt
#
# A GPT, short for generative pre-trained transformer, reads a text and says what comes next, one
# small piece at a time. This file holds a whole one: the code that cuts text into pieces, the
# network that scores the next piece, the derivatives that tell each number of the network how to
# change, the training, and the writing. No step is left to a library for machine learning: NumPy
# does arithmetic on arrays, sorts and draws random numbers, and every formula stands here.
#
# The route of a text through it: each piece, called a token, becomes an id, a whole number (chapter
# 1). Each id becomes a row of d numbers (chapter 4). The rows pass through L blocks. Each block has
# attention, which mixes the rows of different positions (chapter 5), and a feed-forward layer,
# which works on each row alone (chapter 6). Out comes, at each position, a score for each token
# that might come next. The scores become probabilities, and one token is drawn (chapter 10).
#
# ## How to read this file
#
# The ten chapters have 61 sections, called cards. A card takes one step. It says what the step is
# for, states it as numbered equations, gives the shapes of its arrays (in letters, at the default
# sizes, and in the running example), then the code, then a demo with numbers small enough to redo
# by hand. What a demo prints is kept in `golden`, so a change to an equation's code shows up there.
#
# - A number like 15.2 names the second equation of card 15. It stands behind the equation, and
#   again behind the code that carries it out; 'as 15.2' marks code that does the same elsewhere.
# - A dagger † marks an equation that labels no line of code, such as a step of a derivation.
# - A comment behind most lines that make an array gives its shape: `# (T, d)` is T rows, d columns.
# - A window of T tokens is a matrix with a row for each position, (T, d). A batch is its windows,
#   one below the other in one tall matrix. Rows do not see each other except in attention, so the
#   same code serves both, and the shapes are given for one window. Where attention splits a matrix
#   into windows and heads, its arrays have one more axis in front, for the windows.
# - The loss is one number that says how wrong the model's predictions are. `dX` is always the
#   derivative of the loss with respect to X, in short, by X, or, with a word behind it such as
#   dX_branch, one of several parts that add up to it. It has the shape of X, since each entry of X
#   has its own derivative. Together, such derivatives are called the gradient. A small enough step
#   against it, each number less a little of its derivative, makes the loss smaller, where it is not
#   0. Training is many steps of this kind (chapter 8).
# - A backward function stands beneath its forward function, and goes through its steps in reverse.
# - Training computes in float32, numbers with about 7 digits, and the demos in float64, with 16.
#
# Each chapter ends with exercises; the answers stand at the end of the book. Some need later
# chapters, and can wait: 2b, 3a, 3b, 4a, 4b, 5a, 6a and 8b. To do one that changes a line, change
# it and type `make check`, or `python tinygpt.py demo --changed`: it shows what the first changed
# demo prints now, names the others, and checks the gradients (chapter 7). Then undo it.
#
# You need Python, the little NumPy of the next section, and school calculus: the derivatives of
# sums, products, quotients and powers, of exp and the natural log (all logarithms here are
# natural), and the chain rule. Card 17 uses that probabilities of what comes one after the other
# multiply, cards 23 and 32 variances: that those of independent numbers add up, and that the mean
# of a product of such numbers is the product of their means; card 23 an integral, card 47 Taylor's
# formula, card 52 a cosine. ∂Y/∂X is the derivative of Y by X while all else is held fixed. The
# chain rule is used throughout in this form: when the loss depends on X only through Y, each entry
# of X may touch several entries of Y, and their effects add up: dX_i = ∑_j dY_j ∂Y_j/∂X_i. An array
# used in several places gets such a sum from each.
#
# GPT-2 differs in this: its tokenizer works on bytes, not characters, its bend in the feed-forward
# layer is a GELU, not a ReLU, its output layer reuses the token table and has no bias, its weights
# start by another rule than card 23, and its training switches numbers off at random (dropout).
#
# ## A little NumPy
#
# An array is a table of numbers with a shape. X of shape (3, 4) is a matrix of 3 rows, 4 columns:
#
#     X.shape               (3, 4); X.ndim, the number of axes, is 2
#     X[0], X[:, 1]         row 0, shape (4,); column 1, shape (3,)
#     X[1:], X[[2, 0, 2]]   rows 1 and 2, shape (2, 4); rows 2, 0 and 2 again, shape (3, 4)
#     X + Y, X * Y          entry by entry, for two arrays of one shape; np.exp(X) likewise
#     X + b                 b of shape (4,) is added to each row: it is broadcast along the rows
#     X * s                 s of shape (3, 1) gives each row a factor of its own: broadcast too
#     X @ W                 the matrix product with a W of shape (4, 6): shape (3, 6); of stacks of
#                           matrices, with more axes in front, the product of each pair
#     X.T                   the transpose: rows become columns, shape (4, 3)
#     X.max(axis=1)         the largest of each row, (3,), with keepdims=True (3, 1); so sum, mean
#     X.reshape(6, 2)       the same numbers, read row by row, in rows of 2; -1 stands for what fits
#     X.ravel()             the same numbers in one row, shape (12,)
#     X[[0, 1, 2], y]       one entry of each row, in the column that y names: shape (3,)
#     X > 0                 an array of truths, which count as 1 and 0 when multiplied
#     X[None]               one more axis in front: shape (1, 3, 4)
#     A.swapaxes(-1, -2)    the last two axes exchanged: the transpose of each matrix in a stack
#     X += Y                changes X itself, where X = X + Y makes a new array
#     np.arange(3), np.eye(3)   0, 1, 2; the matrix (3, 3) with 1 on the diagonal, else 0
#     np.full(3, v), np.maximum(X, Y)   three times v; the larger of two numbers, entry by entry
#
# ## The letters
#
#     letter   meaning                                        default    elsewhere called
#     B        windows in a batch                             16         batch size
#     T        tokens in a window, the context                16         block size
#     Tmax     rows of the position table                     32
#     d        width: numbers that describe one token         32         d_model, n_embd
#     H, hs    attention heads, head size d / H               2, 16      n_head, d_head
#     F        width of the feed-forward layer                128        d_ff
#     L        blocks                                         2          n_layer
#     V, N     tokens in the vocabulary, ids in a stream      from the text
#     t        a position in a window; in chapters 8 and 9 a step; M_t is row t of a matrix M
#     i, j, k  indices; in attention i asks and j is asked
#     ∈, ⇒, ←  is a member of; hence; is replaced by; argmax is the place of the largest
#     ℝ^(T×a)  all matrices of T rows and a columns
#     δ_ij     1 where i = j, else 0; 1[...] is 1 where the condition holds, else 0
#     1        a column of ones; 1 bᵀ repeats the row b in every row
#     ᵀ, ⊙, ·  transpose; entry by entry product; product of numbers
#     {i : ...}   the set of all i for which this holds; bars around it count its members
#     |a|, ‖g‖, ⌊ ⌋, ⌈ ⌉   a without its sign; length of a vector; rounding down; rounding up
#
# Some letters serve twice, never in one function. V is also the matrix of values in attention
# (cards 28 to 38), as everywhere in the field. h numbers a head in cards 29 to 36, and is a small
# step in cards 21 and 47 to 49. x is a window of ids, and elsewhere just an input. Others, such as
# a, b, c, m, r, s, v, w, M, P, S, β and ε, are explained where they occur, and hold there.
#
# ## The notation of formulas
#
# Formulas are plain text, which `python tinygpt.py book` sets as mathematics:
#
# - Letters in a row are one name: `dX`. Names with a blank between them are a product: `a b`.
#   A number may touch the letter that it multiplies: `2d`.
# - `_` puts the letters and digits that follow, or a bracket, below the line, and `^` above it:
#   `X_tj`, `m_(t-1)`. A power stands before the index: `g²_k`. ∑_k is the sum over all k.
# - A name that touches a bracket is a function or an array with its argument: `exp(z)`, `ids[t]`.
#   With a blank between them, or after a bracket, it is a product: `s (a + b)`, `(a + b)(c + d)`.
# - W', a* and p'' are names like any other. Only in card 47 and answer 3c is f' a derivative.
# - A slash without blanks divides what touches it: `1/d`. One with blanks divides the whole product
#   before it by the whole product behind it: `dS Kh / √hs`.
# - √ and ∂ take what touches them. ∑, max, log and the like, with a blank behind, take the whole
#   product that follows: `∑_k X_tk W_kj`.
#
# ## The configuration
#
# The sizes of a model fix the name and the shape of every array it learns, its parameters, which
# `param_shapes` lists. Names that end in `_g` are gains and start at 1; those that end in `_b`, or
# are one of bq, bk, bv, bo, are offsets, also called biases, and start at 0; the rest start random.

# %%
class BadInput(ValueError):
    """Raised for input that a rule of this file forbids; says the rule, the value, the way out."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model. BadInput, a ValueError, where they do not fit together."""
    vocab_size: int             # V
    context: int = 16           # T
    max_context: int = 32       # Tmax
    width: int = 32             # d
    heads: int = 2              # H
    hidden: int = 128           # F
    layers: int = 2             # L

    def __post_init__(self):
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadInput(f"{name} must be a whole number from 1 up, got {value!r}")
        if self.width % self.heads:
            raise BadInput(f"--width {self.width} cannot be shared by --heads {self.heads}: "
                           f"make it a multiple of them")
        if self.context > self.max_context:
            raise BadInput(f"--context {self.context} is larger than --max-context "
                           f"{self.max_context}: make it smaller, or --max-context larger")


def block_shapes(d, F):
    """{short name: shape} of the arrays of one block, in their fixed order."""
    return {"ln1_g": (d,), "ln1_b": (d,),                               # LayerNorm 1
            "wq": (d, d), "bq": (d,), "wk": (d, d), "bk": (d,),         # queries, keys
            "wv": (d, d), "bv": (d,), "wo": (d, d), "bo": (d,),         # values, output
            "ln2_g": (d,), "ln2_b": (d,),                               # LayerNorm 2
            "ff1_w": (d, F), "ff1_b": (F,), "ff2_w": (F, d), "ff2_b": (d,)}     # feed-forward


BLOCK = tuple(block_shapes(1, 1))                                       # the short names


def param_shapes(config):
    """{name: shape} of all parameters, in their fixed order."""
    V, Tmax, d, F = config.vocab_size, config.max_context, config.width, config.hidden
    blocks = {f"block{l}.{name}": shape
              for l in range(config.layers) for name, shape in block_shapes(d, F).items()}
    return {"tok_emb": (V, d), "pos_emb": (Tmax, d), **blocks,
            "lnf_g": (d,), "lnf_b": (d,), "head_w": (d, V), "head_b": (V,)}


def block_params(params, l):
    """The arrays of block l under their short names: 'block0.wq' becomes 'wq'."""
    return {name: params[f"block{l}.{name}"] for name in BLOCK}

# %% [markdown]
# ## The running example
#
# One tiny model goes through the whole book: the text below, windows of T = 3 tokens, width d = 4,
# H = 2 heads, F = 6, one block, and parameters with one decimal, so that a pocket calculator is
# enough. `example(card)` builds what the demo of `card` starts from, with the functions of earlier
# cards only. Some things come early or from outside: parameters of later cards; X0, the input of
# chapter 3, which card 26 explains; Xn and Xn2, which card 41 explains; and the gradient dY, which
# is made up. Demos that need other numbers bring their own. What is printed is rounded, so the last
# digit may differ by a little when you redo a step. Where a demo runs the whole model or all of a
# backward pass, as in cards 42, 46, 49, 53, 55 and 61 and in the training loop, its results would
# take an evening by hand. What a random generator draws, in cards 9, 23, 32, 43, 49, 60 and 61 and
# in the loop, has to be taken as given.
#
# `demo` plays a demo at once in a notebook, under its card. In a program the command line decides.

# %%
def example(card):
    """The running example as it stands when `card` begins."""
    e = SimpleNamespace(text="she sees the sea he sees the tea", n_merges=3, val_fraction=0.25)
    rng = np.random.default_rng(2125)
    config = e.config = ModelConfig(vocab_size=10, context=3, max_context=5,
                                    width=4, heads=2, hidden=6, layers=1)
    e.params = {name: rng.integers(5, 16, shape) / 10 if name.endswith("_g")
                else rng.integers(-9, 10, shape) / 10
                for name, shape in param_shapes(config).items()}
    e.block = block_params(e.params, 0)
    if card > 1:
        e.word_counts = count_words(e.text)
    if card > 3:
        e.merges = train_bpe(e.word_counts, e.n_merges)
    if card > 5:
        e.tokenizer = build_tokenizer(e.text, e.n_merges)
        e.ids = e.tokenizer.encode(e.text)
    if card > 6:
        e.train_ids, e.val_ids = split_ids(e.ids, e.val_fraction)
    if card > 9:
        e.xs, e.ys = make_windows(e.train_ids, config.context, stride=3)
        e.x, e.y = e.xs[0], e.ys[0]                                         # (3,), (3,)
        e.X0 = e.params["tok_emb"][e.x] + e.params["pos_emb"][:3]           # (3, 4)  as in card 26
        e.dY = np.array([[0.2, -0.3, 0.4, 0.5], [-0.4, 0.1, 0.3, -0.6], [0.7, 0.3, -0.6, 0.2]])
    if card > 27:
        e.Xn, _ = layer_norm_forward(e.X0, e.block["ln1_g"], e.block["ln1_b"])
    if card > 28:
        e.Q, e.K, e.V = project_qkv(e.Xn, e.block)
    if card > 30:
        e.Qh, e.Kh, e.Vh = (split_heads(M, config.heads, 3) for M in (e.Q, e.K, e.V))
    if card > 32:
        e.S = scaled_scores(e.Qh, e.Kh)                                     # (1, 2, 3, 3)
    if card > 34:
        e.A = attention_weights(e.S)
    if card > 36:
        e.O = merge_heads(weighted_values(e.A, e.Vh))
    if card > 37:
        e.Att, e.kept = attention_forward(e.Xn, e.block, config.heads, 3)
        e.Xmid = e.X0 + e.Att                                               # (3, 4)  as in card 41
        e.Xn2, _ = layer_norm_forward(e.Xmid, e.block["ln2_g"], e.block["ln2_b"])
    if card > 45:
        e.logits, e.cache = forward(e.params, e.x, config)
        e.loss, e.P = cross_entropy_forward(e.logits, e.y)
    if card > 46:
        e.loss, e.grads = loss_and_grads(e.params, e.x, e.y, config)
    return e


def number(value, digits):
    """A number as text with a fixed count of decimals, never -0."""
    return f"{value:d}" if isinstance(value, (int, np.integer)) else f"{value:z.{digits}f}"


def show(name, array, digits=4):
    """Print an array under its name, a row of its last axis to a line."""
    array = np.asarray(array)
    if array.ndim > 2:
        for i, part in enumerate(array):
            show(f"{name}[{i}]", part, digits)
        return
    texts = [[number(value, digits) for value in row] for row in np.atleast_2d(array)]
    width = max(digits + 5, *(len(text) + 1 for row in texts for text in row))
    for i, row in enumerate(texts):
        print(f"{name if i == 0 else '':10}" + "".join(f"{text:>{width}}" for text in row))


def show_all(digits=4, **arrays):
    """Print arrays under their names, one after the other."""
    for name, array in arrays.items():
        show(name, array, digits)


def refused(function, *args):
    """Print what a function says about input that it should refuse."""
    try:
        print(f"accepted: {function(*args)}")
    except ValueError as error:
        print(f"refused: {error}")


def demo(function):
    """Play a demo at once, in a notebook only."""
    if "get_ipython" in globals():
        function()

# %% [markdown]
# ## Chapter 1. Tokenizer
#
# A network works on numbers, so text must become numbers first. One number per character would do,
# but then the network spends its effort on spelling. One number per word would leave out every word
# it has not seen. Byte pair encoding (BPE) lies between: it starts from characters and joins the
# neighbours that occur together most often, again and again. Frequent words end up as one piece,
# rare words as a few. The pieces are called tokens.

# %% [markdown]
# ### 1. Pre-tokens and word counts
#
# Before pieces are joined, the text is cut into pre-tokens, roughly words, and no token will ever
# cross such a cut. Without it, "e t" might become a token because many words end in e and many
# begin with t, and the vocabulary would fill up with scraps of two words. A word takes the one
# blank before it along, so " the" is one pre-token.
#
# The pattern tries its alternatives from left to right: the endings of English contractions, such
# as 's; then letters, digits, or other signs, each with at most one blank before; then a run of
# blanks and line ends, but for the last one if something follows; then that last one. An accent or
# a vowel sign that Unicode writes as a mark of its own belongs to the letter before it, and so do
# the two joiners that stand within words of some scripts. Every character lands in exactly one
# piece, and none is changed (two spellings of é stay two), so text comes back as it went in.
#
# Learning the merges needs each distinct pre-token w and the number n_w of its places i:
#
#     n_w = |{i : pretoken[i] = w}|                                                       (1.1)

# %%
MARKS = "".join(char for char in map(chr, range(0x300, 0x20000))
                if unicodedata.category(char)[0] == "M")
MARKS += "\U000e0100-\U000e01ef\u200c\u200d"         # forms of a letter, and the two joiners
PRE_TOKEN = re.compile(r"'(?:[stmd]|re|ve|ll)"      # endings of contractions
                       r"| ?[^\W\d_]+"             # letters: what \w stands for, less digits and _
                       rf"(?:(?![\0-\u02ff])[{MARKS}]+[^\W\d_]*)*"   # marks; a quick look first
                       r"| ?\d+"                    # digits
                       r"| ?(?:[^\s\w]|_)+"         # other signs
                       r"|\s+(?!\S)"               # blanks, but for one before something else
                       r"|\s+")                    # that one


def count_words(text):
    """{pre-token: count} of a text, first seen first (card 1)."""
    return dict(Counter(PRE_TOKEN.findall(text)))                           #         (1.1)


def demo_pre_tokens():
    e = example(1)
    print(f"text  {e.text!r}")
    print(f"cut   {'|'.join(PRE_TOKEN.findall(e.text))}")
    for word, n in count_words(e.text).items():
        print(f"n_w = {n}  for w = {word!r}")
    awkward = "It's 2 a.m.,\n\nisn't_it,  so?"
    pieces = PRE_TOKEN.findall(awkward)
    print(f"\ntext  {awkward!r}")
    print(f"cut   {'|'.join(repr(piece)[1:-1] for piece in pieces)}")
    print(f"glued together the pieces give the text: {''.join(pieces) == awkward}")
    for name, word in (("Hindi", "हिन्दी"), ("voila with a grave accent", "voila\u0300")):
        print(f"{name}: {len(word)} characters, pieces: {len(PRE_TOKEN.findall(word))}")

if __name__ == "__main__": demo(demo_pre_tokens)

# %% [markdown]
# ### 2. Pair frequency and the best pair
#
# At the start each pre-token w is the list toks_w of its characters. Now count every pair of
# neighbours inside a pre-token. A pre-token that occurs n_w times counts n_w times.
#
#     f(a, b) = ∑_w n_w · |{i : toks_w[i] = a, toks_w[i+1] = b}|                          (2.1)
#     (a*, b*) = argmax over (a, b) of f(a, b)                                            (2.2)
#
# The best pair (a*, b*) is joined everywhere (card 3) into a new token, and the counting starts
# again. Each join is called a merge. All that a tokenizer learns is the merges in their order, and
# the characters (card 4).
#
# Two rules are needed where the equations are silent. Among equally frequent pairs the smallest one
# wins, with (a, b) compared as Python compares tuples of strings. Otherwise the result would depend
# on the order of a dict. And a pair must occur at least twice: joining a pair that occurs once
# saves a single token and costs one in the vocabulary. So there may be fewer merges than asked for.
# `places` tells for each pair in which pre-tokens it stands, for card 3.

# %%
def count_pairs(toks, n):
    """f, {(a, b): count}, and places, {(a, b): [w, ...]}, of {w: tokens} and {w: n_w} (card 2)."""
    f, places = Counter(), defaultdict(list)
    for w, tokens in toks.items():
        for pair in zip(tokens, tokens[1:]):
            f[pair] += n[w]                                                 #         (2.1)
            places[pair].append(w)
    return f, places


def best_pair(f):
    """The most frequent pair, the smallest among equals (card 2)."""
    return min(f, key=lambda pair: (-f[pair], pair))                        #         (2.2)


def demo_pair_frequency():
    for n in (example(2).word_counts, {"aaab": 1, "lmlm": 2}):
        f, places = count_pairs({w: list(w) for w in n}, n)
        for pair, count in sorted(f.items(), key=lambda item: (-item[1], item[0])):
            print(f"f{pair} = {count} = {' + '.join(f'{n[w]} in {w!r}' for w in places[pair])}")
        print(f"the best pair is {best_pair(f)}\n")
    print(f"of equally many (b, a) and (a, b) it is {best_pair({('b', 'a'): 1, ('a', 'b'): 1})}")

if __name__ == "__main__": demo(demo_pair_frequency)

# %% [markdown]
# ### 3. Applying a merge
#
# To apply the merge (a, b) is to put the joined token ab wherever a stands before b.
#
#     [..., a, b, ...] → [..., ab, ...]   (ab is one token)                               (3.1)
#
# The scan goes from left to right, and a token that has just been joined is not joined again by the
# same merge. So a a a becomes aa a, although card 2 counted the pair (a, a) twice here.
#
# Learning is now a loop: find the best pair, join it everywhere, count again. Counting everything
# again is not needed: a token to the left of a join was the neighbour of a and is now that of ab;
# one to the right was that of b and is now that of ab. The old terms are taken out of the sum 2.1
# and the new ones put in. In a b a b, the second join takes out the pair (ab, a) that the first has
# put in. The best pair comes from a heap, a list that hands out its smallest entry cheaply: among
# entries (-f, pair) that is the most frequent pair, and among equals the smallest one, as in 2.2.
# When a count changes, a new entry is added; one that is out of date is dropped when it comes up.

# %%
def merge_tokens(tokens, pair):
    """A new list of tokens in which each occurrence of pair is one token (card 3)."""
    (a, b), joined = pair, []
    for token in tokens:
        if token == b and joined and joined[-1] == a:
            joined[-1] = a + b                                              #         (3.1)
        else:
            joined.append(token)
    return joined


def train_bpe(word_counts, n_merges):
    """The merges [(a, b), ...] in order, at most n_merges of them (cards 2 and 3)."""
    toks, merges = {w: list(w) for w in word_counts}, []
    f, places = count_pairs(toks, word_counts)
    heap = [(-count, pair) for pair, count in f.items()]
    heapify(heap)
    while len(merges) < n_merges and heap and heap[0][0] < -1:
        minus_f, (a, b) = heappop(heap)                                     # as 2.2
        if -minus_f != f[a, b]:
            continue                                                        # out of date
        merges.append((a, b))
        ab, lefts, rights = a + b, defaultdict(list), defaultdict(list)
        for w in set(places[a, b]):
            tokens, joined, start = toks[w], [], 0
            for i in [i for i, token in enumerate(tokens) if token == b]:
                if i > start and tokens[i - 1] == a:
                    joined += tokens[start:i - 1]
                    if joined:
                        lefts[joined[-1]].append(w)
                    if i + 1 < len(tokens):
                        rights[tokens[i + 1]].append(w)
                    joined.append(ab)                                       # as 3.1
                    start = i + 1
            toks[w] = joined + tokens[start:]
        swaps = [((left, a), (left, ab), where) for left, where in lefts.items()]
        swaps += [((b, right), (ab, right), where) for right, where in rights.items()]
        for old, new, where in swaps:
            n = sum(word_counts[w] for w in where)
            f[old] -= n                                                     # old terms out
            f[new] += n                                                     # new terms in
            places[new] += where
            heappush(heap, (-f[old], old))
            heappush(heap, (-f[new], new))
        del f[a, b]                                                         # joined everywhere
    return merges


def train_bpe_on_text(text, n_merges):
    """The merges learned from a text (cards 1 to 3)."""
    return train_bpe(count_words(text), n_merges)


def demo_apply_merge():
    e = example(3)
    for n in (3, 4):
        print(f"{n} a in a row with the pair (a, a): {merge_tokens(['a'] * n, ('a', 'a'))}")
    merges = train_bpe(e.word_counts, e.n_merges)
    print(f"merges of the running example: {merges}")
    for word in e.word_counts:
        steps = [tokens := list(word)]
        for pair in merges:
            steps.append(tokens := merge_tokens(tokens, pair))
        print("  ->  ".join(f"{'|'.join(step):9}" for step in steps).rstrip())
    print("after the first, ' ' 's', ' ' 't', 's' 'e' tie at 3; then ' ' 't', ' s' 'e' do")
    print("merges of other texts, at most so many:")
    for text, n in (("nmlknmlk", 3), ("x", 3), ("abcdef", 3), ("xabyab", 3), ("abab b b", 6),
                    ("aaaababbabb", 6)):
        print(f"{text}, {n}: {train_bpe_on_text(text, n)}")

if __name__ == "__main__": demo(demo_apply_merge)

# %% [markdown]
# ### 4. The vocabulary
#
# The network sees whole numbers, called ids. The vocabulary lists which token has which id.
#
#     itos = [<unk>] + [characters, first seen first]
#            + [new merged tokens, in merge order]                                        (4.1)
#
# Id 0 stands for anything unknown, such as a character that the training text never held. The
# characters keep their own ids, because a word that no merge fits must still be spelled. 'New' says
# that a string gets one id only, even if two merges should spell it, as ab + c and a + bc would.
# The characters of the distinct pre-tokens come in the same order as those of the text.
#
# Shapes: `itos` has V strings. That is the V of the whole book.

# %%
UNK = "<unk>"


def vocabulary(word_counts, merges):
    """itos, [token, ...] in the order of their ids (card 4)."""
    merged = [a + b for a, b in merges]
    return list(dict.fromkeys([UNK, *"".join(word_counts), *merged]))       #         (4.1)


def demo_vocabulary():
    e = example(4)
    itos = vocabulary(e.word_counts, e.merges)
    for i, token in enumerate(itos):
        kind = "unknown" if i == 0 else "character" if len(token) == 1 else "merged"
        print(f"id {i:2}  {token!r:8} {kind}")
    print(f"V = 1 + {len(set(e.text))} characters + {len(e.merges)} merged = {len(itos)}")
    print(f"ab + c and a + bc: {vocabulary(['abc'], [('ab', 'c'), ('a', 'bc')])}")

if __name__ == "__main__": demo(demo_vocabulary)

# %% [markdown]
# ### 5. Encode and decode
#
# To encode a text, cut it into pre-tokens, apply the merges to each, look the tokens up; `stoi`
# leads from string to id. To decode ids, look the strings up and glue them together. No blank is
# put between them: blanks are part of the tokens.
#
#     id(tok) = stoi[tok] if tok in stoi else stoi[<unk>]                                 (5.1)
#     decode(i_1, ..., i_n) = itos[i_1] + ... + itos[i_n]   (strings are joined)          (5.2)
#
# The merges must be replayed in the order in which they were learned. Taking the longest known
# token first can give other ids than those the network was trained on. Replaying the whole list for
# each pre-token would take long. It is enough to look at the pairs that are there, apply the one
# with the lowest rank (its place in the list), and go on with higher ranks. A merge whose pair is
# not there would change nothing, and a pair that appears only after its turn has passed is left
# alone, as in the replay. The ids of a pre-token are worked out once for a text.
#
# Shapes: a text becomes a list of N ids, and these the text again, if every character is known.

# %%
def apply_merges(word, merges, ranks=None):
    """The tokens of one pre-token: the merges replayed in their order (card 5)."""
    ranks = ranks or {pair: rank for rank, pair in enumerate(merges)}
    tokens, last = list(word), -1
    while there := [rank for pair in zip(tokens, tokens[1:])
                    if (rank := ranks.get(pair, last)) > last]:
        last = min(there)
        tokens = merge_tokens(tokens, merges[last])
    return tokens


@dataclass
class Tokenizer:
    """Text to ids and back. itos: [token, ...], merges: [(a, b), ...] (card 5)."""
    itos: list
    merges: list

    def __post_init__(self):
        self.stoi = {token: i for i, token in enumerate(self.itos)}

    def encode(self, text):
        """The ids of a text, a list."""
        ids, ids_of, stoi = [], {}, self.stoi
        ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        for word in PRE_TOKEN.findall(text):
            if word not in ids_of:
                tokens = apply_merges(word, self.merges, ranks)
                ids_of[word] = [stoi[tok] if tok in stoi else stoi[UNK] for tok in tokens]  # (5.1)
            ids += ids_of[word]
        return ids

    def decode(self, ids):
        """The text of some ids; ValueError for an id outside 0 to V - 1."""
        for i in ids:
            if not 0 <= i < (V := len(self.itos)):
                raise BadInput(f"id {i} is outside the vocabulary: ids go from 0 to {V - 1}")
        return "".join(self.itos[i] for i in ids)                           #         (5.2)

    def unknown(self, text):
        """The characters of a text that are not in the vocabulary, first seen first."""
        return [char for char in dict.fromkeys(text) if char not in self.stoi]


def build_tokenizer(text, n_merges):
    """The tokenizer learned from a text (cards 1 to 5)."""
    word_counts = count_words(text)
    merges = train_bpe(word_counts, n_merges)
    return Tokenizer(vocabulary(word_counts, merges), merges)


def demo_encode_decode():
    e = example(5)
    tokenizer = build_tokenizer(e.text, e.n_merges)
    for word in e.word_counts:
        tokens = apply_merges(word, tokenizer.merges)
        print(f"{word!r:8} {'|'.join(tokens):9} ids {tokenizer.encode(word)}")
    ids = tokenizer.encode(e.text)
    print(f"text     {e.text!r}")
    print(f"N = {len(ids)}   {ids}")
    print(f"decoded  {tokenizer.decode(ids)!r}")
    ids = tokenizer.encode("sad")
    print(f"unknown  'sad' -> {ids} -> {tokenizer.decode(ids)!r}; {tokenizer.unknown('sad')}")
    refused(tokenizer.decode, [9, 10])
    order = [("y", "z"), ("x", "y")]
    print(f"with the merges y+z, x+y: xyz -> {apply_merges('xyz', order)}, "
          f"xyzxy -> {apply_merges('xyzxy', order)}")

if __name__ == "__main__": demo(demo_encode_decode)

# %% [markdown]
# ### Exercises of chapter 1
#
# - **1a.** Learn all merges of the text `low low lower` by hand: count the pairs, join the best
#   one, count again. Mind the blank in front of a pre-token and the rule for ties.
# - **1b.** Let pairs that occur only once be joined too: in `train_bpe` write `heap[0][0] < 0` for
#   `heap[0][0] < -1`. Which golden files change?
# - **1c.** Take ` ?` away in front of the letters in `PRE_TOKEN`. Does any text come back changed
#   from encoding and decoding? How many ids is the text of the running example now?

# %% [markdown]
# ## Chapter 2. Data
#
# This chapter cuts the stream of ids into the tasks from which the network learns: short windows,
# each with the answers beside it, handed out in small shuffled groups.

# %% [markdown]
# ### 6. The split
#
# A model that is praised for the text it has learned from may just have learned it by heart. So a
# share ρ of the stream is held out: no step of the training sees it, it is only used to measure.
# (The tokenizer is made from the whole text.) It is cut off the end, in one piece. Single
# sentences, drawn here and there, would stand between neighbours that the model has seen.
#
#     cut = ⌊(1 - ρ) N⌋                                                                   (6.1)
#
# The first `cut` ids are for training, the rest for validation. A computer does not hold 0.9
# exactly, and (1 - 0.9) · 10 comes out a hair below 1; adding a millionth mends that.
#
# Shapes: ids (N,) -> train_ids (cut,), val_ids (N - cut,)

# %%
def split_ids(ids, val_fraction):
    """Training and validation part of a stream of ids (N,) (card 6)."""
    if not 0 <= val_fraction < 1:
        raise BadInput(f"the validation share must be from 0 to below 1, got {val_fraction}")
    ids = np.asarray(ids)                                                   # (N,)
    cut = math.floor((1 - val_fraction) * len(ids) + 1e-6)                  #         (6.1)
    return ids[:cut], ids[cut:]                                             # (cut,), (N - cut,)


def demo_split():
    e = example(6)
    train_ids, val_ids = split_ids(e.ids, e.val_fraction)
    print(f"N = {len(e.ids)}, ρ = 0.25: (1 - ρ) N = {0.75 * len(e.ids)}, cut = {len(train_ids)}")
    print(f"training    {train_ids.tolist()}")
    print(f"validation  {val_ids.tolist()}")
    print(f"(1 - 0.9) * 10 in floating point is {(1 - 0.9) * 10:.16f}; "
          f"cut = {len(split_ids(range(10), 0.9)[0])}")
    print(f"ρ = 0 holds nothing out: cut = {len(split_ids(e.ids, 0.0)[0])}")
    refused(split_ids, e.ids, 1.0)

if __name__ == "__main__": demo(demo_split)

# %% [markdown]
# ### 7. Sliding windows
#
# The network reads a window x of T ids and must say, at each of the T places, which token comes
# next. The answers, called targets, are the same ids moved by one place, y. One window holds T
# tasks: predict the second token from the first, the third from the first two, and so on.
#
#     start ∈ {0, stride, 2 stride, ...},  start < N - T                                  (7.1)
#     x_start[t] = ids[start + t],      t = 0, ..., T-1                                   (7.2)
#     y_start[t] = ids[start + t + 1],  t = 0, ..., T-1                                   (7.3)
#     y_start[t] = x_start[t + 1],      t = 0, ..., T-2                                 † (7.4)
#
# With a stride below T the windows overlap; with one above T some tokens are never a target. The
# first token never is, nor may the last few be, fewer than the stride. The bound on the start is
# strict, because the last target of a window is ids[start + T]. With T = 4 and stride 2, the first
# two windows and their targets lie in the stream like this:
#
#     ids     10 11 12 13 14 15 16 17 ...
#     x_0    [10 11 12 13]                  y_0       [11 12 13 14]
#     x_2          [12 13 14 15]            y_2             [13 14 15 16]
#
# A window and its targets together are T + 1 ids in a row. `sliding_window_view` gives all such
# pieces of the stream as views, without copying one, and `[::stride]` takes each stride-th of them.
#
# Shapes: ids (N,) -> x (windows, T), y (windows, T); how many there are is the subject of card 8.

# %%
def make_windows(ids, T, stride):
    """Windows x (windows, T) of ids (N,) and their targets y (windows, T), as views (card 7)."""
    if T < 1 or stride < 1:
        raise BadInput(f"window and stride must be 1 or more, got T={T}, stride={stride}")
    if len(ids) <= T:
        return np.empty((2, 0, T), np.int64)
    pieces = np.lib.stride_tricks.sliding_window_view(ids, T + 1)[::stride]  # (7.1)
    x = pieces[:, :-1]                                                      # (windows, T)  (7.2)
    y = pieces[:, 1:]                                                       # (windows, T)  (7.3)
    return x, y


def demo_windows():
    ids = np.arange(10, 23)
    print(f"ids    {ids.tolist()}    N = {len(ids)}")
    for stride in (4, 5):
        x, y = make_windows(ids, 4, stride)
        print(f"T = 4, stride {stride}: starts {list(range(0, len(ids) - 4, stride))}")
        for row_x, row_y in zip(x, y):
            print(f"  x {row_x.tolist()}  y {row_y.tolist()}")
        print(f"  never a target: {sorted({*ids.tolist()} - {*y.ravel().tolist()})}")
    refused(make_windows, ids, 4, 0)
    e = example(7)
    x, y = make_windows(e.train_ids, 3, stride=3)
    print("the running example, T = 3, stride 3:")
    show_all(x=x, y=y, digits=0)

if __name__ == "__main__": demo(demo_windows)

# %% [markdown]
# ### 8. Window count
#
# The starts that 7.1 allows are 0, stride, 2 stride, ... below N - T: one for every `stride`
# places, and one more for a remainder. That is a division rounded up.
#
#     windows = ⌈(N - T) / stride⌉,  N > T                                                (8.1)
#
# A stream of T ids or fewer has no window, and the formula would give zero or less. Python's //
# rounds down; with the signs flipped before and after, it rounds up.

# %%
def window_count(N, T, stride):
    """The number of windows of length T in N ids (card 8)."""
    return max(0, -(-(N - T) // stride))                                    #         (8.1)


def demo_window_count():
    print("   N   T  stride   (N - T) / stride   windows   counted")
    cases = (8, 8, 1), (9, 8, 1), (10, 4, 1), (10, 4, 2), (13, 4, 4), (13, 4, 5), (16, 3, 3)
    for N, T, stride in cases:
        x, _ = make_windows(np.arange(N), T, stride)
        print(f"{N:4}{T:4}{stride:8}{(N - T) / stride:19.2f}"
              f"{window_count(N, T, stride):10}{len(x):10}")

if __name__ == "__main__": demo(demo_window_count)

# %% [markdown]
# ### 9. Shuffling and batching
#
# The gradient of one window is a noisy hint at the best step; the mean over a batch of B windows is
# a steadier one. One pass over all windows is an epoch. Each epoch visits them in a new random
# order, because neighbours in the text are alike and should not always come together.
#
#     batches per epoch = ⌈windows / B⌉                                                 † (9.1)
#
# The last batch may be smaller. Inputs and answers must be shuffled alike, so one order serves
# both. It comes from sorting random numbers: `np.argsort` gives the places of the smallest, the
# next, and so on. The generator starts from a number called its seed, and the same seed gives the
# same numbers, with the same version of NumPy.
#
# Shapes: x (windows, T), y (windows, T) -> xb (B, T), yb (B, T), again and again

# %%
def iterate_batches(x, y, batch, rng):
    """Yield xb (B, T), yb (B, T) until every window was given once (card 9)."""
    if batch < 1:
        raise BadInput(f"a batch must have 1 window or more, got {batch}")
    order = np.argsort(rng.random(len(x)))                                  # (windows,)
    for start in range(0, len(x), batch):
        picked = order[start:start + batch]                                 # (B,)
        yield x[picked], y[picked]                                          # (B, T), (B, T)


def demo_batches():
    e = example(9)
    x, y = make_windows(e.train_ids, 3, stride=2)
    print("the training ids of the running example, T = 3, stride 2")
    for i, row in enumerate(x):
        print(f"window {i}: {row.tolist()}")
    print(f"{len(x)} windows, B = 3: {-(-len(x) // 3)} batches")
    rng = np.random.default_rng(5)
    for epoch in (1, 2):
        for xb, yb in iterate_batches(x, y, 3, rng):
            numbers = [x.tolist().index(row) for row in xb.tolist()]
            print(f"epoch {epoch}  windows {numbers}\n  x {xb.tolist()}\n  y {yb.tolist()}")

if __name__ == "__main__": demo(demo_batches)

# %% [markdown]
# ### Exercises of chapter 2
#
# - **2a.** A stream has 1,000 ids. How many windows of T = 16 does it give with stride 4, and with
#   stride 16? How many of the ids are a target at least once?
# - **2b.** Hand out the window itself as its targets: write `y = pieces[:, :-1]` in 7.3. What
#   happens to the training loss, and what does the model learn?

# %% [markdown]
# ## Chapter 3. Operations
#
# A network is a chain of a few kinds of operation. This chapter writes down each kind, but for the
# lookup of chapter 4, twice: forward, to get the result, and backward, to get derivatives. A
# backward function is handed dY, the derivative of the loss by its output, called the upstream
# gradient. It returns the derivative of the loss by each of its inputs that can be varied; ids
# cannot. So they can be chained in reverse order: backpropagation. It begins at the loss (card 18).

# %% [markdown]
# ### 10. Matrix multiplication (forward)
#
# The basic operation of a GPT: take a row of numbers, weigh and add them up, once for each output.
# A matrix W holds the weights, one column for each output, and X the rows, one for each position.
#
#     (X W)_tj = ∑_k X_tk W_kj                                                         † (10.1)
#     X ∈ ℝ^(T×a), W ∈ ℝ^(a×c)  ⇒  X W ∈ ℝ^(T×c)                                       † (10.2)
#     Y_tj = (X W)_tj + b_j                                                            † (10.3)
#
# 10.1 multiplies row t of X and column j of W number by number and adds the products up. In 10.2
# the inner sizes a must agree, and vanish. 10.3 adds an offset b_j, the bias, in every row.
#
# A sum is a matrix product too: a column of ones, the 1 of the equations, on the right adds up each
# row, a row of ones on the left each column. A column of 1/n in place of ones gives the mean of
# each row. `column` makes such a column once and keeps it. On small arrays it beats `sum`.
#
#     X (T, d) = (16, 32)                   (3, 4)        a window going into attention
#     X (T, F) = (16, 128)                  (3, 6)        its hidden numbers (card 39)

# %%
@cache
def column(n, value, dtype):
    """A column (n, 1) with the same number in each row (card 10)."""
    C = np.full((n, 1), value, dtype)                                       # (n, 1)
    C.flags.writeable = False                       # kept, so nobody may write into it
    return C


def row_sums(X):
    """The sum of each row, as a column: (..., n) becomes (..., 1) (card 10)."""
    n = X.shape[-1]
    return (X.reshape(-1, n) @ column(n, 1, X.dtype)).reshape(*X.shape[:-1], 1)


def column_sums(X):
    """The sum of each column: (m, n) becomes (n,) (card 10)."""
    return column(len(X), 1, X.dtype)[:, 0] @ X


def row_mean(X):
    """The mean of each row, as a column: (m, n) becomes (m, 1) (card 10)."""
    return X @ column(X.shape[1], 1 / X.shape[1], X.dtype)


def demo_matmul():
    e = example(10)
    X, W, b = e.X0, e.block["ff1_w"], e.block["ff1_b"]
    show_all(X=X, W=W, b=b, digits=1)
    terms = " + ".join(f"({number(x, 1)})({number(w, 1)})" for x, w in zip(X[0], W[:, 1]))
    print(f"(X W)_01 = {terms} = {number((X @ W)[0, 1], 2)}")
    print(f"Y_01     = {number((X @ W)[0, 1], 2)} + ({number(b[1], 1)}) = "
          f"{number((X @ W + b)[0, 1], 2)}")
    show("X W + b", X @ W + b, digits=2)
    show("row sums", row_sums(X)[:, 0], digits=1)
    show("row means", row_mean(X)[:, 0])
    show("col. sums", column_sums(X), digits=1)

if __name__ == "__main__": demo(demo_matmul)

# %% [markdown]
# ### 11. Linear layer (forward)
#
# The linear layer is the product with the bias added. The column of ones in front of bᵀ says that
# each row gets the same bias; NumPy does that by itself, by broadcasting (c,) along (T, c).
#
#     Y = X W + 1 bᵀ                                                                     (11.1)
#
#     X (T, d) = (16, 32)                   (3, 4)        for the first layer of card 39
#     W (d, F) = (32, 128)                  (4, 6)
#     b (F,) = (128,)                       (6,)
#     Y (T, F) = (16, 128)                  (3, 6)

# %%
def linear_forward(X, W, b):
    """Y (T, c) = X (T, a) times W (a, c), plus b (c,) in each row (card 11)."""
    Y = X @ W + b                                                           # (T, c)  (11.1)
    return Y


def demo_linear():
    e = example(11)
    print("X, W and b are those of demo 10")
    for name, b in (("Y", e.block["ff1_b"]), ("Y, b = 0", np.zeros(6))):
        show(name, linear_forward(e.X0, e.block["ff1_w"], b), digits=2)

if __name__ == "__main__": demo(demo_linear)

# %% [markdown]
# ### 12. Linear layer, backward
#
# First with plain numbers. A model says w x + b where y is right, and the loss is (w x + b - y)².
# Let x = 3, w = 2, b = 1 and y = 5: the error w x + b - y is 2, the loss 4. By the chain rule the
# loss moves with w at the rate 2 · error · x = 12, and with b at 2 · error = 4. A step of 0.01
# against these gives w = 1.88 and b = 0.96, the error 1.6 and the loss 2.56.
#
# By 10.1 and 10.3, Y_tj is a sum, and the derivatives of one output are read off directly:
#
#     ∂Y_tj/∂W_kj = X_tk,  ∂Y_tj/∂b_j = 1,  ∂Y_tj/∂X_tk = W_kj                         † (12.1)
#
# The chain rule adds up all outputs that each of them touches. The weight W_kj touches column j of
# Y, in every row t, and no other column: dW_kj = ∑_t X_tk dY_tj. Turn X on its side, so that X_tk
# is entry (k, t) of Xᵀ. Then dW_kj = ∑_t (Xᵀ)_kt dY_tj, which is 10.1 for the product of Xᵀ and dY:
#
#     dW = Xᵀ dY                                                                         (12.2)
#
# The bias b_j touches column j too, in every row, with factor 1: db_j = ∑_t dY_tj, so as a row:
#
#     db = ∑_t dY_t                                                                      (12.3)
#
# The input X_tk touches row t of Y, in every column j: dX_tk = ∑_j dY_tj W_kj = ∑_j dY_tj (Wᵀ)_jk:
#
#     dX = dY Wᵀ                                                                         (12.4)
#
# Where T, a and c differ, there is no other way to fit these shapes together. db is a sum, not a
# mean: a bias that serves T rows gets T contributions. With a batch the sums run over the rows of
# all windows. The backward pass needs X and W, but not Y.
#
#     dY (T, F) = (16, 128)                 (3, 6)
#     dW (d, F) = (32, 128)                 (4, 6)
#     db (F,) = (128,)                      (6,)
#     dX (T, d) = (16, 32)                  (3, 4)

# %%
def linear_backward(dY, X, W):
    """dX (T, a), dW (a, c), db (c,) from dY (T, c), the input X (T, a) and W (a, c) (card 12)."""
    dW = X.T @ dY                                                           # (a, c)  (12.2)
    db = column_sums(dY)                                                    # (c,)    (12.3)
    dX = dY @ W.T                                                           # (T, a)  (12.4)
    return dX, dW, db


def demo_linear_backward():
    e = example(12)
    X, W = e.X0, e.block["ff1_w"]
    dY = e.dY[:, [0, 1, 2, 3, 2, 1]]                                        # (3, 6)
    dX, dW, db = linear_backward(dY, X, W)
    show_all(X=X, W=W, dY=dY, digits=1)
    show_all(dW=dW, db=db, dX=dX, digits=2)
    terms = " + ".join(f"({number(x, 1)})({number(g, 1)})" for x, g in zip(X[:, 1], dY[:, 0]))
    print(f"dW_10 = {terms} = {number(dW[1, 0], 2)}")
    terms = " + ".join(f"({number(g, 1)})({number(w, 1)})" for g, w in zip(dY[2, :3], W[3, :3]))
    print(f"dX_23 = {terms} + ... = {number(dX[2, 3], 2)}")

if __name__ == "__main__": demo(demo_linear_backward)

# %% [markdown]
# ### 13. ReLU (forward)
#
# Two linear layers in a row are no better than one: (X W) W' = X (W W') is one matrix product
# again, and biases do not change that. Something not linear, an activation function, must stand
# between them. The simplest: keep what is positive, replace the rest by 0. ReLU is short for
# rectified linear unit. Z is the output of the first layer, a column for each of F hidden units.
#
#     R_ti = max(0, Z_ti)                                                                (13.1)
#
#     Z, R (T, F) = (16, 128)               (3, 6)

# %%
def relu_forward(Z):
    """R = Z where it is positive, else 0; any shape (card 13)."""
    R = np.maximum(Z, 0)                                                    # (T, F)  (13.1)
    return R


def demo_relu():
    e = example(13)
    Z = linear_forward(e.X0, e.block["ff1_w"], e.block["ff1_b"])
    R = relu_forward(Z)
    print("Z is Y of demo 11")
    show_all(Z=Z, R=R, digits=2)
    print(f"{(R == 0).sum()} of {R.size} entries became 0")

if __name__ == "__main__": demo(demo_relu)

# %% [markdown]
# ### 14. ReLU, backward
#
# Where Z is positive, R equals Z and has slope 1. Where Z is negative, R stays 0. At exactly 0
# there is no slope; the usual choice is 0.
#
#     ∂R_ti/∂Z_ti = 1 if Z_ti > 0 else 0                                               † (14.1)
#
# Each entry touches only itself, so the sum of the chain rule has one term:
#
#     dZ = dR ⊙ 1[Z > 0]                                                                 (14.2)
#
# The condition looks at the input Z of the forward pass, not at dR: a negative gradient may pass.
#
#     dR, dZ (T, F) = (16, 128)             (3, 6)

# %%
def relu_backward(dR, Z):
    """dZ = dR where the input Z was positive, else 0 (card 14)."""
    dZ = dR * (Z > 0)                                                       # (T, F)  (14.2)
    return dZ


def demo_relu_backward():
    Z = np.array([[1.5, -0.2, 0.0, 0.3], [-2.0, 0.4, -0.1, 0.7]])
    dR = np.array([[0.6, 0.5, 0.8, -0.9], [-0.3, 0.2, 0.4, -0.7]])
    show("Z", Z, digits=1)
    show("1[Z > 0]", (Z > 0).astype(int), digits=1)
    show_all(dR=dR, dZ=relu_backward(dR, Z), digits=1)

if __name__ == "__main__": demo(demo_relu_backward)

# %% [markdown]
# ### 15. Softmax (forward)
#
# A network gives scores, any numbers; choosing needs probabilities, from 0 up and with sum 1.
# Softmax raises e to each score, which makes all of them positive and keeps their order, and
# divides by the sum. A difference of 1 between two scores makes a factor of e between their p.
#
# exp(1000) is infinite in NumPy, and infinite divided by infinite is not a number. So the row's
# largest score is subtracted first. Then the largest exponent is 0, and nothing overflows.
#
#     e_i = exp(z_i - max_k z_k)                                                         (15.1)
#     p_i = e_i / ∑_k e_k                                                                (15.2)
#
# The subtraction does not change p: any c drops out, since exp(-c) stands above and below.
#
#     exp(z_i - c) / ∑_k exp(z_k - c) = exp(-c) exp(z_i) / (exp(-c) ∑_k exp(z_k))
#                                     = exp(z_i) / ∑_k exp(z_k)                        † (15.3)
#
# A score of -∞ gets exactly probability 0. The largest score of a row must be finite.
#
#     z, e, p (H, T, T) = (2, 16, 16)       (2, 3, 3)     in attention, row by row

# %%
def softmax_forward(z):
    """Probabilities p along the last axis of the scores z, of the same shape (card 15)."""
    e = np.exp(z - z.max(axis=-1, keepdims=True))                           # (H, T, T)  (15.1)
    p = e / row_sums(e)                                                     # (H, T, T)  (15.2)
    return p


def demo_softmax():
    z = np.array([np.log([1.0, 2.0, 5.0]), [1000.0, 1001.0, 1003.0], [2.0, -np.inf, 1.0]])
    e = np.exp(z - z.max(axis=1, keepdims=True))                            # (3, 3)
    show_all(z=z, e=e)
    show("sums of e", e.sum(axis=-1))
    show("p", softmax_forward(z))
    print("the scores 0, 1, 3 give the p of 1000, 1001, 1003:")
    show("p", softmax_forward(np.array([0.0, 1.0, 3.0])))

if __name__ == "__main__": demo(demo_softmax)

# %% [markdown]
# ### 16. Softmax, backward
#
# Raise one score z_j and its own probability rises and each other one falls (those that are exactly
# 0 or 1 stay). The quotient rule says how, with s for ∑_k exp(z_k); the maximum drops out:
#
#     i = j:  ∂p_i/∂z_i = (exp(z_i) s - exp(z_i) exp(z_i)) / s² = p_i - p_i p_i
#     i ≠ j:  ∂p_i/∂z_j = (0 - exp(z_i) exp(z_j)) / s²          =     - p_i p_j
#
# With δ_ij, which is 1 for i = j and else 0, both lines are one:
#
#     ∂p_i/∂z_j = p_i (δ_ij - p_j)                                                     † (16.1)
#
# The chain rule adds up over all probabilities, since z_j touches each; then p_j is taken out:
#
#     dz_j = ∑_i dp_i p_i (δ_ij - p_j) = dp_j p_j - p_j ∑_i dp_i p_i
#     dz_j = p_j (dp_j - ∑_i p_i dp_i)                                                   (16.2)
#
# What counts is how far dp_j lies above the average under p, in which each dp_i has the weight p_i.
# So a gradient that is the same for all probabilities does nothing: they cannot all rise. And each
# row of dz sums to 0, the average less the average. Only the demo builds the matrix of 16.1, called
# a Jacobian. The backward pass needs p, not the scores.
#
#     dp, dz (H, T, T) = (2, 16, 16)        (2, 3, 3)

# %%
def softmax_backward(dp, p):
    """dz from dp = ∂loss/∂p and the output p, all of one shape (card 16)."""
    dz = p * (dp - row_sums(p * dp))                                        # (H, T, T)  (16.2)
    return dz


def demo_softmax_backward():
    p = np.array([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]])
    dp = np.array([[0.5, -1.0, 0.2], [2.0, 2.0, 2.0]])
    dz = softmax_backward(dp, p)
    show_all(p=p, dp=dp, digits=3)
    average = number((p * dp)[0].sum(), 3)
    print(f"average of dp under p in row 0: 0.1*0.5 + 0.2*(-1.0) + 0.7*0.2 = {average}")
    print(f"dz_00 = 0.1 * (0.5 - {average}) = {number(dz[0, 0], 3)}")
    show("dz", dz, digits=3)
    show("row sums", dz.sum(axis=-1), digits=3)
    matrix = p[0][:, None] * (np.eye(3) - p[0])                             # (3, 3)  as 16.1
    show("16.1", matrix, digits=3)
    show("dp @ 16.1", dp[0] @ matrix, digits=3)

if __name__ == "__main__": demo(demo_softmax_backward)

# %% [markdown]
# ### 17. Cross-entropy (forward)
#
# At each position the model gives one score, a logit, for each of the V tokens. The text says which
# token came next, the target y_t. The loss, called cross-entropy, is minus the log of the
# probability that the model gave to that token: 0 if it was certain and right, large if it found
# the token unlikely. The probability that all targets of a window come is the product of theirs,
# each given the ids before it, and its log is the sum of their logs. So a model with the smallest
# loss makes the text most probable: maximum likelihood.
#
#     z_tv = logits_tv - max_k logits_tk                                                 (17.1)
#     logp_tv = z_tv - log ∑_k exp(z_tk)                                                 (17.2)
#     loss = -(1/T) ∑_t logp[t, y_t]                                                     (17.3)
#     P_tv = exp(logp_tv)                                                                (17.4)
#
# 17.2 is the logarithm of the softmax, worked out: log(exp(z) / ∑ exp(z)) = z - log ∑ exp(z). The
# log of a finished softmax would be -∞ where a tiny probability was rounded to 0. In 17.2 it is
# merely a large negative number. 17.1 keeps exp from overflowing, as in card 15. 17.3 takes the
# mean over all positions. P is kept for the backward pass.
#
#     logits, z, logp, P (T, V) = (16, V)   (3, 10)
#     y (T,) = (16,)                        (3,)

# %%
def cross_entropy_forward(logits, y):
    """Mean loss and probabilities P (T, V), from logits (T, V) and T targets y (card 17)."""
    y, V = np.ravel(y), logits.shape[1]                                     # (T,)
    bad = y[y % V != y]
    if y.size == 0 or bad.size:
        raise BadInput(f"there must be targets, and all from 0 to {V - 1}, not {bad[:9]}")
    z = logits - logits.max(axis=1, keepdims=True)                          # (T, V)  (17.1)
    logp = z - np.log(row_sums(np.exp(z)))                                  # (T, V)  (17.2)
    loss = -float(logp[np.arange(y.size), y].mean())                        #         (17.3)
    P = np.exp(logp)                                                        # (T, V)  (17.4)
    return loss, P


def demo_cross_entropy():
    logits = np.log([[1.0, 2.0, 5.0], [6.0, 3.0, 1.0]])
    y = np.array([2, 1])
    loss, P = cross_entropy_forward(logits, y)
    show("logits", logits)
    show("y", y, digits=0)
    show("P", P)
    print(f"loss = -(log {P[0, 2]:.4f} + log {P[1, 1]:.4f}) / 2 = "
          f"({-math.log(P[0, 2]):.4f} + {-math.log(P[1, 1]):.4f}) / 2 = {loss:.4f}")
    far, _ = cross_entropy_forward(np.array([[1000.0, 0.0], [0.0, 0.0]]), np.array([1, 1]))
    print(f"logits 1000, 0 and 0, 0, targets the second: loss (1000 + log 2) / 2 = {far:.4f}")
    refused(cross_entropy_forward, logits, np.array([2, 3]))
    e = example(17)
    logits = e.X0 @ e.params["head_w"] + e.params["head_b"]
    loss, P = cross_entropy_forward(logits, e.y)
    print("the running example, X0 head_w + head_b; both stand in the demo of card 45:")
    show("logits", logits, digits=2)
    show("P", P)
    terms = " + ".join(f"log {p:.4f}" for p in P[[0, 1, 2], e.y])
    print(f"y = {e.y.tolist()}: loss = -({terms}) / 3 = {loss:.4f}")

if __name__ == "__main__": demo(demo_cross_entropy)

# %% [markdown]
# ### 18. Cross-entropy, backward
#
# Here the backward pass of the whole network begins. Write the loss of one position with the logits
# themselves. The maximum c cancels in 17.2: z holds -c, and so does the part that is taken off,
# since log ∑ exp(x - c) = -c + log ∑ exp(x).
#
#     loss_t = -logp[t, y_t] = -logits[t, y_t] + log ∑_k exp(logits_tk)
#
# The derivative of the first term by logits_tv is -1 if v is the target, else 0. The derivative of
# log ∑_k exp(logits_tk) is exp(logits_tv) divided by that sum, which is the softmax, P_tv.
#
#     ∂loss_t/∂logits_tv = P_tv - 1[v = y_t]                                           † (18.1)
#
# Each of T positions has 1/T of the loss. onehot(y) has a 1 in each row at its target, else zeros.
#
#     dlogits = (P - onehot(y)) / T                                                      (18.2)
#
# A step against this gradient pushes the target's logit up, in proportion to 1 - P, and every other
# logit down, in proportion to its P. Each row sums to 0. With a batch, T counts all positions.
#
#     P, dlogits (T, V) = (16, V)           (3, 10)

# %%
def cross_entropy_backward(P, y):
    """dlogits (T, V) from P (T, V) and the targets y, T ids in any shape (card 18)."""
    dlogits = P.copy()                                                      # (T, V)
    dlogits[np.arange(y.size), np.ravel(y)] -= 1                            # (T, V)
    dlogits /= y.size                                                       # (T, V)  (18.2)
    return dlogits


def demo_cross_entropy_backward():
    logits = np.log([[1.0, 2.0, 5.0], [6.0, 3.0, 1.0]])
    y = np.array([2, 1])
    loss, P = cross_entropy_forward(logits, y)
    dlogits = cross_entropy_backward(P, y)
    onehot = (np.arange(3) == y[:, None]).astype(int)
    show_all(P=P, onehot=onehot, dlogits=dlogits)
    show("row sums", dlogits.sum(axis=-1))
    print(f"dlogits_02 = ({P[0, 2]:.4f} - 1) / 2 = {dlogits[0, 2]:.4f}")
    lower, _ = cross_entropy_forward(logits - 0.1 * dlogits, y)
    show("new logits", logits - 0.1 * dlogits)
    print(f"after a step of 0.1 against dlogits: loss {loss:.4f} -> {lower:.4f}")

if __name__ == "__main__": demo(demo_cross_entropy_backward)

# %% [markdown]
# ### 19. Perplexity
#
# A model that guesses evenly among n tokens has the loss log n, so exp(loss) is the number of
# tokens among which an even guess would do as well. That number is called perplexity. Before
# training it is near V where the weights are small, since then all logits are nearly alike.
#
#     perplexity = exp(loss)                                                             (19.1)
#
# Take exp of the mean loss. The mean of the exponentials is larger unless all losses are equal.

# %%
def perplexity(loss):
    """The number of equally likely choices that a loss amounts to; inf past the largest float."""
    try:
        return math.exp(loss)                                               #         (19.1)
    except OverflowError:
        return math.inf


def demo_perplexity():
    for n in (1, 2, 10, 65):
        loss, _ = cross_entropy_forward(np.zeros((1, n)), np.array([n - 1]))
        print(f"an even guess among {n:2}: loss {number(loss, 4)}, "
              f"perplexity {number(perplexity(loss), 4)}")
    print(f"losses 1 and 3: exp of the mean {perplexity(2):.4f}, "
          f"mean of the exps {(perplexity(1) + perplexity(3)) / 2:.4f}")

if __name__ == "__main__": demo(demo_perplexity)

# %% [markdown]
# ### 20. LayerNorm (forward)
#
# As numbers pass through layer after layer, they tend to grow or shrink, and gradients with them.
# LayerNorm gives each row a standard size: it shifts the row to mean 0 and scales it to variance 1.
#
#     μ_t = (1/d) ∑_i X_ti                                                               (20.1)
#     σ²_t = (1/d) ∑_i (X_ti - μ_t)²                                                     (20.2)
#     s_t = 1 / √(σ²_t + ε)                                                              (20.3)
#     Xhat_ti = (X_ti - μ_t) s_t                                                         (20.4)
#     Y_ti = γ_i Xhat_ti + β_i                                                           (20.5)
#
# The variance divides by d, not by d - 1: the row is not a sample, it is all there is. ε is a tiny
# number that keeps a constant row, whose variance is 0, from a division by zero. The gain γ and the
# offset β are learned, so the network can choose another size and centre for each feature (column).
# Kept for the backward pass, in what is called a cache: Xhat, s and γ.
#
#     X, Xhat, Y (T, d) = (16, 32)          (3, 4)
#     mu, s (T, 1) = (16, 1)                (3, 1)
#     gamma, beta (d,) = (32,)              (4,)

# %%
EPS = 1e-5                                                                  # ε of 20.3


def layer_norm_forward(X, gamma, beta):
    """Y (T, d) and the cache for layer_norm_backward, from X (T, d) (card 20)."""
    mu = row_mean(X)                                                        # (T, 1)  (20.1)
    D = X - mu                                                              # (T, d)
    variance = row_mean(D * D)                                              # (T, 1)  (20.2)
    s = 1 / np.sqrt(variance + EPS)                                         # (T, 1)  (20.3)
    Xhat = D * s                                                            # (T, d)  (20.4)
    Y = gamma * Xhat + beta                                                 # (T, d)  (20.5)
    return Y, {"Xhat": Xhat, "s": s, "gamma": gamma}


def demo_layernorm():
    X = np.array([[2.0, 4.0, 4.0, 10.0], [0.1, 0.3, -0.2, 0.6]])
    gamma, beta = np.array([1.0, 0.5, 1.0, 2.0]), np.array([0.0, 0.1, -0.3, 0.0])
    Y, cache = layer_norm_forward(X, gamma, beta)
    Xhat, s = cache["Xhat"], cache["s"]
    show("X", X)
    print("row 0: mean (2 + 4 + 4 + 10) / 4 = 5, variance (9 + 1 + 1 + 25) / 4 = 9, ε 1e-5")
    show("s", s.T)
    show_all(Xhat=Xhat, gamma=gamma, beta=beta, Y=Y)
    show("variances", Xhat.var(axis=1))
    print("of the rows of Xhat, less than 1 because of ε; a constant row gives beta:")
    show("Y const", layer_norm_forward(np.full((1, 4), 7.0), gamma, beta)[0])
    e = example(20)
    Y, cache = layer_norm_forward(e.X0, e.block["ln1_g"], e.block["ln1_b"])
    show_all(X0=e.X0, ln1_g=e.block["ln1_g"], ln1_b=e.block["ln1_b"], Xhat=cache["Xhat"])
    show("LN1(X0)", Y)

if __name__ == "__main__": demo(demo_layernorm)

# %% [markdown]
# ### 21. Deriving the backward formula
#
# The input X_tj enters its row of the output directly, through the mean, and through the variance.
#
# First, undo the gain. In 20.5 each Y_ti depends on one Xhat_ti, with factor γ_i:
#
#     ∂loss/∂Xhat_ti = ∂loss/∂Y_ti · ∂Y_ti/∂Xhat_ti = dY_ti γ_i = dXhat_ti             † (21.1)
#
# Second, the mean. It is a sum of d terms divided by d, and X_tj is one of them:
#
#     ∂μ_t/∂X_tj = 1/d                                                                 † (21.2)
#
# Third, the variance. The derivative of a square is twice the inside times the derivative of the
# inside. X_ti - μ_t changes with X_tj by δ_ij directly and by -1/d through the mean:
#
#     ∂σ²_t/∂X_tj = (2/d) ∑_i (X_ti - μ_t)(δ_ij - 1/d) = (2/d)(X_tj - μ_t)             † (21.3)
#
# The sum splits into two. With δ_ij only i = j is left, which gives X_tj - μ_t. With 1/d the sum is
# (1/d) ∑_i (X_ti - μ_t), and deviations from the mean add up to 0.
#
# Fourth, s = (σ² + ε)^(-1/2). The power rule, then 21.3; s³ = (σ² + ε)^(-3/2) takes ε along:
#
#     ∂s_t/∂X_tj = -(1/2)(σ²_t + ε)^(-3/2) (2/d)(X_tj - μ_t) = -(1/d) s³_t (X_tj - μ_t)
#                                                                                      † (21.4)
#
# Fifth, Xhat_ti = (X_ti - μ_t) s_t is a product in which both factors vary. The first factor gives
# s_t (δ_ij - 1/d), the second (X_ti - μ_t) times 21.4. In the second term, two factors s_t turn the
# two deviations into Xhat_ti and Xhat_tj, and one factor s_t is left to be taken out:
#
#     ∂Xhat_ti/∂X_tj = s_t (δ_ij - 1/d) + (X_ti - μ_t) ∂s_t/∂X_tj
#                    = s_t (δ_ij - 1/d - (1/d) Xhat_ti Xhat_tj)                        † (21.5)
#
# Sixth, the chain rule adds up what X_tj does to its row. The three terms of 21.5 give three sums:
#
#     dX_tj = ∑_i dXhat_ti ∂Xhat_ti/∂X_tj
#           = s_t (dXhat_tj - (1/d) ∑_i dXhat_ti - Xhat_tj (1/d) ∑_i dXhat_ti Xhat_ti)
#                                                                                      † (21.6)
#
# Last, gain and offset. They enter 20.5 directly, and every row shares them:
#
#     ∂Y_ti/∂γ_i = Xhat_ti,  ∂Y_ti/∂β_i = 1                                            † (21.7)
#
# In 21.6 the last two sums, divided by d, are means. The first takes away the part of the gradient
# that would shift the whole row, the second the part that would stretch it along Xhat. LayerNorm
# undoes both, but for ε.
#
# Shapes at the default sizes: the matrix of 21.5 is (d, d) = (32, 32) for each row.

# %%
def demo_layernorm_derivation():
    x, dY = np.array([2.0, 4.0, 4.0, 10.0]), np.array([0.0, 1.0, 0.0, -1.0])
    d, h = 4, 1e-5
    norm = lambda row: layer_norm_forward(row[None], np.ones(d), np.zeros(d))[0][0]
    mu, s, Xhat = x.mean(), 1 / math.sqrt(x.var() + EPS), norm(x)
    matrix = s * (np.eye(d) - 1 / d - Xhat[:, None] * Xhat / d)             # (4, 4)  as 21.5
    print(f"row 2 4 4 10: mean {mu:.0f}, variance {x.var():.0f}, s = {s:.4f}; gain 1, offset 0")
    show_all(Xhat=Xhat, dY=dY)
    print("by each x_j; measured: (f(x + h) - f(x - h)) / 2h, with h = 0.00001 for x_j")
    for tag, formula, f in (("21.2", np.full(d, 1 / d), np.mean),
                            ("21.3", 2 / d * (x - mu), np.var),
                            ("21.4", -s**3 * (x - mu) / d, lambda x: 1 / np.sqrt(x.var() + EPS)),
                            ("21.5", matrix, norm),
                            ("21.6", dY @ matrix, lambda x: dY @ norm(x))):
        show(tag, formula)
        show("measured", np.array([(f(x + e) - f(x - e)) / (2 * h) for e in h * np.eye(d)]).T)

if __name__ == "__main__": demo(demo_layernorm_derivation)

# %% [markdown]
# ### 22. LayerNorm, backward
#
# The result of the derivation. The means run along a row, the sums for γ and β over the rows.
#
#     dXhat_ti = dY_ti γ_i                                                               (22.1)
#     dX_tj = s_t (dXhat_tj - mean_i(dXhat_ti) - Xhat_tj mean_i(dXhat_ti Xhat_ti))       (22.2)
#     dγ_i = ∑_t dY_ti Xhat_ti                                                           (22.3)
#     dβ_i = ∑_t dY_ti                                                                   (22.4)
#
# Each row of dX sums to 0, because shifting a row changes nothing.
#
#     dY, dXhat, dX (T, d) = (16, 32)       (3, 4)
#     dgamma, dbeta (d,) = (32,)            (4,)

# %%
def layer_norm_backward(dY, cache):
    """dX (T, d), dgamma (d,), dbeta (d,) from dY (T, d) (card 22)."""
    Xhat, s, gamma = cache["Xhat"], cache["s"], cache["gamma"]
    dXhat = dY * gamma                                                      # (T, d)  (22.1)
    dX = s * (dXhat - row_mean(dXhat) - Xhat * row_mean(dXhat * Xhat))      # (T, d)  (22.2)
    dgamma = column_sums(dY * Xhat)                                         # (d,)    (22.3)
    dbeta = column_sums(dY)                                                 # (d,)    (22.4)
    return dX, dgamma, dbeta


def demo_layernorm_backward():
    X = np.array([[2.0, 4.0, 4.0, 10.0], [0.1, 0.3, -0.2, 0.6]])
    gamma, beta = np.array([1.0, 0.5, 1.0, 2.0]), np.array([0.0, 0.1, -0.3, 0.0])
    dY = np.array([[0.1, 1.0, 0.2, -0.5], [0.3, -0.2, 0.4, 0.7]])
    _, cache = layer_norm_forward(X, gamma, beta)
    dX, dgamma, dbeta = layer_norm_backward(dY, cache)
    Xhat, dXhat = cache["Xhat"], dY * gamma
    print("Xhat, s and gamma are those of the first part of demo 20")
    show_all(dY=dY, dXhat=dXhat)
    print("means of dXhat and of dXhat ⊙ Xhat, row 0 and row 1:")
    show("dXhat", dXhat.mean(axis=1))
    show("⊙ Xhat", (dXhat * Xhat).mean(axis=1))
    show("dX", dX)
    show("row sums", dX.sum(axis=1))
    show_all(dgamma=dgamma, dbeta=dbeta)

if __name__ == "__main__": demo(demo_layernorm_backward)

# %% [markdown]
# ### 23. Xavier uniform initialisation
#
# Weights must start out random. If all entries of every matrix started equal, all columns of
# `ff1_w`, say, would get the same gradient at every step and stay equal. Let fan_in be the number
# of rows of W and fan_out the number of columns. An entry of X W is a sum of fan_in products x w.
# Take x and w as random, independent, with mean 0; the variance is then the mean of the square. The
# mean of x² w² is the mean of x² times the mean of w², so a product has variance Var(x) Var(w), and
# the sum of independent ones has fan_in Var(x) Var(w). To keep the size of the signal going
# forward, Var(w) should be 1/fan_in. Going backward, dX = dY Wᵀ sums over fan_out numbers, which
# asks for 1/fan_out. The variance is put between them: 2 / (fan_in + fan_out).
#
# A uniform distribution U[-wmax, wmax] gives each number between -wmax and wmax the same chance.
# Its variance is the integral of w² from -wmax to wmax, which is 2 wmax³/3, divided by the length 2
# wmax. That is wmax²/3; set to the wanted variance, it gives wmax. ~ means 'drawn from'.
#
#     wmax = √(6 / (fan_in + fan_out))                                                   (23.1)
#     W_ij ~ U[-wmax, wmax]                                                              (23.2)
#     Var(W_ij) = wmax²/3 = 2 / (fan_in + fan_out)                                     † (23.3)
#
#     W (d, F) = (32, 128)                  (4, 6)        for the first matrix of card 39

# %%
def xavier_uniform(rng, fan_in, fan_out):
    """A random matrix W (fan_in, fan_out) in float64 (card 23)."""
    wmax = math.sqrt(6 / (fan_in + fan_out))                                #         (23.1)
    W = rng.uniform(-wmax, wmax, (fan_in, fan_out))                         # (d, F)  (23.2)
    return W


def demo_xavier():
    for fan_in, fan_out in ((4, 5), (32, 128)):
        W = xavier_uniform(np.random.default_rng(3), fan_in, fan_out)
        wmax = math.sqrt(6 / (fan_in + fan_out))
        print(f"{fan_in} rows, {fan_out} columns: wmax = sqrt(6 / {fan_in + fan_out}) = {wmax:.4f}")
        print(f"  smallest {W.min():.4f}, largest {W.max():.4f}")
        print(f"  variance: wanted {2 / (fan_in + fan_out):.4f}, "
              f"mean of the {W.size} squares {(W * W).mean():.4f}")
    show("W", xavier_uniform(np.random.default_rng(3), 4, 5))

if __name__ == "__main__": demo(demo_xavier)

# %% [markdown]
# ### Exercises of chapter 3
#
# - **3a.** Make db a mean: divide `column_sums(dY)` in 12.3 by `len(dY)`. Then run
#   `python tinygpt.py gradcheck`. Which arrays are wrong, and why is bk not among them?
# - **3b.** Leave the maximum out of 15.1: write `np.exp(z)`. Which golden files change, and why?
# - **3c.** Write GELU as a new card, number 62, before the exercises of chapter 10. GPT-2 uses
#   gelu(x) = x/2 · (1 + tanh u) with u = √(2/π) (x + 0.044715 x³). Derive its backward pass, then
#   write both functions. (The slope of tanh u is 1 - tanh² u.)

# %% [markdown]
# ## Chapter 4. Embeddings
#
# An id is a name, not a quantity: token 7 is not more than token 6. So each token gets a row of d
# numbers of its own, which training can place where it likes, near the rows of tokens that behave
# alike. Such a row is called an embedding.

# %% [markdown]
# ### 24. Token embedding (forward)
#
# The token table E, in code `tok_emb`, has one row for each token of the vocabulary. Looking up the
# ids of a window gives one row for each position.
#
#     (E[ids])_t = E_(i_t),  i_t = ids[t]                                                (24.1)
#
# NumPy would take a negative id and count from the end of the table, so ids are checked first.
#
#     ids (T,) = (16,)                      (3,)
#     tok_emb (V, d) = (V, 32)              (10, 4)
#     token_rows (T, d) = (16, 32)          (3, 4)

# %%
def token_embedding(tok_emb, ids):
    """Rows (T, d) of the table (V, d) for ids (T,); ValueError for other ids (card 24)."""
    V = len(tok_emb)
    if ids.size and (ids.min() < 0 or ids.max() >= V):
        raise BadInput(f"ids must be from 0 to {V - 1}, got {ids.min()} to {ids.max()}")
    token_rows = tok_emb[ids]                                               # (T, d)  (24.1)
    return token_rows


def demo_token_embedding():
    e = example(24)
    for i, (token, row) in enumerate(zip(e.tokenizer.itos, e.params["tok_emb"])):
        show(f"{i} {token!r}", row, digits=1)
    print(f"window x = {e.x.tolist()} = {[e.tokenizer.itos[i] for i in e.x]}")
    show("E[x]", token_embedding(e.params["tok_emb"], e.x), digits=1)
    refused(token_embedding, e.params["tok_emb"], np.array([-1, 9]))

if __name__ == "__main__": demo(demo_token_embedding)

# %% [markdown]
# ### 25. Positional embedding (forward)
#
# A single attention, the subject of the next chapter, does not notice if the rows before a position
# change places. But "dog bites man" is not "man bites dog". So each position gets a row too, from
# the position table Pos, in code `pos_emb`, and the rows are learned like those of the tokens.
#
#     (Pos[:T])_t = Pos_t,  t = 0, ..., T-1                                              (25.1)
#
# Pos_t is row t. The position counts from the start of the window, not of the text. Tmax is the
# longest sequence that the model accepts, and T the length of its training windows, which may be
# smaller. Then the rows from T on are never trained. They hold nothing but their random start,
# shrunk by weight decay (card 50), and must not be read when the model writes (card 61).
#
#     pos_emb (Tmax, d) = (32, 32)          (5, 4)
#     position_rows (T, d) = (16, 32)       (3, 4)

# %%
def position_embedding(pos_emb, T):
    """The first T rows (T, d) of the table (Tmax, d) (card 25)."""
    position_rows = pos_emb[:T]                                             # (T, d)  (25.1)
    return position_rows


def demo_position_embedding():
    e = example(25)
    show("Pos", e.params["pos_emb"], digits=1)
    for T in (3, 2):
        show(f"Pos[:{T}]", position_embedding(e.params["pos_emb"], T), digits=1)
    print("Tmax = 5, T = 3: rows 3 and 4 are never trained")

if __name__ == "__main__": demo(demo_position_embedding)

# %% [markdown]
# ### 26. Embedding sum (forward)
#
# What a token is and where it stands are two facts about one position, and both go into one row:
# they are added. Training can keep the two apart by using different directions for them.
#
#     X(0)_t = E_(i_t) + Pos_t                                                         † (26.1)
#     X(0) = E[ids] + Pos[:T]                                                            (26.2)
#
# X(0), in code X0, is the input of block 0.
#
#     ids (T,) = (16,)                      (3,)
#     X0 (T, d) = (16, 32)                  (3, 4)

# %%
def embed_forward(params, ids):
    """X0 (T, d) for ids (T,), or (B·T, d) for (B, T): token rows plus position rows (card 26)."""
    token_rows = token_embedding(params["tok_emb"], ids)                    # (T, d)
    position_rows = position_embedding(params["pos_emb"], ids.shape[-1])    # (T, d)
    X0 = token_rows + position_rows                                         # (T, d)  (26.2)
    return X0.reshape(-1, X0.shape[-1])             # the windows of a batch one below the other


def demo_embedding_sum():
    e = example(26)
    X0 = embed_forward(e.params, e.x)
    show("E[x]", token_embedding(e.params["tok_emb"], e.x), digits=1)
    show("Pos[:3]", position_embedding(e.params["pos_emb"], 3), digits=1)
    show("X0", X0, digits=1)
    again = embed_forward(e.params, np.array([e.x[0], e.x[0]]))
    print(f"the token {e.tokenizer.itos[e.x[0]]!r} at positions 0 and 1 gives different rows:")
    show("X0", again, digits=1)

if __name__ == "__main__": demo(demo_embedding_sum)

# %% [markdown]
# ### 27. Embedding backward
#
# A table entry E_vj is copied to each position that shows token v. The chain rule adds those up:
#
#     ∂loss/∂E_vj = ∑_t dX(0)_tj ∂X(0)_tj/∂E_vj,  ∂X(0)_tj/∂E_vj = 1 if i_t = v else 0 † (27.1)
#     dE_v = ∑ dX(0)_t over all t with i_t = v                                           (27.2)
#     dPos_t = dX(0)_t if t < T else 0                                                   (27.3)
#
# Here hides a trap. `dE[ids] += dX0` looks right, but with an id that occurs twice, NumPy reads the
# old row twice, adds once to each copy and writes one over the other: a contribution is lost.
# `np.add.at` adds one row after the other.
#
# The position row Pos_t is added at position t only, so it gets dX(0)_t. With a batch, a token row
# collects from all windows, and a position row from the same position of all windows: there the
# tall matrix is seen as its windows again. Rows that no position used get exactly 0.
#
#     dX0 (T, d) = (16, 32)                 (3, 4)
#     d_tok_emb (V, d) = (V, 32)            (10, 4)
#     d_pos_emb (Tmax, d) = (32, 32)        (5, 4)

# %%
def embed_backward(dX0, ids, params):
    """d_tok_emb (V, d) and d_pos_emb (Tmax, d) from dX0 (T, d) and the ids (T,) (card 27)."""
    T, d = ids.shape[-1], dX0.shape[1]
    d_tok_emb = np.zeros_like(params["tok_emb"])                            # (V, d)
    np.add.at(d_tok_emb, ids.ravel(), dX0)                                  # (V, d)     (27.2)
    d_pos_emb = np.zeros_like(params["pos_emb"])                            # (Tmax, d)
    d_pos_emb[:T] = dX0.reshape(-1, T, d).sum(axis=0)                       # (Tmax, d)  (27.3)
    return d_tok_emb, d_pos_emb


def demo_embedding_backward():
    ids = np.array([[2, 0, 2], [2, 1, 0]])
    dX0 = np.array([[1.0, 0.5], [2.0, 0.1], [4.0, 0.2], [8.0, 0.3], [16.0, 0.4], [32.0, 0.6]])
    params = {"tok_emb": np.zeros((4, 2)), "pos_emb": np.zeros((5, 2))}
    d_tok_emb, d_pos_emb = embed_backward(dX0, ids, params)
    show("ids", ids)
    print("rows 0 to 2 belong to the first window, rows 3 to 5 to the second:")
    show_all(dX0=dX0, d_tok_emb=d_tok_emb, digits=1)
    print("token 2 stands in three places: 1 + 4 + 8 = 13; token 3 in none")
    show("d_pos_emb", d_pos_emb, digits=1)
    print("position 1 in two windows: 2 + 16 = 18; rows 3 and 4 in none")
    wrong = np.zeros((4, 2))
    wrong[ids.ravel()] += dX0
    show("dE[ids] +=", wrong, digits=1)
    print("the last table is wrong: for a repeated id only the last place counts")

if __name__ == "__main__": demo(demo_embedding_backward)

# %% [markdown]
# ### Exercises of chapter 4
#
# - **4a.** Write `d_tok_emb[ids.ravel()] += dX0` for the line of 27.2. Which golden files change?
#   Why does card 49 not notice, and why does `python tinygpt.py gradcheck`?
# - **4b.** Take the position rows out of 26.2. With one block, what does the last row of logits say
#   about the order of the tokens before it? And with two blocks?

# %% [markdown]
# ## Chapter 5. Attention
#
# So far each position knows only its own token and place. To predict what comes after "the sea", a
# position must look back at others. Attention is that look: each position asks a question, compares
# it with a label that every position up to itself offers, and takes a mixture of what those
# positions have to say, weighted by how well the labels fit. Question, label and content are each
# what a linear layer makes of the position's own row, so they can be learned. The way through the
# chapter, with the names at each place:
#
#     Xn ─┬─ Wq, bq ─ Q ─ Qh ─┐
#         ├─ Wk, bk ─ K ─ Kh ─┴─ S ─ A ─┐
#         └─ Wv, bv ─ V ─ Vh ───────────┴─ Oh ─ O ─ Wo, bo ─ out

# %% [markdown]
# ### 28. Q, K, V projections (forward)
#
# Three linear layers, in this place called projections, read the same rows Xn and give each
# position three rows: a query Q (what do I look for?), a key K (what do I offer for matching?) and
# a value V (what do I pass on?). To ask, to be found and to answer are three different things: a
# verb may look for its subject, but it does not answer like one. Card 41 makes Xn from X.
#
#     Q = Xn Wq + 1 bqᵀ                                                                  (28.1)
#     K = Xn Wk + 1 bkᵀ                                                                  (28.2)
#     V = Xn Wv + 1 bvᵀ                                                                  (28.3)
#
# From here to card 38, V is this matrix of values and not the size of the vocabulary.
#
#     Xn, Q, K, V (T, d) = (16, 32)         (3, 4)
#     wq, wk, wv (d, d) = (32, 32)          (4, 4)
#     bq, bk, bv (d,) = (32,)               (4,)

# %%
def project_qkv(Xn, block):
    """Queries, keys and values, each (T, d), of the rows Xn (T, d) (card 28)."""
    Q = linear_forward(Xn, block["wq"], block["bq"])                        # (T, d)  (28.1)
    K = linear_forward(Xn, block["wk"], block["bk"])                        # (T, d)  (28.2)
    V = linear_forward(Xn, block["wv"], block["bv"])                        # (T, d)  (28.3)
    return Q, K, V


def demo_qkv():
    e = example(28)
    print("Xn is LN1(X0) of demo 20")
    show("Xn", e.Xn)
    for name in ("wq", "wk", "wv", "bq", "bk", "bv"):
        show(name, e.block[name], digits=1)
    Q, K, V = project_qkv(e.Xn, e.block)
    show_all(Q=Q, K=K, V=V)
    terms = " + ".join(f"({number(x, 4)})({number(w, 1)})"
                       for x, w in zip(e.Xn[0], e.block["wq"][:, 1]))
    print(f"Q_01 = {terms}\n       + ({number(e.block['bq'][1], 1)}) = {number(Q[0, 1], 4)}")

if __name__ == "__main__": demo(demo_qkv)

# %% [markdown]
# ### 29. Heads (forward)
#
# One mixture per position is little: a word may want its verb and its adjective at once. So the
# width is shared out among H heads; this is multi-head attention. Each head works on its own hs
# columns of Q, K and V and gets its own mixture, with no more parameters than a single head has.
#
#     hs = d / H,  d mod H = 0                                                           (29.1)
#     M(h)[t, c] = M[t, h·hs + c]                                                        (29.2)
#
# `mod` is the remainder of a division: the width must be a multiple of H. Heads are numbered from
# 0; M stands for Q, K or V, and M(h) for the columns of head h, h hs to (h + 1) hs - 1.
#
#     M (T, d) = (16, 32)                   (3, 4)
#     head (T, hs) = (16, 16)               (3, 2)

# %%
def head_size(d, heads):
    """hs = d / H; ValueError where that is not a whole number (card 29)."""
    if heads < 1 or d % heads:
        raise BadInput(f"width {d} cannot be shared by {heads} heads: make it a multiple of them")
    return d // heads                                                       #         (29.1)


def head_columns(M, heads, h):
    """The columns (T, hs) of M (T, d) that belong to head h (card 29)."""
    hs = head_size(M.shape[1], heads)
    head = M[:, h * hs:(h + 1) * hs]                                        # (T, hs)  (29.2)
    return head


def demo_heads():
    e = example(29)
    print(f"d = 4, H = 2: hs = {head_size(4, 2)}")
    show("Q", e.Q)
    for h in range(2):
        show(f"Q({h})", head_columns(e.Q, 2, h))
    print(f"Q(1)[2, 0] = Q[2, 1*2 + 0] = {e.Q[2, 2]:.4f}")
    M = np.arange(12).reshape(2, 6)
    show("M", M)
    for h in range(3):
        show(f"M({h})", head_columns(M, 3, h))
    refused(head_size, 6, 4)

if __name__ == "__main__": demo(demo_heads)

# %% [markdown]
# ### 30. Splitting into heads (forward)
#
# To let one call serve all heads, the heads become an axis of their own, in front of the positions.
#
#     Qh, Kh, Vh = split(Q, H), split(K, H), split(V, H)                                 (30.1)
#
# Here, in its inverse in card 36 and in the embeddings, a tall matrix is seen as its windows of T
# rows. The reshape cuts the rows into windows and each row into H pieces of hs numbers, (T, d) to
# (T, H, hs): that is 29.2. The swap of axes brings the head to the front. Reshaping straight to (H,
# T, hs) would give the right shape and wrong contents: positions would be dealt out to the heads,
# where columns are meant. The axis of the windows stands in front of all; shapes leave it out.
#
#     M        columns 0 1 | 2 3         Mh       head 0: 0 1    head 1: 2 3
#     row 0            a b | c d         row 0            a b            c d
#     row 1            e f | g h         row 1            e f            g h
#
#     M (T, d) = (16, 32)                   (3, 4)
#     pieces (T, H, hs) = (16, 2, 16)       (3, 2, 2)
#     Mh (H, T, hs) = (2, 16, 16)           (2, 3, 2)

# %%
def split_heads(M, heads, T):
    """(B·T, d), or (T, d) for one window, to (B, H, T, hs) (cards 29 and 30)."""
    d = M.shape[1]
    pieces = M.reshape(-1, T, heads, head_size(d, heads))                   # (T, H, hs)  (29.2)
    Mh = pieces.swapaxes(1, 2)                                              # (H, T, hs)  (30.1)
    return Mh


def demo_split_heads():
    M = np.arange(12).reshape(3, 4)
    show("M", M)
    [Mh] = split_heads(M, 2, 3)
    for h in range(2):
        show(f"Mh[{h}]", Mh[h])
        print(f"{'':10}the same as card 29: {np.array_equal(Mh[h], head_columns(M, 2, h))}")
    show("reshape", M.reshape(2, 3, 2))
    print("reshape alone mixes positions: its first head has row 0 and half of row 1")
    e = example(30)
    show("Qh", split_heads(e.Q, 2, 3)[0])

if __name__ == "__main__": demo(demo_split_heads)

# %% [markdown]
# ### 31. Scores (forward)
#
# How well does key j fit query i? Multiply them number by number and add up. This dot product is
# positive where the two rows, seen as arrows, make an angle below 90 degrees, and negative above.
# All pairs of a head are one matrix product, with K turned on its side:
#
#     QK = Qh Khᵀ,  QK_ij = ∑_c (Qh)_ic (Kh)_jc                                          (31.1)
#
# Row i is the position that asks, column j the one that is asked; c runs over the hs columns of one
# head. The ᵀ of Khᵀ swaps the last two axes only; `.T` in NumPy would reverse all of them.
#
#     Qh, Kh (H, T, hs) = (2, 16, 16)       (2, 3, 2)
#     QK (H, T, T) = (2, 16, 16)            (2, 3, 3)

# %%
def scores(Qh, Kh):
    """Dot products (H, T, T) of all queries and keys (H, T, hs) (card 31)."""
    QK = Qh @ Kh.swapaxes(-1, -2)                                           # (H, T, T)  (31.1)
    return QK


def demo_scores():
    e = example(31)
    [Qh], [Kh], [QK] = e.Qh, e.Kh, scores(e.Qh, e.Kh)
    print("Q and K of demo 28, split")
    show_all(Qh=Qh, Kh=Kh, QK=QK)
    q, k = Qh[0, 1], Kh[0, 2]
    print(f"head 0, query 1, key 2: ({q[0]:.4f})({k[0]:.4f}) + ({q[1]:.4f})({k[1]:.4f})"
          f" = {QK[0, 1, 2]:.4f}")

if __name__ == "__main__": demo(demo_scores)

# %% [markdown]
# ### 32. Scaling by sqrt(d_h) (forward)
#
# A dot product over hs columns is a sum of hs products. Take the numbers as random, independent,
# with mean 0, so that the mean of their squares is the variance; let it be 1. Then each product has
# variance 1 · 1, their variances add up, and the sum has variance hs: wider heads give larger
# scores. Large differences make softmax nearly certain of one key. There every p_i is near 0 or 1,
# and by 16.1 all its derivatives are near 0, so queries and keys hardly learn. Dividing by √hs, the
# root of the variance, brings the scores back to size 1: scaled dot-product attention.
#
#     S = Qh Khᵀ / √hs                                                                   (32.1)
#
# It is the root of hs, in the title d_h, and not of d. `math.sqrt` gives a Python float, which
# leaves float32 in float32; in 38.8 the scalar of np.sqrt would not, from NumPy 2 on.
#
#     Qh (H, T, hs) = (2, 16, 16)           (2, 3, 2)
#     S (H, T, T) = (2, 16, 16)             (2, 3, 3)

# %%
def scaled_scores(Qh, Kh):
    """Scores (H, T, T) of standard size (card 32)."""
    S = scores(Qh, Kh)                                                      # (H, T, T)
    S /= math.sqrt(Qh.shape[-1])                                            # (H, T, T)  (32.1)
    return S


def demo_scaling():
    Qh, Kh = np.array([[[1.0, 1.0, 0.0, 2.0]]]), np.array([[[2.0, 0.0, 1.0, 1.0]]])
    print(f"q = 1 1 0 2, k = 2 0 1 1: q·k = {scores(Qh, Kh).item():.4f}, "
          f"hs = 4, scaled {scaled_scores(Qh, Kh).item():.4f}")
    rng = np.random.default_rng(2)
    print("random numbers of mean 0 and variance 1:")
    for hs in (4, 64):
        q, k = (math.sqrt(3) * (2 * rng.random((200, hs)) - 1) for _ in range(2))
        print(f"hs = {hs:2}: root of the variance of the scores "
              f"{scores(q, k).std():.2f}, scaled {scaled_scores(q, k).std():.2f}")
    e = example(32)
    print("the running example, hs = 2:")
    show_all(QK=scores(e.Qh, e.Kh)[0], S=scaled_scores(e.Qh, e.Kh)[0])

if __name__ == "__main__": demo(demo_scaling)

# %% [markdown]
# ### 33. Causal mask (forward)
#
# At position i the model must predict token i + 1. If it could look at position i + 1, it would
# simply copy the answer, and learn nothing. So a query may only look at keys up to its own
# position; attention with this mask is called causal, and self-attention since queries, keys and
# values all come from one text. The scores of later ones are replaced by -∞.
#
#     S_ij ← S_ij if j ≤ i else -∞                                                       (33.1)
#
# Why -∞ and not 0? The mask comes before softmax, where a score of 0 is an ordinary score. Only -∞
# is sure to get exactly probability 0. The diagonal j = i stays, so every row keeps a finite score.
#
# The code adds a matrix that is 0 where j ≤ i and -∞ elsewhere, which `np.triu(..., 1)` leaves
# above the diagonal. It is the same for all heads and windows, made once for each T, and read-only.
#
#     S (H, T, T) = (2, 16, 16)             (2, 3, 3)
#     mask (T, T) = (16, 16)                (3, 3)

# %%
@cache
def causal_mask(T, dtype):
    """A matrix (T, T) to be added to the scores: 0 where j ≤ i, -inf where j > i (card 33)."""
    mask = np.triu(np.full((T, T), -np.inf, dtype), 1)                      # (T, T)
    mask.flags.writeable = False
    return mask


def demo_causal_mask():
    e = example(33)
    show_all(S=e.S[0], mask=causal_mask(3, e.S.dtype))
    show("masked", e.S[0] + causal_mask(3, e.S.dtype))                      # (2, 3, 3)  (33.1)
    print("row i of a head keeps its keys 0 to i: 1, 2 and 3 of them")

if __name__ == "__main__": demo(demo_causal_mask)

# %% [markdown]
# ### 34. Softmax per row (forward)
#
# Each query has a total attention of 1 to give, and softmax shares it out over the keys.
#
#     A = softmax(S),  ∑_j A_ij = 1                                                      (34.1)
#     exp(-∞) = 0  ⇒  A_ij = 0 for j > i                                               † (34.2)
#
# A is the matrix of attention weights: row i says how query i shares its attention. Row 0 is 1, 0,
# ..., 0: the first position can only look at itself.
#
#     S, A (H, T, T) = (2, 16, 16)          (2, 3, 3)

# %%
def attention_weights(S):
    """Weights A (H, T, T) of scores S (H, T, T), none for later keys (cards 33 and 34)."""
    S = S + causal_mask(S.shape[-1], S.dtype)                               # (H, T, T)  (33.1)
    A = softmax_forward(S)                                                  # (H, T, T)  (34.1)
    return A


def demo_attention_softmax():
    S = np.array([[0.0, 7.0, 9.0], np.log([1.0, 4.0, 99.0]), np.log([2.0, 1.0, 5.0])])
    show_all(S=S, A=attention_weights(S))
    print("exp of row 1 is 1, 4: parts of 5; exp of row 2 is 2, 1, 5: parts of 8")
    e = example(34)
    [A] = attention_weights(e.S)
    print("the running example, with S of demo 33:")
    show("A", A)
    show("row sums", A.sum(axis=-1))

if __name__ == "__main__": demo(demo_attention_softmax)

# %% [markdown]
# ### 35. Weighted values (forward)
#
# Each head mixes its values by its weights. The result is called Oh, the output of the heads.
#
#     Oh = A Vh                                                                          (35.1)
#     (Oh)_i = ∑_(j≤i) A_ij (Vh)_j                                                     † (35.2)
#
# The code sums over all j; the terms with j > i vanish, because those weights are exactly 0. So
# what position i gets depends on tokens 0 to i and on nothing later.
#
#     A (H, T, T) = (2, 16, 16)             (2, 3, 3)
#     Vh, Oh (H, T, hs) = (2, 16, 16)       (2, 3, 2)

# %%
def weighted_values(A, Vh):
    """Oh (H, T, hs): the values Vh mixed by the weights A (H, T, T) (card 35)."""
    Oh = A @ Vh                                                             # (H, T, hs)  (35.1)
    return Oh


def demo_weighted_values():
    e = example(35)
    [A], [Vh], [Oh] = e.A, e.Vh, weighted_values(e.A, e.Vh)
    print("A of demo 34, and V of demo 28, split")
    show_all(A=A, Vh=Vh, Oh=Oh)
    terms = " + ".join(f"({number(a, 4)})({number(v, 4)})" for a, v in zip(A[0, 2], Vh[0, :, 1]))
    print(f"head 0, position 2, column 1:\n  {terms} = {number(Oh[0, 2, 1], 4)}")

if __name__ == "__main__": demo(demo_weighted_values)

# %% [markdown]
# ### 36. Merging heads (forward)
#
# The results of the heads are put side by side again, each in the columns of its head.
#
#     O = merge(A Vh) = [A(0) V(0), ..., A(H-1) V(H-1)]                                  (36.1)
#
# A(h) is the matrix of head h, V(h) its values. It undoes card 30: swap the axes, join the pieces.
#
#     Mh (H, T, hs) = (2, 16, 16)           (2, 3, 2)
#     pieces (T, H, hs) = (16, 2, 16)       (3, 2, 2)
#     M (T, d) = (16, 32)                   (3, 4)

# %%
def merge_heads(Mh):
    """(B, H, T, hs) to (B·T, d), the inverse of split_heads (card 36)."""
    B, H, T, hs = Mh.shape
    pieces = Mh.swapaxes(1, 2)                                              # (T, H, hs)
    M = pieces.reshape(B * T, H * hs)                                       # (T, d)  (36.1)
    return M


def demo_merge_heads():
    M = np.arange(12).reshape(3, 4)
    Mh = split_heads(M, 2, 3)
    print("the M of demo 30, split, and what merging makes of it")
    show_all(Mh=Mh[0], merged=merge_heads(Mh), reshape=Mh.reshape(3, 4))
    print("reshape alone puts numbers of different positions into one row")
    e = example(36)
    Oh = weighted_values(e.A, e.Vh)
    print("the running example, Oh of demo 35:")
    show_all(Oh=Oh[0], O=merge_heads(Oh))

if __name__ == "__main__": demo(demo_merge_heads)

# %% [markdown]
# ### 37. Output projection (forward)
#
# So far no head has seen another: each filled its own columns. A last linear layer combines them.
#
#     out = O Wo + 1 boᵀ                                                                 (37.1)
#
# Now all of attention can be written down. It reads like the cards 28 to 37 in order. Kept for the
# backward pass are the arrays that its equations will use: Xn, Qh, Kh, Vh, A and O.
#
#     Xn, O, out (T, d) = (16, 32)          (3, 4)

# %%
def attention_forward(Xn, block, heads, T):
    """out (T, d) and the cache for attention_backward, from the rows Xn (T, d) (card 37)."""
    Q, K, V = project_qkv(Xn, block)                                        # (T, d)
    Qh, Kh, Vh = (split_heads(M, heads, T) for M in (Q, K, V))              # (H, T, hs)  (30.1)
    S = scaled_scores(Qh, Kh)                                               # (H, T, T)
    A = attention_weights(S)                                                # (H, T, T)
    Oh = weighted_values(A, Vh)                                             # (H, T, hs)
    O = merge_heads(Oh)                                                     # (T, d)
    out = linear_forward(O, block["wo"], block["bo"])                       # (T, d)  (37.1)
    return out, {"Xn": Xn, "Qh": Qh, "Kh": Kh, "Vh": Vh, "A": A, "O": O}


def demo_output_projection():
    e = example(37)
    out, _ = attention_forward(e.Xn, e.block, 2, 3)
    print("O of demo 36")
    show("O", e.O)
    show_all(wo=e.block["wo"], bo=e.block["bo"], digits=1)
    show("out", out)
    other, _ = attention_forward(np.vstack([e.Xn[:2], -e.Xn[2:]]), e.block, 2, 3)
    print("the last row of Xn turned negative, out again; rows 0 and 1 stay:")
    show("out", other)

if __name__ == "__main__": demo(demo_output_projection)

# %% [markdown]
# ### 38. Attention backward
#
# Every step of the forward pass is an operation whose backward rule is known. The forward pass
# reads the picture at the beginning of this chapter from left to right, the backward pass from
# right to left. It is given dOut, the gradient of `out`. Where two lines join, they are the factors
# of a matrix product, and each factor gets a gradient. Where one line forks, the gradients of its
# branches are added up. All heads are worked on at once; transposes swap the last two axes.
#
# The output projection is a linear layer with input O (12.2 to 12.4). Merging only moves numbers,
# so the gradients are moved back: the backward of merge is split, that of split is merge.
#
#     dWo = Oᵀ dOut                                                                      (38.1)
#     dbo = 1ᵀ dOut                                                                      (38.2)
#     dOh = split(dOut Woᵀ, H)                                                           (38.3)
#
# The mixture Oh = A Vh is a matrix product in which both factors depend on the input. Read A as the
# input of a linear layer with weights Vh, and 12.2 and 12.4 give both gradients. Each head of each
# window has its own Vh, and the products are written out:
#
#     dVh = Aᵀ dOh                                                                       (38.4)
#     dA = dOh Vhᵀ                                                                       (38.5)
#
# In words: row j of dVh is ∑_(i≥j) A_ij (dOh)_i. A value collects from every position that looked
# at it, as much as it was looked at. dA_ij is the dot product of (dOh)_i and (Vh)_j: how the loss
# would change if i looked more at j.
#
# The softmax is 16.2 on each row i: A_ij is its p_j, dA_ij its dp_j, and its sum index i is now k.
# dA has numbers above the diagonal too, as if i might look at later keys. The mask needs no step of
# its own. For j ≤ i it added 0, so the gradient of the masked score is that of the score. For j > i
# the score was lost, so its gradient must be 0, and it is: 38.6 has the factor A_ij = 0. In the sum
# over k the masked keys add nothing, as A_ik = 0.
#
#     dS_ij = A_ij (dA_ij - ∑_k A_ik dA_ik)                                              (38.6)
#     A_ij = 0  ⇒  dS_ij = 0                                                           † (38.7)
#
# The scores of a head are S_ij = ∑_c (Qh)_ic (Kh)_jc / √hs. So ∂S_ij/∂(Qh)_ic = (Kh)_jc / √hs, and
# the query entry (Qh)_ic touches the scores of row i, with all keys j. The chain rule adds them up:
# (dQh)_ic = ∑_j dS_ij (Kh)_jc / √hs, row i of dS times column c of Kh. Likewise ∂S_ij/∂(Kh)_jc =
# (Qh)_ic / √hs, and the key entry touches column j, with all queries i: (dKh)_jc = ∑_i dS_ij
# (Qh)_ic / √hs. This sum runs over the first index of dS, so dS is turned on its side. The shapes
# would not tell: dS is square, and so is A in 38.4.
#
#     dQh = dS Kh / √hs                                                                  (38.8)
#     dKh = dSᵀ Qh / √hs                                                                 (38.9)
#     dQ, dK, dV = merge(dQh), merge(dKh), merge(dVh)                                   (38.10)
#
# In words: row i of dQh adds up keys, weighted by row i of dS; row j of dKh adds up queries,
# weighted by column j. Since each row of dS sums to 0 (card 16), a query is moved towards some keys
# and away from others. Position 0 can only look at itself, so its query gets no gradient.
#
# The three projections are linear layers with one common input; r stands for q, k, v, and dM_q is
# dQ and so on. Xn is used three times, so three gradients add up:
#
#     dW_r = Xnᵀ dM_r,  r ∈ {q, k, v}                                                   (38.11)
#     db_r = 1ᵀ dM_r,  r ∈ {q, k, v}                                                    (38.12)
#     dXn = dQ Wqᵀ + dK Wkᵀ + dV Wvᵀ                                                    (38.13)
#
# One of these gradients is always zero. In each head, the key bias adds the same number to all
# scores of a row i, the product of query i with the head's columns of bk, over √hs. Softmax ignores
# what a whole row has in common (see 15.3), so the loss cannot depend on it. In formulas, the sum
# of dKh over keys is ∑_j (dKh)_jc = ∑_i (Qh)_ic (∑_j dS_ij) / √hs, and each row of dS sums to 0.
#
#     dbk = 1ᵀ dK = 0                                                                 † (38.14)
#
# The code computes it like the others and gets rounding noise.
#
# Shapes; dKh and dVh are like dQh, dK and dV like dQ:
#
#     dOut, dQ, dXn (T, d) = (16, 32)       (3, 4)
#     dOh, dQh (H, T, hs) = (2, 16, 16)     (2, 3, 2)
#     dA, dS (H, T, T) = (2, 16, 16)        (2, 3, 3)

# %%
def attention_backward(dOut, cache, block):
    """dXn (T, d) and the gradients {wq, bq, ..., bo}, from dOut (T, d) (card 38)."""
    Xn, Qh, Kh, Vh, A, O = (cache[name] for name in ("Xn", "Qh", "Kh", "Vh", "A", "O"))
    H, T, hs = Qh.shape[1:]
    dO, dwo, dbo = linear_backward(dOut, O, block["wo"])                    #         (38.1) (38.2)
    dOh = split_heads(dO, H, T)                                             # (H, T, hs)  (38.3)
    dVh = A.swapaxes(-1, -2) @ dOh                                          # (H, T, hs)  (38.4)
    dA = dOh @ Vh.swapaxes(-1, -2)                                          # (H, T, T)   (38.5)
    dS = softmax_backward(dA, A)                                            # (H, T, T)   (38.6)
    dQh = dS @ Kh / math.sqrt(hs)                                           # (H, T, hs)  (38.8)
    dKh = dS.swapaxes(-1, -2) @ Qh / math.sqrt(hs)                          # (H, T, hs)  (38.9)
    dQ, dK, dV = (merge_heads(M) for M in (dQh, dKh, dVh))                  # (T, d)      (38.10)
    dXn_q, dwq, dbq = linear_backward(dQ, Xn, block["wq"])                  # (38.11) (38.12)
    dXn_k, dwk, dbk = linear_backward(dK, Xn, block["wk"])                  # (38.11) (38.12)
    dXn_v, dwv, dbv = linear_backward(dV, Xn, block["wv"])                  # (38.11) (38.12)
    dXn = dXn_q + dXn_k + dXn_v                                             # (T, d)      (38.13)
    grads = {"wq": dwq, "bq": dbq, "wk": dwk, "bk": dbk, "wv": dwv, "bv": dbv, "wo": dwo, "bo": dbo}
    return dXn, grads


def demo_attention_backward():
    e = example(38)
    dXn, grads = attention_backward(e.dY, e.kept, e.block)
    [A], [Qh], [Kh], [Vh] = e.A, e.Qh, e.Kh, e.Vh
    dOh = split_heads(e.dY @ e.block["wo"].T, 2, 3)[0]
    dA = dOh @ Vh.swapaxes(1, 2)
    dS = softmax_backward(dA, A)
    dQh, dKh = dS @ Kh / math.sqrt(2), dS.swapaxes(1, 2) @ Qh / math.sqrt(2)
    dVh = A.swapaxes(1, 2) @ dOh
    print("dOut is columns 0 to 3 of dY in demo 12; Xn and matrices are in demos 28 and 37,")
    print("Qh in 30, Kh in 31, A in 34, Vh in 35. Head 0:")
    show_all(dOh=dOh[0], dA=dA[0], dS=dS[0])
    sum_of = lambda a, b: " + ".join(f"({number(x, 4)})({number(y, 4)})" for x, y in zip(a, b))
    (a, b, _), (da, db, _) = A[0, 1], dA[0, 1]
    print(f"dVh_00 = {sum_of(A[0, :, 0], dOh[0, :, 0])} = {number(dVh[0, 0, 0], 4)}")
    print(f"dA_10  = {sum_of(dOh[0, 1], Vh[0, 0])} = {number(dA[0, 1, 0], 4)}")
    print(f"dS_10  = {a:.4f} ({da:z.4f} - ({a:.4f} * {da:z.4f} + {b:.4f} * {db:z.4f}))"
          f" = {dS[0, 1, 0]:z.4f}")
    print(f"dQh_10 = ({sum_of(dS[0, 1, :2], Kh[0, :2, 0])}) / √2 = {number(dQh[0, 1, 0], 4)}")
    print(f"dKh_00 = ({sum_of(dS[0, 1:, 0], Qh[0, 1:, 0])}) / √2 = {number(dKh[0, 0, 0], 4)}")
    print("merged, head 0 in columns 0 and 1; then row 0 of dwq and of dXn, and dbk:")
    for name, M in (("dQ", dQh), ("dK", dKh), ("dV", dVh)):
        show(name, merge_heads(M[None]))
    show_all(dwq=grads["wq"][0], dXn=dXn[0], dbk=grads["bk"])

if __name__ == "__main__": demo(demo_attention_backward)

# %% [markdown]
# ### Exercises of chapter 5
#
# - **5a.** Drop the line of 32.1. Which golden files change, and why only those? What does
#   `python tinygpt.py gradcheck` say, and which other lines must change before it passes again?
# - **5b.** Make the mask strict, j < i: a 0 for the 1 in `causal_mask`. What does row 0 see?
# - **5c.** From the demos of cards 31 to 38, work out dS_20 and dKh_10 of head 0. Why has row 2 of
#   dKh only one term? Add up column 0 of dKh: why does this come out?

# %% [markdown]
# ## Chapter 6. Transformer
#
# Attention moves information between positions. A feed-forward network works on each position
# alone. One of each, with a LayerNorm before each, makes a block. Blocks are stacked. The tables
# stand in front of them; behind them come a last LayerNorm and a linear layer that gives the scores
# of the next token. That is the whole model, called a transformer.

# %% [markdown]
# ### 39. Feed-forward network, forward
#
# After attention has gathered what a position needs, something must be made of it. A linear layer
# widens the row to F hidden numbers, ReLU silences those below zero, and a second linear layer
# brings the rest back to width d. Such a network is also called an MLP, a multi-layer perceptron.
#
#     Z = Xn W1 + 1 b1ᵀ                                                                  (39.1)
#     R = ReLU(Z)                                                                        (39.2)
#     Ff = R W2 + 1 b2ᵀ                                                                  (39.3)
#     FFN(x) = ReLU(x W1 + b1) W2 + b2                                                 † (39.4)
#
# The last line says the first three again, for a single row x. In code W1, b1, W2, b2 are ff1_w,
# ff1_b, ff2_w, ff2_b. Xn is the input of this layer; card 41 calls it Xn2.
#
#     Xn, Ff (T, d) = (16, 32)              (3, 4)
#     Z, R (T, F) = (16, 128)               (3, 6)

# %%
def ffn_forward(Xn, block):
    """Ff (T, d) and the cache for ffn_backward, from Xn (T, d) (card 39)."""
    Z = linear_forward(Xn, block["ff1_w"], block["ff1_b"])                  # (T, F)  (39.1)
    R = relu_forward(Z)                                                     # (T, F)  (39.2)
    Ff = linear_forward(R, block["ff2_w"], block["ff2_b"])                  # (T, d)  (39.3)
    return Ff, {"Xn": Xn, "Z": Z, "R": R}


def demo_ffn():
    e = example(39)
    Ff, cache = ffn_forward(e.Xn2, e.block)
    show("Xn2", e.Xn2)
    show_all(W1=e.block["ff1_w"], b1=e.block["ff1_b"], digits=1)
    show_all(Z=cache["Z"], R=cache["R"])
    show_all(W2=e.block["ff2_w"], b2=e.block["ff2_b"], digits=1)
    show("Ff", Ff)

if __name__ == "__main__": demo(demo_ffn)

# %% [markdown]
# ### 40. Feed-forward network, backward
#
# The same three steps upside down: a linear layer (12.2 to 12.4), ReLU by 14.2, a linear layer.
#
#     dR = dOut W2ᵀ                                                                      (40.1)
#     dW2 = Rᵀ dOut                                                                      (40.2)
#     db2 = 1ᵀ dOut                                                                      (40.3)
#     dZ = dR ⊙ 1[Z > 0]                                                                 (40.4)
#     dXn = dZ W1ᵀ                                                                       (40.5)
#     dW1 = Xnᵀ dZ                                                                       (40.6)
#     db1 = 1ᵀ dZ                                                                        (40.7)
#
# dOut is the gradient of this layer's output Ff. Where a hidden number was silent, R and dZ are 0,
# so its column of W1 and its row of W2 learn nothing from this position, by 40.6 and 40.2.
#
#     dOut, dXn (T, d) = (16, 32)           (3, 4)
#     dR, dZ (T, F) = (16, 128)             (3, 6)
#     dW1 (d, F) = (32, 128)                (4, 6)
#     dW2 (F, d) = (128, 32)                (6, 4)

# %%
def ffn_backward(dOut, cache, block):
    """dXn (T, d) and the gradients {ff1_w, ff1_b, ff2_w, ff2_b}, from dOut (T, d) (card 40)."""
    Xn, Z, R = cache["Xn"], cache["Z"], cache["R"]
    dR, dW2, db2 = linear_backward(dOut, R, block["ff2_w"])                 # (40.1) (40.2) (40.3)
    dZ = relu_backward(dR, Z)                                               # (T, F)  (40.4)
    dXn, dW1, db1 = linear_backward(dZ, Xn, block["ff1_w"])                 # (40.5) (40.6) (40.7)
    return dXn, {"ff1_w": dW1, "ff1_b": db1, "ff2_w": dW2, "ff2_b": db2}


def demo_ffn_backward():
    e = example(40)
    _, cache = ffn_forward(e.Xn2, e.block)
    dXn, grads = ffn_backward(e.dY, cache, e.block)
    show("dOut", e.dY, digits=1)
    dR, _, _ = linear_backward(e.dY, cache["R"], e.block["ff2_w"])
    show("dR", dR)
    print("(Xn2, Z, R, W1 and W2 stand in the demo of card 39)")
    show_all(dXn=dXn, dW1=grads["ff1_w"], db1=grads["ff1_b"], dW2=grads["ff2_w"])
    show("db2", grads["ff2_b"])

if __name__ == "__main__": demo(demo_ffn_backward)

# %% [markdown]
# ### 41. Pre-LN block, forward
#
# A block does not replace X, it adds to X: what attention finds, then what the feed-forward network
# makes of that. The row is like a sheet that is handed from block to block, and each may write on
# it. The path on which X itself reaches the sum, past the branch, is called the residual or skip
# connection; the rows that flow along it are the residual stream. It also gives the gradients a
# straight way back through many blocks (card 42).
#
#     X ─┬─ LN1 ─ Attention ─ + ─ Xmid ─┬─ LN2 ─ FFN ─ + ─ Y
#        └────────────────────┘         └──────────────┘
#
#     Xn = LN1(X)                                                                        (41.1)
#     Att = Attention(Xn)                                                                (41.2)
#     Xmid = X + Att                                                                     (41.3)
#     Xn2 = LN2(Xmid)                                                                    (41.4)
#     Ff = FFN(Xn2)                                                                      (41.5)
#     Y = Xmid + Ff                                                                      (41.6)
#     Xmid = X + Attention(LN1(X)),  Y = Xmid + FFN(LN2(Xmid))                         † (41.7)
#
# Attention and feed-forward layer, each with its LayerNorm, are called branches or sublayers. The
# normalisation comes at the start of each branch, never on the residual path; that is what pre-LN
# means. The first transformer normalised after the sum: at the start the gradients near its output
# were large (see Pre-LN among the sources), and training had to begin with very small steps.
#
#     X, Xn, Att, Xmid, Xn2, Ff, Y (T, d) = (16, 32)        (3, 4)

# %%
def block_forward(X, block, heads, T):
    """Y (T, d) and the cache for block_backward, from X (T, d) (card 41)."""
    Xn, ln1 = layer_norm_forward(X, block["ln1_g"], block["ln1_b"])         # (T, d)  (41.1)
    Att, attention = attention_forward(Xn, block, heads, T)                 # (T, d)  (41.2)
    Xmid = X + Att                                                          # (T, d)  (41.3)
    Xn2, ln2 = layer_norm_forward(Xmid, block["ln2_g"], block["ln2_b"])     # (T, d)  (41.4)
    Ff, ffn = ffn_forward(Xn2, block)                                       # (T, d)  (41.5)
    Y = Xmid + Ff                                                           # (T, d)  (41.6)
    return Y, {"ln1": ln1, "attention": attention, "ln2": ln2, "ffn": ffn}


def demo_block():
    e = example(41)
    Y, cache = block_forward(e.X0, e.block, 2, 3)
    show_all(X=e.X0, Xn=cache["attention"]["Xn"], Att=e.Att, Xmid=e.Xmid, ln2_g=e.block["ln2_g"])
    show_all(ln2_b=e.block["ln2_b"], Xhat=cache["ln2"]["Xhat"], Xn2=cache["ffn"]["Xn"])
    show_all(Ff=ffn_forward(cache["ffn"]["Xn"], e.block)[0], Y=Y)

if __name__ == "__main__": demo(demo_block)

# %% [markdown]
# ### 42. Residual connections, backward
#
# The steps of card 41 upside down. Here `_back` stands for the backward function of a part.
#
#     dXn2 = FFN_back(dY)                                                                (42.1)
#     dXmid_branch = LN2_back(dXn2)                                                      (42.2)
#     dXmid = dY + dXmid_branch                                                          (42.3)
#     dXn = Attention_back(dXmid)                                                        (42.4)
#     dX_branch = LN1_back(dXn)                                                          (42.5)
#     dX = dXmid + dX_branch                                                             (42.6)
#
#     dX ─┬─ LN1_back ─ Attention_back ─┬─ dXmid ─┬─ LN2_back ─ FFN_back ─┬─ dY
#         └─────────────────────────────┘         └───────────────────────┘
#
# The gradient flows from right to left; where two lines meet at the left, they are added. Two facts
# stand behind this. First, a sum hands its gradient unchanged to both parts: in Y = Xmid + Ff, each
# entry of Y moves with its own entry of Ff at rate 1, and with no other. Written as a matrix of all
# derivatives, that is the identity matrix I, which changes nothing:
#
#     ∂Y/∂Ff = I  ⇒  dFf = dY,  ∂Xmid/∂Att = I  ⇒  dAtt = dXmid                        † (42.7)
#
# So the feed-forward layer is handed dY, and attention is handed dXmid, once that is complete.
#
# Second, an array that is used twice gets two gradients, which add up. Xmid goes straight into Y
# and also through the branch, LN2 and then FFN. Read Xmid, the branch's output Ff(Xmid) and dY as
# one long row of numbers each, and ∂Ff/∂Xmid as the matrix of all derivatives, with a row for each
# entry of Ff and a column for each entry of Xmid:
#
#     Y = Xmid + Ff(Xmid)  ⇒  dXmid = dY (I + ∂Ff/∂Xmid) = dY + dY ∂Ff/∂Xmid           † (42.8)
#
# The first term is dY itself, at full strength. The second is what 42.1 and 42.2 compute: by the
# chain rule ∂Ff/∂Xmid is the matrix of FFN times that of LN2; 42.1 multiplies dY by the one, 42.2
# the result by the other, and neither matrix is ever built. In the same way Xmid = X + Att(X) gives
# dX = dXmid (I + ∂Att/∂X), which is 42.4 to 42.6. So dX = dY (I + ∂Ff/∂Xmid)(I + ∂Att/∂X). A block
# puts two such brackets behind dY, and L blocks put 2L. Multiplied out, one term is dY alone,
# whatever the weights are. Without the residual path each I would be missing, and dX would be dY
# times a chain of 2L matrices. How large dX(0) is beside dX(L), the ratio of the roots of their
# sums of squares, was measured with five seeds on models of the default sizes at their starting
# values, with a window of random ids and a random dX(L):
#
#     blocks   both       LayerNorm only  path only    neither
#     24       16 to 44   0.026 to 3.7    4e4 to 2e7   6e-8 to 1.4e-6
#     48       33 to 59   0.025 to 17     1e9 to 7e9   4e-14 to 3.6e-13
#
# A gradient that shrinks so is said to vanish, one that grows so to explode. With neither they
# vanish, with the path alone they explode; with LayerNorm alone they come out large or small.
#
#     dY, dXn2, dXmid, dXn, dX (T, d) = (16, 32)            (3, 4)

# %%
def block_backward(dY, cache, block):
    """dX (T, d) and the gradients of the block's 16 arrays, from dY (T, d) (card 42)."""
    dXn2, ffn = ffn_backward(dY, cache["ffn"], block)                       # (T, d)  (42.1)
    dXmid_branch, dgamma2, dbeta2 = layer_norm_backward(dXn2, cache["ln2"])  # (42.2)
    dXmid = dY + dXmid_branch                                               # (T, d)  (42.3)
    dXn, attention = attention_backward(dXmid, cache["attention"], block)   # (T, d)  (42.4)
    dX_branch, dgamma1, dbeta1 = layer_norm_backward(dXn, cache["ln1"])     # (T, d)  (42.5)
    dX = dXmid + dX_branch                                                  # (T, d)  (42.6)
    return dX, {"ln1_g": dgamma1, "ln1_b": dbeta1, **attention,
                "ln2_g": dgamma2, "ln2_b": dbeta2, **ffn}


def demo_residual_backward():
    e = example(42)
    _, cache = block_forward(e.X0, e.block, 2, 3)
    dX, grads = block_backward(e.dY, cache, e.block)
    dXn2, _ = ffn_backward(e.dY, cache["ffn"], e.block)
    dXmid_branch, _, _ = layer_norm_backward(dXn2, cache["ln2"])
    show("dY", e.dY)
    print("(X, Xmid, Xn2, ln2_g: demo 41; ln1_g: demo 20; dXn2 is dXn of demo 40; dXn is")
    print("not that of demo 38, where dOut was dY: here it is dXmid)")
    show("by 42.2", dXmid_branch)
    show("dXmid", e.dY + dXmid_branch)
    show("dXn", attention_backward(e.dY + dXmid_branch, cache["attention"], e.block)[0])
    show("by 42.5", dX - e.dY - dXmid_branch)
    show("dX", dX)
    for name in ("ln1_g", "ln1_b", "ln2_g", "ln2_b"):
        show(f"d {name}", grads[name])
    step = np.zeros((3, 4))
    step[1, 2] = 1e-5
    f = lambda X: (block_forward(X, e.block, 2, 3)[0] * e.dY).sum()
    rate = (f(e.X0 + step) - f(e.X0 - step)) / 2e-5
    print("the sum of Y ⊙ dY is a loss whose upstream gradient is dY; moving X_12 changes")
    print(f"it at the rate {number(rate, 4)}, and dX_12 = {number(dX[1, 2], 4)}")

if __name__ == "__main__": demo(demo_residual_backward)

# %% [markdown]
# ### 43. Starting values of the parameters
#
# Matrices start random (card 23), both embedding tables included, though for a table that is looked
# up and not multiplied the rule has no deeper reason. Biases and the offsets of LayerNorm start at
# 0. Gains start at 1, so that LayerNorm starts as plain normalisation.
#
#     W ~ Xavier uniform,  b = 0,  γ = 1,  β = 0                                         (43.1)
#
# Arrays are drawn in the order of `param_shapes`, which is part of what a seed means. Two of them:
#
#     tok_emb (V, d) = (V, 32)              (10, 4)
#     head_w (d, V) = (32, V)               (4, 10)

# %%
def init_params(config, rng, dtype=np.float32):
    """{name: array} of all parameters at their starting values (card 43)."""
    params = {}
    for name, shape in param_shapes(config).items():
        if len(shape) == 2:
            params[name] = xavier_uniform(rng, *shape).astype(dtype)        #         (43.1)
        elif name.endswith("_g"):
            params[name] = np.ones(shape, dtype)                            #         (43.1)
        else:
            params[name] = np.zeros(shape, dtype)                           #         (43.1)
    return params


def demo_init():
    params = init_params(example(43).config, np.random.default_rng(4), np.float64)
    for name, W in params.items():
        if W.ndim == 2:
            a = math.sqrt(6 / sum(W.shape))
            print(f"{name:13} {str(W.shape):8} random in +-{a:.3f}, "
                  f"first {number(W[0, 0], 3):>6}, last {number(W[-1, -1], 3):>6}")
        else:
            print(f"{name:13} {str(W.shape):8} all {number(W.min(), 0)}"
                  + ("" if W.min() == W.max() else " ?"))

if __name__ == "__main__": demo(demo_init)

# %% [markdown]
# ### 44. Parameter count
#
# How many numbers does the model learn? A block has four d-by-d matrices with a bias each, 4d² +
# 4d; the feed-forward layer with 2 d F + F + d; two LayerNorms with 2d each. Outside the blocks
# stand the token table V d, the head V d + V, the position table Tmax d and the last LayerNorm 2d.
#
#     n_block = 4d² + 2 d F + F + 9d                                                   † (44.1)
#     n_params = (2d + 1) V + (Tmax + 2) d + L (4d² + 2 d F + F + 9d)                  † (44.2)
#
# The number of heads plays no part: heads share out the width. The function counts the arrays
# themselves; the demo carries out the formula.

# %%
def count_params(params):
    """How many numbers the arrays hold (card 44)."""
    return sum(W.size for W in params.values())


def demo_parameter_count():
    for config in (example(44).config, ModelConfig(vocab_size=512),
                   ModelConfig(65, 64, 64, width=128, heads=4, hidden=512, layers=4)):
        V, Tmax, d = config.vocab_size, config.max_context, config.width
        F, L = config.hidden, config.layers
        n_block = 4 * d**2 + 2 * d * F + F + 9 * d
        n_params = (2 * d + 1) * V + (Tmax + 2) * d + L * n_block
        params = init_params(config, np.random.default_rng(0))
        block = count_params(block_params(params, 0))
        print(f"V = {V}, Tmax = {Tmax}, d = {d}, F = {F}, L = {L}")
        print(f"  a block: formula {n_block}, counted {block}")
        print(f"  in all:  formula {n_params}, counted {count_params(params)}")

if __name__ == "__main__": demo(demo_parameter_count)

# %% [markdown]
# ### 45. Whole model, forward
#
# Tables, blocks, one more LayerNorm, since the sum along the residual path was never normalised
# itself, and the head. The head gives one logit for each token of the vocabulary. It is a linear
# layer, called LM head (language model) or unembedding, and has nothing to do with attention's
# heads. In GPT-2 its matrix is the token table on its side: the two are tied. Here they are not.
#
#     1 ≤ T ≤ Tmax                                                                       (45.1)
#     X(l+1) = Block_l(X(l)),  l = 0, ..., L-1                                           (45.2)
#     Xf = LNf(X(L))                                                                     (45.3)
#     logits = Xf Whead + 1 bheadᵀ                                                       (45.4)
#     logits = LNf(X(L)) Whead + 1 bheadᵀ                                              † (45.5)
#
#     ids ─ tok_emb, pos_emb ─ X(0) ─ Block_0 ─ X(1) ─ ... ─ X(L) ─ LNf ─ Xf ─ head ─ logits
#
# In code Whead is head_w and bhead is head_b. 45.1 is checked, since a longer sequence has no rows
# in the position table for its last positions. Row t of the logits scores the token that follows
# position t, and depends on tokens 0 to t only.
#
#     ids (T,) = (16,)                      (3,)
#     X, Xf (T, d) = (16, 32)               (3, 4)
#     logits (T, V) = (16, V)               (3, 10)

# %%
def forward(params, ids, config):
    """logits (T, V) and the cache for loss_and_grads, from ids (T,) or (B, T) (card 45).

    ValueError for more than Tmax ids, none, or an id outside the vocabulary.
    """
    ids = np.asarray(ids)                                                   # (T,)
    T = ids.shape[-1]
    if not 1 <= T <= config.max_context:                                    #         (45.1)
        raise BadInput(f"a sequence must have 1 to {config.max_context} ids "
                       f"(max_context), got {T}")
    X = embed_forward(params, ids)                                          # (T, d)
    caches = []
    for l in range(config.layers):
        X, cache = block_forward(X, block_params(params, l), config.heads, T)  # (45.2)
        caches.append(cache)
    Xf, lnf = layer_norm_forward(X, params["lnf_g"], params["lnf_b"])       # (T, d)  (45.3)
    logits = linear_forward(Xf, params["head_w"], params["head_b"])         # (T, V)  (45.4)
    return logits, {"ids": ids, "blocks": caches, "lnf": lnf, "Xf": Xf}


def demo_model_forward():
    e = example(45)
    logits, cache = forward(e.params, e.x, e.config)
    loss, P = cross_entropy_forward(logits, e.y)
    show("ids", e.x)
    show("X(1)", block_forward(e.X0, e.block, 2, 3)[0])
    show_all(lnf_g=e.params["lnf_g"], lnf_b=e.params["lnf_b"], Xhat=cache["lnf"]["Xhat"])
    show("Xf", cache["Xf"])
    show_all(head_w=e.params["head_w"], head_b=e.params["head_b"], digits=1)
    show_all(logits=logits, P=P, y=e.y)
    terms = " + ".join(f"{-math.log(p):.4f}" for p in P[np.arange(3), e.y])
    print(f"minus the logs of P of the targets: ({terms}) / 3 =")
    print(f"loss {loss:.4f}, perplexity {perplexity(loss):.2f} (an even guess: 10)")
    refused(forward, e.params, np.ones(6, int), e.config)

if __name__ == "__main__": demo(demo_model_forward)

# %% [markdown]
# ### 46. Whole model, backward
#
# The forward pass turned round: 18.2, head, last LayerNorm, blocks from last to first, tables.
#
#     dXf, dWhead, dbhead = Head_back(dlogits)                                           (46.1)
#     dX(L), dγf, dβf = LNf_back(dXf)                                                    (46.2)
#     dX(l) = Block_l_back(dX(l+1)),  l = L-1, ..., 0                                    (46.3)
#     d tok_emb, d pos_emb = Embed_back(dX(0))                                           (46.4)
#
# γf and βf are lnf_g and lnf_b. Each block returns the gradients of its own 16 arrays too. This is
# all of backpropagation. One forward pass and one backward pass give the derivative of the loss by
# every parameter. Finding them by 47.1 would take two forward passes for each.
#
#     dlogits (T, V) = (16, V)              (3, 10)
#     dXf, dX (T, d) = (16, 32)             (3, 4)

# %%
def loss_and_grads(params, x, y, config):
    """The loss, a float, and {name: gradient} for ids x and targets y, (T,) or (B, T) (card 46)."""
    y = np.asarray(y)                                                       # (T,)
    logits, cache = forward(params, x, config)                              # (T, V)
    loss, P = cross_entropy_forward(logits, y)                              # (T, V)
    dlogits = cross_entropy_backward(P, y)                                  # (T, V)
    grads = dict.fromkeys(params)                                           # keeps their order
    dXf, grads["head_w"], grads["head_b"] = linear_backward(                # (T, d)  (46.1)
        dlogits, cache["Xf"], params["head_w"])
    dX, grads["lnf_g"], grads["lnf_b"] = layer_norm_backward(dXf, cache["lnf"])  # (46.2)
    for l in reversed(range(config.layers)):
        dX, block_grads = block_backward(                                   # (T, d)  (46.3)
            dX, cache["blocks"][l], block_params(params, l))
        for name, g in block_grads.items():
            grads[f"block{l}.{name}"] = g
    grads["tok_emb"], grads["pos_emb"] = embed_backward(dX, cache["ids"], params)  # (46.4)
    return loss, grads


def demo_model_backward():
    e = example(46)
    loss, grads = loss_and_grads(e.params, e.x, e.y, e.config)
    dlogits = cross_entropy_backward(e.P, e.y)
    print("all begins with P and y of demo 45; d head_b adds up the rows of dlogits")
    show("dlogits", dlogits)
    show("d head_b", grads["head_b"])
    show("d lnf_g", grads["lnf_g"])
    show("d b0 wq", grads["block0.wq"])
    show("d tok_emb", grads["tok_emb"][[0, 1, 7, 8]])
    print(f"{'':10}(rows 0, 1, 7 and 8; the window has the ids 1, 7 and 8)")
    show("d pos_emb", grads["pos_emb"])
    print("token 1 stands at position 0 only, so both tables get the same row, and so on")
    moved = {name: W - 0.1 * grads[name] for name, W in e.params.items()}
    after, _ = cross_entropy_forward(forward(moved, e.x, e.config)[0], e.y)
    print(f"every parameter moved by -0.1 times its gradient: loss {loss:.4f} -> {after:.4f}")

if __name__ == "__main__": demo(demo_model_backward)

# %% [markdown]
# ### Exercises of chapter 6
#
# - **6a.** Cut the residual connection of 41.3: write `Xmid = Att`. Which arrays does
#   `python tinygpt.py gradcheck` call wrong, and why are the others right?
# - **6b.** Work out with 44.1 and 44.2 how many parameters the sizes of GPT-2 give: V = 50,257,
#   Tmax = 1,024, d = 768, F = 3,072, L = 12. GPT-2 has no head_b, and its head_w is its token
#   table, turned on its side. How many has GPT-2?
# - **6c.** Let head_w be the token table E, turned on its side, as in GPT-2. What is dE then?

# %% [markdown]
# ## Chapter 7. Gradient check
#
# A wrong backward pass need not crash. The model may even learn, only worse, and nobody knows why.
# But there is a second way to find a derivative, slow and independent: move one number a little and
# see how the loss changes. This chapter holds all gradients against slopes measured so.

# %% [markdown]
# ### 47. Central difference
#
# Call the loss f, as a function of an array x. The derivative is its slope along one number x_i,
# and g_i is that slope as measured, the numerical gradient. Two points, a step h to either side,
# give it nearly. δ_i is the array with a 1 at place i and zeros elsewhere.
#
#     g_i = (f(x + h δ_i) - f(x - h δ_i)) / (2h)                                         (47.1)
#
# Why two sides? By Taylor's formula, f(x ± h) = f ± h f' + h²/2 f'' ± h³/6 f''' and so on. In the
# difference the terms with f and f'' cancel, and dividing by 2h leaves f' + h²/6 f''': the error is
# of the size h². With one side, f'' stays and the error is of the size h. A smaller h is not better
# without end. float64 numbers are rounded at about 16 digits, so an f of size 1 carries an error
# near 1e-16, which is divided by 2h. Constant factors left aside, the two errors, h² and 1e-16 / h,
# are equal where h³ = 1e-16, a little below 1e-5. In float32, with 7 digits, h³ = 1e-7 leaves an
# error of 2e-5, so checks run in float64.
#
# Shapes:  x of any shape gives g of the same shape.

# %%
def slope(f, x, i, h):
    """The slope of the number f(x) along the entry x[i], which is moved and put back (card 47)."""
    old = x[i]
    x[i] = old + h
    up = f(x)
    x[i] = old - h
    down = f(x)
    x[i] = old
    return (up - down) / (2 * h)                                            #         (47.1)


def numerical_grad(f, x, h=1e-5):
    """The gradient of the number f(x) by x, measured entry by entry (card 47)."""
    g = np.empty_like(x)
    for i in np.ndindex(x.shape):                   # all places: (0, 0), (0, 1), ...
        g[i] = slope(f, x, i, h)
    return g


def demo_central_difference():
    cube = lambda x: float((x ** 3).sum())
    print("f(x) = x³ at x = 2; the derivative is 3 x² = 12")
    for h in (1.0, 0.1, 0.01):
        two = numerical_grad(cube, np.array([2.0]), h)[0]
        one = (cube(np.array([2.0 + h])) - cube(np.array([2.0]))) / h
        print(f"h = {h:4}: two sides {two:8.4f}, error {two - 12:.4f} = h²; "
              f"one side {one:8.4f}, error {one - 12:.4f}")
    x = np.array([[1.0, 2.0, -1.0], [0.5, 0.0, 3.0]])
    show_all(x=x, g=numerical_grad(cube, x))
    show("3 x²", 3 * x ** 2)

if __name__ == "__main__": demo(demo_central_difference)

# %% [markdown]
# ### 48. Relative error
#
# When are two numbers near enough? A difference of 0.001 is nothing beside 1000 and everything
# beside 0.002. So the difference is divided by the larger of the two sizes.
#
#     rel(a, b) = |a - b| / max(|a|, |b|, ε)                                             (48.1)
#
# ε is a floor, one of the three that max chooses from. It keeps two zeros from giving 0/0. It also
# matters where the true gradient is 0, as for the key bias (see 38.14). There the backward pass
# gives rounding noise, and so does 47.1. Noise divided by noise would look like a gross error.
#
# Shapes: a and b of one shape give the errors entry by entry.

# %%
def relative_error(a, b, eps=1e-8):
    """|a - b| relative to the larger of the two, entry by entry (card 48)."""
    return np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), eps)  # (48.1)


def demo_relative_error():
    for a, b in ((1000.0, 1000.001), (0.002, 0.001), (-2.0, 2.0), (0.0, 0.0), (1e-11, -2e-11)):
        print(f"a = {a}, b = {b}: rel = {number(relative_error(a, b), 7)}")
    print("the last pair is noise; with ε = 1e-12 instead of 1e-8 it would give "
          f"{number(relative_error(1e-11, -2e-11, 1e-12), 1)}")

if __name__ == "__main__": demo(demo_relative_error)

# %% [markdown]
# ### 49. Checking every parameter
#
# Now the whole model. For each array, some entries are drawn at random, each is moved by ±h, and
# the slope of the loss is held against the gradient of card 46. The worst error is reported by
# name: it shows from where backward the gradients are wrong.
#
#     worst[name] = max_s rel(∂loss/∂θ[i_s], (loss(θ[i_s] + h) - loss(θ[i_s] - h)) / (2h)),
#                   s = 1, ..., samples                                                  (49.1)
#
# θ is the array of that name, and i_s the place of the s-th drawn entry. Of the two tables only
# rows that the window uses are drawn: drawing others, with gradient 0, would tell little. The floor
# of 48.1 is 1e-5 here, far above the noise of the key bias and far below the gradients that matter.
# np.maximum is used because Python's max may overlook a gradient that is no number. A right
# gradient has errors far below 1e-4, a wrong one in general far above; there the line is drawn.
#
# Where the move by h carries the input of a ReLU across 0, the two points lie on different sides of
# the bend, and the quotient is not the slope. So each entry is measured with two steps h, and the
# smaller error counts: a bend hardly ever lies within both, while a wrong gradient stays wrong.

# %%
def check_params(params, x, y, config, rng, samples):
    """{name: worst relative error} of the gradients for float64 params and ids x, y (card 49)."""
    _, grads = loss_and_grads(params, x, y, config)
    loss = lambda _: loss_and_grads(params, x, y, config)[0]        # `slope` moves params
    used = {"tok_emb": np.unique(x), "pos_emb": np.arange(np.shape(x)[-1])}
    worst = dict.fromkeys(params, 0.0)
    for name, W in params.items():
        among = used.get(name, np.arange(len(W)))                           # rows to draw from
        for _ in range(samples):
            i = (among[rng.integers(len(among))], *(rng.integers(size) for size in W.shape[1:]))
            error_s = min(relative_error(grads[name][i], slope(loss, W, i, h), eps=1e-5)
                          for h in (1e-5, 1e-6))
            worst[name] = float(np.maximum(worst[name], error_s))           #         (49.1)
    return worst


def demo_check_params():
    e = example(49)
    verdict = lambda error: "error below 1e-4" if error < 1e-4 else f"WRONG, error {error:.4f}"
    worst = check_params(e.params, e.x, e.y, e.config, np.random.default_rng(0), samples=4)
    for name in ("tok_emb", "pos_emb", "block0.bk", "block0.ff1_w", "lnf_g", "head_w"):
        print(f"{name:13} {verdict(worst[name])}")
    print(f"the worst of all {len(worst)} arrays lies between 0 and 1e-4: "
          f"{0 < np.max([*worst.values()]) < 1e-4}")
    Z = linear_forward(e.Xn2, e.block["ff1_w"], e.block["ff1_b"])           # (3, 6)
    near = dict(e.params, **{"block0.ff1_b": e.block["ff1_b"] - Z[2] + 2e-6})
    worst = check_params(near, e.x, e.y, e.config, np.random.default_rng(0), samples=4)
    print(f"six inputs of ReLU 2e-6 from the bend: {verdict(np.max([*worst.values()]))}")
    measured = numerical_grad(lambda b: loss_and_grads(dict(e.params, head_b=b), e.x, e.y,
                                                       e.config)[0], e.params["head_b"].copy())
    show_all(backward=e.grads["head_b"], measured=measured)
    print(f"the gradient times 1.01: {verdict(relative_error(1.01 * measured, measured).max())}")

if __name__ == "__main__": demo(demo_check_params)

# %% [markdown]
# ### The whole check
#
# `python tinygpt.py gradcheck` runs what follows. First each operation alone, with every entry of
# its inputs: if a wrong one is named here, the fault is in that function or in one that it calls,
# and not before it. The output of an operation is no loss, so one is made of it: the sum of Y ⊙ dY,
# with random numbers dY. Its derivative by Y is dY, which is what the backward function is handed.
# Then the whole model as in card 49, with two blocks and random numbers for gains and biases too.

# %%
def check_operations(seed):
    """{operation: worst error} of each backward function, by central differences (card 47)."""
    rng = np.random.default_rng(seed)
    config = ModelConfig(7, context=3, max_context=5, width=4, heads=2, hidden=6, layers=1)
    params = {name: rng.uniform(-1, 1, shape) for name, shape in param_shapes(config).items()}
    block, ids, y = block_params(params, 0), np.array([[2, 0, 2], [5, 2, 1]]), np.arange(6)
    X, Z = rng.normal(size=(6, 4)), rng.normal(size=(6, 7))
    W, b, gamma, beta = block["ff1_w"], block["ff1_b"], block["ln1_g"], block["ln1_b"]

    def error(forward, backward, *inputs):
        """forward() gives Y, backward(dY) the gradients of the inputs in this order."""
        dY = rng.normal(size=np.shape(forward()))
        loss = lambda _: float((forward() * dY).sum())
        errors = [np.minimum(*(relative_error(dx, numerical_grad(loss, x, h), eps=1e-5)
                               for h in (1e-5, 1e-6))).max()        # two steps, as in card 49
                  for x, dx in zip(inputs, backward(dY))]
        return float(np.max(errors))

    def part(forward, backward, names):
        """The error of a part of a block, by X and by the arrays of these names."""
        def gradients(dY):
            dX, grads = backward(dY, forward()[1], block)
            return [dX, *(grads[name] for name in names)]

        return error(lambda: forward()[0], gradients, X, *(block[name] for name in names))

    return {
        "linear": error(lambda: linear_forward(X, W, b), lambda dY: linear_backward(dY, X, W),
                        X, W, b),
        "relu": error(lambda: relu_forward(X), lambda dR: [relu_backward(dR, X)], X),
        "softmax": error(lambda: softmax_forward(Z),
                         lambda dp: [softmax_backward(dp, softmax_forward(Z))], Z),
        "cross-entropy": error(
            lambda: cross_entropy_forward(Z, y)[0],
            lambda d: [d * cross_entropy_backward(cross_entropy_forward(Z, y)[1], y)], Z),
        "layer norm": error(
            lambda: layer_norm_forward(X, gamma, beta)[0],
            lambda dY: layer_norm_backward(dY, layer_norm_forward(X, gamma, beta)[1]),
            X, gamma, beta),
        "embedding": error(lambda: embed_forward(params, ids),
                           lambda dX0: embed_backward(dX0, ids, params),
                           params["tok_emb"], params["pos_emb"]),
        "attention": part(lambda: attention_forward(X, block, 2, 3), attention_backward,
                          ("wq", "bq", "wk", "bk", "wv", "bv", "wo", "bo")),
        "feed-forward": part(lambda: ffn_forward(X, block), ffn_backward,
                             ("ff1_w", "ff1_b", "ff2_w", "ff2_b")),
        "block": part(lambda: block_forward(X, block, 2, 3), block_backward, BLOCK)}


def check_model(seed, samples):
    """{name: worst error} of every gradient of a small random model (card 49)."""
    config = ModelConfig(vocab_size=11, context=5, max_context=7,
                         width=6, heads=2, hidden=9, layers=2)
    rng = np.random.default_rng(seed)
    params = init_params(config, rng, np.float64)
    for W in params.values():
        if W.ndim == 1:                                     # neither all 0 nor all 1
            W += rng.uniform(-0.5, 0.5, W.shape)
    x, y = (rng.integers(0, config.vocab_size, (3, config.context)) for _ in range(2))
    return check_params(params, x, y, config, rng, samples)

# %% [markdown]
# ### Exercises of chapter 7
#
# - **7a.** Forget the sum in 38.6: write `dS = A * dA`. Which arrays does
#   `python tinygpt.py gradcheck` call wrong, and which not? Why is bk among them now?
# - **7b.** Run the check of card 49 with float32 parameters: in `demo_check_params`, give
#   `check_params` `{name: W.astype(np.float32) for name, W in e.params.items()}` in place of
#   `e.params`. The backward pass is right, and yet the check fails. Why?

# %% [markdown]
# ## Chapter 8. Optimizer
#
# The gradient says in which direction the loss rises. To lower it, each parameter takes a small
# step the other way, again and again. How large a step? Here t counts steps, from 1.

# %% [markdown]
# ### 50. AdamW update
#
# The plain rule, θ ← θ - η g for each parameter θ with its gradient g, is called stochastic
# gradient descent, since each gradient comes from a random batch. One step size η, the learning
# rate, serves all. But some gradients are a thousand times larger than others, and each batch gives
# a noisy one. So Adam keeps two running means for each number, its first and second moment: m of
# its gradient, which smooths the noise, and v of its squared gradient, which measures its usual
# size. The step is η times m over the root of v: about η for a number whose gradient stays the
# same, be it large or small, and much less for one whose gradient keeps changing sign.
#
# A running mean keeps a share β of its old value and takes 1 - β of the new one, so older gradients
# fade: an exponential moving average. Nearly two thirds of its weight lie on the last 1/(1 - β)
# gradients, 10 for β1 = 0.9 and 100 for β2 = 0.99, the defaults; β2 is often 0.95 or 0.999.
#
#     m_t = β1 m_(t-1) + (1 - β1) g_t                                                    (50.1)
#     v_t = β2 v_(t-1) + (1 - β2) g²_t                                                   (50.2)
#
# Both start at 0 and are too small at first. Put 50.1 into itself: m_t is the sum over s = 1, ...,
# t of (1 - β1) β1^(t-s) g_s. The weights add up to (1 - β1)(1 + β1 + β1² + ... + β1^(t-1));
# multiplied out, all but the first and the last term cancel: 1 - β1^t, not 1. Dividing by that, the
# bias correction, makes m a proper mean, and likewise v.
#
#     mhat_t = m_t / (1 - β1^t)                                                          (50.3)
#     vhat_t = v_t / (1 - β2^t)                                                          (50.4)
#     u_t = mhat_t / (√vhat_t + ε)                                                       (50.5)
#
# ε, 1e-8, keeps a number whose gradient was 0 in each step from a division 0/0; where √vhat is not
# far above it, the step is shorter. (The β and the ε of card 20 are other numbers.)
#
# The W in AdamW is weight decay: each step also shrinks the weights a little, λ says how much, so
# that those which the data does not need fade away. What works against learning by heart is called
# regularisation, and this does. It is not put into the gradient: there the division by √vhat would
# make it weak for numbers with large gradients and strong for those with small ones.
#
#     u_t ← u_t + λ θ_(t-1)   only in arrays of two or more axes                         (50.6)
#     θ_t = θ_(t-1) - η_t u_t                                                            (50.7)
#
# η_t is the learning rate of this step, η(t) in card 52. Only matrices decay, and of both tables
# even rows that no window uses. A bias or a gain is one number for a whole column and cannot learn
# a text by heart, and pulling a gain towards 0 would silence its feature.
#
# In code 50.1 reads m + (1 - β1)(g - m), the same with the brackets multiplied out; 50.2 likewise.
#
#     head_w (d, V) = (32, V)               (4, 10)       decays
#     head_b (V,) = (V,)                    (10,)         does not

# %%
class AdamW:
    """The optimizer. `m` and `v` hold the running means by name, `t` the steps taken (card 50)."""

    def __init__(self, params, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1):
        self.beta1, self.beta2, self.eps, self.weight_decay = beta1, beta2, eps, weight_decay
        self.t = 0
        self.m = {name: np.zeros_like(theta) for name, theta in params.items()}
        self.v = {name: np.zeros_like(theta) for name, theta in params.items()}

    def step(self, params, grads, lr):
        """One update of the arrays in params, in place, with the learning rate lr (card 50)."""
        self.t += 1
        for name, theta in params.items():
            g, m, v = grads[name], self.m[name], self.v[name]
            m += (1 - self.beta1) * (g - m)                                 #         (50.1)
            v += (1 - self.beta2) * (g * g - v)                             #         (50.2)
            mhat = m / (1 - self.beta1 ** self.t)                           #         (50.3)
            vhat = v / (1 - self.beta2 ** self.t)                           #         (50.4)
            u = mhat / (np.sqrt(vhat) + self.eps)                           #         (50.5)
            if theta.ndim >= 2:
                u += self.weight_decay * theta                              #         (50.6)
            theta -= lr * u                                                 #         (50.7)


def demo_adamw():
    params = {"matrix": np.array([[2.0]]), "bias": np.array([2.0])}
    opt = AdamW(params)
    print("β1 0.9, β2 0.99, ε 1e-8, λ 0.1, η 0.01; a matrix and a bias, both 2 at first")
    print(" t     g         m         v      mhat      vhat   u (50.5)    matrix      bias")
    for g in (0.3, -0.1, 0.2):
        opt.step(params, {"matrix": np.array([[g]]), "bias": np.array([g])}, lr=0.01)
        m, v = opt.m["bias"][0], opt.v["bias"][0]
        mhat, vhat = m / (1 - 0.9 ** opt.t), v / (1 - 0.99 ** opt.t)
        row = m, v, mhat, vhat, mhat / math.sqrt(vhat), params["matrix"][0, 0], params["bias"][0]
        print(f"{opt.t:2}{g:6.1f}" + "".join(f"{x:10.6f}" for x in row))
    print("first step: matrix 2 - 0.01 * (1 + 0.1 * 2) = 1.988, bias 2 - 0.01 * 1 = 1.99")
    print("after 100 steps with g = 1; 0.001; 1 and -1 in turn; ε; 0; 1, but 100 at t = 90:")
    params = {"bias": np.zeros(6)}
    opt = AdamW(params)
    for t in range(1, 101):
        g = np.array([1.0, 0.001, -(-1.0) ** t, 1e-8, 0.0, 100.0 if t == 90 else 1.0])
        opt.step(params, {"bias": g}, lr=1.0 if t == 100 else 0.0)
    show("u", -params["bias"])
    e = example(50)
    AdamW(e.params).step(e.params, e.grads, lr=0.05)
    print("the head_b of demo 45 after a first step with η = 0.05:")
    show("d head_b", e.grads["head_b"])
    show("head_b", e.params["head_b"])

if __name__ == "__main__": demo(demo_adamw)

# %% [markdown]
# ### 51. Gradient clipping
#
# Now and then a batch gives a gradient far larger than usual. It fills both running means of card
# 50: m then points its way for many steps, and v stays so large that the steps after them are too
# small (see the last u of its demo). So all gradients together are taken as one long vector, and
# where its length, the norm, is above a limit c, it is shortened to c. Its direction stays. The
# program's limit is 1, the usual value. In its default run hardly a step reaches it at first, as
# `--log` shows; late, when the model is surer of itself, most steps are shortened a little. In the
# small run at the end of chapter 9 the first steps are.
#
#     ‖g‖ = √(∑_k ∑_i g²_ki)                                                             (51.1)
#     g_k ← g_k · c / ‖g‖   for every key k, only when ‖g‖ > c                           (51.2)
#
# k runs over the arrays, each under its name, its key; i over all entries of an array. One norm
# serves all, clipping by global norm: clipping each array by itself would change the direction. A
# norm that is not finite scales nothing: the caller should stop. `np.vdot(g, g)` sums squares.

# %%
def clip_grad_norm(grads, max_norm):
    """The norm of all gradients before clipping; scales them in place (card 51)."""
    if not max_norm > 0:
        raise BadInput(f"the largest norm must be above 0, got {max_norm}")
    norm = math.sqrt(sum(np.vdot(g, g) for g in grads.values()))            #         (51.1)
    if max_norm < norm < math.inf:
        for g in grads.values():
            g *= max_norm / norm                                            #         (51.2)
    return norm


def demo_clipping():
    for b, c in ((6.0, 3.5), (6.0, 7.0), (6.0, 8.0), (math.inf, 8.0)):
        grads = {"a": np.array([2.0, -3.0]), "b": np.array([[b]])}
        norm = clip_grad_norm(grads, c)
        print(f"a = 2 -3, b = {b}, c = {c}: norm √(2² + 3² + b²) = {norm:.4f}, then")
        show("a and b", [*grads["a"], *grads["b"][0]])
    grads = {name: example(51).grads[name] for name in ("head_b", "block0.wq")}
    print(f"d head_b, d b0 wq of demo 46: norm {clip_grad_norm(grads, 0.2):.4f}, c = 0.2, then")
    show("d head_b", grads["head_b"])
    show("d b0 wq", grads["block0.wq"])

if __name__ == "__main__": demo(demo_clipping)

# %% [markdown]
# ### 52. Learning-rate schedule
#
# Large steps early, small steps late: first to get somewhere, then to settle. At the very start,
# though, the gradients of the first batches point much the same way, since every prediction is
# wrong alike, and Adam answers with steps of full length. So the rate first rises in a straight
# line, the warm-up of t_warm steps, to ηmax. Then it falls along half a cosine wave, flat at both
# ends, to ηmin at the last step, t_total: cosine decay.
#
#     η(t) = ηmax · t / t_warm,  t ≤ t_warm                                              (52.1)
#     frac = (t - t_warm) / (t_total - t_warm),  t > t_warm                              (52.2)
#     η(t) = ηmin + (1/2)(ηmax - ηmin)(1 + cos(π frac)),  t_warm < t ≤ t_total           (52.3)
#
# Both pieces give ηmax at t = t_warm. The first step of a warm-up has ηmax / t_warm, so none is
# wasted at rate 0. The cosine would rise again after t_total; there the rate stays at ηmin.

# %%
def lr_schedule(t, lr_max, lr_min, warmup, total):
    """The learning rate of step t = 1, 2, ... (card 52)."""
    if t <= warmup:
        return lr_max * t / warmup                                          #         (52.1)
    if t >= total:
        return lr_min
    frac = (t - warmup) / (total - warmup)                                  #         (52.2)
    return lr_min + 0.5 * (lr_max - lr_min) * (1 + math.cos(math.pi * frac))  # (52.3)


def demo_schedule():
    print("ηmax = 0.01, ηmin = 0.001, t_warm = 4, t_total = 16")
    for t in (1, 2, 3, 4, 6, 7, 10, 13, 14, 16, 20):
        rate = lr_schedule(t, 0.01, 0.001, 4, 16)
        print(f"t = {t:2}  η = {rate:.6f}  {'#' * round(4000 * rate)}")
    print(f"no warm-up: the first of 16 steps has η = {lr_schedule(1, 0.01, 0.001, 0, 16):.6f}")

if __name__ == "__main__": demo(demo_schedule)

# %% [markdown]
# ### Exercises of chapter 8
#
# - **8a.** A number has the gradient g at the first step. How far does it move, with η = 0.01, no
#   decay, a tiny ε, β1 = 0.9 and β2 = 0.99? How far without 50.3 and 50.4, that is with m and v in
#   place of mhat and vhat? How far without them if β2 = 0.999?
# - **8b.** Forget the 1/T of 18.2: leave out the line `dlogits /= y.size`. Which golden files
#   change? The text that card 61 writes is the same. Why is that no comfort?

# %% [markdown]
# ## Chapter 9. Training
#
# All parts are there. Training is a loop over them; three pieces of its arithmetic come first.

# %% [markdown]
# ### 53. Mini-batch loss and gradient
#
# The loss of a batch is the mean of the losses of its windows, and its gradient is the mean of
# their gradients, since the derivative of a mean is the mean of the derivatives. B is the actual
# number of windows: the last batch of an epoch may be smaller.
#
#     B = number of rows of xb                                                           (53.1)
#     loss ← loss + loss(i) / B,         i = 1, ..., B,  starting from loss = 0          (53.2)
#     gbar_k ← gbar_k + g(i)_k / B       for every key k, starting from zeros            (53.3)
#     loss = (1/B) ∑_i loss(i),  i = 1, ..., B                                         † (53.4)
#     gbar_k = (1/B) ∑_i g(i)_k,  i = 1, ..., B                                        † (53.5)
#
# g(i)_k is the gradient of window i for the array with key k. `loss_and_grads` takes a whole batch
# and gives its means at once. A batch that is too large for the memory is worked on in parts, as
# equal as `np.array_split` can make them (gradient accumulation). The means of a part get its share
# of the batch, its number of windows divided by B: with parts of one window, 1/B.
#
# Shapes at the default sizes:  xb (B, T) = (16, 16), yb (B, T) = (16, 16).

# %%
def batch_loss_and_grads(params, xb, yb, config, parts=1):
    """Mean loss and gradients over the windows xb, yb (B, T); ValueError for none (card 53)."""
    B = len(xb)                                                             #         (53.1)
    loss, gbar = 0.0, {k: np.zeros_like(theta) for k, theta in params.items()}
    for x, y in zip(np.array_split(xb, parts), np.array_split(yb, parts)):
        loss_i, g = loss_and_grads(params, x, y, config)
        loss += loss_i * (len(x) / B)                                       #         (53.2)
        for k in gbar:
            gbar[k] += g[k] * (len(x) / B)                                  #         (53.3)
    return loss, gbar


def demo_mini_batch():
    e = example(53)
    losses = []
    for i, (x, y) in enumerate(zip(e.xs, e.ys)):
        loss, grads = loss_and_grads(e.params, x, y, e.config)
        losses.append(f"{loss:.4f}")
        print(f"window {i}  x {x.tolist()}  y {y.tolist()}  loss {loss:.4f}")
        show("d bo", grads["block0.bo"])
    for parts in (1, 2, 5):
        loss, grads = batch_loss_and_grads(e.params, e.xs, e.ys, e.config, parts)
        print(f"batch, parts: {parts}  loss ({' + '.join(losses)}) / {len(losses)} = {loss:.4f}")
        show("d bo", grads["block0.bo"])

if __name__ == "__main__": demo(demo_mini_batch)

# %% [markdown]
# ### 54. Step counts
#
# The schedule of card 52 must know how many steps there will be, its t_total. One step is one
# batch, so an epoch takes windows / B steps, rounded up as in card 9.
#
#     steps_per_epoch = ⌈windows / B⌉                                                    (54.1)
#     total_steps = epochs · steps_per_epoch                                             (54.2)

# %%
def step_counts(windows, batch, epochs):
    """steps_per_epoch, total_steps (card 54)."""
    steps_per_epoch = -(-windows // batch)                                  #         (54.1)
    total_steps = epochs * steps_per_epoch                                  #         (54.2)
    return steps_per_epoch, total_steps


def demo_step_counts():
    print("windows    B  epochs   windows / B   steps per epoch   total steps")
    for windows, batch, epochs in ((5, 2, 3), (3, 8, 5), (1000, 16, 10)):
        per_epoch, total = step_counts(windows, batch, epochs)
        print(f"{windows:7}{batch:5}{epochs:8}{windows / batch:14.2f}{per_epoch:18}{total:14}")

if __name__ == "__main__": demo(demo_step_counts)

# %% [markdown]
# ### 55. Validation loss
#
# On windows that were never used for training, the loss tells whether the model has learned the
# language or only the text. As long as it falls with the training loss, training helps. When it
# rises while the training loss still falls, the model learns the text by heart: it overfits.
#
#     val_loss = (1/M) ∑_j loss_j,  j = 1, ..., M                                        (55.1)
#
# M is here the number of validation windows. All have the same length, so this mean of means is
# also the mean over all positions. Going window by window takes little memory.
#
# Shapes at the default sizes:  x (M, T) = (M, 16), y (M, T) = (M, 16).

# %%
def validation_loss(params, x, y, config):
    """Mean loss over the windows x, y (M, T), a float; ValueError for none (card 55)."""
    M, val_loss = len(x), 0.0
    if M == 0:
        raise BadInput("the validation loss needs one window or more, got none")
    for x_j, y_j in zip(x, y):
        logits, _ = forward(params, x_j, config)                            # (T, V)
        loss_j, _ = cross_entropy_forward(logits, y_j)
        val_loss += loss_j / M                                              #         (55.1)
    return val_loss


def demo_validation_loss():
    e = example(55)
    x, y = make_windows(e.val_ids, 3, stride=1)
    print(f"held-out ids {e.val_ids.tolist()}, stride 1: {len(x)} windows")
    losses = [validation_loss(e.params, x[j:j + 1], y[j:j + 1], e.config) for j in range(len(x))]
    for x_j, y_j, loss in zip(x, y, losses):
        print(f"x {x_j.tolist()}  y {y_j.tolist()}  loss {loss:.4f}")
    print(f"({' + '.join(number(loss, 4) for loss in losses)}) / {len(losses)} = "
          f"{validation_loss(e.params, x, y, e.config):.4f}")

if __name__ == "__main__": demo(demo_validation_loss)

# %% [markdown]
# ### The training loop
#
# A batch gives a loss and gradients. The gradients are clipped (card 51), the schedule says how
# long the step is (card 52), the optimizer takes it (card 50). When all windows have been seen, the
# next epoch begins, in a new order. A loss or a norm that is not finite means that training has
# diverged. Going on would spoil the parameters, so the loop stops before it takes that step.
#
# The demo trains a model with two blocks on a text of 15 words that comes three times, so what it
# holds out is no new text. Then the model goes on from `the`, as chapter 10 explains.

# %%
def epoch_after_epoch(x, y, batch, rng):
    """Yield the batches of card 9, for one epoch after the other, without end."""
    while True:
        yield from iterate_batches(x, y, batch, rng)


def training_steps(params, batches, config, optimizer, schedule, max_norm):
    """Take a step for each of the batches; yield its t, loss, lr and norm before clipping."""
    for xb, yb in batches:
        loss, grads = batch_loss_and_grads(params, xb, yb, config)
        norm = clip_grad_norm(grads, max_norm)
        t = optimizer.t + 1
        if not math.isfinite(loss + norm):
            raise FloatingPointError(f"step {t}: loss {loss}, gradient norm {norm}")
        lr = schedule(t)
        optimizer.step(params, grads, lr)
        yield t, loss, lr, norm


def demo_training():
    text = "the hen sat in the sun. the sun set. the hen ran to the den. " * 3
    tokenizer = build_tokenizer(text, 12)
    train_ids, val_ids = split_ids(tokenizer.encode(text), 0.2)
    config = ModelConfig(len(tokenizer.itos), 6, 8, width=12, heads=3, hidden=20, layers=2)
    x, y = make_windows(train_ids, 6, stride=2)
    validation = make_windows(val_ids, 6, stride=6)
    params = init_params(config, np.random.default_rng([3, 0]), np.float64)
    print(f"V = {config.vocab_size}, T = 6, Tmax = 8, d = 12, H = 3, F = 20, L = 2: "
          f"{count_params(params)} parameters\n{len(train_ids)} ids, {len(x)} windows (stride 2),"
          f" B = 5; held out {len(val_ids)} ids, {len(validation[0])} windows (stride 6)")
    print("β1 = 0.9, β2 = 0.99, λ = 0.1, c = 1, η up to 0.06 in 4 steps, then down to 0.006")
    batches = epoch_after_epoch(x, y, 5, np.random.default_rng([3, 1]))
    schedule = lambda t: lr_schedule(t, 0.06, 0.006, 4, 20)
    print("step    loss       lr     norm before clipping")
    steps = training_steps(params, batches, config, AdamW(params), schedule, 1.0)
    for _, (t, loss, lr, norm) in zip(range(20), steps):
        print(f"{t:4}{loss:9.4f}{lr:9.5f}{norm:9.4f}")
    print(f"validation loss {validation_loss(params, *validation, config):.4f}")
    ids = tokenizer.encode("the")
    for _ in range(16):                             # as in card 61, the likeliest token each time
        ids.append(int(forward(params, ids[-6:], config)[0][-1].argmax()))
    print(f"and writes {tokenizer.decode(ids)!r}")

if __name__ == "__main__": demo(demo_training)

# %% [markdown]
# ### Exercises of chapter 9
#
# - **9a.** The demo of card 53 has five windows. Cut them into the first two and the last three,
#   take the mean loss of each part, and the mean of the two. What weight did each window get?
# - **9b.** 1,000 windows, batches of 16, 3 epochs: how many steps, and how many windows has the
#   last batch of an epoch? Does a window of the last batch count as much as any other?

# %% [markdown]
# ## Chapter 10. Generation
#
# The trained model says how likely each token is to come next. To write, choose one, put it at the
# end, and ask again. In the program logits come in float32; choosing is done in float64.

# %% [markdown]
# ### 56. Greedy guard
#
# The next card divides the logits by a temperature τ. The lower τ is, the more surely the likeliest
# token wins, or one of several as likely. At 0 the largest logit is taken instead.
#
#     τ < 1e-6  ⇒  next = argmax_i logits_i                                              (56.1)
#
# This is called greedy decoding. Among equal logits the lowest id wins. The bound 1e-6 is as good
# as any other small number: below it only logits within some millionths of the largest would count.
#
# Shapes:  logits (V,) gives a whole number.

# %%
def greedy(logits):
    """The id of the largest of the logits (V,), the lowest among equals (card 56)."""
    return int(np.argmax(logits))                                           #         (56.1)


def demo_greedy():
    for logits in ([2.0, 5.0, 5.0], [0.3, -1.0, 0.2]):
        print(f"logits {logits}: next = {greedy(np.array(logits))}")
    e = example(56)
    best = greedy(e.logits[-1])
    print("the running example, the last row of the logits of demo 45:")
    show("logits", e.logits[-1])
    print(f"next = {best}, the token {e.tokenizer.itos[best]!r}; "
          f"the text has {e.tokenizer.itos[e.y[-1]]!r}")

if __name__ == "__main__": demo(demo_greedy)

# %% [markdown]
# ### 57. Temperature
#
# Always taking the likeliest token makes dull text that runs in circles. Drawing by the model's
# probabilities makes lively text with mistakes, because all the unlikely tokens together are quite
# likely. A temperature between 0 and 1 lies between the two: it divides the logits before softmax.
#
#     p = softmax(logits / τ)                                                            (57.1)
#
# With τ below 1 the differences grow and the likeliest token wins more often. With τ above 1 they
# shrink. Since exp(z/τ) is exp(z) to the power 1/τ, and common divisors cancel, each probability is
# raised to the power 1/τ, and then all are scaled to sum to 1.
#
# Shapes:  logits (V,) give p (V,).

# %%
def temperature_softmax(logits, temperature):
    """Probabilities p (V,) of the logits (V,), with 0 < τ (card 57)."""
    return softmax_forward(logits / temperature)                            # (V,)    (57.1)


def demo_temperature():
    logits = np.log([1.0, 2.0, 5.0])
    show("logits", logits)
    for temperature in (0.5, 1.0, 2.0, 100.0, 0.001):
        show(f"τ = {temperature:g}", temperature_softmax(logits, temperature))
    print("τ = 0.5 squares the parts: 1, 4 and 25 of 30")

if __name__ == "__main__": demo(demo_temperature)

# %% [markdown]
# ### 58. Top-k
#
# Many tokens make no sense at a given place. Each is unlikely, but there are hundreds, and now and
# then one is drawn. Top-k keeps only the k likeliest and sets the rest to 0.
#
#     c = top_k-th largest value of p, counting repeats                                  (58.1)
#     p'_i = p_i if p_i ≥ c else 0                                                       (58.2)
#     p''_i = p'_i / ∑_j p'_j                                                            (58.3)
#
# Tokens that tie with the last one kept are kept too: nothing speaks for one against another. With
# k = 0, or k = V or more, nothing is cut. `np.sort` sorts upwards: [-k] is the k-th largest.
#
# Shapes:  p (V,) gives p (V,), with zeros in it.

# %%
def keep_top_k(p, top_k):
    """p (V,) with only the top_k likeliest kept, ties too; 0 keeps all (card 58)."""
    if top_k < 0:
        raise BadInput(f"top-k must be 0 (off) or more, got {top_k}")
    if top_k == 0:
        return p
    c = np.sort(p)[-min(top_k, p.size)]                                     #         (58.1)
    kept = p * (p >= c)                                                     # (V,)    (58.2)
    return kept / kept.sum()                                                # (V,)    (58.3)


def demo_top_k():
    p = np.array([0.1, 0.4, 0.2, 0.1, 0.2])
    show("p", p)
    for k in (1, 2, 3, 4, 6, 0):
        show(f"k = {k}", keep_top_k(p, k))
    print("k = 2 keeps three tokens: two tie for second place")

if __name__ == "__main__": demo(demo_top_k)

# %% [markdown]
# ### 59. Top-p
#
# A fixed k is too many where the model is sure and too few where much is possible. Top-p, or
# nucleus sampling, keeps as many as are needed to reach a total probability: rank the tokens from
# likely to unlikely, add up, stop where the threshold is reached.
#
#     order = token ids sorted by p, largest first                                       (59.1)
#     C_j = p[order[0]] + ... + p[order[j]]                                              (59.2)
#     last = min {j : C_j ≥ top_p},  keep order[0], ..., order[last]                     (59.3)
#     q_i = p_i / (p[order[0]] + ... + p[order[last]]) for kept i,  q_i = 0 otherwise    (59.4)
#
# The token that takes the total to the threshold is kept, so one always stays. The sort is stable:
# equal entries keep their order, the lower id ranks first, and unlike top-k, top-p may part a tie.
# A computer adds 0.7 and 0.2 to a hair less than 0.9, so a total counts as reaching the threshold
# from a trillionth below. A threshold of 1 keeps all.
#
# `np.argsort` gives the ids in sorted order, `np.cumsum` running totals. These grow, so the number
# of totals below the threshold is the index of the first that reaches it.
#
# Shapes:  p (V,) gives q (V,).

# %%
def keep_top_p(p, top_p):
    """p (V,) with only the likeliest kept whose total reaches top_p; 1 keeps all (card 59)."""
    if not 0 < top_p <= 1:
        raise BadInput(f"top-p must be above 0 and at most 1 (off), got {top_p}")
    if top_p == 1:
        return p
    order = np.argsort(-p, kind="stable")                                   # (V,)    (59.1)
    C = np.cumsum(p[order])                                                 # (V,)    (59.2)
    last = (C < top_p - 1e-12).sum()                                        #         (59.3)
    kept = order[:last + 1]                                                 # (last + 1,)
    q = np.zeros_like(p)                                                    # (V,)
    q[kept] = p[kept] / p[kept].sum()                                       #         (59.4)
    return q


def demo_top_p():
    p = np.array([0.125, 0.5, 0.125, 0.25])
    order = np.argsort(-p, kind="stable")
    show_all(p=p, order=order, C=np.cumsum(p[order]))
    for top_p in (0.5, 0.51, 0.76, 1.0):
        show(f"top_p {top_p}", keep_top_p(p, top_p))
    print("0.76 needs a third token; of the two equal ones the lower id comes first")
    p = np.array([0.02] * 10 + [0.05] * 16)
    kept = [i for i, q_i in enumerate(keep_top_p(p, 0.4)) if q_i > 0]
    print(f"ten 0.02, then sixteen 0.05: top_p 0.4 keeps {kept}")

if __name__ == "__main__": demo(demo_top_p)

# %% [markdown]
# ### 60. Random choice
#
# What is left is a draw, after temperature, top-k and top-p: token i with probability p_i.
#
#     P(next = i) = p_i                                                                  (60.1)
#
# Lay the probabilities side by side as pieces of a line of length 1, and let a random number r
# between 0 and 1 point at it. Piece i is hit with probability p_i. The piece that r hits is the
# first whose running total exceeds r; its index is the number of totals that do not. Rounding may
# make the last total slightly less than 1, so r is scaled by it. Token 1 has p = 0, no width:
#
#     p     0.2  0             0.5                 0.3
#     0 ─────────┬───────────────────────────┬──────────────── 1
#       token 0  (1)        token 2          │     token 3
#                0.2           ↑ r = 0.44    0.7
#
# A model that has gone wrong gives logits that are no numbers, or +∞, or -∞ for all tokens. They
# are refused. A -∞ among finite logits is accepted; it only rules its token out.
#
# Shapes:  logits (V,) give a whole number.

# %%
def next_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """p (V,) of the logits (V,) after temperature, top-k and top-p (cards 56 to 60)."""
    logits = np.asarray(logits, np.float64)                                 # (V,)
    if not 0 <= temperature < math.inf:
        raise BadInput(f"temperature must be 0 or more and finite, got {temperature}")
    if not math.isfinite(logits.max()):             # nan and +inf reach the maximum
        raise BadInput("the model's output is not finite: it has diverged in training")
    if temperature < 1e-6:
        p = np.zeros_like(logits)                                           # (V,)
        p[greedy(logits)] = 1.0                                             #         (56.1)
    else:
        p = temperature_softmax(logits, temperature)                        # (V,)
    return keep_top_p(keep_top_k(p, top_k), top_p)                          # (V,)


def sample_next(logits, rng, **choice):
    """The id of the next token, drawn from the logits (V,); choice as in next_probabilities."""
    totals = np.cumsum(next_probabilities(logits, **choice))                # (V,)
    r = rng.random() * totals[-1]
    return int((totals <= r).sum())                                         #         (60.1)


def demo_random_choice():
    logits = np.array([math.log(0.2), -math.inf, math.log(0.5), math.log(0.3)])
    show_all(p=next_probabilities(logits), totals=np.cumsum(next_probabilities(logits)))
    rng, again = np.random.default_rng(42), np.random.default_rng(42)
    for _ in range(5):
        print(f"r = {again.random():.4f}  next = {sample_next(logits, rng)}")
    drawn = [sample_next(logits, rng) for _ in range(2000)]
    show("of 2000", [drawn.count(i) for i in range(4)])
    show("τ 2", next_probabilities(logits, temperature=2))
    show("τ 2, k 2", next_probabilities(logits, temperature=2, top_k=2))
    show("and p 0.55", next_probabilities(logits, temperature=2, top_k=2, top_p=0.55))
    show("τ 0", next_probabilities(logits, temperature=0))
    print("the lowest temperature that is not greedy, for the logits 1 and 1.000001:")
    show("τ 1e-6", next_probabilities([1.0, 1.000001], temperature=1e-6))
    refused(next_probabilities, [0.0, math.nan])

if __name__ == "__main__": demo(demo_random_choice)

# %% [markdown]
# ### 61. Autoregressive loop
#
# To write, the model is given some text, the prompt. It reads the last ids of it, scores every
# token as the next one, draws one, puts it at the end and reads again. Its own words become its
# input; that is what autoregressive means.
#
#     x = ids[-context:]                                                                 (61.1)
#     logits = forward(x)[T-1]                                                           (61.2)
#     ids ← ids + [sample_next(logits, τ, top_k, top_p)]                                 (61.3)
#
# It reads no more than the context, the length of the trained windows: rows of the position table
# past it were never trained (see 27.3). T in 61.2 is the length of x.
#
# With a context of 3, the window slides over the growing text; its tokens get other position rows:
#
#     s|he| s        reads s|he| s          draws e
#     s|he| s|e      reads   he| s|e        draws e
#     s|he| s|e|e    reads      s|e|e       draws s
#
#     x (T,) = (16,)                        (3,)
#     logits (T, V) = (16, V)               (3, 10)

# %%
def generate(params, config, ids, n_tokens, rng, **choice):
    """ids with n_tokens more; ValueError below 0; choice as in next_probabilities (card 61)."""
    ids = [int(i) for i in ids]
    if n_tokens < 0:
        raise BadInput(f"the number of tokens to write must be 0 or more, got {n_tokens}")
    for _ in range(n_tokens):
        x = np.array(ids[-config.context:])                                 # (T,)    (61.1)
        logits, _ = forward(params, x, config)                              # (T, V)
        ids.append(sample_next(logits[-1], rng, **choice))                  #         (61.2) (61.3)
    return ids


def demo_autoregressive_loop():
    e = example(61)
    rng = np.random.default_rng(0)
    ids = e.tokenizer.encode("she")
    write = lambda: e.tokenizer.decode(generate(e.params, e.config, ids, 14, rng, temperature=0))
    print(f"greedy, untrained:      {write()!r}")
    batches = [make_windows(e.train_ids, 3, stride=1)] * 60
    optimizer = AdamW(e.params, weight_decay=0.0)
    steps = training_steps(e.params, batches, e.config, optimizer, lambda t: 0.05, math.inf)
    *_, (_, loss, _, _) = steps                     # all 60; the loss of the last
    print(f"greedy, after 60 steps: {write()!r}")
    print(f"training loss {loss:.2f}; the text: {e.text!r}")
    for _ in range(5):
        p = next_probabilities(forward(e.params, ids[-3:], e.config)[0][-1])
        best = np.argsort(-p, kind="stable")[:3]
        shares = ", ".join(f"{e.tokenizer.itos[i]!r} {p[i]:.2f}" for i in best)
        print(f"x {str(ids[-3:]):11} -> {shares}")
        ids = generate(e.params, e.config, ids, 1, rng)
    print(f"sampled: {e.tokenizer.decode(ids)!r}")

if __name__ == "__main__": demo(demo_autoregressive_loop)

# %% [markdown]
# ### Exercises of chapter 10
#
# - **10a.** The probabilities are 0.64, 0.16, 0.16, 0.04. What are they at temperature 2? At 1/2?
# - **10b.** Let generation read as far back as the position table goes: write `config.max_context`
#   in 61.1. Which golden files change, and why is the result worse?
# - **10c.** Is top-k with k = 1 the same as temperature 0?

# %% [markdown]
# ## Answers
#
# Only the lines that an exercise names are changed. So after a change to a forward pass, the
# backward pass is still that of the book. Golden files are named by the numbers of their cards.
# `golden/training.txt` changes too, but not in 1b, 3b, 7b and 10b, and in 5b its training fails.
#
# - **1a.** The pre-tokens are `low`, ` low` and ` lower`, each once. At first (l, o) and (o, w)
#   occur 3 times, (blank, l) twice, the others once. The smallest of the two best is (l, o). Then
#   (lo, w) occurs 3 times, and then (blank, low) twice. The merges make lo, low and ` low`. After
#   that every pair occurs once, and learning stops.
# - **1b.** Golden files that change: 3. There some short texts get more merges: `abcdef` becomes
#   abcd, e, f, and `xabyab` becomes x, abyab. The running example asks for few merges, and has
#   enough pairs that occur more often. With more merges than a text supports, this change would
#   fill the vocabulary with whole words that are seen once.
# - **1c.** No. A blank is now matched by `\s+` and is a pre-token of its own; each character still
#   lands in exactly one piece. The merges are now he, se, es, and no blank can be joined to the
#   word behind it: the text has 23 ids, where it had 22. Longer texts lose more.
# - **2a.** By 8.1, ⌈(1,000 - 16) / 4⌉ = 246 windows and ⌈984 / 16⌉ = 62. The last start at 980 and
#   976, their last targets are ids[996], ids[992]; ids[0] is none: 996 and 992 of the ids are.
# - **2b.** Golden files that change: 7, 9, 17, 45, 46, 49 to 51, 53, 55, 56, 61. In card 61 the
#   training loss falls to 0.01 within 60 steps, where it was 0.30. The model has learned to copy:
#   after each token it gives that token again.
# - **3a.** Golden files that change: 12, 40, 46, 49 to 51, 53. The gradient check calls wrong the
#   linear layer and what is made of linear layers: attention, the feed-forward layer and the block.
#   Of the arrays, the biases of all linear layers are wrong: bq, bv, bo, ff1_b and ff2_b of each
#   block, and head_b. Those of LayerNorm are right, since `layer_norm_backward` forms its own sums.
#   And bk is right because its gradient is 0, by 38.14, and so is the mean of what adds up to 0.
# - **3b.** Golden files that change: 15, 57, 60. Only these demos hand large positive scores to
#   `softmax_forward`: e^1000 overflows to ∞, and ∞/∞ is no number. Card 17 takes the maximum off
#   itself. The scores of attention in the other demos are small, and for them both forms agree in
#   all digits shown. Such a fault sleeps until a model is trained long enough to have large scores.
# - **3c.** Write a for tanh u. By the product rule the slope of x/2 · (1 + a) is (1 + a)/2 + x/2 ·
#   a', and by the chain rule a' = (1 - a²) u', with u' = √(2/π) (1 + 3 · 0.044715 x²). Each entry
#   touches only itself, as in 14.2. In code, with `slope` for u':
#
#       def gelu_forward(Z):
#           a = np.tanh(math.sqrt(2 / math.pi) * (Z + 0.044715 * Z * Z * Z))
#           R = Z / 2 * (1 + a)
#           return R
#
#       def gelu_backward(dR, Z):
#           a = np.tanh(math.sqrt(2 / math.pi) * (Z + 0.044715 * Z * Z * Z))
#           slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * Z * Z)
#           dZ = dR * ((1 + a) / 2 + Z / 2 * (1 - a * a) * slope)
#           return dZ
#
#   In place of `relu_forward` and `relu_backward` in cards 39 and 40 they pass the check.
# - **4a.** Golden files that change: 27, 61. In the window of card 49 no token stands twice, so
#   there nothing is lost. `gradcheck` draws three windows of five ids from eleven for its model, so
#   some id must come again, and it calls tok_emb wrong. The embedding alone gets two windows in
#   which an id comes three times, and is called wrong too. A check is as good as its example.
# - **4b.** Golden files that change: 26, 45, 46, 49 to 51, 53, 55, 56, 61. With one block the order
#   has no effect: the last position asks, each earlier one answers with what it is, and the sum of
#   35.2 does not care where the terms stand. With two blocks it has: by the mask, each earlier row
#   has seen only the tokens before it, so what the second block reads does depend on it.
# - **5a.** Golden files that change: 32 to 42, 45, 46, 49 to 51, 53, 55, 56, 61. These are the
#   cards that show the scaled scores, the weights made of them, or what follows from the weights.
#   The gradient check calls wrong what lies before the scores: wq, bq and wk, ln1_g and ln1_b, all
#   earlier blocks and both tables. Right are bk, whose gradient is 0 in any case, and what comes
#   after the scores in the last block: wv, bv, wo, bo, ln2_g, ln2_b, the feed-forward layer, the
#   last LayerNorm and the head. Drop the divisions by √hs in the backward pass too, in 38.8 and in
#   38.9, and all arrays are right again: this is another model, with its own gradient.
# - **5b.** To nothing. All its scores are -∞, the largest is -∞ too, and -∞ minus -∞ is no number,
#   nan in NumPy: row 0 of A is nan. In the next block its key is nan too. So every row has a score
#   that is nan, and softmax makes the whole row nan. The loss is nan, and with it all gradients but
#   those of table rows that are not used. Golden files that change: 33 to 42, 45, 46, 49 to 51, 53,
#   55, 56, 61. The demo of card 61 stops with an error. This is why the diagonal stays.
# - **5c.** The average of row 2 of dA under row 2 of A is 0.4036 · 0.9117 + 0.3194 · 0.3306 +
#   0.2770 · 0.1104 = 0.5042 with all digits, so dS_20 = 0.4036 (0.9117 - 0.5042) = 0.1645. Key 1 is
#   asked by the queries 1 and 2, with 0.1123 and -0.0554 in column 1 of dS: dKh_10 = (0.1123 ·
#   (-0.3509) + (-0.0554) · 0.5083) / √2 = -0.0478. Only query 2 sees key 2: dKh_20 = (-0.1091 ·
#   0.5083) / √2 = -0.0392. Column 0 adds up to 0.0870 - 0.0478 - 0.0392 = 0. In a sum over the keys
#   the numbers of each query cancel, as each row of dS sums to 0; so dbk is 0.
# - **6a.** Golden files that change: 41, 42, 45, 46, 49 to 51, 53, 55, 56, 61. Wrong are tok_emb,
#   pos_emb and all that block 0 has but bk. 42.6 still adds dXmid to dX, though X no longer reaches
#   Xmid directly. So each block hands a false gradient down to the one below it. The arrays of the
#   last block get theirs before that happens.
# - **6b.** 163,087,441. Without head_w and head_b it is 50,257 · 768 + 50,257 less: 124,439,808.
# - **6c.** E is used twice, so two gradients add up: the sum of 27.2, and what 12.2 gives for
#   head_w, turned on its side: dlogitsᵀ Xf.
# - **7a.** Golden files that change: 38, 42, 46, 49, 51, 61. Wrong are wq, bq, wk and bk, and
#   everything before them: ln1_g, ln1_b, all earlier blocks and both tables. Right are, in the last
#   block, wv, bv, wo, bo, ln2_g, ln2_b and the feed-forward layer, and what comes after it: the
#   last LayerNorm and the head. dS does not reach them. Without the sum the rows of dS no longer
#   add up to 0, and that was what made the gradient of bk vanish in 38.14.
# - **7b.** A float32 number has about 7 digits, so a loss of about 2 has an error near 1e-7. 47.1
#   divides it by 2h = 2e-5: an error near 0.005, several percent of a usual slope here, and the
#   check allows 0.01 percent. The second step, a tenth of it, makes the error ten times as large.
#   Besides, W + h itself is rounded. The measured slope is wrong, not the gradient.
# - **8a.** With the corrections mhat = g and vhat = g², so u is g/|g| and the number moves by 0.01,
#   whatever g is. Without them m = 0.1 g and √v = 0.1 |g|, which for β2 = 0.99 happens to give the
#   same step. For β2 = 0.999, √v = 0.0316 |g|: the first step is 3.16 times as long.
# - **8b.** Golden files that change: 18, 46, 49 to 51, 53. The gradients are too large by a factor,
#   the number of positions that go through the model at once; so in card 53 the parts no longer
#   agree. AdamW divides m by the root of v, where the factor cancels, and demo 61 does not clip; so
#   its training looks healthy. But a limit c cuts more of them: in the demo of the training loop
#   the norm is above c = 1 in 6 of the 20 steps, and now in all. The gradient check tells at once.
# - **9a.** (2.5440 + 4.1966)/2 = 3.3703 and (2.9195 + 2.9500 + 2.9260)/3 = 2.9318; their mean is
#   3.1511, and the loss is 3.1072. The first two windows got 1/4 each, the other three 1/6 each,
#   and all should get 1/5. So each part must count by its share of the batch.
# - **9b.** ⌈1,000 / 16⌉ = 63 steps for each epoch, 189 in all. The last batch has 1,000 - 62 · 16 =
#   8 windows. Each weighs 1/8 in its step, where the others weigh 1/16: twice as much.
# - **10a.** Dividing logits by τ raises each probability to the power 1/τ, and then all are scaled
#   to the sum 1. At 2: roots 0.8, 0.4, 0.4, 0.2, sum 1.8: 0.4444, 0.2222, 0.2222, 0.1111. At 1/2:
#   squares 0.4096, 0.0256, 0.0256, 0.0016, sum 0.4624: 0.8858, 0.0554, 0.0554, 0.0035.
# - **10b.** Golden files that change: 61. Rows 3 and 4 of the position table were never trained, as
#   no window is longer than T = 3. A longer text now adds those random rows to its last positions.
# - **10c.** Not where there is a tie, or rounding makes one. Temperature 0 always takes the first
#   of the largest logits. 58.2 keeps all as large as the largest, and the draw chooses.

# %% [markdown]
# ## Terms and sources
#
# The field's words, and the cards that explain them, where no card's title says it: activation
# function 13; Adam 50; attention 28 to 37; backpropagation, chapter 3; bias correction 50; BPE,
# byte pair encoding, chapter 1; broadcasting 11; clipping by global norm 51; cosine decay 52; epoch
# 9; exponential moving average 50; feed-forward network, MLP 39; GELU, exercise 3c; gradient
# accumulation 53; greedy decoding 56; LM head 45; hidden unit 13; Jacobian 16; key, query, value
# 28; learning rate 50; logit, loss, maximum likelihood 17; moments 50; nucleus sampling 59;
# overfitting 55; pre-LN 41; regularisation 50; residual stream, sublayer 41; SGD 50; stride 7;
# token 1; vanishing gradient 42; warm-up 52; weight decay 50; weight tying 45.
#
# Where the ideas come from:
#
# - Byte pair encoding: Gage, 1994, A new algorithm for data compression; for words, Sennrich and
#   others, 2016, Neural machine translation of rare words with subword units.
# - Backpropagation: Rumelhart et al., 1986, Learning representations by back-propagating
#   errors.
# - Xavier initialisation: Glorot and Bengio, 2010, Understanding the difficulty of training deep
#   feedforward neural networks.
# - Residual connections: He et al., 2016, Deep residual learning for image recognition.
# - Layer normalisation: Ba et al., 2016, Layer normalization.
# - Attention and the transformer: Vaswani et al., 2017, Attention is all you need.
# - GPT: Radford et al., 2018, Improving language understanding by generative pre-training;
#   2019, Language models are unsupervised multitask learners (GPT-2).
# - Pre-LN: Xiong et al., 2020, On layer normalization in the transformer architecture.
# - GELU: Hendrycks and Gimpel, 2016, Gaussian error linear units.
# - Adam: Kingma and Ba, 2015, Adam: a method for stochastic optimization. Weight decay beside it:
#   Loshchilov and Hutter, 2019, Decoupled weight decay regularization.
# - Clipping: Pascanu et al., 2013, On the difficulty of training recurrent neural networks.
# - Cosine decay: Loshchilov and Hutter, 2017, SGDR: stochastic gradient descent with warm restarts.
#   Warm-up: Goyal et al., 2017, Accurate, large minibatch SGD.
# - Top-k: Fan et al., 2018, Hierarchical neural story generation.
# - Nucleus sampling: Holtzman et al., 2020, The curious case of neural text degeneration.

# %% [markdown]
# ## The program
#
# The book ends here. What follows puts its functions to work, and has no equations.

# %%
import argparse, contextlib, ctypes, difflib, hashlib, html, io, json, keyword, os, shlex
import shutil, signal, textwrap, time, timeit, traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass, replace
from itertools import islice, repeat
from pathlib import Path

THIS = Path(globals().get("__file__", "tinygpt.py")).resolve()      # a notebook has no __file__


def plain_lines(text):
    """Line ends of all systems as a line feed."""
    return re.sub("\r\n?", "\n", text)


def read_text(path):
    """The text of a UTF-8 file, without a byte order mark; BadInput where it is none."""
    try:
        text = plain_lines(Path(path).read_bytes().decode().removeprefix("\ufeff"))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}; name a text with --text") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8: byte 0x{error.object[error.start]:02X} at offset "
                       f"{error.start}; save it as UTF-8 text") from None
    if not text or "\0" in text:
        raise BadInput(f"{path} is empty or holds NUL: training needs a text, saved as UTF-8")
    return text


# %% [markdown]
# ### The book as index and page
#
# The file is a row of cells, text and code. They give the index of the cards, a checksum of the
# code, by which models made by other code are known, and the book as a page for a browser, with its
# formulas as MathML and as LaTeX.

# %%
def cells():
    """[(line number, lines)] of the cells of the book; the first line of each begins with # %%."""
    lines = THIS.read_text(encoding="utf-8").splitlines()
    lines = lines[:lines.index("# ## The program") - 1]
    starts = [i for i, line in enumerate(lines) if line.startswith("# %%")] + [len(lines)]
    return [(a + 1, lines[a:b]) for a, b in zip(starts, starts[1:])]


def cards():
    """The 61 cards and the training loop, in order, each with the attributes set here."""
    found = []
    for at, lines in cells():
        if match := re.fullmatch(r"# #+ (?:(\d+)\. )?(.+?)(?: \(\w+\))?", lines[1]):
            way = re.findall(r"backward|forward(?=\)|$)", lines[1].lower())
            card = SimpleNamespace(n=int(match[1] or 0), title=match[2], direction="".join(way[:1]),
                                   line=at + 1, functions=[], equations={}, derived=[], tagged=[])
        for formula, dagger, tag in re.findall(     # a line that begins with more blanks goes on
                r"(?m)^#     (\S.*?(?:\n#      .*?)*?)\s*(†?) \((\d+\.\d+)\)$", "\n".join(lines)):
            card.equations[tag] = re.sub(r"\n#\s*", "   ", formula).strip()
            card.derived += [tag] * bool(dagger)
        for i, line in enumerate(lines, at):
            tags = re.findall(r"\((\d+\.\d+)\)", line.partition("  #")[2])
            if tags and not line.startswith("#"):
                card.tagged.append((i, line.split("  #")[0].strip(), tags))
            elif match := re.match(r"def (demo_(\w+))", line):
                card.slug, card.demo = match[2].replace("_", "-"), match[1]
                found.append(card)
            elif match := re.match(r"(?:def|class) (\w+)", line):
                card.functions.append(match[1])
    return found


def code_checksum():
    """A checksum of the book's code without comments, "" where the file is not at hand."""
    with contextlib.suppress(OSError, ValueError):
        code = "\n".join(line.split("  #")[0].rstrip() for _, lines in cells() for line in lines
                         if not line.startswith("#"))
        return hashlib.sha256(code.encode()).hexdigest()[:16]
    return ""


NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"
SIGN = re.compile(                                  # what stands between terms: words, relations
    r"((?:^|-th| )(?:[A-Z]?[a-z]{2,} )+[a-z]{2,}(?: |(?=,)|$)|(?:^| )(?:if|else|for|of|with|keep"
    r"|otherwise) |(?<= )[<>](?= )|[=≤≥≠∈~←→⇒:,∕]|(?<!\de)[-+±])")
BRACKET = re.compile("|".join(rf"\{a}[^][(){{}}⌊⌋⌈⌉|‖]*\{b}"
                              for a, b in ("()", "[]", "{}", "⌊⌋", "⌈⌉", "||", "‖‖")))
MARK = r"[_^](?:[^\W_ᵀ]+|[\ue000-\uf8ff])|hat|bar|'+|[ᵀ*\ue000-\uf8ff]"
FACTOR = re.compile(rf"([√∂]?)({NUMBER}|\.{{3}}|[∞∑·×⊙\u2062]|[^\W\d_ᵀ]+?(?=hat|bar)"
                    rf"|[^\W\d_ᵀ][^\W_ᵀ]*|<\w+>|[\ue000-\uf8ff])((?:{MARK})*)")
LEAF = re.compile(r"(?P<mtext>.* .*\w.*)|(?P<mn>[\d∞.].*)|(?P<mi>[^\W_ᵀ]+|<\w+>)|(?P<mo>.+)")
MARKUP = dict.fromkeys("()[]", ' stretchy="false"') | {
    "∕": ' lspace="0" rspace="0"', "\u2062": ' rspace="0.17em"', "ᵀ": ' intent="transpose"',
    "mover": ' accent="true"', "‖‖": ' intent="norm($x)"', "$x": ' arg="x"'}
LATEX = r"""∑ \sum ∂ \partial ∞ \infty · \cdot × \times ⊙ \odot ± \pm ≤ \le ≥ \ge ≠ \ne ∈ \in ~ \sim
    ← \leftarrow → \to ⇒ \Rightarrow ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil ‖ \| { \{ } \} ' \prime
    '' \prime\prime ᵀ \top ^ \hat ¯ \bar ∕ / ... \dots log \log exp \exp max \max min \min
    msqrt \sqrt{{{}}} munder {}_{{{}}} mfrac \frac{{{}}}{{{}}} msub {{{}}}_{{{}}}
    msup {{{}}}^{{{}}} msubsup {{{}}}_{{{}}}^{{{}}} mover {1}{{{0}}}""".split()
LATEX = dict(zip(LATEX[::2], LATEX[1::2])) | {
    "\u2062": r"\,", "()": r"\left{} {} \right{}", "‖‖": r"\left{} {} \right{}"}
CODE = re.compile(r'(?P<s>f?(?:"""[^\0]*?"""|"(?:\\.|[^"\\\n])*"))|(?P<c>#.*)'
                  rf"|(?P<k>\b(?:{'|'.join(keyword.kwlist)})\b)")


class Formula:
    """A formula and the tree it is read into: (kind, parts...), or a name, number or sign."""

    def __init__(self, text):
        self.text, self.brackets = text, {}
        text = re.sub("[×·]", r" \g<0> ", text.replace("²", "^2").replace("³", "^3"))
        text = re.sub(r"(?<=\))(?=\()|(?<=\b\d)(?=[A-Za-z](?!-))", " ", text)   # (a)(b), 2d
        while match := BRACKET.search(text):        # the innermost first; a letter stands for each
            opens, inner, closes = match[0][0], self.row(match[0][1:-1]), match[0][-1]
            letter = chr(0xe000 + len(self.brackets))
            self.brackets[letter] = ("()", opens, inner, closes) if opens != "‖" \
                else ("‖‖", opens, ("$x", inner), closes)
            text = text[:match.start()] + letter + text[match.end():]
        self.tree = self.row(text)

    def row(self, text):
        """Terms and what stands between them."""
        parts = SIGN.split(text)
        return ("row", *(part if i % 2 else self.term(part.strip()) for i, part in enumerate(parts)
                         if i % 2 or part.strip() or i and parts[i - 1] in "+-±"))

    def term(self, text):
        """A product, or one of two products divided by the other."""
        if " / " in text + " ":
            return ("mfrac", *map(self.term, text.rsplit(" /", 1)))
        words = re.sub("(?<=[^·×⊙ ]) +(?=[^·×⊙ ])", " \u2062 ", text).split() or [""]
        return ("row", *map(self.factor, words)) if words[1:] else self.factor(words[0])

    def factor(self, word):
        """A number, a name or a bracket, with all that touches it."""
        if "/" in word:
            return ("mfrac", *map(self.factor, word.rsplit("/", 1)))
        if not (match := FACTOR.fullmatch(word)):
            line = THIS.read_text(encoding="utf-8").partition(self.text)[0].count("\n") + 1
            raise BadInput(f"line {line}: cannot read the formula {self.text!r}")
        prefix, base, marks = match.groups()
        tree = self.brackets.get(base, base)
        for mark in re.findall(MARK, marks):
            if mark in self.brackets:
                tree = ("call", tree, self.brackets[mark])
            elif mark[0] in "_^":                   # each letter of an index is a name
                names = re.findall(r"[cijktv](?=[cijktv\d]*$)|\d+|\w+", mark[1:])
                script = ("row", *names) if names else self.brackets[mark[1]][2]
                kind = "msup" if mark[0] == "^" else "munder" if base == "∑" else "msub"
                tree = (kind, tree, script) if (tree[0], kind) != ("msup", "msub") else \
                    ("msubsup", tree[1], script, tree[2])
            else:
                tree = ("msup", tree, mark) if mark not in ("hat", "bar") else \
                    ("mover", tree, "^" if mark == "hat" else "¯")
        return {"√": ("msqrt", tree), "∂": ("row", "∂", tree), "": tree}[prefix]


def typeset(tree, tex=False):
    """A tree as MathML or as LaTeX."""
    if isinstance(tree, str):
        kind = LEAF.fullmatch(tree).lastgroup
        if not tex:
            shown = tree.translate(str.maketrans("-~'∕ᵀ", "−∼′/⊤")) if kind == "mo" else tree
            return f"<{kind}{MARKUP.get(tree, '')}>{html.escape(shown)}</{kind}>"
        greek = lambda m: rf"\{unicodedata.name(m[0]).split()[-1].lower()} "
        form = {"mtext": r"\text{%s}", "mi": r"\mathrm{%s}" if tree[1:] else "%s"}.get(kind, "%s")
        return LATEX.get(tree) or re.sub("[α-ω]", greek, form % tree)
    kind, *parts = tree
    parts = [typeset(part[2] if part[:2] == ("()", "(") and (       # brackets no longer needed
        kind in ("mfrac", "msqrt") or kind == "row" and [x[0] for x in part[2][1:]] == ["mfrac"])
        else part, tex) for part in parts]
    if tex:
        return LATEX.get(kind, " ".join(["{}"] * len(parts))).format(*parts)
    inner, element = "".join(parts), kind if kind[0] == "m" else "mrow"
    if kind == "()" and re.search("<mfrac|<munder", inner):
        inner = inner.replace(' stretchy="false"', "")
    return f"<{element}{MARKUP.get(kind, '')}>{inner}</{element}>"


def equation(text, stacked=True):
    """MathML and LaTeX of a formula; it may wrap at wide blanks, in prose where = stands."""
    parts = re.split(r"(?<!⇒)\s{2,}" if stacked else "(?<=.{5}) (?== .{5})", text)
    trees = [Formula(part if stacked else part.replace("/", "∕")).tree for part in parts]
    mathml = (f'<math alttext="{html.escape(part)}">{typeset(tree)}</math>'
              for part, tree in zip(parts, trees))
    return " ".join(mathml), r" \quad ".join(typeset(tree, True) for tree in trees)


class Page:
    """The book as a page of HTML."""

    def __init__(self):
        self.equations = {tag: text for card in cards() for tag, text in card.equations.items()}
        self.ids = {tag: f' id="code-{tag}"' for card in cards() for *_, tags in card.tagged
                    for tag in tags}                # each is given away once
        # a formula in prose: names of the equations, numbers and brackets, with signs and marks
        known = re.findall(r"\b(?!Head|Block|Embed)(?=\w*[A-Zα-ω\d]|\what|hs|wmax)[^\W\d_]"
                           r"[^\W_ᵀ²³]{1,4}(?=[\W_ᵀ²³])", f"{self.equations}")
        name = rf"(?:{'|'.join({*known})}|[A-Za-zα-ω]|(?<=· )[a-z]+)(?![A-Za-z\d])"
        inner = rf"(?:{name}|log|tanh|[^\W\d_]+(?=[_(\[²])|[_^]\w+|[\dᵀ²³]|[^\w\"`()\[\]])*"
        group = rf"(?:[(\[⌈]{inner}(?:[(\[]{inner}[)\]]{inner})*[)\]⌉]|\|{name}\|)"
        mark = rf"(?:[_^](?:{group}|[^\W_]+)|{group}|[ᵀ²³'*])"
        first, term = (rf"(?:[-+√∂±]|(?:∑{mark}*|log|tanh²?) )*(?:{NUMBER})?(?:{start}{name}"
                       rf"|[^\W\d_]+(?={mark})|{NUMBER}|∞|∑(?=_)|{group}){mark}*"
                       for start in (r"(?![aAI](?:[\s.,;:?)]|$))", ""))
        some = r"s? \d+(?:(?:,| and| to) \d+)*"
        marks = re.compile(
            rf"\b(?P<card>[Cc]ard{some})|\b(?P<chapter>[Cc]hapter{some})|\b(?P<exercise>\d+[a-c])\b"
            r"|`(?P<code>[^`]+)`|\b(?P<array>[wb][qkvo]|[a-z][a-z\d]+_(?![cijktv\d]+\b)\w+)\b"
            r"|\*\*(?P<name>\w+)\.\*\*|(?P<plain>\"[^\"]*\"|\w+'s\b|(?<![\w'])'(?:[^']+'(?!\w)|\w+)"
            r"|<\w+>|(?=[\w-]*[A-Za-z]{2})\w+(?:-\w+)+(?:'s\b)?|[<>&])|(?<![\w.'])(?P<math>"
            rf"{first}(?: ?(?:[-+±·×/=<>≤≥⊙←→]|mod) ?{term}| (?!\d){first})*)[.,;:?)]*")
        self.inline = lambda text: marks.sub(self.shown, text)

    def shown(self, m):
        """What is more than words in prose: links, code and formulas."""
        kind, found = m.lastgroup, m[m.lastgroup]
        link = lambda to, name: f'<a href="#{to}-{name}">{name}</a>'
        if kind in ("card", "chapter", "exercise"):
            return re.sub(r"\d+\w?", lambda n: link(kind, n[0]), found)
        if kind == "name":                          # of an exercise, or of its answer
            here, to = ("exercise", "answer")[::-1 if self.section == "answers" else 1]
            return f'<strong id="{here}-{found}"><a href="#{to}-{found}">{found}.</a></strong>'
        if kind == "math":
            number, stop = re.fullmatch(NUMBER, found), m[0][len(found):]
            if self.section == "terms-and-sources":     # it has numbers of cards, and no formulas
                return link("card", found) + stop if number and len(found) < 3 else m[0]
            if number:
                return link("eq", found) + stop if found in self.equations else m[0]
            with contextlib.suppress(BadInput):
                return re.sub("(.*)(<math.*)", rf"\1<span>\2{stop}</span>",
                              equation(found, False)[0])
        found = html.escape(found if kind != "math" else m[0], False)
        return f"<code>{found}</code>" if kind in ("code", "array") else found

    def blocks(self, text):
        """The book's Markdown as HTML."""
        out = ""
        for block in re.split(r"\n\n(?!  (?:    )?\S)", text.rstrip()):   # those go on with an item
            if match := re.match(r"(#+) ((?:(Chapter )?(\d+)\. )?.+)", block):
                level, title, chapter, number = match.groups()
                self.section = re.sub(r"\W+", "-", title.lower()) if not number else \
                    f"{'chapter' if chapter else 'card'}-{number}"
                out += (f'</section><section id="{self.section}"><h{len(level)}>'
                        f'<a href="#{self.section}">{title}</a></h{len(level)}>')
            elif block[:2] == "- ":
                for one in re.split(r"\n+(?=- )", block):
                    body = self.blocks(re.sub("(?m)^(- |  )", "", one))
                    out += f"<ul><li>{body}</li></ul>" if self.section != "answers" else \
                        f"<details><summary>Answer {one[4:7].strip('.*')}</summary>{body}</details>"
            elif block[:4] == "    ":
                out += self.apart(re.sub("(?m)^    ", "", block))
            else:
                out += f"<p>{self.inline(' '.join(block.split()))}</p>"
        return out.replace("</ul><ul>", "")

    def apart(self, text):
        """What is set apart by four blanks: a table, code, a drawing, or equations."""
        table = re.sub(r"(?m)^([\w, ]+) (\(.*?\)) = (?=\()", r"`\1`  \2  ", text)
        head = "array  shape  at the default sizes  in the running example\n" * (table != text)
        if head or re.match(r"[a-z]+ {2,}[a-z ]+\S {2,}", text):
            rows = [f"<td>{'</td><td>'.join(map(self.inline, re.split(' {2,}', row)))}</td>"
                    for row in (head + table).split("\n")]
            rows[0] = rows[0].replace("td>", "th>")
            return f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table>"
        groups, out, latex = re.split(r"\n(?! )", text), "", ""
        if not all(re.search(r"^(?!def ).* = |\(\d+\.\d+\)$", group) for group in groups):
            label = html.escape(re.sub(r"[\s─│┬├└┐┘┴]+", " ", text))
            image = f' role="img" aria-label="{label}"' * ("─" in text)
            return f"<pre{image}>{self.code(text)}</pre>"
        for group in groups:
            formula, dagger, tag = re.fullmatch(
                r"(?s)(.*?)\s*(†?)\s*(?:\((\d+\.\d+)\))?", group).groups()
            mathml, tex = equation(formula)
            wide = max(len(re.sub("<[^>]*>", "", part)) for part in mathml.split("</math>"))
            name, to = f' id="eq-{tag}"' * bool(tag), "code" if tag in self.ids else "eq"
            link = f'<a href="#{to}-{tag}">{dagger} ({tag})</a>' * bool(tag)
            out += f'<div class="eq" style="--w:{wide}"{name}><div>{mathml}</div>{link}</div>'
            latex += f"<code>{html.escape(tex)}</code>"
        return f"{out}<details><summary>LaTeX</summary>{latex}</details>"

    def code(self, text):
        """Code with colours; its tags lead to equations."""
        text = CODE.sub(lambda m: f'<span class="{m.lastgroup}">{m[0]}</span>',
                        html.escape(text.strip("\n"), False))
        return re.sub(r"(?<= )\((\d+\.\d+)\)", lambda m: f'<a{self.ids.pop(m[1], "")} '
                      f'href="#eq-{m[1]}">{m[0]}</a>', text)

    def code_cell(self, text):
        """The code of a card, what its demo prints, and the demo's source, folded."""
        code, demo, source = text.partition("def demo_")
        if not demo:
            return f"<pre>{self.code(code)}</pre>"
        name, out = source.partition("(")[0], io.StringIO()
        with contextlib.redirect_stdout(out):
            globals()[f"demo_{name}"]()
        return (f"<pre>{self.code(code)}</pre><figure><figcaption>What <code>python tinygpt.py "
                f"demo {name.replace('_', '-')}</code> prints</figcaption><pre><samp>"
                f"{html.escape(out.getvalue())}</samp></pre><details><summary>Its source"
                f"</summary><pre>{self.code(demo + source)}</pre></details></figure>")


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>tinygpt: a complete GPT in one file</title>
<meta name="viewport" content="width=device-width, initial-scale=1"/><style>
:root { color-scheme: light dark; --soft: light-dark(#5b5b5b, #a8a8a2); --box: light-dark(#f3f2ec,
  #24262a); --key: light-dark(#8a1c7c, #dd9be0); --string: light-dark(#1e6b2b, #93cc96); }
* { box-sizing: border-box; } body { margin: 0; background: light-dark(#fdfdfb, #17181a);
  color: light-dark(#1f1f1f, #e4e4e0); font: 1.05rem/1.55 Charter, Georgia, serif; }
a { color: light-dark(#0b5394, #8ab8f0); text-decoration: none; } :target { outline: 2px solid; }
main, nav { padding: 1rem; } main { max-width: 54rem; margin: 0 auto; min-width: 0; width: 100%; }
nav, table, figure, summary { font-size: .85rem; } nav ul { list-style: none; padding: 0; }
section { border-top: 2px solid var(--box); } .h3 { margin-left: 1rem; } figure { margin: 1rem 0; }
p, ul, .eq { max-width: 44rem; } li p { margin: .3rem 0; } p > span { white-space: nowrap; }
.eq, .eq div { display: flex; flex-wrap: wrap; align-items: center; gap: 0 1rem; margin: .4rem 0; }
.eq { font-size: min(1.1rem, calc(135vw / var(--w))); } .eq > a { font-size: .9rem;
  margin-left: auto; } .eq math { display: block math; math-style: normal; }
.eq div { flex: 1 0 auto; justify-content: center; max-width: 100%; } pre:empty { display: none; }
pre { background: var(--box); padding: .7rem; overflow-x: auto; font-size: min(.8rem, 2.6vw); }
code, pre, samp { font-family: ui-monospace, "DejaVu Sans Mono", Consolas, monospace; }
code { font-size: .85em; overflow-wrap: anywhere; } mtext { padding: 0 .3em; }
details > code { display: block; user-select: all } th, td { text-align: left; padding: 0 .5em; }
summary, .c { color: var(--soft); } .k { color: var(--key); } .s { color: var(--string); }
@media (min-width: 70rem) { body { display: grid; grid-template-columns: 18rem 1fr; }
  nav { position: sticky; top: 0; height: 100vh; overflow-y: auto; } }
@media print { nav, .eq + details, figure details { display: none; } pre { white-space: pre-wrap; }
  section { break-inside: avoid; } ::details-content { content-visibility: visible; } }
</style></head><body><nav aria-label="Contents"><ul>CONTENTS</ul></nav><main>BODY</main></body>
</html>
"""


def run_book(options):
    """Write the book as one page for a browser."""
    page, body = Page(), ""
    for _, (head, *lines) in cells():
        body += page.blocks("\n".join(line[2:] for line in lines)) if "[markdown]" in head else \
            page.code_cell("\n".join(lines))
    body = body.removeprefix("</section>") + "</section>"
    contents = re.sub(r"(?s).*?<(h\d)>(<a.*?</a>)|.+", r'<li class="\1">\2</li>', body)
    Path(options.out).write_text(PAGE.replace("CONTENTS", contents).replace("BODY", body), "utf-8")
    tell(f"the book as a page is in {options.out}: open it in a browser")


# %% [markdown]
# ### Checkpoints
#
# A checkpoint holds all that is needed to write, and to go on training as if nothing had happened:
# arrays, and the rest as JSON text, in one .npz file. It is written to a temporary file in the same
# folder, loaded again to see that it can be, and moved into the place of the old one. So a whole
# file stands there at any time. `m` and `v` are the running means of the optimizer, `batch_rng` the
# state of the batches' generator when the epoch began, `code` a checksum of the code.

# %%
FORMAT = "tinygpt 1"
Checkpoint = make_dataclass("Checkpoint", "params config tokenizer settings step m v batch_rng "
                            "val_loss code".split())


def save_checkpoint(path, checkpoint):
    """Write a checkpoint to path in one move; BadInput for one that could not be loaded."""
    path = Path(os.path.realpath(path))             # where path is a link, the file it leads to
    about = vars(checkpoint) | {"format": FORMAT, "config": asdict(checkpoint.config)}
    tokenizer = about.pop("tokenizer")
    about |= {"itos": tokenizer.itos, "merges": tokenizer.merges}
    arrays = {f"{kind}/{name}": W for kind in ("params", "m", "v")
              for name, W in about.pop(kind).items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
            file.flush()
            os.fsync(file.fileno())
        load_checkpoint(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = f"{path}"
        raise


def load_checkpoint(path):
    """The checkpoint at path; BadInput in one line where it is missing, foreign or damaged."""
    if not os.path.exists(path):
        raise BadInput(f"there is no model at {path}: train one first, with "
                       f"'python tinygpt.py train --out {shlex.quote(f'{path}')}'")
    try:
        if not os.path.isfile(path):                # from a pipe one would read for ever
            raise BadInput("it is no file")
        with np.load(path, allow_pickle=False) as archive:
            about = json.loads(archive["about"].tobytes())
            if about.pop("format") != FORMAT or about["config"]["layers"] > len(archive.files):
                raise BadInput(f"its format is not {FORMAT!r}, or it lacks layers")
            for kind in ("params", "m", "v"):
                about[kind] = {name.removeprefix(f"{kind}/"): archive[name]
                               for name in archive.files if name.startswith(f"{kind}/")}
        about["config"] = config = ModelConfig(**about["config"])
        itos, merges = about.pop("itos"), [(a, b) for a, b in about.pop("merges")]
        about["tokenizer"] = Tokenizer(itos, merges)
        if not len(itos) == len(set(itos)) == config.vocab_size or itos[0] != UNK \
                or {type(text) for row in (itos, *merges) for text in row} != {str}:
            raise BadInput("its vocabulary does not fit its configuration")
        about["settings"] |= {key: OPTIONS[key].check(f"{value}") for key, value in
                              about["settings"].items() if key in OPTIONS and value is not None}
        if count(f"{about['step']}"):
            np.random.PCG64().state = about["batch_rng"]
        shapes = param_shapes(config)
        for kind in ("params", "m", "v")[:3 if about["step"] else 1]:
            if odd := shapes.keys() ^ about[kind].keys():
                raise BadInput(f"{sorted(odd)} are arrays of it, or of this file's model, not both")
            for name, W in about[kind].items():
                if W.shape != shapes[name] or W.dtype.kind != "f" or not np.isfinite(W).all():
                    raise BadInput(f"{kind}/{name} should be finite numbers of shape "
                                   f"{shapes[name]}, it is {W.dtype} {W.shape}")
        return Checkpoint(**about)
    except Exception as error:                      # the file may be anything
        ours = isinstance(error, (BadInput, argparse.ArgumentTypeError))
        reason = error if ours else getattr(error, "strerror", None) or \
            "it is no archive of plain arrays, or part of it is lost"
        raise BadInput(f"{path} is not a tinygpt checkpoint: {reason}; choose another name, or "
                       f"train a new one") from None


def load_to_use(path):
    """load_checkpoint, and a line on stderr where the model was made by other code."""
    checkpoint = load_checkpoint(path)
    if "" != checkpoint.code != code_checksum() != "":
        tell(f"note: {path} was made by other code than this file has now")
    return checkpoint


# %% [markdown]
# ### Training
#
# Around the loop of chapter 9: from time to time it measures, writes a sample and saves. The random
# generators for starting values, batches and samples are separate, so measuring or sampling more
# often changes nothing else. There is one rule for stopping: the first Ctrl-C (or SIGTERM, SIGHUP)
# ends the training after the present step and saves; the second ends the program at once. Results
# go to stdout, reports to stderr.

# %%
def to_nowhere(stream):
    """From here on what is written to a stream that has failed is dropped, at the exit too."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: not a file of the system
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def escaped(text):
    """Control characters other than line end and tab written as escapes, for a terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else ascii(c)[1:-1] for c in text)


def tell(text, end="\n"):
    """Write to stderr; a stderr that is closed or full never stops the work."""
    try:
        print(escaped(text) if end else text, end=end, file=sys.stderr, flush=True)
    except (OSError, ValueError):                   # ValueError: closed
        to_nowhere(sys.stderr)


def print_text(text, end="\n"):
    """Print a model's text; on a terminal control characters are escaped."""
    print(escaped(text) if sys.stdout.isatty() else text, end=end, flush=True)


class Progress:
    """Reports of a training on stderr: one live line on a terminal, plain lines in a file."""

    def __init__(self, last, tokens, tokens_per_char):
        self.last, self.tokens, self.tokens_per_char = last, tokens, tokens_per_char    # of a step
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.start, self.shown, self.losses, self.val = time.monotonic(), 0, [], ""

    def line(self, text):
        tell("\r\033[K" * self.live, end="")        # the live line goes
        tell(text)

    def step(self, t, loss, lr, val, measured):
        """Report a step: as a line where something was measured, else as the live line."""
        self.losses.append(loss)
        now = time.monotonic()
        if val is not None:
            self.val = (f"  validation {val:.3f}  perplexity {perplexity(val):.1f}  "
                        f"bits per character {val / math.log(2) * self.tokens_per_char:.3f}")
        if measured or self.live and now - self.shown > 0.1:        # ten times a second at most
            rate, recent = len(self.losses) / max(now - self.start, 1e-9), self.losses[-100:]
            text = (f"step {t:,} of {self.last:,}  loss {sum(recent) / len(recent):.3f}{self.val}  "
                    f"lr {lr:.5f}  {self.tokens * rate:,.0f} tokens/s  "
                    f"{(self.last - t) / rate:.0f} s left  {self.picture()}")
            columns, self.shown = shutil.get_terminal_size().columns, now
            self.line(text) if measured else tell("\r\033[K" + text[:columns - 1], end="")

    def picture(self):
        """The losses so far as a row of blocks, a block for each tenth of the training."""
        size = -(-self.last // 10)
        means = [np.mean(self.losses[i:i + size]) for i in range(0, len(self.losses), size)]
        low, high = min(means), max(means)
        return "".join("▁▂▃▄▅▆▇█"[int(7 * (mean - low) / (high - low or 1))] for mean in means)


@contextlib.contextmanager
def stop_signals():
    """A list that gets the number of a signal to stop; the next signal has its usual effect."""
    def ask(number, frame):
        asked.append(number)
        as_before()

    asked, before = [], {}
    as_before = lambda: [*map(signal.signal, before, before.values())]
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):    # Windows has no SIGHUP, nohup ignores it
        with contextlib.suppress(AttributeError, ValueError):       # ValueError: in a thread
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, ask)
    try:
        yield asked
    finally:
        as_before()


def train(options):
    """Learn from a text, save the model, write a sample."""
    out, old = options.out, f"{options.out}.old"
    ck = load_to_use(out) if options.resume else None
    there, older = (load_checkpoint(path) if os.path.lexists(path) and not ck else None
                    for path in (out, old))
    kept = ck.settings if ck else {}
    settings, s = resolve(options, kept)
    config = ck.config if ck else ModelConfig(1, s.context, s.max_context, s.width, s.heads,
                                              s.hidden, s.layers)       # checks the sizes
    name = kept.get("text", "corpus.txt")           # beside the model, the program, or here
    places = [Path(os.path.realpath(out)).parent, THIS.parent, Path.cwd()] if ck else [THIS.parent]
    found = [options.text] if options.text else [*filter(Path.is_file, (f / name for f in places))]
    texts = {path: read_text(path) for path in found or [name]}
    checksum = lambda path: hashlib.sha256(texts[path].encode()).hexdigest()
    path = max(texts, key=lambda path: checksum(path) == kept.get("checksum"))
    text, settings["text"], settings["checksum"] = texts[path], Path(path).name, checksum(path)
    if len(text) > 100_000:                         # it may take seconds
        tell(f"reading {len(text):,} characters of {path}")
    tokenizer = ck.tokenizer if ck else build_tokenizer(text, s.merges)
    train_ids, val_ids = split_ids(tokenizer.encode(text), s.val_fraction)
    for part, name in ((train_ids, "training"), (val_ids, "validation")):
        if len(part) <= s.context and (name == "training" or s.val_fraction):
            raise BadInput(f"the {name} part has {len(part)} tokens and needs {s.context + 1}: "
                           f"take a longer text, fewer --merges or --context, or --val-fraction 0")
    x, y = make_windows(train_ids, s.context, s.stride)
    val_x, val_y = make_windows(val_ids, s.context, s.context)
    if not ck:
        config = replace(config, vocab_size=len(tokenizer.itos))
        ck = Checkpoint(init_params(config, np.random.default_rng([s.seed, 0])), config, tokenizer,
                        settings, 0, {}, {}, {}, None, code_checksum())
    if kept.get("checksum", settings["checksum"]) != settings["checksum"]:
        tell(f"note: {path} is not the text that {out} was trained on so far")
    warn_unknown(tokenizer, text, path)
    params, begun = ck.params, ck.step
    per_epoch, planned = step_counts(len(x), s.batch, s.epochs)
    planned = planned or s.steps                    # the length of the schedule
    last = min(s.steps or planned, planned)
    warmup = planned // 10 if s.warmup is None else s.warmup
    tell(f"{len(tokenizer.merges)} of {s.merges} merges, {len(np.unique(train_ids)):,} of "
         f"{config.vocab_size} tokens in use, {len(x):,} training windows, {len(val_x):,} "
         f"validation windows, {count_params(params):,} parameters, {per_epoch:,} steps per epoch")
    if begun and begun >= last:
        tell(f"{out} has {begun} of {last} steps: nothing to do; more --steps or --epochs go on")
        return
    prepare_for_training()
    optimizer = AdamW(params, s.beta1, s.beta2, weight_decay=s.weight_decay)
    rng = np.random.default_rng([s.seed, 1])
    if begun:
        optimizer.t, rng.bit_generator.state = begun, ck.batch_rng
        for name in params:
            optimizer.m[name][...], optimizer.v[name][...] = ck.m[name], ck.v[name]
    if there and older and older.step > there.step:
        tell(f"{old} has more steps than the model that was in {out}, and stays")
    elif there:
        save_checkpoint(old, there)
        tell(f"the model that was in {out} is kept as {old}")
    ck.m, ck.v = ({name: means[name] for name in params} for means in (optimizer.m, optimizer.v))
    ck.batch_rng, mine = rng.bit_generator.state, None
    chars = sum(len(tokenizer.itos[i]) if i else 1 for i in val_y.ravel())      # <unk> is one
    say = Progress(last, s.batch * s.context, val_y.size / max(chars, 1))

    def sample(before="    "):                      # from the same seed each time
        ids, _ = prompt_ids(tokenizer, "")
        new = generate(params, config, ids, 64, np.random.default_rng([s.seed, 2]), temperature=0.8)
        return textwrap.indent(tokenizer.decode(new[len(ids):]).strip(), before)

    def save():
        nonlocal mine
        if mine and mine != (os.path.lexists(out) and os.stat(out).st_mtime_ns):
            raise OSError(17, "another program has written it meanwhile; choose another --out", out)
        save_checkpoint(out, ck)
        mine = os.stat(out).st_mtime_ns

    batches = islice(epoch_after_epoch(x, y, s.batch, rng), begun % per_epoch, None)
    steps = training_steps(params, islice(batches, last - begun), config, optimizer,
                           lambda t: lr_schedule(t, s.lr, s.lr_min, warmup, planned),
                           s.clip or math.inf)
    try:
        with open(options.log or os.devnull, "a" if begun else "w") as log, stop_signals() as asked:
            if not log.tell():
                print("step,loss,validation_loss,learning_rate,gradient_norm", file=log)
            if not begun:
                say.line(f"--- before training\n{sample()}")
            save()                                          # shows that it can
            ck.settings, ck.code = settings, code_checksum()
            for t, loss, lr, norm in steps:
                ck.step, val = t, None
                if t % per_epoch == 0:                      # the next epoch begins here
                    ck.batch_rng = rng.bit_generator.state
                stopping = len(asked) > 0 and t < last      # the last step is the end anyway
                measuring = not stopping and (t == last or s.eval_every and t % s.eval_every == 0)
                if measuring and len(val_x):
                    val = ck.val_loss = validation_loss(params, val_x, val_y, config)
                    if not math.isfinite(val):
                        raise FloatingPointError(f"step {t}: validation loss {val}")
                print(t, loss, "" if val is None else val, lr, norm, sep=",", file=log, flush=True)
                if measuring or stopping:
                    save()
                say.step(t, loss, lr, val, measuring)
                if stopping:
                    again = shlex.join(["--resume", "--text", f"{path}", "--out", out])
                    say.line(f"stopped after step {t}; the model is in {out}; go on with: "
                             f"python tinygpt.py train {again}")
                    return 128 + asked[0]           # as a shell does
                if t in (last // 100, last // 10, last // 2):
                    say.line(f"--- after {t} steps\n{sample()}")
    except (FloatingPointError, BadInput) as error:         # BadInput: numbers that are not finite
        if "to be written" in f"{error}":                   # by 'blank'; not diverged
            raise
        say.line(f"{error}: training has diverged, and {out} stays as it was saved last; try a "
                 f"smaller --lr (now {s.lr:g}), --clip or --weight-decay")
        return 1
    say.line(f"--- after {last} steps")
    print_text(sample(before=""))
    tell(f"the model is in {out}; let it write with: "
         f"python tinygpt.py generate --model {shlex.quote(out)}")


# %% [markdown]
# ### Commands
#
# Each command is one function. `train` stands above; here are the others.

# %%
def warn_unknown(tokenizer, text, where):
    """Name the characters that will be read as <unk>, in one line on stderr."""
    if unknown := tokenizer.unknown(text):
        named = ", ".join(f"{char!r} U+{ord(char):04X} at {text.index(char)}"
                          for char in unknown[:8])
        tell(f"warning: {where} has characters the model never saw, read as {UNK}: {named}"
             + f" and {len(unknown) - 8} more" * (len(unknown) > 8))


def prompt_ids(tokenizer, prompt):
    """The ids of a prompt, and what to add to the first logits (V,): -inf bars a token.

    An empty prompt stands for a line end, or the first known character. Tokens take the blank
    before a word along; so a blank at the end is held back, and the next token begins with one.
    """
    blank = np.array([token.startswith(" ") for token in tokenizer.itos])
    held = bool(re.search(r"\S \Z", prompt)) and blank.any()
    ids = tokenizer.encode(prompt[:-1] if held else prompt or "\n" * ("\n" in tokenizer.stoi))
    return ids or [min(1, len(tokenizer.itos) - 1)], np.where(blank | (not held), 0, -np.inf)


def run_generate(options):
    """Print the prompt and what the model writes after it, as it comes."""
    ck, rng = load_to_use(options.model), np.random.default_rng(options.seed)
    warn_unknown(ck.tokenizer, options.prompt, "the prompt")
    ids, bars = prompt_ids(ck.tokenizer, options.prompt)
    print_text(options.prompt, end="")
    for n in range(options.tokens):
        logits, _ = forward(ck.params, ids[-ck.config.context:], ck.config)         # as card 61
        ids.append(sample_next(logits[-1] + (0 if n else bars), rng, **options.choice))
        print_text(ck.tokenizer.itos[ids[-1]][int(n == 0 and bars.any()):], end="")
    print()


def cell(token, width):
    """A token cut or filled up to a width in columns; blanks and line ends are made visible."""
    shown, text = {" ": "·", "\n": "¶"}, ""
    for c in re.findall(rf".[{MARKS}]*", token, re.DOTALL):         # each with its marks
        mark = unicodedata.category(c[0])[0] == "M"                 # alone: it takes no column
        size = 2 if unicodedata.east_asian_width(c[0]) in "WF" else 1 - mark
        if size > width:
            break
        text, width = text + shown.get(c, c if c.isprintable() else "�"), width - size
    return text + " " * width


def run_look(options):
    """Show what the model sees in a prompt: tokens, surprise, attention, likeliest next tokens."""
    ck = load_to_use(options.model)
    warn_unknown(ck.tokenizer, options.prompt, "the prompt")
    ids, bars = prompt_ids(ck.tokenizer, options.prompt)
    x = np.array(ids[-ck.config.context:])                                  # (T,)
    logits, cache = forward(ck.params, x, ck.config)                        # (T, V)
    p, q = (next_probabilities(logits[-1] + bars, **choice) for choice in ({}, options.choice))
    T, tokens = len(x), [ck.tokenizer.itos[i] for i in x]
    shown = range(max(0, T - 32), T)
    if len(shown) < len(ids):
        print(f"of {len(ids)} tokens the model reads the last {T} (--context {ck.config.context}); "
              f"shown are the last {len(shown)}")
    print("tokens, and how much each surprised the model (loss in nats)")
    for t in shown:
        loss = cross_entropy_forward(logits[t - 1:t], x[t:t + 1])[0] if t else math.nan
        bar = f"{loss:8.3f}  {'█' * round(min(40, 4 * loss))}" if t else ""
        print(f"{t:4}  {cell(tokens[t], 16)} id {x[t]:5}{bar}".rstrip())
    print("attention of row i to column j: ░ 1/8, ▒ 3/8, ▓ 5/8, █ 7/8 or more")
    for l, block in enumerate(cache["blocks"]):
        for h, A in enumerate(block["attention"]["A"][0]):                  # (T, T)
            print(f"block {l}, head {h}\n" + " " * 16 + "".join(f"{t % 100:2}" for t in shown))
            for i in shown:
                shades = "".join(" ░▒▓█"[round(4 * float(a))] * 2 for a in A[i, shown[0]:i + 1])
                print(f"{i:4}  {cell(tokens[i], 10)}{shades}".rstrip())
    print("the next token stands after the blank that was typed\n" * bool(bars.any()), end="")
    print("next token: probability, and with",
          ", ".join(f"{key} {value}" for key, value in options.choice.items()))
    for i in np.argsort(-p, kind="stable")[:10]:
        both = "   ".join(f"{value:6.1%} {'█' * round(18 * value):18}" for value in (p[i], q[i]))
        print(f"  {cell(ck.tokenizer.itos[i], 16)} {both}".rstrip())


def run_gradcheck(options):
    """Check each operation, then every gradient of a model; exit code 1 where one is wrong."""
    errors = check_operations(options.seed) | check_model(options.seed, options.samples)
    wrong = [name for name, error in errors.items() if not error < 1e-4]
    for name, error in errors.items():
        print(f"{name:14} worst relative error {error:.1e}" + "  WRONG" * (name in wrong))
    print(f"{len(errors) - len(wrong)} of {len(errors)} agree with central differences to 1e-4"
          + f"; wrong: {', '.join(wrong)}" * bool(wrong))
    return bool(wrong)


def run_bench(options):
    """Measure speed and memory of training, tokenizer and generation on this machine."""
    def milliseconds(work):                         # the median of nine blocks of calls
        number, _ = timeit.Timer(work).autorange()
        return sorted(timeit.repeat(work, number=number, repeat=9))[4] / number * 1000

    text, rng = read_text(options.text), np.random.default_rng(0)
    prepare_for_training()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, NumPy {np.__version__}")
    sizes = [dict(V=512, T=16, B=16, L=2, H=2, d=32), dict(V=65, T=64, B=12, L=4, H=4, d=128)]
    if options.scale:                               # each size doubled, and doubled again
        base = dict(V=64, T=64, B=8, L=2, H=4, d=64)
        sizes = [base | {key: base[key] * k} for key in "TBLd" for k in (1, 2, 4)]
    for size in sizes:
        V, T, B, L, H, d = size.values()
        config = ModelConfig(V, T, T, d, H, 4 * d, L)
        params, batch = init_params(config, rng), rng.integers(0, V, (2, B, T))
        steps = training_steps(params, repeat(batch), config, AdamW(params), lambda t: 1e-3, 1.0)
        ms = milliseconds(lambda: next(steps))
        print(f"training step, {size}: {ms:.2f} ms, {B * T / ms * 1000:,.0f} tokens/s")
    ms = milliseconds(lambda: build_tokenizer(text, 500))
    print(f"learning 500 merges from {Path(options.text).name}: {ms:.0f} ms, "
          f"{len(text) / ms / 1000:.2f} MB/s")
    params = init_params(ModelConfig(512), rng)
    ms = milliseconds(lambda: generate(params, ModelConfig(512), [1] * 16, 1, rng))
    print(f"generation of a token, default sizes: {ms:.2f} ms, {1000 / ms:,.0f} tokens/s")
    with contextlib.suppress(ImportError, OSError): # not on every system
        import resource
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 2 ** (20 if sys.platform == "darwin" else 10)
        print(f"peak memory of this process: {peak / unit:.0f} MB")


# %% [markdown]
# ### Learning by doing
#
# `demo --changed` holds what the cards print against `golden/`. `blank` takes the mathematics of
# some of them out; whoever writes it anew asks `demo --changed CARD` whether it is right.

# %%
def named_cards(names):
    """The cards of these names or numbers; all, where none is given."""
    index = cards()
    known = {card.slug: card for card in index} | {str(card.n): card for card in index if card.n}
    for name in names:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.5))
            raise BadInput(f"there is no demo {name!r}: " + f"did you mean {near}? " * bool(near)
                           + "'python tinygpt.py demo --list' names all")
    return [known[name] for name in names] or index


def play_demos(options):
    """Play the demos of the named cards, or all, or say which have changed."""
    chosen = named_cards(options.names)
    if options.changed:
        return run_changed(chosen, bool(options.names))
    for i, card in enumerate(chosen):
        if options.list:
            print(f"{card.n or '':2}  {card.slug:22}  line {card.line:4}  {card.title}"
                  + f" ({card.direction})" * (card.direction not in card.title.lower())
                  + f": {', '.join(card.functions)}" * bool(card.functions))
            continue
        if len(options.names) != 1:
            number = f"{card.n}." if card.n else "55. continued:"
            print("\n" * (i > 0) + f"=== {number} {card.title} ({card.slug})")
        globals()[card.demo]()


def run_blank(options):
    """Write the book with the statements that carry some cards' equations taken out."""
    texts = {tag: text.strip() for card in named_cards(options.names)
             for tag, text in card.equations.items()}

    def raising(match):                             # the indent and the comment stay
        tags = [tag for tag in re.findall(r"\((\d+\.\d+)\)", match[2]) if tag in texts]
        said = "to be written: " + "; ".join(f"({tag}) {texts[tag]}" for tag in tags)
        return f"{f'{match[1]}raise BadInput({said!r})':74}  {match[2]}" if tags else match[0]

    source = THIS.read_text(encoding="utf-8")
    statement = r"(?m)^( +)\S.*  (# .*\(\d+\.\d+\))$(?:\n\1 +\S.*)*"
    if (book := re.sub(statement, raising, source)) == source:
        raise BadInput(f"no line of code carries an equation of {', '.join(options.names)}")
    file = open(options.out, "x", encoding="utf-8") if options.out else sys.stdout
    print(book, end="", file=file, flush=True)      # x: a new file, not over somebody's work


def golden_file(card):
    """Where the output of a card's demo is kept."""
    folder = THIS.parent / "golden"
    if not folder.is_dir() and not (folder := Path("golden").resolve()).is_dir():
        raise BadInput(f"there is no folder golden beside {THIS}, and no {folder}")
    return folder / f"{f'{card.n:02d}-' if card.n else ''}{card.slug}.txt"


def difference(before, now):
    """The first array in which two printed texts differ, else the first line, and how it does."""
    parts = r"(?m)^([^\n=]{0,9}[^\s=](?=  )|)(.*(?:\n {10}.*)*)"       # a name or none, and rows
    found = [[*re.findall(parts, text), ("", "the end")] for text in (before, now)]
    (name, x), (_, y) = min((pair for pair in zip(*found) if pair[0] != pair[1]),
                            key=lambda pair: not pair[0][0])
    try:
        A, B = (np.array([row.split() for row in rows.split("\n")], float) for rows in (x, y))
    except ValueError:                              # no rows of numbers
        return f"{name} {y.strip()!r} in place of {x.strip()!r}".strip()
    said, transposed = f"{name.strip()} {B.shape[len(B) == 1:]}: ", np.array_equal(A, B.T)
    if A.shape != B.shape or transposed:
        return said + ("transposed" if transposed else f"it should be {A.shape[len(A) == 1:]}")
    i, j = np.argwhere(A != B)[0]
    said += f"row {i}, column {j} is {B[i, j]:g} in place of {A[i, j]:g}"
    unit = 10.0 ** -len(x.split()[0].partition(".")[2])         # of the last digit
    k = (A * B).sum() / (A * A).sum()
    if A.size > 1 and abs(A).max() > 20 * unit and (abs(B - k * A) <= unit * (1 + abs(k))).all():
        said += f"; all numbers are {k:.4g}{' (sign)' * int(k < 0)} times what they should be"
    return said


def run_changed(chosen, named):
    """Play demos, say which print something else than golden/ has, and what of the first."""
    changed, stopped, errors = [], {}, {}

    def attempt(work, who):
        """What work() returns; where it stops, the place is kept for who."""
        try:
            return work()
        except Exception as error:
            at = [frame for frame in traceback.extract_tb(error.__traceback__)
                  if frame.filename == train.__code__.co_filename][-1]
            code = f"{at.line.split('  #')[0].strip()}\n  {type(error).__name__}: "
            crash = f"line {at.lineno}: {code * (not isinstance(error, BadInput))}{error}"
            stopped.setdefault(crash, []).append(who)

    for card in chosen:
        out, golden = io.StringIO(), golden_file(card)
        before = golden.read_text(encoding="utf-8") if golden.exists() else ""
        with contextlib.redirect_stdout(out):
            attempt(globals()[card.demo], f"{card.n or card.slug}")
        if out.getvalue() != before:
            changed.append((card, before, out.getvalue()))
    print(f"{len(changed)} of {len(chosen)} demos print something else than golden/ has"
          + ": right" * (not changed))
    for card, *texts in changed[:not (named and stopped)]:
        print(f"The first is card {card.n or card.slug}, {card.title}, line {card.line}:")
        if not named:
            lines = (text.splitlines() for text in texts)
            print("", *[*difflib.unified_diff(*lines, n=99, lineterm="")][3:], "", sep="\n")
        print(said := difference(*texts), "made here:", sep="\n")
        name = re.match(r"\w*", said)[0] or "no array"
        made = [x for x in card.tagged if re.match(rf"[^=(]*\b{name}\b[^=(]*= ", x[1])]
        for i, line, tags in made or card.tagged:
            print(f"  line {i}: {line}")
            print(*(f"    ({tag})  {card.equations.get(tag, '')}" for tag in tags), sep="\n")
        for tag in sorted(card.equations.keys() - sum((x[2] for x in card.tagged), card.derived)):
            print(f"  no line has ({tag})  {card.equations[tag]}")
        print("Then:", ", ".join(f"{card.n or card.slug}" for card, *_ in changed[1:]) or "none")
    if not named or any(card.direction == "backward" for card in chosen):
        errors = attempt(lambda: check_operations(0) | check_model(0, 3), "gradcheck") or {}
    for crash, names in stopped.items():
        print(f"Stopped: {', '.join(names)} at {crash}")
    wrong = [name for name, error in errors.items() if not error < 1e-4]
    if errors:
        print("gradcheck:", f"wrong are {', '.join(wrong)}" if wrong else "all agree")
    if changed and not named:
        print("Intended? Then " + "change the backward too, and " * bool(wrong) + "'make golden'.")
    return bool(changed or wrong or stopped)


# %% [markdown]
# ### Speed
#
# What the book leaves out, since no equation needs it. NumPy asks the system for fresh memory for
# every large array, and the system clears each page before it hands it out; `mallopt` tells the C
# library to keep freed memory. Each matrix product gets one core, and the halves of a large batch,
# 53.2 and 53.3 with two parts, are worked on side by side in two threads. How a batch is cut
# depends on its size alone, so the result does not depend on how many cores there are. For a small
# model the count of NumPy's calls is what costs: the optimizer's loop goes over long arrays.
# Measured on two cores, a step of a model 128 wide takes 1.6 times as long without kept memory and
# 1.1 times without the halves, one of default size 1.1 times without the long arrays.

# %%
LARGE = 2 ** 16                                     # B · T · d from which a batch is cut in two


def prepare_for_training():
    """Process-wide settings for speed; without effect where the system does not offer them."""
    global batch_loss_and_grads, AdamW
    batch_loss_and_grads, AdamW = in_halves, LongAdamW
    with contextlib.suppress(OSError, AttributeError, TypeError):       # TypeError: on Windows
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 1 << 30)                   # M_TRIM_THRESHOLD: keep freed memory
        libc.mallopt(-3, 1 << 25)                   # M_MMAP_THRESHOLD: large arrays from it too
    one_core_for_products()


def one_core_for_products():
    """Matrix products that this thread asks for use one core, where NumPy has an OpenBLAS."""
    libraries = {*map(str, Path(np.__file__).parent.parent.glob("numpy.libs/*openblas*"))}
    with contextlib.suppress(OSError):              # one that the system has
        libraries |= {*re.findall("/.*blas.*", os.fsdecode(Path("/proc/self/maps").read_bytes()))}
    for library in libraries:
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads",
                     "openblas_set_num_threads64_", "openblas_set_num_threads"):
            with contextlib.suppress(OSError, AttributeError, ValueError):  # it has none
                getattr(ctypes.CDLL(library), name)(1)


SECOND_THREAD = ThreadPoolExecutor(1, initializer=one_core_for_products)
in_turn = batch_loss_and_grads


def in_halves(params, xb, yb, config, parts=1):
    """As card 53, with the two halves of a large batch at the same time."""
    if parts > 1:
        return in_turn(params, xb, yb, config, parts)
    if len(xb) < 2 or xb.size * config.width < LARGE:
        return loss_and_grads(params, xb, yb, config)
    half = len(xb) // 2
    share = half / len(xb)
    later = SECOND_THREAD.submit(np.errstate(all="ignore")(loss_and_grads),
                                 params, xb[half:], yb[half:], config)
    loss, gbar = loss_and_grads(params, xb[:half], yb[:half], config)
    loss_2, g = later.result()
    for k in gbar:
        gbar[k] *= share
        gbar[k] += g[k] * (1 - share)                                       # as 53.3
    return loss * share + loss_2 * (1 - share), gbar                        # as 53.2


class LongAdamW(AdamW):
    """AdamW on one long array, matrices first; params, m and v become views of such arrays."""

    def __init__(self, params, *args, **settings):
        super().__init__(params, *args, **settings)
        self.names = sorted(params, key=lambda name: -params[name].ndim)
        self.sizes = np.array([params[name].size for name in self.names])
        self.params = {}
        for arrays, places in ((params, self.params), (self.m, self.m), (self.v, self.v)):
            places |= (long := self.long(arrays))
            flat = long["matrices"].base
            for name, part in zip(self.names, np.split(flat, self.sizes.cumsum())):
                arrays[name] = part.reshape(arrays[name].shape)

    def long(self, arrays):
        """All matrices in one row, (1, n), and all else, (n,): two views of one array."""
        n = sum(arrays[name].size for name in self.names if arrays[name].ndim > 1)
        flat = np.concatenate([arrays[name].ravel() for name in self.names])
        return {"matrices": flat[None, :n], "rest": flat[n:]}

    def step(self, params, grads, lr):
        super().step(self.params, self.long(grads), lr)


# %% [markdown]
# ### The command line
#
# Numbers are checked when the command line is read, before any file is; those of a checkpoint too.

# %%
def checked(kind, meaning, fits):
    """A check for argparse: text to a value of that kind that fits; meaning says in words what."""
    def check(text):
        with contextlib.suppress(ValueError):
            if fits(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {meaning}, got {text!r}")

    return check


count = checked(int, "a whole number from 0 up", lambda n: 0 <= n <= 10 ** 12)
whole = checked(int, "a whole number from 1 up", lambda n: 1 <= n <= 10 ** 12)
amount = checked(float, "a number from 0 up", lambda x: 0 <= x < math.inf)
below_1 = checked(float, "a number from 0 to below 1", lambda x: 0 <= x < 1)
share = checked(float, "a number above 0 and up to 1", lambda x: 0 < x <= 1)
file_name = checked(lambda name: "./" * name.startswith("-") + name,
                    "the name of a file in a folder that is there",
                    lambda name: name[-1:] not in ("", "/", os.sep) and Path(name).parent.is_dir())
OPTIONS = {key: SimpleNamespace(fixed=fixed, default=default, check=check, help=help)
           for key, fixed, default, check, help in (
    # fixed: what a checkpoint fixes; the rest may change when training goes on
    ("merges", True, 1700, count, "merges the tokenizer may learn; 0: plain characters"),
    ("context", True, 16, whole, "tokens in a window, T"),
    ("max_context", True, 32, whole, "rows of the position table, Tmax"),
    ("width", True, 32, whole, "numbers that describe a token, d"),
    ("heads", True, 2, whole, "attention heads, H; they share the width"),
    ("hidden", True, 128, whole, "width of the feed-forward layer, F"),
    ("layers", True, 2, whole, "blocks, L"),
    ("batch", True, 16, whole, "windows in a step, B"),
    ("stride", True, None, whole, "tokens from a window's start to the next; default context / 4"),
    ("val_fraction", True, 0.1, below_1, "share of the text held out for validation; 0: none"),
    ("seed", True, 0, count, "seed of starting values, batches and samples"),
    ("epochs", False, 0, count, "passes over the text; 0: --steps says it"),
    ("steps", False, 5000, count, "steps in all; with --epochs: stop there"),
    ("lr", False, None, amount, "largest learning rate; default 0.384 / width"),
    ("lr_min", False, None, amount, "learning rate at the end; default lr / 40"),
    ("warmup", False, None, count, "steps until the largest rate; default a tenth of them"),
    ("beta1", False, 0.9, below_1, "AdamW: share kept of the mean gradient"),
    ("beta2", False, 0.99, below_1, "AdamW: share kept of the mean square"),
    ("weight_decay", False, 0.1, amount, "AdamW: pull of matrices towards 0"),
    ("clip", False, 1.0, amount, "largest norm of the gradients; 0: off"),
    ("eval_every", False, 500, count, "steps between validations; 0: only at the end"))}
CHOICE = (("temperature", 0.8, amount, "0: always the likeliest token"),
          ("top_k", 0, count, "keep the N likeliest tokens; 0: all"),
          ("top_p", 1.0, share, "keep the likeliest up to this total probability; 1: all"))


def resolve(options, kept):
    """Settings, as a checkpoint keeps them: given options, else kept ones, else defaults; and the
    same with the values filled in that follow from others."""
    given = {key: getattr(options, key) for key in OPTIONS if getattr(options, key) is not None}
    for key in given:
        if OPTIONS[key].fixed and given[key] != kept.get(key, given[key]):
            raise BadInput(f"--{key.replace('_', '-')} {given[key]} does not fit the checkpoint "
                           f"{options.out}, which has {kept[key]}: leave the option out, or train "
                           f"without --resume")
    settings = {key: option.default for key, option in OPTIONS.items()} | kept | given
    if given.get("epochs") and "steps" not in given:
        settings["steps"] = 0                       # a plan that is given lifts another one
    s = SimpleNamespace(**settings)
    s.stride = s.stride or max(1, s.context // 4)
    s.lr = 0.384 / s.width if s.lr is None else s.lr                # larger models, smaller steps
    s.lr_min = s.lr / 40 if s.lr_min is None else s.lr_min          # lr / 10: 0.02 bits worse
    if s.lr_min > s.lr:
        raise BadInput(f"--lr-min {s.lr_min} is larger than --lr {s.lr}: make it smaller")
    return settings, s


class Parser(argparse.ArgumentParser):
    """argparse with errors on one line that say what was probably meant."""

    def parse_known_args(self, args=None, namespace=None):
        if bare := [word for word in args or sys.argv if word.endswith("=--")]:
            self.error(f"{bare[0]}: -- is no value")                # argparse would drop it
        options, extra = super().parse_known_args(args, namespace)
        if extra:
            near = difflib.get_close_matches(extra[0].split("=")[0], self._option_string_actions,
                                             1, 0.85)
            self.error(f"{extra[0]} belongs to no option" + (f"; there is {near[0]}" if near else
                       ": quotes hold a prompt of several words together, --text takes one file"))
        return options, extra

    def error(self, message):
        if message == "argument --prompt: expected one argument":
            message += "; where it begins with a dash, write --prompt=TEXT"
        raise BadInput(f"{message}; see '{self.prog} --help'")

    def print_help(self, file=None):                # argparse's own hides that a disk is full
        print(self.format_help(), end="", file=file)


def build_parser():
    """The command line; each command is a function, and its docstring the help."""
    parser = Parser(prog="tinygpt.py", description="""A GPT in one file, a book that runs. First
        'python tinygpt.py train', about half a minute; then 'generate', or 'generate --prompt "The
        fox"'; 'look --prompt "The fox and the"', what it sees; 'demo softmax', a worked example;
        'gradcheck'. Then open tinygpt.py and read it from the top. COMMAND --help has the
        options.""")
    parser.set_defaults(run=lambda options: parser.print_help())
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name, run, *options):
        about = run.__doc__.split("\n")[0]
        sub = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        sub.set_defaults(run=run)
        for key, default, check, help in options:
            value = {"action": "store_true"} if check is None else {
                "type": check, "default": default, "metavar": {file_name: "FILE"}.get(check, "N")}
            sub.add_argument(f"--{key.replace('_', '-')}", help=help if default in (None, False)
                             else f"{help} ({default})", **value)
        return sub

    model = ("model", "tinygpt.npz", file_name, "a trained model")
    prompt = ("prompt", "", plain_lines, "the text to go on from, in quotes; --prompt=TEXT where "
              "it begins with a dash")
    command("train", train, ("text", None, file_name, "a UTF-8 text; default corpus.txt, or that "
                             "of the training so far"),
            ("out", "tinygpt.npz", file_name, "the model"),
            ("log", None, file_name, "the curve of the training, as CSV"),
            ("resume", False, None, "go on training the model in --out"),
            *((key, None, option.check, f"{option.help} ({option.default})" if option.default is
               not None else option.help) for key, option in OPTIONS.items()))
    command("generate", run_generate, model, prompt, *CHOICE, ("tokens", 200, count, "to write"),
            ("seed", 0, count, "another seed writes another text"))
    command("look", run_look, model, prompt, *CHOICE)
    command("demo", play_demos, ("list", False, None, "list the cards"),
            ("changed", False, None, "say which print something else than golden/ has")
            ).add_argument("names", nargs="*", metavar="NAME", help="a card's name or number")
    command("blank", run_blank, ("out", None, file_name, "a new file; else to the screen")
            ).add_argument("names", nargs="+", metavar="CARD", help="a card's name or number")
    command("book", run_book, ("out", "tinygpt.html", file_name, "the page"))
    command("bench", run_bench, ("scale", False, None, "how the cost grows with T, B, L, d"),
            ("text", f"{THIS.parent / 'corpus.txt'}", file_name, "a UTF-8 text"))
    command("gradcheck", run_gradcheck, ("samples", 20, count, "entries drawn from each array"),
            ("seed", 0, count, "seed of model and entries"))
    return parser


def main(argv=None):
    """Run the command line; the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:              # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))
        if hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")   # for narrow consoles
    try:
        try:
            options = build_parser().parse_args(argv)
            options.choice = {key: getattr(options, key, None) for key, *_ in CHOICE}
            with np.errstate(all="ignore"):         # what is not finite is found and named
                return int(options.run(options) or 0)
        finally:
            sys.stdout.flush()
    except (BadInput, MemoryError) as error:        # any other error is ours, with its traceback
        tell(f"tinygpt: {error or 'the memory is too small'}".replace("\n", "\\n"))
        return 2
    except KeyboardInterrupt:
        tell("tinygpt: interrupted")
        return 130
    except OSError as error:                        # BrokenPipeError: as in '| head'
        to_nowhere(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return 0
        tell(f"tinygpt: cannot write {error.filename or 'the output'}: {error.strerror}"
             + "; what was there is unchanged" * bool(error.filename))
        return 2


if __name__ == "__main__" and "get_ipython" not in globals():
    sys.exit(main())
