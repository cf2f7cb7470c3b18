"""Learning by doing: cards taken out, faults told and hunted, parts of the model left out."""
import re, shutil, subprocess, sys

import pytest

import mutants
import tinygpt as t
from conftest import GOLDEN, ROOT, changed_module, plain_environment, refused, run

SOURCE = (ROOT / "tinygpt.py").read_text(encoding="utf-8")
LINES = SOURCE.split("\n")
WORTH = re.findall(r"(?m)^\|.* \d\.\d{3} \|$", (ROOT / "README.md").read_text("utf-8"))
assert len(WORTH) == 9, "the rows of the README's table"


@pytest.mark.parametrize("card", t.cards(), ids=lambda card: card.slug)
def test_a_blanked_card_says_what_is_missing(card, known={*LINES}):
    result, computed = run("blank", card.slug), card.equations.keys() - card.derived
    if not computed:
        return refused(result, card.slug)
    new = [line for line in result.stdout.split("\n") if line not in known]
    said = [re.match(r" +raise BadInput\(.to be written: (.+).\)  +# .*", line)[1] for line in new]
    assert {*re.findall(r"\((\d+\.\d+)\) ", " ".join(said))} == computed
    with pytest.raises(ValueError, match=rf"^to be written: \({card.n}\.\d+\) ."):
        getattr(changed_module((SOURCE, result.stdout)), card.demo)()


def test_a_blanked_file_elsewhere(tmp_path):
    def mine(*args, cwd=tmp_path):
        return subprocess.run([sys.executable, tmp_path / "mine.py", *args], cwd=cwd, text=True,
                              capture_output=True, env=plain_environment(PYTHONUTF8="1"))

    assert run("blank", "15", "58", "--out", "mine.py", cwd=tmp_path).returncode == 0
    refused(run("blank", "16", "--out", "mine.py", cwd=tmp_path), "mine.py", "exists")
    for args in (["demo", "34"], ["gradcheck"], ["train", "--text", ROOT / "corpus.txt"]):
        assert (result := mine(*args)).returncode == 2 and "Traceback" not in result.stderr
        assert result.stderr.splitlines()[-1].startswith("tinygpt: to be written: (15.1) e_i = exp")
    refused(mine("demo", "--changed", "15"), "no folder golden", str(tmp_path))
    for cwd in (ROOT, "/"):
        assert "Stopped: 15, 34 at" in mine("demo", "--changed", "15", "34", cwd=cwd).stdout
        shutil.copytree(GOLDEN, tmp_path / "golden", dirs_exist_ok=True)


@pytest.mark.parametrize("names", [[], [card.slug for card in t.cards()]], ids=["all", "named"])
def test_the_book_as_it_stands_is_right(names):
    assert run("demo", "--changed", *names).stdout == (
        "0 of 62 demos print something else than golden/ has: right\ngradcheck: all agree\n")


@pytest.mark.parametrize("card, old, new, words", [
    ("12", "dW = X.T @ dY ", "dW = dY.T @ X ", "dW (6, 4): transposed"),
    ("12", "dX = dY @ W.T ", "dX = dY @ W ", "Stopped: 12, gradcheck at line "),
    ("11", "    Y = X @ W + b ", "    Y = X @ W - b ", "Y (3, 6): row 0, column 0 is -0.61 in place of -0.21"),
    ("38", "dQh = dS @ Kh / math.sqrt(hs)", "dQh = dS @ Kh", "all numbers are 1.414 times"),
    ("16", "    dz = p * (dp", "    dz = -p * (dp", "all numbers are -1 (sign) times"),
    ("15", "p = e / row_sums(e)", "p = e", "p (3, 3): row 0, column 0 is 0.2 in place of 0.125"),
    ("52", "lr_max * t", "lr_max / t", "2  η = 0.001250  #####' in place of 't =  2  η = 0.005")])
def test_what_is_wrong_is_told(card, old, new, words, capsys):
    assert changed_module((old, new)).main(["demo", "--changed", card]) == 1
    assert words in (out := capsys.readouterr().out) and len(out.splitlines()) < 13
    assert ("gradcheck" in out) == (card not in ("11", "15", "52"))


@pytest.mark.parametrize("level, first, last, seeds", [     # seeds that need few trials
    ("hard", 1, 61, (9, 10)), ("easy", 24, 38, (0, 1))])
def test_a_hunt(level, first, last, seeds, tmp_path):
    faults = set()
    for seed in seeds:
        path = mutants.hunt(seed, level, first, last, tmp_path)
        lines = path.read_text(encoding="utf-8").split("\n")
        [i] = [i for i, pair in enumerate(zip(LINES, lines, strict=True)) if len({*pair}) == 2]
        [equation, *_] = re.findall(r"\((\d+)(\.\d+)\)", lines[i])
        assert int(equation[0]) in range(first, last + 1)
        for answer in (f"{i + 1}", "".join(equation), "show"):
            assert f" line {i + 1}\n- {LINES[i]}\n+ " in mutants.verdict(path, answer)
        assert mutants.verdict(path, "99.1").startswith("No, ")
        faults.add(lines[i])
    assert len(faults) == 2


@pytest.mark.parametrize("row", WORTH, ids=lambda row: row.split("|")[1].strip())
def test_the_parts_that_the_readme_leaves_out_can_be_left_out(row):
    """Forward and backward alike, so that the gradients are right; the options exist."""
    source = SOURCE
    for tag, new in re.findall(r"(\d+\.\d+) `(.+?)`", row):
        source, n = re.subn(rf"(?m)^( +)\S.*?(?=  #.*\({tag}\))", rf"\1{new}", source)
        assert n == 1
    module = changed_module((SOURCE, source))
    assert max((module.check_operations(0) | module.check_model(0, 3)).values()) < 1e-4
    t.build_parser().parse_args(["train", *" ".join(re.findall(r"`(--.+?)`", row)).split()])
