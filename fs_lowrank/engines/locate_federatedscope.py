"""Finds the checkout of FederatedScope, and checks that it is the version that the plug-in is written for.

FederatedScope is not on a package index: either a checkout of its branch ``llm`` is on ``sys.path``, or the environment
variable ``FEDERATEDSCOPE_ROOT`` names its folder. This module imports neither the framework nor the plug-in.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from ..errors import UnusableEngine

ROOT = "FEDERATEDSCOPE_ROOT"
VERSION = "0.3.0"
BRANCH = "llm"
#: a file that only this branch has
BRANCH_FILE = "llm/trainer/trainer.py"
#: packages of the extra federatedscope which this package itself does not need
NEEDS = ("grpcio", "protobuf", "pydantic", "pympler")
_REMEDY = (
    f"check out its branch {BRANCH} and set {ROOT} to that folder (or install it with "
    "`pip install --no-deps -e FOLDER`), then: pip install 'fs-lowrank[federatedscope]'; "
    "see docs/guides/federatedscope.md"
)


def package_folder() -> Path | None:
    """The framework's package folder, None if there is none. May append ``FEDERATEDSCOPE_ROOT`` to ``sys.path``."""
    root = os.environ.get(ROOT)
    if root and _importable() is None:
        sys.path.append(str(Path(root).expanduser().resolve()))
    return _importable()


def _importable() -> Path | None:
    spec = find_spec("federatedscope")
    # A folder of that name without an __init__.py is a namespace package, which has no file.
    return Path(spec.origin).parent if spec and spec.origin else None


def version(folder: Path) -> str:
    """``__version__`` of the framework in ``folder``, read without importing it."""
    text = (folder / "__init__.py").read_text(encoding="utf-8", errors="replace")
    named = re.search(r"""^__version__\s*=\s*(["'])(.+?)\1""", text, re.MULTILINE)
    return named[2] if named else "unknown"


def require() -> Path:
    """The framework's package folder, checked.

    Raises:
        UnusableEngine: the framework is not there, is another version or branch, or packages that it needs are missing.
    """
    folder, root = package_folder(), os.environ.get(ROOT)
    flaw = ""
    if folder is None:
        flaw = f"{ROOT} = {root} has no package federatedscope" if root else "FederatedScope is not installed"
    elif not (folder / BRANCH_FILE).is_file():
        flaw = f"the FederatedScope in {folder} is not the branch {BRANCH} (it has no {BRANCH_FILE})"
    elif (named := version(folder)) != VERSION:
        wanted = f"{VERSION} of branch {BRANCH}"
        flaw = f"the FederatedScope in {folder} is version {named}; this plug-in is written for {wanted}"
    if flaw or folder is None:
        raise UnusableEngine(flaw, _REMEDY)
    if absent := [package for package in NEEDS if not list(distributions(name=package))]:
        flaw = f"FederatedScope is in {folder}, but packages that it needs are not installed"
        raise UnusableEngine(flaw, f"pip install {' '.join(absent)}")
    return folder
