"""Trackers: TensorBoard, Weights & Biases, MLflow and others, which show a run's records while it runs
(``lowrank.trackers``). accelerate has a class for each of them.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

from ..config import Config
from ..errors import UserError
from ..rounds.recorder import Callback, Recorder
from ..settings.tree import flatten

logger = logging.getLogger("fs_lowrank")

#: seconds that a tracker may take for a round's record, since it may have to ask a server
LIMIT = 60.0


def trackers_of(config: Config) -> list[str]:
    """The trackers that a configuration asks for; ``wandb.use`` is FederatedScope's key for one of them."""
    wandb = ["wandb"] if config.get("wandb.use") else []
    return list(dict.fromkeys([*config.lowrank.trackers, *wandb]))


def check_trackers(names: Sequence[str]) -> None:
    """Raise ``UserError`` if one of these trackers is not installed, or unknown to the accelerate that is."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    available = {str(getattr(kind, "value", kind)) for kind in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UserError(
                f"lowrank.trackers: the accelerate that is installed does not know {name}, a later one does; "
                "get it with: pip install -U accelerate"
            )
        if name not in available:
            raise UserError(f"lowrank.trackers: {name} is not installed; install it with: pip install {name}")


class Trackers(Callback):
    """The trackers of one run. One that fails or hangs is reported, gets no more numbers, and never ends the run.

    Args:
        names: of the trackers.
    Raises:
        UserError: one is not installed, or unknown.
    """

    def __init__(self, names: Sequence[str]):
        check_trackers(names)
        self.names = names
        self.open: dict[str, Any] = {}
        #: a thread for each tracker: MLflow's runs belong to the thread that began them. They are daemons, so one that
        #: hangs does not keep the process from ending
        self._threads: dict[str, ThreadPool] = {}

    def on_start(self, run: Recorder) -> None:
        #: the run's folder; trackers write their files below it
        self.config, self.outdir = run.config, run.outdir
        self._threads = {name: ThreadPool(1) for name in self.names}
        run.exits.callback(self.finish)
        for name in self.names:
            if (tracker := self._try(name, partial(self._start, name))) is not None:
                self.open[name] = tracker

    def _start(self, name: str) -> Any:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # which its trackers ask whether this is the main process
        kind: Any = LOGGER_TYPE_TO_CLASS[name]
        arguments: dict[str, Any] = {}
        if kind.requires_logging_directory or "logging_dir" in inspect.signature(kind.__init__).parameters:
            arguments["logging_dir"] = str(self.outdir)
        if name == "wandb":
            arguments |= self._wandb()
        tracker = kind(self._name(name), **arguments)
        tracker.start()
        values = flatten(self.config.to_dict())
        plain = {key: v if isinstance(v, (bool, int, float, str)) else str(v) for key, v in values.items()}
        tracker.store_init_configuration(plain)
        return tracker

    def _name(self, name: str) -> str:
        """A tracker's name for the project; TensorBoard writes to the folder of that name."""
        if name == "tensorboard":
            return name
        return str(self.config.get("wandb.name_project") or "fs-lowrank")

    def _wandb(self) -> dict[str, Any]:
        """The arguments of ``wandb.init``. Without a key it keeps the run in a folder, as it would ask for one."""
        import wandb

        arguments = {
            "dir": str(self.outdir),
            "name": str(self.outdir),
            "entity": self.config.get("wandb.name_user") or None,
        }
        online = self.config.get("wandb.online_track")
        if not online or not (wandb.api.api_key or os.environ.get("WANDB_MODE")):
            arguments["mode"] = "offline"
            if online:
                logger.info(
                    "wandb has no API key: the run is stored in %s; `wandb sync` uploads it", self.outdir / "wandb"
                )
        return arguments

    def after_round(self, run: Recorder, record: dict[str, Any]) -> None:
        """Log the numbers of a round's record to every tracker, by names such as ``metrics/test/acc``."""
        values = numbers(record)
        for name in list(self.open):
            self._try(name, partial(self.open[name].log, values, step=record["round"]))

    def finish(self) -> None:
        """End the trackers and their threads."""
        for name in list(self.open):
            self._try(name, self.open[name].finish)
        self.open.clear()
        for thread in self._threads.values():
            thread.close()

    def _try(self, name: str, work: Callable[[], Any]) -> Any:
        try:
            return self._threads[name].apply_async(work).get(LIMIT)
        except multiprocessing.TimeoutError:
            problem = f"no answer for {LIMIT:g} s"
        except Exception as error:  # of a third party's code or server, of any kind
            problem = f"{type(error).__name__}: {error}"
        logger.warning("lowrank.trackers: %s gets no further numbers: %s", name, problem)
        self.open.pop(name, None)
        return None


def numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record by path; lists and tables with an entry for each client are left out."""
    flat: dict[str, float] = {}
    for key, value in record.items():
        if key.startswith("client_") or key in ("clients", "round", "schema"):
            continue
        if isinstance(value, Mapping):
            flat |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[prefix + key] = value
    return flat
