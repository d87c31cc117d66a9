"""Finds the checkout of FederatedScope, and checks that it is the version that the plug-in is written for.

FederatedScope is not on a package index: either a checkout of its branch ``llm`` is on ``sys.path``, or the environment
variable ``FEDERATEDSCOPE_ROOT`` names its folder. This module imports neither the framework nor the plug-in.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from ..errors import UserError

ROOT = "FEDERATEDSCOPE_ROOT"
VERSION = "0.3.0"
BRANCH = "llm"
#: files of the package folder that every checkout has, and files that only the branch has
FILES = (
    *("register.py", "main.py", "core/fed_runner.py", "core/message.py"),
    *("core/workers/server.py", "core/workers/client.py"),
    *("core/configs/config.py", "core/proto/gRPC_comm_manager_pb2.py"),
)
BRANCH_FILES = ("llm/trainer/trainer.py", "core/configs/cfg_llm.py")
#: what the framework imports during a run of our methods: module -> package to install
NEEDS = {
    "grpc": "grpcio",
    "pydantic": "pydantic",
    "google.protobuf": "protobuf",
    "pympler": "pympler",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "pandas": "pandas",
    "yaml": "pyyaml",
}
_HOW = (
    f"check out its branch {BRANCH} and set {ROOT} to that folder (or install it with "
    "`pip install --no-deps -e FOLDER`), then: pip install 'fs-lowrank[federatedscope]'; "
    "see docs/guides/federatedscope.md"
)


class Unusable(UserError):
    """The framework cannot be used. Attributes: ``what`` is the reason, ``remedy`` says what to do."""

    def __init__(self, what: str, remedy: str = _HOW):
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


def package_folder() -> Path | None:
    """The framework's package folder, None if there is none. May append ``FEDERATEDSCOPE_ROOT`` to ``sys.path``."""
    folder, root = _importable(), os.environ.get(ROOT)
    if folder is not None or not root:
        return folder
    checkout = Path(root).expanduser().resolve()
    if not (checkout / "federatedscope").is_dir():
        raise Unusable(f"{ROOT} = {root}: there is no folder federatedscope in it", "set it to the checkout's root")
    sys.path.append(str(checkout))
    folder = _importable()
    if folder is None:
        raise Unusable(f"{checkout / 'federatedscope'} has no __init__.py: the checkout is incomplete")
    return folder


def _importable() -> Path | None:
    loaded = sys.modules.get("federatedscope")
    spec = None if loaded is not None else find_spec("federatedscope")
    # A folder of that name without an __init__.py is a namespace package, which has no file.
    file = getattr(loaded, "__file__", None) if loaded is not None else spec and spec.origin
    return Path(file).parent if file else None


def version(folder: Path) -> str:
    """``__version__`` of the framework in ``folder``, read without importing it."""
    try:
        text = (folder / "__init__.py").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise damaged(folder / "__init__.py", error) from error
    found = re.search(r"""^__version__\s*=\s*(["'])(.+?)\1""", text, re.MULTILINE)
    return found[2] if found else "unknown"


def damaged(file: str | Path, error: Exception) -> Unusable:
    """The error to raise if a file of the framework cannot be read; names the file and the reason in one line."""
    if isinstance(error, SyntaxError):
        reason = f"{error.msg} (line {error.lineno})" if error.lineno else error.msg
    else:
        reason = getattr(error, "strerror", None) or f"{error}" or type(error).__name__
    return Unusable(
        f"the FederatedScope that was found is damaged: {file}: {' '.join(reason.split())[:200]}",
        "restore the file (`git status` in the checkout shows what was changed)",
    )


def parsed(file: Path) -> ast.Module:
    """The syntax tree of a file of the framework.

    Raises:
        Unusable: it cannot be read, or is not Python.
    """
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise damaged(file, error) from error


@contextmanager
def importing(folder: Path) -> Iterator[None]:
    """A block that imports the framework in ``folder``, where a damaged file of it is an ``Unusable``."""
    try:
        yield
    except (SyntaxError, ImportError) as error:
        file = error.filename if isinstance(error, SyntaxError) else error.path
        lost = isinstance(error, ModuleNotFoundError) and str(error.name).startswith(f"{folder.name}.")
        if lost or (file and folder in Path(file).parents):
            raise damaged(file or folder, error) from error
        if isinstance(error, SyntaxError) and not file:  # Python does not name a file with null bytes
            for each in sorted(folder.rglob("*.py")):
                parsed(each)
        raise


def require() -> Path:
    """The framework's package folder, checked.

    Raises:
        Unusable: the framework is not found, incomplete, damaged, another version or branch, or packages that it needs
            are missing.
    """
    folder = package_folder()
    if folder is None:
        raise Unusable("FederatedScope is not installed")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise Unusable(f"the FederatedScope in {folder} is incomplete: it lacks {', '.join(missing)}")
    if not all((folder / name).is_file() for name in BRANCH_FILES):
        raise Unusable(f"the FederatedScope in {folder} is not the branch {BRANCH} (it has no {BRANCH_FILES[0]})")
    found = version(folder)
    if found in (VERSION, "unknown"):  # another version is said first: its files need not be those of this one
        parsed(folder / "__init__.py")
    if found != VERSION:
        raise Unusable(
            f"the FederatedScope in {folder} is version {found}; this plug-in is written for "
            f"{VERSION} of branch {BRANCH}"
        )
    absent = [package for module, package in NEEDS.items() if not _has(module)]
    if absent:
        raise Unusable(
            f"FederatedScope is in {folder}, but packages that it needs are not installed",
            f"pip install {' '.join(absent)}",
        )
    return folder


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
