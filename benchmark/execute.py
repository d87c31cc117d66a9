"""Does one job: trains and evaluates a cell, searches a learning rate, runs a script; gives what its JSON holds."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fs_lowrank
from fs_lowrank import Config, RunFailed, RunResult, UserError

from .plan import Cell, Job, Script, Search, command, decisive, samples_a_round
from .results import head_of
from .suite import import_all

#: digits after the point of a number in a curve
_DIGITS = 5
Progress = Callable[[dict], None]


class Interrupted(BaseException):
    """The work is to end now; what is on disk is continued another time."""


def execute(job: Job, progress: Progress) -> dict:
    """Do ``job``.

    Args:
        progress: is told ``round``, ``rounds`` and the like as it goes on.
    Returns:
        the record for ``Store.write``, without ``finished``.
    Raises:
        Interrupted, or whatever went wrong.
    """
    began = time.monotonic()
    do = {Cell: _cell, Search: _search, Script: _script}[type(job)]
    record = {**job.identity(), "status": "complete", **do(job, progress)}
    return {
        **record,
        "seconds_in_all": round(time.monotonic() - began, 2),
        "command": command(job.suite, job.experiment, job.options.engine),
        "versions": _versions(),
        "machine": _machine(),
    }


# -- cells ---------------------------------------------------------------------------------------------


def _cell(cell: Cell, progress: Progress) -> dict:
    import_all(cell.suite.imports)
    config = cell.config.replace(outdir=str(cell.folder), expname="")
    _forget_peak()
    result = train(config, cell.options.engine, progress)
    metrics = {k: v for k, v in result.final.items()}
    if cell.experiment.test == "once" and "client_test_acc" not in metrics:
        progress({"doing": "test set"})
        metrics.update(test_once(config, result))
    scores = _scores(cell, config, result, progress)
    from fs_lowrank.runs.summary import per_client_and_round, seconds

    sent = per_client_and_round(result.history)
    record = {
        "method": cell.method.label,
        "setting": dict(cell.setting),
        "seed": cell.seed,
        "engine": cell.options.engine,
        "metrics": metrics,
        "scores": scores,
        "test": cell.experiment.test,
        "learning_rate": dict(cell.rate),
        "rounds": len(result.history),
        "samples": samples_used(config),
        "bytes": {**dict(result.bytes), "per_client_and_round": sent},
        "seconds": seconds(result.history),
        "peak_memory_bytes": _peak(),
        "majority": result.facts["majority"],
        "data": {
            "source": result.facts["source"].replace(cell.options.data or "\0", "$DATA"),
            "fingerprint": result.facts["data"],
            "clients": result.facts["clients"],
        },
        "model": {
            "type": config.model.type,
            "fingerprint": result.facts["model"],
            "parameters": result.facts.get("parameters"),
        },
        "history": curve(result.history),
        "evaluation": list(cell.experiment.evaluation),
        "config": decisive(config),
    }
    return {**record, "head": head_of(record)}


def train(config: Config, engine: str, progress: Progress) -> RunResult:
    """Run ``config``, from its checkpoint where one is left; from the start where that cannot be used."""
    rounds = config.federate.total_round_num

    def on_client(round: int, done: int, of: int) -> None:
        progress({"round": round - 1, "rounds": rounds, "client": done, "clients": of})

    def on_round(record: dict) -> None:
        metrics = {f"{s}_{n}": v for s, values in record["metrics"].items() for n, v in values.items()}
        progress({"round": record["round"], "rounds": rounds, "loss": record["loss"], **metrics})

    folder = Path(config.outdir)
    if (folder / "checkpoint").exists():
        try:
            return fs_lowrank.run(config, engine, resume=True, on_round=on_round, on_client=on_client)
        except RunFailed:
            raise  # what is there can be continued another time
        except UserError as error:
            print(f"{folder.name}: cannot be continued, begun again: {error}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    return fs_lowrank.run(config, engine, on_round=on_round, on_client=on_client)


def test_once(config: Config, result: RunResult) -> dict[str, float]:
    """Loss and accuracy of the final model on the test set, which the run itself never saw.

    It asks for a single client: the held-out rows do not depend on how the others are divided.
    """
    from fs_lowrank.data import build_data
    from fs_lowrank.models.build import build_tokenizer
    from fs_lowrank.training import evaluate

    lone = config.replace(
        {
            "federate.client_num": 1,
            "federate.sample_client_num": -1,
            "federate.sample_client_rate": -1,
            "lowrank.min_clients": 1,
            "data.splitter": "iid",
            "data.splitter_args": [],
        }
    )
    held_out = build_data(lone, build_tokenizer(config)).test
    if held_out is None:
        raise UserError(f"data.splits = {list(config.data.splits)}: there is no test set; give the last one a share")
    size = config.eval.batch_size or config.dataloader.batch_size
    return {f"test_{name}": value for name, value in evaluate(result.model, held_out, size).items()}


def samples_used(config: Config) -> int | None:
    """What the clients trained on in the whole run, counting repetitions; None where it goes by epochs."""
    if config.train.batch_or_epoch != "batch":
        return None
    return samples_a_round(config) * config.federate.total_round_num


def curve(history: list[dict]) -> dict:
    """Every round's loss; metrics, and bytes and seconds so far, of the rounds that were evaluated."""
    points, total = [], {"uplink": 0, "downlink": 0, "uplink_without_head": 0, "downlink_without_head": 0}
    spent = 0.0
    for record in history:
        for name in total:
            direction, _, bare = name.partition("_")
            total[name] += record[f"{direction}_bytes{'_' + bare if bare else ''}"]
        spent += record["seconds"]["training"] + record["seconds"]["aggregation"]
        if record["metrics"]:
            flat = {f"{s}_{n}": round(v, _DIGITS) for s, values in record["metrics"].items() for n, v in values.items()}
            points.append({"round": record["round"], "seconds": round(spent, 3), **total, **flat})
    return {
        "loss": [round(r["loss"], _DIGITS) for r in history],
        "evaluated": points,
        "failed_clients": sum(len(r["failed"]) for r in history),
    }


def _scores(cell: Cell, config: Config, result: RunResult, progress: Progress) -> dict:
    """Scorer -> task -> metrics."""
    if not cell.experiment.evaluation:
        return {}
    from fs_lowrank.models.build import build_tokenizer

    from . import scorers

    tokenizer = build_tokenizer(config)
    found: dict[str, dict] = {}
    for spec in cell.experiment.evaluation:
        progress({"doing": spec["scorer"]})
        spec = permitted(spec, cell.options.unsafe_code)
        found.setdefault(spec["scorer"], {}).update(
            scorers.score(result.model, tokenizer, spec, Path(cell.options.data or "."))
        )
    return found


def permitted(spec: dict, unsafe_code: bool) -> dict:
    """The evaluation with what ``--unsafe-code`` allows; a suite cannot allow it to itself."""
    return {**spec, "run_unsafe_code": unsafe_code} if spec["scorer"] == "humaneval" else spec


# -- searches ------------------------------------------------------------------------------------------


def _search(search: Search, progress: Progress) -> dict:
    import hpo

    import_all(search.suite.imports)
    progress({"doing": "search"})
    options = hpo.Search(
        "search",
        objectives=(search.spec.get("objective", "val_acc"),),
        folder=search.folder,
        workers=0,
        seeds=search.spec.get("seeds", 1),
        confirm=0,
        engine=search.options.engine,
        retry_failed=True,
    )
    ended = hpo.tune(
        search.config,
        hpo.space_from(search.spec["space"]),
        options,
        say=lambda text: progress({"doing": text.splitlines()[0][:60]}),
    )
    if ended.how != "done":
        raise Interrupted
    found = hpo.results(options.where, "search")
    if lost := [reason for kind, reason in found["failed"] if kind != "nan"]:
        raise UserError(f"{len(lost)} of its trials failed, so it chose among fewer than it should: {lost[0]}")
    if not found["winners"]:
        reason = found["failed"][0][1] if found["failed"] else "none was started"
        raise UserError(f"no trial of the search completed: {reason}")
    winner = found["winners"][0]
    return {
        "method": search.method.label,
        "setting": dict(search.setting),
        "engine": search.options.engine,
        "objective": found["objectives"][0],
        "winner": {"point": winner["point"], "values": winner["values"]},
        "tried": found["tried"],
        "diverged": len(found["failed"]),
        "budget": found["budget"],
        "trials": found["trials"],
        "space": search.spec["space"],
        "config": decisive(search.config),
    }


# -- scripts -------------------------------------------------------------------------------------------


def _script(job: Script, progress: Progress) -> dict:
    out = Path(job.options.work) / job.key
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[1])
    # The user's own folder comes last: a file of theirs that is called as a package of ours is not run in its place.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH"), os.getcwd()]))
    environment["PYTHONSAFEPATH"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", job.experiment.script, *job.experiment.args, "--out", str(out)],
        env=environment,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        last = (errors.strip() or "nothing").splitlines()[-1]
        raise RuntimeError(f"{job.label} ended with {process.returncode}: {last}")
    found = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}
    if not found:
        raise RuntimeError(f"{job.label} wrote no JSON into --out")
    kept = Path(job.options.results) / "scripts" / f"{job.suite.name}-{job.experiment.name}"
    kept.mkdir(parents=True, exist_ok=True)
    files = []
    for path in sorted(p for p in out.iterdir() if p.is_file()):
        shutil.copy(path, kept / path.name)
        files.append(str((kept / path.name).relative_to(job.options.results)))
    metrics = {name: quotient(found, path) for name, path in job.experiment.values.items()}
    return {
        "method": job.experiment.script.rpartition(".")[2],
        "setting": {},
        "seed": 0,
        "metrics": metrics,
        "scores": {},
        "files": files,
    }


def quotient(found: dict, path: str) -> float:
    """The number at a path, or the quotient of two: ``A / B``."""
    first, _, second = path.partition(" / ")
    return dig(found, first) / dig(found, second) if second else dig(found, first)


def dig(found: dict, path: str) -> float:
    """The number at ``file.key.0.key``; a ``*`` takes the mean over a list or mapping.

    Raises:
        UserError: nothing is there.
    """
    nodes = [found]
    for part in path.split("."):
        step = []
        for node in nodes:
            items = node if isinstance(node, dict) else dict(enumerate(node)) if isinstance(node, list) else {}
            by_name = {str(k): v for k, v in items.items()}
            if part != "*" and part not in by_name:
                raise UserError(
                    f"values: {path}: there is no {part!r}, only {', '.join(list(by_name)[:12]) or 'a value'}"
                )
            step += list(by_name.values()) if part == "*" else [by_name[part]]
        nodes = step
    if not nodes or not all(isinstance(n, (int, float)) for n in nodes):
        raise UserError(f"values: {path}: expected a number there")
    return float(sum(nodes) / len(nodes))


# -- the machine ---------------------------------------------------------------------------------------


def _forget_peak() -> None:
    """Start the peak of memory anew: a worker takes many cells."""
    with contextlib.suppress(OSError):  # not every kernel allows it; then the peak is the worker's
        Path("/proc/self/clear_refs").write_text("5")
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> dict:
    import torch

    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    with contextlib.suppress(OSError):  # there is no /proc but on Linux
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                peak["host"] = int(line.split()[1]) * 1024
    if torch.cuda.is_available():
        peak["gpu"] = torch.cuda.max_memory_allocated()
    return peak


def _versions() -> dict:
    from fs_lowrank.runs.environment import versions

    return versions()


def _machine() -> dict:
    import torch

    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
