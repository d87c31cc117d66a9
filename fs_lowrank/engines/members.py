"""Clients that come to the server by themselves, each a process with a copy of the model: which of them take part."""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..algebra import digest
from ..config import Config
from ..data.build import LONGEST
from ..errors import DamagedFile, UserError
from ..jobs.files import read_json, to_json, write_text
from ..rounds.admission import is_whole
from ..rounds.joining import objection, proof_of, reported_standing, samples_objection
from ..rounds.ledger import Ledger, Standing
from ..rounds.parcel import Parcel
from ..rounds.round import Order
from ..rounds.transport import Lost, Transport
from ..rounds.workspace import Workspace

logger = logging.getLogger("fs_lowrank")
#: characters of a refusal, which has words of the client's
_MAX_TEXT = 1000


def memory_of(root: Path, identity: str, client: int) -> Path:
    """The folder below ``root`` for the state of ``client`` in the run ``identity``; other runs have others."""
    return root / f"run_{digest({}, identity)[:16]}" / f"client_{client}"


@dataclass
class Member:
    """A client that takes part.

    Attributes:
        process: its process, as the transport has it: the number of a node, or a ``Seat``.
        standing: of its copy of the model, as it reported last.
        agreed: the hash ``joining.agreed``, as it reported when it joined.
    """

    process: Any
    standing: Standing
    agreed: str


class Members(Transport):
    """A transport whose clients introduce themselves (``Node.introduction``), and name themselves with every answer.

    Args:
        config: of the run. folder: for the run's token. elsewhere: how a client says that its data are its own.

    Attributes:
        members: the clients that have joined, by number.
        token: tells this run from others of its configuration; clients store it with their copies.
    """

    def __init__(self, config: Config, folder: Path, elsewhere: str):
        self.config, self.folder, self.elsewhere = config, folder, elsewhere
        self.members: dict[int, Member] = {}

    def begin(self, workspace: Workspace, ledger: Ledger, resumed: bool) -> None:
        self.workspace, self.ledger, self.proof = workspace, ledger, proof_of(workspace)
        self.token = self.own_token(resumed, personal=bool(workspace.personal.untrained))

    def own_token(self, resumed: bool, personal: bool) -> str:
        """The token of the run that is resumed, or a new one.

        Raises:
            UserError: it cannot be read again, and clients would lose their personal parts.
        """
        path = self.folder / "run.json"
        if resumed:
            try:
                return str(read_json(path, remedy="")["run"])
            except (DamagedFile, KeyError) as error:
                reason = str(error) if isinstance(error, DamagedFile) else f"{path} cannot be read: there is no {error}"
            if personal:
                raise UserError(
                    f"{reason}; without it the clients' personal parts are not found again: restore the file, or start "
                    "anew in another outdir"
                )
            logger.warning("%s; the clients' copies start anew and are sent everything", reason)
        shutil.rmtree(self.folder, ignore_errors=True)
        token = secrets.token_hex(8)
        self.folder.mkdir(parents=True)
        write_text(path, to_json({"run": token}))
        return token

    def refusal(self, facts: Mapping[str, Any]) -> str:
        """Why a client that introduces itself with ``facts`` cannot take part; empty if it can."""
        client, own_data, agreed = facts.get("client"), facts.get("own_data") is True, facts.get("agreed")
        if not is_whole(client) or not 1 <= client <= self.config.federate.client_num:
            return f"there is no client {client!r:.60}; federate.client_num is {self.config.federate.client_num}"
        theirs: list[Any] = [facts.get(name) for name in ("config", "revisions", "proof")]
        if not all(isinstance(part, dict) for part in theirs) or not isinstance(agreed, str):
            return f"client {client}: it does not say what it has in common with the server"
        reason = objection(self.config, self.proof, theirs[0], theirs[1], theirs[2], own_data)
        reason = reason or samples_objection(
            client, facts.get("samples"), self.ledger.admission, own_data, elsewhere=self.elsewhere
        )
        return f"client {client}: {reason}"[:_MAX_TEXT] if reason else ""

    def welcome(self, facts: Mapping[str, Any], process: Any) -> None:
        """Let a client take part for which there is no ``refusal``."""
        client, admission = facts["client"], self.ledger.admission
        admission.samples[client] = facts["samples"]
        self.ledger.tested.pop(client, None)
        if facts.get("own_data") is True:
            rows = admission.max_samples
            bounds = {"tested": rows, "tested_tokens": rows * LONGEST}  # a client's own texts may be longer than ours
            samples, tokens = (n if is_whole(n := facts.get(k)) and 0 < n <= most else 0 for k, most in bounds.items())
            size = {"samples": samples, **({"tokens": tokens} if tokens else {})}
            self.ledger.tested[client] = size if samples else {}
        self.members[client] = Member(process, reported_standing(facts), facts["agreed"])

    def standing(self, client: int) -> Standing:
        return self.members[client].standing

    def checked(self, order: Order, answer: Parcel) -> Parcel | Lost:
        """``answer``, unless the process that gave it is not the one that has joined."""
        member, failed = self.members[order.client], "error" in answer.facts
        # A process that cannot even read its configuration reports no hash, and has no update either.
        if answer.facts.get("agreed", member.agreed if failed else None) != member.agreed:
            del self.members[order.client]  # so that it introduces itself again, and is told the difference
            return Lost("refused", "it has another number, configuration or base model than when it joined")
        member.standing = reported_standing(answer.facts)
        return answer
