"""What a command's help begins with, and tables as JSON."""

import json

import pytest

from fs_lowrank import cli
from fs_lowrank.jobs.tables import as_json


def test_the_help_has_groups_with_an_example_each_and_the_rest_by_name(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    shown = [line.strip().removeprefix("$ ") for line in text.splitlines() if line.strip().startswith("$")]
    assert len(shown) == 8 and all(line.startswith("fs-lowrank ") for line in shown)
    assert "More:" in text and "doctor" in text.partition("More:")[2] and max(map(len, text.splitlines())) < 120


def test_every_commands_help_begins_with_an_example(capsys):
    for parser in cli._parser()[1]:
        first = parser.format_help().splitlines()[0]
        assert first.startswith(f"Example: {parser.prog}"), first


@pytest.mark.parametrize("command", [("methods",), ("keys", "federate"), ("examples",)])
def test_a_table_as_json_is_alone_on_the_output(command, capsys):
    assert cli.main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) > 3 and len({tuple(row) for row in rows}) == 1
    assert cli.main(["methods", "rolora", "--json"]) == 2
    assert "--json: there is a table only without a name" in capsys.readouterr().err


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
