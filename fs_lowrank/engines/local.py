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

from ..config import Config, check_local
from ..errors import RunFailed, UserError
from ..methods import RefusedUpdate
from ..rounds.evaluator import Evaluator
from ..rounds.keeper import RecordKeeper, check_outdir, outdir_of
from ..rounds.record import round_record
from ..rounds.site import Site
from ..runs.result import RunResult
from .server import Server, TooFewClients

logger = logging.getLogger("fs_lowrank")


class LocalEngine:
    """One run on this machine.

    Args:
        config: the run's configuration.
        on_round: called with each round's record; the run ends early if it returns True.
        on_client: called with (round, clients done, clients of the round) as a round proceeds.
    """

    def __init__(
        self,
        config: Config,
        on_round: Callable[[dict], object] | None = None,
        on_client: Callable[[int, int, int], object] | None = None,
    ):
        check_local(config)
        self.config = config
        self.site = Site(config)
        self.evaluator = Evaluator(self.site)
        self.evaluator.check_watched()
        self.method, self.model = self.site.method, self.site.model
        self.server = Server.of(config, self.method, self.site.initial_state)
        self.keeper = RecordKeeper(self.site, self.evaluator, self.server, outdir_of(config))
        self.on_round, self.on_client = on_round or (lambda record: None), on_client or (lambda *_: None)

    def _round(self, round: int) -> dict:
        started = time.perf_counter()
        server, site, selected = self.server, self.site, self.server.select(round)
        before = dict(server.synced), dict(site.personal)
        uplink, downlink, losses, failed = {}, {}, {}, []
        for done, client in enumerate(selected):
            self.on_client(round, done, len(selected))
            downlink[client] = server.sizes(server.downlink(client, round))
            if server.drops_out(client, round):
                failed.append({"client": client, "kind": "dropped", "reason": "drawn by lowrank.drop_rate"})
                continue
            try:
                site.load_client(server.state, client)
                update, result = site.fit(
                    site.clients[client - 1], site.data.clients[client - 1], round, site.model, site.prefix
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
            site.keep_personal(client)
        trained = time.perf_counter()
        site.load_global(server.state)
        try:
            message = server.finish(round)
        except TooFewClients as error:
            server.synced, site.personal = before
            kept = self.keeper.keep_last(round)
            reasons = "; ".join(f["reason"] for f in failed[:3]) or "nobody failed"
            raise RunFailed(f"{error} ({reasons}); {kept}") from error
        with torch.no_grad():
            self.method.apply(site.model, message, round)
        aggregated = time.perf_counter()
        metrics = self.evaluator.evaluate(server.state) if self.evaluator.due(round) else {}
        evaluated = time.perf_counter()
        return round_record(
            self.method.view(server.state),
            round,
            selected=selected,
            failed=failed,
            losses=losses,
            uplink=uplink,
            downlink=downlink,
            samples={c.id: c.num_samples for c in site.clients},
            metrics=metrics,
            spent=site.take_spent(),
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
                f"the run in {self.keeper.outdir} stopped: {error}; when that is mended, run again with --resume"
            ) from error
        finally:
            self.keeper.release()

    def _run(self, resume: bool) -> RunResult:
        checkpoint = self.keeper.start(resume)
        first = checkpoint.round + 1 if checkpoint else 1
        for round in range(first, self.config.federate.total_round_num + 1):
            if self.evaluator.stalled(self.keeper.history):
                break
            record = self._round(round)
            self.keeper.add(record)
            if self.on_round(record):
                break
        return self.keeper.finish()


def run(config: Config, resume: bool = False, on_round=None, on_client=None) -> RunResult:
    """See ``fs_lowrank.run``."""
    check_outdir(config, resume)
    return LocalEngine(config, on_round, on_client).run(resume)
