"""Every configuration file that is shipped loads, and the notebook has no outputs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fs_lowrank

#: one party trains a start for the runs of others
ONE_CLIENT = {"pretrain_digits"}
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_loads_and_survives_being_written_out(path, tmp_path):
    config = fs_lowrank.load_config(path)
    config.dump(tmp_path / "copy.yaml")
    assert fs_lowrank.load_config(tmp_path / "copy.yaml").to_dict() == config.to_dict()
    assert config.federate.client_num == 1 if path.stem in ONE_CLIENT else config.federate.client_num >= 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_the_length_suits_the_data_or_the_file_says_why_not(path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "tok_len: " in line]
    assert len(lines) == (not fs_lowrank.load_config(path).is_vision)
    assert all("tok_len: auto" in line or re.search(r"tok_len: \d+ +# .*cut", line) for line in lines)


def test_there_are_examples():
    assert {"demo", "smollm2", "own_data"} <= {p.stem for p in EXAMPLES}


def test_the_notebook_is_committed_without_outputs():
    notebook = json.loads((EXAMPLES[0].parent / "first_hour.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 10 and all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.more
def test_own_objects_run(tmp_path):
    script = EXAMPLES[0].parent / "own_objects.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "test_matthews" in done.stdout
    assert (tmp_path / "runs" / "own_objects" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "example, fingerprint", [("demo", "8aa818198618"), ("one_shot", "a54709312487"), ("smollm2", "83f4e167c624")]
)
def test_what_a_configuration_was_called_it_is_still_called(example, fingerprint):
    """Folders of searches and the identity of runs have it, so a key that comes later may not change it."""
    (path,) = (path for path in EXAMPLES if path.stem == example)
    assert fs_lowrank.load_config(path).fingerprint() == fingerprint
