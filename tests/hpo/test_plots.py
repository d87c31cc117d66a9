"""What is shown of studies: the names of metrics, and all trials as a table."""

import optuna
import pytest

from fs_lowrank import load_config
from hpo import cli, plots
from hpo.storage import load_study, open_storage
from hpo.summary import points_of


@pytest.mark.slow
def test_accuracy_is_that_of_the_next_token_for_a_language_model(search, causal_settings, tmp_path, capsys):
    base = load_config(causal_settings, {"federate.total_round_num": 1})
    search({"train.optimizer.lr": {"grid": [1e-2]}}, base, confirm=1)
    where = ["--dir", str(tmp_path / "hpo")]
    assert cli.main(["status", *where, "--table", str(tmp_path / "status.csv")]) == 0
    assert "token_acc" in (table := (tmp_path / "status.csv").read_text()) and "val_acc" not in table
    cli.main(["best", *where, "--study", "s", "--out", str(tmp_path / "best.yaml"), "--unlearned"])
    first = (tmp_path / "best.yaml").read_text().splitlines()[0]
    assert "val_token_acc" in first and "val_acc" not in first


@pytest.mark.more
def test_the_table_has_what_was_measured_in_a_pruned_trial(search, monkeypatch):
    """What it reports is the level of chance."""

    class Always(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return True

    monkeypatch.setattr("hpo.worker.make_pruner", lambda settings: Always())
    options, _, _ = search({"train.optimizer.lr": {"choice": [1e-9]}}, sampler="random", pruner="median", trials=1)
    storage = open_storage(options.where)
    pruned = [t for t in load_study(storage, "s").trials if t.state.name == "PRUNED"]
    measured = [t.user_attrs["metrics"]["val_acc"] for t in pruned]
    assert measured and measured != [t.value for t in pruned]
    assert [p["value"] for p in points_of(load_study(storage, "s"))] == measured
    plots.draw(storage, ["s"], options.folder)
    assert str(measured[0]) in (options.folder / "trials.csv").read_text()
