"""Whether Flower is installed, in a version that the engine is written for; finding out imports nothing of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.specifiers import SpecifierSet

from ..errors import UnusableEngine

#: the versions of flwr that the engine is written for
WRITTEN_FOR = ">=1.41,<1.43"
#: its own pins hold back other packages, so it has an environment of its own
REMEDY = "pip install 'fs-lowrank[flower]' -c constraints-flower.txt, in an environment of its own (make flower)"


def require(simulation: bool = False) -> str:
    """The version of flwr.

    Args:
        simulation: Ray is needed, too.
    Raises:
        UnusableEngine: flwr is not installed, has another version, or lacks Ray.
    """
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        raise UnusableEngine("Flower (flwr) is not installed", REMEDY) from None
    if not SpecifierSet(WRITTEN_FOR).contains(installed, prereleases=True):
        raise UnusableEngine(f"flwr {installed} is installed, and this engine is written for flwr{WRITTEN_FOR}", REMEDY)
    if simulation and find_spec("ray") is None:
        raise UnusableEngine(f"flwr {installed} is installed without Ray, which its simulation runs on", REMEDY)
    return installed
