"""A run: its records, the callbacks, and the summary at its end."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import DamagedFile, RunFailed, UserError, nearest, user_errors
from ..jobs.files import read_json, remove_unfinished, to_json, write_text
from ..jobs.tables import write_tables
from ..models.build import hub_name
from ..models.names import tags
from ..runs import checksums
from ..runs.checkpoint import Checkpoint
from ..runs.environment import versions, write_environment
from ..runs.folder import check_outdir, claim
from ..runs.records import Records, flat_metrics
from ..runs.result import RunResult
from ..runs.split import write_split
from ..runs.tables import client_lines, result_lines
from ..settings.metrics import CLIENTS
from ..versions import SCHEMA
from .checkpoints import Checkpoints
from .evaluator import Evaluator
from .figures import best_figures, final_figures
from .finite import BadRound
from .intake import TooFewClients
from .ledger import Ledger
from .record import Failure, extremes
from .workspace import Workspace

logger = logging.getLogger("fs_lowrank")


class Callback:
    """What a run does beside training. Derive a class with any of the three functions, and give objects of it to
    ``fs_lowrank.run(config, callbacks=[…])``.

    A run calls the functions of all callbacks in the order of the list, in the process that has the server's state. An
    error of the user's code ends the run, which ``resume=True`` continues.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise ``UserError`` for a misspelt function, which no run would call."""
        super().__init_subclass__(**options)
        for name in vars(cls).keys() - vars(Callback).keys():
            if name[0] != "_" and (hint := nearest(name, ("on_start", "after_round", "on_end"), 0.8)):
                raise UserError(f"{cls.__name__}.{name}: a run calls no function of this name{hint}")

    def on_start(self, run: Recorder) -> object:
        """The run begins, or goes on after the rounds in ``run.history``.

        Returns:
            True if no round is to follow.
        """

    def after_round(self, run: Recorder, record: dict[str, Any]) -> object:
        """A round has ended and was evaluated.

        Args:
            record: as ``rounds.jsonl`` will have it; entries that are added here, of JSON's types, are written with it.
        Returns:
            True if it was the last round.
        """

    def on_end(self, run: Recorder, result: RunResult) -> object:
        """All rounds have ended. ``summary.json`` will have the additions to ``final`` and ``facts`` of ``result``."""


class Recorder:
    """One run: its workspace, its folder, and its records so far. Callbacks are given it.

    Args:
        evaluator: of this process; the run is that of its workspace.
        ledger: its state is saved and restored.
        outdir: the folder.
        callbacks: the run calls them beside writing records.

    Attributes:
        config: the run's configuration. config_name: of its file in the folder.
        checkpoints: of the run, in its folder.
        before: the metrics before round 1, if ``eval.before`` asks for them.
        ended: whether a callback has asked for the end.
        exits: is closed when the run has ended, also by an error.
    """

    config_name = "config.yaml"

    def __init__(
        self,
        evaluator: Evaluator,
        ledger: Ledger,
        outdir: Path,
        callbacks: Sequence[Callback],
    ):
        self.workspace, self.evaluator, self.ledger = evaluator.workspace, evaluator, ledger
        self.config, self.method = self.workspace.config, self.workspace.method
        self.outdir, self.callbacks = outdir, list(callbacks)
        self.checkpoints = Checkpoints(self.workspace, ledger, outdir)
        self.before: dict[str, float] = {}
        self.ended = False
        self.exits = ExitStack()
        #: the records of the finished rounds, and their file once it is open
        self.history: list[dict[str, Any]] = []
        self._records: Records | None = None
        #: the last record with scores of clients, and all of them
        self._scored: tuple[dict[str, Any], dict[str, Any]] | None = None

    def global_model(self) -> nn.Module:
        """The model with the global tensors as they are now; it is the one that clients train, so no copy of it."""
        self.workspace.load_global(self.ledger.state)  # it may hold the tensors of a client that was evaluated
        return self.workspace.model

    def _call(self, hook: str, *arguments: Any) -> None:
        """Call ``hook`` of all callbacks; an error of the user's code is one for the user."""
        own = [*arguments[0]] if hook == "after_round" else []
        for callback in self.callbacks:
            kind = type(callback)
            external = not kind.__module__.startswith("fs_lowrank.")
            before = {name: arguments[0][name] for name in own} if external else {}
            with user_errors(f"callbacks: {kind.__qualname__}.{hook}") if external else nullcontext():
                self.ended |= bool(getattr(callback, hook)(self, *arguments))
                if changed := [name for name, value in before.items() if arguments[0].get(name) is not value]:
                    taken = f"record[{changed[0]!r}] is the run's own; give yours another name"
                    raise UserError(f"callbacks: {kind.__qualname__}.after_round: {taken}")
                if before:
                    to_json(arguments[0])

    def add(self, record: dict[str, Any]) -> None:
        """Call the callbacks, and write the record of a round, and a checkpoint if one is due."""
        assert self._records is not None
        self._call("after_round", record)
        scores, last = record.get("client_scores"), record["round"] == self.config.federate.total_round_num
        self._records.add(
            {**record, "client_scores": extremes(scores)} if scores and not (last or self.ended) else record
        )
        if scores:
            self._scored = self.history[-1], {str(client): values for client, values in scores.items()}
        if self.checkpoints.due(record["round"]):
            self.save(record["round"])

    def stopped(self, round: int, error: TooFewClients | BadRound, failed: list[Failure]) -> RunFailed:
        """The error to raise if ``round`` cannot be finished; saves the round before it first.

        Args:
            error: the cause; its ``remedy`` is the advice to the user.
            failed: the clients that failed, as in the record.
        """
        if round > 1 and not self.checkpoints.due(round - 1):
            self.save(round - 1)
        outlook = (
            f"the last good round, {round - 1}, is in {self.outdir / 'checkpoint'}; continue with resume=True, "
            f"and {error.remedy}"
            if round > 1
            else f"no round was completed; start again, and {error.remedy}"
        )
        reasons = "; ".join(f["reason"] for f in failed[:3])
        return RunFailed(f"round {round}: {error}{f' ({reasons})' if reasons else ''}; {outlook}")

    def release(self) -> None:
        """Close the run's open files and trackers, and unlock the folder if it is locked."""
        self.exits.close()

    def start(self, resume: bool) -> Checkpoint | None:
        """Lock the folder, restore its last checkpoint if ``resume``, and write the files that describe the run.

        Returns:
            The checkpoint, or None if the run starts at round 1.
        Raises:
            UserError: the folder holds a run, and ``resume`` is False.
            CannotContinue: it holds another run, or one that is damaged. NewerSchema: a newer version wrote it.
            RunFailed: another run writes to the folder, or a file cannot be written.
        """
        self.evaluator.check_best()
        self.exits.callback(claim(self.outdir).release)
        check_outdir(self.config, resume)
        remove_unfinished(self.outdir)
        checkpoint, self.history = self.checkpoints.restore() if resume else (None, [])
        self._call("on_start")
        checksums.unseal(self.outdir)
        (self.outdir / "summary.json").unlink(missing_ok=True)  # so that a run which stops again has not ended
        self._records = Records(self.outdir / "rounds.jsonl", self.history)
        self.history = self._records.history
        self.config.dump(self.outdir / self.config_name)
        after = checkpoint.round if checkpoint else None
        write_environment(self.outdir / "environment.json", self.workspace.new_weights, after, self.workspace.device)
        write_split(self.outdir, self.workspace.data)
        if self.config.eval.before:
            self._evaluate_before(resumed=checkpoint is not None)
        return checkpoint

    def _evaluate_before(self, resumed: bool) -> None:
        """Evaluate the model before round 1, or read the metrics that the start has written."""
        path = self.outdir / "before.json"
        if resumed:
            try:
                saved = read_json(path, remedy="")
                self.before = {n: math.nan if v is None else float(v) for n, v in saved.items() if n != "schema"}
            except (DamagedFile, TypeError, ValueError) as error:
                logger.warning("%s: %s; the result lacks the metrics before round 1", path, error)
            return
        self.workspace.load_global(self.workspace.initial_state)
        self.before = flat_metrics(self.evaluator.evaluate(self.workspace.initial_state))
        self.workspace.load_global(self.ledger.state)
        write_text(path, to_json({"schema": SCHEMA, **self.before}, indent=1))

    def save(self, round: int) -> None:
        """Write the checkpoint of ``round``, the last in the records.

        Raises:
            RunFailed: it cannot be written; earlier checkpoints are unchanged.
        """
        self.checkpoints.save(round, self._records.digests if self._records else [])

    def result(self) -> RunResult:
        """The result as far as the model and the records are; without figures."""
        return RunResult(
            history=self.history,
            final={},
            outdir=self.outdir,
            model=self.workspace.model,
            base_changed="base" in self.method.shared or any("base" in tags(n) for n in self.workspace.changed_base()),
            facts={
                "method": self.method.name,
                "personal": self.workspace.personal.kinds,
                **facts_of(self.workspace),
            },
        )

    def finish(self) -> RunResult:
        """Call the callbacks, which save adapter and model, and write the tables and the summary; returns the result.

        Raises:
            RunFailed, OSError: a file cannot be written; its content of before is unchanged.
        """
        if self._scored:  # the record in the file may have a part of them, if the run ended early
            self._scored[0]["client_scores"] = self._scored[1]
        history, result = self.history, self.result()
        if any(CLIENTS in r["metrics"] for r in history):
            result.facts["own_models"] = self.evaluator.differ(self.ledger.state)
            result.facts["client_majority"] = self.workspace.data.client_majority
        result.final |= final_figures(history, self.evaluator)
        result.before, result.best = self.before, best_figures(history, self.evaluator)
        self._call("on_end", result)
        write_tables(result_lines({self.method.name: result}), self.outdir / "summary.csv")
        if lines := client_lines({self.method.name: result}):
            write_tables(lines, self.outdir / "client_scores.csv")
        summary = {
            "schema": SCHEMA,
            "final": result.final,
            **({"best": result.best} if result.best else {}),
            **({"before": result.before} if result.before else {}),
            "bytes": dict(result.bytes),
            **result.facts,
            "clients": _sizes(result.facts["clients"]),
            "versions": versions(),
            "seed": self.config.seed,
        }
        write_text(self.outdir / "summary.json", to_json(summary, indent=1))
        checksums.seal(self.outdir)
        return result


def _sizes(sizes: Sequence[int]) -> dict[str, int]:
    """How many clients there are, and how many samples the smallest and the largest of them has."""
    return {"number": len(sizes), "least": min(sizes), "most": max(sizes)}


def facts_of(workspace: Workspace) -> dict[str, Any]:
    """Facts about the data and the model of a run, for its summary."""
    hub = hub_name(workspace.config, workspace.model)
    return {
        "source": workspace.data.source,
        "data": workspace.data.fingerprint,
        "model": workspace.base_fingerprint,
        "configuration": workspace.configured,
        "config": workspace.config.fingerprint(),
        "clients": workspace.data.partition.sizes().tolist(),
        "rows": workspace.data.counts(),
        "columns": workspace.data.columns,
        "held_out": {split: len(examples) for split, examples in workspace.held_out().items()},
        "majority": workspace.data.majority,
        "parameters": workspace.parameters,
        "images": workspace.data.image_shape,
        "labels": workspace.data.label_names,
        **({"hub": hub} if hub[0] else {}),
    }
