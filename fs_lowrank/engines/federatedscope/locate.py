"""Where the framework is, whether it is the one this plug-in is written for, and what it needs to run.

It is on no package index: a checkout of its branch ``llm`` goes on ``sys.path``, or its folder into the
environment variable ``FEDERATEDSCOPE_ROOT``.
"""

from __future__ import annotations

import ast
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from ...errors import UserError

ROOT = "FEDERATEDSCOPE_ROOT"
VERSION = "0.3.0"
BRANCH = "llm"
#: files without which the checkout is not whole, or is another branch
_WHOLE = (
    "register.py",
    "main.py",
    "core/fed_runner.py",
    "core/message.py",
    "core/workers/server.py",
    "core/workers/client.py",
    "core/configs/config.py",
    "core/proto/gRPC_comm_manager_pb2.py",
)
_BRANCH_FILES = ("llm/trainer/trainer.py", "core/configs/cfg_llm.py")
#: what it imports on the way of a run of ours, by module and by the name to install
NEEDS = {
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "pympler": "pympler",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "pandas": "pandas",
    "yaml": "pyyaml",
}
_HOW = (
    f"check out its branch {BRANCH} and set {ROOT} to that folder (or install it with "
    "`pip install --no-deps -e FOLDER`), then: pip install 'fs-lowrank[federatedscope]'; see docs/federatedscope.md"
)


class Unusable(UserError):
    """The framework cannot be used; ``what`` is the matter, and the ``remedy``."""

    def __init__(self, what: str, remedy: str = _HOW):
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


def folder() -> Path | None:
    """The framework's package folder; None where there is none. Puts ``FEDERATEDSCOPE_ROOT`` on the path."""
    found = _importable()
    root = os.environ.get(ROOT)
    if found is None and root:
        place = Path(root).expanduser().resolve()
        if not (place / "federatedscope").is_dir():
            raise Unusable(f"{ROOT} = {root}: there is no folder federatedscope in it", "set it to the checkout's root")
        sys.path.append(str(place))
        found = _importable()
        if found is None:
            raise Unusable(f"{place / 'federatedscope'} has no __init__.py: the checkout is not whole")
    return found


def _importable() -> Path | None:
    loaded = sys.modules.get("federatedscope")
    if loaded is not None:
        return Path(loaded.__file__).parent if getattr(loaded, "__file__", None) else None
    spec = find_spec("federatedscope")
    # Without an __init__.py it is a folder that happens to bear the name.
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def version(place: Path) -> str:
    """``__version__`` as written in the framework, read without importing it."""
    for node in ast.parse((place / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
            return str(ast.literal_eval(node.value))
    return "unknown"


def require() -> Path:
    """The framework's package folder, checked.

    Raises:
        Unusable: not found, another version or branch, files missing, or packages missing that it needs.
    """
    place = folder()
    if place is None:
        raise Unusable("FederatedScope is not installed")
    missing = [name for name in _WHOLE if not (place / name).is_file()]
    if missing:
        raise Unusable(f"the FederatedScope in {place} is only half there: it lacks {', '.join(missing)}")
    if not all((place / name).is_file() for name in _BRANCH_FILES):
        raise Unusable(f"the FederatedScope in {place} is not the branch {BRANCH} (it has no {_BRANCH_FILES[0]})")
    if version(place) != VERSION:
        raise Unusable(
            f"the FederatedScope in {place} is version {version(place)}; this plug-in is written for "
            f"{VERSION} of branch {BRANCH}"
        )
    absent = [package for module, package in NEEDS.items() if not _has(module)]
    if absent:
        raise Unusable(
            f"FederatedScope is in {place}, but what it needs is not installed", f"pip install {' '.join(absent)}"
        )
    return place


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
