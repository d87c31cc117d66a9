"""The lines of long work: live ones on a terminal, one every so often in a log."""

import io
import sys

from fs_lowrank.jobs import progress, shell


def worked(monkeypatch, live: bool, parts: int = 4) -> str:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "SOON", 0)
    monkeypatch.setattr(progress, "LOG_EVERY", 1e-9)
    with progress.showing(live):
        for part in progress.steps(range(parts), "reading"):
            if live and part == 2:
                shell.make_console(file=sys.stderr).print("printed meanwhile")
    return sys.stderr.getvalue()


def test_a_log_has_lines(monkeypatch):
    lines = worked(monkeypatch, live=False).splitlines()
    assert lines[-1].startswith("reading: 4 of 4, ") and lines[-1].endswith(" left")
    assert all(line.startswith("reading: ") for line in lines)


def test_a_terminal_has_one_line_below_what_is_printed(monkeypatch):
    text = worked(monkeypatch, live=True)
    assert "\n" not in text.replace("printed meanwhile\n", "") and "2 of 4, " in text
    before = text[: text.index("printed meanwhile")]
    assert not before.rpartition("\r")[2] and not before.split("\r")[-2].strip()  # the line was wiped out


def test_nothing_is_shown_where_nobody_asked_for_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert list(progress.steps([1, 2], "reading")) == [1, 2] and not sys.stderr.getvalue()


def test_quick_work_shows_nothing_in_a_log(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.showing(live=False):
        assert list(progress.steps([1, 2], "reading")) == [1, 2]
    assert not sys.stderr.getvalue()
