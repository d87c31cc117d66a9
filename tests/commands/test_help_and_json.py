"""What a command's help begins with, and tables as JSON."""

import json
import os
import subprocess
import sys

import pytest

from fs_lowrank import cli
from fs_lowrank.jobs import tables
from fs_lowrank.jobs.shell import make_console
from fs_lowrank.jobs.tables import as_json


def test_the_help_has_groups_with_an_example_each_and_the_rest_by_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    shown = [line.strip().removeprefix("$ ") for line in text.splitlines() if line.strip().startswith("$")]
    assert len(shown) == 8 and all(line.startswith("fs-lowrank ") for line in shown)
    assert "More:" in text and "doctor" in text.partition("More:")[2] and max(map(len, text.splitlines())) < 120


@pytest.mark.more
@pytest.mark.parametrize(
    "line, found",
    [
        ("ru", "run"),
        ("hp", "hpo"),
        ("run --ov", "--overwrite"),
        ("hpo st", "status"),
        ("benchmark list --re", "--results"),
    ],
)
def test_a_shell_completes_a_line(line, found, tmp_path):
    """As argcomplete's function for bash asks; those for zsh and fish set the same variables."""
    line = f"fs-lowrank {line}"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found"), "COMP_TYPE": "9"}
    subprocess.run([sys.executable, "-m", "fs_lowrank"], env={**os.environ, **asked}, timeout=120)
    assert (tmp_path / "found").read_text().split() == [found]


@pytest.mark.parametrize("command", [("methods",), ("keys", "federate"), ("examples",)])
def test_a_table_as_json_is_alone_on_the_output(command, capsys):
    assert cli.main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 3 and len({tuple(row) for row in rows}) == 1
    assert cli.main(["methods", "rolora", "--json"]) == 2
    assert "--json: there is a table only without a name" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["methods", "keys", "fetch", "examples", "doctor --quick"])
def test_no_word_of_a_table_is_broken_at_80_columns(command, capsys, monkeypatch):
    given, show = {}, tables.show

    def shown(console, lines, file=None, **options):
        given.update(lines=lines, leaves=options.get("leaves", ()))
        show(make_console(80), lines, file, **options)

    monkeypatch.setattr(tables, "show", shown)
    assert cli.main(command.split()) == 0
    out = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("┃", "│"))]
    head, *rows = filter(None, given["lines"])
    stays = [[str(cell) for name, cell in zip(head, row) if name not in given["leaves"]] for row in rows]
    words = {word for row in stays for cell in row for word in cell.split()}
    assert len(words) > 20 and words <= set(" ".join(out).split()) and max(map(len, out)) <= 80


@pytest.mark.parametrize("width, gone", [(60, ""), (35, "licence"), (25, "licence, size")])
def test_columns_leave_in_their_order(width, gone, capsys):
    lines = [("name", "what", "size", "licence"), ("a_name", "several words here", "12 MB", "Apache-2.0")]
    tables.show(make_console(width), lines, leaves=("licence", "size"))
    out = capsys.readouterr().out
    assert "several" in out and ("Apache-2.0" in out) == (width > 35) and ("MB" in out) == (width > 25)
    assert " ".join(out.split()).endswith(f"also show: {gone}" if gone else "┘")


def test_a_hash_in_a_table_stays_a_text():
    lines = [
        ("hash", "score", "count"),
        ("83049e12", "0.512", "12"),
        ("123456789012", "1.2e-05", "007"),
        ("inf", "nan", "-3"),
    ]
    assert [list(row.values()) for row in json.loads(as_json(lines))] == [
        ["83049e12", 0.512, 12],
        ["123456789012", 1.2e-05, "007"],
        ["inf", "nan", -3],
    ]
