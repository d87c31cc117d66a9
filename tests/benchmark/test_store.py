"""Result files: complete and damaged ones, and the claims of processes on jobs."""

import subprocess
import sys

import pytest

from benchmark.store import Store

RECORD = {"hash": "abc", "metrics": {"test_acc": 0.5}, "finished": 1.0}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results", tmp_path / "work")


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda text: text.replace("0.5", "0.9"), "checksum does not match"),
        (lambda text: "", "Expecting value"),
    ],
)
def test_damaged_files_are_named_and_taken_as_missing(store, damage, words):
    path = store.write("cells", RECORD)
    path.write_text(damage(path.read_text()))
    assert store.read("cells", "abc") is None
    ((named, why),) = store.damaged.items()
    assert named == str(path)
    assert words in why


def test_a_copied_file_is_not_the_result_of_another_cell(store):
    path = store.write("cells", RECORD)
    path.rename(path.with_name("def.json"))
    assert store.read("cells", "def") is None and "result of abc" in next(iter(store.damaged.values()))


def test_claims_exclude_each_other_and_end_with_their_process(store):
    ours = store.claim("k")
    assert ours and store.claim("k") is None
    ours.release()
    code = (
        "import os, sys; from pathlib import Path; from benchmark.store import Store\n"
        f"store = Store(Path('x'), Path({str(store.work)!r}))\n"
        "lock = store.claim('k'); print(bool(lock), flush=True); sys.stdin.read(1); os.kill(os.getpid(), 9)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "True\n"
    assert store.claim("k") is None
    child.communicate("x")
    assert store.claim("k")
