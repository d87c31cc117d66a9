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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from fs_lowrank import list_methods
from fs_lowrank.methods import requirements
from fs_lowrank.rounds import admission, site
from fs_lowrank.testing import TASKS, Bench, quietly
from fs_lowrank.testing.bench import without_seconds

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


class Device(TorchDispatchMode):
    """Makes tensors on the device, and counts ``read``, ``to the device`` and ``from the device``."""

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
            self.count(args[1], to_here)
        elif (device := kwargs.get("device")) is not None:
            to_here = torch.device(device).type == NAME
            kwargs["device"] = torch.device("cpu") if to_here else device
            if func is aten._to_copy.default:
                self.count(args[0], to_here)
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

    def count(self, source, to_here):
        if isinstance(source, Labelled) != to_here:
            self.crossings["to the device" if to_here else "from the device"] += 1


class FromNumbers(TorchFunctionMode):
    """Makes tensors of Python's numbers on the CPU first; ``torch.tensor`` goes round ``Device``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor and isinstance(args[0], Labelled):
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device)
        if func is torch.tensor and (device := kwargs.pop("device", None)) is not None:
            return func(*args, **kwargs).to(device)
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
            patch.setattr(site, "device_of", lambda config: torch.device(NAME, 0))
            patch.setattr(admission, "_PLAIN", (*admission._PLAIN, Labelled))
            yield device

    return entered


@pytest.fixture(scope="module")
def bench(tmp_path_factory, keys_of):
    folder = tmp_path_factory.mktemp("device")
    bench = Bench(folder, keys_of)
    # Dropout draws in another order where attention is computed by another kernel.
    path = bench.bases["encoder"] / "config.json"
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    path.write_text(json.dumps({**json.loads(path.read_text()), **off}))
    with quietly(folder):
        yield bench


CASES = [(m, task) for task in TASKS for m in list_methods() if TASKS[task] in requirements(m).tasks]
#: run by ``make test``; ``make test-slow`` runs the others
QUICK = ("fedhm", "mfedloru")


def values_of(engine):
    state = {f"state {n}": t for n, t in engine.ledger.state.items()}
    return {**state, **{f"model {n}": t.detach() for n, t in engine.model.named_parameters()}}


@pytest.mark.parametrize(
    "method, task",
    [pytest.param(m, t, marks=() if t == "encoder" and m in QUICK else pytest.mark.slow) for m, t in CASES],
)
def test_a_run_is_that_of_the_cpu(bench, on_device, method, task):
    keys = {"lowrank.checkpoint_freq": 1, "federate.total_round_num": 2, "train.optimizer": {"type": "SGD", "lr": 0.01}}
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
    assert without_seconds(ours.keeper.history)[-1].keys() == without_seconds(plain.keeper.history)[-1].keys()


@pytest.mark.parametrize("task", ["encoder", "causal"])
def test_nothing_is_read_inside_a_step(bench, on_device, task):
    """What a further step costs: the tensors of its batch go to the device, and nothing comes back.

    Nothing but what transformers reads to see whether a batch has padding, at most twice in a forward pass.
    """

    def crossings(steps):
        keys = {"federate.total_round_num": 1, "train.local_update_steps": steps, "train.cache_frozen": "off"}
        with on_device() as device:
            engine = bench.make(task, "fedlora", {**keys, "train.blocks": 1})
            device.crossings.clear()
            engine.run()
        return device.crossings

    few, more = crossings(2), crossings(5)
    steps = 3 * 3  # of three clients
    assert more["read"] == few["read"] and more["from the device"] == few["from the device"]
    assert more["read by a mask"] - few["read by a mask"] <= 2 * steps
    assert 0 < more["to the device"] - few["to the device"] <= 8 * steps
