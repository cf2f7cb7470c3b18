"""What the README and the corpus claim, checked."""
import re, shlex, shutil, subprocess, sys
from collections import Counter

import pytest

import tinygpt as t
from conftest import GOLDEN, ROOT, plain_environment, run_process

README = (ROOT / "README.md").read_text(encoding="utf-8")
CORPUS = (ROOT / "corpus.txt").read_text(encoding="utf-8")
STORIES = [story.split("\n") for story in CORPUS.strip().split("\n\n")]


def test_the_corpus_is_as_large_as_the_readme_says_and_plain_text_of_stories_of_their_own():
    words = set(re.findall(r"[a-z]+", CORPUS.lower()))
    counted = {"short stories": len(STORIES), "KB": round(len(CORPUS.encode()) / 1000),
               "different words": len(words)}
    said = re.search(r"`corpus\.txt` \((.*?)\)", README, re.S)[1].replace("a thousand", "1,000")
    for about, number, unit in re.findall(
            r"(about )?([\d,]+)\s(short\sstories|KB|different\swords)", said):
        near = 0.1 if about else 0
        assert counted.pop(" ".join(unit.split())) == pytest.approx(
            int(number.replace(",", "")), rel=near)
    assert not counted, "the README says all three"
    assert set(CORPUS) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,?!'\"-\n")
    assert CORPUS.endswith((".\n", '"\n')) and "\n\n\n" not in CORPUS and "  " not in CORPUS
    titles = [title for title, *_ in STORIES]
    assert len(set(titles)) == len(titles) and not any(title[-1] in ".?!" for title in titles)
    assert all(len("\n".join(story)) > 600 for story in STORIES)
    sentences = Counter(sentence.strip(' "') for story in STORIES for line in story
                        for sentence in re.split(r'(?<=[.!?]"|.[.!?]) (?=["A-Z])', line))
    assert {s: n for s, n in sentences.items() if n > 3} == {}


def test_training_begins_with_the_numbers_the_readme_shows(tmp_path):
    printed = run_process("train", "--steps", 1, "--out", tmp_path / "model.npz").stderr
    shown = re.findall(r"[\d,]+ (?:characters|of [\d,]+ tokens|training windows|validation windows|"
                       r"parameters|steps per epoch)\b", " ".join(README.split()))
    assert shown and [text for text in shown if text not in printed] == []


def test_the_change_shown_in_the_readme_makes_the_difference_shown(tmp_path):
    source = (ROOT / "tinygpt.py").read_text(encoding="utf-8")
    changed, count = re.subn(r"\n    S /= math\.sqrt\(Qh\.shape\[-1\]\).*\(32\.1\)", "", source)
    assert count == 1
    (tmp_path / "tinygpt.py").write_text(changed, encoding="utf-8")
    shutil.copytree(GOLDEN, tmp_path / "golden")
    played = subprocess.run([sys.executable, "tinygpt.py", "demo", "--changed"], cwd=tmp_path,
                            capture_output=True, env=plain_environment(PYTHONUTF8="1"))
    printed, shown = (re.sub(r"(line|of) \d+", r"\1", text).splitlines() for text in (
        played.stdout.decode(), re.search(r"```diff\n(.*?)```", README, re.S)[1]))
    rest = iter(printed)                            # '...' stands for anything
    for line in shown:
        pattern = re.escape(line).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, text) for text in rest), line
    assert len(shown) > 4


def test_the_commands_and_options_of_the_readme_exist():
    text, parser = README.replace("\\\n", " "), t.build_parser()
    for command in re.findall(r"python tinygpt\.py((?: [^`\n]*)?)", text):
        parser.parse_args(shlex.split(command))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^    )make (\w+)", text, re.M):
        assert re.search(rf"^(?:[\w ]+ )?{target}\b[\w ]*:", makefile, re.M), target
    known = {option for command in parser._subparsers._group_actions[0].choices.values()
             for option in command._option_string_actions}
    assert set(re.findall(r"`(--[\w-]+)", text)) <= known


def test_the_card_index_of_the_readme():
    """Each card once, with its golden file; functions that help the main ones may be left out."""
    cards = {card.n: card for card in t.cards() if card.n}
    rows = re.findall(r"\| (\d+) \| \[(.+?)\]\(golden/(.+?)\) \|(.*?)(?=\|)", README)
    assert sorted(int(n) for n, *_ in rows) == list(cards)
    for card, title, path, functions in ((cards[int(n)], *row) for n, *row in rows):
        assert (title, path) == (card.title, t.golden_file(card).name)
        named = re.findall(r"`(\w+)`", functions)
        assert set(named) <= set(card.functions) and bool(named) == bool(card.functions)
    evenings = re.findall(r"^\| \d \| (\d+) to (\d+),", README, re.M)
    assert [n for a, b in evenings for n in range(int(a), int(b) + 1)] == list(cards)


def test_the_parameters_of_the_table_for_pytorch_are_those_of_a_model():
    table = README.split("with nanoGPT's names")[1].split("nanoGPT itself")[0]
    named = set()
    for row in re.findall(r"^\| `.*", table, re.M):
        for ours in row.strip("|").split("|")[::2]:
            block = "block0." * ("block0." in ours)
            named |= {block + name.removeprefix(block) for name in re.findall(r"`(.+?)`", ours)}
    assert named == set(t.param_shapes(t.ModelConfig(9, layers=1)))
