"""Checks of the installation: which packages and engines are usable, and how to get the rest."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from packaging.requirements import Requirement


@dataclass(frozen=True)
class Check:
    """One line of the report: ``status`` describes the subject, ``remedy`` is shown unless ``ok``."""

    subject: str
    ok: bool
    status: str
    remedy: str = ""
    required: bool = False


#: the packages of extras that are looked for
_EXTRAS = {"optuna": "hpo", "lm-eval": "eval", "bitsandbytes": "quant"}


def _packages() -> list[Check]:
    """The packages that the metadata of this one requires, in versions that it takes; then those of extras."""
    try:
        needs = [Requirement(text) for text in requires("fs-lowrank") or ()]
    except PackageNotFoundError:
        return [Check("fs-lowrank", False, "not installed", "pip install -e . in its clone", required=True)]
    checks = []
    for package in needs:
        extra = _EXTRAS.get(package.name)
        if package.marker and not package.marker.evaluate({"extra": extra or ""}):
            continue
        try:
            status = version(package.name)
            fits = package.specifier.contains(status, prereleases=True)
        except PackageNotFoundError:
            status, fits = "not installed", False
        remedy = f"pip install 'fs-lowrank[{extra}]'" if extra else f"pip install '{package}', as in constraints.txt"
        checks.append(Check(package.name, fits, status, remedy, required=not extra))
    return checks


def _engines() -> list[Check]:
    """All engines; each is imported, since only an import shows whether it is usable."""
    from .engines.catalogue import added_engines, get_engine, list_engines
    from .errors import UserError

    try:
        added = added_engines()
    except UserError as error:
        return [Check("engines of other packages", False, str(error), "until then no run starts")]
    checks = []
    for name in list_engines():
        try:
            get_engine(name)
            status = f"added by another package ({added[name]})" if name in added else _version(name)
            checks.append(Check(f"engine {name}", True, status))
        except UserError as error:
            default = "mend that package, or uninstall it" if name in added else "docs/guides has versions that work"
            remedy = getattr(error, "remedy", default)
            checks.append(Check(f"engine {name}", False, getattr(error, "reason", str(error)), remedy))
    if any(check.ok and check.subject == "engine federatedscope" for check in checks):
        from .engines.federatedscope import compat

        checks += [Check(f"  mended: {name}", True, failure) for name, failure in compat.applied.items()]
    return checks


def _version(name: str) -> str:
    """The framework and version on which a usable built-in engine runs."""
    from .engines import locate_federatedscope, locate_flower

    if name == "flower":
        return f"flwr {locate_flower.require(simulation=True)}"
    if name == "federatedscope":
        from .engines.federatedscope import FRAMEWORK

        branch = locate_federatedscope.BRANCH
        return f"{locate_federatedscope.version(FRAMEWORK)} (branch {branch}) in {FRAMEWORK.parent}"
    return "built in"


def installed() -> list[Check]:
    """The packages and their versions, required ones first; nothing is imported."""
    supported = (3, 11) <= tuple(map(int, platform.python_version_tuple()[:2]))
    checks = [Check("Python", supported, platform.python_version(), "install Python 3.11 or later", required=True)]
    checks += _packages()
    if find_spec("torchvision"):
        remedy = "nothing here needs it, and a build that does not match torch breaks transformers and peft: "
        checks.append(Check("torchvision", False, "installed", remedy + "pip uninstall torchvision"))
    return checks


def examine() -> list[Check]:
    """All checks, required packages first."""
    from .fetch import FETCHABLE, home, resolve

    checks = installed()
    if find_spec("torch"):
        import torch

        gpu = torch.cuda.is_available()
        name = torch.cuda.get_device_name() if gpu else "none found"
        checks.append(Check("GPU", gpu, name, "none is needed; with one, set use_gpu True"))
    checks += _engines()
    checks += [
        Check(f"data {n}", bool(resolve(n)), str(resolve(n) or "not fetched"), f"fs-lowrank fetch {n}")
        for n in FETCHABLE
    ]
    free = shutil.disk_usage(next(p for p in (home(), *home().parents) if p.exists())).free
    more = "make room, or set FS_LOWRANK_HOME to another disk"
    return [*checks, Check("disk", free > 2e9, f"{free / 1e9:.0f} GB free in {home()}", more)]
