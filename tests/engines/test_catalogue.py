"""Engines, built in or from other packages, are found by name, and errors name the engine."""

import sys

import pytest
import torch

import fs_lowrank
from fs_lowrank import UserError
from fs_lowrank.doctor import examine
from fs_lowrank.engines import get_engine, list_engines

GOOD = """
from fs_lowrank.engines import local

def run(config, resume=False, on_round=None, on_client=None, callbacks=()):
    print("an engine from elsewhere")
    return local.run(config, resume, on_round, on_client, callbacks)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(package, code, name)`` leaves what ``pip install`` of a package with one engine leaves."""

    def install(package, code, name):
        workspace = tmp_path / f"site-{package}"
        info = workspace / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (workspace / f"{package}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fs_lowrank.engines]\n{name} = {package}\n")
        monkeypatch.syspath_prepend(str(workspace))
        made.append(package)

    made = []
    yield install
    for package in made:
        sys.modules.pop(package, None)


def check(name):
    return next(c for c in examine() if c.subject == name)


def test_the_built_in_engines():
    assert list_engines()[:2] == ["local", "federatedscope"] == fs_lowrank.list_engines()[:2]
    assert get_engine("local").__name__ == "fs_lowrank.engines.local"
    with pytest.raises(UserError, match="no engine 'locale'; did you mean 'local'.*there are: local, federatedscope"):
        get_engine("locale")


@pytest.mark.more
def test_an_engine_of_another_package_runs_by_name(install, settings, tmp_path, no_curves, capsys):
    install("good_engine", GOOD, "elsewhere")
    assert list_engines()[-1] == "elsewhere"
    keys = {"federate.client_num": 2, "federate.total_round_num": 1}
    result = fs_lowrank.run(fs_lowrank.load_config(settings, keys), "elsewhere")
    assert "an engine from elsewhere" in capsys.readouterr().out
    same = fs_lowrank.run(fs_lowrank.load_config(settings, {**keys, "outdir": str(tmp_path / "same")}))
    assert all(torch.equal(a, b) for a, b in zip(result.model.parameters(), same.model.parameters(), strict=True))
    assert check("engine elsewhere").ok and "good_engine" in check("engine elsewhere").status
    with pytest.raises(UserError, match="no engine 'elsewhare'; did you mean 'elsewhere'"):
        fs_lowrank.run(fs_lowrank.load_config(settings), "elsewhare")


@pytest.mark.parametrize(
    "code, message",
    [
        ("import no_such_module_at_all\n", "failed to import: ModuleNotFoundError"),
        ("raise OSError('no licence')\n", "failed to import: OSError: no licence"),
        ("def rum(config): ...\n", "it has no run\\(config, resume, on_round, on_client, callbacks\\)"),
        (
            "from fs_lowrank import UserError\nraise UserError('needs a broker')\n",
            "^engine 'elsewhere' \\(bad_engine\\): needs a broker",
        ),
    ],
)
def test_an_error_in_an_engine_names_its_package(install, settings, code, message):
    install("bad_engine", code, "elsewhere")
    config = fs_lowrank.load_config(settings)
    with pytest.raises(UserError, match=message) as error:
        fs_lowrank.run(config, "elsewhere")
    assert "elsewhere" in str(error.value)
    with pytest.raises(UserError, match=message):
        fs_lowrank.compare(config, ["fedlora"], "elsewhere")
    broken = check("engine elsewhere")
    assert not broken.ok and "elsewhere" in broken.status and broken.remedy
    assert not broken.required and get_engine("local")


def test_an_engine_may_not_have_the_name_of_a_built_in_one(install):
    install("good_engine", GOOD, "local")
    for ask in (list_engines, lambda: get_engine("elsewhere")):
        with pytest.raises(UserError, match=r"'local' \(good_engine\).*already \(fs_lowrank.engines.local\)"):
            ask()
    assert not check("engines of other packages").ok


def test_two_packages_with_one_name(install):
    install("one_engine", GOOD, "elsewhere")
    install("other_engine", GOOD, "elsewhere")
    with pytest.raises(UserError, match="uninstall one of the two packages"):
        list_engines()
