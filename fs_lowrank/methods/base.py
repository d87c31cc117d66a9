"""The contract between a federated method and the engines that run it.

A method answers five questions; an engine asks them and does everything else.

=================================== ================================================================
``adapt(model)``                    what does it put on the model?
``phases(round)``                   what trains in this round?
``upload(model, round, client)``    what does a client send?
``aggregate(updates, state, round)`` how does the server combine it?
``apply(model, message, round)``    what does every copy of the model do with the server's answer?
=================================== ================================================================

What it needs around it is one more answer, ``requires(params)``, which is checked before data or model are made. There
are two bases. ``Averaging``: the server's step is a mean (``mean``), which server optimizers may change, and what the
method makes of it (``settle``). ``Gathering``: the server's step sees each update.

Engines also call ``initial_state``, ``view``, ``expected``, ``tailor`` and ``changed_base``. These answers are derived:
the state at the start is the adapted model's ``shared`` tensors, a client's view is that part of the state as
``tailor`` cuts it for the client, what is expected of a client is what ``phases`` trains of its view, and the changed
base is what ``apply`` merges into. A method overrides one where its clients hold something else than what is shared.

*State* is a flat mapping of names to tensors and numbers; together with the base weights that ``apply``
changes it is all there is to save. *Message* is the part of the new state that travels: the engine keeps
the latest value of every name and brings a client that missed rounds up to date with what it lacks, so no
method handles absence itself. What a message holds for ever (a merge) gets a name of its own per round.
Rounds count from 1; round 0 is the start, which every copy draws from the seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..algebra import weighted_mean
from ..errors import UserError
from ..models.adapters import add_adapter, load_tensors
from ..models.names import all_tensors, named_tensors, select
from ..seeds import derive
from ..settings import AdapterSpec
from .wrapper import Value, Wrapper

Tensors = Mapping[str, Tensor]
State = dict[str, Value]


@dataclass(frozen=True)
class Requires:
    """What a method needs around it, with the hyperparameters that it was given.

    Attributes:
        adapter: what the tensors are that all copies share. ``any``: an adapter of any kind; ``lora``: one with halves
            A and B; ``none``: all weights; ``optional``: an adapter if ``llm.adapter.use`` is True, else all weights.
        tasks: values of ``model.task`` that it can be used with.
        sums: the weighted sum of what clients send is all that the server needs; secret sharing then applies.
        validation: the server's step needs ``Method.workbench``.
        rounds: what happens in a round depends on how many rounds the run has.
    """

    adapter: Literal["none", "any", "lora", "optional"] = "any"
    tasks: tuple[str, ...] = ("SequenceClassification", "CausalLM", "ImageClassification")
    sums: bool = False
    validation: bool = False
    rounds: bool = False

    def adapts(self, use: bool | None) -> bool:
        """Whether what is shared is an adapter, where ``llm.adapter.use`` is ``use``."""
        return self.adapter in ("any", "lora") or self.adapter == "optional" and bool(use)


@dataclass(frozen=True)
class Phase:
    """A stretch of local training.

    Attributes:
        train: tags (``models.names``) of the parameters that train; all others are frozen.
        steps: how long, in units of ``train.batch_or_epoch``; None means ``train.local_update_steps``.
        penalty: a function of the model that is added to the loss of every step.
    """

    train: tuple[str, ...]
    steps: int | None = None
    penalty: Callable[[nn.Module], Tensor] | None = None


@dataclass(frozen=True)
class Client:
    """What a method may know of a client.

    Attributes:
        id: from 1 to the number of clients.
        num_samples: size of its training set.
        batches: draws the client's own data once, in order, as model inputs (for Fisher or Gram passes).
    """

    id: int
    num_samples: int
    batches: Callable[[], Iterable[dict[str, Tensor]]] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Update:
    """What one client sent: its id, the size of its training set, and named tensors."""

    client: int
    num_samples: int
    tensors: Tensors


class RefusedUpdate(ValueError):
    """An update that cannot be used; the message names the client and the tensor."""


@dataclass(frozen=True)
class Setting:
    """What a method is told once about the run it takes part in."""

    adapter: AdapterSpec = field(default_factory=AdapterSpec)
    rounds: int | None = None
    seed: int = 0
    uniform: bool = False
    #: the model was not pre-trained: what carries no adapter (norms, first layer) trains whole, like a new head
    from_scratch: bool = False
    #: ``llm.adapter.use``, for methods that take a model with an adapter and without
    with_adapter: bool = False
    #: the server will see no more than the weighted sum of what clients send
    only_sums: bool = False
    #: ``train.local_update_steps``, for methods that compute with the length of a phase; its default is that key's
    local_steps: int = 1


@dataclass(frozen=True)
class Workbench:
    """What a server has beside the updates, for methods that choose or distil.

    Attributes:
        model: an adapted model to load tensors into; what it holds before and after does not count.
        validation: draws the held-out samples once, in order, as model inputs with ``labels``; they are
            never among the training data, and all methods get the same.
        seed: for what the server draws.
    """

    model: nn.Module
    validation: Callable[[], Iterable[dict[str, Tensor]]]
    seed: int


class Method:
    """What all methods share; a method derives from ``Averaging`` or ``Gathering`` and states what differs.

    Hyperparameters are the dataclass ``Params`` (field metadata ``help``, ``min``, ``max``, ``choices`` are checked
    when the method is made).
    """

    name: ClassVar[str]
    #: where it was published, one line
    source: ClassVar[str] = ""
    #: what a client sends each round, one line
    sends: ClassVar[str] = "everything it trains"
    #: raised when the same hyperparameters come to compute something else, by a changed default or formula. Where it
    #: is not 1 it is part of a result's identity, and a run that was begun with another one is not resumed
    revision: ClassVar[int] = 1
    #: tags of the tensors that all copies share
    shared: tuple[str, ...] = ("adapter", "head")
    #: tags of the tensors that stay with their client from round to round and never leave it
    personal: tuple[str, ...] = ("personal",)

    @dataclass(frozen=True)
    class Params:
        pass

    @classmethod
    def requires(cls, params: object) -> Requires:
        """What the method needs with the hyperparameters ``params``."""
        return Requires(adapter="any" if "adapter" in cls.shared else "none")

    @classmethod
    def revision_of(cls, params: object) -> int:
        """The revision of what the hyperparameters ``params`` compute; for changes that do not concern all of them."""
        return cls.revision

    def __init__(self, params: object, setting: Setting):
        self.params = params
        self.setting = setting
        self.needs = self.requires(params)
        self._check_needs()
        #: tags of what trains whole: a new head, and in a model from scratch all that carries no adapter
        self.whole: tuple[str, ...] = ("head", "rest") if setting.from_scratch else ("head",)
        if "base" not in self.shared:
            self.shared = tuple(dict.fromkeys((*self.shared, *self.whole)))
        #: the last round that adapters were drawn for, and what was drawn
        self._drawn: tuple[int, dict[tuple[str, tuple[int, ...]], Tensor]] = (0, {})
        #: set by the engine where ``requires`` asks for validation data
        self.workbench: Workbench | None = None

    def _check_needs(self) -> None:
        if not dataclasses.is_dataclass(self.params):
            own = type(self).__qualname__
            raise TypeError(f"{own}: hyperparameters of the type {type(self.params).__name__}, expected {own}.Params")
        given = [(f.name, getattr(self.params, f.name), f.default) for f in dataclasses.fields(self.params)]
        chosen = ", ".join(f"lowrank.{name} = {value}" for name, value, default in given if value != default)
        called = f"{self.name} with {chosen}" if chosen else self.name
        if self.needs.adapter == "lora" and self.setting.adapter.method != "lora":
            raise UserError(
                f"llm.adapter.args: adapter_method = {self.setting.adapter.method} has no halves A and B, which "
                f"{self.name} works on; take lora, or a method that averages adapters whole"
            )
        if self.needs.rounds and self.setting.rounds is None:
            raise UserError(f"{called} needs the number of rounds: pass rounds=…")
        if self.setting.only_sums and not self.needs.sums:
            raise UserError(
                "a server that sees only the sum of the updates (federate.use_ss, federate.online_aggr) cannot take "
                f"the step of {called}"
            )

    # -- what it puts on the model ----------------------------------------------------------------

    def adapt(self, model: nn.Module) -> nn.Module:
        """Put the trainable parts on ``model`` (changed in place) and return the model to train."""
        return add_adapter(model, self.adapter, self.setting.seed)

    @property
    def adapter(self) -> AdapterSpec:
        """The adapter as this method wants it on the model."""
        return self.setting.adapter

    def initial_state(self, model: nn.Module) -> State:
        """The state before round 1, read off the adapted model."""
        return {name: p.detach().clone() for name, p in named_tensors(model, self.shared).items()}

    # -- what trains -------------------------------------------------------------------------------

    def phases(self, round: int, client: int | None = None) -> list[Phase]:
        """The ordered phases of local training in ``round``, at ``client`` (None: for the global model)."""
        return [Phase(train=self.shared)]

    def tailor(self, tensors: Tensors, client: int) -> Tensors:
        """The part of the shared tensors (or of a message) meant for ``client``; all of it by default.

        Works on meta tensors, so that bytes are counted without data.
        """
        return tensors

    # -- what is sent ------------------------------------------------------------------------------

    def sent(self, names: Iterable[str], round: int, client: int | None = None) -> list[str]:
        """Those of ``names`` that a client sends in ``round``: the shared ones that trained, and are not personal."""
        trained = select(names, {tag for phase in self.phases(round, client) for tag in phase.train})
        return sorted(set(select(trained, self.shared)) - set(select(trained, self.personal)))

    def upload(self, model: nn.Module, round: int, client: Client) -> dict[str, Tensor]:
        """What ``client`` sends after its local training: names and the model's own tensors."""
        tensors = all_tensors(model)
        return {n: tensors[n] for n in self.sent(tensors, round, client.id)}

    def expected(self, state: State, round: int, client: int) -> dict[str, Tensor]:
        """Names, shapes and dtypes that ``client`` must send, as tensors whose values do not count."""
        view = self.view(state, client)
        return {n: view[n] for n in self.sent(view, round, client)}

    def view(self, state: State, client: int | None = None) -> dict[str, Tensor]:
        """The shared tensors as they stand, for the global model or as ``client`` holds them."""
        tensors = tensors_of({n: state[n] for n in select(state, self.shared)})
        return tensors if client is None else dict(self.tailor(tensors, client))

    # -- what the server does ----------------------------------------------------------------------

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """``p_k = n_k / Σ n_j`` over the updates at hand, or ``1/K`` where weights are ignored."""
        sizes = [1 if self.setting.uniform else u.num_samples for u in updates]
        return [n / sum(sizes) for n in sizes]

    def mean_of(self, updates: Sequence[Update], tagged: Iterable[str] | None = None) -> dict[str, Tensor]:
        """``Σ p_k x_k`` of all that was sent, or of the tensors with the tags ``tagged`` alone."""
        parts = [u.tensors for u in updates]
        if tagged is not None:
            names = select(parts[0], tagged)
            parts = [{n: part[n] for n in names} for part in parts]
        return weighted_mean(parts, self.weights(updates)) if parts[0] else {}

    def aggregate(self, updates: Sequence[Update], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        """Combine the updates of ``round``.

        Args:
            updates: checked, sorted by client; at least one.
            state: not changed.
        Returns:
            The new state, and the message for the clients.
        """
        raise NotImplementedError

    # -- what everyone does with it ----------------------------------------------------------------

    def apply(self, model: nn.Module, message: Tensors, round: int) -> None:
        """Bring a copy of the model that stands at the previous round to this one; deterministic.

        ``message`` is as the copy received it: already tailored, on a client.
        """
        load_tensors(model, message)

    def changed_base(self, model: nn.Module) -> list[str]:
        """Names of the base weights that ``apply`` has changed; they belong to a checkpoint."""
        return []

    # -- shared by methods that draw fresh tensors ---------------------------------------------------

    def draw_down(self, name: str, shape: Sequence[int], round: int) -> Tensor:
        """A fresh adapter tensor for after ``round``: Kaiming-uniform as PEFT draws it, from the seed.

        Every copy draws the same, and the first rows do not depend on how many follow. What was drawn for a round is
        kept until the next one is asked for, for the copies in this process; it is not to be written to.
        """
        if self._drawn[0] != round:
            self._drawn = round, {}
        key = name, tuple(shape)
        if key not in self._drawn[1]:
            generator = torch.Generator().manual_seed(derive(self.setting.seed, "redraw", name, round))
            bound = 1 / (torch.Size(shape[1:]).numel() ** 0.5)
            self._drawn[1][key] = torch.rand(*shape, generator=generator).mul_(2).sub_(1).mul_(bound)
        return self._drawn[1][key]


class Averaging(Method):
    """A method whose server step is a weighted mean of what clients hold: ``mean``, wrappers' steps, ``settle``.

    As it stands it is federated averaging of everything that trains. Where clients send something else than what is
    averaged (factors, say), ``mean`` recovers it. A class with a ``mean`` or ``aggregate`` of its own is taken to need
    each update, unless its ``requires`` says that sums are enough.
    """

    @classmethod
    def requires(cls, params: object) -> Requires:
        sums = cls.mean is Averaging.mean and cls.aggregate is Averaging.aggregate
        return dataclasses.replace(super().requires(params), sums=sums)

    def __init__(self, params: object, setting: Setting):
        super().__init__(params, setting)
        #: in the order in which they change the mean; set by ``create_method``
        self.wrappers: tuple[Wrapper, ...] = ()

    def mean(self, updates: Sequence[Update], state: State) -> dict[str, Tensor]:
        """The mean over the clients, by names of the state; arguments as for ``aggregate``."""
        return self.mean_of(updates)

    def settle(self, mean: dict[str, Tensor], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        """The new state and the message; neither argument is changed.

        Args:
            mean: as the wrappers left it.
            state: with ``mean`` and what the wrappers remember in it.
        """
        return state, mean

    def aggregate(self, updates: Sequence[Update], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        mean = self.mean(updates, state)
        memory: State = {}
        for wrapper in self.wrappers:
            mean, remembered = wrapper.step(mean, state)
            memory |= remembered
        before = {**state, **mean, **memory}
        settled, message = self.settle(mean, before, round)
        # A tensor that was replaced starts anew, so what is remembered of the one before it does not apply.
        replaced = {n for n, value in settled.items() if value is not before.get(n)}
        for wrapper in self.wrappers:
            settled = wrapper.forget(replaced, settled)
        return settled, message


class Gathering(Method):
    """A method whose server step sees each update; server optimizers do not apply to it. It defines ``aggregate``."""

    #: tags of the tensors whose weighted mean it takes all the same (``mean_of``)
    averaged: tuple[str, ...] = ()


def tensors_of(state: Mapping[str, Value]) -> dict[str, Tensor]:
    """``state``, which is to hold tensors alone.

    Raises:
        TypeError: one of its values is a number; the message names it.
    """
    tensors = {n: value for n, value in state.items() if isinstance(value, Tensor)}
    for name in sorted(state.keys() - tensors.keys()):
        raise TypeError(
            f"{name} of the state is {state[name]!r}, expected a tensor: its name is that of a shared weight"
        )
    return tensors


def split_merges(message: Tensors) -> tuple[dict[int, dict[str, Tensor]], dict[str, Tensor]]:
    """A message's adapters to merge, by the round they come from, in order, and the rest.

    A tensor to merge travels under the name ``merge:<round>:<name>``.
    """
    rest = {n: t for n, t in message.items() if not n.startswith("merge:")}
    merges: dict[int, dict[str, Tensor]] = {}
    for round, name in sorted((int(n.split(":", 2)[1]), n.split(":", 2)[2]) for n in message.keys() - rest.keys()):
        merges.setdefault(round, {})[name] = message[f"merge:{round}:{name}"]
    return merges, rest
