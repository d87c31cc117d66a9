"""The runs of a winner on fresh seeds: which of them count, are still to come, or are run again."""

from __future__ import annotations

import pytest

from fs_lowrank import UserError
from hpo import best, cli, read_header, summary
from hpo.search import kind, retry_failed
from hpo.storage import CONFIRM, load_study, open_storage, quiet

POINTS = {"train.optimizer.lr": {"grid": [1e-3, 1e-2]}}


@pytest.fixture
def searched(search, runs):
    """``searched(failing, **options)`` is a finished search in which the larger rate is the better one; runs with the
    seeds ``failing`` fail. Returns its storage, its options, and the study of the winner's fresh seeds.
    """

    def searched(failing=(), **more):
        def accuracy(config, round):
            if config.seed in failing:
                raise ValueError("it went wrong")
            return 0.8 + config.train.optimizer.lr

        runs(accuracy)
        options, _, _ = search(POINTS, **{"confirm": 3, **more})
        storage = open_storage(options.where)
        return storage, options, load_study(storage, f"s{CONFIRM}1")

    return searched


def confirmed(storage):
    (winner,) = summary.summary(storage, "s")["winners"]
    return winner["confirmed"]


@pytest.mark.more
def test_a_winner_that_failed_on_fresh_seeds_is_refused_until_they_are_run_again(searched, config):
    seeds = [config.seed + 1000 + i for i in range(3)]
    storage, _, checks = searched(failing=seeds[1:])
    assert (
        confirmed(storage)["seeds"] == seeds[:1] and confirmed(storage)["failed"] == ["ValueError: it went wrong"] * 2
    )
    with pytest.raises(
        UserError, match="failed on 2 of its fresh seeds: .*it went wrong; run these again with --retry-"
    ):
        best.choose(summary.summary(storage, "s"))
    with quiet():
        retry_failed(checks)
    assert [t.params["seed"] for t in checks.trials if kind(t) == "waiting"] == seeds[1:]
    assert confirmed(storage)["open"] == 2 and not confirmed(storage)["failed"], "they wait"
    with pytest.raises(UserError, match="was not yet run on all of its fresh seeds"):
        best.choose(summary.summary(storage, "s"))
    searched()
    assert confirmed(storage)["seeds"] == seeds and not confirmed(storage)["failed"]
    assert best.choose(summary.summary(storage, "s"))["trial"] == 1


@pytest.mark.more
@pytest.mark.parametrize(
    "failing, said", [([1000, 1001], "NOT run on fresh seeds (2 of these runs failed)"), ([1001], "1 more failed")]
)
def test_a_winner_that_failed_on_fresh_seeds_is_not_written_without_a_flag(
    searched, tmp_path, capsys, config, failing, said
):
    _, options, _ = searched(failing=[config.seed + k for k in failing], confirm=2)
    where, out = ["--dir", str(options.folder)], tmp_path / "best.yaml"
    assert cli.main(["best", *where, "--out", str(out)]) == 2 and not out.exists()
    shown = capsys.readouterr()
    assert f"failed on {len(failing)} of its fresh seeds: ValueError: it went wrong" in shown.err
    assert ("2 failed" in shown.out) == (len(failing) == 2)
    assert cli.main(["best", *where, "--out", str(out), "--unconfirmed"]) == 0 and said in out.read_text()
    assert len(read_header(out)["confirmed"]["seeds"]) == 2 - len(failing)


@pytest.mark.more
def test_more_fresh_seeds_are_added_to_those_that_ran(searched, config):
    storage, _, _ = searched(confirm=1)
    before = confirmed(storage)["metrics"]["val_acc"]["values"]
    searched(confirm=2)
    assert confirmed(storage)["seeds"] == [config.seed + 1000, config.seed + 1001]
    assert confirmed(storage)["metrics"]["val_acc"]["values"][:1] == before
