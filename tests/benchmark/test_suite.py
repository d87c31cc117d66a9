"""Suites: valid YAML, the jobs made from it, and the error messages for invalid YAML."""

import dataclasses
import re
import textwrap
from pathlib import Path

import pytest
import yaml

from benchmark.cli import main
from benchmark.execute import execute
from benchmark.frame import frame
from benchmark.job import Cell, Options, Search, decisive
from benchmark.metrics import unknown
from benchmark.plan import jobs_of, plan
from benchmark.report import write_report
from benchmark.results import find
from benchmark.run import verify
from benchmark.samples import counted, data_key, within_budget
from benchmark.suite import SIZES, load_suite, shipped
from benchmark.template import markdown
from benchmark.verdicts import judged_claims
from fs_lowrank import UserError, load_config
from fs_lowrank.data import build_data
from fs_lowrank.jobs import progress
from fs_lowrank.methods import get_method_class, revisions
from fs_lowrank.methods.server_optimizer import ServerOptimizer
from fs_lowrank.models.build import build_tokenizer
from fs_lowrank.settings.effects import without_effect
from tests.cases import finished

FIVE_LINES = """
    config: {model: {type: MODEL@transformers}, data: {type: DATA, splits: [0.7, 0.1, 0.2]}}
    methods: [rolora, fedlora]
    grid: {federate.client_num: [3, 6]}
    seeds: [0, 1]
"""


@pytest.fixture
def write(tmp_path, tiny_encoder, reviews_csv):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text).replace("MODEL", str(tiny_encoder)).replace("DATA", str(reviews_csv)))
        return str(path)

    return write


def options(path, **changes):
    return Options((path,), **changes)


def test_five_lines_are_a_suite(write):
    cells = plan(options(write(FIVE_LINES)))
    assert len(cells) == 8 and all(isinstance(c, Cell) for c in cells)
    first = cells[0]
    assert (first.method.label, first.setting, first.seed) == ("rolora", {"clients": "3"}, 0)
    assert first.config.federate.client_num == 3 and first.config.federate.method == "rolora"
    assert first.config.eval.split == ["val"]  # the test set is scored once, after the run
    assert len({c.key for c in cells}) == 8
    assert [c.seed for c in cells] == [0] * 4 + [1] * 4  # what is there early covers the grid


def test_a_suite_may_name_any_method(write):
    jobs = plan(options(write(FIVE_LINES), methods=("ffa_lora", "rolora")))
    assert {j.method.label for j in jobs} == {"ffa_lora", "rolora"}
    with pytest.raises(UserError, match="no method 'rollora'; did you mean 'rolora'"):
        plan(options(write(FIVE_LINES), methods=("rollora",)))


def test_the_hash_depends_only_on_what_decides_the_result(write):
    key = lambda text, **o: plan(options(write(text), **o))[0].key  # noqa: E731
    same = key(FIVE_LINES)
    assert key(FIVE_LINES + "    title: other words\n") == same
    assert key(FIVE_LINES, data="/elsewhere", work="/other") == same
    assert key(FIVE_LINES, engine="federatedscope") != same
    assert key(FIVE_LINES.replace("splits: [0.7", "subsample: 0.9, splits: [0.7")) != same
    assert key(FIVE_LINES.replace("data:", "lowrank: {min_clients: 1}, data:")) == same  # a default changes nothing


def test_a_budget_of_samples_determines_the_rounds(write):
    text = FIVE_LINES.replace(
        "config: {",
        "samples: 1000\n    evaluations: 4\n    config: {dataloader: {batch_size: 8}, train: {local_update_steps: 2}, ",
    )
    by_clients = {c.setting["clients"]: c.config for c in plan(options(write(text)))}
    assert by_clients["3"].federate.total_round_num == 1000 // (3 * 2 * 8)
    assert by_clients["6"].federate.total_round_num == 1000 // (6 * 2 * 8)
    assert by_clients["3"].eval.freq == 5


def test_budget_counts_what_small_clients_train_on(write):
    """Clients smaller than a batch: a batch is their whole data, and the budget allows more rounds."""
    keys = "dataloader: {batch_size: 64}, train: {local_update_steps: 2}, llm: {tok_len: 24}"
    text = FIVE_LINES.replace("config: {", f"samples: 1000\n    evaluations: 4\n    config: {{{keys}, ")
    cells = {c.setting["clients"]: c for c in plan(options(write(text)))}
    sizes = [len(c) for c in build_data(cells["6"].config, build_tokenizer(cells["6"].config)).clients]
    assert cells["6"].config.federate.total_round_num == 1000 // (6 * 2 * 64) == 1 and max(sizes) < 64
    allowed = within_budget(cells["6"])
    assert allowed.federate.total_round_num == 1000 // (2 * sum(sizes)) > 1
    assert allowed.eval.freq == max(1, allowed.federate.total_round_num // 4)
    with pytest.raises(UserError, match=f"samples = 20 is less than one round takes, {sum(sizes)}"):
        within_budget(plan(options(write(text.replace("1000", "20"))))[0])
    own = {"lowrank.clients": [{"clients": 1, "tok_len": 4}]}  # which may leave out rows, so that sizes differ
    assert data_key(allowed) == data_key(cells["6"].config) != data_key(allowed.replace(own))


def test_samples_of_older_results_are_counted_from_what_they_hold(write):
    cell = next(c for c in plan(options(write(FIVE_LINES))) if c.setting["clients"] == "3")
    cell = dataclasses.replace(cell, config=cell.config.replace({"dataloader.batch_size": 8}))
    old = {"samples": 3 * 8 * 4, "rounds": 4, "data": {"clients": [3, 8, 20]}, "history": {"failed_clients": 0}}
    assert counted(old, cell.config) == {"samples": 4 * (3 + 8 + 8), "samples_estimated": False}
    assert counted({**old, "history": {"failed_clients": 1}}, cell.config)["samples_estimated"]
    new = {**old, "samples": 70, "samples_counted": True}
    assert counted(new, cell.config) == {"samples": 70, "samples_estimated": False}


def test_search_is_shared_over_seeds_and_settings(write):
    space = "{space: {train.optimizer.lr: {grid: [1e-3, 1e-2]}}"
    text = FIVE_LINES + "    learning_rates: {search: " + space + ", at: {clients: 6}}}\n"
    jobs = plan(options(write(text)))
    searches = [j for j in jobs if isinstance(j, Search)]
    assert [s.label for s in searches] == [f"learning rate of {m} at clients=6" for m in ("rolora", "fedlora")]
    assert all(s.config.eval.split == ["val"] and s.config.seed == 100 for s in searches)
    each = plan(options(write(text.replace("at: {clients: 6}", "each: [clients]"))))
    assert sum(isinstance(j, Search) for j in each) == 4
    assert searches[0].key in {j.key for j in each}  # the same search, whichever experiment needs it
    with pytest.raises(UserError, match="no axis 'client'; did you mean 'clients'.; there are: clients"):
        plan(options(write(text.replace("at: {clients: 6}", "each: [client]"))))


def test_a_search_by_the_clients_scores_on_federatedscope(write):
    """Its clients evaluate validation data, so a search there needs no global evaluation."""
    space = "{space: {train.optimizer.lr: {grid: [1e-3, 1e-2]}}}"
    text = FIVE_LINES.replace("data:", "federate: {make_global_eval: False}, data:")
    text += "    learning_rates: {search: " + space + "}\n"
    with pytest.raises(UserError, match="set federate.make_global_eval True"):
        plan(options(write(text)))
    assert any(isinstance(job, Search) for job in plan(options(write(text), engine="federatedscope")))


def test_a_search_may_not_change_the_samples_of_a_round_if_samples_are_the_budget(write):
    """The number of rounds is one for all points, so points of more steps would train on more."""
    space = "{space: {train.optimizer.lr: {grid: [1e-3]}, train.local_update_steps: {grid: [5, 20]}}, samples: 1000}"
    text = FIVE_LINES + "    learning_rates: {search: " + space + "}\n"
    with pytest.raises(
        UserError, match="space: train.local_update_steps changes the samples of a round, so with samples"
    ):
        plan(options(write(text)))


def test_a_table_of_learning_rates(write):
    text = FIVE_LINES + "    learning_rates: {table: {rolora: 0.01, fedlora: 0.02}, budget: 8 trials each}\n"
    rates = {c.method.label: (c.config.train.optimizer.lr, c.rate["budget"]) for c in plan(options(write(text)))}
    assert rates == {"rolora": (0.01, "8 trials each"), "fedlora": (0.02, "8 trials each")}
    with pytest.raises(UserError, match="table has no rate for fedlora; there are: rolora"):
        plan(options(write(text.replace(", fedlora: 0.02", ""))))
    with pytest.raises(UserError, match="learning_rates.budget is missing"):
        plan(options(write(text.replace(", budget: 8 trials each", ""))))


def test_the_config_of_an_experiment_overrides_that_of_the_suite(write):
    path = write("""
        config: {data: {type: a.csv}, llm: {adapter: {args: [{r: 4}]}}, federate: {client_num: 2}}
        methods: [fedlora]
        small:
          config: {data: {subsample: 0.5}}
          experiments:
            one: {}
            two: {config: {data.type: b.csv, llm.adapter.args.0.r: 8}, methods: [rolora], seeds: [7]}
        """)
    suite = load_suite(path, "small")
    one, two = suite.experiments.values()
    assert one.config["data.type"] == "a.csv" and one.config["data.subsample"] == 0.5
    cell = jobs_of(suite, two, options(path))[0]
    assert (cell.config.data.type, cell.config.adapter.r, cell.config.federate.method, cell.seed) == (
        "b.csv",
        8,
        "rolora",
        7,
    )
    with pytest.raises(UserError, match="has no size 'paper'; there is: small"):
        load_suite(path, "paper")


def test_an_extra_experiment_runs_only_where_it_is_named(write, capsys):
    path = write("""
        config: {data: {type: a.csv}, federate: {client_num: 2}}
        methods: [rolora, {method: flora, extra: true}]
        experiments: {first: {}, deeper: {extra: true, seeds: [0, 1]}}
        """)
    assert [(j.experiment.name, j.method.label) for j in plan(options(path))] == [("first", "rolora")]
    assert [j.method.label for j in plan(options(path, methods=("flora",)))] == ["flora"]
    assert [j.experiment.name for j in plan(options(path, only=("deeper",)))] == ["deeper"] * 2
    assert main(["list", path]) == 0
    listed = capsys.readouterr().out
    assert "deeper *" in listed and "first *" not in listed and "runs only if --only names it" in listed
    path = write("""
        config: {data: {type: a.csv}, federate: {client_num: 2}}
        methods: [{method: flora, extra: true}]
        """)
    with pytest.raises(UserError, match="name what is extra by --only and --methods, .*: main: flora$"):
        plan(options(path))


def test_methods_that_no_chosen_experiment_takes_are_named(write):
    path = write("""
        config: {data: {type: a.csv}, federate: {client_num: 2}}
        methods: [rolora]
        experiments: {open: {}, closed: {fixed_methods: true}}
        """)
    assert [j.experiment.name for j in plan(options(path, methods=("flora",)))] == ["open"]
    with pytest.raises(UserError, match="where an experiment has fixed_methods, one of them: .*closed: rolora$"):
        plan(options(path, methods=("flora",), only=("closed",)))


def test_the_hash_depends_on_the_content_of_a_file_of_the_user(write, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for folder, rows in (("a", "x,0"), ("b", "y,1")):
        (tmp_path / folder / "own.csv").write_text(f"text,label\n{rows}\n")
    text = """
        config: {data: {type: own.csv}, federate: {client_num: 2}}
        methods: [rolora]
        grid: {data.root: [HERE/a, HERE/b]}
        """.replace("HERE", str(tmp_path))
    one, other = plan(options(write(text)))
    assert one.key != other.key
    (tmp_path / "b" / "own.csv").write_text("text,label\nz,1\n")
    again = plan(options(write(text)))
    assert again[0].key == one.key and again[1].key != other.key


def test_a_test_set_cut_from_the_rows_is_the_same_in_search_and_cells(write):
    searched = FIVE_LINES + "    learning_rates: {search: {space: {train.optimizer.lr: {grid: [0.1]}}}}\n"
    jobs = plan(options(write(searched)))
    assert {j.config.lowrank.test_seed for j in jobs} == {0} and {j.config.seed for j in jobs} == {0, 1, 100}
    official = FIVE_LINES.replace("[0.7, 0.1, 0.2]", "[0.9, 0.1, 0.0]")
    assert {j.config.lowrank.test_seed for j in plan(options(write(official)))} == {-1}


def test_a_method_may_have_a_config_of_its_own_at_a_point_of_the_grid(write):
    jobs = plan(
        options(
            write("""
        config: {data: {type: a.csv}, federate: {client_num: 2}}
        methods: [fedlora, {method: rolora, where: {clients: {4: {lowrank.mix: 0.25}}}}]
        grid: {federate.client_num: [2, 4]}
        """)
        )
    )
    assert {(c.method.label, c.setting["clients"]): c.config.method_params.get("mix") for c in jobs} == {
        ("fedlora", "2"): None,
        ("fedlora", "4"): None,
        ("rolora", "2"): 1.0,
        ("rolora", "4"): 0.25,
    }


@pytest.mark.parametrize(
    "wrong",
    yaml.safe_load(Path(__file__).with_name("wrong_suites.yaml").read_text()),
    ids=lambda wrong: wrong["says"][:40],
)
def test_wrong_suites(write, wrong):
    with pytest.raises(UserError, match=".*".join(map(re.escape, wrong["says"].split("*")))):
        plan(options(write(wrong.get("suite") or "config: {a: 1}\nmethods: [rolora]\n" + wrong["then"])))


@pytest.mark.more
def test_a_result_of_an_earlier_revision_is_stale(write, tmp_path, monkeypatch):
    def jobs(text=FIVE_LINES, **changes):
        return plan(options(write(text), results=str(tmp_path / "results"), **changes))

    first, other = jobs()[0], jobs(methods=("fedlora",))[0]
    store = first.options.store
    store.write("cells", finished(first))
    assert first.result(store) and not first.earlier_keys
    monkeypatch.setattr(get_method_class("rolora"), "revision", 3)
    again = jobs()[0]
    assert again.config == first.config and again.key != first.key and not again.done(store)
    assert first.key in again.earlier_keys and jobs(methods=("fedlora",))[0].key == other.key
    found = find(again.suite, again.experiment, again.options, store)
    assert not found.records and [*found.stale.values()] == [{again.seed}]
    write_report(again.options)
    said = " ".join((tmp_path / "results" / "report.md").read_text().split())
    assert "**Stale results: 1**" in said and "run again: rolora." in said
    for job, accuracy in ((first, 0.70), (again, 0.75)):
        store.write("cells", finished(job, metrics={"test_acc": accuracy}))
    found = find(again.suite, again.experiment, again.options, store)
    store.supersede(again.earlier_keys)
    assert [record["hash"] for record in store.all("cells")] == [again.key]
    assert len(frame(store)) == 1
    monkeypatch.setattr(get_method_class("rolora"), "revision", 1)
    assert jobs()[0].key == first.key

    adagrad = FIVE_LINES.replace("data:", "fedopt: {use: True, optimizer: {type: Adagrad, lr: 0.1}}, data:")
    now = jobs(adagrad)[0]
    assert now.revisions == {"server Adagrad": 2}
    monkeypatch.setattr(ServerOptimizer, "revisions", {})
    before = jobs(adagrad)[0]
    store.write("cells", finished(before))
    monkeypatch.undo()
    assert before.key != now.key and before.key in jobs(adagrad)[0].earlier_keys


@pytest.mark.parametrize(
    "keys, wanted",
    [
        ({"federate.method": "fedlora"}, {}),
        ({"federate.method": "fedhm"}, {}),
        ({"federate.method": "fedhm", "lowrank.rank_factors": [2, 1]}, {"fedhm": 2}),
        ({"federate.method": "pfedlora"}, {}),
        ({"federate.method": "pfedlora", "lowrank.variant": 2}, {"pfedlora": 2}),
        ({"federate.method": "fedfisher"}, {"fedfisher": 2}),
        ({"federate.method": "fisher_merge"}, {"fisher_merge": 2}),
        ({"federate.method": "regmean"}, {"regmean": 2}),
        ({"federate.method": "fedavg", "fedopt.use": True, "fedopt.optimizer.type": "Adam"}, {}),
        ({"federate.method": "fedavg", "fedopt.optimizer.type": "adagrad"}, {}),
        ({"federate.method": "fedavg", "fedopt.use": True, "fedopt.optimizer.type": "adagrad"}, {"server Adagrad": 2}),
        (
            {
                "federate.method": "fedavg",
                "fedopt.use": True,
                "fedopt.optimizer": {"type": "Adagrad", "betas": [0.9, 0.99]},
            },
            {},
        ),
    ],
)
def test_revisions(keys, wanted):
    """The revisions of a configuration name the parts that have changed, and no others."""
    assert revisions(load_config({"federate.client_num": 2, **keys})) == wanted


#: a script that writes a value by seed
STUDY = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--n", type=float)
parser.add_argument("--out")
given = parser.parse_args()
runs = [{"seed": seed, "v": given.n + seed / 100} for seed in range(5)]
pathlib.Path(given.out, "study_of_n.json").write_text(json.dumps({"runs": runs, "mean": given.n + 0.02}))
"""
VALUES = """script: study_of_n, values: {m: study_of_n.mean}, by_seed: {m: "study_of_n.runs.*.v"}"""


@pytest.fixture
def study(write, tmp_path, monkeypatch):
    """A function that runs all cells of a suite of scripts; returns its options."""
    (tmp_path / "study_of_n.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)

    def study(text, size="small"):
        given = options(write(text), results=str(tmp_path / "results"), work=str(tmp_path / "work"), size=size)
        for job in plan(given, extra=True):
            given.store.write("cells", {**execute(job), "finished": 1.0})
        return given

    return study


def test_a_claim_names_an_experiment_whose_name_is_a_number(study):
    rule = "{is: value, methods: [study_of_n], metric: m, at_least: 0.5}"
    claims = f"claims: {{c: {{says: x, experiments: [20], rule: [{rule}]}}}}"
    given = study(f"{claims}\nexperiments: {{20: {{{VALUES}, args: [--n, 1]}}}}")
    assert load_suite(given.suites[0], "small").claims["c"]["experiments"] == ["20"]


def test_a_study_that_is_verified_leaves_its_files_as_they_were(study, tmp_path):
    given = study(f"experiments: {{s: {{{VALUES}, args: [--n, 0.1]}}}}")
    (job,) = plan(given)
    (file,) = (tmp_path / "results" / "scripts").rglob("*.json")
    (tmp_path / "study_of_n.py").write_text(
        STUDY.replace("+ 0.02", "+ 0.030")
    )  # of another size, so Python reads it again
    before = file.read_bytes()
    assert verify(dataclasses.replace(given, cell=job.key)) == [("m", pytest.approx(0.12), pytest.approx(0.13))]
    assert file.read_bytes() == before


def test_the_two_sizes_of_a_study_have_files_of_their_own(study, tmp_path):
    text = f"""
        claims:
          c: {{says: x, experiments: [s], rule: [{{is: value, methods: [study_of_n], metric: m, at_least: 0.5}}]}}
        small: {{experiments: {{s: {{{VALUES}, args: [--n, 0.1]}}}}}}
        paper: {{experiments: {{s: {{{VALUES}, args: [--n, 0.9]}}}}}}
    """
    sizes = {size: study(text, size) for size in SIZES}

    def said(size):
        suite, given = load_suite(sizes[size].suites[0], size), sizes[size]
        store = given.store
        results = {name: find(suite, e, given, store) for name, e in suite.experiments.items()}
        return judged_claims(suite, results)["c"].verdict, list(store.damaged.values())

    assert said("small") == ("does not hold", []) and said("paper") == ("holds", [])
    path = tmp_path / "results" / "scripts" / "mine-paper-s" / "study_of_n.json"
    path.write_text(path.read_text().replace("0.9", "0.8"))
    verdict, damaged = said("paper")
    assert verdict == "inconclusive"
    assert damaged == ["is not the file that its result was read from; its figures have no spread"]


@pytest.mark.more
def test_a_report_of_some_experiments_judges_claims_by_all(study, tmp_path):
    given = study(
        f"""
        claims:
          c: {{says: x, cause: {{says: Because., experiments: [b]}}, experiments: [a, b],
            rule: [{{is: value, methods: [study_of_n], metric: m, at_least: 0.5}}]}}
          d: {{says: only b, experiments: [b], rule: [{{is: value, methods: [study_of_n], metric: m, at_least: 0.5}}]}}
        experiments:
          a: {{{VALUES}, args: [--n, 0.1]}}
          b: {{{VALUES}, args: [--n, 0.9]}}
        """
    )
    for only in ((), ("a",)):
        write_report(dataclasses.replace(given, only=only))
        said = (tmp_path / "results" / "report.md").read_text()
        assert "Claim: x — holds in 1 of 2 experiments, does not hold in 1" in said and "Because (b: " in said
        assert "Not in this size" not in said and "belong to no cell" not in said
        assert ("### b" in said, "Claim: only b" in said) == (not only, not only)
    with pytest.raises(UserError, match="--only c: mine .* has no such experiment.*there are: a, b"):
        write_report(dataclasses.replace(given, only=("c",)))


def test_a_suite_with_one_size_is_reported(study, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(progress, "SOON", 0)
    text = f"paper: {{experiments: {{s: {{{VALUES}, args: [--n, 0.9]}}}}}}"
    given = dataclasses.replace(study(text, "paper"), size="all")
    with progress.showing(live=True):
        write_report(given)
    shown = capfd.readouterr().err
    assert "reading suites: " in shown and "drawing mine: " in shown
    assert "(paper)" in (tmp_path / "results" / "report.md").read_text()


def test_a_cell_of_a_method_that_experiments_share_is_in_each(write, tmp_path, monkeypatch):
    shared = """
        config: {model: {type: MODEL@transformers}, data: {type: DATA}, federate: {client_num: 3},
          train: {local_update_steps: 4}}
        methods: [fedlora]
        experiments:
          one: {}
          two: {}
          wide: {grid: {train.local_update_steps: [4, 30]}, seeds: [0, 1]}
    """
    given = options(write(shared), results=str(tmp_path / "results"))
    job = plan(dataclasses.replace(given, methods=("rolora",)))[0]
    given.store.write("cells", finished(job))
    suite = load_suite(given.suites[0], "small")

    def found():
        return {name: find(suite, e, given, given.store) for name, e in suite.experiments.items()}

    assert {name: (each.methods, each.wanted) for name, each in found().items()} == {
        "one": (["rolora"], 2),
        "two": (["rolora"], 2),
        "wide": (["rolora"], 5),  # of its own method four cells, and the one that is there
    }


def test_a_method_of_an_experiment_with_all_methods_is_given_to_no_other(write, tmp_path):
    images = """
        config: {model: {type: lenet}, data: {type: mnist, splits: [0.8, 0.2, 0.0]}, federate: {client_num: 3}}
        experiments: {one: {methods: all}, two: {methods: [fedavg]}}
    """
    given = options(write(images), results=str(tmp_path / "results"))
    for job in plan(dataclasses.replace(given, only=("one",), methods=("fedavg", "fedhm"))):
        given.store.write("cells", finished(job))
    two = load_suite(given.suites[0], "small").experiments["two"]
    assert find(load_suite(given.suites[0], "small"), two, given, given.store).methods == ["fedavg"]


@pytest.mark.parametrize(
    "metric",
    "test_acc val_perplexity test_acc_last5 client_test_loss_worst_decile unseen_test_acc best_round traffic majority "
    "bytes_to:val_loss:7E-1 rounds_to:val_acc:.5 generate:boolq:acc lm_eval:mine:of_two:acc".split(),
)
def test_metrics_that_there_are(metric):
    assert not unknown(metric)


@pytest.mark.parametrize(
    "metric",
    "acc val_acc_std test_loss_last5 client_test_f1 bytes_to:val_acc:many rounds_to:val_acc:nan x:y:z "
    "bytes_to:test_acc_last5:0.7 rounds_to:best_round:2 bytes_to:unseen_test_acc:0.7 bytes_to:val_acc".split(),
)
def test_metrics_that_there_are_not(metric):
    assert unknown(metric)
    assert not unknown("of a script", ["of a script"])


def test_a_report_of_methods_without_results_is_refused(study):
    given = study(f"experiments: {{a: {{{VALUES}, args: [--n, 0.1]}}}}")
    write_report(given)
    cell = """
        config: {model: {type: MODEL@transformers}, data: {type: DATA}, federate: {client_num: 3}}
        methods: [fedlora]
    """
    Path(given.suites[0]).write_text(textwrap.dedent(cell))
    with pytest.raises(UserError, match="holds no result of"):
        write_report(dataclasses.replace(given, methods=("rolora",)))


@pytest.mark.more
def test_the_setting_of_a_report_has_the_values_of_all_cells(write, tmp_path):
    steps = FIVE_LINES + "grid: {train.local_update_steps: [4, 20], data.splitter: [iid, dirichlet]}"
    steps = steps.replace("    grid: {federate.client_num: [3, 6]}\n", "").replace("grid", "    grid")
    given = options(write(steps.replace("config: {", "config: {federate: {client_num: 3}, ")))
    jobs = plan(given)
    found = find(jobs[0].suite, jobs[0].experiment, given, given.store)
    sent = {"uplink": 2, "uplink_without_head": 1}
    for job in jobs:
        found.records.setdefault((job.method.label, job.column), []).append(
            {
                **{"seed": job.seed, "setting": job.setting, "config": decisive(job.config), "samples": 8, "rounds": 1},
                **{"samples_estimated": False, "bytes": {"per_client_and_round": sent}, "model": {"type": "m"}},
                **{"data": {"source": "x", "fingerprint": "f"}, "test": "once", "engine": "local", "majority": 0.5},
            }
        )
    line = markdown("setting", found)
    assert "4 / 20 local steps" in line and "split `iid` / `dirichlet`" in line and "model `m`;" in line


@pytest.mark.more
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", shipped())
def test_the_shipped_suites_are_valid(name, size):
    suite = load_suite(name, size)
    for experiment in suite.experiments.values():
        jobs = jobs_of(suite, dataclasses.replace(experiment, seeds=experiment.seeds[:1]), Options((name,), size))
        assert jobs, experiment.name
        methods = {j.method.label for j in jobs if isinstance(j, Cell)}
        for config in {job.config.federate.method: job.config for job in jobs if isinstance(job, Cell)}.values():
            idle = {name for name, _, _ in without_effect(config, "local", get_method_class(config.federate.method))}
            shared = {"llm.adapter.args", "llm.adapter.args.0.r", "llm.adapter.args.0.lora_alpha"}
            assert idle <= shared, experiment.name  # which the methods that are compared share
        left_out = {"flora", "flexlora", "ffa_lora", "otfusion", "dense"}
        assert not methods or set((experiment.reference or {}).get("values", {})) <= methods | left_out
    for claim in suite.claims.values():
        assert claim["source"]
