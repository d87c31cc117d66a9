"""Downloads of Debian packages by apt-get from its configured sources. apt checks the archive."""

from __future__ import annotations

from pathlib import Path

from fs_lowrank.data.fetch.attempts import Say, client_download
from fs_lowrank.data.fetch.items import Item


def download(item: Item, folder: Path, progress: Say) -> Path:
    """Download the package of ``item`` to ``folder``."""
    unknown = f"apt-get knows no package {item.package!r}; run: apt-get update"
    return client_download(
        item,
        folder,
        ["apt-get", "download", item.package],
        f"{item.package}_*.deb",
        progress,
        f"{item.package!r} is a Debian package and apt-get is not installed; put the files where data.root can "
        "name them, or get them on a machine with Debian or Ubuntu",
        {"Unable to locate": unknown, "No packages found": unknown},
    )
