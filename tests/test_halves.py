"""Two halves of a large batch, worked on at the same time, give what they give in turn."""
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tinygpt as t
from conftest import ROOT

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="a process is forked on Linux only")

WIDE = t.ModelConfig(13, context=32, max_context=32, width=64, heads=4, hidden=64, layers=1)


def large_batch(seed=0, config=WIDE, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x, y = (rng.integers(0, config.vocab_size, (33, config.context)) for _ in range(2))
    assert x.size * config.width >= t.LARGE
    return t.init_params(config, rng, dtype), x, y, config


def same(a, b):
    return a[0] == b[0] and list(a[1]) == list(b[1]) and all(
        np.array_equal(a[1][k], b[1][k]) and a[1][k].dtype == b[1][k].dtype for k in a[1])


@pytest.fixture(params=["process", "thread"])
def second(request, monkeypatch):
    if request.param == "process" and sys.platform != "linux":
        pytest.skip("a process is forked on Linux only")
    second = t.SecondProcess() if request.param == "process" else t.SecondThread()
    monkeypatch.setattr(t, "both_parts", second)
    return second


def test_two_parts_at_once_give_what_they_give_in_turn(second, monkeypatch):
    other = t.ModelConfig(7, context=64, max_context=64, width=32, heads=2, hidden=32, layers=2)
    for batch in (large_batch(), large_batch(1), large_batch(2, other),
                  large_batch(3, other, np.float64), large_batch(4)):
        for _ in range(2):
            at_once = t.batch_loss_and_grads(*batch)
            monkeypatch.setattr(t, "both_parts", t.in_turn)
            assert same(at_once, t.batch_loss_and_grads(*batch))
            monkeypatch.setattr(t, "both_parts", second)


@pytest.mark.parametrize("row", [0, -1])
def test_a_bad_id_in_either_part_is_refused_and_the_next_batch_is_right(second, row):
    params, x, y, config = large_batch()
    expected = t.batch_loss_and_grads(params, x, y, config)
    bad = x.copy()
    bad[row, 0] = config.vocab_size
    for _ in range(2):
        with pytest.raises(ValueError, match="ids must be from 0 to 12"):
            t.batch_loss_and_grads(params, bad, y, config)
    assert same(t.batch_loss_and_grads(params, x, y, config), expected)


@on_linux
def test_a_second_process_that_is_killed_changes_nothing(monkeypatch):
    batch, second = large_batch(), t.SecondProcess()
    expected = t.batch_loss_and_grads(*batch)
    monkeypatch.setattr(t, "both_parts", second)
    before = set(multiprocessing.active_children())
    for _ in range(3):
        assert same(t.batch_loss_and_grads(*batch), expected)
        for child in set(multiprocessing.active_children()) - before:
            os.kill(child.pid, signal.SIGKILL)
            child.join()


@on_linux
def test_without_a_second_process_the_work_is_done_all_the_same(monkeypatch):
    batch = large_batch()
    expected = t.batch_loss_and_grads(*batch)

    def no_fork():
        raise OSError("no more processes")
    monkeypatch.setattr(os, "fork", no_fork)
    monkeypatch.setattr(t, "both_parts", t.SecondProcess())
    assert same(t.batch_loss_and_grads(*batch), expected)


@on_linux
def test_the_second_process_ends_with_the_first(tmp_path):
    code = ("import sys, time, multiprocessing; sys.path.insert(0, sys.argv[1])\n"
            "import numpy as np, tinygpt as t\n"
            "c, x = t.ModelConfig(13, 32, 32, 64, 4, 64, 1), np.ones((33, 32), int)\n"
            "t.both_parts = t.SecondProcess()\n"
            "t.batch_loss_and_grads(t.init_params(c, np.random.default_rng(0)), x, x, c)\n"
            "print(multiprocessing.active_children()[0].pid, flush=True); time.sleep(60)")
    first = subprocess.Popen([sys.executable, "-c", code, str(ROOT)], stdout=subprocess.PIPE, text=True)
    second = int(first.stdout.readline())
    first.kill()
    first.wait()
    for _ in range(100):
        state = Path(f"/proc/{second}/stat")
        if not state.exists() or state.read_text().split(")")[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(second, signal.SIGKILL)
    raise AssertionError("the second process outlived the first")


@on_linux
def test_a_worker_that_may_have_no_children_trains_too():
    code = ("import multiprocessing, numpy as np, tinygpt as t\n"
            "def work():\n"
            "    t.prepare_for_training()\n"
            "    c, x = t.ModelConfig(13, 32, 32, 64, 4, 64, 1), np.ones((33, 32), int)\n"
            "    p = t.init_params(c, np.random.default_rng(0))\n"
            "    print(t.batch_loss_and_grads(p, x, x, c)[0] > 0, flush=True)\n"
            "process = multiprocessing.get_context('fork').Process(target=work, daemon=True)\n"
            "process.start(), process.join()")
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, text=True,
                            capture_output=True)
    assert result.stdout == "True\n", result
