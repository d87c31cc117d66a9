"""The speed studies run at a small size, and fast and slow forms give the same results. No time is tested."""

import json

import pytest

import benchmark.cli
import hpo.cli
from benchmark.suite import load_suite
from fs_lowrank import load_config
from studies.speed import cohort, gpu, row, table, whole

pytestmark = pytest.mark.more


def test_a_cohort_trains_as_its_clients_alone_in_each_form(settings):
    found = cohort.measure(load_config(settings, train__optimizer__type="SGD"), 1, clients=3)
    assert found["only_read"] and 0 < found["padding"] < 1
    assert found["speed_up"].keys() == cohort.COMPARED.keys() and max(found["difference"].values()) < 1e-5


def test_commands_of_whole_jobs_are_understood(tmp_path):
    for kind, cli in (("search", hpo.cli), ("suite", benchmark.cli)):
        _, *given = whole.command(kind, whole.PLAIN, tmp_path)
        assert cli._parser()[0].parse_args(given).workers == 2
    suite = load_suite(str(tmp_path / "suite.yaml"), "")
    (experiment,) = suite.experiments.values()
    assert len(experiment.methods) * len(experiment.seeds) == 12 and len(whole.RATES) == 16
    for settings in whole.SETTINGS.values():
        load_config(whole.DEMO, settings)


def test_rounds_on_a_gpu_are_measured_one_by_one_and_together(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.CASES, "tiny", ((64, 16, 2, 2, 2, 32), 1, 2, 80, 1))
    keys = {**gpu.prepare("tiny", tmp_path, "cpu"), "use_gpu": False}
    for cohort_of in ("off", "auto"):
        assert gpu.seconds(keys, tmp_path / cohort_of, **{"federate.total_round_num": 2, "train.cohort": cohort_of}) > 0


def test_the_table_has_a_line_for_each_figure(tmp_path):
    rows = [row(case, "slow ÷ fast", value, "29 ÷ 4", 1e-7, minimum=5) for case, value in (("a", 7.25), ("b", 2.0))]
    (tmp_path / "cohort.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "peers.json").write_text(json.dumps({"cells": []}))
    text = table(tmp_path)
    assert "| cohort | a | slow ÷ fast | 7.25 | ≥ 5 | 29 ÷ 4 | 1e-07 |" in text
    assert "| cohort | b | slow ÷ fast | 2 | ≥ 5 | 29 ÷ 4 |" in text
