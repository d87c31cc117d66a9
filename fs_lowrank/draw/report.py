"""The page of a run, or of several side by side: the result, then curves, clients, data and settings."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ..config import Config, load_config
from ..errors import counted
from ..jobs.files import write_text
from ..settings.metrics import larger_is_better, standard_error
from .page import Folded, Item, Note, PageTable, Section, document
from .panels import Panel
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
    """What the page shows of a run.

    Attributes:
        name: that tells it from the others. label: what runs that differ in their seed alone have in common.
        ended: whether the run has. history: its records. data: of ``read_split``. labels: of the classes.
        last: the metrics of the last evaluated round. best: the number of the best round by validation data as
            ``round``, the metric as ``by``, and its metrics. on_test: of ``summary.json``.
        verdict: a sentence, if nothing was learned. majority: the fraction of the test set's most frequent class.
        held_out: number of samples by split, if they have classes.
        sent: bytes that a client sends and receives in a round, as ``uplink`` and ``downlink``. seconds: by what for.
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
        """What all clients send and receive in the whole run."""
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
    lead = [setting_of(of[0].config, seeds=[run.config.seed for run in of]) for of in groups.values()]
    sections = [
        Section("result", "Result", _result(groups)),
        Section("curves", "Curves", _curves(groups)),
        Section("clients", "Clients", _clients(runs)),
        Section("failures", "Rounds with failures", _failures(runs)),
        Section("data", "Data", _data(runs)),
        Section("settings", "Settings", _settings(runs)),
    ]
    lead = [*dict.fromkeys(lead), *([state] if going else [])]
    write_text(Path(out), document(_title(groups), sections, lead=lead, renew=renew if going else 0.0))
    return Path(out)


def _title(groups: Mapping[str, Sequence[Shown]]) -> str:
    """The methods, the data and the number of clients."""
    configs = [of[0].config for of in groups.values()]
    data = dict.fromkeys(Path(config.data.type.partition("@")[0]).name for config in configs)
    clients = max(config.taking_part for config in configs)
    what = _listed([*groups]) if len(groups) < 5 else f"{len(groups)} methods"
    return f"{what} on {_listed([*data])}, {counted(clients, 'client')}"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _spoken(name: str) -> str:
    return name.replace("_", " ")


# -- result ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Score:
    """How runs that differ in their seed alone score by the metric that counts.

    Attributes:
        by_seed: the values. mean: of them. error: their standard deviation; of one run the standard error of an
            accuracy; None: not known. behind: by how much the mean is worse than the best.
        sure: half of the interval of 95 % of ``behind``; None: not known.
    """

    label: str
    runs: Sequence[Shown]
    by_seed: Mapping[int, float]
    mean: float
    error: float | None
    behind: float = 0.0
    sure: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" ± {self.error:.3f}" if self.error is not None else "")

    def mean_of(self, way: str) -> float:
        """kB that a client sends (``uplink``) or receives (``downlink``) in a round, over the runs."""
        return fmean(run.sent[way] for run in self.runs) / 1e3

    @property
    def megabytes(self) -> float:
        return fmean(run.megabytes for run in self.runs)


def _scores(groups: Mapping[str, Sequence[Shown]], split: str, metric: str) -> list[_Score]:
    """The groups that have a score, the best one first."""
    found, sign = [], 1 if larger_is_better(metric) else -1
    for label, runs in groups.items():
        if by_seed := {run.config.seed: run.last[key] for run in runs if (key := f"{split}_{metric}") in run.last}:
            values, size = [*by_seed.values()], runs[0].held_out.get(split, 0) if metric == "acc" else 0
            error = stdev(values) if len(values) > 1 else standard_error(values[0], size) if size else None
            found.append(_Score(label, runs, by_seed, fmean(values), error))
    found.sort(key=lambda score: -sign * score.mean)
    return [_against(score, found[0], sign) for score in found]


def _against(score: _Score, best: _Score, sign: int) -> _Score:
    """With by how much it is worse: by the seeds of both, or else by the test rows of their only run."""
    seeds = score.by_seed.keys() & best.by_seed.keys()
    gaps = [sign * (best.by_seed[seed] - score.by_seed[seed]) for seed in seeds]
    if len(gaps) > 1:
        from scipy.special import stdtrit

        sure = float(stdtrit(len(gaps) - 1, 0.975)) * stdev(gaps) / math.sqrt(len(gaps))
        return replace(score, behind=fmean(gaps), sure=sure)
    known = len(score.by_seed) == len(best.by_seed) == 1 and score.error is not None and best.error is not None
    sure = 1.96 * math.hypot(score.error or 0.0, best.error or 0.0)
    return replace(score, behind=sign * (best.mean - score.mean), sure=sure if known else None)


def _result(groups: Mapping[str, Sequence[Shown]]) -> list[Item]:
    """What came out: which method, by how much, how sure, at what price; or the figures of the only one."""
    runs = [run for of in groups.values() for run in of]
    split, metric = main_metric({run.name: [run.history] for run in runs}, _majority(runs))
    scores = _scores(groups, split, metric)
    if not scores:
        return [Note("No round has been evaluated yet.")]
    several = len(runs) > len(groups)
    about = [
        "± is one standard deviation over the seeds"
        if several
        else f"± is one standard error of {runs[0].held_out.get(split, 0):,} {split} samples"
    ] * any(score.error is not None for score in scores)
    about += ["metrics are those of the last evaluated round", "the best round is the best by validation data"]
    if len(groups) > 1:
        by = "the differences of equal seeds" if several else "the samples alone: another seed may change more"
        about.append(f"behind the best: the difference and its interval of 95 %, by {by}")
    figures = _figures(runs)
    return [
        Note(_answer(scores, words(split, metric)), "answer"),
        *([_ranking(scores, words(split, metric))] if len(groups) > 1 else [figures]),
        *(Note(f"{run.name}: {run.verdict}.", "fails") for run in runs if run.verdict),
        Note("; ".join(about).capitalize() + "."),
        *([Folded("All figures", [figures])] if len(groups) > 1 else []),
    ]


def _majority(runs: Sequence[Shown]) -> float | None:
    return next((run.majority for run in runs if run.majority is not None), None)


def _answer(scores: Sequence[_Score], name: str) -> str:
    """Which method, by how much, how sure, at what price."""
    best, *others = scores
    share = _majority(best.runs)
    said = [f"{best.label} has {'the best' if others else 'a'} {name} of {best}"]
    said[0] += f"; the most frequent class alone gives {share:.3f}" if share is not None else ""
    clear = [score.label for score in others if score.sure is not None and score.behind > score.sure]
    unsure = [score for score in others if score.sure is not None and score.behind <= score.sure]
    if clear:
        said.append(f"behind by more than chance explains: {_listed(clear)}")
    if unsure:
        said.append(f"the difference to {_listed([score.label for score in unsure])} may be chance")
    if len(clear) + len(unsure) < len(others):
        said.append("how sure that is, one run of each cannot tell: compare with several seeds")
    equal = [score for score in (best, *unsure) if score.megabytes]
    if equal:
        cheap = min(equal, key=lambda score: score.megabytes)
        all_of_them = f"of {_listed([score.label for score in equal])}, {cheap.label} sends least"
        price = f"{cheap.mean_of('uplink'):.4g} kB up and {cheap.mean_of('downlink'):.4g} kB down per client and round"
        who = all_of_them if len(equal) > 1 else f"the price of {cheap.label}"
        said.append(f"{who}: {price}, {cheap.megabytes:.4g} MB in all")
    return " ".join(f"{line[0].upper() if i else line[0]}{line[1:]}." for i, line in enumerate(said))


def _ranking(scores: Sequence[_Score], name: str) -> PageTable:
    """The methods from the best to the worst."""
    rows = []
    for score in scores:
        behind = f"{score.behind:.3f}"
        if score.sure is not None:
            behind += f" ({score.behind - score.sure:.3f} to {score.behind + score.sure:.3f})".replace("-", "−")
        training = fmean(run.seconds.get("training", 0.0) for run in score.runs)
        price = score.mean_of("uplink"), score.mean_of("downlink"), score.megabytes, training
        cell = ("the best" if score is scores[0] else behind, score.behind)
        rows.append([score.label, (str(score), score.mean), cell, *price])
    head = ["method", name, "behind the best", "kB up, client and round", "kB down", "MB in all", "training s"]
    return PageTable("result", head, rows, cards=True)


def _figures(runs: Sequence[Shown]) -> PageTable:
    """Every metric, bytes and seconds."""
    columns = []
    for run in runs:
        figures: dict[str, Any] = {_spoken(name): value for name, value in run.last.items()}
        if run.best:
            figures["best round"] = f"{run.best['round']} by {_spoken(run.best['by'])}"
            figures |= {f"{_spoken(name)} in it": run.best[name] for name in run.last.keys() & run.best.keys()}
        figures |= {} if run.majority is None else {"majority class": run.majority}
        figures |= {f"{way}, kB per client and round": run.sent[way] / 1e3 for way in ("uplink", "downlink")}
        figures |= {"sent in all, MB": run.megabytes, **{f"{what}, s": spent for what, spent in run.seconds.items()}}
        columns.append(figures)
    return _facts("figures", runs, columns)


def _facts(name: str, runs: Sequence[Shown], columns: Sequence[Mapping[str, Any]]) -> PageTable:
    """A row for each fact that some run has, and a column for each run, or one for all that do not differ."""
    names = ["all runs"] if len(runs) > 1 and all(c == columns[0] for c in columns) else [run.name for run in runs]
    keys = dict.fromkeys(key for column in columns for key, value in column.items() if value != "")
    return PageTable(name, ["", *names], [[key, *(c.get(key, "") for c in columns[: len(names)])] for key in keys])


# -- curves and clients ----------------------------------------------------------------------------------


def _curves(groups: Mapping[str, Sequence[Shown]]) -> list[Item]:
    histories = {label: [run.history for run in runs] for label, runs in groups.items()}
    first = next(iter(groups.values()))[0]
    given = (histories, first.majority, first.held_out)
    panels = curve_panels(*given)
    if not panels:
        return [Note("No round has ended yet.")]
    about = Note(
        f"{band_of(*given)}. ".lstrip(". ").capitalize() + "The training loss is that of the clients on their own data "
        "while they train: with skewed classes it falls within a round even if the global model learns nothing."
    )
    others = [panel for panel in panels if not panel.main]
    folded = [Folded("Other metrics, seconds, training loss, norms", others)] if others else []
    return [*(panel for panel in panels if panel.main), about, *folded]


def _clients(runs: Sequence[Shown]) -> list[Item]:
    """The clients' classes, their scores, the confusion matrix, and what each client took part in."""
    panels: list[Panel] = []
    for run in runs:
        if run.data and (panel := client_panel(run.data)).marks not in [other.marks for other in panels]:
            panels.append(panel)  # mostly all runs have the same clients
    scores = {f"{r.name}, {whose}" if len(runs) > 1 else whose: of for r in runs for whose, of in _by_client(r).items()}
    panels += [score_panel(scores, _majority(runs))] if scores else []
    for run in runs:
        if run.on_test:
            panel = confusion_panel(run.on_test["confusion"], run.labels)
            panels.append(replace(panel, title=f"{panel.title}: {run.name}") if len(runs) > 1 else panel)
    kinds = dict.fromkeys(whose for run in runs for whose in _by_client(run))
    rows = []
    for run in runs:
        by_client = _by_client(run)
        for client in run.data["clients"][:MOST_CLIENTS] if run.data else ():
            key, own = str(client["client"]), [r for r in run.history if client["client"] in r["clients"]]
            sent = sum(r["client_uplink_bytes"].get(key, 0) for r in own) / 1e3
            of = [by_client.get(whose, {}).get(key, {}).get("acc", "") for whose in kinds]
            rows.append([run.name, client["client"], client["size"], len(own), sent, *of])
    head = ["run", "client", "samples", "rounds that count", "kB sent up", *(f"test acc of {kind}" for kind in kinds)]
    numbered = [replace(panel, key=f"{panel.key}-{i + 1}") for i, panel in enumerate(panels)]
    return [*numbered, Folded("Each client", [PageTable("clients", head, rows)])] if rows else []


def _by_client(run: Shown) -> dict[str, dict[str, dict[str, float]]]:
    """The scores by client on its share of the test set: of the global model, and of the clients' own models."""
    own: dict[str, dict[str, float]] = next(
        (record["client_scores"] for record in reversed(run.history) if "client_scores" in record), {}
    )
    found = {"the global model": run.on_test.get("clients", {}), "own models": own}
    scored = {whose: {c: of for c, of in scores.items() if "acc" in of} for whose, scores in found.items()}
    return {whose: scores for whose, scores in scored.items() if scores}


# -- data and settings -----------------------------------------------------------------------------------


def _failures(runs: Sequence[Shown]) -> list[Item]:
    """Clients that failed, and rounds that were left out."""
    rows = []
    for run in runs:
        for r in run.history:
            rows += [[run.name, r["round"], f["client"], f["kind"], f["reason"]] for f in r["failed"]]
            if r.get("skipped"):
                rows.append([run.name, r["round"], "", "left out", r["skipped"]])
    return [PageTable("failures", ["run", "round", "client", "what", "reason"], rows)] if rows else []


def _data(runs: Sequence[Shown]) -> list[Item]:
    """What was read, dropped, cut and held out."""
    runs, columns = [run for run in runs if run.data], []
    for data in (run.data for run in runs):
        sizes, cut = data["sizes"], data.get("truncated") or {}
        facts = {"source": data["source"], "rows read": data.get("read", ""), "training rows": int(sizes.sum())}
        facts["clients"] = f"{len(sizes)}, of {sizes.min()} to {sizes.max()} rows"
        facts["held out"] = ", ".join(f"{len(data[s]['rows'])} {s}" for s in ("validation", "test") if s in data)
        facts["left out"] = "; ".join(f"{count} ({why})" for why, count in data["skipped"].items() if count)
        facts[f"cut to {data.get('tok_len')} tokens"] = "; ".join(f"{n} of {s}" for s, n in cut.items() if n)
        again = (data.get("repeated") or {}).items()
        facts["also in training"] = "; ".join(f"{n} of {s}" for s, n in again if n)
        columns.append(facts)
    return [_facts("data", runs, columns)] if runs else []


def _settings(runs: Sequence[Shown]) -> list[Item]:
    """The keys that are not at their default; those in which the runs differ come first."""
    given = [run.config.decisive() for run in runs]
    plain = load_config({"federate.client_num": 1}).decisive()
    keys = sorted(k for k in {k for g in given for k in g} if any(g.get(k) != plain.get(k) for g in given))
    differ = {k for k in keys if len({json.dumps(g.get(k), sort_keys=True, default=str) for g in given}) > 1}
    keys.sort(key=lambda k: (k not in differ, k))
    rows = [[("≠ " if k in differ else "") + k, *("" if g.get(k) is None else str(g[k]) for g in given)] for k in keys]
    note = "Keys at their default are left out." + " ≠: the runs differ." * (len(runs) > 1)
    return [PageTable("settings", ["key", *(run.name for run in runs)], rows), Note(note)]
