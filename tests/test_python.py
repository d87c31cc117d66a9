"""What Python users see: a run that exists already, progress, a result and its tables, messages in Python's words."""

import ast
import io
import re
import sys
from pathlib import Path

import pytest
import yaml

import fs_lowrank
from fs_lowrank import UserError, cli, load_config
from fs_lowrank.draw.panels import digits
from fs_lowrank.jobs import progress
from fs_lowrank.jobs.shell import as_options

ROOT = Path(__file__).parents[1]
#: files of the command line, whose messages are about options
COMMANDS = tuple(
    f"fs_lowrank/{name}"
    for name in (
        *("cli.py", "commands/", "jobs/shell.py", "jobs/tables.py", "keys.py"),
        "engines/federatedscope/__main__.py",
    )
)
COMMANDS += tuple(f"hpo/{name}.py" for name in ("cli", "best", "learning_rates"))


@pytest.fixture
def config(settings, tmp_path, no_curves):
    few = {"federate.client_num": 3, "federate.total_round_num": 2, "train.local_update_steps": 1}
    return load_config(settings, {**few, "federate.sample_client_num": 2, "outdir": str(tmp_path / "run")})


# -- messages ------------------------------------------------------------------------------------------


@pytest.mark.more
def test_no_message_of_the_library_names_an_option_of_a_command():
    """It names arguments, ``resume=True``; a command says them as its options (``as_options``)."""
    pytest.importorskip("optuna")
    from hpo import cli as search

    parsers = [*cli._parser()[1], *search._parser()[1]]
    options = {option for parser in parsers for option in re.findall(r"--[a-z_-]+", parser.format_help())}
    assert {"--resume", "--data", "--column", "--clients"} < options
    found = []
    for path in sorted(path for package in ("fs_lowrank", "hpo") for path in (ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(COMMANDS):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                named = options & set(re.findall(r"(?<![\w-])--[a-z_-]+", node.value)) - {
                    node.value
                }  # a name, no message
                # The commands that a file or a card shows are commands.
                if named and "fs-lowrank run --cfg" not in node.value:
                    found.append((name, node.lineno, named))
    assert not found


@pytest.mark.parametrize(
    "text, shown",
    [
        ("continue with resume=True, or overwrite=True.", "continue with --resume, or --overwrite."),
        ("name it with text_pair='COLUMN'; there", "name it with --text-pair COLUMN; there"),
        ("clients=500: data.csv has 9 rows", "--clients 500: data.csv has 9 rows"),
        ("by engine='federatedscope'; momentum=True", "by engine='federatedscope'; momentum=True"),
        ("config.resume=True and presume=True", "config.resume=True and presume=True"),
    ],
)
def test_a_command_says_an_argument_as_its_option(text, shown):
    assert as_options(text, ["resume", "overwrite", "text-pair", "text", "clients"]) == shown
    assert as_options(text, []) == text


# -- what exists already -------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_becomes_of_a_run_that_is_there(config):
    with pytest.raises(UserError, match="holds no run to continue; resume='auto' starts one where there is none"):
        fs_lowrank.run(config, resume=True)
    first = fs_lowrank.run(config, resume="auto", on_round=lambda record: True)
    assert [r["round"] for r in first.history] == [1]
    assert [r["round"] for r in fs_lowrank.run(config, resume="auto").history] == [1, 2]
    again = fs_lowrank.run(config.replace(seed=8), resume="overwrite", on_round=lambda record: True)
    assert [r["round"] for r in again.history] == [1]
    assert len(fs_lowrank.run(config.replace(seed=8), resume=True).history) == 2
    assert len(fs_lowrank.run(config, overwrite=True).history) == 2
    for wrong in ("Auto", "again", 3, None):
        with pytest.raises(UserError, match=f"resume = {wrong!r}: expected True, False, 'auto' or 'overwrite'"):
            fs_lowrank.run(config, resume=wrong)
    with pytest.raises(UserError, match="choose one of them"):
        fs_lowrank.run(config, resume="auto", overwrite=True)


# -- progress ------------------------------------------------------------------------------------------


@pytest.mark.more
def test_a_bar_where_somebody_looks_on(config, monkeypatch, capsys):
    told = []
    result = fs_lowrank.run(config, progress=True, on_round=lambda r: told.append(r["round"]), on_client=lambda *_: 0)
    shown = capsys.readouterr()
    assert not shown.out and "fedlora, rounds: " in shown.err and "1.5 of 2, " in shown.err and told == [1, 2]
    assert "2 of 2, " in shown.err and f"test acc {result.final['test_acc']:.3f}" in shown.err
    fs_lowrank.run(config, overwrite=True)
    assert "fedlora, rounds: " not in capsys.readouterr().err, "nobody looks on here"
    fs_lowrank.run(config, overwrite=True, progress=True, on_round=lambda r: True)
    assert "1 of 2, " in capsys.readouterr().err

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert not progress.watched()
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert progress.watched()
    monkeypatch.setattr(sys, "stderr", None)
    assert not progress.watched()


# -- a result ------------------------------------------------------------------------------------------


@pytest.mark.more
def test_a_result_shows_itself_and_has_tables(config):
    result = fs_lowrank.run(config.replace({"federate.total_round_num": 3}))
    text = repr(result)
    assert text.startswith("<fedlora, 3 rounds: ") and f"test_acc {digits(result.final['test_acc'])}" in text
    assert f"best round by val_loss {result.best['round']}" in text and len(text) < 400 and str(result.outdir) in text
    assert "<table>" in result._repr_html_() and "<th>test_loss</th>" in result._repr_html_()
    assert result.plot()._repr_png_().startswith(b"\x89PNG")

    rounds = result.history_frame()
    assert list(rounds.index) == [1, 2, 3] and rounds.index.name == "round" and set(rounds["clients"]) == {2}
    assert rounds["test_acc"].iloc[-1] == result.final["test_acc"] and rounds["seconds_training"].gt(0).all()
    assert rounds["uplink_bytes"].sum() == result.bytes["uplink_bytes"]
    clients = result.clients_frame()
    assert list(clients.index) == [1, 2, 3] and list(clients["samples"]) == result.facts["clients"]
    assert clients["rounds"].sum() == 6 and not clients["failed"].any()
    for key in ("uplink_bytes", "downlink_bytes"):
        assert clients[key].sum() == result.bytes[key]


@pytest.mark.slow
def test_in_a_notebook(config, tmp_path):
    """A bar, the result as a table, its plot, and the user's own plots, which still show."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.to_dict()))
    cells = [
        "import fs_lowrank; result = fs_lowrank.run('run.yaml', resume='auto')",
        "result",
        "result.plot()",
        "import matplotlib.pyplot as plt; plt.plot([1, 2])",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    run, table, plot, own = (cell.outputs for cell in notebook.cells)
    bar = "".join(o.text for o in run if o.output_type == "stream" and o.name == "stderr")
    assert "fedlora, rounds: " in bar and "val acc" in bar
    assert "<th>test_acc</th>" in table[0].data["text/html"]
    assert "image/png" in plot[0].data and any("image/png" in o.get("data", {}) for o in own)
