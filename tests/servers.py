"""A server without files and data, for tests of what it does in a round."""

from __future__ import annotations

from typing import Any

from fs_lowrank.methods import Method, State
from fs_lowrank.rounds.ledger import Ledger
from fs_lowrank.settings import Settings
from fs_lowrank.settings.sections import Federate, Lowrank


def ledger_of(
    method: Method,
    state: State,
    clients: int,
    per_round: int = -1,
    *,
    seed: int = 0,
    sizes: Any = (),
    keep_messages: bool = True,
    **lowrank: Any,
) -> Ledger:
    """The ledger of a run of 9 rounds with so many clients, of which all or ``per_round`` take part in a round.

    Args:
        sizes: of their training sets. lowrank: further keys of that section.
    """
    federate = Federate(client_num=clients, sample_client_num=per_round, total_round_num=9)
    settings = Settings(seed=seed, federate=federate, lowrank=Lowrank(**lowrank))
    return Ledger(settings, method, state, sizes, keep_messages)
