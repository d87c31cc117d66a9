"""Storages of a search, and the message for each that cannot be used."""

from __future__ import annotations

import socket
import sqlite3
import warnings

import optuna
import pytest

from fs_lowrank import UserError
from hpo import storage
from hpo.storage import open_storage


def test_reading_does_not_create_a_missing_storage(tmp_path):
    for name in ("journal.log", "hpo.db"):
        with pytest.raises(UserError, match="there is no study yet"):
            open_storage(str(tmp_path / name))
        assert not (tmp_path / name).exists()


def test_locked_sqlite(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "WAIT", 0.1)
    path = tmp_path / "hpo.db"
    open_storage(str(path), create=True)
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match="locked; another process"):
        open_storage(str(path))
    holder.close()
    open_storage(str(path))


def test_files_that_are_not_storages(tmp_path):
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE cats (name TEXT)")
    other.commit()
    other.close()
    (tmp_path / "text.db").write_text("no database at all, but text that goes on for a while " * 40)
    (tmp_path / "notes.log").write_text("hello\n")
    (tmp_path / "numbers.log").write_text("1\n")
    (tmp_path / "cut.log").write_text("hello")
    for name, message in (
        ("other.db", "something else .*cats"),
        ("text.db", "not a SQLite file"),
        ("notes.log", "notes.log, line 1: this is not a line of a journal"),
        ("numbers.log", "numbers.log, line 1: this is not a line of a journal"),
        ("cut.log", "cut.log is not a journal"),
        (".", "is not a file"),
    ):
        with pytest.raises(UserError, match=message):
            open_storage(str(tmp_path / name), create=True)
    with pytest.raises(UserError, match="there is no folder"):
        open_storage(f"sqlite:///{tmp_path}/no/hpo.db", create=True)
    with pytest.raises(UserError, match="expected a path"):
        open_storage("nonsense://here", create=True)


def test_sqlite_of_another_version_of_optuna(tmp_path):
    path = tmp_path / "hpo.db"
    open_storage(str(path), create=True)
    database = sqlite3.connect(path)
    database.execute("UPDATE version_info SET schema_version = 3")
    database.execute("UPDATE alembic_version SET version_num = 'v0.9.0.a'")
    database.commit()
    database.close()
    with pytest.raises(UserError, match="version"):
        open_storage(str(path))


def test_a_password_is_never_shown():
    with pytest.raises(UserError) as caught:
        open_storage("postgresql://me:secret@nowhere/hpo", create=True)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "driver",
    ["postgresql+psycopg2", "postgresql+psycopg", "postgresql+pg8000", "mysql+pymysql", "mysql+mysqlconnector"],
)
def test_a_database_server_that_never_answers(driver, monkeypatch, caplog):
    """The wait for it is announced and has a limit."""
    pytest.importorskip(driver.partition("+")[2].replace("mysqlconnector", "mysql.connector"))
    monkeypatch.setattr(storage, "WAIT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}/hpo"
        with pytest.raises(UserError, match=f"storage {place}: cannot be used: "):
            open_storage(f"{driver}://me:secret@{place}")
    assert f"asking the database {place}, for at most 1 s" in caplog.text and "secret" not in caplog.text


def test_the_private_names_of_optuna_that_we_use_still_exist():
    study = optuna.create_study()
    study.ask()
    (trial,) = study.trials
    changed = "Optuna has renamed it; hpo.storage.set_attribute has to find another way to a dead worker's trial"
    assert hasattr(study, "_storage"), changed
    assert hasattr(trial, "_trial_id"), changed
    storage.set_attribute(study, trial, "kind", "lost")
    assert storage.trial_of(study, 0).user_attrs == {"kind": "lost"}


def test_optunas_settings_are_restored():
    before, filters = optuna.logging.get_verbosity(), list(warnings.filters)
    with storage.quiet():
        assert optuna.logging.get_verbosity() == optuna.logging.ERROR
    assert optuna.logging.get_verbosity() == before and list(warnings.filters) == filters
