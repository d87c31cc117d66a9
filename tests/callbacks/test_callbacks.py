"""Callbacks of a user: what they are given, what they may change, and whose error theirs is."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

import fs_lowrank
from fs_lowrank import Callback, UserError, load_config

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "callbacks.md"
FEW = {"federate.client_num": 2, "federate.total_round_num": 3, "train.local_update_steps": 1}


class Noted(Callback):
    """Notes its calls, adds to records and results, and ends the run after round ``last``."""

    def __init__(self, last=9):
        self.calls, self.last = [], last

    def on_start(self, run):
        self.calls.append(("start", len(run.history)))
        return len(run.history) >= self.last

    def after_round(self, run, record):
        state = run.method.view(run.ledger.state)
        model = dict(run.global_model().named_parameters())
        assert all(torch.equal(model[name], tensor) for name, tensor in state.items())
        self.calls.append(("round", record["round"], len(run.history)))
        record["noted"] = [record["round"], {"of": run.config.federate.method}]
        return record["round"] == self.last

    def on_end(self, run, result):
        self.calls.append(("end", len(result.history)))
        result.final["noted"] = 0.5


@pytest.fixture
def config(settings, tmp_path, no_curves):
    return load_config(settings, FEW, outdir=str(tmp_path / "run"))


@pytest.fixture(params=["local", pytest.param("federatedscope", marks=pytest.mark.federatedscope)])
def engine(request):
    return request.param


def test_a_run_that_a_callback_ends_before_it_begins(config, engine):
    result = fs_lowrank.run(config, engine, callbacks=[Noted(last=0)])
    assert result.history == [] and result.final == {"noted": 0.5}


def test_they_are_called_in_order_and_what_they_add_is_written(config, engine):
    noted = Noted()
    result = fs_lowrank.run(config, engine, callbacks=[noted])
    assert noted.calls == [("start", 0), *[("round", t, t - 1) for t in (1, 2, 3)], ("end", 3)]
    lines = [json.loads(line) for line in (result.outdir / "rounds.jsonl").read_text().splitlines()]
    assert [line["noted"] for line in lines] == [[t, {"of": "fedlora"}] for t in (1, 2, 3)]
    assert result.history[0]["noted"] == [1, {"of": "fedlora"}]
    assert json.loads((result.outdir / "summary.json").read_text())["final"]["noted"] == 0.5


@pytest.mark.more
def test_one_ends_the_run_and_nothing_else_changes(config, engine):
    apart = config.replace(outdir=f"{config.outdir}_plain")
    plain = fs_lowrank.run(apart, engine, on_round=lambda record: record["round"] == 2)
    noted, other = Noted(last=2), Noted()
    ended = fs_lowrank.run(config, engine, callbacks=[noted, other])
    assert len(ended.history) == 2 and other.calls == noted.calls == [("start", 0), *_rounds(1, 2), ("end", 2)]
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(ended.model.state_dict()[name], tensor), name


def _rounds(*numbers):
    return [("round", number, number - 1) for number in numbers]


@pytest.mark.more
def test_a_resumed_run_tells_what_is_done_and_may_end_at_once(config):
    fs_lowrank.run(config, callbacks=[Noted(last=1)])
    again = Noted(last=1)
    assert len(fs_lowrank.run(config, resume=True, callbacks=[again]).history) == 1
    assert again.calls == [("start", 1), ("end", 1)]
    rest = Noted()
    assert len(fs_lowrank.run(config, resume=True, callbacks=[rest]).history) == 3
    assert rest.calls == [("start", 1), *_rounds(2, 3), ("end", 3)]


@pytest.mark.parametrize("hook", ["on_start", "after_round", "on_end"])
def test_its_error_is_the_users_with_file_and_line_and_the_run_goes_on(config, hook):
    def wrong(self, *given):
        raise FileNotFoundError("no such file: mine.csv")

    line = wrong.__code__.co_firstlineno + 1
    mine = type("Mine", (Callback,), {hook: wrong, "__module__": __name__})
    said = f"callbacks: Mine.{hook} raises FileNotFoundError: no such file: mine.csv (test_callbacks.py, line {line})"
    with pytest.raises(UserError, match=re.escape(said)):
        fs_lowrank.run(config, callbacks=[mine()])
    assert len(fs_lowrank.run(config, resume="auto").history) == 3


def test_what_json_has_no_word_for_is_named(config):
    class Mine(Callback):
        def after_round(self, run, record):
            record["norm"] = torch.ones(())

    with pytest.raises(UserError, match="Mine.after_round raises TypeError: Object of type Tensor is not JSON"):
        fs_lowrank.run(config, callbacks=[Mine()])


def test_a_value_of_the_run_is_not_replaced(config):
    class Mine(Callback):
        def after_round(self, run, record):
            record["adapter_norm"] = 1.0

    with pytest.raises(UserError, match=r"Mine.after_round: record\['adapter_norm'\] is the run's own; give yours"):
        fs_lowrank.run(config, callbacks=[Mine()])
    assert len(fs_lowrank.run(config, resume="auto").history) == 3


@pytest.mark.parametrize("given", [Noted, [Noted], Noted(), [print]])
def test_what_is_no_callback_is_refused(config, given):
    with pytest.raises(UserError, match="callbacks = .*: expected a list of objects derived from fs_lowrank.Callback"):
        fs_lowrank.run(config, callbacks=given)


def test_a_misspelt_function_is_refused_where_the_class_is_written():
    with pytest.raises(UserError, match="Mine.after_rounds: .*did you mean 'after_round'"):

        class Mine(Callback):
            def after_rounds(self, run, record):
                return True


def test_a_wrong_callback_does_not_cost_the_run_that_was_to_be_overwritten(config):
    folder = fs_lowrank.run(config).outdir
    with pytest.raises(UserError, match="callbacks = "):
        fs_lowrank.run(config, resume="overwrite", callbacks=[print])
    assert (folder / "summary.json").is_file()


def test_the_example_of_the_page(config, tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    config.dump(tmp_path / "demo.yaml")
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    result = runpy.run_path("mine.py")["result"]
    assert "fedlora goes on after round 0" in capsys.readouterr().out
    assert result.final["head_norm"] == result.history[-1]["head_norm"] > 0


@pytest.mark.slow
def test_a_comparison_gives_them_to_each_method(config):
    compared = fs_lowrank.compare(config, "fedlora,rolora", callbacks=[Noted(1)])
    assert [len(result.history) for result in compared.values()] == [1, 1]
