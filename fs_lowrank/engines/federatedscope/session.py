"""What the workers of one process share: the run's data, method and model, and the server's ledger.

The framework gives its workers data, a model and a configuration separately, and gives a model builder only the
section ``model``. The session is opened when the framework asks for the data, which it does first; the model builder
and the workers then use the current session.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from ...callbacks import Callback, callbacks_of
from ...config import Config
from ...data import Examples, ImageExamples
from ...errors import UserError
from ...methods import Client
from ...models.adapters import ACCUMULATED
from ...models.frozen import FrozenPrefix
from ...models.names import tags
from ...rounds.evaluator import Evaluator
from ...rounds.joining import proof_of
from ...rounds.keeper import RecordKeeper
from ...rounds.ledger import Ledger
from ...rounds.site import Site
from ...runs.result import RunResult
from .config import from_framework

logger = logging.getLogger("federatedscope.lowrank")

_current: Session | None = None


class Session:
    """One process's part of a run.

    Args:
        config: the run's configuration.
        outdir: the folder of the run's files, the framework's and ours.
        role: ``standalone``, ``server`` or ``client``.
        index: the number of the client whose part of the data a client process holds; -1 if all the data that it reads
            are its own.

    Attributes:
        on_round: called with the record of each round; a true value ends the run.
        on_client: called with the round, a client and the number of clients in the round, before the client trains.
        on_message: called with the message of each round and the round, when the session's model has followed it.
        resume: whether the run continues from the checkpoint in ``outdir``.
        result: of a finished run.
        proof: what must be equal in all processes at the start: hashes of the frozen model and of every shared tensor,
            by name. Empty in standalone mode.
    """

    def __init__(self, config: Config, outdir: Path, role: str, index: int = -1):
        self.config, self.outdir, self.role, self.index = config, outdir, role, index
        if role != "standalone":
            by_clients = not config.federate.make_global_eval
            if config.eval.client_scores and not by_clients:
                raise UserError(
                    "eval.client_scores = True: in mode distributed only the clients have their test data and their "
                    "own parts of the model; set federate.make_global_eval False, by which they evaluate"
                )
            if config.eval.before and by_clients:
                raise UserError(
                    "eval.before = True: in mode distributed with federate.make_global_eval False the clients "
                    "evaluate, and do so only after a round; leave it out"
                )
        self.shares_model = role == "standalone" and config.federate.share_local_model
        self.has_own_data = role == "client" and index < 1
        self.site = Site(config, serves=role != "client", undivided=self.has_own_data)
        self.method = self.site.method
        self.evaluator = Evaluator(self.site)
        parts = self.method, self.site.initial_state, self.site.sizes
        self.ledger = Ledger.of(config, *parts, keep_messages=not self.shares_model, heads=self.site.heads)
        self.keeper = RecordKeeper(
            self.site, self.evaluator, self.ledger, outdir, self._callbacks(), clients_evaluate=True
        )
        self.on_round: Callable[[dict], object] = lambda record: None
        self.on_client: Callable[[int, int, int], object] = lambda *_: None
        self.on_message: Callable[[dict[str, Tensor], int], object] = lambda *_: None
        self.resume = False
        self.result: RunResult | None = None
        self._models_given = 0
        self.proof: dict[str, str] = {}
        if role != "standalone":
            self.proof = proof_of(self.site)

    def _callbacks(self, own: Sequence[Callback] = ()) -> list[Callback]:
        return callbacks_of(self.config, own, self.config.lowrank.trackers)  # wandb is told by the framework

    def add_callbacks(self, own: Sequence[Callback]) -> None:
        """Add the user's callbacks, before the run begins."""
        self.keeper.callbacks = self._callbacks(own)

    # -- models ------------------------------------------------------------------------------------

    def next_model(self) -> nn.Module:
        """The model for the next worker: the site's model for the first worker and for all workers that share it."""
        self._models_given += 1
        if self.shares_model or self.role != "standalone" or self._models_given == 1:
            return self.site.model
        return self.site.adapted(self.site.plain_model())

    def client(self, number: int) -> Client:
        """The method's view of client ``number``."""
        if self.has_own_data:
            return dataclasses.replace(self.site.clients[0], id=number)
        return self.site.clients[number - 1]

    def examples(self, number: int):
        """The training examples of client ``number``."""
        return self.site.data.clients[0 if self.has_own_data else number - 1]

    def prefix_for(self, model: nn.Module, number: int) -> FrozenPrefix | None:
        """The cache of the frozen layers' outputs for client ``number``; the site's own for its model."""
        if model is self.site.model and (self.shares_model or self.role == "client"):
            return self.site.prefix
        return self.site.frozen_prefix(model, number, share=1 / len(self.site.clients))

    def held_out_rows(self, number: int) -> dict[str, Sequence[int]]:
        """The rows of the held-out data that client ``number`` evaluates on, by split.

        Of the test set they are its share (``FederatedData.test_shares``), of validation data every K-th, for K
        clients; a client with data of its own has them all. A split without a row is left out.
        """
        site, place = self.site, 0 if self.has_own_data else number - 1
        rows: dict[str, Sequence[int]] = {
            split: site.data.test_shares[place] if split == "test" else range(place, len(e), len(site.clients))
            for split, e in site.held_out().items()
        }
        return {split: share for split, share in rows.items() if len(share)}

    def held_out_for(self, number: int) -> dict[str, Examples | ImageExamples]:
        """The held-out data of ``held_out_rows``."""
        return {split: self.site.held_out()[split].select(rows) for split, rows in self.held_out_rows(number).items()}

    def largest_message(self, allowed: int) -> int:
        """Bytes of the largest message that a distributed process of this role is sent, with a margin; an upper bound.

        It is what clients send for a server, and for a client a whole model and a message of all clients' tensors.
        Every number counts eight bytes, which base64 makes a third longer. Where the method keeps products beside the
        base, the whole model grows with every merge, so that nothing but ``allowed`` bounds it.

        Args:
            allowed: the most that the user allows (``distribute.grpc_max_receive_message_length``).
        """
        method, state, rounds = self.method, self.ledger.state, self.config.federate.total_round_num
        sizes = {c.id: _numbers(method.expected(state, 1, c.id)) for c in self.site.clients}
        later = (_numbers(method.expected(state, t, 1)) for t in {*range(1, min(rounds, 32) + 1), rounds})
        shared = _numbers(method.view(state))
        numbers = max(*sizes.values(), *later, shared)
        if self.role == "client":
            changed = self.site.changed_base()
            if any(ACCUMULATED in tags(name) for name in changed):
                return allowed
            base = _numbers(changed)
            numbers += base + shared + max(sum(sizes.values()), numbers * self.config.federate.client_num)
        margin = 2**20 + 4 * len(json.dumps(self.proof))
        return int(min(allowed, numbers * 8 * 4 / 3 * 1.1 + margin))

    def use_config(self, config: Config) -> None:
        """Record ``config`` as the configuration of the run; it must not differ in a key that affects the result."""
        self.config = self.keeper.config = config

    def begin(self) -> int:
        """Open the run's files and, with ``resume``, restore the checkpoint; returns the number of completed rounds."""
        if not self.resume and (self.outdir / self.keeper.config_name).exists():
            self.keeper.config_name = "lowrank.yaml"  # the framework has written its own
        checkpoint = self.keeper.start(self.resume)
        return checkpoint.round if checkpoint else 0

    def conclude(self) -> RunResult:
        """The result of a finished run; the first call writes the run's final files."""
        if self.result is None:
            self.site.load_global(self.ledger.state)
            self.result = self.keeper.finish()
        return self.result

    def client_result(self) -> RunResult:
        """The result of a client process, which keeps no records and no global model."""
        return RunResult(
            history=[],
            final={},
            outdir=self.outdir,
            model=self.site.model,
            base_changed=True,
            facts={"method": self.method.name, "client": self.index},
        )


def open_session(cfg) -> Session:
    """Open the session that the framework's configuration describes; it replaces any session before it.

    Raises:
        UserError: a value in the configuration is wrong.
    """
    global _current
    config = from_framework(cfg)
    role, index = "standalone", -1
    if config.federate.mode == "distributed":
        role, index = cfg.distribute.role, cfg.distribute.data_idx
        if role not in ("server", "client"):
            raise UserError(f"distribute.role = {role!r}: expected server or client")
        if role == "client" and index != -1 and not 1 <= index <= config.federate.client_num:
            raise UserError(
                f"distribute.data_idx = {index}: expected 1 to {config.federate.client_num} (which part of "
                "the data this client holds), or -1 (all of what it reads is its own)"
            )
    _current = Session(config, Path(cfg.outdir), role, index)
    return _current


def current() -> Session:
    """The session of this process.

    Raises:
        UserError: there is none, because the framework's ``get_data`` was not called.
    """
    if _current is None:
        raise UserError("this method needs its data from the framework's get_data(cfg), which was not called")
    return _current


def is_open() -> bool:
    """Whether one of our methods runs in this process."""
    return _current is not None


def session_for_model(model_type: str) -> Session | None:
    """The current session, if it is for a model of this type."""
    return _current if _current is not None and _current.config.model.type == model_type else None


def close_session() -> None:
    """Release the current session, its models and its lock on the run's folder, once all is written."""
    global _current
    if _current is not None:
        _current.site.shared_states.settle()
        _current.keeper.release()
    _current = None


def _numbers(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() for t in tensors.values())
