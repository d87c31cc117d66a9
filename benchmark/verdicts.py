"""The claims of a suite in the report: the needs of each, the runs, the seeds, the verdict, the cause.

The needs of a claim and the tested cause are in the suite (``needs``, ``cause``). The runs, the seeds and the verdict
come from the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from fs_lowrank.errors import counted

from .conditions import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    STALE,
    UNTESTED,
    Condition,
    interval_text,
    judge,
    used,
    verdict,
    with_margins,
)
from .intervals import Estimate, pooled
from .metrics import scale_of
from .page import range_of
from .plan import command
from .results import ExperimentResults
from .suite import Suite

#: (suite, experiment) -> its results, for the experiments of other suites
Elsewhere = Callable[[str, str], list[dict]]
_NOTHING = "–"
#: scale of a metric -> the form, factor and unit of its differences
_FORMS: dict[float, tuple[str, float, str]] = {100: (".2f", 100.0, " points"), 0: (".3g", 1e-6, " MB")}


@dataclass
class Row:
    """A claim with its conditions by experiment and what was run for them: a row of the table of all claims.

    Attributes:
        groups: of experiments; those of a group share cells and count as one. runs: experiment -> the results that the
            rule has looked at. lost: experiment -> the number of runs that have failed.
        other_methods: experiment -> the verdicts of a rule of ``keeps`` or ``close`` on the other methods.
        cause: the tested cause, with the runs that tested it; empty for a claim that holds or has no runs.
    """

    suite: Suite
    name: str
    by_experiment: dict[str, list[Condition]]
    groups: list[list[str]]
    runs: dict[str, list[dict]]
    lost: dict[str, int]
    other_methods: dict[str, dict[str, str]]
    cause: str = ""

    @property
    def claim(self) -> dict:
        return self.suite.claims[self.name]

    @property
    def verdicts(self) -> list[str]:
        """The verdict of each group: inconclusive if those of its experiments that were tested differ."""
        result = []
        for group in self.groups:
            judged = {verdict(self.by_experiment[name]) for name in group}
            tested = judged - {UNTESTED} or judged
            result.append(tested.pop() if len(tested) == 1 else INCONCLUSIVE)
        return result

    @property
    def decided(self) -> str:
        """The verdict of the experiments that have all figures."""
        tested = [v for v in self.verdicts if v != UNTESTED]
        if len(set(tested)) < 2:
            return tested[0] if tested else UNTESTED
        first, *further = [f"{v} in {tested.count(v)}" for v in (HOLDS, FAILS, INCONCLUSIVE, STALE) if v in tested]
        return ", ".join([f"{first} of {len(tested)} experiments", *further])

    @property
    def verdict(self) -> str:
        """The verdict, with the experiments that have runs and yet not all figures, while others decide."""
        flags = [any(self.runs[name] for name in group) for group in self.groups]
        untested = sum(v == UNTESTED and has_runs for v, has_runs in zip(self.verdicts, flags))
        return self.decided + (f", not tested in {untested}" if untested and self.decided != UNTESTED else "")

    @property
    def gaps(self) -> dict[str, tuple[Estimate, list[Estimate], Condition]]:
        """Subject -> its estimate over the settings, those of the settings if there are several, and one condition.

        Without experiments in which nothing was learned; of a group only the first that has the comparison.
        """
        compared: dict[str, list[tuple[Estimate, Condition]]] = {}
        for group in self.groups:
            learned = [e for e in group if all(c.verdict == HOLDS for c in self.by_experiment[e] if c.premise)]
            seen = {(c.subject, c.where): c for e in reversed(learned) for c in self.by_experiment[e] if not c.premise}
            for condition in seen.values():
                if condition.estimate is not None:
                    compared.setdefault(condition.subject, []).append((condition.estimate, condition))
        gaps = {}
        for subject, entries in compared.items():
            estimates, conditions = zip(*([entry for entry in entries if entry[0].error] or entries[:1]))
            summary = (pooled(estimates), [*estimates]) if len(estimates) > 1 else (estimates[0], [])
            gaps[subject] = (*summary, conditions[0])
        return gaps

    @property
    def needs(self) -> str:
        return str(self.claim.get("needs") or _NOTHING)

    @property
    def seeds(self) -> dict[str, list[int]]:
        """Experiment -> the seeds of its runs."""
        return {e: _seeds(self.claim["rule"], records) for e, records in self.runs.items() if records}

    @property
    def seeded(self) -> str:
        """The seeds, once if they are the same for all experiments."""
        groups: dict[str, list[str]] = {}
        for name, seeds in self.seeds.items():
            groups.setdefault(_listed(seeds), []).append(name)
        if len(groups) < 2:
            return next(iter(groups), "") or _NOTHING
        return "; ".join(f"{', '.join(names)}: {seeds}" for seeds, names in groups.items() if seeds)

    @property
    def gap(self) -> str:
        """The comparison that is met by the least, with its interval; over the settings, if there are several."""
        gaps = self.gaps
        if not gaps:
            return _NOTHING
        subject = min(gaps, key=lambda name: gaps[name][2].inside(gaps[name][0].centre))
        return gap_text(subject, *gaps[subject])

    @property
    def p(self) -> str:
        """The p values of its conditions, corrected for all conditions of the report."""
        values = [c.adjusted for listed in self.by_experiment.values() for c in listed]
        return ", ".join(f"{p:.2g}" for p in values if p is not None) or _NOTHING

    def ran(self, experiment: str) -> str:
        """The runs for the claim in an experiment, as text."""
        records, seeds = self.runs[experiment], self.seeds.get(experiment, ())
        parts = [_number(records)] if records else []
        parts += [f"{lost} failed"] if (lost := self.lost.get(experiment, 0)) else []
        models = sorted({r["model"]["type"] for r in records if "type" in r.get("model", {})})
        parts += [f"model {', '.join(f'`{m}`' for m in models)}"] if models else []
        for key, word in (("rounds", "rounds"), ("samples", "samples trained on")):
            if counts := sorted({r[key] for r in records if r.get(key)}):
                parts.append(f"{range_of(counts)} {word}")
        parts += [_seeds_text(seeds)] if seeds else []
        return f" — {'; '.join(parts)}" if parts else ""

    @property
    def absent(self) -> list[str]:
        return [e for e in self.claim["experiments"] if not self.runs.get(e)]

    @property
    def anchor(self) -> str:
        return f"{self.suite.name}-{self.name}"

    @property
    def verdict_here(self) -> str:
        """The verdict; what does not hold in a smaller setting does not hold *here*."""
        return self.verdict.replace(FAILS, f"{FAILS} here") if self.suite.sized else self.verdict

    @property
    def command(self) -> str:
        """The command that repeats the runs behind the verdict."""
        experiments = [e for e in self.claim["experiments"] if e not in self.absent] or self.claim["experiments"][:1]
        first = self.suite.experiments.get(experiments[0])
        if first is None:
            return f"fs-lowrank benchmark run {self.suite.name} --size paper --only {experiments[0]} --data FOLDER"
        if first.script.startswith("studies."):
            return f"python -m {first.script} {' '.join(first.args)}".strip()
        return f"{command(self.suite, experiments, 'local')} --data FOLDER --workers 2"


def gap_text(subject: str, gap: Estimate, settings: Sequence[Estimate], condition: Condition) -> str:
    """An estimate in points, or in its own unit, with its 95 % interval.

    Args:
        settings: the estimates of the settings, if there are several. Of two the text has both in place of an interval,
            since two say too little about other settings.
    """
    form, factor, unit = _FORMS.get(scale_of(condition.unit)[0], (".3g", 1.0, ""))
    number = interval_text(gap, form, factor)
    if len(settings) == 2:
        mean, *both = (interval_text(Estimate(e.centre, None), form, factor) for e in (gap, *settings))
        number = f"{mean} ({' and '.join(both)})"
    return f"{subject}: {number}{unit}" + (f", {len(settings)} settings" if settings else "")


def judged_claims(suite: Suite, results: Mapping[str, ExperimentResults]) -> dict[str, Row]:
    """The claims by name, judged by their rules in each experiment with results."""
    judged = {}
    for name, claim in suite.claims.items():
        available = {e: results[e] for e in claim["experiments"] if e in results}
        rules = {e: with_margins(claim["rule"], entry.experiment) for e, entry in available.items()}
        by_experiment = {e: judge(rule, available[e].look) for e, rule in rules.items()}
        lookups = {e: entry.at(used(claim["rule"], entry.look)) for e, entry in available.items()}
        runs = {e: records for e, (records, _) in lookups.items()}
        lost = {e: number for e, (_, number) in lookups.items()}
        other_methods = {e: _other_methods(rules[e], available[e]) for e in available if runs[e]}
        judged[name] = Row(suite, name, by_experiment, _sharing(runs), runs, lost, other_methods)
    return judged


def _other_methods(rule: Sequence[Mapping], results: ExperimentResults) -> dict[str, str]:
    """The verdicts of ``keeps`` and ``close``, which an unchanging method meets, on methods that they do not name."""
    verdicts: dict[str, str] = {}
    for condition in rule:
        if condition["is"] in ("keeps", "close"):
            others = [method for method in results.methods if method not in (*condition["methods"], condition["to"])]
            judged = zip(others, judge([{**condition, "methods": others}], results.look))
            verdicts |= {method: c.verdict for method, c in judged if c.verdict not in (UNTESTED, STALE)}
    return verdicts


def _sharing(runs: Mapping[str, Sequence[Mapping]]) -> list[list[str]]:
    """The experiments in groups: two that share a cell, directly or through others, are in one group."""
    hashes = {e: {r["hash"] for r in records} for e, records in runs.items()}
    groups: list[list[str]] = []
    for name, cells in hashes.items():
        linked = [group for group in groups if any(cells & hashes[other] for other in group)]
        groups = [group for group in groups if group not in linked] + [[e for group in linked for e in group] + [name]]
    return groups


def cause_of(row: Row, results: Mapping[str, ExperimentResults], elsewhere: Elsewhere) -> str:
    """The cause named in the suite, with the runs that tested it; ``none`` for a claim that fails without one.

    Args:
        elsewhere: gives the results of an experiment of another suite.
    """
    if row.decided == HOLDS or not any(row.runs.values()):
        return ""
    tested, cause = [], row.claim.get("cause") or {}
    for reference in cause.get("experiments", ()):
        suite, _, experiment = str(reference).rpartition("/")
        if suite:
            records = elsewhere(suite, experiment)
        else:
            records = results[experiment].all_records if experiment in results else []
        if records:
            seeds = sorted({r["seed"] for r in records if "rounds" in r})
            tested.append(f"{reference}: {_number(records)}" + (f", {_seeds_text(seeds)}" if seeds else ""))
    if tested:
        return f"{cause['says'].rstrip('.')} ({'; '.join(tested)})"
    return "none" if FAILS in row.verdicts else ""


def _seeds_text(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {_listed(seeds)}"


def _listed(seeds: Sequence[int]) -> str:
    """The seeds, more than five without a gap as a range."""
    if len(seeds) > 5 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _number(records: Sequence[Mapping]) -> str:
    """The number of runs, or for a study the command of its script, by its present name."""
    labels = [r["label"] for r in records if "rounds" not in r and "label" in r]
    scripts = [f"`{label.replace('benchmark.analysis.', 'studies.analysis.')}`" for label in labels]
    return ", ".join(scripts) or counted(len(records), "run")


def _seeds(rule: Sequence[Mapping], records: Sequence[Mapping]) -> list[int]:
    """The seeds of the results; of a study those of its figures in ``by_seed``, if the rule asks for one."""
    metrics = {condition.get("metric") for condition in rule}
    by_seed = [seeds for r in records for metric, seeds in r.get("by_seed", {}).items() if metric in metrics]
    return sorted({s for seeds in by_seed for s in seeds} if by_seed else {r["seed"] for r in records if "rounds" in r})


def claims_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """All claims with their verdicts, below a header."""
    head = ("claim", "suite", "size", "verdict", "gap", "p", "seeds", "what it takes", "tested cause")
    facts = attrgetter("verdict", "gap", "p", "seeded", "needs", "cause")
    places = ((row.claim["says"], row.suite.name, row.suite.size if row.suite.sized else "") for row in rows)
    return [head, *((*place, *facts(row)) for place, row in zip(places, rows))]
