"""Where studies are kept: a journal file, SQLite, or a database server."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.storages import BaseStorage

from fs_lowrank import RunFailed, UserError
from fs_lowrank.errors import say_once

from .errors import file_exists
from .journal import Journal

#: seconds to wait for a SQLite file that another process is writing to, and for a server to let us in
WAIT = 20.0
#: by driver, the arguments that limit that wait
_LIMITS = {
    **dict.fromkeys(("pysqlite", "pg8000"), ["timeout"]),
    **dict.fromkeys(("psycopg2", "psycopg", "mysqldb"), ["connect_timeout"]),
    "pymysql": ["connect_timeout", "read_timeout"],
    "mysqlconnector": ["connection_timeout"],
}


@contextmanager
def quiet():
    """Let Optuna log nothing but errors during the block, or during the function that this decorates."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def open_storage(where: str, create: bool = False) -> BaseStorage:
    """Open the storage.

    Args:
        where: the path of a journal file, of a SQLite file (``.db``, ``.sqlite``), or a URL such as
            ``sqlite:///hpo.db`` or ``postgresql://user@server/hpo``.
        create: create it if there is none.

    Raises:
        UserError: there is none, it is locked, or it holds something else.
    """
    if "://" not in where and Path(where).suffix in (".db", ".sqlite", ".sqlite3"):
        where = f"sqlite:///{where}"
    if where.startswith("sqlite:///"):
        _check_sqlite(Path(where.removeprefix("sqlite:///")), create)
    if "://" in where:
        return _open_database(where, create)
    return _open_journal(Path(where), create)


def _open_journal(path: Path, create: bool) -> BaseStorage:
    exists = file_exists(path, "storage")
    if exists and not path.is_file():
        raise UserError(f"{path} is not a file; name one as the storage")
    if not exists and not create:
        raise UserError(f"{path}: there is no study yet; start one with fs-lowrank hpo tune")
    backend = Journal(path)
    try:
        return optuna.storages.JournalStorage(backend)
    except UserError:
        raise
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(
            f"{path}, line {backend.lines}: this line does not fit those before it ({type(error).__name__}: {error}); "
            "put the file back as the search wrote it, or name another storage"
        ) from None


def _check_sqlite(path: Path, create: bool) -> None:
    if not path.exists():
        if not create:
            raise UserError(f"{path}: there is no study yet; start one with fs-lowrank hpo tune")
        if not path.absolute().parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}; make it, or name another file as the storage")
        return
    try:
        database = sqlite3.connect(path, timeout=WAIT)
        try:
            database.execute("BEGIN IMMEDIATE")
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            database.rollback()
        finally:
            database.close()
    except sqlite3.OperationalError as error:
        raise UserError(
            f"{path}: {error}; another process holds it, or it cannot be written; wait for that, "
            "or name another storage"
        ) from None
    except sqlite3.DatabaseError:
        raise UserError(f"{path} is not a SQLite file; name another storage") from None
    if tables and "version_info" not in tables:
        raise UserError(
            f"{path} is a database of something else (it has the tables {', '.join(sorted(tables)[:3])}); "
            "name another file as the storage"
        )


def _open_database(url: str, create: bool):
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    shown = url.rsplit("@", 1)[-1]  # never a password
    try:
        driver = make_url(url).get_driver_name()
        arguments = {"connect_args": dict.fromkeys(_LIMITS.get(driver, ()), int(WAIT))}
        if driver != "pysqlite":
            say_once(f"asking the database {shown}, for at most {WAIT:g} s")
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=arguments)
        except SQLAlchemyError:
            # If two processes create the tables at the same time, one of them fails; the second time they exist.
            return optuna.storages.RDBStorage(url, engine_kwargs=arguments)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise UserError(
            f"storage {shown}: {error}; expected a path, sqlite:///FILE, or a server's URL, whose driver is installed"
        ) from None
    except (SQLAlchemyError, OSError) as error:
        raise UserError(f"storage {shown}: cannot be used: {str(error).splitlines()[0]}") from None
    except RuntimeError as error:
        raise UserError(f"storage {shown} is of another version of Optuna: {error}") from None


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Turn the errors of a storage and of files during the block into a ``UserError``."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ or error
        raise UserError(
            f"the storage {where.rsplit('@', 1)[-1]} failed: {str(cause).splitlines()[0]}; when that is "
            "repaired, the same command continues"
        ) from None
    except BrokenPipeError:  # of the console; see ``shell.run``
        raise
    except OSError as error:
        raise RunFailed(
            f"{error.filename or where}: {error.strerror or error}; when that is repaired, the same command continues"
        ) from error


def study_names(storage) -> list[str]:
    """The names of the searches, without the studies of their winners' fresh seeds."""
    return sorted(n for n in optuna.get_all_study_names(storage) if not n.endswith(CONFIRM))


def load_study(storage, name: str, **kwargs) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=storage, **kwargs)


def trial_of(study: optuna.Study, number: int) -> optuna.trial.FrozenTrial:
    """The current state of a trial in the storage."""
    return next(t for t in study.get_trials(deepcopy=False) if t.number == number)


def set_attribute(study: optuna.Study, trial: optuna.trial.FrozenTrial, key: str, value: object) -> None:
    """Set a user attribute of a trial that another process runs or ran.

    Optuna sets attributes only through a ``Trial``, which only the process that asked for the trial has; a dead process
    cannot store how its trial ended. Therefore this uses the study's storage and the trial's number in it, which are
    private names of Optuna; a test checks that they exist.
    """
    study._storage.set_trial_user_attr(trial._trial_id, key, value)


#: appended to the name of a search, the name of the study with its winners' fresh seeds
CONFIRM = "/confirm"
