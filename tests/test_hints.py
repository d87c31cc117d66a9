"""The commands that messages offer run as they stand."""

import re
import shlex

import pytest

from fs_lowrank import cli
from fs_lowrank.errors import between
from fs_lowrank.testing.small import make_reviews


def offered(text):
    """The commands that ``text`` offers, as arguments of ``fs-lowrank``."""
    return [shlex.split(line)[1:] for line in re.findall(r"(?:with|next|first): (fs-lowrank .+)", text)]


def test_equal_sizes_are_one_number():
    assert between([40, 24, 32]) == "24 to 40" and between([32, 32]) == "32"


def test_what_init_offers_runs(tmp_path, monkeypatch, capsys, tiny_encoder):
    monkeypatch.chdir(tmp_path)
    make_reviews(80).to_csv("my reviews.csv", index=False)
    assert cli.main(["init", "my reviews.csv", "--model", str(tiny_encoder), "--clients", "2"]) == 0
    command = offered(capsys.readouterr().out)[-1]
    short = ["federate.total_round_num", "1", "train.local_update_steps", "1"]
    assert cli.main([*command, *short]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["run", "--cfg", "a b.yaml", "seed", "1"], ["compare", "--cfg", "a.yaml", "--methods", "x,y"]]
)
def test_what_an_interrupted_run_offers_is_the_command_with_resume(command, monkeypatch, capsys, tmp_path):
    def stop(args):
        args.outdir = tmp_path
        raise KeyboardInterrupt

    stop.__name__ = f"_{command[0]}"
    monkeypatch.setattr(cli, stop.__name__, stop)
    assert cli.main([*command, "--overwrite"]) == 130
    out = capsys.readouterr().out
    assert "nothing to continue" in out and "--resume" not in out, "no round has ended"
    (tmp_path / "method" / "checkpoint").mkdir(parents=True)
    assert cli.main([*command, "--overwrite"]) == 130
    (again,) = offered(capsys.readouterr().out)
    assert sorted(again) == sorted([*command, "--resume"])
    assert cli.main(again) == 130  # it is understood


@pytest.mark.slow
def test_what_a_suite_offers_at_its_end_finds_its_results(tmp_path, monkeypatch, capsys, tiny_encoder):
    """A suite of the user's, in another folder, with options that say where its results are."""
    (tmp_path / "my suites").mkdir()
    make_reviews(60).to_csv(tmp_path / "my suites" / "reviews.csv", index=False)
    keys = "dataloader: {batch_size: 4}, federate: {client_num: 2, total_round_num: 1}, llm: {tok_len: 16}"
    (tmp_path / "my suites" / "own.yaml").write_text(
        f"config: {{model: {{type: {tiny_encoder}@transformers}}, data: {{type: reviews.csv}}, {keys}}}\n"
        "methods: [fedavg]\nmetrics: [test_acc]\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["benchmark", "run", "my suites/own.yaml", "--results", "my results", "--data", "my suites"]
    assert cli.main(command) == 0, capsys.readouterr().err
    (report,) = offered(capsys.readouterr().out)
    assert report[:2] == ["benchmark", "report"] and cli.main(report) == 0, capsys.readouterr().err
    assert (tmp_path / "my results" / "report.md").exists()
    assert cli.main(["benchmark", "report", "my suites/own.yaml", "--results", "none yet", "--data", "my suites"]) == 2
    (first,) = offered(capsys.readouterr().err)
    assert first[:3] == ["benchmark", "run", "my suites/own.yaml"] and cli.main(first) == 0
    assert list((tmp_path / "none yet" / "cells").glob("*.json"))
