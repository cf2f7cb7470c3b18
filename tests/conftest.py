"""Shared by all tests: golden files as plain text, the command line, a trained model."""
import contextlib, io, os, re, signal, subprocess, sys, types
from pathlib import Path

import numpy as np
import pytest
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "golden"
PROGRAM = str(ROOT / "tinygpt.py")
sys.path.insert(0, str(ROOT))

import tinygpt as t                                 # noqa: E402

TEXT = ("the hen sat in the sun. the fox ran to the hen. the hen ran to the den.\n"
        "\"why do you run?\" said the fox. \"why do you ask?\" said the hen.\n") * 8
SMALL = ["--merges", "20", "--context", "8", "--max-context", "10", "--width", "12", "--heads", "3",
         "--hidden", "20", "--layers", "1", "--batch", "4", "--stride", "3"]
# All sizes differ, d / H = 4 too, so that a swapped axis cannot hide behind equal numbers.
CONFIG = t.ModelConfig(vocab_size=11, context=5, max_context=7, width=12, heads=3, hidden=10,
                       layers=2)
posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals, pipes or devices")
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


class GoldenText(SingleFileSnapshotExtension):
    """golden/NAME.txt for a test with the parameter NAME: test[15-softmax] has 15-softmax.txt."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"

    @classmethod
    def dirname(cls, *, test_location):
        return str(GOLDEN)

    @classmethod
    def get_snapshot_name(cls, *, test_location, index=0):
        return re.search(r"\[(.+)\]$", test_location.snapshot_name)[1]

    @classmethod
    def matches_test_location(cls, *, test_location, snapshot_location):
        return Path(snapshot_location).stem == cls.get_snapshot_name(test_location=test_location)


@pytest.fixture
def golden(snapshot):
    return snapshot.use_extension(GoldenText)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Where golden files differ, the last words are those of 'python tinygpt.py demo --changed'."""
    yield                                           # pytest's own summary
    if any("test_golden" in report.nodeid for report in terminalreporter.stats.get("failed", [])):
        changed = run_process("demo", "--changed", env={"PYTHONUTF8": "1"})
        terminalreporter.write(f"\n{changed.stdout}{changed.stderr}")


@pytest.fixture
def rng():
    return np.random.default_rng(2024)


def random_params(rng, config=CONFIG):
    """Parameters of moderate size, gains around 1."""
    return {name: 0.4 * rng.standard_normal(shape) + name.endswith("_g")
            for name, shape in t.param_shapes(config).items()}


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


def plain_environment(**more):
    """Only what a program needs to start: what happens to be set here hides no fault."""
    kept = ("PATH", "HOME", "SYSTEMROOT", "TEMP", "TMP", "LD_LIBRARY_PATH")
    return {name: os.environ[name] for name in kept if name in os.environ} | more


def usual_signals():
    """For a new process: signals as in a shell, even if they are ignored here."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(*args, **options):
    """Start the command line in a process of its own, in a plain environment."""
    options["env"] = plain_environment(**(options.get("env") or {}))
    if os.name != "nt":
        options["preexec_fn"] = usual_signals
    return subprocess.Popen([sys.executable, PROGRAM, *map(str, args)],
                            stdin=subprocess.DEVNULL, **options)


def run_process(*args, text=True, **options):
    """Run the command line in a process of its own; stdout and stderr are kept."""
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE) | options
    process = start(*args, text=text, encoding="utf-8" if text else None, **options)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def refused(result, *words):
    """Exit code 2, nothing on stdout, one line on stderr that has all the words."""
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr, result.stderr
    for word in words:
        assert word in result.stderr, (word, result.stderr)


def wrong(worst):
    """The names that the gradient check calls wrong."""
    return {name for name, error in worst.items() if not error < 1e-4}


def failing(error):
    """A function that raises error whatever it is called with."""
    def fails(*args, **options):
        raise error
    return fails


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with text.txt and a model.npz trained on it, and what the training reported."""
    path = tmp_path_factory.mktemp("trained")
    (path / "text.txt").write_text(TEXT, encoding="utf-8")
    result = run_process("train", "--text=text.txt", "--out=model.npz", *SMALL, "--steps=120",
                         "--eval-every=40", cwd=path)
    assert result.returncode == 0, result.stderr
    (path / "stderr").write_text(result.stderr, encoding="utf-8")
    return path


@pytest.fixture
def train(tmp_path):
    """train(*options): in this process, on text.txt in tmp_path; the model is m.npz there."""
    (tmp_path / "text.txt").write_text(TEXT)
    return lambda *options, out="m.npz", text="text.txt": run(
        "train", "--text", tmp_path / text, "--out", tmp_path / out, *SMALL, *options)


def make_checkpoint(step=3, seed=0, text="the hen, the fox and the café. " * 3, merges=5, **sizes):
    """A small checkpoint in the middle of a training."""
    tokenizer = t.build_tokenizer(text, merges)
    config = t.ModelConfig(len(tokenizer.itos), **dict(context=4, max_context=6, width=6, hidden=5,
                                                       layers=2) | sizes)
    rng = np.random.default_rng(seed)
    params, m, v = (t.init_params(config, rng) for _ in range(3))
    v = {name: W * W for name, W in v.items()}
    return t.Checkpoint(params, config, tokenizer, {"lr": 0.01, "clip": 0}, step, m, v,
                        rng.bit_generator.state, 1.5, t.code_checksum())


def state(path):
    """All of a training's state that a file holds, to be compared bit for bit."""
    ck = t.load_checkpoint(path)
    return (ck.step, ck.batch_rng, ck.val_loss, ck.config, ck.tokenizer.itos, ck.tokenizer.merges,
            {(part, name): (W.dtype, W.shape, W.tobytes()) for part in ("params", "m", "v")
             for name, W in getattr(ck, part).items()})


def watch(keep, work):
    """work(), where keep(names, locals) is called whenever a function of the book returns."""
    def see(frame, event, _):
        if event == "return" and frame.f_code.co_filename in (t.__file__, "altered"):
            keep(frame.f_code.co_qualname.split("."), frame.f_locals)

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""
    encoding = "utf-8"

    def isatty(self):
        return True


def changed_module(*changes):
    """A second tinygpt with lines of its source changed: (old text, new text), ..."""
    source = Path(PROGRAM).read_text(encoding="utf-8")
    for old, new in changes:
        assert source.count(old) == 1, (source.count(old), old)
        source = source.replace(old, new)
    module = types.ModuleType("altered")
    module.__file__ = t.__file__
    sys.modules["altered"] = module                 # dataclasses look their module up
    try:
        exec(compile(source, "altered", "exec"), module.__dict__)
    finally:
        del sys.modules["altered"]
    return module
