"""Broken command lines, spaces and storages: each is an error of one line, and nothing is trained."""

from __future__ import annotations

import os

import pytest

from hpo import cli

SPACES = {
    "int_digits": "train.local_update_steps: {int: [1, 1" + "0" * 400 + "]}",
    "nan": "train.optimizer.lr: {uniform: [.nan, 1]}",
    "dates": "train.optimizer.lr: {grid: [2020-01-01]}",
    "surrogate": 'train.optimizer.type: {choice: ["\\ud800", SGD]}',
    "nul": 'data.type: {choice: ["a\\0b", sentiment]}',
    "numbers": "1: {grid: [1]}",
    "list": "- 1\n- 2",
    "nested_list": "train.optimizer.lr: {grid: [[[1]]]}",
    "mapping": "train.optimizer.lr: {grid: [{a: 1}]}",
    "empty_when": "train.optimizer.lr: {grid: [0.1, 0.2], when: {}}",
    "when_list": "train.optimizer.lr: {grid: [0.1, 0.2], when: [1]}",
    "when_itself": "train.optimizer.lr: {grid: [0.1, 0.2], when: {train.optimizer.lr: 0.1}}",
    "step_zero": "train.local_update_steps: {int: [1, 4], step: 0}",
    "step_huge": "train.local_update_steps: {int: [1, 4], step: 100}",
    "bool_range": "train.local_update_steps: {int: [true, 4]}",
    "studies_numbers": "train.optimizer.lr: {grid: [0.1]}\nstudies: {federate.method: [1, 2]}",
    "studies_deep": "train.optimizer.lr: {grid: [0.1]}\nstudies: {federate.method: [[rolora]]}",
    "alias": "a: &a {grid: [1, *a]}",
    "tag": "train.optimizer.lr: !!python/object/apply:os.system ['true']",
    "tab": "train:\n\toptimizer: 1",
}


@pytest.fixture
def command(config, tmp_path, capfd):
    """``command(*arguments)`` runs ``hpo tune`` and fails if anything trains; returns exit code and standard error."""
    config.dump(tmp_path / "run.yaml")
    (tmp_path / "space.yaml").write_text("train.optimizer.lr: {grid: [1e-3, 1e-2]}")

    def command(*arguments, space=tmp_path / "space.yaml", folder=tmp_path / "hpo"):
        always = ["--cfg", tmp_path / "run.yaml", "--space", space, "--dir", folder, "--workers", "0"]
        capfd.readouterr()
        try:
            code = cli.main(["tune", *map(str, always), "--timeout", "0.001", *arguments])
        except SystemExit as stop:  # of argparse
            code = stop.code
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err + captured.out and "please report" not in captured.err
        return code, captured.err

    return command


@pytest.mark.more
@pytest.mark.parametrize("name", SPACES)
def test_broken_spaces(command, tmp_path, name):
    (tmp_path / "broken.yaml").write_text(SPACES[name])
    code, error = command(space=tmp_path / "broken.yaml", folder=tmp_path / "hpo")
    assert code in (0, 2)
    assert error.count("error:") == (code == 2) and error.count("\n") == (code == 2) and len(error) < 2000


def test_spaces_that_are_not_text(command, tmp_path):
    (tmp_path / "broken.yaml").write_bytes(b"\xff\xfe\x00\x01")
    assert command(space=tmp_path / "broken.yaml")[0] == 2
    assert command(space=tmp_path)[0] == 2


@pytest.mark.more
@pytest.mark.parametrize(
    "arguments",
    [
        ["--storage", "/proc/none/study.db"],
        ["--storage", "/dev/full"],
        ["--study", ""],
        ["--trials", "0"],
        ["--trials", "1" + "0" * 400],
        ["--budget", "nan"],
        ["--timeout", "inf"],
        ["--seeds", "1" + "0" * 5000],
        ["--objective", ""],
        ["--objective", "val_acc,val_acc"],
        ["--methods", "rolora,rolora"],
        ["--data", "/no/such.csv"],
        ["--engine", "no_such"],
        ["--gpus", "99"],
        ["--workers", "-1"],
        ["train.optimizer.lr"],
        ["outdir", "a\0b"],
        ["seed", "\ud800"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40].encode("unicode_escape").decode(),
)
def test_broken_arguments(command, arguments):
    code, error = command(*arguments)
    assert code in (0, 2) or (code == 1 and ("cannot be written" in error or "when that is repaired" in error))
    assert bool(error) == bool(code) and len(error) < 8000


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_a_folder_that_cannot_be_written(command, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    code, error = command(folder=tmp_path / "closed" / "hpo")
    assert code == 1 and "Permission denied" in error


def test_a_file_in_place_of_the_folder(command, tmp_path):
    (tmp_path / "file").write_text("")
    code, error = command(folder=tmp_path / "file")
    assert code in (1, 2) and error.count("\n") == 1
