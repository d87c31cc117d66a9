"""Runs as they are on disk, finished or going on, for the page about them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..config import Config, load_config
from ..draw.report import Shown
from ..errors import UserError
from ..jobs.files import read_json
from .chance import Chance, run_verdict
from .checksums import check_finished
from .records import flat_metrics, read_records
from .split import read_split
from .summary import for_people, per_client_and_round, seconds

#: the files that it reads of a finished run
_READ = ("config.yaml", "summary.json", "rounds.jsonl", "data.json", "rows.npz")


def read_runs(folders: Iterable[str | Path]) -> list[Shown]:
    """The runs in ``folders``; of the folder of a comparison, each of its methods, with each of its seeds.

    Raises:
        UserError: a folder without a run, a file that cannot be read, or the same run twice.
    """
    outdirs = [folder for path in map(Path, folders) for folder in _inside(path)]
    if missing := [folder for folder in outdirs if not (folder / "config.yaml").is_file()]:
        raise UserError(f"{missing[0]} holds no run: there is no config.yaml; give the outdir of a run")
    if len({folder.resolve() for folder in outdirs}) < len(outdirs):
        raise UserError(f"the same run is named twice among {', '.join(map(str, outdirs))}")
    return [_read(*run) for run in _named([(folder, load_config(folder / "config.yaml")) for folder in outdirs])]


def _inside(folder: Path) -> list[Path]:
    """The folders of the runs of a comparison, in its order; ``folder`` itself, if it is no comparison's."""
    if seeds := read_json(folder / "seeds.json", missing={}):
        return [folder / f"seed_{seed}" / name for name in seeds["values"] for seed in seeds["seeds"]]
    return [folder / name for name in read_json(folder / "comparison.json", missing={})] or [folder]


def _named(runs: list[tuple[Path, Config]]) -> list[tuple[str, str, Path, Config]]:
    """With each run its name and its label: its method, or its place where that does not tell runs apart."""
    labels = [folder.name if _compared(folder) else config.federate.method for folder, config in runs]
    settings = [{key: v for key, v in config.decisive().items() if key != "seed"} for _, config in runs]
    equal = all(a == b for n, a in zip(labels, settings) for m, b in zip(labels, settings) if n == m)
    seeds = [config.seed for _, config in runs]
    if not equal or len({*zip(labels, seeds)}) < len(runs):
        common = Path(os.path.commonpath([folder.resolve().parent for folder, _ in runs]))
        labels = [str(folder.resolve().relative_to(common)) for folder, _ in runs]
    several = {label for label in labels if labels.count(label) > 1}
    names = [f"{label}, seed {seed}" if label in several else label for label, seed in zip(labels, seeds)]
    return [(name, label, *run) for name, label, run in zip(names, labels, runs)]


def _compared(folder: Path) -> bool:
    """Whether the run is one of a comparison that has ended."""
    return folder.name in read_json(folder.parent / "comparison.json", missing={})


def _read(name: str, label: str, folder: Path, config: Config) -> Shown:
    summary: dict[str, Any] = read_json(folder / "summary.json", missing={})
    check_finished(folder, _READ)
    data, language = read_split(folder), config.is_language
    history = read_records(folder / "rounds.jsonl", up_to=10**9)
    for record in history:
        record["metrics"] = {split: for_people(values, language) for split, values in record["metrics"].items()}
    final = {n: v for n, v in summary.get("final", {}).items() if n != "best_round"}
    last = flat_metrics(next((r["metrics"] for r in reversed(history) if r["metrics"]), {}))
    best, chance = dict(summary.get("best") or {}), Chance.of_data(data, "test")
    held_out = {"test": data.get("test") or {}, "val": data.get("validation") or {}}
    spent = seconds(history) if history else {}
    return Shown(
        name,
        label,
        config,
        bool(summary),
        history,
        data,
        labels=[str(label) for label in summary.get("labels") or ()],
        last={**for_people(final, language), **last},
        best={"by": best.pop("by"), **for_people(best, language)} if best else {},
        on_test=summary.get("on_test") or {},
        verdict=run_verdict(data, last, summary.get("best") or {}),
        majority=chance.share if chance else None,
        held_out={split: sum(values["labels"].values()) for split, values in held_out.items() if values.get("labels")},
        sent=per_client_and_round(history),
        seconds={phase: spent[phase] for phase in ("training", "aggregation", "evaluation") if spent.get(phase)},
    )
