"""Runs as they are on disk, finished or going on, for the HTML page."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config, load_config
from ..errors import UserError
from ..jobs.files import cannot_read, read_json
from ..runs.chance import Chance, run_verdict
from ..runs.checksums import check_finished
from ..runs.records import SHOWN, read_records
from ..runs.split import read_split
from ..runs.summary import for_people


@dataclass
class Shown:
    """What is known of one run.

    Attributes:
        name: that tells it from the others. data: of ``read_split``. summary: empty while the run goes on.
        history: the records, with the names of metrics ``for_people``.
    """

    name: str
    folder: Path
    config: Config
    history: list[dict[str, Any]]
    data: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def language(self) -> bool:
        """Whether the model is one of language."""
        return self.config.is_language

    @property
    def ended(self) -> bool:
        return bool(self.summary)

    @property
    def rounds(self) -> int:
        """The number of rounds that the run is to have."""
        return self.config.federate.total_round_num

    @property
    def chance(self) -> Chance | None:
        """What a constant prediction reaches on the test set; None for a language model."""
        return Chance.of_data(self.data, "test")

    @property
    def verdict(self) -> str:
        """As of ``RunResult``, by the last evaluated round."""
        last: dict[str, Any] = next((r["metrics"] for r in reversed(self.history) if r["metrics"]), {})
        final = {f"{split}_acc": of["acc"] for split, of in last.items() if "acc" in of}
        return run_verdict(self.data, final, self.summary.get("best", {}))

    def size(self, split: str) -> int:
        """The number of held-out samples of ``test`` or ``val``; 0 if it is not known, or the model one of language."""
        held_out = self.data.get({"val": "validation"}.get(split, split), {})
        return sum(held_out.get("labels", {}).values())


def read_runs(folders: Iterable[str | Path]) -> list[Shown]:
    """The runs in ``folders``; of the folder of a comparison, each of its methods.

    Raises:
        UserError: a folder without a run, a file that cannot be read, or the same run twice.
    """
    found: list[Path] = []
    for given in map(Path, folders):
        inside = sorted(p.parent for p in given.glob("*/config.yaml")) if (given / "comparison.json").exists() else []
        if not inside and not (given / "config.yaml").is_file():
            raise UserError(f"{given} holds no run: there is no config.yaml; give the outdir of a run")
        found += inside or [given]
    if len({p.resolve() for p in found}) < len(found):
        raise UserError(f"the same run is named twice among {', '.join(map(str, found))}")
    configs = [load_config(folder / "config.yaml") for folder in found]
    methods = [config.federate.method for config in configs]
    common = Path(os.path.commonpath([folder.resolve().parent for folder in found]))
    places = [str(folder.resolve().relative_to(common)) for folder in found]
    names = methods if len(set(methods)) == len(methods) else places
    return [_read(*one) for one in zip(names, found, configs)]


#: what the page uses of a summary
_USED = {
    "final": dict,
    "best": dict | None,
    "labels": list | None,
    "on_test": dict | None,
    "on_test.clients": dict,
    "on_test.confusion": list,
}
#: what it reads of a run that has ended
_READ = ("config.yaml", "summary.json", "rounds.jsonl", "data.json", "rows.npz")


def _read(name: str, folder: Path, config: Config) -> Shown:
    path = folder / "summary.json"
    summary = read_json(path, fields=_USED, missing={})
    check_finished(folder, _READ)
    shown = Shown(name, folder, config, [], read_split(folder), summary)
    for record in read_records(folder / "rounds.jsonl", up_to=10**9, fields=SHOWN):
        metrics = {split: for_people(of, shown.language) for split, of in record["metrics"].items()}
        shown.history.append({**record, "metrics": metrics})
    if summary and not shown.history:
        raise cannot_read(folder / "rounds.jsonl", ValueError("it has no round, and the run has ended"))
    return shown
