"""Checkpoints: whole on the way out and back, refused in one line when they are not; resuming."""
import io, json, os, pickle, re, subprocess, sys, zipfile

import numpy as np
import pytest

import tinygpt as t
from conftest import ROOT, TEXT, failing, make_checkpoint, posix, refused, run, state


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.npz"
    t.save_checkpoint(path, make_checkpoint())
    return path


def npy(array):
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), allow_pickle=True)
    return file.getvalue()


def rewrite(path, drop="", arrays={}, **changes):
    """Drop an entry of the archive at path, put others in, change values of its JSON part."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries.pop(drop, None)
    if changes:
        about = json.loads(np.load(io.BytesIO(entries["about.npy"])).tobytes()) | changes
        arrays = arrays | {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    entries |= {f"{name}.npy": npy(array) for name, array in arrays.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_saved_comes_back_without_pickle_and_as_the_same_bytes(dtype, tmp_path):
    a = make_checkpoint()
    for part in (a.params, a.m, a.v):
        part.update({name: W.astype(dtype) for name, W in part.items()})
    for name in ("a", "b"):
        t.save_checkpoint(tmp_path / name, a)
    b = t.load_checkpoint(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with np.load(tmp_path / "a", allow_pickle=False) as archive:
        assert all(archive[name].dtype != object for name in archive.files)
    np.testing.assert_equal(vars(b), vars(a))
    assert all(W.dtype == dtype for part in (b.params, b.m, b.v) for W in part.values())
    assert list(b.params) == list(a.params)


@pytest.mark.parametrize("broken", [
    lambda c: c.params.pop("block1.wq"), lambda c: c.v["lnf_g"].fill(np.nan),
    lambda c: c.params.update(lnf_b=np.array([None] * 6)), lambda c: setattr(c, "step", -1),
    lambda c: c.tokenizer.itos.append("zzz"), lambda c: c.settings.update(lr=np.zeros(3))])
def test_what_could_not_be_loaded_is_not_written(broken, saved):
    before, ck = saved.read_bytes(), make_checkpoint()
    broken(ck)
    with pytest.raises((ValueError, TypeError)):
        t.save_checkpoint(saved, ck)
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("name", ["model", "x.npz.tmp", "a**b.npz", "[ab] é.npz"])
def test_the_name_given_is_the_name_that_works(name, tmp_path):
    if os.name == "nt" and "*" in name:
        pytest.skip("no such names there")
    t.save_checkpoint(tmp_path / name, make_checkpoint())
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    assert t.load_checkpoint(tmp_path / name).step == 3
    if os.name != "nt":                             # a link stays, where it leads is written
        (tmp_path / "link").symlink_to(tmp_path / name)
        t.save_checkpoint(tmp_path / "link", make_checkpoint(step=4))
        assert (tmp_path / "link").is_symlink() and t.load_checkpoint(tmp_path / name).step == 4


def test_a_failure_while_saving_leaves_the_old_file_and_nothing_else(saved, monkeypatch):
    good = saved.read_bytes()
    monkeypatch.setattr(np, "savez", lambda file, **arrays: (
        file.write(b"half of a file"), failing(OSError(28, "No space left on device"))()))
    with pytest.raises(OSError):
        t.save_checkpoint(saved, make_checkpoint(step=4))
    assert saved.read_bytes() == good and list(saved.parent.iterdir()) == [saved]


@posix
def test_killed_while_saving_a_good_file_remains(saved):
    code = ("import os, sys, numpy as np, tinygpt as t\n"
            "def dies(file, **arrays):\n"
            "    file.write(b'half of a file'), file.flush(), os.kill(os.getpid(), 9)\n"
            "checkpoint, np.savez = t.load_checkpoint(sys.argv[1]), dies\n"
            "t.save_checkpoint(sys.argv[1], checkpoint)")
    before = saved.read_bytes()
    assert subprocess.run([sys.executable, "-c", code, str(saved)], cwd=ROOT).returncode == -9
    assert saved.read_bytes() == before


# ---- damaged and foreign files ----------------------------------------------------------------
class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["params/tok_emb", "about"])
def test_a_crafted_file_is_refused_and_its_code_is_not_run(name, saved):
    trap = saved.parent / "trap"
    rewrite(saved, arrays={name: np.array([Payload(f"{trap}")], dtype=object)})
    result = run("generate", "--model", saved)
    refused(result, "model.npz")
    assert not trap.exists() and "ickle" not in result.stderr
    pickle.loads(pickle.dumps(Payload(f"{trap}")))
    assert trap.exists(), "the trap does work"


def other_compression(data):
    """The first entry said to be packed as LZMA, which it is not."""
    directory = int.from_bytes(data[data.rindex(b"PK\5\6") + 16:][:4], "little")
    return data[:directory + 10] + b"\x0e" + data[directory + 11:]


ITOS = make_checkpoint().tokenizer.itos
DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "last byte lost": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a byte changed": lambda path: path.write_bytes(
        (data := path.read_bytes())[:2000] + bytes([data[2000] ^ 255]) + data[2001:]),
    "empty archive": lambda path: zipfile.ZipFile(path, "w").close(),
    "an .npy file": lambda path: path.write_bytes(npy(np.zeros(3))),
    "a mean lost": lambda path: rewrite(path, "m/head_w.npy"),
    "another shape": lambda path: rewrite(path, arrays={"params/head_b": np.zeros(3, np.float32)}),
    "whole numbers": lambda path: rewrite(path, arrays={"params/lnf_g": np.ones(6, int)}),
    "not finite": lambda path: rewrite(path, arrays={"v/lnf_g": np.full(6, np.nan, np.float32)}),
    "no JSON": lambda path: rewrite(path, arrays={"about": np.frombuffer(b"{", np.uint8)}),
    "huge config": lambda path: rewrite(path, config={"vocab_size": 10 ** 30, "layers": 2}),
    "too many layers": lambda path: rewrite(path, config={"vocab_size": 9, "layers": 10 ** 8}),
    "short vocabulary": lambda path: rewrite(path, itos=["<unk>"]),
    "numbers as tokens": lambda path: rewrite(path, itos=list(range(len(ITOS)))),
    "no <unk>": lambda path: rewrite(path, itos=["x<unk>", *ITOS[1:]]),
    "bad merges": lambda path: rewrite(path, merges=[["a"]]),
    "other format": lambda path: rewrite(path, format="tinygpt 2"),
    "bad settings": lambda path: rewrite(path, settings={"lr": "x"}),
    "bad generator": lambda path: rewrite(path, batch_rng="x"),
    "generator lost": lambda path: rewrite(path, batch_rng={}),
    "a token twice": lambda path: rewrite(path, itos=[*ITOS[:2], *ITOS[1:-1]]),
    "bad step": lambda path: rewrite(path, step="three"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another compression": lambda path: path.write_bytes(other_compression(path.read_bytes()))}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_foreign_files_are_refused_in_one_line(damage, saved):
    DAMAGE[damage](saved)
    result = run("generate", "--model", saved)
    refused(result, "model.npz")
    assert "allow_pickle" not in result.stderr


def test_another_model_is_refused_naming_the_arrays(saved):
    rewrite(saved, "params/block1.wq.npy", {"params/block1.wz": np.zeros(3)})
    refused(run("generate", "--model", saved), "block1.wq", "block1.wz", "not both")


@pytest.mark.parametrize("command", ["generate", "look"])
def test_a_model_of_other_code_loads_with_one_line(command, saved):
    assert run(command, "--model", saved, "--prompt", "the hen").stderr == ""
    rewrite(saved, code="0123456789abcdef")
    result = run(command, "--model", saved, "--prompt", "the hen")
    assert result.returncode == 0 and result.stdout and result.stderr.count("\n") == 1
    assert "model.npz was made by other code" in result.stderr


@pytest.mark.parametrize("words", ["generate --model", "look --model", "train --resume --out"])
def test_a_missing_model_says_how_to_make_one(words):
    refused(run(*words.split(), "no model.npz"), "python tinygpt.py train --out 'no model.npz'")


def test_logits_that_are_infinite_or_no_numbers(saved):
    bias = np.full(len(ITOS), -3e38, np.float32)
    bias[0] = 3e38
    rewrite(saved, arrays={"params/head_b": bias})
    result = run("look", "--model", saved, "--prompt", "the hen")
    assert result.returncode == 0 and " inf" in result.stdout, "a surprise without bounds"
    rewrite(saved, arrays={"params/lnf_g": np.full(6, 3e38, np.float32),
                           "params/head_w": np.full((6, len(ITOS)), 3e38, np.float32)})
    for command in ("look", "generate"):
        result = run(command, "--model", saved, "--prompt", "the hen")
        assert result.returncode == 2 and "has diverged" in result.stderr


# ---- going on with training, and the text of the training so far ------------------------------
@pytest.mark.parametrize("epochs, more", [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1), (2, 3)])
def test_stopped_at_any_step_and_resumed_equals_never_stopped(epochs, more, train, tmp_path):
    """Two epochs and 3 steps, stopped before all, inside an epoch, at its end, and at the end."""
    plan = ["--stride", 12, "--epochs", 9]
    per_epoch = int(re.search(r"(\d+) steps per epoch", train(*plan[:2], "--steps=0").stderr)[1])
    end, stop = f"--steps={2 * per_epoch + 3}", epochs * per_epoch + more
    assert train(*plan, end, out="whole.npz").returncode == 0
    if stop:                                        # with --epochs, 0 steps mean all of them
        assert train(*plan, "--steps", stop).returncode == 0
    assert t.load_checkpoint(tmp_path / "m.npz").step == stop
    assert train("--resume", *plan, end).returncode == 0
    assert state(tmp_path / "whole.npz") == state(tmp_path / "m.npz")


def test_resuming_a_finished_run_says_so_and_changes_nothing(train, tmp_path):
    train("--steps", 4)
    before = (tmp_path / "m.npz").read_bytes()
    assert "nothing to do" in train("--resume").stderr
    assert (tmp_path / "m.npz").read_bytes() == before
    result = train("--resume", "--epochs", 1)       # another plan lifts the one before
    assert result.returncode == 0 and "nothing to do" not in result.stderr


@pytest.mark.parametrize("option, value, kept", [("--width", 24, 12), ("--context", 7, 8),
                                                 ("--merges", 3, 20), ("--seed", 1, 0)])
def test_sizes_that_clash_with_the_checkpoint_are_named(option, value, kept, train, tmp_path):
    train("--steps", 2)
    before = (tmp_path / "m.npz").read_bytes()
    refused(train("--resume", option, value), f"{option} {value}", f"{kept}")
    assert (tmp_path / "m.npz").read_bytes() == before


def test_training_anew_keeps_the_model_that_was_there(train, tmp_path):
    model, old = tmp_path / "m.npz", tmp_path / "m.npz.old"
    train("--steps", 2)
    before = model.read_bytes()
    assert f"is kept as {old}" in train("--steps", 3).stderr and old.read_bytes() == before
    train("--resume", "--steps", 4)                 # goes on: nothing to keep
    assert old.read_bytes() == before
    train("--steps", 1)                             # 4 steps instead of 2 are kept
    assert t.load_checkpoint(old).step == 4
    result = train("--steps", 1)                    # 1 step would be worse
    assert result.returncode == 0 and "has more steps" in result.stderr
    assert t.load_checkpoint(old).step == 4


@pytest.mark.parametrize("make", [
    lambda path: path.write_text("mine"), lambda path: path.mkdir(),
    pytest.param(lambda path: path.symlink_to(path.with_name("text.txt")), marks=posix),
    pytest.param(lambda path: path.symlink_to(path), marks=posix),
    pytest.param(lambda path: os.mkfifo(path), marks=posix)])
@pytest.mark.parametrize("name", ["m.npz.old", "other.npz"])
def test_what_is_no_model_is_not_overwritten(name, make, train, tmp_path):
    train("--steps", 2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    make(tmp_path / name)
    refused(train("--steps", 1, out=name.removesuffix(".old")), name)
    assert {path: path.read_bytes() for path in before} == before
    assert {*tmp_path.iterdir()} == {*before, tmp_path / name}


def test_of_two_trainings_on_one_file_the_later_save_is_refused(train, tmp_path, monkeypatch):
    validation_loss = t.validation_loss

    def meanwhile(*args):
        monkeypatch.setattr(t, "validation_loss", validation_loss)
        assert train("--steps", 7, "--seed", 9).returncode == 0
        return validation_loss(*args)

    monkeypatch.setattr(t, "validation_loss", meanwhile)
    result = train("--steps", 30, "--eval-every", 5)
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 2 and result.stdout == "" and "m.npz" in last and "--out" in last
    ck = t.load_checkpoint(tmp_path / "m.npz")
    assert (ck.step, ck.settings["seed"]) == (7, 9)


@pytest.mark.parametrize("place", ["model", "program", "here"])
@pytest.mark.parametrize("others", [False, True])
def test_the_text_is_found_and_the_checksum_decides(place, others, train, tmp_path, monkeypatch):
    """In the folder of the model, however it is called now, of the program, or here."""
    train("--steps", 2)
    for name in ("model", "program", "here"):
        (tmp_path / name).mkdir()
        if others:
            (tmp_path / name / "text.txt").write_text(TEXT.upper() + name)
    (tmp_path / "text.txt").rename(tmp_path / place / "text.txt")
    model = (tmp_path / "m.npz").rename(tmp_path / "model" / "m.npz")
    monkeypatch.setattr(t, "THIS", tmp_path / "program" / "tinygpt.py")
    result = run("train", "--resume", "--steps=3", "--out=../model/m.npz", cwd=tmp_path / "here")
    assert result.returncode == 0 and "note" not in result.stderr, result.stderr
    with np.load(model) as archive:
        assert tmp_path.name.encode() not in archive["about"].tobytes(), "no folder of the user"


def test_a_lost_text_is_named_and_another_one_noticed(train, tmp_path):
    train("--steps", 1)
    (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
    (tmp_path / "other.txt").write_text(TEXT + "Zoo")
    refused(run("train", "--resume", "--steps", 2, "--out", tmp_path / "m.npz"), "text.txt",
            "--text")
    assert "note" not in train("--resume", "--steps", 2, text="moved.txt").stderr
    result = train("--resume", "--steps", 3, text="other.txt")
    assert result.returncode == 0 and "'Z' U+005A" in result.stderr
    assert "other.txt is not the text that" in result.stderr
