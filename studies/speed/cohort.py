"""Speed of the local steps of a cohort, whose clients train in one pass (``train.cohort``), relative to the same steps
client by client; of a last layer that is computed for what the loss reads alone (``train.only_read``); and of batches
in blocks of similar length (``train.blocks``) inside a cohort. The states of the frozen layers are kept in all.

Each gain is relative to the same steps without this one thing. Needs: fs-lowrank fetch minilm sentiment.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmark.execute import threads
from benchmark.script import script
from fs_lowrank import Config, load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.models.adapters import load_tensors
from fs_lowrank.models.shortcuts.frozen import FrozenPrefix
from fs_lowrank.training import train_client
from fs_lowrank.training.cohort import Member, train_cohort

from . import difference, race, row, row_lines, table

#: clients that train together
CLIENTS = 7
MINILM = {
    "federate": {"method": "rolora", "client_num": 2, "total_round_num": 1},
    "data": {"type": "sentiment", "splits": [0.9, 0.0, 0.1]},
    "model": {"type": "minilm@transformers"},
    "llm": {"adapter": {"args": [{"r": 4, "alpha": 8, "modules": ["query", "value"], "layers": [4, 5]}]}},
    "train": {"local_update_steps": 3, "optimizer": {"type": "SGD", "lr": 0.05}},
    "eval": {"split": ["test"]},
}
#: form -> the form that it is compared with, and the name of the ratio
COMPARED = {
    "together": ("alone", "one by one ÷ together"),
    "only what is read": ("together", "the last layer for all positions ÷ for the positions read"),
    "in blocks": ("only what is read", "whole batches ÷ blocks of similar length"),
}


def measure(config: Config, repeats: int, clients: int = CLIENTS) -> dict[str, Any]:
    """``train.local_update_steps`` steps of each of ``clients`` in turn: alone, and together in three forms.

    The samples are the first of the data, of whatever lengths.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = LocalEngine(config.replace(outdir=folder))
    workspace, model, method = engine.workspace, engine.model, engine.method
    data: Any = workspace.data.clients[0]
    rows = config.dataloader.batch_size * config.train.local_update_steps
    order = np.resize(np.arange(len(data)), clients * rows)
    sets = {f"client {i}": data.select(order[i::clients]) for i in range(clients)}
    prefix = FrozenPrefix(model, {*method.shared}, limit=4e9, changing=method.changed_base(model))
    prefix.plan({name: (examples, float("inf")) for name, examples in sets.items()}, data)
    start, lr = method.view(engine.ledger.state), config.train.optimizer.lr
    trained: dict[str, list[dict]] = {}

    def alone() -> None:
        trained["alone"] = []
        for seed, (name, examples) in enumerate(sets.items()):
            load_tensors(model, start)
            plain = config.replace(**{"train.blocks": 1})
            phases = method.phases(1, 1)
            train_client(model, examples, phases, plain, lr=lr, seed=seed, owner=name, prefix=prefix, reads=None)
            sent = method.upload(model, 1, workspace.clients[0])
            trained["alone"].append({n: t.detach().clone() for n, t in sent.items()})

    def together(form: str, reads: Any, blocks: int) -> None:
        changed = config.replace(**{"train.blocks": blocks})
        members = [Member(n, examples, method.phases(1, 1), i, changed) for i, (n, examples) in enumerate(sets.items())]
        names = {*method.shared, *method.personal}
        results = train_cohort(
            model, members, lambda i: load_tensors(model, start), names, changed, lr=lr, prefix=prefix, reads=reads
        )
        trained[form] = [tensors for _, tensors in results]

    forms: dict[str, Callable[[], object]] = {"alone": alone, "together": partial(together, "together", None, 1)}
    forms["only what is read"] = partial(together, "only what is read", workspace.reads, 1)
    forms["in blocks"] = partial(together, "in blocks", workspace.reads, 0)
    steps = clients * config.train.local_update_steps
    seconds = {name: total / steps for name, total in race(forms, repeats).items()}
    batches = [examples.lengths[: config.dataloader.batch_size] for examples in sets.values()]
    return {
        "clients": clients,
        "seconds_a_clients_step": seconds,
        "only_read": bool(workspace.reads),
        "speed_up": {form: seconds[base] / seconds[form] for form, (base, _) in COMPARED.items()},
        "padding": 1 - sum(float(b.sum()) for b in batches) / sum(len(b) * int(b.max()) for b in batches),
        "difference": {
            form: max(difference({n: ours[n] for n in theirs}, theirs) for ours, theirs in zip(sent, trained["alone"]))
            for form, sent in trained.items()
        },
    }


def study(repeats: int) -> dict[str, Any]:
    """The result of the command, as plain data."""
    rows, results = [], {}
    for tokens, batch in ((20, 4), (64, 16)):
        name = f"MiniLM, 2 of 6 layers adapted, {batch} × {tokens} tokens"
        config = load_config(MINILM, {"llm.tok_len": tokens, "dataloader.batch_size": batch})
        with threads(1):
            result = results[name] = measure(config, repeats)
        step = {form: f"{1e3 * seconds:.4g} ms" for form, seconds in result["seconds_a_clients_step"].items()}
        for form, (base, words) in COMPARED.items():
            note = f"{step[base]} ÷ {step[form]}; {result['padding']:.0%} of a whole batch are padding"
            figure = f"a client's local step, {CLIENTS} clients: {words}"
            rows.append(row(name, figure, result["speed_up"][form], note, result["difference"][form]))
    return {"threads": 1, "rows": rows, "results": results}


OPTIONS = {"--repeats": dict(type=int, default=7)}
main = script(__spec__.name, __doc__, OPTIONS, study, lines=row_lines, readme=table, out="results/speed")


if __name__ == "__main__":
    raise SystemExit(main())
