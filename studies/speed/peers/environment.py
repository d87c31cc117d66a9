"""The peers, and an environment for each: made once from the package index, and kept in the user's cache.

An environment has the versions of torch, transformers, PEFT and NumPy that we run with, and the peer. ``$FLWR_ROOT``
and ``$PFL_ROOT`` name a folder to install the peer from instead; FederatedScope, which is in no index, is a checkout of
its branch ``llm`` that ``$FEDERATEDSCOPE_ROOT`` names.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fs_lowrank import UserError
from fs_lowrank.data.fetch import home
from fs_lowrank.jobs.locks import exclusive

COMMON = ("transformers", "peft", "numpy", "safetensors", "psutil")


@dataclass(frozen=True)
class Variant:
    """One way to run a peer: a name, what its script is given, and whether torchrun starts it."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    processes: int = 0


@dataclass(frozen=True)
class Peer:
    """A system to compare with.

    Attributes:
        script: its file in this folder. variants: the settings, of which the faster counts.
        needs: requirements, and others to try where the index has not what these ask for.
        variable: names a folder of its source. checkout: it is used from there and not installed; holds this folder.
        extra: of the package when it is installed from a folder.
        mends: what it needs to start.
    """

    name: str
    title: str
    script: str
    variants: tuple[Variant, ...]
    needs: tuple[tuple[str, ...], ...] = ()
    variable: str = ""
    checkout: str = ""
    extra: str = ""
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
        (("protobuf==3.20.3", "grpcio", "pandas", "scipy<2", "scikit-learn", "pyyaml", "pympler"),),
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
        (("flwr[simulation]==1.42.0",), ("flwr[simulation]==1.41.0",)),
        variable="FLWR_ROOT",
        extra="[simulation]",
    ),
    Peer(
        "pfl",
        "pfl",
        "pfl_job.py",
        (
            Variant("one process", {"threads": CORES}),
            Variant(f"{CORES} processes of torchrun", {"threads": 1}, processes=CORES),
        ),
        (("pfl==0.6.0",),),
        variable="PFL_ROOT",
    ),
)


class Missing(UserError):
    """A peer cannot be had; the message is one line."""


def prepared(peer: Peer) -> tuple[Path, str]:
    """The Python of the peer's environment, which is made if it is not there, and the folder for ``PYTHONPATH`` or "".

    Raises:
        Missing: no checkout, no network, or nothing in the index that fits this Python.
    """
    root = os.environ.get(peer.variable, "") if peer.variable else ""
    if peer.checkout and not root:
        raise Missing(f"{peer.title}: in no package index; set {peer.variable} to a checkout")
    if root and not Path(root, peer.checkout).is_dir():
        raise Missing(f"{peer.title}: {peer.variable} = {root} has no folder {peer.checkout or 'of that name'}")
    pins = [f"{name}=={_public(name)}" for name in COMMON]
    needs = ((str(Path(root).resolve()) + peer.extra,),) if root and not peer.checkout else peer.needs
    told = "\n".join([platform.python_version(), _public("torch"), *pins, *map(str, needs)])
    folder = home() / "peers" / f"{peer.name}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.with_suffix(".lock")):
        if not (folder / ".complete").exists():
            _make(peer, folder, pins, needs)
            (folder / ".complete").write_text(told)
    return _python(folder), root if peer.checkout else ""


def _make(peer: Peer, folder: Path, pins: list[str], needs: tuple[tuple[str, ...], ...]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python, torch = str(_python(folder)), f"torch=={_public('torch')}"
    uv = Path(sys.executable).with_name("uv")
    if uv.exists():  # it knows where PyTorch keeps the build for this machine; without it, the package index has one
        alone = [str(uv), "pip", "install", "--quiet", "--python", python, "--torch-backend", "auto", torch]
        subprocess.run(alone, capture_output=True, env={**os.environ, "UV_HTTP_RETRIES": "1"})
    said = ""
    for wanted in needs:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", torch, *pins, *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        said = (errors or done.stderr.splitlines() or ["pip failed"])[-1].removeprefix("ERROR: ")
    shutil.rmtree(folder, ignore_errors=True)
    raise Missing(f"{peer.title}: cannot be installed: {said[:300]}")


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _public(package: str) -> str:
    """The version that we run with, without the name of the build."""
    return version(package).partition("+")[0]
