"""Accuracy against the learning rate for each method, and the cost of a search compared with the papers' grid.

    python -m studies.learning_rates [--out results/hpo] [--timeout SECONDS] [KEY VALUE …]

Two searches on the demo's task in a smaller setting: a grid of the RoLoRA paper's eight rates, and TPE over their range
with successive halving, where promoted trials continue from their checkpoints. The winners of both are run on the same
fresh seeds. Needs: fs-lowrank fetch minilm sentiment. The same command continues an interrupted run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpo.errors import NEEDS_OPTUNA

try:
    from optuna.storages import BaseStorage
except ImportError:
    raise SystemExit(NEEDS_OPTUNA) from None

from fs_lowrank import Config, load_config
from fs_lowrank.draw.figures import figure, save
from fs_lowrank.jobs import shell
from fs_lowrank.jobs.files import write_text
from fs_lowrank.settings import parse_overrides
from fs_lowrank.versions import SCHEMA
from hpo.best import budget_text, points_of, spread_text, summary
from hpo.plots import RATE, slice_panel
from hpo.search import kind
from hpo.space import at_an_end, load_space
from hpo.storage import load_study, open_storage, storage_errors
from hpo.tune import Search, tune

#: what differs from examples/demo.yaml: smaller sizes, and the validation data that a search needs
SMALLER = {
    "data.subsample": 0.06,
    "data.splits": [0.92, 0.03, 0.05],
    "llm.tok_len": 24,
    "dataloader.batch_size": 8,
    "federate.total_round_num": 12,
    "eval.freq": 2,
    "eval.split": ["val", "test"],
}
_RATE = "train.optimizer.lr"
METHODS = ("rolora", "ffa_lora", "fedlora")
#: The rungs compare losses: in the first rounds most accuracies are the share of one of the two classes, and a trial
#: that learns nothing may have the larger share. 42 % of the grid's rounds: 11 × 2, 3 × 4 and 1 × 6 of 8 × 12.
RUNGS, POINTS = (2, 6, 12), 11


def searches(folder: Path, workers: int) -> dict[str, tuple[str, Search]]:
    """Name -> the space and the search."""
    grid = Search("grid", folder=folder, workers=workers, confirm=0)
    halving = Search(
        "halving",
        folder=folder,
        workers=workers,
        confirm=0,
        sampler="tpe",
        rungs=RUNGS,
        trials=POINTS,
        objectives=("val_loss",),
    )
    return {"grid": ("rolora_lr", grid), "halving": ("rolora_lr_range", halving)}


def collect(config: Config, storage: BaseStorage, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The results of the studies as plain data."""
    methods: dict[str, Any] = {}
    for method in METHODS:
        found = {}
        for name in ("grid", "halving"):
            try:
                study = load_study(storage, f"{name}.{method}")
            except KeyError:
                continue
            facts = summary(storage, study.study_name)
            curve = sorted((p.point[_RATE], p.value, p.complete) for p in points_of(study))
            found[name] = {
                k: facts[k] for k in ("sampler", "pruner", "rungs", "budget", "trials", "winners", "failures")
            }
            (objective,) = facts["objectives"]
            found[name]["curve"] = [{"lr": lr, objective: value, "all_rounds": whole} for lr, value, whole in curve]
            found[name]["finished"] = not any(kind(t) in ("waiting", "running") for t in study.trials) and bool(
                facts["winners"]
            )
        methods[method] = found
    return {
        "command": " ".join(["python -m studies.learning_rates", *overrides]),
        "config": config.decisive(),
        "smaller": SMALLER,
        "methods": methods,
    }


def table(found: dict) -> str:
    """The results as Markdown."""
    rates = sorted({p["lr"] for m in found["methods"].values() for p in m.get("grid", {}).get("curve", ())})
    lines = [
        "# Learning rates",
        "",
        f"Written by `{found['command']}`; all figures in `learning_rates.json`.",
        "MiniLM on the demo's sentiment data, 24 clients, 7 a round, smaller than `examples/demo.yaml`: "
        + ", ".join(f"`{k} {v}`" for k, v in found["smaller"].items())
        + ".",
        "",
        "Validation accuracy after the last round, one seed:",
        "",
        "| learning rate | " + " | ".join(f"{r:g}" for r in rates) + " |",
        "| --- |" + " --- |" * len(rates),
    ]
    for method, studies in found["methods"].items():
        values = {p["lr"]: p["val_acc"] for p in studies.get("grid", {}).get("curve", ())}
        lines.append(f"| {method} | " + " | ".join(f"{values[r]:.3f}" if r in values else "–" for r in rates) + " |")
    missing = [
        f"{m} {n}"
        for m in METHODS
        for n in ("grid", "halving")
        if not found["methods"].get(m, {}).get(n, {}).get("finished")
    ]
    missing += [
        f"{m} {n}: fresh seeds"
        for m, studies in found["methods"].items()
        for n, s in studies.items()
        if s["finished"] and not (s["winners"][0]["confirmed"] or {}).get("metrics")
    ]
    if missing:
        lines += ["", f"**Unfinished**, and continued by the same command: {'; '.join(missing)}."]
    lines += [
        "",
        "Winners, on fresh seeds (mean ± standard deviation); the test data is evaluated there only:",
        "",
        "| method | search | learning rate | in the search | fresh seeds | val_acc | test_acc | "
        "client-steps | of the grid's |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method, studies in found["methods"].items():
        whole = studies.get("grid", {}).get("budget", {}).get("client_steps")
        for name, study in studies.items():
            steps = study["budget"]["client_steps"]
            share = f"{steps / whole:.0%}" if whole and studies["grid"]["finished"] else "–"
            unfinished = "" if study["finished"] else " (unfinished)"
            if not study["winners"]:
                lines.append(f"| {method} | {name}{unfinished} | – | – | – | – | – | {steps:,} | {share} |")
                continue
            winner = study["winners"][0]
            fresh = winner["confirmed"] or {"metrics": {}, "seeds": []}
            shown = [
                spread_text(fresh["metrics"][n]) if n in fresh["metrics"] else "–" for n in ("val_acc", "test_acc")
            ]
            value = ", ".join(f"{k} {v:.3f}" for k, v in winner["values"].items())
            lines.append(
                f"| {method} | {name}{unfinished} | {winner['point'][_RATE]:.4g} | {value} | "
                f"{len(fresh['seeds'])} | {shown[0]} | {shown[1]} | {steps:,} | {share} |"
            )
    ends = [
        f"{method} {name}"
        for method, studies in found["methods"].items()
        for name, study in studies.items()
        if study["winners"] and at_an_end(study["winners"][0]["point"], [{_RATE: p["lr"]} for p in study["curve"]])
    ]
    if ends:
        lines += ["", f"At an end of the rates tried, so a better one may lie beyond: {', '.join(ends)}."]
    lines += [""]
    for method, studies in found["methods"].items():
        lines += [f"- {method}, {name}: {budget_text(s['budget'])}" for name, s in studies.items()]
    return "\n".join([*lines, ""])


def _parser() -> tuple[argparse.ArgumentParser, Iterable[argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog="python -m studies.learning_rates",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("results/hpo"))
    parser.add_argument("--cfg", default="examples/demo.yaml")
    parser.add_argument("--dir", type=Path, default=Path("runs/hpo-learning-rates"))
    parser.add_argument("--workers", type=shell.at_least(0), default=2)
    parser.add_argument("--confirm", type=shell.at_least(0), default=3, help="fresh seeds for each winner")
    parser.add_argument("--timeout", type=shell.above_zero, help="seconds; what is finished by then is written")
    parser.add_argument("overrides", nargs="*", metavar="KEY VALUE", help="override the config")
    parser.set_defaults(do=run)
    return parser, [parser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run both searches; returns the exit code, as ``fs-lowrank hpo`` does."""
    return shell.run(_parser, argv, shell.make_console(140), folder=lambda args: args.dir)


def run(args: argparse.Namespace) -> int:
    """Run the searches and write what is finished; returns the exit code."""
    with storage_errors(str(args.dir / "study.db")):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    config = load_config(args.cfg, {**SMALLER, **parse_overrides(args.overrides)})
    for confirm in (0, args.confirm):  # first all curves, then the fresh seeds
        for name, (space, options) in searches(args.dir, args.workers).items():
            left = args.timeout - (time.monotonic() - started) if args.timeout else None
            if left is not None and left <= 0:
                break
            wide = dataclasses.replace(load_space(space), studies={"federate.method": METHODS})
            ended = tune(config, wide, dataclasses.replace(options, confirm=confirm, timeout=left))
            print(f"{name}: {ended.how}", flush=True)
            if ended.how == "interrupted":
                return shell.INTERRUPTED
    storage = open_storage(str(args.dir / "study.db"))
    found = collect(config, storage, args.overrides)
    write_text(args.out / "learning_rates.json", json.dumps({"schema": SCHEMA, **found}, indent=1) + "\n")
    write_text(args.out / "learning_rates.md", table(found))
    titles = {
        "grid": "grid of eight",
        "halving": f"TPE, halving at {', '.join(map(str, RUNGS[:-1]))} rounds (hollow: stopped there)",
    }
    panels = []
    for name, title in titles.items():
        if names := [f"{name}.{m}" for m in METHODS if found["methods"][m].get(name, {}).get("curve")]:
            panels.append(dataclasses.replace(slice_panel(storage, names, RATE), title=title))
    if panels:
        save(figure(panels, size=(5.5, 3.6)), args.out / "learning_rates.png")
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
