"""Whether Flower is installed, in a version that the engine is written for; finding out imports nothing of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ..errors import UnusableEngine

#: the versions of flwr that the engine is written for: from the first, and below the second
FIRST, BELOW = (1, 41), (1, 43)
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
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if not FIRST <= numbers < BELOW:
        wanted = f"{'.'.join(map(str, FIRST))} or later, below {'.'.join(map(str, BELOW))}"
        raise UnusableEngine(f"flwr {installed} is installed, and this engine is written for {wanted}", REMEDY)
    if simulation and find_spec("ray") is None:
        raise UnusableEngine(f"flwr {installed} is installed without Ray, which its simulation runs on", REMEDY)
    return installed
