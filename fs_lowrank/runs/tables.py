"""Tables of results as lines of text, for ``jobs.tables``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..settings.metrics import chief, larger_is_better
from .result import RunResult
from .summary import for_people, per_client_and_round, seconds


def result_lines(results: Mapping[str, RunResult]) -> list[list[str]]:
    """A line for each run: last metrics, best round, majority class, bytes per client and round, seconds."""
    metrics = [n for n in _metrics(results) if not n.startswith("client_test_")]
    best = any(result.best for result in results.values())
    of_best = [m for m in metrics if m.startswith("test_") and any(m in _best(r) for r in results.values())]
    lines = [["method", *(m.replace("_", "\n") for m in metrics)]]
    lines[0] += ["best\nround", *(f"{m}\nof it".replace("_", "\n") for m in of_best)] if best else []
    lines[0] += ["majority\nclass"]
    lines[0] += [f"{link} kB\n{head} head" for head in ("with", "no") for link in ("uplink", "downlink")]
    lines[0] += ["training s\ntotal", "aggregation ms\na round"]
    for name, result in results.items():
        sent, spent = per_client_and_round(result.history), seconds(result.history)
        majority = result.facts["majority"]
        line = [name, *_values(_final(result), metrics)]
        line += [str(result.best.get("round", "-")), *_values(_best(result), of_best)] if best else []
        line += ["-" if majority is None else f"{majority:.3f}"]
        line += [f"{sent[d + bare] / 1e3:.1f}" for bare in ("", "_without_head") for d in ("uplink", "downlink")]
        lines.append([*line, f"{spent['training']:.1f}", f"{spent['aggregation_median'] * 1000:.1f}"])
    return lines


def client_lines(results: Mapping[str, RunResult]) -> list[list[str]]:
    """A line for each run that has scores on the clients' shares of the test set; empty if none has."""
    metrics = [n for n in _metrics(results) if n.startswith("client_test_")]
    head = ["method", *(n.removeprefix("client_test_").replace("_", "\n") for n in metrics)]
    main = "acc" if any("acc" in name for name in metrics) else "loss"
    head += [f"worst client\nand its {main}", f"best client\nand its {main}"]
    scored = [(name, run) for name, run in results.items() if any(n.startswith("client_test_") for n in run.final)]
    lines = [[name, *_values(_final(result), metrics), *_ends(result)] for name, result in scored]
    return [head, *lines] if metrics else []


def _ends(result: RunResult) -> tuple[str, str]:
    """The worst and the best client by accuracy, or loss, each with it."""
    if not result.client_scores:
        return "-", "-"
    main = chief(next(iter(result.client_scores.values())))
    scores = {client: values[main] for client, values in result.client_scores.items()}
    ends = min(scores, key=scores.__getitem__), max(scores, key=scores.__getitem__)
    worst, best = ends if larger_is_better(main) else ends[::-1]
    return f"{worst}: {scores[worst]:.3f}", f"{best}: {scores[best]:.3f}"


def _metrics(results: Mapping[str, RunResult]) -> list[str]:
    return sorted({k for result in results.values() for k in _final(result) if k != "best_round"})


def _final(result: RunResult) -> dict[str, float]:
    return for_people(result.final, result.language)


def _best(result: RunResult) -> dict[str, float]:
    return for_people({k: v for k, v in result.best.items() if k != "by"}, result.language)


def _values(values: Mapping[str, float], metrics: Sequence[str]) -> list[str]:
    return [f"{values[m]:.3f}" if m in values else "-" for m in metrics]
