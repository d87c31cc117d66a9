"""The version is written once, and files have a schema version: older files are read, newer ones refused."""

import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

import fs_lowrank
from benchmark.store import Store, digest
from fs_lowrank import UserError
from fs_lowrank.errors import DamagedFile
from fs_lowrank.runs.checkpoint import _meta_sum, load_checkpoint, save_checkpoint
from fs_lowrank.runs.environment import versions
from fs_lowrank.versions import SCHEMA, NewerSchema, __version__, check_schema
from hpo import read_header
from hpo.settings import settings_of

ROOT = Path(__file__).parents[1]
NEWER = f"schema {SCHEMA + 1}: a newer version .* update fs-lowrank"


@pytest.mark.more
def test_the_version_is_written_once():
    told = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.split()[-1] == __version__ == fs_lowrank.__version__ == versions()["fs-lowrank"]
    release = __version__.partition(".dev")[0]
    assert f"\n## {release} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_a_file_without_a_schema_has_the_first_one():
    check_schema({}, "summary.json")
    check_schema({"schema": SCHEMA}, "summary.json")


@pytest.mark.parametrize("value", ["1", 0, -1, 1.5, True, None])
def test_an_invalid_schema_is_an_error(value):
    with pytest.raises(UserError, match=r"summary.json: schema = .*expected a whole number above 0"):
        check_schema({"schema": value}, "summary.json")


def test_a_checkpoint_of_a_newer_version_is_not_skipped(tmp_path):
    for number in (1, 2):
        save_checkpoint(tmp_path, number, {}, {})
    path = tmp_path / "round_000002" / "meta.json"
    meta = json.loads(path.read_text())
    assert meta.pop("sha256") and meta["schema"] == SCHEMA
    meta["schema"] += 1
    path.write_text(json.dumps({"sha256": _meta_sum(meta), **meta}))
    with pytest.raises(NewerSchema, match=f"round_000002/meta.json: {NEWER}"):
        load_checkpoint(tmp_path)
    del meta["schema"]
    path.write_text(json.dumps({"sha256": _meta_sum(meta), **meta}))
    assert load_checkpoint(str(tmp_path)).round == load_checkpoint(tmp_path).round == 2


def test_a_result_of_a_newer_version_is_not_taken_as_missing(tmp_path):
    store = Store(tmp_path / "results", tmp_path / "work")
    record = {"hash": "abc", "metrics": {"test_acc": 0.5}}
    path = store.write("cells", record)
    assert json.loads(path.read_text())["schema"] == SCHEMA and store.read("cells", "abc") == record

    def written(content):
        path.write_text(json.dumps({**content, "sha256": digest(content)}))
        return store

    assert written(record).read("cells", "abc") == record
    with pytest.raises(NewerSchema, match=f"cells/abc.json: {NEWER}"):
        written({"schema": SCHEMA + 1, **record}).read("cells", "abc")


def test_files_of_a_newer_search_are_refused(tmp_path):
    path = tmp_path / "best.yaml"
    path.write_text("# hpo: " + json.dumps({"schema": SCHEMA + 1}) + "\n")
    with pytest.raises(NewerSchema, match=f"best.yaml: {NEWER}"):
        read_header(path)
    path.write_text("# hpo: " + json.dumps({"trial": 3}) + "\n")
    assert read_header(path) == {"trial": 3}
    for damaged in ('{"trial":', "[" * 100_000, "null"):
        path.write_text(f"# hpo: {damaged}\nseed: 1\n")
        with pytest.raises(DamagedFile, match="best.yaml cannot be read: .*; write it again with: fs-lowrank hpo best"):
            read_header(path)
    study = optuna.create_study()
    study.set_user_attr("schema", SCHEMA + 1)
    with pytest.raises(NewerSchema, match=f"the study .*: {NEWER}"):
        settings_of(study)
