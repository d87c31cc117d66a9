"""The clients' side of a round: a copy of the model that follows the server's messages, and the client's answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..algebra import on_device
from ..errors import CannotContinue, UserError, described
from ..methods import Method, Tensors
from ..models.adapters import load_tensors
from ..models.machine import input_device
from ..models.names import all_tensors, named_tensors
from ..runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, saved_rounds
from .codec import Codec
from .ledger import Standing
from .parcel import Parcel
from .personal import PersonalParts
from .task import Task

logger = logging.getLogger("fs_lowrank")


class LostCopy(RuntimeError):
    """A message continues from another round than the standing of the client's copy."""


class OwnCopy:
    """A client with a model of its own, which is up to date to the end of some round.

    Changes by local training are reset before the next message is applied, so that the copy is the one that the server
    assumes. ``save`` and ``restore`` are for a process that ends after every message.

    Args:
        method: the federated method. client: the number of the client. personal: holds its personal tensors.
        model: as the method adapted it; this is the copy at round 0.
        codec: how messages travel.
        identity: of the run; a copy that another run has saved is not restored.

    Attributes:
        standing: for ``Round.ask``.
        shared: the shared tensors at ``standing``.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        client: int,
        personal: PersonalParts,
        codec: Codec,
        identity: str = "",
    ):
        self.method, self.model, self.client, self.personal = method, model, client, personal
        self.codec, self.identity = codec, identity
        self.standing = Standing()
        load_tensors(model, method.view(method.initial_state(model), client))
        self.shared = copied(model, method.shared)
        self._saved = 0

    def catch_up(self, parcel: Parcel) -> Tensors | None:
        """Apply a message, up to the end of its round ``stands``, or load the tensors that the client is told.

        Returns:
            These tensors; None in the first exchange of a round.

        Raises:
            LostCopy: the message continues from another round than the copy's, or the client is to go on in a round
                and has lost its earlier work in it.
        """
        facts = parcel.facts
        load_tensors(self.model, self.shared)
        stands = facts["stands"]
        tensors: Mapping[str, Tensor] = on_device(parcel.tensors, input_device(self.model))
        if facts.get("encoded"):
            tensors = self.codec.decode(tensors, self.shared)
        if facts.get("whole"):
            load_tensors(self.model, tensors)
        elif stands != self.standing.round:
            if facts["since"] != self.standing.round:
                raise LostCopy(
                    f"its copy of the model is at round {self.standing.round}, and the message goes on from "
                    f"round {facts['since']}"
                )
            with torch.no_grad():
                self.method.apply(self.model, tensors, stands)
        if facts.get("whole") or stands != self.standing.round:
            self.shared = copied(self.model, self.method.shared)
        self.standing = Standing(stands, facts.get("stamp") or "")
        if "undo" in facts:
            self.personal.undo(self.client, facts["undo"])
        if "told" in facts:
            if self.personal.before.get(self.client, (0, None))[0] != facts["round"]:
                raise LostCopy(f"it has lost its earlier answer in round {facts['round']}")
        else:
            if facts["purpose"] == "train":
                self.personal.undo(self.client, facts["round"])  # a resumed server repeats the round
            self.personal.leave_part(self.client)  # it may have been stopped between two exchanges
        load_tensors(self.model, self.personal.of(self.client))
        if "told" not in facts:
            return None
        load_told(self.model, tensors)
        return tensors

    def save(self, folder: Path) -> None:
        """Write the client's state; ``restore`` in another process continues from it.

        Raises:
            RunFailed: it could not be written; the state that was saved before is unchanged.
        """
        trained, before = self.personal.before.get(self.client, (0, None))
        parts: dict[str, Mapping[str, Tensor]] = {
            "shared": self.shared,
            "base": changed_base(self.method, self.model),
            "personal": self.personal.get(self.client, {}),
            "before": before or {},
        }
        meta = {"client": self.client, "identity": self.identity, "standing": list(self.standing), "trained": trained}
        save_checkpoint(folder, self._saved + 1, {n: p for n, p in parts.items() if p}, meta, keep=1)
        self._saved += 1

    def restore(self, folder: Path) -> bool:
        """Continue from the state that ``save`` wrote; returns whether that was possible.

        If there is none, or a warning says that it is damaged or of another run, the copy is at round 0 and the
        client's personal tensors start anew.
        """
        # Later saves get higher numbers than all folders that exist, even if those cannot be read.
        self._saved = max(saved_rounds(folder), default=0)
        saved = _saved(folder, self.client, self.identity, input_device(self.model))
        if saved is None:
            return False
        meta, parts = saved.meta, saved.parts
        load_tensors(self.model, {**parts.get("base", {}), **parts["shared"]})
        self.shared, self.standing = parts["shared"], Standing(*meta["standing"])
        if "personal" in parts:
            self.personal[self.client] = parts["personal"]
        if meta["trained"]:
            self.personal.before[self.client] = meta["trained"], parts.get("before")
        return True


def standing_in(folder: Path, client: int, identity: str) -> Standing:
    """The standing of a copy that ``OwnCopy.save`` wrote, without a model to restore it into.

    Round 0 if it is missing, damaged or of another run, as after ``OwnCopy.restore``.
    """
    saved = _saved(folder, client, identity)
    return Standing() if saved is None else Standing(*saved.meta["standing"])


def personal_in(folder: Path, client: int, identity: str, undo: int | None = None) -> dict[str, Tensor] | None:
    """The personal tensors of a copy that ``OwnCopy.save`` wrote; None if there are none.

    Args:
        undo: a round whose training does not count (``Ledger.undone``).
    """
    saved = _saved(folder, client, identity)
    if saved is None:
        return None
    undone = undo is not None and saved.meta["trained"] >= undo
    return saved.parts.get("before" if undone else "personal")


def _saved(folder: Path, client: int, identity: str, device: torch.device | str = "cpu") -> Checkpoint | None:
    """The state of ``client`` in ``folder``; None, with a warning, if it is damaged or of another run."""
    try:
        saved = load_checkpoint(folder, device)
    except CannotContinue:
        logger.warning("client %d: what it saved in %s is damaged; it starts anew", client, folder)
        return None
    if saved is not None and (saved.meta["client"], saved.meta["identity"]) != (client, identity):
        other = saved.meta["client"]
        logger.warning("client %d: %s was saved by client %s of another run; it starts anew", client, folder, other)
        return None
    return saved


def copied(model: nn.Module, tagged: Iterable[str]) -> dict[str, Tensor]:
    """A copy of the model's tensors that have one of the tags ``tagged``."""
    return {n: p.detach().clone() for n, p in named_tensors(model, tagged).items()}


def load_told(model: nn.Module, told: Tensors) -> None:
    """Load those tensors of ``told`` into ``model`` that it has."""
    load_tensors(model, {n: told[n] for n in told.keys() & all_tensors(model).keys()})


def own_tensors(method: Method, model: nn.Module, task: Task) -> dict[str, Tensor]:
    """A copy of the tensors that stay with the client of ``task`` once ``model`` has done it.

    These are its personal tensors, and while the round goes on those that it trains in it, or was told.
    """
    if not task.goes_on:
        return copied(model, method.personal)
    trained = {tag for phase in task.phases for tag in phase.train}
    told = {n: t.detach().clone() for n, t in all_tensors(model).items() if n in task.told}
    return copied(model, {*method.personal, *trained}) | told


def changed_base(method: Method, model: nn.Module) -> dict[str, Tensor]:
    """The base weights of ``model`` that ``method`` has changed by now (``Method.changed_base``), not copied."""
    changed = set(method.changed_base(model))
    return {n: p.detach() for n, p in model.named_parameters() if n in changed}


def apology(round: int, error: Exception) -> Parcel:
    """The answer of a client that could not train in ``round``."""
    readable = isinstance(error, (UserError, LostCopy))
    text = str(error) if readable else described(error)
    return Parcel({}, round=round, error=text, lost=isinstance(error, LostCopy))
