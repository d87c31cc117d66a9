"""What the workers of one process share: the run's data, method and model, and the server's ledger.

The framework hands its workers data, a model and a configuration separately, and to a model builder only the
section ``model``. The session is made when the framework asks for the data, which it does first, and the rest
finds it here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from ...config import Config
from ...errors import UserError
from ...methods import Client
from ...models.frozen import FrozenPrefix
from ...rounds.evaluator import Evaluator
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
        outdir: where the framework keeps the run's files; ours go there too.
        role: ``standalone``, ``server`` or ``client``.
        index: whose data a client process holds: 1 to the number of clients, or -1 if all it reads is its own.
    """

    def __init__(self, config: Config, outdir: Path, role: str, index: int = -1):
        self.config, self.outdir, self.role, self.index = config, outdir, role, index
        self.shares_model = role == "standalone" and config.federate.share_local_model
        #: a client process that reads its own data takes all of it, undivided
        self.has_own_data = role == "client" and index < 1
        # The server's step is the server's: a client process chooses nothing.
        self.site = Site(config, serves=role != "client", undivided=self.has_own_data)
        self.method = self.site.method
        self.evaluator = Evaluator(self.site)
        self.ledger = Ledger.of(
            config, self.method, self.site.initial_state, self.site.clients, keep_messages=not self.shares_model
        )
        self.keeper = RecordKeeper(self.site, self.evaluator, self.ledger, outdir)
        self.on_round: Callable[[dict], object] = lambda record: None
        self.on_client: Callable[[int, int, int], object] = lambda *_: None
        #: called with the message of each round and the round, when the session's model has followed it
        self.on_message: Callable[[dict[str, Tensor], int], object] = lambda *_: None
        self.resume = False
        self.result: RunResult | None = None
        self._models_given = 0
        #: what must agree between processes at the start: the frozen model, and every shared tensor, by name
        self.proof = (
            {}
            if role == "standalone"
            else {
                "the base model": self.site.base_fingerprint,
                **{name: _hash(t) for name, t in self.method.view(self.ledger.state).items()},
            }
        )

    # -- models ------------------------------------------------------------------------------------

    def next_model(self) -> nn.Module:
        """The model for the worker that is being made: the site's own for the first and for all that share it."""
        self._models_given += 1
        if self.shares_model or self.role != "standalone" or self._models_given == 1:
            return self.site.model
        return self.site.adapted(self.site.plain_model())

    def client(self, number: int) -> Client:
        """The client that this worker is; its data are those of ``index`` in a process of its own."""
        if self.has_own_data:
            return dataclasses.replace(self.site.clients[0], id=number)
        return self.site.clients[number - 1]

    def examples(self, number: int):
        """The training examples of client ``number``."""
        return self.site.data.clients[0 if self.has_own_data else number - 1]

    def prefix_for(self, model: nn.Module, number: int) -> FrozenPrefix | None:
        """What is kept of the frozen layers for client ``number``; the site's own where the model is."""
        if model is self.site.model and (self.shares_model or self.role == "client"):
            return self.site.prefix
        owner = f"client {number}"
        own = {name: o for name, o in self.site.owners().items() if name == owner}
        return self.site.frozen_prefix(model, own, share=1 / len(self.site.clients))

    def held_out_for(self, number: int) -> dict[str, object]:
        """Client ``number``'s share of the held-out data, where clients evaluate: every K-th sample, of K clients."""
        found = {}
        for split, examples in self.site.held_out().items():
            share = range(number - 1, len(examples), len(self.site.clients))
            if self.has_own_data:
                share = range(len(examples))
            if len(share):
                found[split] = examples.select(share)
        return found

    def say(self, config: Config) -> None:
        """Take ``config``, which differs in what decides no result, as the one to keep and to show."""
        self.config = self.keeper.config = config

    def begin(self) -> int:
        """Open the run's files, restore what ``resume`` asks for; returns the rounds that are done."""
        if not self.resume and (self.outdir / self.keeper.config_name).exists():
            self.keeper.config_name = "lowrank.yaml"  # the framework has written its own
        checkpoint = self.keeper.start(self.resume)
        return checkpoint.round if checkpoint else 0

    def conclude(self) -> RunResult:
        """Write what a finished run leaves behind; once."""
        if self.result is None:
            self.site.load_global(self.ledger.state)
            self.result = self.keeper.finish()
        return self.result

    def nothing(self) -> RunResult:
        """The result of a process that has none: a client's."""
        return RunResult(
            history=[],
            final={},
            outdir=self.outdir,
            model=self.site.model,
            base_changed=True,
            facts={"method": self.method.name, "client": self.index},
        )


def open_session(cfg) -> Session:
    """Make the session that the framework's configuration describes, in place of any before it.

    Raises:
        UserError: anything in it that is wrong.
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
        UserError: the framework was given data without asking ``get_data`` for them.
    """
    if _current is None:
        raise UserError("this method needs its data from the framework's get_data(cfg), which was not called")
    return _current


def asked_for(model_type: str) -> Session | None:
    """The session, if it is what a model of this type is asked for."""
    return _current if _current is not None and _current.config.model.type == model_type else None


def close_session() -> None:
    """Forget the session, and with it its models; its folder is free for another run."""
    global _current
    if _current is not None:
        _current.keeper.release()
    _current = None


#: where a client's data come from and how they are divided; its own business where they are its own
_WHOSE_DATA = (
    "data.root",
    "data.type",
    "data.args",
    "data.splitter",
    "data.splitter_args",
    "data.splits",
    "data.subsample",
)


def differing(theirs: Config, mine: Config, own_data: bool = False) -> list[str]:
    """The dotted keys that decide the result and in which two processes of one run differ.

    Args:
        own_data: what they read is their own: it may differ.
    """
    a, b = theirs.decisive(), mine.decisive()
    free = ("distribute.", *(_WHOSE_DATA if own_data else ()))
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k) and not k.startswith(free))


def _hash(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().flatten()
    digest = hashlib.sha256(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
    digest.update(plain.view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
