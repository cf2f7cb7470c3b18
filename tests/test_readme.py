"""What the README and the corpus claim, checked."""
import re
import subprocess
import sys
from collections import Counter

import tinygpt as t
from conftest import GOLDEN, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CORPUS = (ROOT / "corpus.txt").read_text(encoding="utf-8")


def test_the_corpus_is_what_the_readme_says():
    stories = CORPUS.strip().split("\n\n")
    words = set(re.findall(r"[a-z]+", CORPUS.lower()))
    assert f"{len(stories)} short stories" in README
    assert f"{len(CORPUS.encode()) / 1000:.0f} KB" in README
    assert 900 <= len(words) <= 1100
    titles = [story.split("\n")[0] for story in stories]
    assert len(set(titles)) == len(titles) and not any(re.search(r"[.?!]$", x) for x in titles)
    assert all(len(story) > 600 for story in stories)


def test_no_sentence_stands_in_the_corpus_more_than_three_times():
    sentences = Counter(sentence.strip(' "') for line in CORPUS.split("\n")
                        for sentence in re.split(r"(?<=[.!?])", line) if sentence.strip(' "'))
    assert {s: n for s, n in sentences.items() if n > 3} == {}


def test_the_corpus_is_plain_text():
    assert set(CORPUS) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,?!'\"-\n")
    assert CORPUS.endswith(".\n") or CORPUS.endswith("\"\n")
    assert "\n\n\n" not in CORPUS and "  " not in CORPUS


def test_the_default_tokenizer_has_the_size_the_readme_shows():
    tokenizer = t.build_tokenizer(CORPUS, t.SIZES["merges"][0])
    config = t.ModelConfig(len(tokenizer.itos))
    size = sum(a * b for a, b in (shape if len(shape) == 2 else (shape[0], 1)
                                  for shape in t.param_shapes(config).values()))
    assert f"of {config.vocab_size} tokens" in README
    assert f"{size:,} parameters" in README.replace("\n    ", " ")


def test_the_change_shown_in_the_readme_makes_the_difference_shown(tmp_path):
    source = (ROOT / "tinygpt.py").read_text(encoding="utf-8")
    line = "    S = scores(Qh * (1 / math.sqrt(Qh.shape[-1])), Kh)"
    assert source.count(line) == 1
    (tmp_path / "tinygpt.py").write_text(source.replace(line, "    S = scores(Qh, Kh)"),
                                         encoding="utf-8")

    def play(name):
        return subprocess.run([sys.executable, "tinygpt.py", "demo", name], cwd=tmp_path,
                              capture_output=True, encoding="utf-8",
                              env={"PYTHONUTF8": "1"}).stdout

    shown = re.search(r"```diff\n(.*?)```", README, re.S)[1].splitlines()
    before = (GOLDEN / "32-scaling.txt").read_text(encoding="utf-8").splitlines()
    after = play("scaling").splitlines()
    assert [x[1:] for x in shown if x[0] in " -"] == before[:4]
    assert [x[1:] for x in shown if x[0] in " +"] == after[:4]
    assert "WRONG" in play("check-params").split("gradient times")[0]
    assert play("softmax") == (GOLDEN / "15-softmax.txt").read_text(encoding="utf-8")


def test_the_commands_of_the_readme_exist(capsys):
    parser = t.build_parser()
    for command in re.findall(r"`python tinygpt.py ?(.*?)`", README):
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)]
        if "--help" not in words:
            parser.parse_args(words)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.M) or target in ("and", "them"), target


def test_the_readme_is_short_enough_to_be_read():
    assert len(README.splitlines()) <= 250


def test_the_options_of_the_readme_exist():
    commands = t.build_parser()._subparsers._group_actions[0].choices.values()
    known = {name for command in commands for name in command._option_string_actions}
    foreign = {"--to", "--set-kernel", "--execute"}         # of jupytext
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", README))
    assert named - foreign <= known and len(named) > 20
    train = {"--merges", "--layers", "--heads", "--width", "--hidden", "--context", "--max-context",
             "--batch", "--steps", "--lr", "--weight-decay"}
    assert train <= named


def test_the_parameters_of_the_table_for_pytorch_are_those_of_a_model():
    table = README.split("with nanoGPT's names")[1].split("nanoGPT itself")[0]
    named = set()
    for row in re.findall(r"^\| `.*", table, re.M):
        for ours in row.strip("|").split("|")[::2]:
            prefix = "block0." if "block0." in ours else ""
            named |= {prefix + name.removeprefix("block0.") for name in re.findall(r"`(.+?)`", ours)}
    assert named == set(t.param_shapes(t.ModelConfig(9, layers=1)))


def test_the_five_evenings_go_through_all_cards():
    evenings = [(int(a), int(b)) for a, b in
                re.findall(r"^\| \d \| (\d+) to (\d+),", README, re.M)]
    assert [a for a, _ in evenings] == [1] + [b + 1 for _, b in evenings[:-1]]
    assert len(evenings) == 5 and evenings[-1][1] == 61
