"""What the demos print, frozen in golden/."""
import contextlib, io, re

import numpy as np
import pytest

from conftest import GOLDEN, changed_module

t = changed_module()                                # as it stands in the file, whatever ran before
DEMOS = {t.golden_file(card).stem: card.demo for card in t.cards()}


def printed(name, module=t):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        getattr(module, DEMOS[name])()
    return out.getvalue()


@pytest.mark.parametrize("name", DEMOS)
def test_a_demo_prints_its_golden_file_which_fits_the_page(name, golden):
    """In 80 columns, but for rows with a number for each of the 10 tokens."""
    assert (out := printed(name)) == golden
    assert out.endswith("\n") and 3 <= out.count("\n") <= 30
    for line in out[:-1].split("\n"):
        assert len(line) <= 80 or re.fullmatch(r".{10}(?: +-?\d+\.\d+){10}", line)
        assert line == line.rstrip() and (line + " ").isprintable()
        assert not re.search(r"np\.|array\(|-0\.?0*(?![\d.])", line)      # the last is minus zero


def test_a_demo_does_not_depend_on_what_ran_before():
    new, another = changed_module(), changed_module()
    forwards = {name: printed(name, new) for name in DEMOS}
    assert {name: printed(name, another) for name in reversed(DEMOS)} == forwards


@pytest.mark.parametrize("seed", range(2))
def test_no_number_sits_on_a_rounding_edge(seed, monkeypatch):
    """All parameters moved by far less than a digit: every demo prints the same."""
    before, noise = {name: printed(name) for name in DEMOS}, np.random.default_rng(seed)
    moved = []

    class Nudged(np.random.Generator):
        def uniform(self, *args):                   # the parameters of init_params
            moved.append("uniform")
            return super().uniform(*args) * (1 + 1e-12 * noise.uniform(-1, 1, args[-1]))

        def integers(self, low, high=None, size=None):
            numbers = super().integers(low, high, size)
            if size is None:
                return numbers
            moved.append("example")                 # the parameters of the running example
            return numbers * (1 + 1e-12 * noise.uniform(-1, 1, size))

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Nudged(np.random.PCG64(seed)))
    assert {name: printed(name) for name in DEMOS} == before
    assert {*moved} == {"uniform", "example"}


def test_every_demo_has_its_golden_file_and_none_is_left_over():
    files = {path.stem for path in GOLDEN.iterdir()}
    assert files - {"pytorch", "page"} == DEMOS.keys()      # an outside witness, and formulas


def test_the_random_streams_are_those_the_golden_files_were_made_with():
    message = "NumPy's random streams have changed, not this program: update the golden files"
    bits, new = np.random.PCG64(42), np.random.default_rng
    assert [int(bits.random_raw()) for _ in range(2)] == [
        14276969152011380360, 8095878257575067585], message
    assert new(42).random(3).tolist() == [
        0.7739560485559633, 0.4388784397520523, 0.8585979199113825], message
    assert new(42).uniform(-1, 1, 2).tolist() == [
        0.5479120971119267, -0.12224312049589536], message
    assert new(42).integers(-9, 10, 8).tolist() == [-8, 5, 3, -1, -1, 7, -8, 4], message
