"""The peers, and an environment for each: made once from the package index, in ``peers/`` of the user's cache.

An environment has the versions of torch, transformers, PEFT and NumPy that were ours when it was made, and the peer;
remove its folder to have it made anew. FederatedScope, which is in no index, is a checkout of its branch ``llm`` that
``$FEDERATEDSCOPE_ROOT`` names.
"""

from __future__ import annotations

import os
import subprocess
import venv
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fs_lowrank import UserError
from fs_lowrank.fetch import home

COMMON = ("torch", "transformers", "peft", "numpy", "safetensors", "psutil")


@dataclass(frozen=True)
class Variant:
    """One way to run a peer: a name, and the settings for its script."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A system to compare with.

    Attributes:
        script: its file in this folder. variants: the settings, of which the faster counts.
        needs: requirements. variable: names the folder of a checkout, which has the folder ``checkout``.
        mends: the changes that it needs to start.
    """

    name: str
    title: str
    script: str
    variants: tuple[Variant, ...]
    needs: tuple[str, ...] = ()
    variable: str = ""
    checkout: str = ""
    mends: str = "nothing"


CORES = os.cpu_count() or 1
ALL_CORES = f"{CORES} threads"
OURS = Peer(
    "ours",
    "fs-lowrank",
    "own_job.py",
    (
        Variant("one process", {"threads": CORES}),
        Variant(f"{CORES} processes", {"threads": CORES, "federate.process_num": CORES}),
    ),
)
PEERS = (
    Peer(
        "federatedscope",
        "FederatedScope, branch llm",
        "federatedscope_job.py",
        (Variant("one thread, as it sets itself", {"threads": 1}), Variant(ALL_CORES, {"threads": CORES})),
        ("protobuf==3.20.3", "grpcio", "pandas", "scipy<2", "scikit-learn", "pyyaml", "pympler"),
        variable="FEDERATEDSCOPE_ROOT",
        checkout="federatedscope/llm",
        mends="no change of its code; protobuf 3.20.3 (later ones refuse its generated messages), SciPy below 2, and "
        "pympler, which it imports and does not name; its own pins of 2022 have no builds for this Python",
    ),
    Peer(
        "flower",
        "Flower's simulation",
        "flower_job.py",
        (
            Variant("1 CPU a client", {"threads": 1, "cpus": CORES}),
            Variant(f"{CORES} CPUs a client", {"threads": CORES, "cpus": CORES}),
        ),
        ("flwr[simulation]>=1.41,<1.43",),
    ),
)


class Missing(UserError):
    """A peer cannot be installed; the message is one line."""


def prepared(peer: Peer) -> tuple[Path, str]:
    """The Python of the peer's environment, which is made if it is not there, and the folder for ``PYTHONPATH`` or "".

    Raises:
        Missing: no checkout, no network, or nothing in the index that fits this Python.
    """
    root = os.environ.get(peer.variable, "") if peer.variable else ""
    if peer.variable and not Path(root, peer.checkout).is_dir():
        raise Missing(f"{peer.title}: in no package index; set {peer.variable} to a checkout, with {peer.checkout}")
    folder = home() / "peers" / peer.name
    if not (folder / ".complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        pins = [f"{name}=={version(name).partition('+')[0]}" for name in COMMON]
        command = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *pins, *peer.needs]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            errors = [line for line in process.stderr.splitlines() if line.startswith("ERROR: ")] or ["pip failed"]
            raise Missing(f"{peer.title}: cannot be installed: {errors[-1].removeprefix('ERROR: ')[:300]}")
        (folder / ".complete").touch()
    return folder / "bin/python", root
