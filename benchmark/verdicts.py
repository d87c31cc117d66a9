"""The claims of a suite in the report: what it takes to see each, what was run, the seeds, the verdict, the cause.

What a claim needs and the cause that was tested are in the suite (``needs``, ``cause``). What was run, the seeds and
the verdict come from the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .conditions import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    PAPER,
    STALE,
    UNTESTED,
    Condition,
    adjust,
    judge,
    shown,
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


@dataclass
class Judged:
    """The conditions of a claim by experiment, and the groups of experiments that share cells.

    Attributes:
        groups: of experiments; those of a group share cells and count as one. ran: the experiments that have runs for
            the claim. others: experiment -> the verdicts of a rule of ``keeps`` or ``close`` on the other methods.
    """

    by_experiment: dict[str, list[Condition]]
    groups: list[list[str]]
    ran: set[str]
    others: dict[str, dict[str, str]]

    @property
    def verdicts(self) -> list[str]:
        """The verdict of each group: inconclusive if those of its experiments that were tested differ."""
        found = []
        for group in self.groups:
            own = {verdict(self.by_experiment[name]) for name in group}
            tested = own - {UNTESTED} or own
            found.append(tested.pop() if len(tested) == 1 else INCONCLUSIVE)
        return found

    @property
    def verdict(self) -> str:
        tested = [v for v in self.verdicts if v != UNTESTED]
        if len(set(tested)) < 2:
            return tested[0] if tested else UNTESTED
        first, *others = [f"{v} in {tested.count(v)}" for v in (HOLDS, FAILS, INCONCLUSIVE, STALE) if v in tested]
        return ", ".join([f"{first} of {len(tested)} experiments", *others])

    @property
    def said(self) -> str:
        """The verdict, with the experiments that have runs and yet not all figures, while others decide."""
        open_ones = [v for v, group in zip(self.verdicts, self.groups) if v == UNTESTED and self.ran & {*group}]
        return self.verdict + (f", not tested in {len(open_ones)}" if open_ones and self.verdict != UNTESTED else "")

    @property
    def gaps(self) -> dict[str, tuple[Estimate, int, Condition]]:
        """What is compared -> its estimate over the settings, how many they are, and one of the conditions.

        Without experiments in which nothing was learned; of a group only the first that has the comparison.
        """
        found: dict[str, list[tuple[Estimate, Condition]]] = {}
        for group in self.groups:
            learned = [e for e in group if all(c.verdict == HOLDS for c in self.by_experiment[e] if c.first)]
            seen = {(c.what, c.where): c for e in reversed(learned) for c in self.by_experiment[e] if not c.first}
            for condition in seen.values():
                if condition.estimate is not None:
                    found.setdefault(condition.what, []).append((condition.estimate, condition))
        gaps = {}
        for what, known in found.items():
            estimates = [estimate for estimate, _ in known if estimate.error]
            together = (pooled(estimates), len(estimates)) if len(estimates) > 1 else (known[0][0], 1)
            gaps[what] = (*together, known[0][1])
        return gaps


@dataclass(frozen=True)
class Row:
    """A claim as a row of the table of all claims.

    Attributes:
        runs: experiment -> the results that the rule has looked at. seeds: experiment -> their seeds. cause: the cause
            that was tested, with what tested it; empty for a claim that holds, or of which nothing was run. lost:
            experiment -> the number of runs that have failed.
    """

    suite: Suite
    name: str
    judged: Judged
    runs: dict[str, list[dict]]
    seeds: dict[str, list[int]]
    cause: str
    lost: dict[str, int]

    @property
    def claim(self) -> dict:
        return self.suite.claims[self.name]

    @property
    def verdict(self) -> str:
        return self.judged.said

    @property
    def needs(self) -> str:
        return str(self.claim.get("needs") or _NOTHING)

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
        gaps = self.judged.gaps
        if not gaps:
            return _NOTHING
        what = min(gaps, key=lambda name: _inside(*gaps[name][::2]))
        return said_of_gap(what, *gaps[what])

    @property
    def p(self) -> str:
        """The p values of its conditions, corrected for all conditions of the report."""
        there = [c.adjusted for listed in self.judged.by_experiment.values() for c in listed]
        return ", ".join(f"{p:.2g}" for p in there if p is not None) or _NOTHING

    def ran(self, experiment: str) -> str:
        """What was run for the claim in an experiment."""
        records, seeds = self.runs[experiment], self.seeds.get(experiment, ())
        parts = [_number(records)] if records else []
        parts += [f"{lost} failed"] if (lost := self.lost.get(experiment, 0)) else []
        models = sorted({r["model"]["type"] for r in records if "type" in r.get("model", {})})
        parts += [f"model {', '.join(f'`{m}`' for m in models)}"] if models else []
        for key, word in (("rounds", "rounds"), ("samples", "samples trained on")):
            if counts := sorted({r[key] for r in records if r.get(key)}):
                parts.append(f"{range_of(counts)} {word}")
        parts += [_said(seeds)] if seeds else []
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
        """The command that runs what the verdict is from."""
        experiments = [e for e in self.claim["experiments"] if e not in self.absent] or self.claim["experiments"][:1]
        first = self.suite.experiments.get(experiments[0])
        if first is None:
            return f"fs-lowrank benchmark run {self.suite.name} --size paper --only {experiments[0]} --data FOLDER"
        if first.script.startswith("studies."):
            return f"python -m {first.script} {' '.join(first.args)}".strip()
        whole = command(self.suite, first, "local").replace(f"--only {first.name}", f"--only {','.join(experiments)}")
        return f"{whole} --data FOLDER --workers 2"


def _inside(found: Estimate, condition: Condition) -> float:
    return min(found.centre - condition.low, condition.high - found.centre)


def said_of_gap(what: str, found: Estimate, settings: int, condition: Condition) -> str:
    """An estimate in points, or in what it is measured in, with its 95 % interval."""
    scale = scale_of(condition.unit)[0]
    if scale == 100:
        number, unit = shown(found, ".2f", 100), " points"
    elif scale == 0:  # bytes
        number, unit = shown(found, ".3g", 1e-6), " MB"
    else:
        number, unit = shown(found, ".3g"), ""
    return f"{what}: " + number.replace("-", "−") + unit + (f", {settings} settings" if settings > 1 else "")


def judged_claims(suite: Suite, results: Mapping[str, ExperimentResults]) -> dict[str, Judged]:
    """Claim -> its conditions, by its rule in each experiment with results."""
    judged = {}
    for name, claim in suite.claims.items():
        there = {e: results[e] for e in claim["experiments"] if e in results}
        rules = {e: with_margins(claim["rule"], found.experiment.reference) for e, found in there.items()}
        by_experiment = {e: judge(rule, there[e].look) for e, rule in rules.items()}
        hashes = {e: {r["hash"] for r in there[e].at(used(rule, there[e].look))} for e, rule in rules.items()}
        ran = {e for e, found in hashes.items() if found}
        others = {e: _others(rules[e], there[e]) for e in there if e in ran}
        judged[name] = Judged(by_experiment, _sharing(hashes), ran, others)
    return judged


def adjust_all(judged: Sequence[Judged]) -> None:
    """Correct the p values of all conditions of a report together."""
    places = [(claim, e) for claim in judged for e in claim.by_experiment]
    corrected = iter(adjust([c for claim, e in places for c in claim.by_experiment[e]]))
    for claim, e in places:
        claim.by_experiment[e] = [next(corrected) for _ in claim.by_experiment[e]]


def _others(rule: Sequence[Mapping], results: ExperimentResults) -> dict[str, str]:
    """The verdicts of the conditions that anything meets which stays as it is, on the methods that they do not name."""
    found: dict[str, str] = {}
    for condition in rule:
        if condition["is"] in ("keeps", "close"):
            named = {*condition["methods"], condition["to"] if condition["is"] == "close" else ""}
            methods = [m for m in results.methods if m not in named]
            for method in methods:
                (one,) = judge([{**condition, "methods": [method]}], results.look)
                if one.verdict not in (UNTESTED, STALE):
                    found[method] = one.verdict
    return found


def _sharing(hashes: Mapping[str, set[str]]) -> list[list[str]]:
    """The experiments in groups: two that share a cell, directly or through others, are in one group."""
    groups: list[list[str]] = []
    for name, own in hashes.items():
        near = [group for group in groups if any(own & hashes[other] for other in group)]
        groups = [group for group in groups if group not in near] + [[e for group in near for e in group] + [name]]
    return groups


def rows_of(
    suite: Suite, judged: Mapping[str, Judged], results: Mapping[str, ExperimentResults], elsewhere: Elsewhere
) -> list[Row]:
    """The claims as rows; ``elsewhere`` gives the results of an experiment of another suite."""
    rows = []
    for name, result in judged.items():
        rule = [{**c, "within": 0} if c.get("within") == PAPER else c for c in suite.claims[name]["rule"]]
        runs = {e: results[e].at(used(rule, results[e].look)) for e in result.by_experiment}
        seeds = {e: _seeds(rule, records) for e, records in runs.items() if records}
        asked = result.verdict != HOLDS and any(runs.values())
        cause = _cause(suite, name, result, results, elsewhere) if asked else ""
        lost = {e: results[e].lost_at(used(rule, results[e].look)) for e in result.by_experiment}
        rows.append(Row(suite, name, result, runs, seeds, cause, lost))
    return rows


def _cause(
    suite: Suite, name: str, judged: Judged, results: Mapping[str, ExperimentResults], elsewhere: Elsewhere
) -> str:
    """The cause named in the suite, with the runs that tested it; ``none`` for a claim that fails without one."""
    tested = []
    cause = suite.claims[name].get("cause") or {}
    for place in cause.get("experiments", ()):
        other, _, experiment = str(place).rpartition("/")
        if other:
            records = elsewhere(other, experiment)
        else:
            records = results[experiment].all_records if experiment in results else []
        if records:
            seeds = sorted({r["seed"] for r in records if "rounds" in r})
            tested.append(f"{place}: {_number(records)}" + (f", {_said(seeds)}" if seeds else ""))
    if tested:
        return f"{cause['says'].rstrip('.')} ({'; '.join(tested)})"
    return "none" if FAILS in judged.verdicts else ""


def _said(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {_listed(seeds)}"


def _listed(seeds: Sequence[int]) -> str:
    """The seeds, more than five without a gap as a range."""
    if len(seeds) > 5 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _number(records: Sequence[Mapping]) -> str:
    """How many runs there are, or for a study the command of its script."""
    scripts = [r["label"] for r in records if "rounds" not in r and "label" in r]
    if scripts:
        return ", ".join(f"`{label}`" for label in scripts)
    return "1 run" if len(records) == 1 else f"{len(records)} runs"


def _seeds(rule: Sequence[Mapping], records: Sequence[Mapping]) -> list[int]:
    """The seeds of the results; of a study those of its figures in ``by_seed``, if the rule asks for one."""
    asked = {condition.get("metric") for condition in rule}
    studied = [seeds for r in records for metric, seeds in r.get("by_seed", {}).items() if metric in asked]
    return sorted({s for seeds in studied for s in seeds} if studied else {r["seed"] for r in records if "rounds" in r})


def claims_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """All claims with their verdicts, below a header."""
    head = ("claim", "suite", "size", "verdict", "gap", "p", "seeds", "what it takes", "tested cause")
    lines = [
        (
            row.claim["says"],
            row.suite.name,
            row.suite.size if row.suite.sized else "",
            row.verdict,
            row.gap,
            row.p,
            row.seeded,
            row.needs,
            row.cause,
        )
        for row in rows
    ]
    return [head, *lines]
