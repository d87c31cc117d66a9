"""The parts of the page of runs: each is a function of the runs that returns HTML, empty if it has nothing to show."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..config import load_config
from ..runs.records import flat_metrics
from ..runs.summary import for_people, human_bytes, per_client_and_round, seconds
from ..settings.metrics import wilson
from .look import plot, table
from .runs import Shown

#: of clients whose labels are drawn; more are said in a sentence
MOST_CLIENTS = 200
#: of classes whose counts are written into a confusion matrix
_MOST_CLASSES = 12
_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d")
_HALVES = {
    "lora_A": ("A", "solid"),
    "lora_B": ("B", "dash"),
    "adapter": ("adapter", "solid"),
    "head": ("head", "dot"),
    "base": ("base weights", "dashdot"),
}

Trace = dict[str, Any]


def _note(text: str) -> str:
    return f"<p class=note>{html.escape(text)}</p>"


def _grid(plots: Sequence[str]) -> str:
    return f"<div class=plots>{''.join(plots)}</div>" if plots else ""


def _layout(title: str, x: str = "", y: str = "") -> dict[str, Any]:
    return {"title": {"text": title}, "xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


# -- figures ---------------------------------------------------------------------------------------------


def figures(runs: Sequence[Shown]) -> str:
    """The metrics of each run's last and of its best round, bytes and seconds; and whether something was learned."""
    metrics = sorted({name for run in runs for name in _last(run)})
    best = {run.name: _best(run) for run in runs}
    of_best = [name for name in metrics if name.startswith("test ") and any(name in of for of in best.values())]
    chosen = ["best round"] * any(best.values()) + [f"{name} of it" for name in of_best]
    head = ["run", "rounds", *metrics, *chosen, "majority class"]
    rows = []
    for run in runs:
        last = _last(run)
        at = run.history[-1]["round"] if run.history else 0
        row: list[Any] = [run.name, f"{at} of {run.rounds}", *(last.get(name, "") for name in metrics)]
        row += [best[run.name].get(name, "") for name in (["round", *of_best] if chosen else [])]
        row.append(run.chance.share if run.chance else "")
        sent = per_client_and_round(run.history) if run.history else {"uplink": 0.0, "downlink": 0.0}
        row += [(human_bytes(sent[way]), sent[way]) for way in ("uplink", "downlink")]
        rows.append([*row, round(seconds(run.history)["training"], 1) if run.history else ""])
    said = [f"{run.name}: {verdict}." for run in runs if (verdict := run.verdict)]
    return (
        table("figures", [*head, "sent up", "sent down", "training s"], rows)
        + "".join(f'<p class="fails">{html.escape(line)}</p>' for line in said)
        + _note(
            "Metrics are those of the last evaluated round. The best round is the best by validation data, never by "
            "test data: the best of several evaluations on test data is too high an estimate. Bytes are per client and "
            "round."
        )
    )


def _kinds(runs: Sequence[Shown]) -> list[tuple[str, str]]:
    """The splits and metrics that some round has."""
    return sorted({(split, m) for run in runs for r in run.history for split, v in r["metrics"].items() for m in v})


def _last(run: Shown) -> dict[str, float]:
    last: Mapping[str, Any] = next((r["metrics"] for r in reversed(run.history) if r["metrics"]), {})
    return {name.replace("_", " "): value for name, value in flat_metrics(last).items()}


def _best(run: Shown) -> dict[str, Any]:
    """The number of the best round by validation data as ``round``, and its metrics."""
    found = {name: value for name, value in run.summary.get("best", {}).items() if name != "by"}
    return {name.replace("_", " "): value for name, value in for_people(found, run.language).items()}


# -- curves ----------------------------------------------------------------------------------------------

_PLACES = {"round": "round", "bytes": "bytes sent, both ways", "seconds": "seconds"}


def curves(runs: Sequence[Shown]) -> str:
    """Every metric by round, the accuracy by bytes and seconds too; training loss, norms and drift."""
    if not any(run.history for run in runs):
        return "<p>No round has ended yet.</p>"
    plots = []
    for split, metric in _kinds(runs):
        for x in _PLACES:
            if x == "round" or (split == "test" and metric.endswith("acc")):
                traces = [t for i, run in enumerate(runs) for t in _metric(run, i, x, split, metric)]
                if (split, metric) == ("test", "acc"):
                    traces += _majority(runs, x)
                plots.append(
                    _curve(f"{split}-{metric}-{x}".replace("_", "-"), f"{split} {metric}".replace("_", " "), x, traces)
                )
    losses = [_line(run, i, _values(run, "loss")) for i, run in enumerate(runs)]
    plots.append(_curve("loss", "training loss", "round", losses))
    for key, name in (("adapter_norm", "norm of what is trained"), ("drift", "drift: a client's change, mean norm")):
        halves = [
            {**_line(run, i, points), "name": f"{run.name}, {half}" if len(runs) > 1 else half}
            | {"line": {"color": _COLOURS[i % len(_COLOURS)], "dash": dash}}
            for i, run in enumerate(runs)
            for group, (half, dash) in _HALVES.items()
            if (points := _values(run, key, group))
        ]
        if halves:
            plots.append(_curve(key, name, "round", halves))
    return _grid(plots) + _note(
        "Bands of an accuracy are one standard error of the held-out data. The training loss is that of the clients on "
        "their own data while they train: with skewed classes it falls within a round even if the global model learns "
        "nothing. A click on a name hides its curve."
    )


def _values(run: Shown, *keys: str) -> list[tuple[dict[str, float], float]]:
    """Of every record that has a value under ``keys``: where it stands, and the value."""
    sent = spent = 0.0
    found = []
    for record in run.history:
        sent += record["uplink_bytes"] + record["downlink_bytes"]
        spent += sum(record["seconds"].values())
        value: Any = record
        for key in keys:
            value = (value or {}).get(key)
        if value is not None and math.isfinite(value):
            found.append(({"round": record["round"], "bytes": sent, "seconds": spent}, value))
    return found


def _line(run: Shown, i: int, points: Sequence[tuple[dict[str, float], float]], x: str = "round") -> Trace:
    return {
        "x": [at[x] for at, _ in points],
        "y": [y for _, y in points],
        "mode": "lines+markers",
        "name": run.name,
        "line": {"color": _COLOURS[i % len(_COLOURS)]},
    }


def _metric(run: Shown, i: int, x: str, split: str, metric: str) -> list[Trace]:
    """The curve of a metric, and for an accuracy its band of one standard error."""
    points = _values(run, "metrics", split, metric)
    line, size = _line(run, i, points, x), run.size(split)
    if not size or metric != "acc":
        return [line]
    ends = [wilson(y, size) for _, y in points]
    edge = [high for _, high in ends] + [low for low, _ in ends][::-1]
    band = {"x": line["x"] + line["x"][::-1], "y": edge, "fill": "toself", "mode": "lines", "line": {"width": 0}}
    band |= {"fillcolor": _COLOURS[i % len(_COLOURS)] + "26", "hoverinfo": "skip", "showlegend": False}
    return [{**line, "legendgroup": run.name}, {**band, "legendgroup": run.name}]


def _majority(runs: Sequence[Shown], x: str) -> list[Trace]:
    ends = [at[x] for run in runs for at, _ in _values(run, "metrics", "test", "acc")]
    share = next((run.chance.share for run in runs if run.chance), None)
    if share is None or not ends:
        return []
    line = {"color": "#888", "dash": "dot"}
    return [{"x": [min(ends), max(ends)], "y": [share] * 2, "mode": "lines", "name": "majority class", "line": line}]


def _curve(name: str, title: str, x: str, traces: Sequence[Trace]) -> str:
    """A plot whose rounds are whole, and whose y axis is long enough that noise does not fill it."""
    layout = _layout(f"{title} by {_PLACES[x]}")
    last = max((max(trace["x"], default=0) for trace in traces), default=0)
    if x == "round":
        layout["xaxis"]["dtick"] = max(1, math.ceil(last / 12))
    values = [y for trace in traces for y in trace["y"]]
    if values:
        low, high = min(values), max(values)
        least = 0.1 if title.endswith("acc") else 0.25 * max(abs(low), abs(high))
        pad = max(0.06 * (high - low), (least - (high - low)) / 2)
        layout["yaxis"]["range"] = [low - pad, high + pad]
    return plot(name, traces, layout)


# -- data and clients ------------------------------------------------------------------------------------


def data(runs: Sequence[Shown]) -> str:
    """What was read, dropped, cut and held out."""
    rows = []
    for run in (r for r in runs if r.data):
        sizes = run.data["sizes"]
        dropped = "; ".join(f"{count} ({why})" for why, count in run.data["skipped"].items() if count) or "none"
        cut = "; ".join(f"{count} of {split}" for split, count in (run.data.get("truncated") or {}).items() if count)
        held = [f"{len(run.data[s]['rows'])} {s}" for s in ("validation", "test") if s in run.data]
        clients = f"{len(sizes)}, of {sizes.min()} to {sizes.max()}"
        row = [
            run.name,
            run.data["source"],
            run.data.get("read", ""),
            int(sizes.sum()),
            clients,
            ", ".join(held) or "none",
        ]
        again = "; ".join(f"{n} of {split}" for split, n in run.data.get("repeated", {}).items() if n) or "none"
        rows.append([*row, dropped, cut + f" to {run.data['tok_len']} tokens" if cut else "none", again])
    head = ["run", "source", "rows read", "training rows", "clients", "held out", "left out", "cut", "also in training"]
    return table("data", head, rows) if rows else ""


def clients(runs: Sequence[Shown]) -> str:
    """The clients' classes, their scores, and what they took part in."""
    plots, notes, seen = [], [], set()
    for run in (r for r in runs if r.data):
        everyone = run.data["clients"]
        drawn = everyone[:MOST_CLIENTS]
        key = json.dumps([len(everyone), *(c.get("labels", c["size"]) for c in drawn)])
        if key in seen:
            continue
        seen.add(key)
        names = list(drawn[0].get("labels", {})) or ["samples"]
        traces = [
            {"type": "bar", "name": name, "x": [c["client"] for c in drawn]}
            | {"y": [c["labels"][name] if "labels" in c else c["size"] for c in drawn]}
            for name in names
        ]
        title = "training samples of each client" + f": {run.name}" * (len(runs) > 1 and len(seen) > 1)
        layout = {**_layout(title), "barmode": "stack"}
        if len(drawn) <= 30:
            layout["xaxis"]["dtick"] = 1
        plots.append(plot(f"clients-{len(seen)}", traces, layout))
        if len(everyone) > MOST_CLIENTS:
            notes.append(_note(f"The first {MOST_CLIENTS} of {len(everyone)} clients are drawn."))
    return _grid([*plots, *_scores(runs)]) + "".join(notes) + _taken_part(runs) if plots else ""


def _accuracies(run: Shown) -> dict[str, dict[str, float]]:
    """The accuracy by client on its share of the test set: of the global model, and of the clients' own models."""
    found = {
        "the global model": run.summary.get("on_test", {}).get("clients", {}),
        "own models": next((r["client_scores"] for r in reversed(run.history) if "client_scores" in r), {}),
    }
    scored = {whose: {c: s["acc"] for c, s in scores.items() if "acc" in s} for whose, scores in found.items()}
    return {whose: scores for whose, scores in scored.items() if scores}


def _scores(runs: Sequence[Shown]) -> list[str]:
    """Of classifiers: the accuracy on each client's share of the test set, and the confusion matrix."""
    bars = [
        {"type": "bar", "name": f"{run.name}, {whose}", "x": [int(c) for c in scores], "y": list(scores.values())}
        for run in runs
        for whose, scores in _accuracies(run).items()
    ]
    layout = _layout("accuracy on each client's share of the test set")
    layout["yaxis"]["range"] = [0, 1]
    plots = [plot("client-scores", bars, layout)] if bars else []
    for i, run in enumerate(runs):
        if "on_test" not in run.summary:
            continue
        counts, names = run.summary["on_test"]["confusion"], [str(name) for name in run.summary.get("labels") or ()]
        shares = [[count / max(sum(row), 1) for count in row] for row in counts]
        heat: Trace = {"type": "heatmap", "x": names, "y": names, "z": shares, "zmin": 0, "zmax": 1, "showscale": False}
        heat |= {"colorscale": [[0, "rgba(37,99,235,0.06)"], [1, "rgba(37,99,235,0.6)"]], "text": counts}
        heat["hovertemplate"] = "true %{y}, predicted %{x}: %{text}<extra></extra>"
        if len(counts) <= _MOST_CLASSES:
            heat["texttemplate"] = "%{text}"
        layout = _layout(f"confusion: {run.name}", "predicted class", "true class")
        layout["xaxis"] |= {"type": "category", "showgrid": False}
        layout["yaxis"] |= {"type": "category", "showgrid": False, "autorange": "reversed"}
        plots.append(plot(f"confusion-{i + 1}", [heat], layout))
    return plots


def _taken_part(runs: Sequence[Shown]) -> str:
    """A table of all clients: samples, rounds, bytes, scores."""
    rows: list[list[Any]] = []
    kinds = sorted({whose for run in runs for whose in _accuracies(run)})
    for run in (r for r in runs if r.data):
        accuracies = _accuracies(run)
        for client in run.data["clients"][:MOST_CLIENTS]:
            own = [r for r in run.history if client["client"] in r["clients"]]
            key = str(client["client"])
            sent = sum(r["client_uplink_bytes"].get(key, 0) for r in own)
            row = [run.name, client["client"], client["size"], len(own), (human_bytes(sent), sent)]
            rows.append(row + [accuracies.get(whose, {}).get(key, "") for whose in kinds])
    head = ["run", "client", "samples", "rounds that count", "sent up in all", *(f"test acc of {k}" for k in kinds)]
    return table("clients", head, rows) if rows else ""


def failures(runs: Sequence[Shown]) -> str:
    """Clients that failed, and rounds that were left out."""
    rows = []
    for run in runs:
        for r in run.history:
            rows += [[run.name, r["round"], f["client"], f["kind"], f["reason"]] for f in r["failed"]]
            if r.get("skipped"):
                rows.append([run.name, r["round"], "", "left out", r["skipped"]])
    return table("failures", ["run", "round", "client", "what", "reason"], rows) if rows else ""


def settings(runs: Sequence[Shown]) -> str:
    """The keys that are not at their default; those in which the runs differ come first."""
    given = [run.config.decisive() for run in runs]
    plain = load_config({"federate.client_num": 1}).decisive()
    keys = sorted(k for k in {k for g in given for k in g} if any(g.get(k) != plain.get(k) for g in given))
    differ = {k for k in keys if len({json.dumps(g.get(k), sort_keys=True, default=str) for g in given}) > 1}
    keys.sort(key=lambda k: (k not in differ, k))
    rows = [[("≠ " if k in differ else "") + k, *("" if g.get(k) is None else str(g[k]) for g in given)] for k in keys]
    note = "Keys at their default are left out." + " ≠: the runs differ." * (len(runs) > 1)
    return table("settings", ["key", *(run.name for run in runs)], rows) + _note(note)


#: id, heading and function of each part, in the order of the page
PARTS: tuple[tuple[str, str, Callable[[Sequence[Shown]], str]], ...] = (
    ("summary", "Figures", figures),
    ("curves", "Curves", curves),
    ("data", "Data", data),
    ("clients", "Clients", clients),
    ("failures", "Rounds with failures", failures),
    ("settings", "Settings", settings),
)
