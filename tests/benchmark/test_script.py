import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmark.script import script
from benchmark.suite import load_suite, shipped

OPTIONS = {
    "--data": dict(default="digits"),
    "--root": dict(type=Path),
    "--sizes": dict(type=int, nargs="+", default=[1, 2]),
    "--lr": dict(type=float),
    "more": dict(nargs="*"),
}


def test_command_names_and_files(tmp_path, capsys):
    def study(data, root, sizes, lr, more, extra=0):
        return {"thirds": [{"one": 1 / 3}], "got": [data, sizes, lr, more, extra]}

    main = script(
        "studies.analysis.x",
        "About.",
        OPTIONS,
        study,
        lines=lambda r: ["said"],
        readme=lambda folder: f"# {len([*folder.iterdir()])}\n",
    )
    assert main(["--lr", "0.01", "--root", str(tmp_path), "--out", str(tmp_path), "a", "b"], extra=7) == 0
    written = json.loads((tmp_path / "x_digits.json").read_text())
    assert written["command"] == "python -m studies.analysis.x --data digits --root DIR --sizes 1 2 --lr 0.01 a b"
    assert written["thirds"] == [{"one": 0.333333}] and written["got"] == ["digits", [1, 2], 0.01, ["a", "b"], 7]
    assert {"python", "torch"} <= written["versions"].keys() and written["seconds"] >= 0
    assert (tmp_path / "README.md").read_text() == "# 1\n" and capsys.readouterr().out == "said\n"
    assert main(["--out", str(tmp_path)]) == 0
    assert "--lr" not in json.loads((tmp_path / "x_digits.json").read_text())["command"]


def test_counts_are_one_or_more(tmp_path, capsys):
    main = script("studies.analysis.x", "About.", OPTIONS, lambda **given: given)
    for wrong in ("0", "-1", "1.5", "many"):
        assert main(["--sizes", "1", wrong, "--out", str(tmp_path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and f"argument --sizes: {wrong!r}: expected a whole number, 1 or more" in err


@pytest.mark.more
def test_every_script_of_a_suite_takes_the_options_that_the_suite_gives(capsys):
    found = [e for name in shipped() for e in load_suite(name, "small").experiments.values() if e.script]
    assert len(found) >= 8
    for experiment in found:
        assert import_module(experiment.script).main([*experiment.args, "--no-such"]) == 2, experiment.script
        assert "error: unrecognised: --no-such" in capsys.readouterr().err, experiment.script


@pytest.mark.more
@pytest.mark.slow
def test_a_study_runs_under_python_m(tmp_path):
    command = ["benchmark.server_costs", "--clients", "2", "--repeats", "1", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, timeout=300)
    written = json.loads((tmp_path / "server_costs.json").read_text())
    assert written["command"] == "python -m benchmark.server_costs --clients 2 --rank 4 --repeats 1 --passes 1"
    (rows,) = written["passes"]
    assert rows["rolora"]["both_kB"] < rows["fedlora"]["both_kB"]
    assert rows["flora"]["with_product_seconds"] > rows["flora"]["server_seconds"]
