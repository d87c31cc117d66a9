"""What a method and an engine tell each other: what the method needs, what trains, what a client is and has sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn

from ..algebra import values_of
from ..errors import UserError, nearest
from ..settings import AdapterSpec
from ..settings.metrics import TASKS

Tensors = Mapping[str, Tensor]
#: the exchange of a round in which clients train
TRAIN = "train"
#: which tensors are shared (``Requires.adapter``)
Shares = Literal["none", "any", "every", "lora", "loha", "optional"]
#: the adapter's options that methods cannot take which compute a pair's scale from its rank and one alpha (``without``)
ONE_SCALE = ("rank_pattern", "alpha_pattern", "lora_bias")


def checked_tags(tags: Any, label: str) -> tuple[str, ...]:
    """``tags``, which a method gives as ``label``, as a tuple.

    Raises:
        UserError: they are no tuple of texts; a text alone would be taken for its letters.
    """
    if not isinstance(tags, (tuple, list, set, frozenset)) or not all(isinstance(tag, str) for tag in tags):
        comma = f", such as ({tags!r},) with a comma" if isinstance(tags, str) else ""
        raise UserError(f"{label} = {tags!r}: expected a tuple of tags{comma}")
    return tuple(tags)


@dataclass(frozen=True)
class Requires:
    """What a method needs around it, given its hyperparameters.

    Attributes:
        adapter: which tensors are shared. ``any``: an adapter that is added to a weight; ``every``: also one that is
            not; ``lora``: one with the halves A and B alone; ``loha``: LoHa in place of LoRA; ``none``: all weights;
            ``optional``: as ``any`` if ``llm.adapter.use`` is True, otherwise all weights.
        without: options of the adapter, in PEFT's names, that the method cannot take; of ``init_lora_weights``, the
            values that move a part of the base into the pair.
        pretrained: the base cannot be trained from scratch.
        tasks: the values of ``model.task`` that the method supports.
        sums: the server needs only the weighted sum of what clients send; secret sharing is then possible.
        validation: the server's step needs ``Method.workbench``.
        rounds: what happens in a round depends on the number of rounds of the run.
        changes_base: the method trains weights of the base, replaces them or merges into them, so that they cannot be
            quantised (``lowrank.dtype``). By default that of a method with ``base`` in ``shared`` or ``personal``, and
            of one that overrides ``changed_base``.
        float_base: the method computes with the values or the gradients of the base's weights, so that they cannot be
            quantised either.
        alone: a client needs the model to itself while it trains, because the method computes with the model's own
            tensors then, by hooks for example. ``train.cohort`` trains the clients of other methods together.
        layers: of ``llm.adapter.args`` only the choice of layers is used, because the method adds no adapter to them.
        ranks: of the clients' adapters, if hyperparameters give them; an ``r`` of ``llm.adapter.args`` that is
            no larger has no effect beside them.
        own_ranks: a client may send its pairs at a smaller rank than that of ``Method.expected``, an upper bound then.
        own_upload: ``upload`` is the method's own, and may go through a client's data in batches.
        own_robust_mean: ``robust_mean`` is the method's own, and may weight what it adds to the mean.
        idle: keys without effect beside these hyperparameters, such as ``lowrank.tau``, and why; each that is not at
            its default is reported before a run.
        begins: keys that change nothing in a run of few rounds: the fewest rounds in which they do, and why. They are
            reported before a run of fewer, also at their defaults.
    """

    adapter: Shares = "any"
    without: tuple[str, ...] = ()
    pretrained: bool = False
    tasks: tuple[str, ...] = TASKS
    sums: bool = False
    validation: bool = False
    rounds: bool = False
    changes_base: bool = False
    float_base: bool = False
    alone: bool = False
    layers: bool = False
    ranks: tuple[int, ...] = ()
    own_ranks: bool = False
    own_upload: bool = False
    own_robust_mean: bool = False
    idle: Mapping[str, str] = field(default_factory=dict, hash=False)
    begins: Mapping[str, tuple[int, str]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raise ``UserError`` for an unknown value."""
        for name, values, choices in (("adapter", (self.adapter,), get_args(Shares)), ("tasks", self.tasks, TASKS)):
            for value in values:
                if value not in choices:
                    raise UserError(
                        f"requires: {name} has {value!r}, expected {' or '.join(choices)}{nearest(value, choices)}"
                    )

    def adapts(self, use: bool | None) -> bool:
        """Whether the shared tensors are an adapter if ``llm.adapter.use`` is ``use``."""
        return self.adapter in ("any", "every", "lora", "loha") or self.adapter == "optional" and bool(use)


def beside_the_base(needs: Requires) -> Requires:
    """``needs`` of a method that keeps products beside the base instead of merging them (``lowrank.merge False``)."""
    return replace(needs, adapter="lora", without=(*ONE_SCALE, "init_lora_weights"), pretrained=True)


@dataclass(frozen=True)
class Phase:
    """A part of a client's local training.

    Attributes:
        train: tags (``models.names``) of the parameters that train; all others are frozen.
        steps: length in units of ``train.batch_or_epoch``; None: ``train.local_update_steps``.
        penalty: a function of the model, returning a scalar, that is added to the loss of every step.
        ended: a function of the model, the number of steps and the learning rate that is called after the last step. Of
            ``grad.grad_accum_count`` batches, a last step of fewer counts as that share of one.
        turns: tags in ``train`` of which one trains at a time: the first in the first step, the second in the next, and
            so on in turn. The others change neither their values nor their state in the optimizer in that step. Empty:
            all train in every step.
    """

    train: tuple[str, ...]
    steps: int | None = None
    penalty: Callable[[nn.Module], Tensor] | None = None
    ended: Callable[[nn.Module, float, float], object] | None = None
    turns: tuple[str, ...] = ()

    @property
    def has_code(self) -> bool:
        """Whether functions of the method take part in the training: they cannot be hashed, and are for one client."""
        return self.penalty is not None or self.ended is not None

    def __post_init__(self) -> None:
        """Raise ``UserError`` for tags that are no tuple, turns of what does not train, and a length of no step."""
        object.__setattr__(self, "train", checked_tags(self.train, "Phase: train"))
        if unknown := {*checked_tags(self.turns, "Phase: turns")}.difference(self.train):
            raise UserError(f"Phase: turns = {self.turns!r}: {min(unknown)} is not in train = {self.train!r}")
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise UserError(f"Phase: steps = {self.steps!r}: expected a whole number of 1 or more, or None")


@dataclass(frozen=True)
class Client:
    """What a method knows about a client.

    Attributes:
        id: from 1 to the number of clients.
        num_samples: size of its training set.
        batches: yields the client's training data once, without padding, as model inputs (for Fisher and Gram
            matrices); None
            where nothing is computed from data.
        exchange: the name of the exchange that it takes part in (``Method.exchanges``).
        told: what it was told with that (``Method.tell``); empty in the first of a round.
    """

    id: int
    num_samples: int
    batches: Callable[[], Iterable[dict[str, Tensor]]] | Any = field(default=None, compare=False)
    exchange: str = TRAIN
    told: Tensors = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Update:
    """What one client sent: its id, the size of its training set, and named tensors."""

    client: int
    num_samples: int
    tensors: Tensors


class RefusedUpdate(ValueError):
    """An update that cannot be used; the message names the client and the tensor."""


def refuse_negative(update: Update, names: Iterable[str]) -> None:
    """Refuse ``update`` if one of its tensors ``names`` holds a value below zero; a GPU is waited for once.

    Raises:
        RefusedUpdate: the message names client and tensor.
    """
    tensors = {n: update.tensors[n] for n in names}
    for (name, tensor), negative in zip(tensors.items(), values_of((t < 0).any() for t in tensors.values())):
        if negative:
            raise RefusedUpdate(
                f"client {update.client}: {name} holds {float(tensor.min()):.6g}, expected no value below zero"
            )


@dataclass(frozen=True)
class Setting:
    """What a method is told about the run; ``create_method`` describes the values."""

    adapter: AdapterSpec = field(default_factory=AdapterSpec)
    rounds: int | None = None
    seed: int = 0
    uniform: bool = False
    from_scratch: bool = False
    with_adapter: bool = False
    only_sums: bool = False
    local_steps: int = 1
    own_steps: Mapping[int, int] = field(default_factory=dict)
    train_head: bool = True
    personal: tuple[str, ...] = ()

    def steps(self, client: int | None) -> int:
        """``train.local_update_steps`` of ``client``."""
        return self.local_steps if client is None else self.own_steps.get(client, self.local_steps)


def put_beside(model: nn.Module, tensors: Tensors) -> None:
    """Give ``model`` tensors called ``KIND:name`` that are no part of it: they move with it, and are not saved with it.

    They are shared, sent, or stay with their client by the tag ``KIND``, as the model's own are by theirs.
    """
    for name, tensor in tensors.items():
        model.register_buffer(name.replace(".", "|"), tensor, persistent=False)  # torch allows no dot in the name


@dataclass(frozen=True)
class Workbench:
    """What a server has besides the updates, for methods that select by validation or distil.

    Attributes:
        model: an adapted model to load tensors into; its values have no meaning before or after.
        validation: yields the held-out samples once, in order, as model inputs with ``labels``. They are never among
            the training data, and are the same for all methods.
        seed: for random draws of the server.
    """

    model: nn.Module
    validation: Callable[[], Iterable[dict[str, Tensor]]]
    seed: int


@dataclass(frozen=True)
class NoParams:
    """The hyperparameters of a method that has none."""
