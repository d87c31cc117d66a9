"""The accuracy of a constant prediction: by hand, in ``data.json``, and in the output of ``run`` and ``compare``."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from fs_lowrank import cli
from fs_lowrank.runs.chance import Chance

pytestmark = pytest.mark.usefixtures("no_curves")


def test_chance_by_hand():
    chance = Chance.of_counts([30, 60, 10, 0])
    assert chance.share == 0.6 and chance.error == pytest.approx(math.sqrt(0.6 * 0.4 / 100))
    assert chance.loss == pytest.approx(-(0.3 * math.log(0.3) + 0.6 * math.log(0.6) + 0.1 * math.log(0.1)))
    assert not chance.reached(0.6) and not chance.reached(0.6 + chance.error) and chance.reached(0.65)
    level = chance.share + chance.error
    for acc, expected in ((0.1, level), (0.6, level), (level, level), (0.7, 0.7)):
        assert chance.reported("acc", {"acc": acc, "loss": 1.0}) == expected
    for metrics, expected in (
        ({"acc": 0.6, "loss": 0.2}, chance.loss),  # the majority class, with any confidence
        ({"acc": 0.7, "loss": 2.0}, chance.loss),
        ({"acc": 0.7, "loss": 0.5}, 0.5),
        ({"loss": 0.5}, 0.5),
    ):
        assert chance.reported("loss", metrics) == expected


def test_the_verdict_names_methods_that_are_no_better_than_chance():
    chance = Chance.of_counts([60, 40])
    assert chance.verdict({"val_acc": 0.66, "other": None}) == ""
    assert chance.verdict({"val_acc": 0.66, "test_acc": 0.64, "worse": 0.3}) == (
        "nothing was learned: test_acc 0.640, worse 0.300, while always predicting the majority class gives "
        "0.600 ± 0.049 (one standard error)"
    )


@pytest.mark.parametrize("command", ["run", "compare"])
def test_run_and_compare_report_that_nothing_was_learned(settings, tmp_path, capsys, command):
    keys = {"federate": {"method": "fedlora", "client_num": 2, "total_round_num": 1}}
    train = {**settings["train"], "local_update_steps": 1, "optimizer": {"type": "SGD", "lr": 1e-12}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**settings, **keys, "train": train}))
    assert (
        cli.main([command, "--cfg", str(tmp_path / "run.yaml")] + ["--methods", "fedlora"] * (command == "compare"))
        == 0
    )
    (folder,) = (path.parent for path in (tmp_path / "run").rglob("data.json"))
    data = json.loads((folder / "data.json").read_text())["test"]
    assert sum(data["labels"].values()) == len(data["rows"]) > 0
    chance = Chance.of_run(folder, "test")
    assert chance == Chance.of_counts(list(data["labels"].values()))
    score = json.loads((folder / "summary.json").read_text())["final"]["test_acc"]
    assert chance.verdict({"test_acc": score}), "an untrained model"
    assert f"fedlora: {chance.verdict({'test_acc': score})}" in " ".join(capsys.readouterr().out.split())
