"""The end of a round where the server's state and its copy of the model are: the same for every engine."""

from __future__ import annotations

import torch

from ..errors import RunFailed
from .intake import TooFewClients
from .keeper import RecordKeeper
from .round import Finished, Round


def end_round(round: Round, keeper: RecordKeeper) -> Finished:
    """Finish ``round``: the model of the keeper's site follows, and nothing is left of training that did not count.

    Raises:
        RunFailed: too few clients; what stood before the round is on disk, so that the run can be resumed.
    """
    site, ledger = keeper.site, round.ledger
    site.load_global(ledger.state)  # what stands in the model may be the last client's
    try:
        finished = round.finish()
    except TooFewClients as error:
        for client in round.trains:
            site.personal.undo(client, round.number)
        raise RunFailed(f"{error}; {keeper.keep_last(round.number)}") from error
    for client in finished.undone:
        site.personal.undo(client, round.number)
    site.personal.settle()
    with torch.no_grad():
        site.method.apply(site.model, finished.message, round.number)
    return finished
