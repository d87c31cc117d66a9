"""A checkout of the framework with a file that came to harm: one line that names the file, whoever reads it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fs_lowrank.engines import locate_federatedscope as locate

ROOT = Path(__file__).parents[3]
framework = pytest.mark.federatedscope
MESSAGES = "core/proto/gRPC_comm_manager_pb2.py"
DAMAGED = {
    "cut_off": b"__version__ = '0.3.0'\nimport (",
    "in_the_version": b"__version__ = '0.3.",
    "other_bytes": b"__version__ = '0.3.0'\nx = '\xff'\n",
    "null_bytes": b"__version__ = '0.3.0'\n\0\0\n",
    "too_deep": b"__version__ = '0.3.0'\nx = " + b"(" * 300 + b")" * 300,
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package folder of what looks like a checkout."""
    folder = tmp_path / "federatedscope"
    for name in (*locate.FILES, *locate.BRANCH_FILES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "__init__.py").write_text("__version__ = '0.3.0'\n")
    monkeypatch.setattr(locate, "package_folder", lambda: folder)
    monkeypatch.setattr(locate, "NEEDS", {})
    return folder


def one_line(error, *said):
    return "\n" not in str(error.value) and all(part in str(error.value) for part in said)


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_package_is_unusable(package, content):
    assert locate.require() == package
    (package / "__init__.py").write_bytes(content)
    with pytest.raises(locate.Unusable) as error:
        locate.require()
    assert one_line(error, "is damaged", f"{package / '__init__.py'}: ", "restore the file")


@pytest.mark.parametrize("rest", [b"import (", b"x = '\xff'\n", b"print 'Python 2'\n"])
def test_another_version_is_said_first(package, rest):
    (package / "__init__.py").write_bytes(b'__version__ = "0.2.0"\n' + rest)
    with pytest.raises(locate.Unusable) as error:
        locate.require()
    assert one_line(error, "is version 0.2.0; this plug-in is written for 0.3.0")


def test_a_package_that_cannot_be_read_is_unusable(package):
    (package / "__init__.py").unlink()
    (package / "__init__.py").mkdir()
    with pytest.raises(locate.Unusable) as error:
        locate.require()
    assert one_line(error, f"{package / '__init__.py'}: Is a directory")


def test_a_mark_of_the_byte_order_is_no_damage(package):
    (package / "__init__.py").write_bytes(b"\xef\xbb\xbfx = 1\n__version__ = '0.3.0'\n")
    assert locate.require() == package


@pytest.mark.parametrize(
    "content, said",
    [
        (b"serialized_pb=(", "was never closed"),
        (b"x = '\xff'", "can't decode byte 0xff"),
        (b"\0", "null bytes"),
        (b"f(serialized_pb=g())", "malformed node"),
        (b"f(serialized_pb=b'\\xff\\xff')", "parse"),
        (b"f(serialized_pb=3)", "int"),
        (b"", "does not describe the framework's messages; the checkout is incomplete"),
    ],
)
@framework
def test_a_damaged_description_of_the_messages_is_unusable(package, monkeypatch, content, said):
    from fs_lowrank.engines.federatedscope import compat

    (package / MESSAGES).write_bytes(content)
    before = sys.modules.get(compat._PB2)
    with pytest.raises(locate.Unusable) as error:
        compat._build_messages(package)
    assert one_line(error, str(package / MESSAGES), said) and sys.modules.get(compat._PB2) is before


def test_what_others_fail_at_is_not_the_framework_s_damage(tmp_path):
    for error in (ImportError("x", path="/elsewhere/y.py"), ModuleNotFoundError("x", name="numpyy"), SyntaxError("x")):
        with pytest.raises(type(error)) as seen, locate.importing(tmp_path / "federatedscope"):
            raise error
        assert seen.value is error


@framework
@pytest.mark.more
def test_a_damaged_file_is_named_by_run_and_doctor(settings, tmp_path):
    """Each case is the real framework, with one file that came to harm."""
    real, file = locate.require(), tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**settings, "outdir": str(tmp_path / "run")}))
    cases = {
        "__init__.py": (DAMAGED["cut_off"], "(line 2)"),
        MESSAGES: (b"x = '\xff'", "can't decode byte 0xff"),
        "core/message.py": (b"", "cannot import name 'Message'"),
        "core/fed_runner.py": (b"\0", "null bytes"),
        "core/workers/server.py": (b"class Server(", "was never closed"),
        "core/auxiliaries/data_builder.py": (b"x = (", "was never closed"),
        "core/auxiliaries/utils.py": (None, "federatedscope.core.auxiliaries.utils"),
        "core/data/wrap_dataset.py": (b"x = '\xff'", "can't decode byte 0xff"),
    }
    roots = []
    for number, (name, (content, _)) in enumerate(cases.items()):
        root = tmp_path / str(number)
        shutil.copytree(
            real, root / "federatedscope", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
        )
        (root / "federatedscope" / name).unlink()
        if content is not None:
            (root / "federatedscope" / name).write_bytes(content)
        roots.append(str(root))
    script = tmp_path / "cases.py"
    script.write_text(f"""
import contextlib, io, json, os, sys
from fs_lowrank.cli import main
path, found = list(sys.path), []
for root in {json.dumps(roots)}:
    os.environ["FEDERATEDSCOPE_ROOT"] = root
    for args in (["doctor"], ["run", "--engine", "federatedscope", "--cfg", {json.dumps(str(file))}]):
        sys.path[:] = path
        for name in list(sys.modules):
            if name.startswith(("federatedscope", "fs_lowrank.engines.federatedscope")):
                del sys.modules[name]
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(args)
        found.append([code, out.getvalue() + err.getvalue()])
json.dump(found, sys.__stdout__)
""")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "600"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index("[[") :])
    for (name, (_, said)), (_, report), (code, shown) in zip(cases.items(), found[::2], found[1::2], strict=True):
        assert code == 2 and "is damaged" in shown and said in shown and "Traceback" not in shown, (name, shown)
        assert "engine federatedscope" in report
        if name != "core/auxiliaries/utils.py":
            assert f"federatedscope/{name}" in shown, (name, shown)
