"""The claims of a suite in the report: what it takes to see each, what was run, the seeds, the verdict, the cause.

What a claim needs and the cause that was tested are in the suite (``needs``, ``cause``). What was run, the seeds and
the verdict come from the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .blocks import Block, Findings, Heading, Image, PlainTable, range_of, value_of
from .claims import judge, used
from .decide import FAILS, HOLDS, INCONCLUSIVE, UNTESTED, Condition, verdict
from .results import ExperimentResults
from .suite import Suite

#: (suite, experiment) -> its results, for the experiments of other suites
Elsewhere = Callable[[str, str], list[dict]]
_NOTHING = "–"


@dataclass(frozen=True)
class Judged:
    """The verdict on a claim, its conditions by experiment, and the groups of experiments that share cells.

    Attributes:
        untested: how many experiments have runs and yet not all figures that the rule asks for, while others decide.
    """

    verdict: str
    by_experiment: dict[str, list[Condition]]
    sharing: list[list[str]]
    untested: int = 0

    @property
    def said(self) -> str:
        """The verdict, with the experiments that it leaves out."""
        return self.verdict + (f", not tested in {self.untested}" if self.untested else "")


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
    verdict: str
    runs: dict[str, list[dict]]
    seeds: dict[str, list[int]]
    cause: str
    lost: dict[str, int] = field(default_factory=dict)

    @property
    def needs(self) -> str:
        return str(self.suite.claims[self.name].get("needs") or _NOTHING)

    @property
    def ran(self) -> str:
        """The experiments with their numbers of runs."""
        return (
            "; ".join(
                f"{name}: {_number(records)}" + (f", {lost} failed" if lost else "")
                for name, records in self.runs.items()
                if (lost := self.lost.get(name, 0)) or records
            )
            or _NOTHING
        )

    @property
    def seeded(self) -> str:
        """The seeds, once if they are the same for all experiments."""
        groups: dict[str, list[str]] = {}
        for name, seeds in self.seeds.items():
            groups.setdefault(_listed(seeds), []).append(name)
        if len(groups) < 2:
            return next(iter(groups), "") or _NOTHING
        return "; ".join(f"{', '.join(names)}: {seeds}" for seeds, names in groups.items() if seeds)


def judged_claims(suite: Suite, results: Mapping[str, ExperimentResults]) -> dict[str, Judged]:
    """Claim -> its verdict, by its rule in each experiment with results."""
    judged = {}
    for name, claim in suite.claims.items():
        by_experiment = {e: judge(claim["rule"], results[e].look) for e in claim["experiments"] if e in results}
        hashes = {e: results[e].hashes(used(claim["rule"], results[e].look)) for e in by_experiment}
        groups = _sharing(hashes)
        verdicts = [_common([verdict(by_experiment[e]) for e in group]) for group in groups]
        tested = [v for v in verdicts if v != UNTESTED]
        if len(set(tested)) < 2:
            overall = tested[0] if tested else UNTESTED
        else:
            first, *others = [f"{v} in {tested.count(v)}" for v in (HOLDS, FAILS, INCONCLUSIVE) if v in tested]
            overall = ", ".join([f"{first} of {len(tested)} experiments", *others])
        ran = [v for v, group in zip(verdicts, groups) if any(hashes[e] for e in group)]
        untested = ran.count(UNTESTED) if tested else 0
        judged[name] = Judged(overall, by_experiment, [group for group in groups if len(group) > 1], untested)
    return judged


def _sharing(hashes: Mapping[str, set[str]]) -> list[list[str]]:
    """The experiments in groups: two that share a cell, directly or through others, are in one group."""
    groups: list[list[str]] = []
    for name, own in hashes.items():
        near = [group for group in groups if any(own & hashes[other] for other in group)]
        groups = [group for group in groups if group not in near] + [[e for group in near for e in group] + [name]]
    return groups


def _common(verdicts: Sequence[str]) -> str:
    """The verdict of experiments that count as one: inconclusive if those that were tested differ."""
    tested = {v for v in verdicts if v != UNTESTED}
    return tested.pop() if len(tested) == 1 else INCONCLUSIVE if tested else UNTESTED


def rows_of(
    suite: Suite, judged: Mapping[str, Judged], results: Mapping[str, ExperimentResults], elsewhere: Elsewhere
) -> list[Row]:
    """The claims as rows; ``elsewhere`` gives the results of an experiment of another suite."""
    rows = []
    for name, result in judged.items():
        rule = suite.claims[name]["rule"]
        runs = {e: results[e].at(used(rule, results[e].look)) for e in result.by_experiment}
        seeds = {e: _seeds(rule, records) for e, records in runs.items() if records}
        asked = result.verdict != HOLDS and any(runs.values())
        cause = _cause(suite, name, result, results, elsewhere) if asked else ""
        lost = {e: results[e].lost_at(used(rule, results[e].look)) for e in result.by_experiment}
        rows.append(Row(suite, name, result.said, runs, seeds, cause, lost))
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
    fails = any(verdict(conditions) == FAILS for conditions in judged.by_experiment.values())
    return "none" if fails else ""


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


def _ran_in_words(records: Sequence[Mapping], seeds: Sequence[int], lost: int) -> str:
    """What was run for a claim in an experiment."""
    if not records and not lost:
        return ""
    parts = [_number(records)] if records else []
    parts += [f"{lost} failed"] if lost else []
    models = sorted({r["model"]["type"] for r in records if "type" in r.get("model", {})})
    parts += [f"model {', '.join(f'`{m}`' for m in models)}"] if models else []
    for key, word in (("rounds", "rounds"), ("samples", "samples trained on")):
        if counts := sorted({r[key] for r in records if r.get(key)}):
            parts.append(f"{range_of(counts)} {word}")
    parts += [_said(seeds)] if seeds else []
    return f" — {'; '.join(parts)}"


def summary(rows: Sequence[Row]) -> list[Block]:
    """The section with the table of all claims."""
    if not rows:
        return []
    return [
        Heading("Claims", 2),
        "Every verdict comes from the rule in the suite. It compares a 95 % interval with the claim's margin: *holds* "
        "if all of the interval meets the rule, *does not hold* if none of it does, *inconclusive* otherwise and with "
        "one seed. Of k conditions in a claim each is refuted by its interval at the level 1 − 0.05 / k, since one of "
        "many is missed by chance. Intervals are Student's over seeds, paired by seed where methods share the seed's "
        "split. "
        "Nothing holds in favour of a method with a collapsed or failed seed, and nothing is refuted in favour of one "
        "with a failed seed. The figures behind a verdict stand under the "
        "suite. What was run and the seeds are those of the figures that the rule compares. Beside a claim that does "
        "not hold everywhere stands the most likely cause that was tested, with what tested it.",
        PlainTable(claims_table(rows), claims=True),
    ]


def claims_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """All claims with their verdicts, below a header."""
    head = ("claim", "suite", "size", "what it takes to see it", "what was run", "seeds", "verdict", "tested cause")
    lines = [
        (
            row.suite.claims[row.name]["says"],
            row.suite.name,
            row.suite.size if row.suite.sized else "",
            row.needs,
            row.ran + _with_the_runs_of(row, rows),
            row.seeded,
            row.verdict,
            row.cause,
        )
        for row in rows
    ]
    return [head, *lines]


def _with_the_runs_of(row: Row, rows: Sequence[Row]) -> str:
    """The other sizes in which the claim has some of the same runs, so that they are no second test."""
    own = {record["hash"] for records in row.runs.values() for record in records}
    sizes = [
        other.suite.size
        for other in rows
        if other is not row and (other.suite.name, other.name) == (row.suite.name, row.name)
        if own & {record["hash"] for records in other.runs.values() for record in records}
    ]
    return f" (some of them those of size {', '.join(sizes)})" if sizes else ""


def said_of_claims(
    suite: Suite, judged: Mapping[str, Judged], rows: Sequence[Row], drawn: Mapping[str, str]
) -> list[Block]:
    """The section of each claim: what it takes, its rule, and by experiment what was run and how it was decided.

    Args:
        drawn: claim -> its figure, as the report names it.
    """
    blocks: list[Block] = []
    for row in rows:
        result, claim = judged[row.name], suite.claims[row.name]
        blocks.append(Heading(f"Claim: {claim['says']}", 3, result.said))
        rules = "; ".join(", ".join(f"{k} {_plain(v)}" for k, v in c.items()) for c in claim["rule"])
        blocks.append(f"{claim.get('source', '')} Rule: {rules}.".strip())
        if claim.get("needs"):
            blocks.append(f"What it takes to see it: {claim['needs']}")
        if row.name in drawn:
            blocks.append(Image(f"{claim['says']}: by how much each condition is met, 95 % intervals", drawn[row.name]))
        for experiment, conditions in result.by_experiment.items():
            ran = _ran_in_words(row.runs[experiment], row.seeds.get(experiment, ()), row.lost.get(experiment, 0))
            blocks.append(Findings(experiment, verdict(conditions), ran, [(c.text, c.verdict) for c in conditions]))
        if row.cause:
            blocks.append(f"The most likely cause that was tested: {row.cause}.")
        blocks += [f"Sharing cells and so counted as one experiment: {', '.join(group)}." for group in result.sharing]
        absent = [e for e in claim["experiments"] if e not in result.by_experiment]
        if absent:
            blocks.append(f"Not in this size: {', '.join(absent)}.")
    return blocks


def _plain(value) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value_of(value)
