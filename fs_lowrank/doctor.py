"""Checks of the installation: which packages and engines are usable, and how to get the rest."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


@dataclass(frozen=True)
class Check:
    """One line of the report: ``found`` describes the state, ``remedy`` is shown unless ``ok``."""

    what: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = False


_CORE = ("torch", "transformers", "peft", "datasets", "safetensors", "rich", "matplotlib", "pyyaml")
_EXTRAS = {"optuna": "hpo", "lm_eval": "eval", "bitsandbytes": "quant"}


def _package(name: str, remedy: str, required: bool = False) -> Check:
    try:
        return Check(name, True, version(name), required=required)
    except PackageNotFoundError:
        return Check(name, False, "not installed", remedy, required)


def _framework() -> list[Check]:
    """Import the framework; only that shows whether it can be used."""
    from .errors import UserError

    try:
        from .engines import locate_federatedscope as locate
        from .engines.federatedscope import FRAMEWORK, compat
    except UserError as error:
        return [Check("engine federatedscope", False, getattr(error, "what", str(error)), getattr(error, "remedy", ""))]
    except Exception as error:  # of the framework's code; the other engines work all the same
        return [
            Check(
                "engine federatedscope",
                False,
                f"{type(error).__name__}: {error}",
                "it does not import; see docs/guides/federatedscope.md for versions that work",
            )
        ]
    found = f"{locate.version(FRAMEWORK)} (branch {locate.BRANCH}) in {FRAMEWORK.parent}"
    mends = [Check(f"  mended: {m.name}", True, m.reason) for m in compat.applied()]
    return [Check("engine federatedscope", True, found), *mends]


def _flower() -> Check:
    """Whether Flower is installed, in a version that the engine takes."""
    from .engines import locate_flower as locate

    try:
        return Check("engine flower", True, f"flwr {locate.require(simulation=True)}")
    except locate.Unusable as error:
        return Check("engine flower", False, error.what, error.remedy)


def _added_engines() -> list[Check]:
    """The engines of other packages; each is imported, as only that shows whether it can be used."""
    from .engines import added_engines, get_engine
    from .errors import UserError

    checks = []
    try:
        added = added_engines()
    except UserError as error:
        return [Check("engines of other packages", False, str(error), "until then no run starts")]
    for name, module in added.items():
        try:
            get_engine(name)
            checks.append(Check(f"engine {name}", True, f"added by another package ({module})"))
        except UserError as error:
            checks.append(Check(f"engine {name}", False, str(error), "mend that package, or uninstall it"))
    return checks


def installed() -> list[Check]:
    """The packages and their versions, required ones first; nothing is imported."""
    supported = (3, 11) <= tuple(map(int, platform.python_version_tuple()[:2]))
    checks = [Check("Python", supported, platform.python_version(), "install Python 3.11 or later", required=True)]
    checks += [_package(n, "pip install fs-lowrank with constraints.txt", required=True) for n in _CORE]
    checks += [_package(n, f"pip install 'fs-lowrank[{extra}]'") for n, extra in _EXTRAS.items()]
    if find_spec("torchvision"):
        remedy = "nothing here needs it, and a build that does not match torch breaks transformers and peft: "
        checks.append(Check("torchvision", False, "installed", remedy + "pip uninstall torchvision"))
    return checks


def examine() -> list[Check]:
    """All checks, required packages first."""
    from .data.fetch import FETCHABLE, home, resolve

    checks = installed()
    if find_spec("torch"):
        import torch

        gpu = torch.cuda.is_available()
        found = torch.cuda.get_device_name() if gpu else "none"
        checks.append(Check("GPU", gpu, found, "none needed; with one, set use_gpu True"))
    checks += [Check("engine local", True, "built in"), *_framework(), _flower(), *_added_engines()]
    checks += [
        Check(f"data {n}", bool(resolve(n)), str(resolve(n) or "not fetched"), f"fs-lowrank fetch {n}")
        for n in FETCHABLE
    ]
    free = shutil.disk_usage(next(p for p in (home(), *home().parents) if p.exists())).free
    checks.append(
        Check(
            "disk",
            free > 2e9,
            f"{free / 1e9:.0f} GB free in {home()}",
            "make room, or set FS_LOWRANK_HOME to another disk",
        )
    )
    return checks
