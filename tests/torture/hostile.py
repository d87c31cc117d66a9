"""A hostile client in a run from the command line: a method of another package, whose upload is poisoned.

``python -m fs_lowrank`` finds it like any installed package. The environment variable ``TORTURE_HOSTILE`` is the seed
of a case of ``updates``, whose last example gives the method that is imitated and the poison.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from .bench import Bench, Outcome
from .child import unsound
from .poisons import Answer, Poison, poison
from .tiny import settings

VARIABLE = "TORTURE_HOSTILE"


def made() -> type:
    """The class for the environment variable; called when the entry point of the package is loaded."""
    from fs_lowrank.methods import register_method
    from fs_lowrank.methods.registry import registered

    from .updates import drawn

    (method, _), victim, changes = drawn(int(os.environ[VARIABLE]))[-1]
    base: Any = registered()[method]

    def upload(self: Any, model: Any, round: int, client: Any) -> Any:
        honest = {n: t.detach().clone() for n, t in base.upload(self, model, round, client).items()}
        answer = Answer(client.id, honest, {})
        if client.id == victim:
            poison(answer, changes)
        return answer.tensors

    return register_method("hostile")(type("Hostile", (base,), {"upload": upload}))


def install(folder: Path) -> None:
    """A folder for ``PYTHONPATH`` with the metadata of an installed package."""
    about = folder / "hostile-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fs_lowrank.methods]\nhostile = tests.torture.hostile_entry\n")


def run(number: int, example: tuple[tuple[str, str], int, list[Poison]], keys: dict[str, Any], bench: Bench) -> Outcome:
    """A run of three rounds with the same hostile client in each, by the last ``example`` of a seed."""
    target, client, changes = example
    what = f"{target[0]} ({target[1]}), client {client} in a whole run: {changes!r}"[:400]
    with bench.place() as outdir:
        folder, file = outdir.with_name("site"), outdir.with_name("config.yaml")
        install(folder)
        keys = {**keys, "kind": target[1], "federate.method": "hostile"}
        file.write_text(yaml.safe_dump(settings(bench.inputs, outdir, **keys)))
        env = {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), str(folder))), VARIABLE: str(number)}
        ended = bench.command(["run", "--cfg", str(file)], outdir.with_name("printed.out"), env=env)
        if ended.fault:
            return Outcome("failed", what, ended.fault, "command line")
        if ended.code:
            return Outcome("refused", what, ended.err[:300], "command line")
        reason = unsound(outdir)
        if reason:
            return Outcome("failed", what, reason, "command line")
        refused = '"refused"' in (outdir / "rounds.jsonl").read_text()
        return Outcome("refused" if refused else "valid", what, "", "command line")
