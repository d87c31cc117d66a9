"""JSON that was written for others to read: what comes to harm is one error, which names the file."""

import json

import pytest

from fs_lowrank.errors import DamagedFile
from fs_lowrank.jobs.files import check_fields, from_json, read_json, to_json
from fs_lowrank.versions import SCHEMA, NewerSchema

#: contents that no reader of a mapping expects, and what is said of them
NONSENSE = {
    b"null": "null came, expected a mapping",
    b"[1, 2]": r"\[1, 2\] came, expected a mapping",
    b"": "invalid JSON: Expecting value",
    b'{"a": 1': "invalid JSON: ",
    b'{"a": "\xff"}': "not UTF-8: byte 0xff at offset 7",
    b"[" * 100_000: "nested too deep",
    b'{"a":' * 500 + b"1" + b"}" * 500: "nested too deep",
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


@pytest.mark.parametrize(
    "content, said",
    [
        ({"labels": 5}, "labels = 5, expected a list"),
        ({"size": "7"}, 'size = "7", expected a whole number or a number'),
        ({"size": True}, "size = true, expected"),
        ({}, "there is no size, expected"),
        ({"size": 1, "of": [1]}, r"of = \[1\], expected a mapping"),
        ({"size": 1, "of": {}}, "there is no of.them, expected a list"),
    ],
)
def test_the_entries_that_a_reader_uses_have_their_types(tmp_path, content, said):
    fields = {"labels": list | None, "size": int | float, "of": dict | None, "of.them": list}
    (tmp_path / "facts.json").write_text(json.dumps(content))
    with pytest.raises(DamagedFile, match=f"facts.json cannot be read: {said}"):
        read_json(tmp_path / "facts.json", fields=fields)
    check_fields({"size": 0.5, "labels": None, "more": 3}, fields)
    check_fields({"size": 1, "of": {"them": []}}, fields)


def test_a_newer_file_is_not_a_damaged_one(tmp_path):
    (tmp_path / "facts.json").write_text(json.dumps({"schema": SCHEMA + 1, "labels": 5}))
    with pytest.raises(NewerSchema):
        read_json(tmp_path / "facts.json", fields={"labels": list})
