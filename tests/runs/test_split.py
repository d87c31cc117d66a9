"""Who has which rows, as a run writes it and as it was written before."""

import json

import pytest

from fs_lowrank import UserError, load_config
from fs_lowrank.data import build_data, load_raw
from fs_lowrank.data.partition import client_record
from fs_lowrank.models.build import build_tokenizer
from fs_lowrank.runs.split import read_split, write_split
from fs_lowrank.versions import SCHEMA


@pytest.fixture
def built(settings):
    config = load_config(settings)
    return build_data(config, build_tokenizer(config), load_raw(config.data))


def summary(made):
    """What ``read_split`` says of each client."""
    labels = [None if made.labels is None else made.labels[rows] for rows in made.indices]
    return [client_record(i, len(rows), labels[i], made.classes()) for i, rows in enumerate(made.indices)]


def test_what_is_written_is_read(built, tmp_path):
    written = write_split(tmp_path, built)
    read = read_split(tmp_path)
    for split in (written, read):
        assert split["sizes"].tolist() == built.partition.sizes().tolist()
        assert list(split["clients"]) == [
            {**record, "rows": built.rows["train"][rows].tolist()}
            for record, rows in zip(summary(built.partition), built.partition.indices)
        ]
        assert split["test"]["rows"] == built.rows["test"].tolist()
        assert split["partition"] == {"name": "lda", "args": {"alpha": 0.5, "min_size": 4}}
    assert read_split(str(tmp_path))["test"] == read["test"]
    about = json.loads((tmp_path / "data.json").read_text())
    assert about["schema"] == SCHEMA and about["clients"] == 5 and about["test"]["size"] == len(built.test)
    first = (tmp_path / "rows.npz").read_bytes()
    write_split(tmp_path, built)
    assert (tmp_path / "rows.npz").read_bytes() == first, "the same content each time"


def test_schema_1_is_read(tmp_path):
    clients = [{"client": 1, "size": 2, "rows": [4, 7]}, {"client": 2, "size": 1, "rows": [0]}]
    old = {"schema": 1, "source": "a.csv", "partition": {"name": "iid", "args": {}, "indices": [[1, 2], [0]]}}
    old |= {"clients": clients, "test": {"from": "train", "rows": [3]}}
    (tmp_path / "data.json").write_text(json.dumps(old))
    read = read_split(tmp_path)
    assert read["clients"] == clients and read["sizes"].tolist() == [2, 1] and read["test"]["rows"] == [3]
    assert read_split(tmp_path / "none") == {}


def test_damage_is_named(built, tmp_path):
    write_split(tmp_path, built)
    rows, about = (tmp_path / name for name in ("rows.npz", "data.json"))
    whole, other = rows.read_bytes(), {**json.loads(about.read_text()), "clients": 4}
    for content in (whole[: len(whole) // 2], b"", whole[:400] + bytes(20) + whole[420:]):
        rows.write_bytes(content)
        with pytest.raises(UserError, match="rows.npz cannot be read: .*; it belongs to data.json beside it"):
            read_split(tmp_path)
    rows.unlink()
    with pytest.raises(UserError, match="rows.npz cannot be read: .*No such file"):
        read_split(tmp_path)
    rows.write_bytes(whole)
    about.write_text(json.dumps(other))
    with pytest.raises(UserError, match="rows.npz cannot be read: it does not have the rows of 4 clients"):
        read_split(tmp_path)
    about.write_text("{")
    with pytest.raises(UserError, match="data.json cannot be read"):
        read_split(tmp_path)
