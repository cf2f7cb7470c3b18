"""Shared by all tests: the import path, and golden files as plain text in golden/."""
import re
import sys
from pathlib import Path

import pytest
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "golden"
sys.path.insert(0, str(ROOT))


class GoldenText(SingleFileSnapshotExtension):
    """golden/NAME.txt for a test with the parameter NAME: test_demo[15-softmax] has 15-softmax.txt."""

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
