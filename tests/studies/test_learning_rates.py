"""The study of learning rates as a command: its errors are those of every command."""

import runpy
import sys

import pytest

from studies import learning_rates

pytestmark = pytest.mark.more


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--cfg", "nowhere.yaml"], "error: nowhere.yaml: no such file"),
        (["train.optimizer.momentun", "1"], "error: override: unknown key 'train.optimizer.momentun'"),
    ],
)
def test_wrong_use_is_one_line(tmp_path, capsys, arguments, said):
    assert learning_rates.main(["--dir", str(tmp_path / "d"), "--out", str(tmp_path / "o"), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(said) and err.count("\n") == 1


def test_an_error_of_ours_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(learning_rates, "load_config", None)
    assert learning_rates.main(["--dir", str(tmp_path), "--out", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: TypeError: 'NoneType' object is not callable (in learning_rates.py")
    assert err.count("\n") == 1 and len(list(tmp_path.glob("traceback-*.txt"))) == 1


@pytest.mark.parametrize("module", ["hpo", "studies.learning_rates"])
def test_without_optuna_it_says_what_to_install(monkeypatch, capsys, module):
    for name in [name for name in sys.modules if name == "hpo" or name.startswith(("hpo.", "optuna"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(sys, "argv", [module, "status"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    said = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err
    assert said.strip() == "error: hpo needs Optuna: pip install 'fs-lowrank[hpo]'"
