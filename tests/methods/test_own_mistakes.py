"""What a method of one's own does wrong is said at once and by its name, and not as the fault of clients or of us."""

import re
from pathlib import Path

import numpy as np
import pytest

from fs_lowrank import Averaging, Gathering, Phase, Requires, UserError, load_config, run
from fs_lowrank.jobs.shell import message_of
from fs_lowrank.methods import register_method

pytestmark = pytest.mark.usefixtures("own_methods")


@pytest.fixture
def tried(settings, no_curves):
    """A function that runs a class as the method ``own``, and returns its result."""

    def run_it(cls, **keys):
        register_method("own")(cls)
        keys = {"federate.method": "own", "federate.total_round_num": 2, **keys}
        return run(load_config(settings, keys), progress=False)

    return run_it


def phases(given):
    """A method whose ``phases`` gives ``given``."""
    return type("Own", (Averaging,), {"phases": lambda self, round, client=None: given})


# -- tags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, said",
    [
        ({"personal": ("lora_b",)}, "own: personal has the tag 'lora_b', which no tensor has; did you mean 'lora_B'?"),
        ({"shared": ("adaptor", "head")}, "own: shared has the tag 'adaptor', .*did you mean 'adapter'?"),
        (
            {"shared": "adapter"},
            r"own: shared = 'adapter': expected a tuple of tags, such as \('adapter',\)",
        ),
        ({"personal": (1,)}, r"own: personal = \(1,\): expected a tuple of tags"),
    ],
)
def test_a_tag_that_is_misspelt_is_refused_before_anything_is_sent(tried, settings, body, said):
    with pytest.raises(UserError, match=said):
        tried(type("Own", (Averaging,), {"requires": classmethod(lambda cls, params: Requires()), **body}))
    assert not (Path(settings["outdir"]) / "rounds.jsonl").exists()


@pytest.mark.parametrize(
    "given, said",
    [
        (lambda: [Phase(train=("loraB", "head"))], r"phases\(round=1, client=1\) has the tag 'loraB'.*'lora_B'\?"),
        (lambda: [Phase(train=("nested",))], "trains nested, which no tensor of this model has"),
        (lambda: [Phase(train=())], "trains no tag"),
        (list, r"gave \[\], expected a list of one Phase or more"),
        (lambda: Phase(train=("lora_B",)), "gave Phase.*expected a list of one Phase or more"),
        (lambda: [("lora_B",)], r"gave \[\('lora_B',\)\], expected a list"),
    ],
)
def test_phases_that_train_nothing_are_refused(tried, given, said):
    with pytest.raises(UserError, match=f"federate.method = own: .*{said}"):
        tried(phases(given()))


def test_what_stays_with_a_client_and_never_trains_is_refused(tried):
    class Own(Averaging):
        shared = ("lora_A", "head")
        personal = ("lora_B",)

    with pytest.raises(UserError, match="own: .*lora_B.* stays with its client and is trained in no phase of client 1"):
        tried(Own)


def test_a_later_round_s_phases_are_looked_at_too(tried):
    class Own(Averaging):
        def phases(self, round, client=None):
            return [Phase(train=self.shared if round == 1 else ("lora_a",))]

    with pytest.raises(UserError, match=r"phases\(round=2, client=1\) has the tag 'lora_a'"):
        tried(Own)


def test_the_values_of_a_phase_and_of_what_is_required_are_checked():
    with pytest.raises(UserError, match=r"Phase: train = 'lora_B': expected a tuple of tags.*\('lora_B',\)"):
        Phase(train="lora_B")
    for steps in (0, -1, 1.5, True):
        with pytest.raises(UserError, match=f"steps = {steps}: expected a whole number of 1 or more, or None"):
            Phase(train=("lora_B",), steps=steps)
    assert Phase(train=["lora_B"], steps=1).train == ("lora_B",)
    with pytest.raises(UserError, match="adapter has 'lorra', expected none or .*did you mean 'lora'?"):
        Requires(adapter="lorra")
    with pytest.raises(UserError, match="tasks has 'CausalML', .*did you mean 'CausalLM'?"):
        Requires(tasks=("CausalML",))


# -- the server's step -----------------------------------------------------------------------------------


def step(change):
    """A method whose server step is ``change`` of the new state and the message."""

    class Own(Gathering):
        def aggregate(self, updates, state, round):
            mean = self.mean_of(updates)
            return change({**state, **mean}, mean)

    return Own


def first(tensors, part):
    return next(n for n in sorted(tensors) if part in n)


WRONG = {
    "none": (lambda s, m: None, "None, expected the new state and the message"),
    "message alone": (lambda s, m: m, r"\{.*expected the new state and the message"),
    "dtype": (lambda s, m: ({n: t.double() for n, t in s.items()}, m), "torch.float64 .*expected torch.float32"),
    "missing": (lambda s, m: ({n: t for n, t in s.items() if n != first(s, "lora_A")}, m), "a state without .*lora_A"),
    "turned": (lambda s, m: ({**s, first(s, "lora_A"): s[first(s, "lora_A")].T}, m), r"shape \(32, 2\), expected"),
    "numpy": (
        lambda s, m: ({**s, "x:step": np.float32(1)}, m),
        "x:step is .*float32.*expected a tensor.*a bool, int",
    ),
    "a name": (lambda s, m: ({**s, "count": 3}, m), r"count is 3 \(int\).* such as x:count, a bool, int or float"),
    "a list": (lambda s, m: ({**s, "x:count": [1, 2]}, m), r"x:count is \[1, 2\] \(list\)"),
    "a message": (lambda s, m: (s, {**m, "x:count": 3}), r"a message in which x:count is 3 \(int\), expected a tensor"),
}


@pytest.mark.more
@pytest.mark.parametrize("name, on_bad_round", [*((name, "stop") for name in WRONG), ("dtype", "skip")])
def test_a_server_step_of_the_wrong_form_is_the_method_s_mistake_and_not_the_clients(tried, name, on_bad_round):
    change, said = WRONG[name]
    with pytest.raises(UserError, match=f"(?s)the server's step of own gave .*{said}") as caught:
        tried(step(change), **{"lowrank.on_bad_round": on_bad_round})
    assert "max_update_norm" not in str(caught.value) and "client 1" not in str(caught.value)


@pytest.mark.more
def test_numbers_beside_the_tensors_are_kept_over_a_resume(settings, no_curves):
    seen = []

    class Own(Gathering):
        def aggregate(self, updates, state, round):
            mean = self.mean_of(updates)
            seen.append(tuple(state.get(f"x:{name}") for name in ("rounds", "even", "half")))
            return {**state, **mean, "x:rounds": round, "x:even": round % 2 == 0, "x:half": round / 2}, mean

    config = {"federate.method": "own", "federate.total_round_num": 3, "lowrank.checkpoint_freq": 1}
    register_method("own")(Own)
    run(load_config(settings, config), progress=False, on_round=lambda record: record["round"] == 2)
    run(load_config(settings, config), progress=False, resume=True)
    assert seen == [(None, None, None), (1, False, 0.5), (2, True, 1.0)] and seen[2][1] is True


# -- errors in its code ----------------------------------------------------------------------------------


def line_of(text):
    """The line of this file that has ``text``, as a message names it."""
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    number = next(i for i, line in lines if text in line and "line_of" not in line)
    return f"{Path(__file__).name}, line {number}"


class Penalty(Averaging):
    def phases(self, round, client=None):
        return [Phase(train=self.shared, penalty=lambda model: 1 / (round - round))]


class Step(Gathering):
    def aggregate(self, updates, state, round):
        return state["no such name"]


class Apply(Averaging):
    def apply(self, model, message, round):
        raise KeyError("what the user's code lacks")


@pytest.mark.more
def test_a_failure_of_clients_in_the_method_s_own_code_says_where(tried):
    with pytest.raises(UserError) as caught:
        tried(Penalty)
    said = str(caught.value)
    assert f"ZeroDivisionError: division by zero ({line_of('1 / (round - round)')})" in said
    assert "correct what made the clients fail" in said and "smaller lowrank.min_clients" not in said


@pytest.mark.more
def test_a_failure_of_the_server_s_step_says_where(tried):
    with pytest.raises(UserError, match=re.escape(f"KeyError: 'no such name' ({line_of('return state[')})")):
        tried(Step)


@pytest.mark.more
def test_fewer_clients_are_offered_where_more_than_one_is_asked_for(tried):
    with pytest.raises(UserError, match="correct what made the clients fail, or set a smaller lowrank.min_clients"):
        tried(Penalty, **{"lowrank.min_clients": 2})


@pytest.mark.more
def test_an_error_of_the_user_s_own_code_is_not_reported_as_one_of_this_package(tried, tmp_path):
    with pytest.raises(KeyError) as caught:
        tried(Apply)
    said = message_of(caught.value, tmp_path)
    assert f"(in {line_of('raise KeyError')}, which is not of fs-lowrank; the traceback is in " in said
    assert "please report" not in said
