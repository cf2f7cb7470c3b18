"""The program as its users meet it: commands, options, bad input, output."""
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tinygpt as t
from conftest import ROOT

TEXT = ("the hen sat in the sun. the fox ran to the hen. the hen ran to the den.\n"
        "\"why do you run?\" said the fox. \"why do you ask?\" said the hen.\n") * 8
SMALL = ["--merges", "20", "--context", "8", "--max-context", "10", "--width", "12", "--heads", "3",
         "--hidden", "20", "--layers", "1", "--batch", "4", "--stride", "3"]


def run(*args, cwd=None):
    """Run the command line inside this process, which is much faster."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd or "."), contextlib.redirect_stdout(out), \
            contextlib.redirect_stderr(err):
        try:
            code = t.main([str(arg) for arg in args])
        except SystemExit as stop:
            code = stop.code
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def run_process(*args, cwd=None, env=None, text=True):
    """Run the command line in a process of its own."""
    return subprocess.run([sys.executable, str(ROOT / "tinygpt.py"), *map(str, args)], cwd=cwd,
                          env={**os.environ, **(env or {})}, text=text, capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=60,
                          encoding="utf-8" if text else None)


def refused(result, *words):
    """Exit code 2, nothing on stdout, one line on stderr that has all the words."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr, result.stderr
    for word in words:
        assert word in result.stderr, (word, result.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with text.txt and a model.npz trained on it, and what the training printed."""
    path = tmp_path_factory.mktemp("trained")
    (path / "text.txt").write_text(TEXT, encoding="utf-8")
    result = run_process("train", "--text", "text.txt", "--out", "model.npz", *SMALL, "--steps", 120,
                         "--eval-every", 40, cwd=path)
    assert result.returncode == 0, result.stderr
    path.joinpath("stdout").write_text(result.stdout, encoding="utf-8")
    path.joinpath("stderr").write_text(result.stderr, encoding="utf-8")
    return path


# ---- training ---------------------------------------------------------------------------------

def test_training_learns_and_reports(folder):
    log = (folder / "stderr").read_text(encoding="utf-8")
    losses = [float(x) for x in re.findall(r"validation ([0-9.]+)", log)]
    assert len(losses) == 3 and losses[-1] < losses[0] < np.log(40)
    assert "--- before training" in log and "model.npz" in log
    assert (folder / "stdout").read_text(encoding="utf-8").strip(), "a sample on stdout"


def test_a_log_file_has_plain_lines(folder):
    log = (folder / "stderr").read_bytes()
    assert b"\r" not in log and b"\x1b" not in log and log.endswith(b"\n")


def test_the_reported_validation_loss_is_that_of_the_saved_model(folder):
    checkpoint = t.load_checkpoint(folder / "model.npz")
    ids = checkpoint.tokenizer.encode(TEXT)
    _, val_ids = t.split_ids(ids, 0.1)
    x, y = t.make_windows(val_ids, 8, 8)
    loss = t.validation_loss(checkpoint.params, x, y, checkpoint.config)
    assert loss == pytest.approx(checkpoint.val_loss, rel=1e-6)
    log = (folder / "stderr").read_text(encoding="utf-8")
    assert f"validation {loss:.3f}" in log and f"perplexity {np.exp(loss):.1f}" in log
    text = checkpoint.tokenizer.decode(y.ravel())
    assert f"bits per character {loss * y.size / np.log(2) / len(text):.3f}" in log


def test_training_stays_in_float32(folder):
    checkpoint = t.load_checkpoint(folder / "model.npz")
    assert {W.dtype for part in (checkpoint.params, checkpoint.m, checkpoint.v)
            for W in part.values()} == {np.dtype(np.float32)}


def test_the_same_command_gives_the_same_bytes_and_another_seed_others(folder, tmp_path):
    files = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        result = run("train", "--text", folder / "text.txt", "--out", tmp_path / name, *SMALL,
                     "--steps", 7, "--seed", seed)
        assert result.returncode == 0, result.stderr
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1] != files[2]


def test_measuring_more_often_changes_nothing(folder, tmp_path):
    params = []
    for every in (0, 2):
        run("train", "--text", folder / "text.txt", "--out", tmp_path / "m.npz", *SMALL,
            "--steps", 9, "--eval-every", every)
        params.append(t.load_checkpoint(tmp_path / "m.npz").params)
    assert all(np.array_equal(params[0][k], params[1][k]) for k in params[0])


def test_learning_rate_zero_leaves_every_weight_as_it_was(folder, tmp_path):
    run("train", "--text", folder / "text.txt", "--out", tmp_path / "m.npz", *SMALL,
        "--steps", 3, "--lr", 0, "--seed", 4)
    checkpoint = t.load_checkpoint(tmp_path / "m.npz")
    start = t.init_params(checkpoint.config, np.random.default_rng([4, 0]))
    assert all(np.array_equal(checkpoint.params[k], start[k]) for k in start)


def test_epochs_give_the_steps_of_card_54(folder, tmp_path):
    result = run("train", "--text", folder / "text.txt", "--out", tmp_path / "m.npz", *SMALL,
                 "--epochs", 2)
    per_epoch = int(re.search(r"(\d+) steps per epoch", result.stderr)[1])
    assert t.load_checkpoint(tmp_path / "m.npz").step == 2 * per_epoch


def test_merges_0_is_a_character_tokenizer(folder, tmp_path):
    run("train", "--text", folder / "text.txt", "--out", tmp_path / "m.npz", *SMALL,
        "--merges", 0, "--steps", 1)
    tokenizer = t.load_checkpoint(tmp_path / "m.npz").tokenizer
    assert tokenizer.itos == ["<unk>", *dict.fromkeys(TEXT)]


def test_diverging_training_stops_and_keeps_the_good_model(folder, tmp_path):
    out = tmp_path / "m.npz"
    out.write_bytes((folder / "model.npz").read_bytes())
    result = run("train", "--text", folder / "text.txt", "--out", out, "--resume", "--steps", 400,
                 "--lr", "1e30", "--clip", 0, "--warmup", 0)
    assert result.returncode == 1
    assert re.search(r"step 12\d: .*diverged", result.stderr)
    assert out.read_bytes() == (folder / "model.npz").read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_saves_and_a_resumed_run_equals_one_that_never_stopped(folder, tmp_path):
    args = ["train", "--text", str(folder / "text.txt"), *SMALL, "--steps", "1000",
            "--eval-every", "0"]
    process = subprocess.Popen([sys.executable, str(ROOT / "tinygpt.py"), *args, "--out",
                                str(tmp_path / "stopped.npz")], stderr=subprocess.PIPE, text=True,
                               stdout=subprocess.DEVNULL)
    for line in process.stderr:
        if "after 10 steps" in line:
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait() == 130 and "Traceback" not in rest
    assert "--resume" in rest
    step = t.load_checkpoint(tmp_path / "stopped.npz").step
    assert 10 <= step < 1000
    assert run(*args, "--out", tmp_path / "stopped.npz", "--resume").returncode == 0
    assert run(*args, "--out", tmp_path / "whole.npz").returncode == 0
    a, b = (t.load_checkpoint(tmp_path / name) for name in ("stopped.npz", "whole.npz"))
    for part in ("params", "m", "v"):
        assert all(np.array_equal(getattr(a, part)[k], getattr(b, part)[k]) for k in a.params)
    assert (a.step, a.val_loss, a.batch_rng) == (b.step, b.val_loss, b.batch_rng)


# ---- generation -------------------------------------------------------------------------------

def test_generate_continues_the_prompt(folder):
    result = run_process("generate", "--prompt", "the hen", "--tokens", 30, cwd=folder)
    again = run("generate", "--prompt", "the hen", "--tokens", 30, "--model", "model.npz",
                cwd=folder)
    assert result.returncode == 2 and "tinygpt.npz" in result.stderr
    assert again.returncode == 0 and again.stdout.startswith("the hen") and again.stderr == ""
    other = run("generate", "--prompt", "the hen", "--tokens", 30, "--model", "model.npz",
                "--seed", 1, cwd=folder)
    assert other.stdout != again.stdout


def test_no_tokens_gives_the_prompt_back(folder):
    result = run("generate", "--model", folder / "model.npz", "--prompt", "the hen", "--tokens", 0)
    assert result.stdout == "the hen\n"


@pytest.mark.parametrize("prompt", ["-x", "--", "- item", "--model", ""])
def test_prompts_that_begin_with_a_dash_or_are_empty(folder, prompt):
    result = run("generate", "--model", folder / "model.npz", "--tokens", 3, "--prompt", prompt)
    assert result.returncode == 0 and result.stdout.startswith(prompt)
    result = run("generate", "--model", folder / "model.npz", "--tokens", 3, f"--prompt={prompt}")
    assert result.returncode == 0 and result.stdout.startswith(prompt)


def test_a_file_whose_name_begins_with_a_dash(tmp_path):
    (tmp_path / "-t.txt").write_text(TEXT, encoding="utf-8")
    result = run("train", "--text=-t.txt", "--out=-m.npz", *SMALL, "--steps", 1, cwd=tmp_path)
    command = result.stderr.split("let it write with: python tinygpt.py ")[1].split()
    assert (tmp_path / "-m.npz").is_file() and run(*command, cwd=tmp_path).returncode == 0


def test_an_unknown_character_in_the_prompt_is_named_once(folder):
    result = run("generate", "--model", folder / "model.npz", "--tokens", 3, "--prompt", "hZnZ")
    assert result.returncode == 0
    assert result.stderr.count("\n") == 1 and "'Z' U+005A at 1" in result.stderr


@pytest.mark.parametrize("option, value", [
    ("--tokens", "-1"), ("--temperature", "-1"), ("--temperature", "nan"),
    ("--temperature", "inf"), ("--top-k", "-1"), ("--top-p", "0"), ("--top-p", "1.1"),
    ("--top-p", "nan"), ("--seed", "-1"), ("--tokens", "x")])
def test_sampling_options_out_of_range(option, value):
    refused(run("generate", option, value, "--model", "missing.npz"), option, value)


# ---- bad input --------------------------------------------------------------------------------

@pytest.mark.parametrize("option, value", [
    ("--steps", "-1"), ("--batch", "0"), ("--context", "0"), ("--stride", "0"), ("--layers", "0"),
    ("--heads", "0"), ("--width", "0"), ("--hidden", "-3"), ("--merges", "-1"),
    ("--eval-every", "-1"), ("--val-fraction", "1"), ("--val-fraction", "1.5"), ("--lr", "nan"),
    ("--lr", "-1"), ("--beta1", "1"), ("--beta2", "nan"), ("--clip", "-1"), ("--warmup", "-1"),
    ("--weight-decay", "inf"), ("--epochs", "2.5"), ("--seed", "x")])
def test_training_options_are_checked_before_the_text_is_read(option, value):
    refused(run("train", option, value, "--text", "missing.txt"), option, value)


def test_sizes_that_do_not_fit_together(tmp_path):
    refused(run("train", "--width", 10, "--heads", 3, "--text", "no.txt"), "--width 10",
            "--heads 3")
    refused(run("train", "--context", 64, "--text", "no.txt"), "--context 64", "--max-context 32")
    refused(run("train", "--lr", 0.001, "--lr-min", 0.01, "--text", "no.txt"), "0.001", "0.01")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data, words", [
    (None, ["text.txt"]), (b"", ["empty"]), (b"\xef\xbb\xbf", ["empty"]),
    (b"caf\xe9", ["0xE9", "offset 3"]), (b"\xff\xfea\x00b\x00", ["0xFF", "offset 0"]),
    (b"ok\xc3", ["0xC3", "offset 2"]), (b"\xef\xbb\xbfok\xc3", ["0xC3", "offset 5"]),
    (b"a\0b\0c\0\n\0", ["UTF-16", "4 of 8"]), (b"\0" * 9, ["UTF-16", "9 of 9"])])
def test_text_files_that_cannot_be_read(data, words, tmp_path):
    if data is not None:
        (tmp_path / "text.txt").write_bytes(data)
    refused(run("train", "--text", "text.txt", cwd=tmp_path), "text.txt", *words)
    assert not (tmp_path / "tinygpt.npz").exists()


@pytest.mark.parametrize("length, part, there", [(1, "training", 0), (8, "training", 7),
                                                 (9, "training", 8), (10, "validation", 1),
                                                 (50, "validation", 5), (80, "validation", 8)])
def test_short_texts_are_judged_before_training(length, part, there, tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghij" * 9)
    (tmp_path / "text.txt").write_text(("abcdefghij" * 9)[:length])
    refused(run("train", "--text", "text.txt", "--merges", 0, "--context", 8, cwd=tmp_path),
            f"{part} part has {there} tokens and needs 9")
    assert not (tmp_path / "tinygpt.npz").exists()


def test_the_shortest_text_that_will_do(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghij" * 9)
    result = run("train", "--text", "text.txt", "--merges", 0, "--context", 8, "--steps", 2,
                 cwd=tmp_path)
    assert result.returncode == 0 and "1 validation windows" in result.stderr
    (tmp_path / "text.txt").write_text("abcdefghij")
    result = run("train", "--text", "text.txt", "--merges", 0, "--context", 8, "--steps", 2,
                 "--val-fraction", 0, cwd=tmp_path)
    assert result.returncode == 0 and "nan" not in result.stderr
    assert "validation 0" not in result.stderr


@pytest.mark.parametrize("data", [b"ab\r\nab\r\n", b"ab\rab\r", b"\xef\xbb\xbfab\nab\n"])
def test_line_ends_and_byte_order_mark(data, tmp_path):
    (tmp_path / "text.txt").write_bytes(data)
    assert t.read_text(tmp_path / "text.txt") == "ab\nab\n"


def test_utf_8_is_read_under_any_locale(tmp_path):
    (tmp_path / "text.txt").write_text("déjà vu, naïve café. " * 20, encoding="utf-8")
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = run_process("train", "--text", "text.txt", "--context", 4, "--merges", 5, "--steps", 2,
                         cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    assert "é" in t.load_checkpoint(tmp_path / "tinygpt.npz").tokenizer.itos


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_narrow_consoles(encoding, tmp_path):
    (tmp_path / "text.txt").write_text("né―😀 " * 60, encoding="utf-8")
    env = {"PYTHONIOENCODING": encoding}
    for args in (["train", "--text", "text.txt", "--context", 4, "--merges", 3, "--steps", 3],
                 ["generate", "--tokens", 20], ["demo", "softmax", "adamw"]):
        result = run_process(*args, cwd=tmp_path, env=env, text=False)
        assert result.returncode == 0 and b"Traceback" not in result.stderr, result.stderr


def test_a_missing_folder_is_named_before_training(tmp_path):
    refused(run("train", "--out", tmp_path / "no" / "model.npz"), "model.npz", "folder")
    refused(run("train", "--out", "models/", cwd=tmp_path), "--out models/", "not of a folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_gives_one_line(folder):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, str(ROOT / "tinygpt.py"), "generate", "--model",
             str(folder / "model.npz")], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode not in (0, 120)
    assert result.stderr.count("\n") == 1 and "No space left" in result.stderr, result.stderr


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_a_closed_pipe_is_no_error(folder):
    command = f"{sys.executable} {ROOT / 'tinygpt.py'} generate --tokens 3000 " \
              f"--model {folder / 'model.npz'} | head -c 10"
    result = subprocess.run(command, shell=True, capture_output=True, text=True,
                            env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert len(result.stdout) == 10 and result.stderr == ""


# ---- other commands ---------------------------------------------------------------------------

def test_without_arguments_a_tour():
    result = run()
    assert result.returncode == 0 and result.stderr == ""
    for command in ("train", "generate", "demo", "gradcheck"):
        assert f"python tinygpt.py {command}" in result.stdout


def test_demo_lists_plays_and_suggests():
    listed = run("demo", "--list").stdout.splitlines()
    assert len(listed) == 61 and listed[14].split()[:2] == ["15", "softmax"]
    golden = (ROOT / "golden" / "15-softmax.txt").read_text(encoding="utf-8")
    assert run("demo", "softmax").stdout == run("demo", "15").stdout == golden
    both = run("demo", "softmax", "42").stdout
    assert golden in both and "42. Residual connections, backward" in both
    assert run("demo", "--list", "42", "softmax").stdout.splitlines() == [listed[41], listed[14]]
    refused(run("demo", "--list", "sofmax"), "sofmax", "softmax")
    refused(run("demo", "sofmax"), "sofmax", "softmax")
    refused(run("demo", "62"), "62", "--list")


def test_all_demos_play_in_order():
    result = run("demo")
    titles = re.findall(r"^=== (\d+)\. ", result.stdout, re.M)
    assert [int(n) for n in titles] == list(range(1, 62)) and result.stderr == ""


def test_gradcheck_passes_and_names_a_wrong_gradient(monkeypatch, capsys):
    assert t.main(["gradcheck", "--samples", "3"]) == 0
    assert "38 of 38 arrays agree" in capsys.readouterr().out
    right = t.loss_and_grads

    def wrong(*args):
        loss, grads = right(*args)
        return loss, {**grads, "block1.ff1_b": grads["block1.ff1_b"] * 1.01}

    monkeypatch.setattr(t, "loss_and_grads", wrong)
    assert t.main(["gradcheck"]) == 1
    assert "wrong: block1.ff1_b\n" in capsys.readouterr().out


def test_importing_prints_nothing():
    result = subprocess.run([sys.executable, "-c", "import tinygpt"], cwd=ROOT, text=True,
                            capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_usage_errors_take_one_line():
    refused(run("frobnicate"), "frobnicate")
    refused(run("train", "--frobnicate"), "frobnicate", "train --help")
    refused(run("train", "--step", "5"), "--step", "--steps")
    for option in ("--text=", "--out="):
        refused(run("train", option), option[:-1], "name of a file")
    refused(run("generate", "--model="), "--model", "name of a file")


def test_names_in_messages_cannot_write_to_the_terminal():
    refused(run("generate", "--model", "a\x1b[31m\rb.npz"), "a\\x1b[31m\\rb.npz")
    refused(run("generate", "--model", "my model.npz"), "--out 'my model.npz'")
    refused(run("train", "--a\x1b[31mb"), "--a\\x1b[31mb")
    refused(run("train", "--steps", "\r-5"), "'\\r-5'")


@pytest.mark.parametrize("numbers, code", [
    ([signal.SIGINT] * 2, 130), ([signal.SIGINT] * 4, 130), ([signal.SIGTERM] * 2, 143)])
def test_impatient_signals_show_no_traceback(numbers, code, folder, tmp_path):
    args = [sys.executable, str(ROOT / "tinygpt.py"), "train", "--text", str(folder / "text.txt"),
            "--width", "64", "--context", "64", "--max-context", "64", "--layers", "1", "--steps",
            "5000", "--merges", "0", "--eval-every", "5", "--out", str(tmp_path / "m.npz")]
    process = subprocess.Popen(args, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                               start_new_session=True)
    while not process.stderr.readline().startswith("step 5 "):
        assert process.poll() is None
    for number in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        time.sleep(0.003)
    err = process.communicate(timeout=30)[1]
    assert process.returncode == code and "Traceback" not in err and "ignored" not in err, err


def test_one_very_long_word_is_learned_in_reasonable_time():
    letters = np.random.default_rng(0).choice(list("ACGT"), 30_000)
    tokenizer = t.build_tokenizer("".join(letters) + " " * 30_000, 200)
    assert len(tokenizer.merges) == 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_no_success_for_help_either():
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "tinygpt.py", "train", "--help"], cwd=ROOT,
                                stdout=full, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert result.returncode == 2 and result.stderr.count("\n") == 1


def test_an_interrupt_while_numpy_is_loaded_shows_no_traceback(tmp_path):
    (tmp_path / "numpy.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)   # it may be ignored here
    try:
        result = run_process("demo", env={"PYTHONPATH": str(tmp_path)})
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


def test_no_compiled_part_of_numpy_is_loaded_later():
    """It may swallow a Ctrl-C."""
    code = ("import sys, tinygpt as t; before = set(sys.modules)\n"
            "t.main(['demo', '9']), t.main(['gradcheck', '--samples', '1'])\n"
            "later = [getattr(sys.modules[name], '__file__', None) for name in set(sys.modules) - before]\n"
            "print([file for file in later if file and 'numpy' in file and file.endswith('.so')])")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert result.stdout.endswith("\n[]\n"), result


def test_an_old_python_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.version_info, sys.version = (3, 10, 13), '3.10.13 (main)'")
    refused(run_process(env={"PYTHONPATH": str(tmp_path)}), "Python 3.11", "3.10.13")


def test_without_numpy_one_line(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('no numpy')")
    result = run_process("demo", env={"PYTHONPATH": str(tmp_path)})
    refused(result, "pip install numpy")
