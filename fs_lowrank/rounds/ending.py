"""The end of a round in the process that has the server's state and model; the same for every engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from ..algebra import nbytes
from .finite import BadRound
from .intake import TooFewClients
from .personal import PersonalParts
from .recorder import Recorder
from .round import Finished, Round

logger = logging.getLogger("fs_lowrank")


def end_round(round: Round, recorder: Recorder) -> Finished | None:
    """Finish ``round``, apply its message to the workspace's model, and undo training that does not count.

    None: the round goes on with another exchange, for which the clients in ``round.waiting`` are to be asked.

    Raises:
        RunFailed: too few clients, or the server step failed and ``lowrank.on_bad_round`` is stop. The state before the
            round is on disk, so that the run can be resumed.
    """
    workspace, ledger = recorder.workspace, round.ledger
    workspace.load_global(ledger.state)  # the model may hold the tensors of the last client
    try:
        if round.goes_on:
            round.go_on()
            return None
        finished = round.finish(workspace.model)
    except (TooFewClients, BadRound) as error:
        if isinstance(error, TooFewClients) or recorder.config.lowrank.on_bad_round == "stop":
            round.roll_back()
            _undo(round, round.trains, workspace.personal)
            raise recorder.stopped(round.number, error, round.failed) from error
        reason = f"round {round.number}: {error}"
        logger.warning("%s; the round is left out", reason)
        finished = round.leave_out(reason)
    _undo(round, finished.undone, workspace.personal)
    if finished.message is None:
        workspace.load_global(ledger.state)  # the server step may have changed the model
    else:
        with torch.no_grad():
            workspace.method.apply(workspace.model, finished.message, round.number)
        if round.base is not None:
            ledger.bound(nbytes(round.base()))
    return finished


def _undo(round: Round, clients: Iterable[int], personal: PersonalParts) -> None:
    for client in clients:
        personal.undo(client, round.number)
    personal.settle()
