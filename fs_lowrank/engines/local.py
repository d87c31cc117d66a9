"""The embedded engine: every client in this process, on one copy of the model.

What a client trains is named tensors, swapped in and out of the one model, so memory is the base plus the
clients' adapters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from safetensors import SafetensorError

from ..config import check_local
from ..errors import RunFailed, UserError, nearest
from ..methods import RefusedUpdate
from ..runs.result import RunResult
from ..settings import Settings
from .common import Run, check_outdir, watched
from .server import TooFewClients

logger = logging.getLogger("fs_lowrank")


class LocalEngine(Run):
    """One run on this machine.

    Args:
        config: the run's configuration.
        on_round: called with each round's record; the run ends early if it returns True.
        on_client: called with (round, clients done, clients of the round) as a round proceeds.
    """

    def __init__(
        self,
        config: Settings,
        on_round: Callable[[dict], object] | None = None,
        on_client: Callable[[int, int, int], object] | None = None,
    ):
        check_local(config)
        super().__init__(config)
        self._check_watched()
        self.on_round, self.on_client = on_round or (lambda record: None), on_client or (lambda *_: None)

    def _check_watched(self) -> None:
        key, (split, metric) = "eval.best_res_update_round_wise_key", watched(self.config)
        value, patience = self.config.get(key), self.config.early_stop.patience
        own = ("acc_mean", "acc_std", "acc_worst_decile") if split == "client_test" else ()
        if metric not in (known := ("loss", "acc", *own)):
            raise UserError(
                f"{key} = {value!r}: no metric {metric!r} is measured"
                f"{nearest(metric, known)}; {split}_ may be followed by: {', '.join(known)}"
            )
        if patience > 0 and split not in self._evaluated():
            raise UserError(
                f"early_stop.patience = {patience}: it watches {key} = {value}, a split that is not "
                f"evaluated; evaluated are: {', '.join(self._evaluated()) or 'none'}"
            )

    def _round(self, round: int) -> dict:
        started = time.perf_counter()
        server, selected = self.server, self.server.select(round)
        before = dict(server.synced), dict(self.personal)
        uplink, downlink, losses, failed = {}, {}, {}, []
        for done, client in enumerate(selected):
            self.on_client(round, done, len(selected))
            downlink[client] = server.sizes(server.downlink(client, round))
            if server.drops_out(client, round):
                failed.append({"client": client, "kind": "dropped", "reason": "drawn by lowrank.drop_rate"})
                continue
            try:
                self._load_client(client)
                update, result = self._fit(
                    self.clients[client - 1], self.data.clients[client - 1], round, self.model, self.prefix
                )
                server.receive(update, round)
            except RefusedUpdate as refusal:
                failed.append({"client": client, "kind": "refused", "reason": str(refusal)})
                logger.warning("round %d: refused the update of %s", round, refusal)
                continue
            except UserError:
                raise
            except Exception as error:  # one client's failure must not end the others' round; it is recorded
                failed.append({"client": client, "kind": "failed", "reason": f"{type(error).__name__}: {error}"})
                logger.warning("round %d: client %d failed: %s", round, client, failed[-1]["reason"])
                logger.debug("client %d", client, exc_info=True)
                continue
            uplink[client], losses[client] = server.sizes(update.tensors), result.loss
            if self.untrained_personal:
                self.personal[client] = self._personal_now()
        trained = time.perf_counter()
        self._load_global()
        try:
            message = server.finish(round)
        except TooFewClients as error:
            server.synced, self.personal = before
            if round > 1 and not self._checkpoint_due(round - 1):
                self._save(round - 1)
            kept = (
                f"the last good round, {round - 1}, is in {self.outdir / 'checkpoint'}; continue with --resume, "
                "and a smaller lowrank.min_clients if no more clients can be had"
            )
            raise RunFailed(
                f"{error} ({'; '.join(f['reason'] for f in failed[:3]) or 'nobody failed'}); "
                f"{kept if round > 1 else 'no round was completed'}"
            ) from error
        with torch.no_grad():
            self.method.apply(self.model, message, round)
        aggregated = time.perf_counter()
        metrics = self._evaluate() if self._evaluates(round) else {}
        evaluated = time.perf_counter()
        return self._record(
            round,
            selected=selected,
            failed=failed,
            losses=losses,
            uplink=uplink,
            downlink=downlink,
            samples={c.id: c.num_samples for c in self.clients},
            metrics=metrics,
            spent=self._spent(),
            seconds={
                "training": trained - started,
                "aggregation": aggregated - trained,
                "evaluation": evaluated - aggregated,
            },
        )

    def run(self, resume: bool = False) -> RunResult:
        """All rounds, from the start or from the last checkpoint.

        Raises:
            UserError: the folder holds another run, or cannot be continued with this configuration.
            RunFailed: something cannot be written, too few clients remain, or another run writes there.
        """
        try:
            return self._run(resume)
        except (OSError, SafetensorError) as error:
            raise RunFailed(
                f"the run in {self.outdir} stopped: {error}; when that is mended, run again with --resume"
            ) from error
        finally:
            self._release()

    def _run(self, resume: bool) -> RunResult:
        checkpoint = self._start(resume)
        first = checkpoint.round + 1 if checkpoint else 1
        for round in range(first, self.config.federate.total_round_num + 1):
            if self._stalled():
                break
            record = self._round(round)
            self.records.add(record)
            if self._checkpoint_due(round):
                self._save(round)
            if self.on_round(record):
                break
        return self._finish()


def run(config: Settings, resume: bool = False, on_round=None, on_client=None) -> RunResult:
    """See ``fs_lowrank.run``."""
    check_outdir(config, resume)
    return LocalEngine(config, on_round, on_client).run(resume)
