"""The clients' side of a round: a copy of the model that follows the server's messages, and what it answers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..algebra import FlatTensors
from ..errors import UserError
from ..methods import Method, Update
from ..models.adapters import load_tensors
from ..models.names import named_tensors
from ..runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from .codec import Codec
from .ledger import Standing
from .parcel import Parcel
from .personal import PersonalParts

logger = logging.getLogger("fs_lowrank")


class LostCopy(RuntimeError):
    """A message goes on from another round than the one where the client's copy stands."""


class SharedCopy:
    """A client whose model is everyone's: before it trains, its tensors are put in.

    Args:
        method: what trains the copy.
        model: everyone's.
        client: whose copy it is.
        personal: where its personal tensors are kept.
    """

    def __init__(self, method: Method, model: nn.Module, client: int, personal: PersonalParts):
        self.method, self.model, self.client, self.personal = method, model, client, personal

    def catch_up(self, parcel: Parcel) -> None:
        """Put the client's tensors into the model; the parcel holds all the shared ones."""
        load_tensors(self.model, parcel.tensors)
        self._load_personal(parcel)

    def _load_personal(self, parcel: Parcel) -> None:
        facts = parcel.facts
        if "undo" in facts:
            self.personal.undo(self.client, facts["undo"])
        if facts["purpose"] == "train":
            self.personal.undo(self.client, facts["round"])  # a server that was resumed asks once more
        load_tensors(self.model, self.personal.of(self.client))

    def keep_personal(self, round: int) -> None:
        """It has trained in ``round``."""
        self.personal.keep(self.client, round, copied(self.model, self.method.personal))


class OwnCopy(SharedCopy):
    """A client with a model of its own, which stands at the end of some round.

    What its training changes is put back before the next message, so that a message meets the copy that the
    server thinks it has. ``save`` and ``restore`` are for a process that does not live from one message to the next.

    Args:
        model: as the method adapted it, which is where it stands at round 0.
        codec: how messages travel.
        identity: of the run; what another run has saved is not restored.
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
        super().__init__(method, model, client, personal)
        self.codec, self.identity = codec, identity
        #: what to tell ``Round.ask``
        self.standing = Standing()
        load_tensors(model, method.view(method.initial_state(model), client))
        #: the shared tensors at ``standing``
        self.shared = copied(model, method.shared)
        self._saved = 0

    def catch_up(self, parcel: Parcel) -> None:
        """Apply what came, up to the end of the round ``stands``.

        Raises:
            LostCopy: what came goes on from another round than the copy's.
        """
        facts = parcel.facts
        load_tensors(self.model, self.shared)
        stands = facts["stands"]
        device = next(self.model.parameters()).device
        tensors: Mapping[str, Tensor] = {n: t.to(device) for n, t in parcel.tensors.items()}
        if facts.get("whole"):
            load_tensors(self.model, tensors)
        elif stands != self.standing.round:
            if facts["since"] != self.standing.round:
                raise LostCopy(
                    f"its copy of the model stands at round {self.standing.round}, and what it was sent goes on from "
                    f"round {facts['since']}"
                )
            if facts.get("encoded"):
                tensors = self.codec.decode(tensors, self.shared)
            with torch.no_grad():
                self.method.apply(self.model, tensors, stands)
        if facts.get("whole") or stands != self.standing.round:
            self.shared = copied(self.model, self.method.shared)
        self.standing = Standing(stands, facts.get("stamp") or "")
        self._load_personal(parcel)

    def save(self, folder: Path) -> None:
        """Write what the client must remember; ``restore`` in another process goes on from it.

        Raises:
            RunFailed: it could not be written; what was saved before is as it was.
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
        """Go on from what ``save`` wrote. False, and a warning, where that is damaged or of another run.

        The copy then stands at round 0, and the client's personal tensors start anew.
        """
        # What is saved from here on comes after all that lies there, whatever becomes of it.
        self._saved = max((int(path.name.rpartition("_")[2]) for path in folder.glob("round_*")), default=0)
        found = _saved(folder, self.client, self.identity)
        if found is None:
            return False
        meta = found.meta
        device = next(self.model.parameters()).device
        parts = {what: {n: t.to(device) for n, t in part.items()} for what, part in found.parts.items()}
        load_tensors(self.model, {**parts.get("base", {}), **parts["shared"]})
        self.shared, self.standing = parts["shared"], Standing(*meta["standing"])
        if "personal" in parts:
            self.personal[self.client] = parts["personal"]
        if meta["trained"]:
            self.personal.before[self.client] = meta["trained"], parts.get("before")
        return True


def standing_in(folder: Path, client: int, identity: str) -> Standing:
    """What a copy that ``OwnCopy.save`` wrote says of itself, without a model to restore it into.

    One that is missing, damaged or of another run stands at round 0, as ``OwnCopy.restore`` would leave it.
    """
    found = _saved(folder, client, identity)
    return Standing() if found is None else Standing(*found.meta["standing"])


def _saved(folder: Path, client: int, identity: str) -> Checkpoint | None:
    """What ``client`` saved in ``folder``; None, and a warning, where that is damaged or of another run."""
    try:
        found = load_checkpoint(folder)
    except UserError:
        logger.warning("client %d: what it saved in %s is damaged; it starts anew", client, folder)
        return None
    if found is not None and (found.meta["client"], found.meta["identity"]) != (client, identity):
        logger.warning(
            "client %d: what is saved in %s is of client %s of another run; it starts anew",
            client,
            folder,
            found.meta["client"],
        )
        return None
    return found


def copied(model: nn.Module, wanted: Iterable[str]) -> dict[str, Tensor]:
    """A copy of the model's tensors that carry one of the ``wanted`` tags."""
    return {n: p.detach().clone() for n, p in named_tensors(model, wanted).items()}


def changed_base(method: Method, model: nn.Module) -> dict[str, Tensor]:
    """The base weights of ``model`` that ``method`` has changed by now (``Method.changed_base``), not copied."""
    changed = set(method.changed_base(model))
    return {n: p.detach() for n, p in model.named_parameters() if n in changed}


def answer(round: int, update: Update, loss: float, codec: Codec) -> Parcel:
    """What a client sends after its training in ``round``; a copy, because the update holds its model's own tensors."""
    flat = len({t.dtype for t in update.tensors.values()}) == 1
    tensors = FlatTensors.pack(update.tensors) if flat else {n: t.clone() for n, t in update.tensors.items()}
    return Parcel(codec.encode(tensors), round=round, samples=update.num_samples, loss=loss)


def apology(round: int, error: Exception) -> Parcel:
    """What a client sends that could not train in ``round``."""
    text = str(error) if isinstance(error, (UserError, LostCopy)) else f"{type(error).__name__}: {error}"
    return Parcel({}, round=round, error=text, lost=isinstance(error, LostCopy))
