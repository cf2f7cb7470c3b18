"""Random input of many kinds: success or one line. FUZZ=10000 in the environment gives more."""
import os, random, re

import numpy as np
import pytest

import tinygpt as t
from conftest import SMALL, TEXT, make_checkpoint, run

COUNT = int(os.environ.get("FUZZ", 160))
NUMBERS = ["0", "1", "-1", "2", "3", "5", "7", "0.5", "1.5", "-0.0", "1e-9", "1e9", "1e400", "nan",
           "inf", "-inf", "", " ", "x", "0x1", "1_0", "٣", "999999999999999999999", "--", "1,5"]
def clean(*args):
    """The exit code of a command that ends in order: 0, 1, or 2 with one line."""
    result = run(*args)                             # anything but a clean end raises
    assert result.returncode in (0, 1, 2) and "Traceback" not in result.stderr, result
    assert result.returncode != 2 or result.stderr.count("\n") == 1, result
    return result.returncode


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    t.save_checkpoint(tmp_path / "good.npz", make_checkpoint())
    return tmp_path


def test_random_option_values(folder):
    rng = random.Random(1)
    options = sorted({*re.findall(r"--[\w-]+(?= N)", run("train", "--help").stdout)}
                     - {"--steps", "--epochs"})
    assert len(options) > 15
    for _ in range(COUNT // 4):
        values = {name: rng.choice(NUMBERS) for name in rng.sample(options, rng.randint(1, 3))}
        clean("train", "--text", folder / "text.txt", "--out", folder / "out.npz", *SMALL,
              f"--steps={rng.choice(['2', '2', '0', '-1', '1.5', 'nan', ''])}",
              *(f"{name}={value}" for name, value in values.items()))
        command = rng.choice(["generate", "look"])
        clean(command, "--model", folder / "good.npz", *["--tokens=3"] * (command == "generate"),
              *(f"--{name}={rng.choice(NUMBERS)}"
                for name in rng.sample(["temperature", "top-k", "top-p"], 2)))


def test_random_words(folder):
    rng = random.Random(6)
    words = ["train", "generate", "look", "demo", "gradcheck", "--model", "--prompt", "--list",
             "15", "--text", "--out", "the", "fox", "softmax", "-x", "--", "", "--steps",
             "-1", "--seed"]
    for _ in range(COUNT):
        args = rng.choices(words, k=rng.randint(1, 4))
        if args[0] in ("train", "gradcheck") or args == ["demo"]:
            args.append("--nothing")                # such a run would take its time
        clean(*args)


def test_random_bytes_as_text(folder):
    rng = random.Random(2)
    pieces = [b"\xff", b"\xc3", b"\xc3\xa9", b"\r\n", b"\r", b"\0", b"\xe2\x80\xa8", b"\x1b[2J",
              b"\xef\xbb\xbf", b" ", b"word ", b"'s", b"__", b"12", "😀".encode(), b"<unk>"]
    for _ in range(COUNT // 4):
        data = b"".join(rng.choices(pieces[rng.choice([0, 2]):], k=rng.randint(0, 60)))
        data = data if rng.random() < 0.7 else rng.randbytes(rng.randint(0, 60))
        (folder / "random.txt").write_bytes(data)
        clean("train", "--text", folder / "random.txt", "--out", folder / "out.npz", *SMALL,
              "--steps=1", "--context=2")


def test_random_damage_to_a_checkpoint(folder):
    rng = random.Random(3)
    good = (folder / "good.npz").read_bytes()
    for _ in range(COUNT):
        at, some = rng.randrange(len(good)), rng.randbytes(rng.randint(0, 300))
        (folder / "bad.npz").write_bytes(rng.choice([
            some, good[:at], good[:at] + some[:1] + good[at + 1:],
            good[:at] + some + good[at + rng.randint(1, 200):]]))
        clean("generate", "--model", folder / "bad.npz", "--tokens=2")


def test_random_logits_and_parameters():
    rng, ck = np.random.default_rng(4), make_checkpoint()
    special = [0.0, -0.0, 1e38, -1e38, np.inf, -np.inf, np.nan, 1e-320, 5.0]
    for n in range(COUNT * 4):
        V = int(rng.integers(1, 12))
        z = rng.normal(size=V) * 10.0 ** rng.integers(-5, 6)
        z[rng.integers(V, size=rng.integers(0, 3))] = rng.choice(special)
        choice = dict(temperature=float(rng.choice([0, 1e-7, 1e-6, 0.5, 1, 1e6])),
                      top_k=int(rng.integers(0, V + 3)),
                      top_p=float(rng.choice([1e-9, 0.3, 0.9, 1 - 1e-16, 1])))
        try:
            with np.errstate(over="ignore"):
                p, token = t.next_probabilities(z, **choice), t.sample_next(z, rng, **choice)
        except ValueError as error:
            assert "finite" in str(error) and not np.isfinite(z.max())
            continue
        assert np.isfinite(p).all() and (p >= 0).all() and abs(p.sum() - 1) < 1e-9 and p[token] > 0
