"""Poisoned updates: for every method, one of three clients hands in an update that Hypothesis draws."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from . import hostile
from .bench import Bench, Ending, Outcome
from .child import HANG, limited
from .poisons import Answer, Poison, poison, poisons
from .tiny import settings as settings_of_run

SHARD = 50
#: of a case, which takes ``EXAMPLES`` steps of the server and trains the clients of each; of a step it is ``HANG``
LIMIT = 360.0
#: updates for each seed
EXAMPLES = 20
#: one of this many seeds also has a complete run from the command line, which is more than 2 % of the cases
HOSTILE_RUNS = 2

_SMALL = {"lowrank.epochs": 1, "lowrank.generator_steps": 1, "lowrank.images": 4, "lowrank.channels": 2}
#: further keys for methods that need them, or for which they lead to more code
_KEYS: dict[str, dict[str, Any]] = {
    "flexlora": {"lowrank.ranks": [1, 3, 2]},
    "flora": {"lowrank.ranks": [1, 3, 2]},
    "fedloru": {"lowrank.tau": 1},
    "pfedloru": {"lowrank.tau": 1},
    "mfedloru": {"lowrank.tau": 1},
    "pmfedloru": {"lowrank.tau": 1},
    "dense": _SMALL,
    "fedfisher": {"lowrank.steps": 20},
}


#: their rounds have several exchanges, whose refusals are in ``tests/rounds/test_exchanges.py``
_SEVERAL = ("fed_sb", "fedask")


@cache
def targets() -> list[tuple[str, str]]:
    """Every method of one exchange a round with every kind of model that it supports."""
    from fs_lowrank.methods import list_methods, requirements

    kinds = {"encoder": "SequenceClassification", "causal": "CausalLM", "vision": "ImageClassification"}
    methods = [method for method in list_methods() if method not in _SEVERAL]
    return [(m, kind) for m in methods for kind, task in kinds.items() if task in requirements(m).tasks]


@dataclass
class Server:
    """An engine before round 1, the honest updates of its clients, and the state after a round without each client."""

    engine: Any
    honest: dict[int, Answer]
    without: dict[int | None, dict[str, Any]]

    def ledger(self) -> Any:
        """A new ledger, in the state before round 1."""
        from fs_lowrank.rounds.ledger import Ledger

        e = self.engine
        e.workspace.load_global(e.workspace.initial_state)
        return Ledger(e.config, e.method, e.workspace.initial_state, e.workspace.sizes)


_SERVERS: dict[tuple[str, str], Server] = {}


def server_of(method: str, kind: str, bench: Bench) -> Server:
    """The server for a method and kind of model, created once per process; the clients are really trained."""
    if (method, kind) not in _SERVERS:
        from fs_lowrank import load_config
        from fs_lowrank.engines.local import LocalEngine
        from fs_lowrank.rounds.trainer import Trainer

        keys = {"federate.method": method, "kind": kind, **_KEYS.get(method, {})}
        with bench.place() as outdir:
            engine = LocalEngine(load_config(settings_of_run(bench.inputs, outdir, **keys)))
        workspace, trainer, honest = engine.workspace, Trainer(engine.workspace), {}
        for client in workspace.clients:
            workspace.load_client(workspace.initial_state, client.id)
            fitted = trainer.fit(workspace.task(client.id, 1), workspace.model, workspace.prefix)
            tensors = {n: t.detach().clone() for n, t in fitted.update.tensors.items()}
            facts = {"round": 1, "samples": fitted.update.num_samples, "loss": fitted.result.loss}
            honest[client.id] = Answer(client.id, tensors, facts)
        server = _SERVERS[method, kind] = Server(engine, honest, {})
        for left_out in (None, *honest):
            with limited(HANG):
                server.without[left_out] = _finished(server, left_out)
    return _SERVERS[method, kind]


def _finished(server: Server, left_out: int | None) -> dict[str, Any]:
    """The state after a round with the honest answers of all clients but one."""
    round = _asked(server)
    for client, answer in server.honest.items():
        if client == left_out:
            round.fail(client, "absent", "left out")
        else:
            _hand_in(round, answer)
    round.finish(server.engine.model)
    return round.ledger.state


def _asked(server: Server) -> Any:
    from fs_lowrank.rounds.round import Round

    round = Round(1, server.ledger())
    for client in round.selected:
        round.delivered(round.ask(client))
    return round


def _hand_in(round: Any, answer: Answer) -> bool:
    from fs_lowrank.rounds.parcel import Parcel

    parcel = Parcel(answer.tensors)
    parcel.facts = dict(answer.facts)
    return bool(round.take(answer.client, parcel))


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(v, b[n]) if isinstance(v, Tensor) else v == b[n] for n, v in a.items()
    )


def suffered(server: Server, client: int, changes: list[Poison]) -> tuple[Ending, str]:
    """How a round ends in which ``client`` hands in a poisoned answer, and the reason."""
    honest = server.honest[client]
    answer = Answer(honest.client, {n: t.clone() for n, t in honest.tensors.items()}, dict(honest.facts))
    poison(answer, changes)
    round, engine = _asked(server), server.engine
    before, order = round.ledger.state, [c for c in server.honest if c != client]
    took, taken = False, []
    for number in (client, *order):
        if number != client:
            _hand_in(round, server.honest[number])
            continue
        for _ in range(1 + answer.twice):
            try:
                took = _hand_in(round, answer)
            except Exception as error:
                return "failed", f"take raised {type(error).__name__}: {error}"
            taken.append(took)
    if len(taken) == 2 and taken[1]:
        return "failed", "the same answer was taken twice"
    took = any(taken)
    said = [f for f in round.failed if f["client"] == client]
    if took and answer.client is not client and answer.client != honest.client:
        return "failed", f"the answer of client {answer.client!r} was taken"
    if said and said[0]["kind"] not in ("refused", "failed"):
        return "failed", f"it counts as {said[0]['kind']}"
    if not took:
        round.fail(client, "absent", "nothing that can be used")
        _hand_in(round, honest)  # it is late and must not count
    if took and client in round.waiting:
        return "failed", "it was taken, and is waited for"
    for other in list(round.waiting):
        return "failed", f"client {other} is waited for, though it has answered"
    try:
        finished = round.finish(engine.model)
    except Exception as error:
        if type(error).__name__ != "BadRound":
            return "failed", f"finish raised {type(error).__name__}: {str(error)[:200]}"
        if "\n" in str(error) or round.ledger.state is not before:
            return "failed", f"a bad round in several lines, or with a changed state: {error}"
        return "refused", str(error)
    state = round.ledger.state
    if not took:
        if not equal(state, server.without[client]):
            return "failed", "it was refused, and yet the result is another"
        return "refused", said[0]["reason"] if said else "not asked for"
    if equal(state, server.without[None]):
        return "same", ""
    for name, value in {**state, **finished.message}.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return "failed", f"{name} of the state is not finite"
    model = copy.deepcopy(engine.model)
    with torch.no_grad():
        engine.method.apply(model, finished.message, 1)
    for name, value in model.named_parameters():
        if not bool(torch.isfinite(value).all()):
            return "failed", f"{name} of the model is not finite"
    try:
        seconds = {"training": 0.0, "aggregation": 0.0, "evaluation": 0.0}
        json.dumps(round.record({}, seconds), allow_nan=False)
    except ValueError as error:
        return "failed", f"the record of the round is no JSON: {error}"
    return "valid", "within its shape, its dtype and what is finite"


Drawn = tuple[tuple[str, str], int, list[Poison]]


def drawn(number: int) -> list[Drawn]:
    """What Hypothesis draws with the seed ``number``: method, kind of model, client and changes."""
    examples: list[Drawn] = []

    @seed(number)
    @settings(
        max_examples=EXAMPLES + 1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(targets()), st.integers(1, 3), st.lists(poisons, min_size=1, max_size=2))
    def note(target: tuple[str, str], client: int, changes: list[Poison]) -> None:
        examples.append((target, client, changes))

    note()
    return examples[1:]  # the first example is the simplest one, with any seed


def case(number: int, bench: Bench) -> list[Outcome]:
    outcomes: list[Outcome] = []
    logging.getLogger("fs_lowrank").setLevel(logging.CRITICAL)  # every refusal logs a warning
    examples = drawn(number)
    if number % HOSTILE_RUNS == 0:
        outcomes.append(hostile.run(number, examples[-1], _KEYS.get(examples[-1][0][0], {}), bench))
    for target, client, changes in examples:
        what = f"{target[0]} ({target[1]}), client {client}: {changes!r}"
        try:
            server = server_of(*target, bench)
            with warnings.catch_warnings(), limited(HANG):
                warnings.simplefilter("ignore")  # prototype features of torch that the poisons use
                ending, reason = suffered(server, client, changes)
        except Exception as error:
            ending, reason = "failed", f"{type(error).__name__}: {error}"
        outcomes.append(Outcome(ending, what[:400], reason[:400], target[0]))
    return outcomes
