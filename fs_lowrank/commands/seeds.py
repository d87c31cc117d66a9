"""``fs-lowrank compare --seeds 0,1,2``: the comparison with several seeds, as means and spreads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..jobs.files import to_json, write_text
from ..jobs.shell import names
from ..jobs.tables import write_tables
from ..settings.reading import parse_overrides
from ..versions import SCHEMA

if TYPE_CHECKING:
    from ..config import Config


def parse(text: str) -> list[int]:
    """The seeds of ``0,1,2``.

    Raises:
        UserError: not whole numbers from 0, one of them twice, or one alone, which has no spread.
    """
    parts = names(text)
    if not parts or not all(part.isdigit() for part in parts):
        raise UserError(f"--seeds {text}: expected whole numbers of 0 or more, such as 0,1,2")
    seeds = [int(part) for part in parts]
    if len(set(seeds)) < max(len(seeds), 2):
        raise UserError(f"--seeds {text}: expected two or more different seeds")
    return seeds


def compare_seeds(
    args: argparse.Namespace,
    config: Config,
    methods: Sequence[str],
    announce: Callable[[str], object],
    **callbacks: Any,
) -> tuple[list[list[str]], Path]:
    """Run the comparison once for each seed, in ``outdir/seed_N``.

    Returns:
        The table: a header, and a line for each method with ``mean ± standard deviation`` over the seeds; and the
        file ``seeds.json`` in the outdir, with the value of every seed. Beside it are the table as ``seeds.csv`` and
        ``seeds.tex``, and ``curves.png`` with means and bands over the seeds.
    """
    from ..api import compare
    from ..draw.figures import save
    from ..draw.runs import curves, setting_of

    seeds, outdir = parse(args.seeds), args.outdir
    values: dict[str, dict[str, list[float]]] = {}
    histories: dict[str, list[list[dict[str, Any]]]] = {}
    facts: dict[str, Any] = {}
    own = parse_overrides(args.overrides)
    for seed in seeds:
        announce(f"seed {seed}")
        overrides = {**own, "seed": seed, "outdir": str(outdir / f"seed_{seed}"), "expname": ""}
        existing = {"resume": args.resume, "overwrite": args.overwrite}
        results = compare(args.cfg, methods, args.engine, overrides=overrides, **existing, **callbacks)
        facts = next(iter(results.values())).facts
        for name, result in results.items():
            histories.setdefault(name, []).append(result.history)
            if result.verdict:
                announce(f"{name}, seed {seed}: {result.verdict}")
            for metric, value in result.final.items():
                values.setdefault(name, {}).setdefault(metric, []).append(value)
    path = outdir / "seeds.json"
    write_text(path, to_json({"schema": SCHEMA, "seeds": seeds, "values": values}, indent=1))
    sizes, title = facts.get("held_out"), setting_of(config, seeds=seeds)
    figure = curves(histories, facts["majority"], title=title, sizes=sizes, language=config.is_language)
    save(figure, outdir / "curves.png")
    lines = _table(values, len(seeds), config.is_language)
    write_tables(lines, outdir / "seeds.csv")
    return lines, path


def _table(scores: Mapping[str, Mapping[str, Sequence[float]]], count: int, language: bool) -> list[list[str]]:
    import pandas as pd

    from ..runs.summary import for_people

    cells: dict[str, dict[str, str]] = {}
    for name, measured in scores.items():
        complete = {metric: numbers for metric, numbers in measured.items() if len(numbers) == count}
        by_seed = [for_people({m: numbers[i] for m, numbers in complete.items()}, language) for i in range(count)]
        table = pd.DataFrame(by_seed).drop(columns="best_round", errors="ignore")
        cells[name] = {m: f"{table[m].mean(skipna=False):.3f} ± {table[m].std(skipna=False):.3f}" for m in table}
    metrics = sorted({metric for row in cells.values() for metric in row})
    head = ["method", *(metric.replace("_", "\n") for metric in metrics)]
    return [head, *([name, *(row.get(metric, "-") for metric in metrics)] for name, row in cells.items())]
