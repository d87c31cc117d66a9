"""Tables of results as lines of text, for the screen and as CSV and LaTeX files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..jobs.files import write_text
from .result import RunResult
from .summary import human_bytes, per_client_and_round, seconds

#: cells of text; the first line is the header
Lines = Sequence[Sequence[str]]

_LATEX = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"±": r"$\pm$", "≠": r"$\ne$", "–": "--", "\n": " "},
    }
)


def result_lines(results: Mapping[str, RunResult]) -> list[list[str]]:
    """A line for each run: last metrics, best round, majority class, bytes per client and round, seconds."""
    metrics = [n for n in _metrics(results) if not n.startswith("client_test_")]
    best = any(result.best for result in results.values())
    of_best = [m for m in metrics if m.startswith("test_") and any(m in r.best for r in results.values())]
    lines = [["method", *(m.replace("_", "\n") for m in metrics)]]
    lines[0] += ["best\nround", *(f"{m}\nof it".replace("_", "\n") for m in of_best)] if best else []
    lines[0] += ["majority\nclass"]
    lines[0] += ["uplink\nwith head", "downlink\nwith head", "uplink\nno head", "downlink\nno head"]
    lines[0] += ["training\ntotal", "aggregation\na round"]
    for name, result in results.items():
        sent, spent = per_client_and_round(result.history), seconds(result.history)
        majority = result.facts["majority"]
        line = [name, *_values(result.final, metrics)]
        line += [str(result.best.get("round", "-")), *_values(result.best, of_best)] if best else []
        line += ["-" if majority is None else f"{majority:.3f}"]
        line += [human_bytes(sent[d + bare]) for bare in ("", "_without_head") for d in ("uplink", "downlink")]
        lines.append([*line, f"{spent['training']:.1f} s", f"{spent['aggregation_median'] * 1000:.1f} ms"])
    return lines


def client_lines(results: Mapping[str, RunResult]) -> list[list[str]]:
    """A line for each run: the scores on the clients' shares of the test set; empty if there are none."""
    metrics = [n for n in _metrics(results) if n.startswith("client_test_")]
    head = ["method", *(n.removeprefix("client_test_").replace("_", "\n") for n in metrics)]
    head += ["worst client\nand its acc", "best client\nand its acc"]
    lines = [[name, *_values(result.final, metrics), *_ends(result)] for name, result in results.items()]
    return [head, *lines] if metrics else []


def _ends(result: RunResult) -> tuple[str, str]:
    """The clients of the lowest and of the highest accuracy, each with it."""
    scores = {client: of["acc"] for client, of in result.client_scores.items()}
    if not scores:
        return "-", "-"
    worst, best = min(scores, key=scores.__getitem__), max(scores, key=scores.__getitem__)
    return f"{worst}: {scores[worst]:.3f}", f"{best}: {scores[best]:.3f}"


def _metrics(results: Mapping[str, RunResult]) -> list[str]:
    return sorted({k for result in results.values() for k in result.final if k != "best_round"})


def _values(found: Mapping[str, float], metrics: Sequence[str]) -> list[str]:
    return [f"{found[m]:.3f}" if m in found else "-" for m in metrics]


def write_tables(lines: Lines, path: Path) -> Path:
    """Write ``path`` (``.csv``) and, beside it, the same as a LaTeX table (``.tex``, package booktabs).

    Raises:
        RunFailed: a file cannot be written.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[cell.replace("\n", " ") for cell in line] for line in lines])
    write_text(path, text.getvalue(), durable=False)
    write_text(path.with_suffix(".tex"), latex(lines), durable=False)
    return path


def latex(lines: Lines) -> str:
    """A ``tabular`` with the rules of booktabs."""
    head, *rows = [" & ".join(cell.translate(_LATEX) for cell in line) + r" \\" for line in lines]
    columns = "l" + "r" * (len(lines[0]) - 1)
    body = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(body) + "\n"
