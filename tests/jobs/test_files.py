"""JSON that was written for others to read: what comes to harm is one error, which names the file."""

import errno
import json
import os
from pathlib import Path

import pandas as pd
import pytest

from fs_lowrank import load_config
from fs_lowrank.data.files import read_table
from fs_lowrank.errors import DamagedFile, RunFailed, UserError
from fs_lowrank.finished.predictions import write_table
from fs_lowrank.jobs.files import (
    cannot_write,
    from_json,
    read_json,
    to_json,
    write_text,
)
from fs_lowrank.versions import SCHEMA, NewerSchema

#: contents that no reader of a mapping expects, and what is said of them
NONSENSE = {
    b"null": "null came, expected a mapping",
    b"[1, 2]": r"\[1, 2\] came, expected a mapping",
    b"": "invalid JSON: Expecting value",
    b'{"a": 1': "invalid JSON: ",
    b'{"a": "\xff"}': "invalid JSON: 'utf-8' codec can't decode byte 0xff in position 7",
    b"[" * 100_000: "invalid JSON: maximum recursion depth exceeded",
    b'{"a": ' + b"9" * 5000 + b"}": "invalid JSON: Exceeds the limit",
}


@pytest.mark.parametrize("content", NONSENSE, ids=lambda content: str(content[:8]))
def test_what_cannot_be_read_is_one_line_that_names_the_file(tmp_path, content):
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=NONSENSE[content]) as refused:
        read_json(path, missing={}, remedy="do this")
    said = str(refused.value)
    assert said.startswith(f"{path} cannot be read: ") and said.endswith("; do this") and "\n" not in said


def test_what_was_written_is_read(tmp_path):
    content = {"a": [{"b": None}], "text": "Füße", "deep": json.loads("[" * 90 + "]" * 90)}
    (tmp_path / "facts.json").write_text(to_json(content), encoding="utf-8")
    assert read_json(tmp_path / "facts.json") == content == from_json(to_json(content).encode())
    assert from_json("[1]", list) == from_json("[1]", dict | list) == [1]


def test_a_file_that_is_not_there(tmp_path):
    assert read_json(tmp_path / "none.json", missing=None) is None
    with pytest.raises(DamagedFile, match="none.json cannot be read: No such file or directory; restore the file"):
        read_json(tmp_path / "none.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    for path in (tmp_path, tmp_path / "loop.json"):
        with pytest.raises(DamagedFile, match="Is a directory|symbolic links"):
            read_json(path, missing={})


def test_a_newer_file_is_not_a_damaged_one(tmp_path):
    (tmp_path / "facts.json").write_text(json.dumps({"schema": SCHEMA + 1, "labels": 5}))
    with pytest.raises(NewerSchema):
        read_json(tmp_path / "facts.json")


# -- what was there before stays -------------------------------------------------------------------------


def _full(*args):
    raise OSError(28, "No space left on device")


def test_on_a_full_disk_the_old_file_stays(tmp_path, monkeypatch):
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to("a.json")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", _full)
        for name in (path, link):
            with pytest.raises(RunFailed, match=f"^{name} cannot be written: No space left on device; make room"):
                write_text(name, "new")
    assert path.read_text() == "old" and {p.name for p in tmp_path.iterdir()} == {"a.json", "link.json"}
    write_text(link, "new")
    assert path.read_text() == "new" and link.is_symlink()


def test_predictions_on_a_full_disk_leave_no_part(tmp_path, monkeypatch):
    table = pd.DataFrame({"text": ["a, ü", "b"], "prediction": [["x"], 1]})
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", _full)
        for name in ("p.csv", "p.tsv", "p.json", "p.jsonl"):
            with pytest.raises(UserError, match=f"{name} cannot be written: No space left"):
                write_table(table, tmp_path / name)
    assert not [*tmp_path.iterdir()]
    write_table(table, tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_bytes().decode() == 'text,prediction\n"a, ü","[""x""]"\nb,1\n'
    write_table(table, str(tmp_path / "p.jsonl"))
    assert len((tmp_path / "p.jsonl").read_bytes().decode().splitlines()) == 2


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl"])
@pytest.mark.parametrize("quoting", [None, False, True])
def test_what_predictions_are_added_to_is_read_back_as_it_was(tmp_path, suffix, quoting):
    rows = [{"text": 'He said "hi" to me', "n": "0.12345678901234567"}, {"text": '"', "n": "1e-12"}]
    if "json" in suffix:
        rows = [{**row, "n": float(row["n"])} for row in rows]
    write_table(pd.DataFrame(rows, dtype=object), tmp_path / f"p{suffix}", quoting)
    assert read_table(tmp_path / f"p{suffix}", quoting).to_dict("records") == rows


def test_a_prediction_that_is_no_number_is_null_in_json(tmp_path):
    write_table(pd.DataFrame({"text": ["a"], "prediction": [float("nan")]}, dtype=object), tmp_path / "p.jsonl")
    assert (tmp_path / "p.jsonl").read_text() == '{"text": "a", "prediction": null}\n'


def test_a_cell_that_needs_quotes_has_them(tmp_path, caplog):
    table = pd.DataFrame({"text": ["a\nb", "c"], "prediction": ["x\ty", "z"]})
    write_table(table, tmp_path / "p.tsv")
    assert "p.tsv: a cell has a line break or the separator, so such cells are in double quotes" in caplog.text
    assert read_table(tmp_path / "p.tsv", quoting=True).equals(table.astype(object))


def test_what_is_no_file_is_written_to(tmp_path):
    write_text("/dev/null", "x")
    assert not Path("/dev/null").is_file()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "x")
    assert os.read(reader, 9) == b"x" and (tmp_path / "pipe").is_fifo()
    load_config({"federate.client_num": 2}).dump("/dev/null")
    os.close(reader)


def test_what_to_do_follows_from_the_error(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        (tmp_path / "a.json").write_text("x")
    said = "a.json cannot be written: Is a directory; correct that, and run again"
    assert str(cannot_write("a.json", error.value)) == f"{said}, a run with resume=True"
    for number, advice in ((errno.EACCES, "correct that"), (errno.ENOSPC, "make room"), (errno.EIO, "correct that")):
        assert f"; {advice}, and" in str(cannot_write("x", OSError(number, os.strerror(number))))
    full = RuntimeError("I/O error: No space left on device (os error 28)")
    assert "; make room, and" in str(cannot_write("x", full))
