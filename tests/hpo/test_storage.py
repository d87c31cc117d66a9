"""Storages of a search, and the message for each that cannot be used."""

from __future__ import annotations

import sqlite3

import optuna
import pytest

from fs_lowrank import UserError
from hpo.storage import open_storage, quiet


def test_reading_does_not_create_a_missing_storage(tmp_path):
    for name in ("study.db", "journal.log"):
        with pytest.raises(UserError, match="there is no study yet"):
            open_storage(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_a_search_of_an_earlier_version_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "journal.log").write_text("{}")
    for create in (False, True):
        with pytest.raises(UserError, match="journal.log is a search of an earlier version .* move that file away"):
            open_storage(tmp_path / "study.db", create=create)


def test_files_that_are_not_storages(tmp_path):
    (tmp_path / "text.db").write_text("no database at all, but text that goes on for a while " * 40)
    for name in ("text.db", "."):
        with pytest.raises(UserError, match="storage .*(expected|is no storage)"):
            open_storage(tmp_path / name, create=True)
    for url in ("nonsense://here", f"sqlite:///{tmp_path}/no/hpo.db"):
        with pytest.raises(UserError, match="storage .*expected a SQLite file"):
            open_storage(url, create=True)


def test_sqlite_of_another_version_of_optuna(tmp_path):
    path = tmp_path / "hpo.db"
    open_storage(path, create=True)
    database = sqlite3.connect(path)
    database.execute("UPDATE version_info SET schema_version = 3")
    database.execute("UPDATE alembic_version SET version_num = 'v0.9.0.a'")
    database.commit()
    database.close()
    with pytest.raises(UserError, match="version"):
        open_storage(path)


def test_a_password_is_never_shown():
    with pytest.raises(UserError) as caught:
        open_storage("postgresql://me:secret@nowhere/hpo", create=True)
    assert "secret" not in str(caught.value)


def test_optuna_alone_opens_a_study(tmp_path):
    storage = open_storage(tmp_path / "study.db", create=True)
    with quiet():
        optuna.create_study(study_name="s", storage=storage).optimize(lambda t: t.suggest_int("x", 0, 1), n_trials=1)
    assert len(optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/study.db").trials) == 1
