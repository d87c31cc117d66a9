"""``fs-lowrank examples`` lists the shipped examples and copies them, but never over a file."""

import csv
from pathlib import Path
from unittest.mock import ANY

import pytest

from fs_lowrank import cli, load_config
from fs_lowrank.commands.examples import folder

ROOT = Path(__file__).parents[2]


def test_an_example_is_copied_and_loads(tmp_path, capsys):
    assert cli.main(["examples", "demo", "own_data.yaml", "--to", str(tmp_path / "new")]) == 0
    assert str(tmp_path / "new" / "demo.yaml") in capsys.readouterr().out
    assert load_config(tmp_path / "new" / "demo.yaml") and (tmp_path / "new" / "own_data.yaml").exists()
    assert (tmp_path / "new" / "demo.yaml").read_bytes() == (folder() / "demo.yaml").read_bytes()
    assert cli.main(["examples", "first_hour", "--to", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "first_hour.ipynb").exists()
    assert cli.main(["examples", "own_objects.py", "--to", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "own_objects.py").exists()


@pytest.mark.more
@pytest.mark.parametrize("command", ["methods", "doctor", "fetch", "examples", "keys", "benchmark list"])
def test_every_list_is_written_too(tmp_path, command, capsys):
    assert cli.main([*command.split(), "--table", str(tmp_path / "list.tex")]) == (0 if command != "doctor" else ANY)
    with (tmp_path / "list.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert len(rows) > 3 and all(len(row) == len(header) for row in rows)
    written = (tmp_path / "list.tex").read_text(encoding="utf-8")
    assert written.startswith("\\begin{tabular}") and written.count(r"\\") == 1 + len(rows)
    assert rows[-1][0] in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["methods rolora", "keys seed", "fetch minilm", "examples demo"])
def test_without_a_list_there_is_no_table(tmp_path, arguments, capsys):
    assert cli.main([*arguments.split(), "--table", str(tmp_path / "list.csv")]) == 2
    assert "there is a table only without a name" in capsys.readouterr().err and not [*tmp_path.iterdir()]
    assert cli.main(["methods", "--table", "list.xlsx"]) == 2
    assert "ends with .csv or .tex" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["demoo"], "no example 'demoo'; did you mean 'demo'?"),
        (["demo", "own_data"], "own_data.yaml exists; remove it"),
    ],
)
def test_wrong_use(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_data.yaml").write_text("mine")
    assert cli.main(["examples", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["own_data.yaml"] and (tmp_path / "own_data.yaml").read_text()


def test_they_are_listed(capsys):
    assert cli.main(["examples"]) == 0
    out = capsys.readouterr().out
    assert all(path.stem in out for path in (ROOT / "examples").iterdir())
    assert "as a notebook" in out
