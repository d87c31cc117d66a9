"""Runs a job: trains and evaluates a cell, searches a learning rate, or runs a script; returns the content of its JSON
file. A worker process does so for the command, which alone writes results."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fs_lowrank
from fs_lowrank import Config, RunFailed, RunResult, UserError
from fs_lowrank.errors import CannotContinue
from fs_lowrank.jobs.files import disk_error, file_digest, read_json, replacing
from fs_lowrank.jobs.shell import message_of
from fs_lowrank.models.machine import device_of
from fs_lowrank.runs.environment import machine, versions
from fs_lowrank.runs.records import flat_metrics
from fs_lowrank.runs.summary import per_client_and_round, seconds
from fs_lowrank.settings.metrics import larger_is_better
from fs_lowrank.training.evaluate import mean_scores, worst_tenth
from fs_lowrank.training.metrics import of_outputs

from .beside import hpo, module_of
from .intervals import LEVEL, right_rows
from .job import Cell, Job, Script, Search, Trained, decisive, next_point
from .paths import quotient
from .plan import command
from .results import head_of
from .samples import within_budget
from .suite import import_all

#: digits after the decimal point in a curve
_DIGITS = 5


def work(job: Job) -> dict:
    """Run a job in a worker process, in which SIGTERM raises ``KeyboardInterrupt``.

    Returns:
        Its result; the text of its error, with ``status`` failed; nothing if it was interrupted: the next
        call continues from its checkpoint.
    Raises:
        RunFailed: the disk is full or broken, so that no other job could run either.
    """
    try:
        import_all(job.suite.imports)
        return execute(job)
    except KeyboardInterrupt:
        return {}
    except Exception as error:  # the failure of a cell must not end the others; it is recorded
        if broken := disk_error(error):
            raise RunFailed(f"{job.where}: {job.label}: {broken}") from error
        logging.getLogger("fs_lowrank").error("%s: %s failed: %s", job.where, job.label, message_of(error, job.folder))
        return {"status": "failed", "error": str(error)}


def execute(job: Job) -> dict:
    """Run a job.

    Returns:
        the record for ``Store.write``, without ``finished``.
    Raises:
        KeyboardInterrupt: the user stopped it.
        Exception: any error of the run.
    """
    began = time.monotonic()
    run: Any = {Cell: _cell, Search: _search, Script: _script}[type(job)]
    content = run(job)
    record = {**job.identity(), "status": "complete", **content}
    return {
        **record,
        "seconds_in_all": round(time.monotonic() - began + content.get("seconds_in_all", 0.0), 2),
        "command": command(job.suite, [job.experiment.name], job.options.engine),
        "versions": versions(),
        "commit": commit(),
        "machine": _machine(job),
    }


# -- cells ---------------------------------------------------------------------------------------------


def _cell(cell: Cell) -> dict:
    overrides = {"outdir": str(cell.folder), "expname": "", "eval.save_best": False, "lowrank.pictures": False}
    config = within_budget(cell).replace(overrides)
    device = device_of(config)
    _forget_peak(device)
    result = train(config, cell.options.engine, [FinalTest()] if cell.experiment.test == "once" else [])
    scores = _scores(cell, config, result)
    sent = per_client_and_round(result.history)
    record = {
        "engine": cell.options.engine,
        "metrics": dict(result.final),
        "scores": scores,
        **_optional(result.facts, "right"),
        "test": cell.experiment.test,
        "learning_rate": dict(cell.rate),
        "rounds": len(result.history),
        **_samples(result.history),
        "bytes": {**dict(result.bytes), "per_client_and_round": sent},
        "seconds": seconds(result.history),
        "peak_memory_bytes": _peak(device),
        "majority": result.facts["majority"],
        "client_majority": result.facts.get("client_majority"),
        "data": {
            "source": result.facts["source"].replace(cell.options.data or "\0", "$DATA"),
            "fingerprint": result.facts["data"],
            "clients": result.facts["clients"],
            "rows": result.facts["rows"],
            **_optional(result.facts, "test_rows_in_training"),
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


def _optional(facts: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: facts[name]} if name in facts else {}


def train(config: Config, engine: str, callbacks: Sequence[fs_lowrank.Callback] = ()) -> RunResult:
    """Run ``config``, from its checkpoint if there is one that can be used."""
    options: Any = {"progress": False, "on_round": _log_round, "callbacks": callbacks}
    try:
        return fs_lowrank.run(config, engine, resume="auto", **options)
    except CannotContinue as error:  # after any other error the next call can continue from the checkpoint
        print(f"{config.outdir}: cannot be continued, starts again: {error}", file=sys.stderr, flush=True)
    shutil.rmtree(config.outdir)
    return fs_lowrank.run(config, engine, **options)


def _log_round(record: Mapping) -> None:
    """A line in the worker's log."""
    values = {"loss": record["loss"], **flat_metrics(record["metrics"])}
    print(f"round {record['round']}", *(f"{name} {value:.4g}" for name, value in values.items()), flush=True)


class FinalTest(fs_lowrank.Callback):
    """Scores the final model on the test set, which the run did not use; not where clients' own models are scored.

    The loss and the metrics go to ``final``. Of the facts, ``test_rows_in_training`` is the number of test rows that
    are also in the training data (``data.duplicates``), and the number of all test rows; the metrics include these
    rows. ``right`` has a bit for each test row, as ``right_rows`` packs them; there is none of a language model or of
    numbers. ``test_acc_worst_decile`` is over the clients' shares of the test set (``worst_tenth``).
    """

    def on_end(self, run: Any, result: RunResult) -> None:
        if "client_test_acc" in result.final:
            return
        config, data = run.config, run.workspace.data
        if data.test is None:  # the share of a few rows may be none
            raise UserError(
                f"data.splits = {list(config.data.splits)}: there is no test set; give the last one a share"
            )
        if run.workspace.prefix:  # the cells of a suite have the same test rows
            run.workspace.prefix.add("test", data.test)
        run.global_model()
        outputs = not config.is_language or bool(of_outputs(config.metrics))
        scores = run.evaluator.batches(data.test, "test", outputs)
        result.final |= {f"test_{name}": value for name, value in mean_scores(scores, config.metrics).items()}
        result.facts["test_rows_in_training"] = [data.repeated["test"], len(data.test)]
        if not config.is_language and "test_acc" in result.final:
            hits = np.array([hit for _, _, _, predicted, labels, _ in scores for hit in map(eq, predicted, labels)])
            right = hits[np.argsort(np.argsort(-data.test.lengths, kind="stable"))]  # they come with the longest first
            result.facts["right"] = right_rows(data.test.fingerprint(), right)
            by_client = [float(right[data.test_shares[i]].mean()) for i in data.tested()]
            result.final["test_acc_worst_decile"] = worst_tenth(by_client, larger=True)


def _samples(history: Sequence[Mapping]) -> dict:
    """The number of samples that all clients trained on in the run, with repetitions."""
    if not all("samples" in record for record in history):
        return {"samples": None}  # begun by version 0.1.0, and resumed
    return {"samples": sum(record["samples"] for record in history), "samples_counted": True}


def curve(history: list[dict]) -> dict:
    """The loss of each round, and the metrics of each evaluated round with the bytes and seconds so far."""
    points, total = [], {"uplink": 0, "downlink": 0, "uplink_without_head": 0, "downlink_without_head": 0}
    spent = 0.0
    for record in history:
        for name in total:
            direction, _, bare = name.partition("_")
            total[name] += record[f"{direction}_bytes{'_' + bare if bare else ''}"]
        spent += record["seconds"]["training"] + record["seconds"]["aggregation"]
        if record["metrics"]:
            flat = {name: round(value, _DIGITS) for name, value in flat_metrics(record["metrics"]).items()}
            points.append({"round": record["round"], "seconds": round(spent, 3), **total, **flat})
    return {
        "loss": [round(r["loss"], _DIGITS) for r in history],
        "evaluated": points,
        "failed_clients": sum(len(r["failed"]) for r in history),
    }


def _scores(cell: Cell, config: Config, result: RunResult) -> dict:
    """The scores of the model: scorer -> task -> metrics."""
    if not cell.experiment.evaluation:
        return {}
    from fs_lowrank.models.build import build_tokenizer

    from . import scorers

    tokenizer = build_tokenizer(config)
    scores: dict[str, dict] = {}
    for spec in cell.experiment.evaluation:
        spec = permitted(spec, cell.options.unsafe_code)
        scores.setdefault(spec["scorer"], {}).update(
            scorers.score(result.model, tokenizer, spec, Path(cell.options.data or "."))
        )
    return scores


def permitted(spec: dict, unsafe_code: bool) -> dict:
    """An entry of ``evaluation`` with the permission of ``--unsafe-code``, which a suite cannot give itself."""
    return {**spec, "run_unsafe_code": unsafe_code} if spec["scorer"] == "humaneval" else spec


# -- searches ------------------------------------------------------------------------------------------


def _search(search: Search) -> dict:
    """Try the grid, then single points beyond its end if the winner is there (``open_ends``), until it is inside.

    There are at most ``grow`` further points, the same number for all methods; by default as many as the grid has. Each
    goes beyond the end of one key. Then the rate takes a smaller step to both sides of the winner (``last_step``).
    """
    config, space = within_budget(search), dict(search.spec["space"])
    steps = [_study(search, config, "search", space)]
    grids = [kind["grid"] for kind in space.values() if "grid" in kind]
    grown: list[dict] = []
    while grids and len(grown) < search.spec.get("grow", math.prod(map(len, grids))):
        point = next_point(_summary(steps, grown, space), config)
        if point is None:
            break
        grown.append(point)
        single = {key: {"grid": [value]} for key, value in point.items()}
        steps.append(_study(search, config, f"search-{len(steps)}", single, diverges=True))
    summary = _summary(steps, grown, space)
    if not summary["nothing_learned"] and (around := search.last_step(summary["winner"]["point"])):
        steps.append(_study(search, config, f"search-{len(steps)}", around, diverges=True))
        summary = _summary(steps, grown, space)
    return {
        "engine": search.options.engine,
        "objective": steps[0]["objectives"][0],
        **summary,
        "seeds": search.seeds,
        "within_noise": _within_noise(steps, summary["winner"]) if search.seeds > 1 else None,
        "diverged": sum(len(step["failed"]) for step in steps),
        "budget": {key: sum(step["budget"][key] for step in steps) for key in steps[0]["budget"]},
        "trials": dict(sum((Counter(step["trials"]) for step in steps), Counter())),
        "config": decisive(config),
    }


def _summary(steps: Sequence[Mapping], grown: list[dict], space: Mapping) -> dict[str, Any]:
    """The outcome of all studies of a search together."""
    objective = steps[0]["objectives"][0]
    winners = [winner for step in steps for winner in step["winners"]]
    best = (max if larger_is_better(objective) else min)(winners, key=lambda winner: winner["values"][objective])
    return {
        "winner": {"point": best["point"], "values": best["values"]},
        "nothing_learned": best["nothing_learned"],
        "tried": [entry for step in steps for entry in step["tried"]],
        "grown": grown,
        "space": space,
    }


def _study(search: Search, config: Config, name: str, space: Mapping, diverges: bool = False) -> dict:
    """The results of one study of a search.

    Args:
        config: the search's, within its budget.
        diverges: whether it may have no winner because all of its trials diverged.
    """
    options = hpo.Search(
        name,
        objectives=(search.spec.get("objective", "val_acc"),),
        folder=search.folder,
        workers=0,
        seeds=search.seeds,
        confirm=0,
        engine=search.options.engine,
        retry_failed=True,
    )
    ended = hpo.tune(config, hpo.space_from(space), options, say=partial(print, flush=True))
    if ended.how != "done":
        raise KeyboardInterrupt
    results = hpo.results(options.where, name)
    if lost := [reason for kind, reason in results["failed"] if kind != "nan"]:
        raise UserError(f"{len(lost)} of its trials failed, so it chose among fewer than it should: {lost[0]}")
    if not results["winners"] and not diverges:
        reason = results["failed"][0][1] if results["failed"] else "none was started"
        raise UserError(f"no trial of the search completed: {reason}")
    return results


def _within_noise(studies: Sequence[Mapping], winner: Mapping) -> list[dict]:
    """The points that the seeds do not tell from the winner: nearer than half the 95 % interval of a difference.

    The spread over seeds is that of the best point of each study.
    """
    from scipy.stats import t

    ((objective, best),) = winner["values"].items()
    values = [entry["by_seed"][objective] for study in studies for entry in study["winners"]]
    seeds = len(values[0])
    degrees = len(values) * (seeds - 1)
    half = t.ppf((1 + LEVEL) / 2, degrees) * math.sqrt(2 * statistics.fmean(map(statistics.variance, values)) / seeds)
    tried = [point for study in studies for point in study["tried"]]
    return [p for p in tried if abs(p["value"] - best) <= half and not winner["point"].items() <= p.items()]


# -- scripts -------------------------------------------------------------------------------------------


def _script(job: Script) -> dict:
    folder = job.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = dict(os.environ)
    root = str(Path(fs_lowrank.__file__).resolve().parents[1])
    # The working folder comes last, so that a file of the user does not replace a package of the same name.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH"), os.getcwd()]))
    environment["PYTHONSAFEPATH"] = "1"
    argv = [sys.executable, "-m", module_of(job.experiment.script), *job.experiment.args, "--out", str(folder)]
    process = subprocess.run(argv, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if process.returncode:
        message = (process.stderr.strip() or "nothing").splitlines()[-1]
        raise RunFailed(f"{job.label} ended with {process.returncode}: {message.removeprefix('error: ')}")
    remedy = f"{job.experiment.script} wrote it"
    documents = {path.stem: read_json(path, dict | list, remedy=remedy) for path in sorted(folder.glob("*.json"))}
    if not documents:
        raise RuntimeError(f"{job.label} wrote no JSON into --out")
    sized = [job.suite.size] if job.suite.sized else []
    target = Path("scripts", "-".join([job.suite.name, *sized, job.experiment.name]))
    with replacing(Path(job.options.results) / target) as aside:
        shutil.copytree(folder, aside)
    checksums = {str(target / path.name): file_digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
    metrics = {name: quotient(documents, path) for name, path in job.experiment.values.items()}
    return {"metrics": metrics, "scores": {}, "files": list(checksums), "checksums": checksums}


# -- the machine ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """A context with ``number`` threads of torch."""
    previous = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _forget_peak(device: torch.device) -> None:
    """Reset the peak memory of the process, because a worker runs many cells."""
    with contextlib.suppress(OSError):  # if the kernel does not allow it, the peak is that of the whole worker
        Path("/proc/self/clear_refs").write_text("5")
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> dict:
    """Peak memory in bytes, of this process and of what it has on the run's GPU, if that is its device; that of the
    processes of ``federate.process_num`` is not in it.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if device.type == "cuda":
        peak["gpu"] = torch.cuda.max_memory_allocated(device)
    return peak


def _machine(job: Job) -> dict:
    """The machine of a job; the device of a script is not known."""
    device = device_of(job.config) if isinstance(job, Trained) else torch.device("cpu")
    facts = machine(device)
    return {"cores": facts.pop("cpus"), **facts, "processor": processor()}


@cache
def commit() -> str:
    """The commit of a checkout of this package, with a + if files differ from it; empty for an installed package."""
    file = Path(__file__)
    # The first fails where an environment lies in a repository of the user's.
    questions = f"ls-files --error-unmatch {file.name}", "rev-parse HEAD", "status --porcelain -- *.py"
    try:
        _, head, changed = (
            subprocess.run(
                ["git", "-C", file.parent, *words.split()], capture_output=True, text=True, check=True
            ).stdout
            for words in questions
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head[:12] + "+" * bool(changed)


@cache
def processor() -> str:
    """The processor's name and the vector instructions that torch uses on it, by which last digits may differ."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has /proc
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
