"""The distance between the product of the averaged A and B and the average of the products, by its possible causes.

Chen et al., "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA", section 1 and Table 1: with
more clients LoRA loses accuracy, because its server averages A and B separately. In each round, B_k and A_k are
the matrices that the clients send, B̄ and Ā their weighted means, and B and A those at the start of the round:

    e = ‖B̄ Ā − mean(B_k A_k)‖ / ‖mean(B_k A_k) − B A‖

over all adapted layers together. RoLoRA, FFA-LoRA and FLoRA have e = 0 by construction. The study varies clients, local
steps, learning rate, rank and optimizer. The error e does not measure accuracy; compare runs that average exactly
(FlexLoRA in the suite ``glue``). It decreases during a run. The number of rounds does not depend on the local steps.

Differs from the paper: MiniLM on the four-domain sentiment data (``fs-lowrank fetch minilm sentiment``), as the small
size of the suite ``glue``; ``key value`` at the end sets any other config.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import fs_lowrank
from benchmark.script import script
from fs_lowrank import Config
from fs_lowrank.models.names import pairs

from . import ServerStep, panels, seeds_option, watched_run

#: the fetched data and models
NEEDS = ("minilm", "sentiment")
BASE = {
    "data": {"type": "sentiment", "splitter": "iid", "subsample": 0.1, "splits": [0.93, 0.02, 0.05]},
    "model": {"type": "minilm@transformers"},
    "llm": {
        "tok_len": 24,
        "adapter": {"args": [{"r": 4, "alpha": 16, "modules": ["query", "value"], "layers": [4, 5]}]},
    },
    "federate": {"method": "fedlora", "client_num": 10},
    "dataloader": {"batch_size": 4},
    "train": {"local_update_steps": 4, "optimizer": {"type": "AdamW", "lr": 1e-2}},
    "eval": {"freq": 1000, "split": ["test"], "batch_size": 64},
}
_LR, _STEPS = "train.optimizer.lr", "train.local_update_steps"
#: axis -> label -> the keys that differ from BASE
VARIED: dict[str, dict[str, dict]] = {
    "clients": {"3": {"federate.client_num": 3}, "10": {}, "50": {"federate.client_num": 50}},
    "local steps": {"4": {}, "20": {_STEPS: 20}, "80": {_STEPS: 80}},
    "learning rate, 20 steps": {
        "0.001": {_STEPS: 20, _LR: 1e-3},
        "0.003": {_STEPS: 20, _LR: 3e-3},
        "0.01": {_STEPS: 20},
        "0.03": {_STEPS: 20, _LR: 3e-2},
    },
    "rank": {"1": {"llm.adapter.args.0.r": 1}, "4": {}, "8": {"llm.adapter.args.0.r": 8}},
    "optimizer, 20 steps": {
        "AdamW 0.01": {_STEPS: 20},
        "SGD 0.1": {_STEPS: 20, "train.optimizer.type": "SGD", _LR: 0.1},
    },
}


def relative_error(step: ServerStep) -> float:
    """``e`` of the module's docstring, in float64; 0 if no client changed."""
    error = change = 0.0
    for b, a in pairs(step.before):
        exact = sum(w * (t[b].double() @ t[a].double()) for w, t in zip(step.weights, step.tensors))
        error += (step.mean[b].double() @ step.mean[a].double() - exact).square().sum().item()
        change += (exact - step.before[b].double() @ step.before[a].double()).square().sum().item()
    return (error / change) ** 0.5 if change else 0.0


def study(
    rounds: int,
    seeds: int,
    overrides: Sequence[str] = (),
    base: Mapping = BASE,
    varied: Mapping[str, Mapping[str, Mapping]] = VARIED,
) -> dict[str, Any]:
    """The result of the command as plain data."""
    entries = runs(fs_lowrank.load_config(base, overrides), varied, rounds, seeds)
    return {
        "base": base,
        "overrides": overrides,
        "varied": varied,
        "rounds": rounds,
        "seeds": seeds,
        "means": means(entries),
        "runs": entries,
    }


def runs(base: Config, varied: Mapping[str, Mapping[str, Mapping]], rounds: int, seeds: int) -> list[dict[str, Any]]:
    """One run of LoRA per setting and seed, with ``e`` of every round and the final test accuracy."""
    entries: list[dict[str, Any]] = []
    memo: dict[str, tuple[float, list[float]]] = {}
    for axis, labels in varied.items():
        for label, keys in labels.items():
            for seed in range(seeds):
                key = json.dumps([keys, seed], sort_keys=True)
                if key not in memo:
                    config = base.replace({**keys, "federate.method": "fedlora"})
                    memo[key] = watched_run(config, rounds, seed, relative_error)
                score, errors = memo[key]
                entries.append({"axis": axis, "label": label, "seed": seed, "errors": errors, "test_acc": score})
    return entries


def means(entries: list[dict]) -> dict[str, dict[str, dict]]:
    """Axis -> label -> the mean error over rounds and seeds, and the mean accuracy."""
    by_axis: dict[str, dict[str, dict]] = {}
    for entry in entries:
        group = [e for e in entries if (e["axis"], e["label"]) == (entry["axis"], entry["label"])]
        by_axis.setdefault(entry["axis"], {})[entry["label"]] = {
            "error": statistics.fmean(error for e in group for error in e["errors"]),
            "test_acc": statistics.fmean(e["test_acc"] for e in group),
        }
    return by_axis


def plot(result: dict):
    figure, axes = panels(len(result["means"]), 3 * len(result["means"]), 3.6, sharey=True)
    for axis, (name, labels) in zip(axes, result["means"].items()):
        axis.bar(list(labels), [v["error"] for v in labels.values()], color="C0")
        for at, label in enumerate(labels):
            axis.plot(
                [at] * result["seeds"],
                [statistics.fmean(r["errors"]) for r in result["runs"] if (r["axis"], r["label"]) == (name, label)],
                "k.",
                ms=4,
            )
        axis.set_title(name)
        axis.grid(False, axis="x")
        axis.tick_params("x", labelrotation=20 if max(map(len, labels)) > 5 else 0)
    axes[0].set_ylabel("error of averaging A and B apart\n÷ change of the product in a round")
    figure.suptitle(f"LoRA, mean over {result['rounds']} rounds (dots: seeds)")
    return figure


OPTIONS: dict[str, dict[str, Any]] = {
    "--rounds": dict(type=int, default=8),
    "--seeds": seeds_option(2),
    "overrides": dict(nargs="*", metavar="KEY VALUE", help="any other config, for all runs"),
}
main = script(__spec__.name, __doc__, OPTIONS, study, plot=plot)


if __name__ == "__main__":
    raise SystemExit(main())
