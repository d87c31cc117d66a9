"""The example of a method in the tutorial works as an installed package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorials" / "new_method.md"


@pytest.fixture
def package(tmp_path):
    """A folder for ``PYTHONPATH`` with the method of the tutorial as an installed package."""
    code = re.search(r"```python\n# my_methods.py\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.S)[1]
    folder = tmp_path / "site"
    (folder / "my_methods-1.0.dist-info").mkdir(parents=True)
    (folder / "my_methods.py").write_text(code)
    info = folder / "my_methods-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-methods\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fs_lowrank.methods]\nmedian_lora = my_methods:MedianLoRA\n")
    return folder


def _command(package, *args):
    return subprocess.run(
        [sys.executable, "-m", "fs_lowrank", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def installed(package, own_methods, monkeypatch):
    """Adds the package to the path of this process."""
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)


def test_it_runs_by_name(installed, settings, tmp_path, capsys):
    from fs_lowrank import cli

    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    assert cli.main(["run", "--cfg", str(file), "federate.method", "median_lora", "federate.total_round_num", "2"]) == 0
    assert "round   2/2" in capsys.readouterr().out
    assert (Path(settings["outdir"]) / "adapter" / "adapter_model.safetensors").exists()


def test_its_server_step_is_the_median(installed):
    from fs_lowrank.methods import Update, create_method

    name = "model.layer.0.dense.lora_B.default.weight"
    updates = [Update(k, 10 * k, {name: torch.full((3, 2), value)}) for k, value in ((1, 0.0), (2, 1.0), (3, 50.0))]
    state, message = create_method("median_lora").aggregate(updates, {name: torch.zeros(3, 2)}, 1)
    assert torch.equal(message[name], torch.ones(3, 2)) and torch.equal(state[name], torch.ones(3, 2))


@pytest.mark.more
def test_an_error_in_a_method_names_its_package(package):
    (package / "my_methods.py").write_text("import no_such_module_at_all\n")
    done = _command(package, "methods")
    assert done.returncode == 2 and "median_lora" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_error_in_its_code_in_another_process_names_the_line(package, settings, tmp_path):
    code = (package / "my_methods.py").read_text()
    own = "\n    def apply(self, model, message, round):\n        raise KeyError('not there')\n"
    (package / "my_methods.py").write_text(code.rstrip() + "\n" + own)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    done = _command(package, "run", "--cfg", str(file), "--workers", "2", "federate.method", "median_lora")
    line = (package / "my_methods.py").read_text().splitlines().index("        raise KeyError('not there')") + 1
    said = " ".join(done.stderr.split())
    assert done.returncode == 1 and f"KeyError: 'not there' (in my_methods.py, line {line}, which is not of" in said
    assert "please report" not in said
