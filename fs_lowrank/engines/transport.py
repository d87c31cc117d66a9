"""How an engine is written: a ``Transport``, over which ``run_over`` runs a configuration.

```python
class Mine(Transport):
    def exchange(self, orders):
        for order in orders:
            data = carry(order.client, order.parcel.to_bytes())  # to the client and back, as you like
            yield order, Lost("absent", "no answer") if data is None else Parcel.of(data)


def run(config, resume=False, on_round=None, on_client=None, callbacks=()):
    check_local(config)
    return run_over(Mine(), config, resume, on_round, on_client, callbacks)
```

A client answers with ``Node.obey``. An engine's module has the function ``run``; outside this package it is found
through the entry-point group ``fs_lowrank.engines``, by name. ``docs/guides/own_engine.md`` has a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..callbacks import Callback, callbacks_of
from ..config import Config
from ..rounds.joining import reported_standing
from ..rounds.ledger import Standing
from ..rounds.loop import Loop
from ..rounds.node import Node
from ..rounds.parcel import Parcel
from ..rounds.round import Order
from ..rounds.transport import Lost, Transport
from ..runs.folder import check_outdir
from ..runs.result import RunResult

__all__ = ["Lost", "Node", "Order", "Parcel", "Standing", "Transport", "reported_standing", "run_over"]


def run_over(
    transport: Transport,
    config: Config,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], object] | None = None,
    on_client: Callable[[int, int, int], object] | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run ``config`` over ``transport``; an engine's ``run`` calls it when it has checked the configuration.

    Args:
        resume: continue from the last checkpoint in the run's folder, if there is one.
        on_round, on_client, callbacks: see ``fs_lowrank.run``.
    Raises:
        UserError: the folder holds another run, or cannot be continued with this configuration.
        RunFailed: something cannot be written, too few clients remain, or another run writes to the folder.
    """
    check_outdir(config, resume)
    return Loop(config, transport, callbacks_of(config, callbacks), on_round, on_client).run(resume)
