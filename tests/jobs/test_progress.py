"""The lines of long work: live ones on a terminal, one every so often in a log."""

import io
import re
import sys
import time
from contextlib import nullcontext
from functools import partial

import pytest

import fs_lowrank
from fs_lowrank.jobs import progress, shell
from fs_lowrank.runs.progress import progress_bar


def worked(monkeypatch, live: bool) -> str:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "SOON", 0)
    monkeypatch.setattr(progress, "LOG_EVERY", 1e-9)
    with progress.showing(live):
        for part in progress.steps(range(4), "AdaLoRA"):
            if live and part == 2:
                shell.make_console(file=sys.stderr).print("printed meanwhile")
    return sys.stderr.getvalue()


def test_a_log_has_lines_with_the_whole_label(monkeypatch):
    lines = worked(monkeypatch, live=False).splitlines()
    assert lines[-1].startswith("AdaLoRA: 4 of 4, ") and lines[-1].endswith(" left")
    assert all(line.startswith("AdaLoRA: ") for line in lines)


def test_a_log_has_lines_of_short_work_too_if_it_is_long_together(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "SOON", 0)
    monkeypatch.setattr(progress, "LOG_EVERY", 0.5)
    with progress.showing(live=False):
        for suite in "abcd":
            for _ in progress.steps([1, 2], suite):
                time.sleep(0.12)
    assert 1 <= len(sys.stderr.getvalue().splitlines()) <= 2


def test_a_resumed_run_counts_only_its_own_rounds_for_the_time_left(monkeypatch, settings):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    config = fs_lowrank.load_config(settings, {"federate.total_round_num": 100})
    with progress_bar(config, "rolora", True, None, None) as (of_round, of_client):
        of_client(91, 0, 2)
        time.sleep(0.2)
        of_client(91, 1, 2)
    left = re.findall(r"90.5 of 100, (\d\d):(\d\d) left", sys.stderr.getvalue())
    assert left and all(60 * int(minutes) + int(seconds) >= 3 for minutes, seconds in left)


def test_a_terminal_has_one_line_below_what_is_printed(monkeypatch):
    text = worked(monkeypatch, live=True)
    assert "\n" not in text.replace("printed meanwhile\n", "") and "2 of 4, " in text
    before = text[: text.index("printed meanwhile")]
    assert not before.rpartition("\r")[2] and not before.split("\r")[-2].strip()  # the line was wiped out


def test_the_bar_of_a_line_leaves_room_for_its_text(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    narrow = {"ncols": 80, "dynamic_ncols": False}
    with progress.showing(live=True), progress.line("fedlora, rounds", 8, at_once=True, **narrow) as bar:
        bar.set_postfix_str("test acc 0.325  val acc 0.250")
    lines = [line for line in sys.stderr.getvalue().split("\r") if "acc" in line]
    assert lines and all(line.endswith("test acc 0.325  val acc 0.250") and len(line) == 80 for line in lines)


@pytest.mark.parametrize("shown", [nullcontext, partial(progress.showing, live=False)], ids=["nobody asked", "a log"])
def test_quick_work_shows_nothing(monkeypatch, shown):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with shown():
        assert list(progress.steps([1, 2], "reading")) == [1, 2]
    assert not sys.stderr.getvalue()


@pytest.mark.more
def test_what_comes_before_the_first_round_and_the_frozen_layers_have_lines(monkeypatch, settings, tmp_path):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(progress, "SOON", 0)
    keys = {"federate.total_round_num": 1, "train.batch_or_epoch": "epoch", "outdir": str(tmp_path / "run")}
    keys["train.cache_frozen_dir"] = str(tmp_path / "no states of other tests")
    fs_lowrank.run(fs_lowrank.load_config(settings, keys), progress=True)
    shown = sys.stderr.getvalue()
    for what in ("reading data", "loading the model", "trying what saves work", "computing frozen layers"):
        assert f"{what}: " in shown
