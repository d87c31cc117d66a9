"""How far a reader has to go to follow a client through a round: calls of functions, and changes from file to file."""

import sys
from pathlib import Path

import pytest

import fs_lowrank
from fs_lowrank import load_config
from fs_lowrank.engines.local import LocalEngine
from fs_lowrank.rounds.loop import Loop

ROOT = str(Path(fs_lowrank.__file__).parent)
#: what is inside of training and evaluation is left out
INSIDE = ("train_client", "evaluate")


def changes(calls):
    return sum(one != other for one, other in zip(calls, calls[1:]))


@pytest.mark.more
def test_a_client_and_a_round_take_few_calls(settings, tmp_path, monkeypatch, no_curves):
    few = {"federate.client_num": 3, "federate.total_round_num": 2, "train.local_update_steps": 1, "train.cohort": 1}
    calls, marks, inside, real = [], [], 0, Loop._round

    def profile(frame, event, given):
        nonlocal inside
        code = frame.f_code
        if not code.co_filename.startswith(ROOT):
            return
        if event == "call" and not inside and not code.co_name.startswith("<"):
            calls.append(code.co_filename)
        if code.co_name in INSIDE:
            inside += {"call": 1, "return": -1}.get(event, 0)

    def counted(self, number):
        calls.clear()
        marks.clear()
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            return real(self, number)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(Loop, "_round", counted)
    LocalEngine(load_config(settings, few, outdir=str(tmp_path)), None, lambda *_: marks.append(len(calls))).run()
    way = calls[marks[1] : marks[2]]  # of the second client, in the second round
    assert 30 < len(way) <= 70 and changes(way) <= 40, (len(way), changes(way))
    assert len(calls) <= 400, len(calls)
