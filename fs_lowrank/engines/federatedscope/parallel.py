"""Runs by the loop of all engines in place of the framework's flow: of several processes, standalone or distributed.

Standalone with ``federate.process_num`` P, P processes train (``engines.pool``). The framework's own runner needs as
many GPUs, and a state dict of one shape in every message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from federatedscope.core.auxiliaries.utils import add_prefix_to_path

from ...callbacks import callbacks_of
from ...config import Config
from ...errors import UserError
from ...rounds.codec import codec_of
from ...rounds.intake import Intake
from ...rounds.ledger import Ledger
from ...rounds.loop import Loop
from ...rounds.parcel import Parcel
from ...rounds.round import Order
from ...rounds.site import Site
from ...rounds.transport import Transport
from ..pool import Processes, processes_of
from ..program import check_others
from . import saved
from .config import our_method
from .session import current
from .sums import intake_of


def drive(transport: Transport, cfg: Any, config: Config) -> None:
    """Run all rounds of the session over ``transport``; the session has the result.

    Args:
        cfg: the framework's configuration. config: ours, with the folder of the session.
    """
    session = current()
    callbacks = callbacks_of(config, session.callbacks)
    loop = Loop(config, transport, callbacks, session.on_round, session.on_client)
    if not session.resume and (session.outdir / loop.keeper.config_name).exists():
        loop.keeper.config_name = "lowrank.yaml"  # the framework has written its own
    file, freq, last = cfg.federate.save_to, cfg.federate.save_freq, cfg.federate.total_round_num

    def on_round(record: dict[str, Any]) -> object:
        number, history = record["round"], loop.keeper.history
        if file and saved.is_best(loop.evaluator, record["metrics"], history[:-1]):
            saved.save_state(file, loop.site, loop.ledger, number)
        if file and (number == last or freq > 0 and number % freq == 0):
            prefix = "final_" if number == last else f"{number}_"
            saved.save_state(add_prefix_to_path(prefix, file), loop.site, loop.ledger, number)
        return session.on_round(record)

    loop.on_round = on_round
    session.result = loop.run(session.resume)


def own_folder(config: Config) -> Config:
    """``config`` with the folder of the session, which the framework may have chosen."""
    outdir = current().outdir
    return config.replace(outdir=str(outdir.parent), expname=outdir.name)


class Parallel(Processes):
    """Processes that honour what the framework's configuration says of updates on their way."""

    def __init__(self, config: Config, count: int, cfg: Any):
        self.cfg, self.codec = cfg, codec_of(cfg.quantization.method, cfg.quantization.nbits)
        super().__init__(config, count)

    def begin(self, site: Site, ledger: Ledger, resumed: bool) -> None:
        if self.cfg.federate.restore_from and not resumed:
            saved.load_state(self.cfg.federate.restore_from, site, ledger)
        super().begin(site, ledger, resumed)

    def intake(self) -> Intake | None:
        assert self.site is not None
        # Within one machine nothing is hidden by shares; their sum is the mean of the updates.
        return None if self.cfg.federate.use_ss else intake_of(self.cfg, self.site)

    def exchange(self, orders: Iterable[Order]) -> Iterator[tuple[Order, Parcel]]:
        for order, answer in super().exchange(orders):
            yield order, Parcel(self.codec.encode(answer.tensors), **answer.facts)


class ParallelRunner:
    """In place of the framework's runner for several GPUs."""

    def __init__(self, *args: Any, config: Any, **kwargs: Any):
        self.cfg = config

    def run(self) -> dict[str, Any]:
        session, sampler = current(), self.cfg.federate.sampler
        if sampler != "uniform":
            raise UserError(f"federate.sampler = {sampler!r} needs one process; set federate.process_num 1")
        config = own_folder(session.config)
        if self.cfg.federate.process_num > 1:  # where there are so many GPUs
            config = config.replace({"federate.process_num": self.cfg.federate.process_num})
        check_others(config)
        drive(Parallel(config, processes_of(config), self.cfg), self.cfg, config)
        return {}


def choose_runner(frameworks: Any) -> Any:
    """A function that makes a ``ParallelRunner`` for our methods, and a runner of class ``frameworks`` for others."""

    def make(*args: Any, config: Any, **kwargs: Any) -> Any:
        ours = our_method(config.federate.method) is not None
        return (ParallelRunner if ours else frameworks)(*args, config=config, **kwargs)

    return make


def without_client_cfgs(frameworks: Any) -> Any:
    """A function that makes a runner; that of our methods, whose configuration has the settings of single clients
    already, is not given those of ``--client_cfg``."""

    def make(*args: Any, config: Any, client_configs: Any = None, **kwargs: Any) -> Any:
        others = our_method(config.federate.method) is None
        return frameworks(*args, config=config, client_configs=client_configs if others else None, **kwargs)

    return make
