"""Checkpoints: whole on the way out and back, refused in one line when they are not."""
import io
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import zipfile

import numpy as np
import pytest

import tinygpt as t
from conftest import ROOT


def make_checkpoint(step=3, seed=0):
    tokenizer = t.build_tokenizer("the hen, the fox and the café. " * 3, 5)
    config = t.ModelConfig(len(tokenizer.itos), context=4, max_context=6, width=6, heads=2,
                           hidden=5, layers=2)
    rng = np.random.default_rng(seed)
    params, m, v = (t.init_params(config, rng) for _ in range(3))
    v = {name: W * W for name, W in v.items()}
    return t.Checkpoint(params, config, tokenizer, {"lr": 0.01, "clip": 0}, step, m, v,
                        rng.bit_generator.state, 1.5)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.npz"
    t.save_checkpoint(path, make_checkpoint())
    return path


def rewritten(path, change):
    """The archive at path with its entries {name: bytes} changed by a function."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def npy(array):
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), allow_pickle=True)
    return file.getvalue()


def about(entries, **changes):
    """Change the JSON part of an archive."""
    values = json.loads(np.load(io.BytesIO(entries["about.npy"])).tobytes())
    entries["about.npy"] = npy(np.frombuffer(json.dumps(values | changes).encode(), np.uint8))


def test_what_is_saved_comes_back(saved):
    a, b = make_checkpoint(), t.load_checkpoint(saved)
    for part in ("params", "m", "v"):
        assert getattr(a, part).keys() == getattr(b, part).keys()
        for name, W in getattr(a, part).items():
            other = getattr(b, part)[name]
            assert W.dtype == other.dtype and np.array_equal(W, other)
    assert (a.config, a.settings, a.step, a.batch_rng, a.val_loss) == \
        (b.config, b.settings, b.step, b.batch_rng, b.val_loss)
    assert (a.tokenizer.itos, a.tokenizer.merges) == (b.tokenizer.itos, b.tokenizer.merges)
    assert b.tokenizer.encode("the café") == a.tokenizer.encode("the café")


def test_a_restored_generator_goes_on_where_the_saved_one_was(saved):
    rng = np.random.default_rng(99)
    rng.bit_generator.state = t.load_checkpoint(saved).batch_rng
    same = np.random.default_rng(0)
    for _ in range(3):
        t.init_params(make_checkpoint().config, same)
    assert rng.random() == same.random()


def test_no_pickle_and_the_same_bytes_each_time(saved, tmp_path):
    with np.load(saved, allow_pickle=False) as archive:
        assert all(archive[name].dtype != object for name in archive.files)
    t.save_checkpoint(tmp_path / "again.npz", make_checkpoint())
    assert (tmp_path / "again.npz").read_bytes() == saved.read_bytes()


@pytest.mark.parametrize("name", ["model", "run.ckpt", "x.npz.tmp", "a.b.npz", "a**b.npz", "[ab].npz"])
def test_the_name_given_is_the_name_that_works(name, tmp_path):
    left = tmp_path / f".{name}.1.tmp"              # by a process that was killed
    others = {tmp_path / ".a.npz.1.tmp", tmp_path / f".{name}.2.tmp"}
    for path in (left, *others):
        path.touch()
    for path in (left, tmp_path / ".a.npz.1.tmp"):
        os.utime(path, (0, 0))
    t.save_checkpoint(tmp_path / name, make_checkpoint())
    assert set(tmp_path.iterdir()) == {tmp_path / name, *others}
    assert t.load_checkpoint(tmp_path / name).step == 3


def test_a_failure_while_saving_leaves_the_old_file_and_nothing_else(saved, monkeypatch):
    good = saved.read_bytes()

    def fails(file, **arrays):
        file.write(b"half of a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fails)
    with pytest.raises(OSError):
        t.save_checkpoint(saved, make_checkpoint(step=4))
    assert saved.read_bytes() == good
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.skipif(os.name == "nt", reason="kills by signal")
def test_killed_while_saving_a_good_file_remains(saved):
    code = """
import os, sys, numpy as np, tinygpt as t
sys.path.insert(0, "tests")
from test_checkpoint import make_checkpoint
def dies(file, **arrays):
    file.write(b"half of a file"); file.flush(); os.kill(os.getpid(), 9)
np.savez = dies
t.save_checkpoint(sys.argv[1], make_checkpoint(step=4))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    result = subprocess.run([sys.executable, "-c", code, str(saved)], env=env, cwd=ROOT)
    assert result.returncode == -9
    assert t.load_checkpoint(saved).step == 3


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_crafted_file_is_refused_and_its_code_is_not_run(saved):
    trap = saved.parent / "trap"
    array = np.array([Payload(str(trap))], dtype=object)
    for name in ("params/tok_emb.npy", "about.npy"):
        rewritten(saved, lambda entries: entries.update({name: npy(array)}))
        trap.unlink(missing_ok=True)                # pickling made no file, loading must not
        with pytest.raises(ValueError) as error:
            t.load_checkpoint(saved)
        assert not trap.exists() and "\n" not in str(error.value)
        assert "ickle" not in str(error.value)
    pickle.loads(pickle.dumps(Payload(str(trap))))
    assert trap.exists(), "the trap does work"


def other_compression(data):
    """The first entry said to be packed as LZMA, which it is not."""
    directory = int.from_bytes(data[data.rindex(b"PK\5\6") + 16:][:4], "little")
    return data[:directory + 10] + b"\x0e" + data[directory + 11:]


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("this is no archive"),
    "first 100 bytes": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "last byte lost": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a byte changed": lambda path: path.write_bytes(
        path.read_bytes()[:2000] + bytes([path.read_bytes()[2000] ^ 255])
        + path.read_bytes()[2001:]),
    "empty archive": lambda path: zipfile.ZipFile(path, "w").close(),
    "an .npy file": lambda path: path.write_bytes(npy(np.zeros(3))),
    "another archive": lambda path: np.savez(open(path, "wb"), a=np.zeros(3)),
    "an array lost": lambda path: rewritten(path, lambda e: e.pop("params/block1.wq.npy")),
    "a mean lost": lambda path: rewritten(path, lambda e: e.pop("m/head_w.npy")),
    "another shape": lambda path: rewritten(
        path, lambda e: e.update({"params/head_b.npy": npy(np.zeros(3, np.float32))})),
    "another type": lambda path: rewritten(
        path, lambda e: e.update({"params/lnf_g.npy": npy(np.zeros(6))})),
    "not finite": lambda path: rewritten(
        path, lambda e: e.update({"params/lnf_g.npy": npy(np.full(6, np.nan, np.float32))})),
    "no JSON": lambda path: rewritten(
        path, lambda e: e.update({"about.npy": npy(np.frombuffer(b"{", np.uint8))})),
    "JSON list": lambda path: rewritten(
        path, lambda e: e.update({"about.npy": npy(np.frombuffer(b"[1]", np.uint8))})),
    "no config": lambda path: rewritten(path, lambda e: about(e, config={})),
    "bad config": lambda path: rewritten(path, lambda e: about(e, config={"vocab_size": "x"})),
    "huge config": lambda path: rewritten(
        path, lambda e: about(e, config={"vocab_size": 10 ** 30})),
    "short vocabulary": lambda path: rewritten(path, lambda e: about(e, itos=["<unk>"])),
    "numbers as tokens": lambda path: rewritten(
        path, lambda e: about(e, itos=list(range(len(make_checkpoint().tokenizer.itos))))),
    "bad merges": lambda path: rewritten(path, lambda e: about(e, merges=[["a"]])),
    "other format": lambda path: rewritten(path, lambda e: about(e, format="tinygpt 2")),
    "bad settings": lambda path: rewritten(path, lambda e: about(e, settings={"lr": "x"})),
    "settings a list": lambda path: rewritten(path, lambda e: about(e, settings=[])),
    "bad generator": lambda path: rewritten(path, lambda e: about(e, batch_rng="x")),
    "too many layers": lambda path: rewritten(
        path, lambda e: about(e, config={"vocab_size": 9, "layers": 10 ** 8})),
    "bad step": lambda path: rewritten(path, lambda e: about(e, step="three")),
    "no <unk>": lambda path: rewritten(path, lambda e: about(e, itos=[
        "x<unk>", *make_checkpoint().tokenizer.itos[1:]])),
    "text a number": lambda path: rewritten(path, lambda e: about(e, settings={"text": 5})),
    "generator lost": lambda path: rewritten(path, lambda e: about(e, batch_rng={})),
    "negative squares": lambda path: rewritten(
        path, lambda e: e.update({"v/lnf_g.npy": npy(np.full(6, -1, np.float32))})),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another compression": lambda path: path.write_bytes(other_compression(path.read_bytes())),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_foreign_files_are_refused_in_one_line(damage, saved, capsys):
    DAMAGE[damage](saved)
    assert t.main(["generate", "--model", str(saved)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "model.npz" in err, err
    assert "allow_pickle" not in err and "Traceback" not in err


def test_a_missing_model_says_how_to_make_one(tmp_path, capsys):
    assert t.main(["generate", "--model", str(tmp_path / "no.npz")]) == 2
    assert "python tinygpt.py train --out" in capsys.readouterr().err


# ---- going on with training -------------------------------------------------------------------

TEXT = "the hen sat in the sun. the fox ran to the hen. the hen ran to the den.\n" * 6
SMALL = ["--merges", "9", "--context", "6", "--width", "6", "--heads", "3", "--hidden", "7",
         "--layers", "1", "--batch", "4", "--stride", "4"]


@pytest.fixture
def train(tmp_path, capsys):
    """train(*options) on a small text; the model is out.npz in the same folder."""
    (tmp_path / "text.txt").write_text(TEXT)

    def run(*options, out="out.npz", text="text.txt"):
        code = t.main(["train", "--text", str(tmp_path / text), "--out", str(tmp_path / out),
                       *map(str, options)])
        return code, capsys.readouterr().err

    run.folder = tmp_path
    return run


def same(a, b):
    """Two checkpoint files hold the same training state, bit for bit."""
    a, b = t.load_checkpoint(a), t.load_checkpoint(b)
    return a.step == b.step and a.batch_rng == b.batch_rng and a.val_loss == b.val_loss and all(
        np.array_equal(getattr(a, part)[name], getattr(b, part)[name])
        for part in ("params", "m", "v") for name in a.params)


@pytest.mark.parametrize("epochs, more", [(0, 1), (0, 7), (1, -1), (1, 0), (1, 1), (2, 0), (2, 3)])
def test_stopped_at_any_step_and_resumed_equals_never_stopped(epochs, more, train):
    """Two epochs and 3 steps, stopped inside an epoch, at its end, and where it all ends."""
    code, err = train(*SMALL, "--epochs", 9, "--steps", 1)
    per_epoch = int(re.search(r"(\d+) steps per epoch", err)[1])
    end, stop = 2 * per_epoch + 3, epochs * per_epoch + more
    assert train(*SMALL, "--epochs", 9, "--steps", end, out="whole.npz")[0] == 0
    assert train(*SMALL, "--epochs", 9, "--steps", stop)[0] == 0
    assert t.load_checkpoint(train.folder / "out.npz").step == stop
    assert train("--resume", "--steps", end)[0] == 0
    assert same(train.folder / "whole.npz", train.folder / "out.npz")


def test_resuming_a_finished_run_says_so_and_changes_nothing(train):
    train(*SMALL, "--steps", 4)
    before = (train.folder / "out.npz").read_bytes()
    code, err = train("--resume")
    assert code == 0 and "nothing to do" in err
    assert (train.folder / "out.npz").read_bytes() == before


@pytest.mark.parametrize("option, value, kept", [("--width", 12, 6), ("--context", 7, 6),
                                                 ("--merges", 3, 9), ("--seed", 1, 0)])
def test_sizes_that_clash_with_the_checkpoint_are_named(option, value, kept, train):
    train(*SMALL, "--steps", 2)
    before = (train.folder / "out.npz").read_bytes()
    code, err = train("--resume", option, value)
    assert code == 2 and option in err and str(value) in err and str(kept) in err
    assert err.count("\n") == 1
    assert (train.folder / "out.npz").read_bytes() == before


def test_resuming_needs_a_model(train):
    code, err = train("--resume")
    assert code == 2 and "there is no model" in err


def test_resuming_on_a_text_with_unknown_characters_warns(train):
    train(*SMALL, "--steps", 2)
    (train.folder / "other.txt").write_text(TEXT + "Zoo")
    code, err = train("--resume", "--steps", 3, text="other.txt")
    assert code == 0 and "'Z' U+005A" in err


def test_no_steps_saves_an_untrained_model(train):
    assert train(*SMALL, "--steps", 0)[0] == 0
    checkpoint = t.load_checkpoint(train.folder / "out.npz")
    start = t.init_params(checkpoint.config, np.random.default_rng([0, 0]))
    assert checkpoint.step == 0
    assert all(np.array_equal(W, checkpoint.params[name]) for name, W in start.items())
    assert train("--resume", "--steps", 12)[0] == 0             # the warm-up is that of 12 steps
    train(*SMALL, "--steps", 12, out="whole.npz")
    assert same(train.folder / "whole.npz", train.folder / "out.npz")


def test_training_anew_keeps_the_model_that_was_there(train):
    train(*SMALL, "--steps", 2)
    before = (train.folder / "out.npz").read_bytes()
    code, err = train(*SMALL, "--steps", 3)
    assert code == 0 and "is kept as" in err and "out.npz.old" in err
    old = train.folder / "out.npz.old"
    assert old.read_bytes() == before
    train("--resume", "--steps", 4)                     # goes on: nothing to keep
    assert old.read_bytes() == before
    train(*SMALL, "--steps", 1)                         # 4 steps instead of 2 are kept
    assert t.load_checkpoint(old).step == 4
    code, err = train(*SMALL, "--steps", 1)             # 1 step would be worse
    assert code == 0 and "has more steps" in err
    assert t.load_checkpoint(old).step == 4


def test_what_is_no_model_beside_the_model_is_not_overwritten(train):
    train(*SMALL, "--steps", 2)
    folder = train.folder
    before = (folder / "out.npz").read_bytes()
    for make in (lambda old: old.write_text("mine"), lambda old: old.symlink_to(folder / "text.txt"),
                 lambda old: old.mkdir(), lambda old: os.mkfifo(old)):
        make(folder / "out.npz.old")
        text = (folder / "text.txt").read_bytes()
        code, err = train(*SMALL, "--steps", 1)
        assert code == 2 and "out.npz.old exists" in err and err.count("\n") == 1
        assert (folder / "text.txt").read_bytes() == text
        assert (folder / "out.npz").read_bytes() == before
        (folder / "out.npz.old").rename(folder / f"was {len(list(folder.iterdir()))}")


def test_names_that_lead_nowhere(train):
    train(*SMALL, "--steps", 1)
    folder = train.folder
    before = (folder / "out.npz").read_bytes()
    (folder / "loop").symlink_to(folder / "pool")
    (folder / "pool").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    for out in ("nowhere/../out.npz", "loop", "loop/x.npz", "pipe"):
        code, err = train(*SMALL, "--steps", 1, out=out)
        assert code == 2 and out in err and err.count("\n") == 1, err
    assert (folder / "out.npz").read_bytes() == before


def test_settings_that_are_text_are_read_as_numbers(train):
    train(*SMALL, "--steps", 2)
    path = train.folder / "out.npz"
    rewritten(path, lambda e: about(e, settings={**t.load_checkpoint(path).settings, "lr": "0.01",
                                                 "batch": "3"}))
    code, err = train("--resume", "--steps", 4)
    assert code == 0 and t.load_checkpoint(path).settings["batch"] == 3


def test_a_lost_text_is_named_as_that_of_the_training_so_far(train, capsys):
    train(*SMALL, "--steps", 1)
    (train.folder / "text.txt").rename(train.folder / "moved.txt")
    code = t.main(["train", "--resume", "--steps", "2", "--out", str(train.folder / "out.npz")])
    err = capsys.readouterr().err
    assert code == 2 and "text.txt" in err and "--text" in err and err.count("\n") == 1
    assert train("--resume", "--steps", 2, text="moved.txt")[0] == 0


def test_look_shows_a_loss_that_is_infinite(saved, capsys):
    bias = np.full(len(make_checkpoint().tokenizer.itos), -3e38, np.float32)
    bias[0] = 3e38
    rewritten(saved, lambda e: e.update({"params/head_b.npy": npy(bias)}))
    assert t.main(["look", "--model", str(saved), "--prompt", "the hen"]) == 0
    assert "inf" in capsys.readouterr().out


def test_look_names_a_model_that_has_diverged(saved, capsys):
    rewritten(saved, lambda e: e.update(
        {"params/lnf_g.npy": npy(np.full(6, 3e38, np.float32)),
         "params/head_w.npy": npy(np.full(t.load_checkpoint(saved).params["head_w"].shape, 3e38,
                                          np.float32))}))
    for command in ("look", "generate"):
        assert t.main([command, "--model", str(saved), "--prompt", "the hen"]) == 2
        assert "has diverged" in capsys.readouterr().err


def test_files_that_are_no_models_are_not_overwritten(train):
    (train.folder / "notes.md").write_text("mine")
    for out in ("text.txt", "notes.md"):
        before = (train.folder / out).read_bytes()
        code, err = train(*SMALL, "--steps", 1, out=out)
        assert code == 2 and out in err and err.count("\n") == 1
        assert (train.folder / out).read_bytes() == before


def test_resuming_reads_the_text_of_before_and_notices_another(train):
    train(*SMALL, "--steps", 2)
    assert t.main(["train", "--resume", "--steps", "3", "--out", str(train.folder / "out.npz")]) == 0
    assert t.load_checkpoint(train.folder / "out.npz").settings["text"].endswith("text.txt")
    (train.folder / "other.txt").write_text(TEXT.upper().lower() + "the end.")
    code, err = train("--resume", "--steps", 4, text="other.txt")
    assert code == 0 and "is not the text" in err


def test_a_validation_loss_that_is_not_finite_is_divergence(train, monkeypatch):
    train(*SMALL, "--steps", 2)
    before = (train.folder / "out.npz").read_bytes()
    monkeypatch.setattr(t, "validation_loss", lambda *_: float("nan"))
    code, err = train("--resume", "--steps", 4)
    assert code == 1 and "diverged" in err
    assert (train.folder / "out.npz").read_bytes() == before


def test_another_plan_lifts_the_one_before(train):
    train(*SMALL, "--steps", 2)
    code, err = train("--resume", "--epochs", 1)
    assert code == 0 and "nothing to do" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_or_closed_stderr_does_not_stop_training(train):
    args = [sys.executable, str(ROOT / "tinygpt.py"), "train", "--text",
            str(train.folder / "text.txt"), "--out", str(train.folder / "out.npz"), *SMALL,
            "--steps", "2"]
    for redirect in ("2>/dev/full", "2>&-"):
        code = subprocess.run(f"{shlex.join(args)} {redirect}", shell=True,
                              stdout=subprocess.DEVNULL).returncode
        assert code == 0 and t.load_checkpoint(train.folder / "out.npz").step == 2
