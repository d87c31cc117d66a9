"""``run`` and ``report`` from end to end on tiny models, with dying workers, failing cells and damaged files."""

import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import benchmark.execute
import benchmark.run
import fs_lowrank
from benchmark.cli import main
from benchmark.execute import FinalTest, execute, permitted, train
from benchmark.intervals import rows_of
from benchmark.job import Options, at_the_end
from benchmark.paths import quotient, quotients
from benchmark.plan import plan
from benchmark.results import find
from benchmark.run import _headline
from benchmark.store import Store, digest
from benchmark.suite import load_suite
from benchmark.template import markdown
from fs_lowrank import UserError, list_methods, load_config, register_method
from fs_lowrank.jobs import progress
from fs_lowrank.methods import registry
from fs_lowrank.methods.fedlora import FedLoRA
from fs_lowrank.runs.checkpoint import _meta_sum
from fs_lowrank.versions import NewerSchema
from tests.cases import finished

ROOT = str(Path(__file__).parents[2])
METHODS = """
    import os, signal
    from pathlib import Path
    from fs_lowrank import register_method
    from fs_lowrank.methods.fedlora import FedLoRA

    class Watched(FedLoRA):
        source, sends = "a test", "A and B"

    @register_method("bad_lora")
    class Bad(Watched):
        def aggregate(self, updates, state, round):
            raise RuntimeError("it never works")

    @register_method("deadly_lora")
    class Deadly(Watched):
        def aggregate(self, updates, state, round):
            if round == 3 and not Path("died").exists():
                Path("died").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return super().aggregate(updates, state, round)
"""
SUITE = """
    title: A tiny one
    imports: [own_methods]
    config:
      model: {type: MODEL@transformers}
      data: {type: DATA, splits: [0.7, 0.1, 0.2]}
      llm: {tok_len: 24, adapter: {args: [{r: 2, alpha: 6, modules: [query], layers: [2]}]}}
      dataloader: {batch_size: 8}
      train: {local_update_steps: 1, optimizer: {type: AdamW}}
      federate: {client_num: 2, total_round_num: 4}
    methods: [rolora, fedlora]
    seeds: [0, 1]
    metrics: [test_acc, traffic]
    experiments:
      main:
        title: Two methods
        grid: {federate.client_num: [2, 3]}
        learning_rates: {search: {space: {train.optimizer.lr: {grid: [1e-3, 1e-2]}}, at: {clients: 2}, grow: 0,
          seeds: 1}}
        reference: {from: Table 9, setting: a large model, values: {rolora: {2: [95.5, 0.1], 3: 94}}}
      trouble: {methods: [bad_lora, deadly_lora], seeds: [0]}
    claims:
      half:
        says: RoLoRA sends half
        source: here
        experiments: [main]
        rule:
        - {is: ratio, metric: uplink_without_head, of: rolora, to: fedlora, about: 0.5, within: 0.01,
           where: {clients: 2}}
      lost:
        says: Something else is tested
        source: here
        experiments: [main]
        rule: [{is: above, better: flora, than: [rolora], by: 0, where: {clients: 2}}]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_encoder, reviews_csv):
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "own_methods.py").write_text(textwrap.dedent(METHODS))
    (folder / "tiny.yaml").write_text(
        textwrap.dedent(SUITE).replace("MODEL", str(tiny_encoder)).replace("DATA", str(reviews_csv))
    )
    return folder


@pytest.fixture(scope="module")
def bench(place):
    """Run the command in this process, which has imported the libraries; returns exit code and output."""
    list_methods()  # the built-in methods are registered once, not in the copy

    def run(*args):
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(out):
            patch.chdir(place)
            patch.setattr(sys, "path", [*sys.path])  # as an installed command, without the working directory
            for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("PYTHONPATH", ROOT)):
                patch.setenv(name, value)
            patch.setattr(registry, "_METHODS", dict(registry._METHODS))
            patch.delitem(sys.modules, "own_methods", raising=False)
            return main([*args]), out.getvalue()

    return run


@pytest.fixture(scope="module")
def done(bench):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "SOON", 0)
        patch.setattr(progress, "LOG_EVERY", 0.1)
        return bench("run", "tiny.yaml", "--workers", "2")


@pytest.fixture
def inside(place, monkeypatch):
    """That folder, as the working directory of this process, which imports from it."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    return place


def begun(place, methods="[fedlora]", own=True):
    """The text of that suite up to its experiments."""
    text = (place / "tiny.yaml").read_text().replace("[rolora, fedlora]", methods)
    return text[: text.index("experiments:")].replace("" if own else "imports: [own_methods]", "")


def results(place, kind):
    return [json.loads(p.read_text()) for p in sorted((place / "results" / kind).glob("*.json"))]


@pytest.mark.more
def test_a_dead_worker_and_a_failing_cell_do_not_stop_the_rest(place, done):
    code, said = done
    assert code == 1 and "ended (signal 9: out of memory, perhaps); another takes its place" in said, said
    assert said.rstrip().endswith("error: 1 of the runs failed, for the reasons above; the same command tries again"), (
        said
    )
    (failed,) = results(place, "failed")
    assert failed["label"] == "bad_lora seed=0" and "it never works" in failed["error"]
    cells = results(place, "cells")
    assert len(cells) == 9 and len(results(place, "searches")) == 2
    (deadly,) = (c for c in cells if c["method"] == "deadly_lora")
    assert re.search(r"jobs: 0 of 12, \? left, .*rolora.* \(0 min\)", said), "a log has a line while none ends"
    assert deadly["rounds"] == 4 and len(deadly["history"]["loss"]) == 4 and (place / "died").exists()


@pytest.mark.more
def test_the_content_of_a_result(place, done):
    cell = next(c for c in results(place, "cells") if c["method"] == "rolora" and c["seed"] == 1)
    assert {"test_acc", "test_loss", "val_acc"} <= set(cell["metrics"])
    assert all("test_acc" not in p for p in cell["history"]["evaluated"])  # looked at once
    assert cell["learning_rate"]["from"] == "search" and cell["learning_rate"]["budget"]["trials"] == 2
    assert cell["config"]["train.optimizer.lr"] == cell["learning_rate"]["point"]["train.optimizer.lr"]
    trained = sum(min(8, size) for size in cell["data"]["clients"])
    assert cell["samples"] == cell["rounds"] * trained and cell["samples_counted"]
    assert cell["bytes"]["uplink_bytes"] > cell["bytes"]["uplink_bytes_without_head"] > 0
    assert cell["head"] == "trained, sent and averaged" and cell["peak_memory_bytes"]["host"] > 1e7
    assert (
        cell["machine"].keys() == {"cores", "threads", "gpu", "processor"}
        and "commit" in cell
        and cell["machine"]["gpu"] is None
    )
    test_set, right = rows_of(cell["right"])
    assert right.mean() == pytest.approx(cell["metrics"]["test_acc"]) and len(test_set) == 64
    assert len(right) == cell["data"]["test_rows_in_training"][1] == cell["right"]["rows"]
    assert cell["data"]["rows"].keys() == {"read", "skipped", "truncated", "tok_len", "repeated"}
    assert len(cell["data"]["fingerprint"]) == 64 and cell["versions"]["torch"]
    assert "data.root" not in cell["config"] and cell["command"].startswith("fs-lowrank benchmark run tiny.yaml")
    search, _ = results(place, "searches")
    assert [p["train.optimizer.lr"] for p in search["tried"]] == [1e-3, 1e-2] and search["objective"] == "val_acc"


@pytest.mark.more
def test_a_cell_is_verified_by_its_hash(place, done, bench):
    cell = next(r for r in results(place, "cells") if r["method"] == "rolora")
    code, said = bench("run", "tiny.yaml", "--verify", cell["hash"])
    assert code == 0 and "every metric is the same again" in said, said
    path, store = place / "results" / "cells" / f"{cell['hash']}.json", Store(place / "results", place)
    record = store.read("cells", cell["hash"])
    store.write("cells", {**record, "metrics": {**record["metrics"], "test_acc": 2.0}})
    code, said = bench("run", "tiny.yaml", "--verify", cell["hash"])
    assert code == 1 and "1 of its metrics differ" in said, said
    path.unlink()
    code, said = bench("run", "tiny.yaml", "--cell", cell["hash"])
    assert code == 0 and "1 done, 0 failed, 0 remain" in said, said
    assert path.exists() and "has no cell of that hash" in bench("run", "tiny.yaml", "--cell", "0" * 12)[1]


@pytest.mark.more
def test_a_damaged_result_is_computed_again_and_the_report(place, done, bench):
    cell = next(c for c in results(place, "cells") if c["experiment"] == "main")
    path = place / "results" / "cells" / f"{cell['hash']}.json"
    path.write_text(path.read_text()[:-200])
    code, said = bench("run", "tiny.yaml", "--only", "main", "--workers", "1")
    assert code == 0 and "damaged, and taken as missing" in said and path.name in said, said
    assert "1 done, 0 failed, 0 remain, 9 were done before" in said
    assert "next: fs-lowrank benchmark report tiny.yaml --only main\n" in said
    assert json.loads(path.read_text())["metrics"]["test_acc"] == cell["metrics"]["test_acc"]
    code, said = bench("report", "tiny.yaml")
    assert code == 0, said
    text = (place / "results" / "report.md").read_text()
    half = "rolora / fedlora in uplink_without_head: 0.5"
    assert f"| RoLoRA sends half | tiny |  | **holds** | {half} | – | 0, 1 |\n" in text
    assert "| Something else is tested | tiny |  | **not tested at this size** | – | – | 0, 1 |\n" in text
    assert "| method | 2 | 3 | paper: 2 | paper: 3 |" in text and "95.5 ± 0.1" in text
    assert "- bad_lora seed=0: " in text and "it never works" in text
    assert "2 trials" in text and "one seed" in text and str(place) not in text
    for name in ("axis", "curves"):
        assert (place / "results" / "report" / f"tiny-small-main-{name}.png").stat().st_size > 5000
    page = (place / "results" / "report.html").read_text()
    assert page.count("<table ") == page.count("</table>") > 5 and page.count("data:image/png;base64,") >= 4
    assert '<strong class="holds">holds</strong>' in page and 'src="report/' not in page


@pytest.mark.more
def test_a_report_when_only_the_searches_are_done(place, done, bench):
    shutil.copytree(place / "results" / "searches", place / "early" / "searches")
    code, said = bench("report", "tiny.yaml", "--results", "early")
    assert code == 0, said
    assert "**0 of 8 cells are there.**" in (place / "early" / "report.md").read_text()


@pytest.mark.slow
def test_a_search_with_a_failed_trial_fails_and_is_completed_by_the_next_run(inside, own_methods):
    sick = {"from": 2, "runs": 0}

    @register_method("sick_lora")
    class Sick(FedLoRA):
        source, sends = "a test", "A and B"

        def aggregate(self, updates, state, round):
            sick["runs"] += round == 1
            if sick["runs"] >= sick["from"]:
                raise RuntimeError("it is sick")
            return super().aggregate(updates, state, round)

    text = begun(inside, "[{name: shown as, method: sick_lora}]", own=False)
    rates = "learning_rates: {search: {space: {train.optimizer.lr: {grid: [1e-3, 1e-2]}}, grow: 0, seeds: 1}}\n"
    (inside / "sick.yaml").write_text(text + rates)
    search, cell, _ = plan(Options(("sick.yaml",), results="sick_results", work="sick_work"))
    with pytest.raises(UserError, match="1 of its trials failed.*it is sick"):  # it selects none of the others
        execute(search)
    store = search.options.store
    store.write("failed", {**search.identity(), "error": "it is sick", "finished": 1.0})
    assert cell.rated(store) is None  # and no cell runs without its learning rate
    sick["from"] = 99
    record = execute(search)
    assert len(record["tried"]) == 2 and record["diverged"] == 0
    store.write("searches", {**record, "finished": 2.0})
    assert store.read("failed", search.key) is None
    done = {**execute(cell.rated(store)), "finished": 3.0}
    store.write("cells", done)
    found = find(search.suite, search.experiment, search.options, store)
    assert found.methods == ["shown as"] and len(found.all_records) == 1


@pytest.mark.more
def test_a_grid_of_real_runs_grows_by_points_that_may_diverge(inside):
    """The winner is inside, but has learned nothing, so that the grid grows at both ends in turn."""
    space = "{train.optimizer.lr: {grid: [1e-5, 1e+3]}}"
    rates = f"learning_rates: {{search: {{space: {space}, objective: val_loss, seeds: 1}}}}\n"
    (inside / "growing.yaml").write_text(begun(inside, own=False) + rates)
    found = execute(plan(Options(("growing.yaml",), results="growing_results", work="growing_work"))[0])
    assert sorted(p["train.optimizer.lr"] for p in found["tried"]) == pytest.approx([1e-13, 1e-5, 1e3])
    assert [p["train.optimizer.lr"] for p in found["grown"]] == pytest.approx([1e-13, 1e11])
    assert at_the_end(found) and found["diverged"] == 1 and found["trials"]["complete"] == 3
    best = min(found["tried"], key=lambda p: p["value"])
    assert found["winner"]["point"] == {"train.optimizer.lr": best["train.optimizer.lr"]}
    assert found["winner"]["values"]["val_loss"] == best["value"]


class _Studies:
    """Stands for the studies of a search: notes the points, and gives each the value of a function."""

    def __init__(self, value, learned=lambda value: True):
        self.value, self.tried, self.learned = value, [], learned

    def __call__(self, search, config, name, space, diverges=False):
        points = [dict(zip(space, values)) for values in itertools.product(*(kind["grid"] for kind in space.values()))]
        self.tried += points
        scored = [{**point, "value": self.value(point)} for point in points]
        best = max(scored, key=lambda point: point["value"])
        winner = {
            "point": {key: best[key] for key in space},
            "by_seed": {"val_acc": [best["value"] + noise for noise in (-0.01, 0.0, 0.01)]},
            "values": {"val_acc": best["value"]},
            "nothing_learned": "" if self.learned(best["value"]) else "nothing was learned",
        }
        budget = {"trials": len(points)}
        return {"objectives": ["val_acc"], "winners": [winner], "tried": scored, "failed": [], "budget": budget,
                "trials": {"complete": len(points)}}  # fmt: skip


@pytest.fixture
def searched(inside, monkeypatch):
    """A search with the space given, and its cells; studies are those of a function of the point."""
    text = begun(inside)

    def make(space, value, name, seeds=1, grow=None, **more):
        spec = f"space: {space}, seeds: {seeds}" + (f", grow: {grow}" if grow is not None else "")
        (inside / f"{name}.yaml").write_text(text + f"learning_rates: {{search: {{{spec}}}}}\n")
        studies = _Studies(value, **more)
        monkeypatch.setattr(benchmark.execute, "_study", studies)
        search, *cells = plan(Options((f"{name}.yaml",), results=f"{name}_results", work=f"{name}_work"))
        return search, cells, studies

    return make


RATE, DECAY = "train.optimizer.lr", "train.optimizer.weight_decay"


FLAT = {"learned": lambda value: value > 0.5}


@pytest.mark.parametrize(
    "key, grid, value, more, winner, grown, at_end",
    [
        (RATE, [1e-7, 1e-6], lambda v: v, {"grow": 2}, 1e-4, [1e-5, 1e-4], True),  # until the budget is used
        (RATE, [1e-7, 1e-6], lambda v: v, {"grow": 0}, 1e-6, [], True),
        ("llm.adapter.args.0.r", [1, 2], lambda v: -v, {}, 1, [], False),  # nothing lies beyond
        # The next value would be 1.62, which is no dropout; 0.95 would be one, so a better value may lie beyond.
        ("llm.adapter.args.0.lora_dropout", [0.5, 0.9], lambda v: v, {}, 0.9, [], True),
        # 0.1 is as good as 0.01, and 1 is worse: then the winner is inside.
        (RATE, [1e-3, 1e-2, 1e-1], lambda v: v in (1e-2, 1e-1), {}, 1e-2, [1], False),
        # Where nothing is learned it grows at both ends in turn, the smaller values first, until something is learned.
        (RATE, [1e-2, 1e-1, 1], lambda v: 0.5 + 0.4 * np.isclose(v, 1e-4), FLAT, 1e-4, [1e-3, 10, 1e-4], True),
        (RATE, [1e-2, 1e-1, 1], lambda v: 0.5 + 0.4 * np.isclose(v, 10), FLAT, 10, [1e-3, 10, 100], False),
    ],
)
def test_a_grid_grows_until_the_winner_is_inside_or_nothing_is_left(
    searched, key, grid, value, more, winner, grown, at_end
):
    search, _, _ = searched(f"{{{key}: {{grid: {grid}}}}}", lambda point: value(point[key]), "grid", **more)
    found = execute(search)
    assert found["winner"]["point"] == {key: pytest.approx(winner)} and at_the_end(found) is at_end
    assert [point[key] for point in found["grown"]] == pytest.approx(grown)


def test_a_grid_grows_beyond_one_key_at_a_time(searched):
    """The winner of the grid is in a corner; that of all lies beyond the end of one key alone."""
    space = f"{{{RATE}: {{grid: [1e-3, 1e-2]}}, {DECAY}: {{grid: [1e-2, 1e-1]}}}}"
    search, _, studies = searched(space, lambda p: -abs(np.log10(p[RATE]) + 1) - abs(np.log10(p[DECAY]) + 1), "corner")
    found = execute(search)
    assert found["winner"]["point"] == {RATE: pytest.approx(0.1), DECAY: 0.1} and not at_the_end(found)
    assert {(p[RATE], p[DECAY]) for p in found["grown"]} >= {(0.1, 0.1), (0.1, 1.0)} and len(found["grown"]) <= 4


def test_a_search_ends_with_a_step_around_its_winner_and_says_what_is_within_noise(searched):
    """By hand: with a standard deviation of 0.01 over three seeds, in two studies, half an interval is 0.0227."""
    scores = {0.03: 0.80, 0.1: 0.85, 0.3: 0.82, 0.0577: 0.83, 0.173: 0.86}
    search, cells, studies = searched(f"{{{RATE}: {{grid: [0.03, 0.1, 0.3]}}}}", lambda p: scores[p[RATE]], "fine", 3)
    found = execute(search)
    assert [p[RATE] for p in studies.tried] == [0.03, 0.1, 0.3, 0.0577, 0.173] and not at_the_end(found)
    assert found["winner"]["point"] == {RATE: 0.173} and found["seeds"] == 3
    assert [p[RATE] for p in found["within_noise"]] == [0.1]
    half = stats.t.ppf(0.975, 4) * 0.01 * math.sqrt(2 / 3)
    assert 0.01 < half < 0.03
    store = search.options.store
    store.write("searches", {**found, "finished": 1.0})
    assert cells[0].rated(store).rate["seeds"] == 3
    said = markdown("rates", find(search.suite, search.experiment, search.options, store))
    assert "with one seed" not in said


def test_a_search_of_one_seed_from_before_still_counts(searched):
    """Its key is that of a suite that asks for one seed or says nothing; a new one has another."""
    space = f"{{{RATE}: {{grid: [0.03, 0.1, 0.3]}}}}"
    once, _, _ = searched(space, lambda p: p[RATE] == 0.1, "once")
    search, cells, _ = searched(space, lambda p: p[RATE] == 0.1, "now", 3)
    spec = {key: value for key, value in search.spec.items() if key != "seeds"}
    search = dataclasses.replace(search, spec=spec)
    before = digest({**search.contents[0], "spec": {"space": search.spec["space"], "seeds": None, "objective": None}})
    store = search.options.store
    found = {**execute(once), **search.identity(), "hash": before, "finished": 1.0}
    del found["seeds"], found["within_noise"]
    assert before not in (search.key, once.key) and not search.done(store)
    store.write("searches", found)
    assert search.done(store) and search.result(store)["hash"] == before
    cell = dataclasses.replace(cells[0], search=search)
    assert cell.rated(store).rate["seeds"] == 1 and cell.rated(store).rate["search"] == before


@pytest.mark.more
def test_a_rate_is_at_the_end_of_the_grid_of_its_own_experiment(inside):
    """Experiments share a cell, and have searched its rate in other settings: one inside, another at an end."""
    rates = "learning_rates: {search: {space: {train.optimizer.lr: {grid: [1e-3, 1e-2, 0.1]}}, at: {clients: %d}}}"
    grid = "grid: {federate.client_num: [2, 3]}"
    table = "learning_rates: {table: {fedlora: 0.1}, budget: that of other, found_by: other}"
    text = begun(inside) + textwrap.dedent(f"""
        experiments:
          main: {{{grid}, {rates % 2}}}
          other: {{{grid}, {rates % 3}}}
          third: {{{grid}, {table}}}
          fourth: {{{grid}, {table.replace("0.1", "0.03")}}}
    """)
    (inside / "shared.yaml").write_text(text)
    options = Options(("shared.yaml",), results="shared_results", work="shared_work")
    store, jobs = options.store, plan(options)
    tried = [{"train.optimizer.lr": rate, "value": 0.5 - abs(rate - 0.1)} for rate in (1e-3, 1e-2, 0.1, 1.0)]
    grown = [{"train.optimizer.lr": 1e-4}]
    for search, kept in zip([job for job in jobs if job.kind == "searches"], (4, 3)):
        winner = {"point": {"train.optimizer.lr": 0.1}, "values": {"val_acc": 0.5}}
        spec = {"winner": winner, "tried": tried[:kept], "grown": grown, "space": search.spec["space"], "budget": {}}
        store.write("searches", {**search.identity(), **spec, "finished": 1.0})
    for job in jobs:
        if job.kind == "cells":
            cell = job.rated(store)
            known = {"metrics": {"test_acc": 0.9}, "majority": 0.5, "learning_rate": dict(cell.rate)}
            store.write("cells", finished(cell, **known))
    suite = load_suite("shared.yaml", "small")
    ends, unlike = {}, {}
    for name in ("main", "other", "third", "fourth"):
        found = find(suite, suite.experiments[name], options, store)
        assert len(found.all_records) == 4
        ends[name], unlike[name] = found.figure("fedlora", "2", "test_acc").at_end, markdown("rates", found)
    assert ends == {"main": False, "other": True, "third": True, "fourth": False} and len(store.all("cells")) == 8
    said = "The table's rate of fedlora, 0.03, won in no finished search of `other`."
    assert said in unlike.pop("fourth") and not any("won in no" in text for text in unlike.values())
    assert [name for name, text in unlike.items() if "search that has found it" in text] == ["third"]


@pytest.mark.more
def test_what_a_suite_will_take(place, bench):
    code, said = bench("run", "tiny.yaml", "--only", "main", "--estimate", "--workers", "2", "--results", "estimated",
                       "--table", "takes.csv")  # fmt: skip
    assert (place / "takes.csv").is_file() and (place / "takes.tex").is_file()
    assert code == 0 and not (place / "estimated").exists(), said
    # 2 methods, 2 numbers of clients, 2 seeds; a search for each method, of two rates; 4 rounds of batches of 8.
    (row,) = re.findall(r"│ tiny/small/main +│(.*)", said)
    cells, searches, runs, samples, time = (figure.strip() for figure in row.split("│")[:5])
    assert (cells, searches, runs) == ("8", "2", "12")
    assert (
        samples.replace(",", "") == str(2 * 2 * 4 * (2 + 3) * 8 + 2 * 2 * 4 * 2 * 8)
        and time[0].isdigit()
        and time.endswith((" s", " min"))
    )
    # Seeds and rates cost the same, and are probed once; a search evaluates in other rounds than a cell.
    assert said.count("probing tiny/small/main") == 2 * 2 + 2 and "in all, by 2 workers" in said
    code, said = bench("run", "tiny.yaml", "--only", "nothing", "--estimate")
    assert code == 2 and "--only nothing" in said


@pytest.mark.more
def test_what_failed_and_what_is_repeated_is_estimated(done, bench):
    found = {}
    for options in ([], ["--redo"]):
        code, said = bench("run", "tiny.yaml", "--estimate", *options)
        assert code == 0, said
        rows = re.findall(r"│ tiny/small/(\w+) +│ *(\d*) *│ *(\d*) ", said)
        found[*options] = {name: (cells, searches) for name, cells, searches in rows}
    # of before, a method that never works has failed; searches are kept
    assert found == {(): {"trouble": ("1", "")}, ("--redo",): {"main": ("8", ""), "trouble": ("2", "")}}


@pytest.mark.more
@pytest.mark.parametrize(
    "workers, sums", [(2, ["8.0 h", "3.0 GB", "4.0 GB", "2.0 GB"]), (4, ["4.0 h", "6.0 GB", "8.0 GB", "4.0 GB"])]
)
def test_a_gpu_that_runs_are_estimated_for(place, bench, monkeypatch, workers, sums):
    """They are probed on it, and its memory is not added to the machine's, but to that of others on the same GPU."""
    from benchmark import estimate
    from fs_lowrank.estimate import Estimate, Need

    code, said = bench("run", "tiny.yaml", "--only", "main", "--estimate", "--gpus", "99")
    assert code == 2 and said.count("\n") == 1 and "--gpus 99: expected all, or numbers such as 0,1" in said, said
    probed = []

    def measured(config):
        probed.append((config.use_gpu, config.device))
        needs = [Need("base", size, where, "") for where, size in (("device", 3e9), ("memory", 2e9), ("disk", 1e9))]
        return Estimate(
            needs,
            {"device": 8e9, "memory": 8e9, "disk": 8e9},
            seconds=1.0,
            scoring={"test": 7200.0},
        )

    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(estimate, "estimate", measured)
    options = ["--gpus", "1,2", "--workers", str(workers), "--results", "on_gpus"]
    code, said = bench("run", "tiny.yaml", "--only", "main", "--estimate", *options)
    assert code == 0 and set(probed) == {(True, 1)}, said
    row = re.findall(rf"│ in all, by {workers} workers? +│(.*)", said)[0].split("│")
    sizes = [figure.strip() for figure in row[4:8]]
    # 8 cells score their test set, all workers at a time
    assert sizes == sums


def test_a_run_on_the_cpu_leaves_the_gpu_alone(monkeypatch):
    """There may be one: nothing asks CUDA for its memory, which would take some of it."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # by a run before, in the same worker
    peaks = {torch.device("cuda", 1): 10}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update({device: 7}))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[device])
    benchmark.execute._forget_peak(torch.device("cpu"))
    assert benchmark.execute._peak(torch.device("cpu")).keys() == {"host"} and set(peaks.values()) == {10}
    benchmark.execute._forget_peak(torch.device("cuda", 1))
    assert benchmark.execute._peak(torch.device("cuda", 1))["gpu"] == 7


@pytest.mark.more
def test_the_estimate_of_a_search_that_is_no_grid(place, bench):
    text = begun(place).replace("[0, 1]", "[0]")
    text += "learning_rates: {search: {space: {train.optimizer.lr: {loguniform: [1e-3, 1e-2]}}, seeds: 1}}\n"
    (place / "ranges.yaml").write_text(text)
    code, said = bench("run", "ranges.yaml", "--estimate", "--results", "ranges_results")
    assert code == 0, said
    (row,) = re.findall(r"│ ranges[^│]* +│(.*)", said)
    assert [figure.strip() for figure in row.split("│")[:3]] == ["1", "1", str(1 + 20)]


@pytest.mark.parametrize("workers, threads", [(1, 4), (2, 2), (8, 1)])
def test_a_run_is_probed_with_the_threads_of_a_worker(inside, monkeypatch, workers, threads):
    """Of four cores, and four threads before."""
    import torch

    from benchmark import estimate

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    before, probed = torch.get_num_threads(), []
    monkeypatch.setattr(estimate, "_costs", lambda *job: probed.append(torch.get_num_threads()) or {"cells": 1})
    torch.set_num_threads(4)
    try:
        estimate.table(Options(("tiny.yaml",), results="probed", only=("main",)), workers, print)
        assert set(probed) == {threads} and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.more
def test_a_training_file_that_is_not_made_yet_is_made_for_the_estimate(tmp_path, tiny_causal, bench):
    rows = [{"instruction": "it was", "input": "", "output": ("good", "bad")[i % 2], "answer": ""} for i in range(40)]
    (tmp_path / "commonsense" / "boolq").mkdir(parents=True)
    (tmp_path / "commonsense" / "boolq" / "train.json").write_text(json.dumps(rows))
    suite = tmp_path / "instructed.yaml"
    suite.write_text(
        f"""
        config:
          model: {{type: {tiny_causal}@huggingface_llm}}
          data: {{args: [{{loss_on: answer}}], splits: [0.8, 0.2, 0.0], max_dropped: 1.0}}
          llm: {{tok_len: 64, adapter: {{args: [{{r: 2, alpha: 4, modules: [v_proj]}}]}}}}
          federate: {{client_num: 2, total_round_num: 1}}
        methods: [fedlora]
        test: none
        training_file: {{tasks: [boolq], per_task: 30}}
        """
    )
    for _ in range(2):  # made, and found
        code, said = bench("run", str(suite), "--estimate", "--data", str(tmp_path), "--work", str(tmp_path / "work"))
        assert code == 0 and "│ instructed/small/main" in said, said
    assert len([*(tmp_path / "work" / "data").iterdir()]) == 1
    # Where it cannot be made, that is the one thing to put right, and not the missing file as well.
    (tmp_path / "none").mkdir()
    code, said = bench("run", str(suite), "--data", str(tmp_path / "none"), "--work", str(tmp_path / "other"))
    assert code == 2 and "1 thing to put right" in said and "boolq: there is no" in said, said


def test_everything_that_is_missing_is_reported_before_training(inside, capsys):
    text = textwrap.dedent(SUITE)
    wrong = text.replace("MODEL", "/no/such/model").replace("DATA", "nowhere.csv").replace("imports: [own_methods]", "")
    (inside / "wrong.yaml").write_text(wrong.replace("[bad_lora, deadly_lora]", "[fedlora]"))
    assert main(["run", "wrong.yaml", "--results", "elsewhere"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "nothing was started; 2 things to put right" in error
    assert "nowhere.csv" in error and "there is no folder '/no/such/model'" in error
    assert not (inside / "elsewhere" / "cells").exists()


@pytest.mark.more
def test_errors_are_reported_before_training(inside):
    from benchmark import check

    text = begun(inside, "[rolora, fedlora]", own=False)
    for change, words in (
        (("[0.7, 0.1, 0.2]", "[0.9, 0.1, 0.0]"), "has no test set of its own"),
        (("tok_len: 24", "tok_len: 65"), "has 64 positions; set llm.tok_len"),
        (
            ("[rolora, fedlora]", "[{method: fedfisher, config: {lowrank.fisher: full, lowrank.compress: true}}]"),
            "compress",
        ),
    ):
        (inside / "cannot.yaml").write_text(text.replace(*change))
        options = Options(("cannot.yaml",), results="elsewhere")
        with pytest.raises(UserError, match=f"nothing was started.*\n(.*\n)*.*{re.escape(words)}"):
            check.check(plan(options), options)


def test_initial_weights_that_are_missing_are_seen_before_anything_trains(tmp_path, tiny_images, monkeypatch):
    from benchmark import check

    monkeypatch.chdir(tmp_path)
    (tmp_path / "start.yaml").write_text(
        f"""
        config: {{model: {{type: resnet10}}, data: {{type: {tiny_images}, splits: [0.6, 0.2, 0.2]}},
          lowrank: {{width: 0.25}}, federate: {{client_num: 2}}}}
        methods: [fedavg]
        grid: {{start: {{drawn: {{}}, given: {{lowrank.weights: nowhere/model.safetensors}}}}}}
        """
    )
    options = Options(("start.yaml",), results="elsewhere")
    with pytest.raises(UserError, match="1 thing to put right.*\n.*from nowhere/model.safetensors raises FileNotFound"):
        check.check(plan(options), options)


def test_an_engine_that_is_not_installed(inside, monkeypatch):
    from benchmark import check

    if "federatedscope" in sys.modules or find_spec("federatedscope"):
        pytest.skip("the framework is installed")
    monkeypatch.setenv("FEDERATEDSCOPE_ROOT", str(inside / "no checkout"))
    monkeypatch.delitem(sys.modules, "fs_lowrank.engines.federatedscope", raising=False)
    (inside / "there.yaml").write_text(begun(inside, own=False))
    options = Options(("there.yaml",), engine="federatedscope", results="elsewhere")
    with pytest.raises(UserError, match="nothing was started; 1 thing.*\n.*FEDERATEDSCOPE_ROOT = .*no checkout"):
        check.check(plan(options), options)


@pytest.mark.more
def test_wrong_use(inside, capsys):
    for args, words in (
        (["run", "gleu"], "did you mean 'glue'"),
        (["report", "analysis", "--results", "none"], "run a suite first: fs-lowrank benchmark run analysis"),
        (["run", "glue", "--only", "sst"], "no such experiment; did you mean 'sst2'"),
        (["run", "glue", "--workers", "0"], "--workers: '0'"),
        (["run", "glue", "--engine", "locl"], "'local'"),
        (["run", "glue", "--data", "nowhere"], "there is no such folder"),
    ):
        assert main(args) == 2
        assert words in " ".join(capsys.readouterr().err.split()), args


def test_finished_repeated_and_formerly_failed_cells(inside):
    (inside / "one.yaml").write_text(begun(inside, own=False))
    options = Options(("one.yaml",), results="redo", since=100.0)
    cell, again = plan(options)[0], plan(dataclasses.replace(options, redo=True))[0]
    store = options.store
    store.write("failed", {**cell.identity(), "error": "then", "finished": 50.0})
    assert not cell.done(store)  # a cell that failed in an earlier call is tried again
    store.write("failed", {**cell.identity(), "error": "now", "finished": 150.0})
    assert cell.done(store)
    store.write("cells", {**cell.identity(), "finished": 50.0})
    assert cell.done(store) and not again.done(store)
    store.write("cells", {**cell.identity(), "finished": 150.0})
    assert again.done(store)


def test_a_repetition_that_fails_is_reported_beside_the_earlier_result(inside):
    (inside / "repeated.yaml").write_text(begun(inside, own=False))
    options = Options(("repeated.yaml",), results="repeated")
    suite, store, cell = load_suite("repeated.yaml", "small"), options.store, plan(options)[0]
    store.write("cells", finished(cell, finished=150.0))
    for then, failures in ((100.0, 0), (200.0, 1)):
        store.write("failed", {**cell.identity(), "error": "then", "finished": then})
        found = find(suite, suite.experiments["main"], options, store)
        assert len(found.all_records) == 1 and len(found.failed) == failures


def test_suites_do_not_run_generated_code_without_permission():
    asked = {"scorer": "humaneval", "run_unsafe_code": True}
    assert permitted(asked, unsafe_code=False)["run_unsafe_code"] is False
    assert permitted({"scorer": "humaneval"}, unsafe_code=True)["run_unsafe_code"] is True


@pytest.mark.more
def test_the_report_names_differences_between_the_methods(inside, done):
    """Differences in heads and rounds, from records that the test has changed."""
    (inside / "alike.yaml").write_text((inside / "tiny.yaml").read_text().replace("imports: [own_methods]", ""))
    suite, options = load_suite("alike.yaml", "small"), Options(("alike.yaml",))
    found = find(suite, suite.experiments["main"], options, options.store)
    assert "did not have the same" not in (line := markdown("setting", found)) and "not treated alike" not in line
    record = found.records["fedlora", "2"][0]
    record["rounds"], record["config"] = 9, {**record["config"], "federate.method": "regmean"}
    line = markdown("setting", found)
    assert "did not have the same rounds" in line and "did not have the same samples" not in line
    assert "not treated alike" in line and "combined as the other layers are" in line


def test_a_search_over_values_of_any_kind_is_said():
    point = {"train.optimizer.type": "AdamW", "train.optimizer.lr": 0.01, "lowrank.ranks": [2, 4]}
    said = _headline({"winner": {"point": point, "values": {"val_acc": 0.5}}}, SimpleNamespace())
    assert said == "type AdamW, lr 0.01, ranks [2, 4], val_acc 0.500"


@pytest.mark.slow
def test_a_checkpoint_is_given_up_only_if_it_cannot_be_used(settings, tmp_path, capsys, no_curves):
    config = load_config(settings, **{"outdir": str(tmp_path / "cell"), "federate.total_round_num": 2})

    def round_of(config):
        capsys.readouterr()
        train(config, "local")
        out, err = capsys.readouterr()
        said.append(err)
        return [int(n) for n in re.findall(r"^round (\d+) loss", out, flags=re.MULTILINE)]

    said = []

    assert round_of(config) == [1, 2] and round_of(config) == []
    assert not any("starts again" in err for err in said)
    with pytest.raises(UserError, match="no file"):
        train(config.replace({"data.type": "missing.csv"}), "local")
    (meta,) = (tmp_path / "cell" / "checkpoint").glob("*2/meta.json")
    before = meta.read_text()
    content = json.loads(before)
    del content["sha256"]
    content["schema"] += 1
    meta.write_text(json.dumps({"sha256": _meta_sum(content), **content}))
    with pytest.raises(NewerSchema):
        train(config, "local")
    meta.write_text(before)
    assert round_of(config) == [], "the checkpoint is there as it was"
    assert round_of(config.replace({"train.optimizer.lr": 0.02})) == [1, 2]
    assert "was started with another train.optimizer.lr" in said[-1]


def test_values_of_a_script():
    found = {"file": {"rows": [{"x": 1.0}, {"x": 3.0}], "y": 4}}
    assert quotient(found, "file.rows.*.x") == 2.0 and quotient(found, "file.y / file.rows.0.x") == 4.0
    with pytest.raises(UserError, match="there is no 'z', only rows, y"):
        quotient(found, "file.z")
    with pytest.raises(UserError, match="expected a number"):
        quotient(found, "file.rows")
    assert quotient({"losses": [9.0, 1.0, 2.0]}, "losses.-2:") == 1.5


def test_values_of_a_script_by_seed():
    runs = [{"seed": s, "method": m, "x": [v, v + 2]} for m, s, v in (("a", 0, 1.0), ("a", 5, 3.0), ("b", 5, 2.0))]
    found = {"file": {"runs": runs, "one": [{"k": 1, "curves": [[0.0, 4.0], [0.0, 6.0]]}], "floor": 2.0}}
    found["file"]["twice"] = [{"seed": 0, "method": "a", "clients": n, "x": 1.0} for n in (5, 10)]
    assert quotients(found, "file.runs?method=a.x.*") == {0: 2.0, 5: 4.0}
    both = quotients(found, "file.runs?method=a.x.* / file.runs?method=b.x.*")
    assert both[5] == 4.0 / 3.0 and both.keys() == {0, 5} and math.isnan(both[0])  # b has no seed 0
    assert quotients(found, "file.one?k=1.curves.*.-1: / file.floor") == {0: 2.0, 1: 3.0}
    assert quotients(found, "file.one.*.k") == {0: 1.0}
    for path, words in (
        ("file.floor", "expected entries with a seed"),
        ("file.runs?method=c.x", "method=c: 0 entries have that"),
        ("file.rns?method=a.x", "there is no 'rns', only runs, one, floor"),
        ("file.twice?method=a.x", "method=a: 2 entries have that, and not each has a seed"),
    ):
        with pytest.raises(UserError, match=words):
            quotients(found, path)


def final_test(settings, folder, **keys):
    config = fs_lowrank.load_config(settings, {"outdir": str(folder), "eval.split": ["val"], **keys})
    return fs_lowrank.run(config, callbacks=[FinalTest()], progress=False)


def test_the_test_set_is_scored_alike_with_stored_states(settings, tmp_path, no_curves):
    plain = final_test(settings, tmp_path / "plain", **{"train.cache_frozen": "off", "train.only_read": "off"})
    for name in ("stored", "read"):
        cached = final_test(settings, tmp_path / name)
        assert cached.final["test_loss"] == pytest.approx(plain.final["test_loss"], rel=1e-5)
        assert cached.final["test_acc"] == plain.final["test_acc"] and cached.facts["right"] == plain.facts["right"]


def test_the_worst_tenth_is_of_clients_on_their_own_shares(settings, tmp_path, no_curves):
    class OnShares(fs_lowrank.Callback):
        def on_end(self, run, result):
            shares = [examples for _, examples in run.workspace.tested()]
            result.facts["acc"] = [run.evaluator.score(share, f"share {i}")["acc"] for i, share in enumerate(shares)]

    config = fs_lowrank.load_config(settings, {"outdir": str(tmp_path / "run"), "federate.client_num": 20})
    result = fs_lowrank.run(config, callbacks=[FinalTest(), OnShares()], progress=False)
    worst = sorted(result.facts["acc"])[: len(result.facts["acc"]) // 10]
    assert result.final["test_acc_worst_decile"] == pytest.approx(sum(worst) / len(worst)) and len(worst) == 2


def test_a_share_of_no_rows_is_no_test_set(settings, tmp_path, no_curves):
    with pytest.raises(UserError, match="there is no test set; give the last one a share"):
        final_test(settings, tmp_path / "run", **{"data.splits": [0.8, 0.199, 0.001]})


@pytest.mark.more
def test_the_commit_is_of_this_package_alone(tmp_path, monkeypatch):
    """Not of a repository in which somebody's environment lies."""
    (tmp_path / "own.py").write_text("")
    for words in ("init", "add own.py", "-c user.name=a -c user.email=b commit -m first"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True, capture_output=True)
    for name, length in (("own.py", 12), ("execute.py", 0)):
        monkeypatch.setattr(benchmark.execute, "__file__", str(tmp_path / name))
        assert len(benchmark.execute.commit.__wrapped__()) == length
