"""The command line: its output, the commands that it refuses, and its exit codes."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
import yaml

import benchmark.cli
import fs_lowrank
import hpo.cli
from fs_lowrank import cli, doctor, list_methods
from fs_lowrank.__main__ import main
from fs_lowrank.errors import ROWS_LOGGER, UserError
from fs_lowrank.models.shortcuts.states import SharedStates, shared_folder
from fs_lowrank.runs.folder import claim
from fs_lowrank.spin import bound_spin


@pytest.fixture
def config_file(settings, tmp_path):
    path = tmp_path / "run.yaml"
    small = {**settings, "federate": {**settings["federate"], "client_num": 3, "total_round_num": 2}}
    path.write_text(yaml.safe_dump({**small, "train": {**settings["train"], "local_update_steps": 1}}))
    return path


@pytest.fixture
def command(capsys, monkeypatch):
    """``command(*arguments)``: exit code, standard output, standard error, on a wide terminal."""
    monkeypatch.setattr(cli.console, "_width", 250)

    def command(*arguments):
        capsys.readouterr()
        try:
            code = cli.main([str(a) for a in arguments])
        except SystemExit as stop:  # argparse
            code = stop.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        return code, captured.out, captured.err

    return command


def squeeze(text):
    """The text without borders of tables and line breaks."""
    return " ".join("".join(" " if c in "│┃|" else c for c in text).split())


# -- runs ----------------------------------------------------------------------------------------------


def test_a_run_from_start_to_files(curves, command, config_file, tmp_path, caplog):
    code, out, err = command("run", "--cfg", config_file, "federate.method", "rolora", "train.optimizer.lr", "5e-3")
    assert code == 0 and "Traceback" not in err
    assert not [r for r in caplog.records if r.levelname == "WARNING"], "a new head and counted rows are information"
    said = next(r.getMessage() for r in caplog.records if r.name == ROWS_LOGGER)
    assert re.match(r"data: 300 rows read, \d+ for training by 3 clients \(\d+ to \d+ each\),.* 2 classes", said)
    lines = [line for line in out.splitlines() if line.startswith("round ")]
    assert len(lines) == 2 and "1/2" in lines[0] and "2/2" in lines[1]
    assert all(part in lines[0] for part in ("  loss ", "test acc", "up ")) and len(lines[0]) <= 80
    text = squeeze(out)
    for part in (
        "rolora: 3 clients, 3 a round, 2 rounds",
        "majority",
        "uplink",
        "downlink",
        "no head",
        "training",
        "aggregation",
        str(tmp_path / "run" / "adapter"),
        str(tmp_path / "run" / "curves.png"),
        "(one standard error of ",
        "; the most frequent class alone gives ",
        " weights (",
        " once (",
        " without dropout; dropout ",
        f"results go to {tmp_path / 'run'}",
        f"next: fs-lowrank report {tmp_path / 'run'}",
    ):
        assert part in text
    folder = tmp_path / "run"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in folder.iterdir()} >= {
        "config.yaml",
        "rounds.jsonl",
        "checkpoint",
        "adapter",
        "curves.png",
        "environment.json",
    }
    assert yaml.safe_load((folder / "config.yaml").read_text())["federate"]["method"] == "rolora"
    rows = json.loads((folder / "summary.json").read_text())["rows"]["read"]
    assert rows > 0


def test_names_in_brackets_are_printed_as_they_are(command, config_file, tmp_path):
    outdir = tmp_path / "[red]" / "x[" / "y] :x:z"
    code, out, err = command("run", "--cfg", config_file, "--resume", "outdir", outdir)
    assert (code, err) == (0, "")
    assert f"there is no {outdir / 'checkpoint'}: starting at round 1" in out
    assert f"pictures, tables: {outdir}\n" in out and re.search("^fedlora: 3 clients, ", out, re.M)


@pytest.mark.more
def test_a_folder_that_holds_a_run(command, config_file, tmp_path):
    assert command("run", "--cfg", config_file)[0] == 0
    for again in (["run"], ["compare", "--methods", "rolora"]):  # a comparison would replace its curves
        code, _, err = command(*again, "--cfg", config_file)
        assert code == 2 and f"{tmp_path / 'run'} holds a run already" in err and "--resume" in err
    before = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    code, out, _ = command("run", "--cfg", config_file, "--resume")
    assert code == 0 and "starting at round 1" not in out and "round   1/" not in out
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == before


@pytest.mark.more
def test_the_score_of_each_client_alone_is_beside_a_method_s(command, config_file, tmp_path):
    _, out, _ = command("compare", "--cfg", config_file, "--methods", "fedlora,local", "federate.total_round_num", "1")
    alone = json.loads((tmp_path / "run" / "comparison.json").read_text())["local"]["final"]["test_acc"]
    assert squeeze(out).count(f"; local {alone:.3f}") == 1, "not beside its own"


def test_compare(command, config_file, tmp_path):
    few = ["federate.total_round_num", "2", "train.local_update_steps", "1"]
    arguments = ["compare", "--cfg", config_file, "--methods", "rolora, fedlora", *few]
    code, out, _ = command(*arguments)
    assert code == 0
    found = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert list(found) == ["rolora", "fedlora"]
    for method, row in found.items():
        assert row["final"].keys() >= {"test_acc", "test_loss"} and 0 < row["majority"] < 1
        assert row["bytes_per_client_and_round"]["uplink"] > row["bytes_per_client_and_round"]["uplink_without_head"]
        assert row["seconds"]["training"] > 0 and (tmp_path / "run" / method / "rounds.jsonl").exists()
    bare = {m: row["bytes_per_client_and_round"]["uplink_without_head"] for m, row in found.items()}
    assert bare["rolora"] == bare["fedlora"] / 2
    assert len({row["data"] for row in found.values()}) == 1, "the same data for every method"
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    text = squeeze(out)
    assert all(part in text for part in (*found, "majority", "3 clients of", "for plain PEFT"))
    assert command(*arguments)[0] == 2


@pytest.mark.more
def test_no_width_cuts_the_table(command, config_file, monkeypatch):
    """Where the columns do not fit, the methods are columns, as many in a table as there is room for."""
    compare = ["compare", "--cfg", config_file, "--methods", "rolora,fedlora,ffa_lora", "--resume"]
    cells, tables = {}, {}
    for width in (250, 80, 34):
        monkeypatch.setattr(cli.console, "_width", width)
        rows = [re.split("[│┃]", line) for line in command(*compare)[1].splitlines() if line[:1] in ("│", "┃")]
        cells[width] = {cell.strip() for row in rows for cell in row}
        tables[width] = sum(row[1].strip() == "method" for row in rows)
        assert "…" not in "".join(cells[width])
    figures = {cell for cell in cells[250] if cell[:1].isdigit()} | {"rolora", "fedlora", "ffa_lora"}
    assert len(figures) > 12 and figures <= cells[80] and figures <= cells[34]
    assert tables == {250: 1, 80: 1, 34: 3}


@pytest.mark.parametrize(
    "methods, message",
    [
        ("rolora,rollora", "did you mean 'rolora'"),
        ("rolora,locl", "did you mean 'local'"),
        ("rolora,rolora", "distinct methods"),
        (",", "distinct methods"),
        ("fedlora,lora", "distinct methods"),
        ("local,pooled", "rows beside methods; name one method"),
        ("fedlora,local,local", "distinct rows"),
        ("fedlora --seeds 1", "two or more different seeds"),
        ("fedlora --seeds 1,1", "two or more different seeds"),
        ("fedlora --seeds 1,x", "expected whole numbers"),
    ],
)
def test_compare_refuses_before_anything_runs(command, config_file, tmp_path, methods, message):
    code, _, err = command("compare", "--cfg", config_file, "--methods", *methods.split())
    assert code == 2 and message in err and len(err.splitlines()) == 1 and not (tmp_path / "run").exists()


# -- wrong use -----------------------------------------------------------------------------------------

WRONG = {
    "workers": (["--workers", "many"], "a whole number or auto"),
    "unknown engine": (["--engine", "locale"], "did you mean 'local'"),
    "unknown module": (["llm.adapter.args", "[{r: 2, modules: [qury]}]"], "did you mean 'query'"),
    "unknown layer": (["llm.adapter.args", "[{r: 2, modules: [query], layers: [7]}]"], "no layer 7"),
    "rank above the width": (["llm.adapter.args", "[{r: 64, modules: [query]}]"], "choose r ≤ 32"),
    "a client's rank above the width": (["federate.method", "flexlora", "lowrank.ranks", "[2, 64]"], "choose r ≤ 32"),
    "more clients than samples": (["federate.client_num", "4000"], "4000"),
    "unknown splitter": (["data.splitter", "ldaa"], "lda"),
    "unknown data set": (["data.type", "sentimnt"], "sentiment"),
    "no such data": (["data.type", "nowhere.csv"], "nowhere.csv"),
    "no such model": (["model.type", "./nowhere@transformers"], "nowhere"),
    "no GPU": (["use_gpu", "True"], "no GPU"),
    "nothing to test on": (["data.splits", "[0.9, 0.1, 0.0]"], "eval.split"),
    "more survivors than clients": (["lowrank.min_clients", "9"], "lowrank.min_clients"),
    "a server optimizer over stacks": (["federate.method", "flora", "fedopt.use", "True"], "not a weighted mean"),
}


@pytest.mark.parametrize("what", [what for what in WRONG if what != "no GPU" or not torch.cuda.is_available()])
def test_wrong_usage_is_one_line_and_exit_code_2(command, config_file, tmp_path, what):
    overrides, message = WRONG[what]
    code, out, err = command("run", "--cfg", config_file, *overrides)
    assert code == 2 and message in squeeze(err) and "error:" in err
    assert "round " not in out and not list(tmp_path.glob("run/checkpoint/round_*"))


def test_a_client_of_one_sample_and_one_of_one_class(command, config_file, tmp_path):
    rows = [
        "text,label,domain",
        *(f"good day {i},1,a" for i in range(8)),
        *(f"bad day,{i % 2},b" for i in range(12)),
        "the tea,0,c",
    ]
    (tmp_path / "few.csv").write_text("\n".join(rows) + "\n")
    keys = (
        'data.splitter meta data.splitter_args [{"field":"domain"}] data.splits [0.9,0.0,0.1] eval.split [test]'.split()
    )
    code, _, err = command("run", "--cfg", config_file, "data.type", tmp_path / "few.csv", *keys)
    assert code == 0, err
    sizes = json.loads((tmp_path / "run" / "summary.json").read_text())["clients"]
    assert sizes["number"] == 3 and sizes["least"] == 1 < sizes["most"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "required: COMMAND, one of run, compare, "),
        (("runn",), "did you mean 'run'?; see fs-lowrank --help"),
        (("run",), "usage: run needs --cfg FILE, a configuration, or --data FILE"),
        (("run", "--cfg"), "argument --cfg: expected one argument; see fs-lowrank run --help"),
        (("compare", "--cfg", "x.yaml"), "required: --methods; see fs-lowrank compare --help"),
        (("run", "--cfg", "x.yaml", "--sed", "3"), "see fs-lowrank run --help"),
        (("methods", "a", "b"), "unrecognised: b; see fs-lowrank methods --help"),
        (("run", "--cfg", "x.yaml", "--resum_e", "seed", "3"), "unrecognised: --resum_e; did you mean '--resume'?"),
        (("run", "--cfg", "x.yaml", "seed", "3", "--resume", "--engin_e=local"), "did you mean '--engine'?"),
        (("compare", "--cfg", "x.yaml", "--methods", "rolora", "seed", "3", "--method_s"), "did you mean '--methods'?"),
        (("run", "--cfg", "x.yaml", "--dry-rnu"), "unrecognised: --dry-rnu; did you mean '--dry-run'?"),
        (("run", "--cfg", "x.yaml", "--train.optimizer.lr", "3"), "without dashes); see fs-lowrank run --help"),
    ],
)
def test_the_parsers_own_refusals(command, arguments, said):
    code, _, err = command(*arguments)
    assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == 1 and said in err


@pytest.fixture
def taken(monkeypatch):
    """Records the configurations instead of running them."""
    import fs_lowrank.api

    seen = []

    def run(config, *args, **options):
        seen.append(config)
        raise UserError("enough")

    monkeypatch.setattr(fs_lowrank.api, "run", run)
    return seen


@pytest.mark.parametrize(
    "arguments",
    [
        "--cfg {} seed 5 --resume data.subsample 0.5 grad.grad_clip -1e0 federate.sample_client_num -1",
        "seed 5 --cfg {} data.subsample 0.5 --resume grad.grad_clip -1e0 federate.sample_client_num -1 --engine local",
        "grad.grad_clip -1e0 --cfg {} federate.sample_client_num -1 --resume data.subsample 0.5 --engine local seed 5",
        "--cfg {} federate.sample_client_num -1 --resume seed 5 grad.grad_clip -1 data.subsample .5",
    ],
)
def test_overrides_may_be_anywhere_on_the_command_line(command, config_file, taken, arguments):
    code, _, err = command("run", *arguments.format(config_file).split())
    assert "enough" in err and code == 2
    (config,) = taken
    assert (config.seed, config.data.subsample, config.grad.grad_clip, config.federate.sample_client_num) == (
        5,
        0.5,
        -1.0,
        -1,
    )


def test_a_key_that_is_a_number(command, config_file):
    code, _, err = command("run", "--cfg", config_file, "-1", "seed")
    assert code == 2 and "override '-1': write overrides as pairs" in squeeze(err)


# -- information ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("program, words", [(cli, 1), (hpo.cli, 2), (benchmark.cli, 2)])
def test_every_help_begins_with_an_example_that_can_be_given(program, words):
    whole, commands = program._parser()
    below = [of for parser in commands if parser._subparsers for of in parser._subparsers._group_actions]
    for parser in (*commands, *(parser for of in below for parser in of.choices.values())):
        assert parser.format_help().startswith(f"Example: {parser.prog}")
        whole.parse_args(parser.example.split()[words:])


def test_version(command):
    code, out, _ = command("--version")
    assert code == 0 and fs_lowrank.__version__ in out


def test_the_methods(command):
    code, out, _ = command("methods", "rolora")
    assert code == 0 and "Algorithm 1" in out and "mix = 1.0" in out and "min 0.0" in out
    for name in list_methods():
        code, out, _ = command("methods", name)
        assert code == 0 and "hyperparameters" in out
    code, _, err = command("methods", "flexlara")
    assert code == 2 and "did you mean 'flexlora'" in err


def test_doctor(command):
    code, out, _ = command("doctor")
    text = squeeze(out)
    wanted = ("Python", "torch", "transformers", "peft", "engine local", "disk")
    assert code == 0 and all(part in text for part in wanted)


def test_doctor_asks_for_what_the_package_requires(command, monkeypatch):
    needs = ["filelock>=3.16", "torch>=99", "no-such-package", 'pytest>=8; extra == "dev"']
    monkeypatch.setattr(doctor, "requires", lambda name: needs)
    code, out, _ = command("doctor", "--quick")
    lines = [line for line in out.splitlines() if any(re.split("[>;]", need)[0] in line for need in needs)]
    assert code == 1 and len(lines) == 3
    for line, words in zip(lines, (("ok",), ("missing", "pip install 'torch>=99'"), ("missing", "not installed"))):
        assert all(word in line for word in words), line


def test_a_warning_is_one_line_of_a_log_however_long_and_none_ends_a_run():
    code = """if True:
        import argparse, logging, sys
        from fs_lowrank.jobs import shell
        shell._log(argparse.Namespace(debug=False, verbose=False), shell.console)
        logging.getLogger("fs_lowrank").warning("%s", 60 * "long ")
        sys.stdout.close()
        logging.getLogger("fs_lowrank").warning("nobody reads this")"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"WARNING  {60 * 'long '}\n"), done.stderr


# -- imports -------------------------------------------------------------------------------------------

#: what takes a tenth of a second or more to import
HEAVY = ("torch", "transformers", "peft", "datasets", "pandas", "matplotlib", "optuna", "lm_eval", "federatedscope")


def test_importing_loads_nothing_heavy():
    code = f"import sys, fs_lowrank; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr
    assert set(dir(fs_lowrank)) >= {"load_config", "run", "compare", "create_method", "list_methods", "register_method"}
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        fs_lowrank.runn  # noqa: B018


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder of a search that has no trial yet."""
    from hpo import Search, space_from, tune

    folder = tmp_path_factory.mktemp("hpo")
    config = fs_lowrank.load_config({"federate": {"client_num": 2, "method": "rolora"}})
    space = space_from({"train.optimizer.lr": {"grid": [0.1, 0.2]}})
    assert tune(config, space, Search("rates", folder=folder, timeout=1e-6)).how == "timeout"
    return folder


@pytest.mark.more
@pytest.mark.parametrize(
    "words, needs",
    [
        ("--version", ()),
        ("--help", ()),
        ("doctor --quick", ()),
        ("methods", ()),
        ("methods rolora", ()),
        ("keys", ()),
        ("keys --schema", ()),
        ("hpo --help", ()),
        ("hpo status --dir {study}", ()),
        ("hpo status --storage {study}/study.db", ("optuna",)),
        ("benchmark list", ()),
        ("run --cfg nowhere.yaml", ()),
        ("run --cfg {cfg} seed many", ()),
        ("run --cfg {cfg} lowrank.mix many", ()),
        ("run --cfg {cfg} lowrank.pictures False", ("torch", "transformers", "peft", "pandas")),
    ],
)
def test_a_command_imports_no_more_than_it_needs(words, needs, config_file, study):
    """By the modules that are loaded at its end, not by a clock."""
    code = (
        "import sys\nfrom fs_lowrank.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    argv = [word.format(cfg=config_file, study=study) for word in words.split()]
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == [str(list(needs))], done.stdout + done.stderr
    assert ("error" in done.stderr) == (words.startswith("run") and not needs)


def test_a_cache_of_many_entries(command, tmp_path, monkeypatch):
    monkeypatch.setenv("FS_LOWRANK_FROZEN", str(tmp_path / "frozen"))
    assert command("cache", "--table", tmp_path / "none.tex")[0] == 0
    assert (tmp_path / "none.csv").read_text(encoding="utf-8").count("\n") == 1, "a header alone"
    store = SharedStates(shared_folder(), 1e6)
    for i in range(23):
        store.get(f"{i}", lambda i=i: torch.ones(100 + i, 2))
        os.utime(tmp_path / "frozen" / f"{i}.safetensors", (1e9 + 60 * i, 1e9 + 60 * i))
    code, out, _ = command("cache", "--table", tmp_path / "kept.csv")
    shown = [line.split("│")[2].strip()[-2:] for line in out.splitlines() if line.startswith("│")]
    first = time.localtime(1e9).tm_min
    assert code == 0 and shown == [f"{(first + i) % 60:02}" for i in range(22, -1, -1)]
    rows = (tmp_path / "kept.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 24 and "23 entries, " in squeeze(out)
    assert "removed" in command("cache", "--clear")[1] and "0 entries" in command("cache")[1]


@pytest.mark.more
def test_as_many_processes_train_as_workers_says(command, config_file, tmp_path):
    assert command("run", "--cfg", config_file, "--workers", "2")[0] == 0
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["federate"]["process_num"] == 2
    assert {file.name for file in (tmp_path / "run").glob("process_*.log")} == {"process_1.log", "process_2.log"}


def test_a_folder_that_cannot_be_made(command, config_file, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = command("run", "--cfg", config_file, "outdir", str(tmp_path / "file" / "run"))
    assert code == 2 and f"outdir: the folder {tmp_path}/file/run cannot be made ({tmp_path}/file is no folder)" in err
    with pytest.raises(UserError, match="run cannot be written: .*; correct that"):
        claim(tmp_path / "file" / "run")


def test_an_interruption_before_a_command_has_begun(monkeypatch, capsys):
    class Interrupts:
        def find_spec(self, name, *given):
            if name == "fs_lowrank.cli":
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "fs_lowrank.cli")
    monkeypatch.delattr(fs_lowrank, "cli")
    assert main() == 130 and capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_how_threads_wait(monkeypatch, given):
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    bound_spin()
    assert {name: os.environ[name] for name in names if name in os.environ} == (given or {"GOMP_SPINCOUNT": "10000"})
