"""Runs whose tensors are on a device that is not the CPU.

No GPU is needed: tensors of the device ``labelled`` are computed on the CPU, but an operation that mixes them with
tensors of the CPU is an error, as it is on a GPU. What crosses from one device to the other is counted.
"""

import contextlib
import json
import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration as registration
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import send_to_device
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from fs_lowrank import errors, list_methods
from fs_lowrank.methods import requirements
from fs_lowrank.models.adapters import layer_stack
from fs_lowrank.rounds import admission, trainer, workspace
from fs_lowrank.rounds.round import Round
from fs_lowrank.testing import TASKS, checks
from fs_lowrank.testing.bench import without_seconds
from tests.cases import save_t5

aten = torch.ops.aten
NAME = "labelled"
#: operations that hand values to Python, so that a GPU would have to finish its work first
READS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
}


def within(file):
    """Whether a function of a file of this name is running."""
    return any(Path(frame.filename).name == file for frame in traceback.extract_stack())


def asking():
    """The package whose code asks for the operation that is running."""
    names = (frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_stack(None))
    return next((name for name in names if name in ("fs_lowrank", "transformers", "peft")), "")


class Device(TorchDispatchMode):
    """Makes tensors on the device, and counts ``read``, ``to the device`` and ``from the device``.

    Of the copies to the device ``waited for by PACKAGE`` are those without ``non_blocking``, which a GPU has to have
    finished its work for.
    """

    def __init__(self):
        super().__init__()
        self.crossings = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        here = [t for t in given if isinstance(t, Labelled)]
        to_here = bool(here)
        if func is aten.copy_.default:
            to_here = isinstance(args[0], Labelled)
            self.count(args[1], to_here, args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        elif (device := kwargs.get("device")) is not None:
            to_here = torch.device(device).type == NAME
            kwargs["device"] = torch.device("cpu") if to_here else device
            if func is aten._to_copy.default:
                self.count(args[0], to_here, kwargs.get("non_blocking"))
        elif here and any(t.ndim for t in given if not isinstance(t, Labelled)):
            devices = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in given)
            raise RuntimeError(f"{func} of tensors on different devices: {devices}")
        if here and (func in READS or func is aten.index.Tensor and any(t.dtype == torch.bool for t in here[1:])):
            self.crossings["read by a mask" if within("masking_utils.py") else "read"] += 1
        by_inner = {id(t.inner): t for t in here}

        def labelled(value):
            if not isinstance(value, torch.Tensor) or not to_here:
                return value
            return by_inner[id(value)] if id(value) in by_inner else Labelled(value)

        inner = tree_map(lambda t: t.inner if isinstance(t, Labelled) else t, (args, kwargs))
        out = tree_map(labelled, func(*inner[0], **inner[1]))
        return return_and_correct_aliasing(func, args, kwargs, out) if here else out

    def count(self, source, to_here, non_blocking):
        if isinstance(source, Labelled) != to_here:
            self.crossings["to the device" if to_here else "from the device"] += 1
            if to_here and not non_blocking:
                self.crossings[f"waited for by {asking()}"] += 1


class FromNumbers(TorchFunctionMode):
    """Makes tensors of Python's numbers, and numbers of tensors, on the CPU: torch does so round ``Device``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor and isinstance(args[0], Labelled):
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device)
        if func is torch.tensor and (device := kwargs.pop("device", None)) is not None:
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.tolist:
            return args[0].cpu().tolist()
        return func(*args, **kwargs)


class Labelled(torch.Tensor):
    """A tensor on the device; ``inner`` is the tensor of the CPU that it is computed with."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return cls._make_wrapper_subclass(cls, inner.size(), **layout, device=torch.device(NAME, 0))

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Labelled({self.inner!r})"

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, *_):
        return Labelled(parts["inner"])

    def untyped_storage(self):
        return self.inner.untyped_storage()

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.inner = other.inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside of the device's mode")


@pytest.fixture(scope="module")
def registered():
    if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices that are written in Python")
    registration._setup_privateuseone_for_python_backend(NAME)


@pytest.fixture
def on_device(registered, monkeypatch):
    """A context in which runs use the device."""

    @contextlib.contextmanager
    def entered():
        with monkeypatch.context() as patch, FromNumbers(), Device() as device:
            patch.setattr(workspace, "device_of", lambda config: torch.device(NAME, 0))
            patch.setattr(admission, "_PLAIN", (*admission._PLAIN, Labelled))
            yield device

    return entered


@pytest.fixture(scope="module")
def bench(bench):
    # Dropout draws in another order where attention is computed by another kernel.
    path = bench.bases["encoder"] / "config.json"
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    path.write_text(json.dumps({**json.loads(path.read_text()), **off}))
    return bench


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return save_t5(tmp_path_factory.mktemp("t5"))


CASES = [(m, task) for task in TASKS for m in list_methods() if TASKS[task] in requirements(m).tasks]
#: what ``make test-more`` runs; ``make test-slow`` runs the others
QUICK = ("mfedloru",)


def values_of(engine):
    state = {f"state {n}": t for n, t in engine.ledger.state.items()}
    return {**state, **{f"model {n}": t.detach() for n, t in engine.model.named_parameters()}}


@pytest.fixture
def both(bench, on_device):
    """``both(task, method, keys)``: a run on the CPU and one on the device, which end alike; the latter's engine."""

    def run(task, method, keys):
        common = {"lowrank.checkpoint_freq": 1, "federate.total_round_num": 2}
        keys = {**common, "train.optimizer": {"type": "SGD", "lr": 0.01}, **keys}
        plain = bench.make(task, method, keys)
        plain.run()
        with on_device():
            ours = bench.make(task, method, keys)
            ours.run()
            found = {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in values_of(ours).items()}
            assert all(isinstance(t, Labelled) for t in ours.model.parameters())
        for name, value in values_of(plain).items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found[name], value, msg=lambda m, name=name: f"{name}: {m}")
        records = [without_seconds(engine.recorder.history) for engine in (ours, plain)]
        for a, b in zip(*records, strict=True):
            assert a.keys() == b.keys() and a["clients"] == b["clients"] and a["failed"] == b["failed"] == []
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        return ours

    return run


@pytest.mark.parametrize(
    "method, task",
    [pytest.param(m, t, marks=() if t == "encoder" and m in QUICK else pytest.mark.slow) for m, t in CASES],
)
def test_a_run_is_that_of_the_cpu(both, method, task):
    both(task, method, {})


COHORTS = {
    "unequal batches": ("encoder", "fedlora", {}),
    "a language model": ("causal", "fedlora", {}),
    "unequal ranks": ("encoder", "flexlora", {"lowrank.ranks": [1, 3, 2]}),
    "personal parts": ("encoder", "pfedloru", {}),
    "blocks and no kept states": ("encoder", "fedlora", {"train.blocks": 3, "train.cache_frozen": "off"}),
    "kept states of some": ("encoder", "fedlora", {"train.cache_frozen_bytes": 2e5}),
    "momentum and clipping": (
        "encoder",
        "rolora",
        {"train.optimizer": {"type": "SGD", "lr": 0.01, "momentum": 0.9}, "grad.grad_clip": 0.3},
    ),
}


@pytest.fixture
def trained(monkeypatch):
    """How many clients each cohort had that has trained on the device."""
    sizes, train = [], trainer.train_cohort

    def noting(model, members, *given, **options):
        found = train(model, members, *given, **options)
        sizes.extend([len(members)] * any(isinstance(tensor, Labelled) for tensor in found[0][1].values()))
        return found

    monkeypatch.setattr(trainer, "train_cohort", noting)
    return sizes


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "unequal batches" else pytest.mark.slow) for c in COHORTS]
)
def test_cohorts_are_those_of_the_cpu(both, trained, case):
    task, method, keys = COHORTS[case]
    epochs = {"train.batch_or_epoch": "epoch", "dataloader.batch_size": 30, "train.cohort": 3}
    engine = both(task, method, {**epochs, **keys})
    assert trained == [3, 3]
    if case == "kept states of some":
        assert {engine.workspace.prefix.budget.get(f"client {i}", False) for i in (1, 2, 3)} == {False, True}


@pytest.mark.parametrize("method", ["fedloru", pytest.param("pfedloru", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_run_to_the_bit(bench, on_device, method):
    with on_device():
        checks.check_resume(bench, method, "encoder")


#: the checks in which what the server or a saved model has meets what a client has
MIXING = ("run", "one client", "cohort", "half precision")
FEW = [("rolora", "half precision")]


@pytest.mark.parametrize(
    "method, check",
    [
        pytest.param(m, check, id=f"{m}-{check.name}", marks=() if (m, check.name) in FEW else pytest.mark.slow)
        for m in list_methods()
        for check in checks.CHECKS
        if m in ("fedfisher", "rolora") or check.name in MIXING
    ],
)
def test_the_generic_suite_runs_on_the_device(bench, on_device, method, check):
    tasks = [task for m, task in CASES if m == method]
    with on_device():
        for task in tasks if check.every_task else tasks[:1]:
            check.function(bench, method, task)


# -- a model on two devices ------------------------------------------------------------------------------


def spread(model):
    """``model``, whose last two layers are on the device and the others on the CPU, as accelerate places them."""
    _, layers = layer_stack(model)
    for layer in layers[1:]:
        layer.to(torch.device(NAME, 0))
        add_hook_to_module(layer, AlignDevicesHook(torch.device(NAME, 0)))
    layers[-1].register_forward_hook(lambda _, args, output: send_to_device(output, torch.device("cpu")))
    return model


@pytest.mark.parametrize(
    "task, method, keys",
    [
        pytest.param("encoder", "pfedloru", {"lowrank.merge": False, "lowrank.tau": 1}, marks=pytest.mark.slow),
        pytest.param("causal", "fedloru", {"lowrank.merge": False, "lowrank.tau": 1}, marks=pytest.mark.slow),
        pytest.param("encoder", "fisher_merge", {"llm.adapter.use": True}, marks=pytest.mark.slow),
        ("encoder", "flexlora", {"lowrank.ranks": [1, 3, 2], "train.cohort": 3, "grad.grad_clip": 0.3}),
        pytest.param(
            "causal",
            "fedlora",
            {"train.cohort": 3, "dataloader.batch_size": 30, "train.batch_or_epoch": "epoch"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_on_two_devices_learns_what_it_learns_on_one(bench, on_device, monkeypatch, caplog, task, method, keys):
    keys = {"train.optimizer": {"type": "SGD", "lr": 0.01}, **keys}
    plain = bench.make(task, method, keys)
    plain.run()
    caplog.clear()
    errors.say_once.cache_clear()
    adapted = workspace.Workspace.adapted
    with on_device(), monkeypatch.context() as patch:
        patch.setattr(workspace, "device_of", lambda config: torch.device("cpu"))
        patch.setattr(workspace.Workspace, "adapted", lambda self, model: spread(adapted(self, model)))
        ours = bench.make(task, method, keys)
        assert {t.device.type for t in ours.model.parameters()} == {"cpu", NAME}
        ours.run()
        assert all(not isinstance(t, Labelled) for t in ours.ledger.state.values())
        found = {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in values_of(ours).items()}
    assert not [record["failed"] for record in ours.recorder.history if record["failed"]]
    assert not [said for said in caplog.messages if "train." in said], "nothing was switched off"
    for name, value in values_of(plain).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, msg=lambda m, name=name: f"{name}: {m}")


# -- what crosses ----------------------------------------------------------------------------------------

ONE = {"train.cache_frozen": "off", "train.blocks": 1}
COUNTED = {
    "a classifier": ("encoder", "fedlora", ONE),
    "a language model": ("causal", "fedlora", ONE),
    "a penalty": ("encoder", "fedhm", ONE),
    "an encoder with a decoder": ("t5", "fedlora", ONE),
    "kept states": ("encoder", "fedlora", {"train.blocks": 1}),
    "blocks": ("encoder", "fedlora", {"train.cache_frozen": "off", "train.blocks": 3}),
    "a cohort": ("encoder", "fedlora", {**ONE, "train.cohort": 3}),
    "a cohort in blocks with kept states of some": (
        "encoder",
        "fedlora",
        {"train.cohort": 3, "train.blocks": 3, "train.cache_frozen_bytes": 2e5},
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in ("a classifier", "a cohort") else pytest.mark.slow) for c in COUNTED]
)
def test_nothing_is_read_inside_a_step(bench, t5, on_device, monkeypatch, case):
    """What a further step costs: the tensors of its batch go to the device, nothing comes back, and nothing waits.

    Nothing but what transformers reads to see whether a batch has padding, at most twice in a forward pass. What is
    done once in a round, such as trying whether a batch can be divided, may read.
    """
    task, method, keys = COUNTED[case]
    if task == "t5":
        adapter = {"r": 2, "alpha": 6, "modules": ["q", "v"]}
        model = {"model.type": f"{t5}@huggingface_llm", "model.task": "Seq2SeqLM", "llm.adapter.args": [adapter]}
        task, keys = "causal", {**keys, **model}

    def crossings(epochs):
        """While clients train for so many ``epochs``."""
        inside = Counter()

        def counted(train):
            def training(*given, **options):
                before = Counter(device.crossings)
                found = train(*given, **options)
                inside.update(device.crossings - before)
                inside["trainings"] += 1
                return found

            return training

        few = {"federate.total_round_num": 1, "train.batch_or_epoch": "epoch", "train.local_update_steps": epochs}
        few |= {"dataloader.batch_size": 32, "train.cache_frozen_shared": 0.0}
        with on_device() as device, monkeypatch.context() as patch:
            engine = bench.make(task, method, {**few, **keys})
            for name in ("train_client", "train_cohort"):
                patch.setattr(trainer, name, counted(getattr(trainer, name)))
            engine.model.register_forward_pre_hook(lambda *_: device.crossings.update(["passes"]))
            (record,) = engine.run().history
        assert len(record["clients"]) == 3 and not record["failed"]
        return inside

    few, more = crossings(1), crossings(2)
    further = more - few
    assert further["passes"] >= 3, further
    assert not further["read"] and not further["from the device"] and not further["waited for by fs_lowrank"], further
    assert further["read by a mask"] <= 2 * further["passes"], further
    assert 0 < further["to the device"] <= 16 * further["passes"], further
    if ONE.items() <= keys.items():
        assert more["read"] + more["from the device"] == more["trainings"], more  # the mean loss of each


def test_what_is_read_of_an_update(bench, on_device, monkeypatch):
    """Whether it is finite, and, at once, how far A, B and the head have moved."""
    taken, take = Counter(), Round.take

    def taking(self, *given, **options):
        before = Counter(device.crossings)
        counts = take(self, *given, **options)
        taken.update(device.crossings - before)
        return counts

    monkeypatch.setattr(Round, "take", taking)
    with on_device() as device:
        engine = bench.make("encoder", "fedlora", {"federate.total_round_num": 2})
        history = engine.run().history
    assert taken["read"] == taken["from the device"] == 2 * 3, taken
    assert all(isinstance(record["loss"], float) for record in history)
