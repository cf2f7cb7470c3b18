"""Random input of many kinds: the program succeeds or refuses in one line, never anything else.

FUZZ=10000 in the environment throws that many inputs instead of a few hundred.
"""
import contextlib
import io
import os
import random

import numpy as np
import pytest

import tinygpt as t
from test_checkpoint import make_checkpoint

COUNT = int(os.environ.get("FUZZ", 240))
TEXT = "the hen sat in the sun. the fox ran to the hen.\n" * 8
NUMBERS = ["0", "1", "-1", "2", "3", "5", "7", "0.5", "1.5", "-0.0", "1e-9", "1e9", "1e400", "nan",
           "inf", "-inf", "", " ", "x", "0x1", "1_0", "٣", "999999999999999999999", "--", "1,5"]


def run(argv):
    """Exit code and stderr of the command line; anything but a clean end raises."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = t.main(argv)
        except SystemExit as stop:
            code = stop.code
    return code, err.getvalue()


def clean(code, err):
    assert code in (0, 1, 2), (code, err)
    assert "Traceback" not in err
    if code == 2:
        assert err.count("\n") == 1, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz")
    (path / "text.txt").write_text(TEXT)
    t.save_checkpoint(path / "good.npz", make_checkpoint())
    return path


def test_random_option_values(folder):
    rng = random.Random(1)
    options = {**t.SIZES, **t.TRAINING}
    small = {"merges": "5", "context": "4", "width": "4", "hidden": "3", "layers": "1", "steps": "2",
             "batch": "3", "epochs": "0"}
    for _ in range(COUNT // 4):
        values = dict(small, **{name: rng.choice(NUMBERS)
                                for name in rng.sample(list(options), rng.randint(1, 3))})
        if any(value in ("1e9", "1_0", "7", "5") for name, value in values.items()
               if name in ("steps", "epochs")) or values.get("merges") == "1e9":
            values |= {"steps": "2", "epochs": "0"}
        argv = [f"--{name}={value}" for name, value in values.items()]
        clean(*run(["train", "--text", str(folder / "text.txt"), "--out",
                    str(folder / "out.npz"), *argv]))
        argv = [f"--{name}={rng.choice(NUMBERS)}"
                for name in rng.sample(["temperature", "top-k", "top-p", "seed"], 2)]
        clean(*run(["generate", "--model", str(folder / "good.npz"), "--tokens", "3", *argv]))


def test_random_bytes_as_text(folder):
    rng = random.Random(2)
    pieces = [b"\xff", b"\xc3", b"\xc3\xa9", b"\r\n", b"\r", b"\0", b"\xe2\x80\xa8", b"\x1b[2J",
              b"\xef\xbb\xbf", b" ", b"word ", b"'s", b"__", b"12", "😀".encode(), b"<unk>"]
    for _ in range(COUNT // 4):
        if rng.random() < 0.3:
            data = rng.randbytes(rng.randint(0, 60))
        else:
            data = b"".join(rng.choices(pieces[rng.choice([0, 2]):], k=rng.randint(0, 60)))
        (folder / "random.txt").write_bytes(data)
        code, err = run(["train", "--text", str(folder / "random.txt"), "--out",
                         str(folder / "out.npz"), "--steps=1", "--context=2", "--width=4",
                         "--hidden=3", "--layers=1", "--merges=9"])
        clean(code, err)
        with contextlib.suppress(ValueError):
            text = t.read_text(folder / "random.txt")
            tokenizer = t.build_tokenizer(text, 9)
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_damage_to_a_checkpoint(folder):
    rng = random.Random(3)
    good = (folder / "good.npz").read_bytes()
    for _ in range(COUNT):
        data = bytearray(good)
        kind = rng.randrange(4)
        if kind == 0:
            data = data[:rng.randrange(len(data))]
        elif kind == 1:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 2:
            at = rng.randrange(len(data))
            data[at:at + rng.randint(1, 200)] = rng.randbytes(rng.randint(0, 200))
        else:
            data = bytearray(rng.randbytes(rng.randint(0, 300)))
        (folder / "bad.npz").write_bytes(data)
        code, err = run(["generate", "--model", str(folder / "bad.npz"), "--tokens", "2"])
        clean(code, err)


def test_random_logits():
    rng = np.random.default_rng(4)
    special = [0.0, -0.0, 1e308, -1e308, np.inf, -np.inf, np.nan, 1e-320, 5.0]
    for _ in range(COUNT * 4):
        V = int(rng.integers(1, 12))
        z = rng.normal(size=V) * 10.0 ** rng.integers(-5, 6)
        for _ in range(int(rng.integers(0, 3))):
            z[rng.integers(V)] = special[rng.integers(len(special))]
        settings = (float(rng.choice([0, 1e-7, 1e-6, 0.5, 1, 1e6])), int(rng.integers(0, V + 3)),
                    float(rng.choice([1e-9, 0.3, 0.9, 1 - 1e-16, 1])))
        try:
            with np.errstate(over="ignore"):
                p = t.next_probabilities(z, *settings)
                token = t.sample_next(z, rng, *settings)
        except ValueError as error:
            assert "finite" in str(error) and not np.isfinite(z.max())
            continue
        assert np.isfinite(p).all() and (p >= 0).all() and abs(p.sum() - 1) < 1e-9
        assert p[token] > 0 and 0 <= token < V


def test_random_parameters():
    rng = np.random.default_rng(5)
    checkpoint = make_checkpoint()
    for _ in range(COUNT // 8):
        params = {name: (W * 10.0 ** rng.integers(-9, 10)).astype(np.float32)
                  for name, W in checkpoint.params.items()}
        with np.errstate(all="ignore"):
            try:
                t.generate(params, checkpoint.config, [1, 2], 3, rng)
            except ValueError as error:
                assert "finite" in str(error)
