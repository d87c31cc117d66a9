"""The page of a run, or of several side by side: the result, then curves, clients, data and settings.

The parts outside a fold answer questions; all figures, other curves and each client are folded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ..config import Config, load_config
from ..errors import between, counted
from ..jobs.files import write_text
from ..settings.metrics import larger_is_better, standard_error
from .page import Item, Note, PageTable, Section, document
from .panels import digits
from .runs import (
    MOST_CLIENTS,
    band_of,
    client_panel,
    confusion_panel,
    curve_panels,
    main_metric,
    score_panel,
    setting_of,
    words,
)


@dataclass
class Shown:
    """The contents of the page for one run.

    Attributes:
        name: of this run alone. label: the same for runs that differ in their seed alone.
        ended: whether the run has. history: its records. data: of ``read_split``. labels: of the classes.
        last: the metrics of the last evaluated round. best: the number of the best round by validation data as
            ``round``, the metric as ``by``, and its metrics. on_test: of ``summary.json``.
        verdict: a sentence, if nothing was learned. majority: the fraction of the test set's most frequent class.
        held_out: number of samples by split, if they have classes.
        sent: bytes that a client sends and receives in a round, as ``uplink`` and ``downlink``. seconds: by phase.
    """

    name: str
    label: str
    config: Config
    ended: bool
    history: list[dict[str, Any]]
    data: dict[str, Any]
    labels: list[str] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    on_test: dict[str, Any] = field(default_factory=dict)
    verdict: str = ""
    majority: float | None = None
    held_out: dict[str, int] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def megabytes(self) -> float:
        """Megabytes that all clients send and receive in the whole run."""
        return sum(record["uplink_bytes"] + record["downlink_bytes"] for record in self.history) / 1e6


def write_page(runs: Sequence[Shown], out: str | Path, renew: float = 0.0) -> Path:
    """Write the page.

    Args:
        renew: seconds after which a browser loads it again, while a run goes on; 0: never.
    Raises:
        RunFailed: the file cannot be written.
    """
    groups: dict[str, list[Shown]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    going = [f"{r.name}, round {len(r.history)} of {r.config.federate.total_round_num}" for r in runs if not r.ended]
    state = f"still running, or ended early: {'; '.join(going)}; read at {time.strftime('%H:%M:%S')}"
    sections = [
        Section("result", "Result", _result(groups)),
        Section("curves", "Curves", _curves(groups)),
        Section("clients", "Clients", _clients(runs)),
        Section("failures", "Rounds with failures", _failures(runs)),
        Section("data", "Data", _data(runs)),
        Section("settings", "Settings", _settings(runs)),
    ]
    lead = dict.fromkeys(setting_of(g[0].config, seeds=[run.config.seed for run in g]) for g in groups.values())
    lead |= {state: None} if going else {}
    write_text(Path(out), document(_title(groups), sections, lead=[*lead], renew=renew if going else 0.0))
    return Path(out)


def _title(groups: Mapping[str, Sequence[Shown]]) -> str:
    """The methods, the data and the number of clients."""
    configs = [group[0].config for group in groups.values()]
    data = dict.fromkeys(Path(config.data.type.partition("@")[0]).name for config in configs)
    clients = max(config.taking_part for config in configs)
    methods = _listed([*groups]) if len(groups) < 5 else f"{len(groups)} methods"
    return f"{methods} on {_listed([*data])}, {counted(clients, 'client')}"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


# -- result ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Score:
    """How runs that differ in their seed alone score by the metric that counts.

    Attributes:
        by_seed: the values. mean: of them. error: their standard deviation; where every label has one run, the standard
            error of an accuracy; None: not known. behind: by how much the mean is worse than the best.
        price: means over the runs of the kB that a client sends and receives in a round, MB in all, training seconds.
        sure: half of the interval of 95 % of ``behind``; None: not known.
    """

    label: str
    runs: Sequence[Shown]
    by_seed: Mapping[int, float]
    mean: float
    error: float | None
    price: Sequence[float]
    behind: float = 0.0
    sure: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" ± {self.error:.3f}" if self.error is not None else "")


def _scores(groups: Mapping[str, Sequence[Shown]], split: str, metric: str) -> list[_Score]:
    """The groups that have a score, the best one first."""
    scores, sign = [], 1 if larger_is_better(metric) else -1
    sized = metric == "acc" and all(len(runs) == 1 for runs in groups.values())  # ± has one meaning in a table
    for label, runs in groups.items():
        if by_seed := {run.config.seed: run.last[key] for run in runs if (key := f"{split}_{metric}") in run.last}:
            values, size = [*by_seed.values()], runs[0].held_out.get(split, 0) if sized else 0
            error = stdev(values) if len(values) > 1 else standard_error(values[0], size) if size else None
            sent = ([r.sent["uplink"] / 1e3, r.sent["downlink"] / 1e3, r.megabytes] for r in runs)
            price = [*map(fmean, zip(*sent)), fmean(r.seconds.get("training", 0.0) for r in runs)]
            scores.append(_Score(label, runs, by_seed, fmean(values), error, price))
    scores.sort(key=lambda score: -sign * score.mean)
    return [_against(score, scores[0], sign) for score in scores]


def _against(score: _Score, best: _Score, sign: int) -> _Score:
    """With by how much it is worse: by the seeds of both, or else by the test rows of their only run."""
    seeds = score.by_seed.keys() & best.by_seed.keys()
    gaps = [sign * (best.by_seed[seed] - score.by_seed[seed]) for seed in seeds]
    if len(gaps) > 1:
        from scipy.special import stdtrit

        sure = float(stdtrit(len(gaps) - 1, 0.975)) * stdev(gaps) / math.sqrt(len(gaps))
        return replace(score, behind=fmean(gaps), sure=sure)
    single = len(score.by_seed) == len(best.by_seed) == 1 and score.error is not None and best.error is not None
    sure = 1.96 * math.hypot(score.error or 0.0, best.error or 0.0)
    return replace(score, behind=sign * (best.mean - score.mean), sure=sure if single else None)


def _result(groups: Mapping[str, Sequence[Shown]]) -> list[Item]:
    """The result: the best method, its lead, how sure that is, and the price."""
    runs = [run for group in groups.values() for run in group]
    split, metric = main_metric({run.name: [run.history] for run in runs}, _language(runs))
    scores = _scores(groups, split, metric)
    if not scores:
        return [Note("No round has been evaluated yet.")]
    several = len(runs) > len(groups)
    rows = f"standard error of {runs[0].held_out.get(split, 0):,} {split} samples"
    spread = f"± is one {'standard deviation over the seeds' if several else rows}"
    notes = [spread] * any(score.error is not None for score in scores)
    notes += ["metrics are those of the last evaluated round", "the best round is the best by validation data"]
    if len(groups) > 1:
        basis = "the differences of equal seeds" if several else "the samples alone: another seed may change more"
        notes.append(f"behind the best: the difference and its interval of 95 %, by {basis}")
    low = [run for run in runs if run.verdict]
    text = low[0].verdict if len(runs) == len(low) == 1 else "not above the most frequent class by two standard errors"
    return [
        Note(_answer(scores, words(split, metric)), "answer"),
        _ranking(scores, words(split, metric)),
        Note(f"{_listed([run.name for run in low])}: {text}." if low else "", "fails"),
        Note("; ".join(notes).capitalize() + "."),
        Section("figures", "All figures", [_figures(runs)]),
    ]


def _majority(runs: Sequence[Shown]) -> float | None:
    return next((run.majority for run in runs if run.majority is not None), None)


def _language(runs: Sequence[Shown]) -> bool:
    return all(run.config.is_language for run in runs)


def _answer(scores: Sequence[_Score], name: str) -> str:
    """The best method, its lead, how sure that is, and the price, in sentences."""
    best, *others = scores
    share = _majority(best.runs)
    sentences = [f"{best.label} has {'the best' if others else 'a'} {name} of {best}"]
    sentences[0] += f"; the most frequent class alone gives {share:.3f}" if share is not None else ""
    clear = [score.label for score in others if score.sure is not None and score.behind > score.sure]
    unsure = [score for score in others if score.sure is not None and score.behind <= score.sure]
    if clear:
        sentences.append(f"behind by more than chance explains: {_listed(clear)}")
    if unsure:
        sentences.append(f"the difference from {_listed([score.label for score in unsure])} may be chance")
    if len(clear) + len(unsure) < len(others):
        sentences.append("how sure that is, one run of each cannot tell: compare with several seeds")
    equal = [score for score in (best, *unsure) if any(score.price[:3])]
    if equal:
        cheap = min(equal, key=lambda score: score.price[2])
        all_of_them = f"of {_listed([score.label for score in equal])}, {cheap.label} sends least"
        subject = all_of_them if len(equal) > 1 else f"the price of {cheap.label}"
        up, down, in_all, _ = map(digits, cheap.price)
        sentences.append(f"{subject}: {up} kB up and {down} kB down per client and round, {in_all} MB in all")
    return " ".join(f"{line[0].upper() if i else line[0]}{line[1:]}." for i, line in enumerate(sentences))


def _ranking(scores: Sequence[_Score], name: str) -> PageTable:
    """The methods from the best to the worst; nothing of a single one."""
    rows = []
    for score in scores if len(scores) > 1 else ():
        behind = f"{score.behind:.3f}"
        if score.sure is not None:
            behind += f" ({score.behind - score.sure:.3f} to {score.behind + score.sure:.3f})".replace("-", "−")
        cell = ("the best" if score is scores[0] else behind, score.behind)
        rows.append([score.label, (str(score), score.mean), cell, *score.price])
    head = ["method", name, "behind the best", "kB up, client and round", "kB down", "MB in all", "training s"]
    return PageTable("result", head, rows)


def _figures(runs: Sequence[Shown]) -> PageTable:
    """Every metric, bytes and seconds."""
    columns = []
    for run in runs:
        figures: dict[str, Any] = dict(run.last)
        if run.best:
            figures["best round"] = f"{run.best['round']} by {run.best['by']}"
            figures |= {f"{name} in it": value for name, value in run.best.items() if name in run.last}
        figures |= {} if run.majority is None else {"majority class": run.majority}
        figures |= {f"{link}, kB per client and round": run.sent[link] / 1e3 for link in ("uplink", "downlink")}
        figures |= {"sent in all, MB": run.megabytes, **{f"{phase}, s": spent for phase, spent in run.seconds.items()}}
        columns.append({name.replace("_", " "): value for name, value in figures.items()})
    return _facts("figures", runs, columns)


def _facts(name: str, runs: Sequence[Shown], columns: Sequence[Mapping[str, Any]]) -> PageTable:
    """A row for each fact that some run has, and a column for each run, or one for all that do not differ."""
    names = ["all runs"] if len(runs) > 1 and all(c == columns[0] for c in columns) else [run.name for run in runs]
    keys = dict.fromkeys(key for column in columns for key, value in column.items() if value != "")
    rows = [[key, *(c.get(key, "") for c in columns[: len(names)])] for key in keys]
    return PageTable(name, ["", *names], rows)


# -- curves and clients ----------------------------------------------------------------------------------


def _curves(groups: Mapping[str, Sequence[Shown]]) -> list[Item]:
    histories = {label: [run.history for run in runs] for label, runs in groups.items()}
    first = next(iter(groups.values()))[0]
    language = _language([run for runs in groups.values() for run in runs])
    panels = curve_panels(histories, first.majority, first.held_out, language=language)
    if not panels:
        return [Note("No round has ended yet.")]
    note = Note(
        "The training loss is that of the clients on their own data while they train: with skewed classes it falls "
        "within a round even if the global model learns nothing."
    )
    bands, others = band_of(histories, first.held_out, language=language), [panel for panel in panels if not panel.main]
    name = "Other metrics, training loss, norms"
    return [
        *(panel for panel in panels if panel.main),
        Note(f"{bands.capitalize()}." if bands else ""),
        Section("other-curves", name, [*others, note] if others else []),
    ]


def _clients(runs: Sequence[Shown]) -> list[Item]:
    """The clients' classes, their scores, the confusion matrix, and the rounds and bytes of each client."""
    several, by_client = len(runs) > 1, {run.name: _by_client(run) for run in runs}
    drawn = [client_panel(run.data) for run in runs if run.data]
    panels = [panel for i, panel in enumerate(drawn) if panel.marks not in [other.marks for other in drawn[:i]]]
    panels = [replace(panel, key=f"clients-{i + 1}") for i, panel in enumerate(panels)]  # mostly all runs have the same
    scores = {f"{run}, {kind}" if several else kind: part for run, by in by_client.items() for kind, part in by.items()}
    panels += [score_panel(scores, _majority(runs))] if scores else []
    tested = [(run.name, confusion_panel(run.on_test["confusion"], run.labels)) for run in runs if run.on_test]
    confusions = [replace(panel, key=f"confusion-{name}", title=f"{panel.title}: {name}") for name, panel in tested]
    kinds = dict.fromkeys(kind for by in by_client.values() for kind in by)
    rows = []
    for run in runs:
        for client in run.data["clients"][:MOST_CLIENTS] if run.data else ():
            key, records = str(client["client"]), [r for r in run.history if client["client"] in r["clients"]]
            sent = sum(r["client_uplink_bytes"].get(key, 0) for r in records) / 1e3
            accuracies = [by_client[run.name].get(kind, {}).get(key, {}).get("acc", "") for kind in kinds]
            rows.append([run.name, client["client"], client["size"], len(records), sent, *accuracies])
    head = ["run", "client", "samples", "rounds that count", "kB sent up", *(f"test acc of {kind}" for kind in kinds)]
    return [
        *panels,
        *(confusions if not several else [Section("predictions", "Predictions for the test set", confusions)]),
        Section("each-client", "Each client", [_by_run("clients", head, rows)]),
    ]


def _by_run(name: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> PageTable:
    """A table whose first column is the run; the column is left out where all rows are of one run."""
    first = len({row[0] for row in rows}) == 1
    return PageTable(name, head[first:], [row[first:] for row in rows])


def _by_client(run: Shown) -> dict[str, dict[str, dict[str, float]]]:
    """The scores by client on its share of the test set: of the global model, and of the clients' own models."""
    personal: dict[str, dict[str, float]] = next(
        (record["client_scores"] for record in reversed(run.history) if "client_scores" in record), {}
    )
    sources = {"the global model": run.on_test.get("clients", {}), "own models": personal}
    scored = {kind: {c: values for c, values in scores.items() if "acc" in values} for kind, scores in sources.items()}
    return {kind: scores for kind, scores in scored.items() if scores}


# -- data and settings -----------------------------------------------------------------------------------


def _failures(runs: Sequence[Shown]) -> list[Item]:
    """Clients that failed, and rounds that were left out."""
    rows = []
    for run in runs:
        for r in run.history:
            rows += [[run.name, r["round"], f["client"], f["kind"], f["reason"]] for f in r["failed"]]
            if r.get("skipped"):
                rows.append([run.name, r["round"], "", "left out", r["skipped"]])
    return [_by_run("failures", ["run", "round", "client", "what", "reason"], rows)]


def _data(runs: Sequence[Shown]) -> list[Item]:
    """The rows that were read, left out, cut and held out."""
    runs, columns = [run for run in runs if run.data], []
    for data in (run.data for run in runs):
        sizes, cut = data["sizes"], data.get("truncated") or {}
        facts = {"source": data["source"], "rows read": data.get("read", ""), "training rows": int(sizes.sum())}
        facts["clients"] = f"{len(sizes)}, of {between(sizes)} rows"
        facts["held out"] = ", ".join(f"{len(data[s]['rows'])} {s}" for s in ("validation", "test") if s in data)
        facts["left out"] = "; ".join(f"{count} ({reason})" for reason, count in data["skipped"].items() if count)
        facts[f"cut to {data.get('tok_len')} tokens"] = "; ".join(f"{n} of {s}" for s, n in cut.items() if n)
        repeated = (data.get("repeated") or {}).items()
        facts["also in training"] = "; ".join(f"{n} of {s}" for s, n in repeated if n)
        columns.append(facts)
    return [_facts("data", runs, columns)]


def _settings(runs: Sequence[Shown]) -> list[Item]:
    """The keys that are not at their default: first the keys in which the runs differ, then the others."""
    decisive = [run.config.decisive() for run in runs]
    methods = {run.config.federate.method for run in runs}
    plain = {m: load_config({"federate.client_num": 1, "federate.method": m}).decisive() for m in methods}
    pairs = [(g, plain[g["federate.method"]]) for g in decisive]
    keys = {k for g, usual in pairs for k in g if k == "federate.method" or g[k] != usual.get(k)}
    texts = [{k: "" if g.get(k) is None else str(g[k]) for k in sorted(keys)} for g in decisive]
    differ = {k for k in keys if len({row[k] for row in texts}) > 1}
    return [
        _facts("differences", runs, [{k: v for k, v in row.items() if k in differ} for row in texts]),
        _facts("settings", runs, [{k: v for k, v in row.items() if k not in differ} for row in texts]),
        Note("Keys at their default are left out."),
    ]
