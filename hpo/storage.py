"""Where studies are stored: a SQLite file, or a database that a URL names. All of it is Optuna's.

A worker that dies is noticed by its missing heartbeats, and its trial is queued again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback

from fs_lowrank import RunFailed, UserError

from .objectives import FILE

#: the file that a search of fs-lowrank 0.1 and 0.2.0.dev0 has in its folder instead
OLD = "journal.log"
#: seconds between two heartbeats of a worker, and without one until its trial is queued again
HEARTBEAT, GRACE = 10, 40
#: appended to the name of a study and followed by the number of a winner: the study of its fresh seeds
CONFIRM = "/confirm/"


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


with quiet():
    #: queues the trial of a dead worker again, twice at most
    RETRY = RetryHeartbeatStaleTrialCallback(max_retry=2)
    #: queues a trial again, however often that was done before
    AGAIN = RetryHeartbeatStaleTrialCallback()


def open_storage(where: str | Path, create: bool = False) -> RDBStorage:
    """Open the storage.

    Args:
        where: the path of a SQLite file, or a URL such as ``postgresql+psycopg://user@server/hpo``.
        create: create the file if there is none.

    Raises:
        UserError: there is none, or it cannot be used.
    """
    path = None if "://" in str(where) else Path(where)
    if path is not None and not path.exists():
        if path.name == FILE and path.with_name(OLD).exists():
            raise UserError(
                f"{path.with_name(OLD)} is a search of an earlier version of fs-lowrank; move that file away and run "
                "the command of the search again. It uses the finished runs"
            )
        if not create:
            raise UserError(f"{path}: there is no study yet; start one with fs-lowrank hpo tune")
    with storage_errors(where), quiet():
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        url = str(where) if path is None else f"sqlite:///{path}"
        heartbeats: dict[str, Any] = {"heartbeat_interval": HEARTBEAT, "grace_period": GRACE}
        try:
            return RDBStorage(url, heartbeat_stale_trial_callback=RETRY, **heartbeats)
        except RuntimeError as error:  # of a storage of another version of Optuna
            raise UserError(f"storage {where} is no storage that this version of Optuna reads: {error}") from None


@contextmanager
def storage_errors(where: str | Path) -> Iterator[None]:
    """Turn errors of a storage during the block into a ``UserError``, and errors of files into ``RunFailed``."""
    from sqlalchemy.exc import SQLAlchemyError

    address = str(where).rsplit("@", 1)[-1]  # never a password
    try:
        yield
    except BrokenPipeError:  # of the console
        raise
    except OSError as error:
        raise RunFailed(
            f"{error.filename or address}: {error.strerror or error}; when that is repaired, the same command continues"
        ) from error
    except (optuna.exceptions.OptunaError, SQLAlchemyError, ImportError) as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise UserError(
            f"storage {address}: {cause}; expected a SQLite file of a search, or the URL of a database whose "
            "driver is installed. When that is repaired, the same command continues"
        ) from None


def study_names(storage: BaseStorage) -> list[str]:
    """The names of the searches, without the studies of their winners' fresh seeds."""
    return sorted(n for n in optuna.get_all_study_names(storage) if CONFIRM not in n)


def load_study(storage: BaseStorage, name: str) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=storage)
