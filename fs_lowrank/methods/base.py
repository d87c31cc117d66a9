"""The contract between a federated method and the engines that run it.

A method answers five questions; an engine asks them and does everything else.

==================================== ==============================================================
``adapt(model)``                     what does it add to the model?
``phases(round, client)``            what trains in this round?
``upload(model, round, client)``     what does a client send?
``aggregate(updates, state, round)`` how does the server combine the updates?
``apply(model, message, round)``     what does every copy of the model do with the server's message?
==================================== ==============================================================

``requires(params)`` says what the method needs around it, and is checked before data are read or a model is built.
There are two base classes. In ``Averaging``, the server's step is a mean (``mean``), which server optimizers may change
before the method uses it (``settle``). In ``Gathering``, the server's step gets the update of each client.

A round may have more than one exchange: ``exchanges(state, round)`` names them, and ``tell(updates, state, round,
exchange)`` is what the server makes of the answers to one for the next.

Engines also call ``initial_state``, ``view``, ``expected``, ``tailor`` and ``changed_base``. Their defaults follow from
the five answers: the initial state is the ``shared`` tensors of the adapted model; the view of a client is that part of
the state, as ``tailor`` cuts it for the client; a client is expected to send those tensors of its view that ``phases``
trains; the changed base is the weights that ``apply`` changes outside the state. A method overrides one of them if its
clients hold other tensors than those that are shared. A method whose clients send something beside weights (counts, a
Fisher) overrides ``check`` to test their values, so that no client sends a weight below zero.

The *state* is a flat mapping of names to tensors and numbers. A checkpoint is the state and the base weights that
``apply`` changes. The *message* is the part of the new state that is sent to clients. The engine keeps the latest value
of every name and sends a client that missed rounds the ones it lacks, so methods do not handle absence themselves. A
tensor that must not be replaced by a later one (a product to merge) has a name of its own in every round. Rounds count
from 1; round 0 is the initial state, which every copy derives from the seed.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..algebra import weighted_mean
from ..errors import UserError
from ..models.adapters import add_adapter, load_tensors
from ..models.names import all_tensors, named_tensors, select, tags
from ..seeds import derive
from ..settings import AdapterSpec, Origin
from ..settings.conflicts import check_adapter
from ..settings.parameters import with_params
from .robust import RobustMean
from .terms import (
    TRAIN,
    Client,
    NoParams,
    Phase,
    Requires,
    Setting,
    Tensors,
    Update,
    Workbench,
    checked_tags,
    refuse_negative,
)
from .wrapper import Value, Wrapper

State = dict[str, Value]


class Method(ABC):
    """The base of ``Averaging`` and ``Gathering``, from one of which a method derives.

    Tags say what is shared, trained and kept (``models.names``). A value of the state that is no tensor of the model
    has a name with a colon, such as ``x:count``. The hyperparameters are the dataclass ``Params``. Their types and the
    metadata of their fields (``help``, ``min``, ``max``, ``choices`` and the others of ``settings.key``) are checked
    when the method is created.
    """

    name: ClassVar[str]
    #: the publication, one line
    source: ClassVar[str] = ""
    #: what a client sends in each round, one line
    sends: ClassVar[str] = "everything it trains"
    #: raised when a changed default or formula gives other results for the same hyperparameters. A revision other than
    #: 1 is part of the identity of a result, and a run that was started with another revision is not resumed
    revision: ClassVar[int] = 1
    #: tags of the tensors that all copies share
    shared: tuple[str, ...] = ("adapter", "head")
    #: tags of the tensors that stay with their client from round to round and are never sent
    personal: tuple[str, ...] = ("personal",)
    #: the dataclass of the hyperparameters
    Params: ClassVar[type[Any]] = NoParams
    #: an instance of ``Params``; with ``params: Params`` in the class of a method, type checkers know its fields
    params: Any

    @classmethod
    def requires(cls, params: Any) -> Requires:
        """What the method needs with the hyperparameters ``params``."""
        halves = {"lora_A", "lora_B"}.intersection(cls.shared)
        return Requires(
            adapter="lora" if halves else "any" if "adapter" in cls.shared else "none",
            changes_base="base" in (*cls.shared, *cls.personal) or cls.changed_base is not Method.changed_base,
            own_upload=cls.upload is not Method.upload,
        )

    @classmethod
    def revision_of(cls, params: Any) -> int:
        """The revision for the hyperparameters ``params``, since a change may concern only some of their values."""
        return cls.revision

    def __init__(self, params: Any, setting: Setting):
        self.params = params
        self.setting = setting
        self.needs = self.requires(params)
        self._check_needs()
        for name in ("shared", "personal"):
            setattr(self, name, checked_tags(getattr(self, name), f"federate.method = {self.name}: {name}"))
        self.personal = tuple(dict.fromkeys((*self.personal, *setting.personal)))
        #: tags of what trains without an adapter: the head and, in a model from scratch, all weights without adapter
        self.whole: tuple[str, ...] = ("head", "rest") if setting.from_scratch else ("head",)
        if "base" not in self.shared:
            self.shared = tuple(dict.fromkeys((*self.shared, *self.whole)))
        if not setting.train_head:
            self.shared, self.whole = (tuple(t for t in group if t != "head") for group in (self.shared, self.whole))
        #: the last round that ``draw_down`` was called for, and its results
        self._drawn: tuple[int, dict[tuple[str, tuple[int, ...]], Tensor]] = (0, {})
        #: set by the engine if ``requires`` asks for validation data, otherwise None
        self.workbench: Workbench | Any = None
        #: what the last ``aggregate`` did to the updates of single clients, for the record of the round
        self.notes: dict[int, str] = {}

    def _check_needs(self) -> None:
        if not dataclasses.is_dataclass(self.params):
            name = type(self).__qualname__
            raise TypeError(f"{name}: hyperparameters of the type {type(self.params).__name__}, expected {name}.Params")
        values = {f.name: getattr(self.params, f.name) for f in dataclasses.fields(self.params)}
        method = with_params(type(self), values)
        check_adapter(self.setting.adapter, self.setting.from_scratch, method, self.needs, Origin())
        if self.needs.rounds and self.setting.rounds is None:
            raise UserError(f"{method} needs the number of rounds: pass rounds=…")
        if self.setting.only_sums and not self.needs.sums:
            raise UserError(
                "a server that sees only the sum of the updates (federate.use_ss, federate.online_aggr) cannot take "
                f"the step of {method}"
            )

    # -- what is added to the model ------------------------------------------------------------------

    def adapt(self, model: nn.Module) -> nn.Module:
        """Add the trainable parts to ``model``, which is changed in place; return the model to train."""
        return add_adapter(model, self.adapter, self.setting.seed)

    @property
    def adapter(self) -> AdapterSpec:
        """The adapter that this method adds to the model."""
        return self.setting.adapter

    def initial_state(self, model: nn.Module) -> State:
        """The state before round 1, from the adapted model."""
        return {name: p.detach().clone() for name, p in named_tensors(model, self.shared).items()}

    # -- what trains ---------------------------------------------------------------------------------

    def phases(self, round: int, client: int | None = None) -> list[Phase]:
        """The phases of local training in ``round``, in order, at ``client`` (None: for the global model)."""
        return [Phase(train=self.shared)]

    def tailor(self, tensors: Tensors, client: int, state: State) -> Tensors:
        """The part of the shared tensors, or of a message, that ``client`` receives; by default all of it.

        Args:
            tensors: may be meta tensors, with which bytes are counted without data.
            state: at the start of the round, for what is decided about single clients during the run.
        """
        return tensors

    # -- what is sent --------------------------------------------------------------------------------

    def sent(self, names: Iterable[str], round: int, client: int | None = None) -> list[str]:
        """The subset of ``names`` that a client sends in ``round``: trained, shared, not personal; sorted."""
        trained = {tag for phase in self.phases(round, client) for tag in phase.train}.intersection
        tagged = {n: tags(n) for n in names}
        return sorted(n for n, t in tagged.items() if trained(t) and t & {*self.shared} and not t & {*self.personal})

    def upload(self, model: nn.Module, round: int, client: Client) -> dict[str, Tensor]:
        """What ``client`` sends after its local training, by name: the tensors of the model itself, not copies."""
        tensors = all_tensors(model)
        return {n: tensors[n] for n in self.sent(tensors, round, client.id)}

    def expected(self, state: State, round: int, client: int, exchange: str = TRAIN) -> dict[str, Tensor]:
        """Names, shapes and dtypes of what ``client`` must send, as tensors whose values have no meaning.

        Where ``requires`` says ``own_ranks``, a pair may come at a smaller rank.

        Args:
            exchange: given where it is not ``train``.
        """
        view = self.view(state, client)
        return {n: view[n] for n in self.sent(view, round, client)}

    def check(self, update: Update) -> None:
        """Refuse an update of the expected names, shapes and dtypes whose values no honest client can have.

        It is called for every update before it is admitted, with finite values as the client computed them or, with
        ``quantization``, as they were decoded; with secret sharing, where the server sees no client's values, it is
        not. An override calls this one too, which refuses running variances below zero.

        Raises:
            RefusedUpdate: the message names client and tensor, and says what was expected.
        """
        if variances := [n for n in update.tensors if n.endswith(".running_var")]:
            refuse_negative(update, variances)

    def view(self, state: State, client: int | None = None) -> dict[str, Tensor]:
        """The shared tensors of ``state``, of the global model or as ``client`` holds them."""
        tensors = tensors_of({n: state[n] for n in select(state, self.shared)})
        return tensors if client is None else dict(self.tailor(tensors, client, state))

    # -- what the server does ------------------------------------------------------------------------

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """``p_k = n_k / Σ n_j`` over the given updates, or ``1/K`` if ``Setting.uniform``."""
        sizes = [1 if self.setting.uniform else u.num_samples for u in updates]
        return [n / sum(sizes) for n in sizes]

    def mean_of(self, updates: Sequence[Update], tagged: Iterable[str] | None = None) -> dict[str, Tensor]:
        """``Σ p_k x_k`` of all tensors that were sent, or only of those with one of the tags ``tagged``."""
        parts = [u.tensors for u in updates]
        if tagged is not None:
            names = select(parts[0], tagged)
            parts = [{n: part[n] for n in names} for part in parts]
        return weighted_mean(parts, self.weights(updates)) if parts[0] else {}

    @abstractmethod
    def aggregate(self, updates: Sequence[Update], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        """Combine the updates of ``round``.

        Args:
            updates: checked, sorted by client; at least one.
            state: not changed.
        Returns:
            The new state, and the message for the clients.
        """

    # -- rounds of more than one exchange ------------------------------------------------------------

    def exchanges(self, state: State, round: int) -> Sequence[str]:
        """The exchanges of ``round`` in order, by names of the method's own; in the one called ``train`` clients train.

        In each, the clients answer with ``upload``, which finds the name in ``client.exchange``, and the model as the
        client left it in the exchange before. A client that is lost on the way is left out of the round.

        Args:
            state: at the start of the round.
        """
        return (TRAIN,)

    def tell(self, updates: Sequence[Update], state: State, round: int, exchange: str) -> dict[str, Tensor]:
        """What the clients of ``round`` are told after an ``exchange`` that is not its last.

        Tensors of the model are loaded into it, and are part of the round's message to all copies; tensors of other
        names are in ``client.told`` of the next exchange alone. Both are in the state until the round ends.

        Args:
            updates, state: as for ``aggregate``, which takes the step after the last exchange.
        """
        raise NotImplementedError  # ``register_method`` refuses a class that would get here

    # -- what every copy does with the message -------------------------------------------------------

    def apply(self, model: nn.Module, message: Tensors, round: int) -> None:
        """Bring a copy of the model from the end of the previous round to the end of this one; deterministic.

        ``message`` is what the copy received: for a client, the result of ``tailor``.
        """
        load_tensors(model, message)

    def changed_base(self, model: nn.Module) -> list[str]:
        """Names of the base weights that ``apply`` has changed; a checkpoint includes them."""
        return []

    # -- for methods that draw new tensors -----------------------------------------------------------

    def draw_down(self, name: str, shape: Sequence[int], round: int) -> Tensor:
        """A new adapter tensor for the time after ``round``: Kaiming-uniform as in PEFT, from the seed.

        Every copy draws the same tensor, and its first rows do not depend on the number of rows. The tensors of a round
        are cached until another round is asked for, for the other copies in this process; callers must not write to
        them.
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
    """A method whose server step is a weighted mean: ``mean``, the steps of the wrappers, ``settle``.

    Without overrides it is federated averaging of everything that trains. If clients send something else than what is
    averaged (factors, for example), ``recovered`` computes it. A class that overrides ``recovered``, ``mean`` or
    ``aggregate`` is assumed to need each update, unless its ``requires`` says that sums are enough.
    """

    @classmethod
    def requires(cls, params: Any) -> Requires:
        sums = all(getattr(cls, name) is getattr(Averaging, name) for name in ("recovered", "mean", "aggregate"))
        overrides = cls.robust_mean is not Averaging.robust_mean
        return dataclasses.replace(super().requires(params), sums=sums, own_robust_mean=overrides)

    def __init__(self, params: Any, setting: Setting):
        super().__init__(params, setting)
        #: in the order in which they change the mean; set by ``create_method``
        self.wrappers: tuple[Wrapper, ...] = ()
        #: replaces ``mean``; set by ``create_method``
        self.robust: RobustMean | None = None

    def recovered(self, updates: Sequence[Update], state: State) -> Sequence[Update]:
        """What is averaged: updates with the names and shapes of the state's tensors; by default what was sent."""
        return updates

    def mean(self, updates: Sequence[Update], state: State) -> dict[str, Tensor]:
        """The mean over the clients, by names of the state; arguments as for ``aggregate``."""
        return self.mean_of(self.recovered(updates, state))

    def robust_mean(self, robust: RobustMean, updates: Sequence[Update], state: State) -> dict[str, Tensor]:
        """In place of ``mean`` where there is a robust mean."""
        recovered = self.recovered(updates, state)
        start = tensors_of({n: state[n] for n in recovered[0].tensors})
        mean, self.notes = robust.mean({u.client: u.tensors for u in recovered}, self.weights(recovered), start)
        return mean

    def settle(self, mean: dict[str, Tensor], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        """The new state and the message; neither argument is changed.

        Args:
            mean: the result of the wrappers' steps.
            state: includes ``mean`` and what the wrappers remember.
        """
        return state, mean

    def aggregate(self, updates: Sequence[Update], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        self.notes = {}
        mean = self.robust_mean(self.robust, updates, state) if self.robust else self.mean(updates, state)
        memory: State = {}
        for wrapper in self.wrappers:
            mean, remembered = wrapper.step(mean, state)
            memory |= remembered
        before = {**state, **mean, **memory}
        settled, message = self.settle(mean, before, round)
        # What a wrapper remembers about a tensor does not apply to the new tensor that replaces it.
        replaced = {n for n, value in settled.items() if value is not before.get(n)}
        for wrapper in self.wrappers:
            settled = wrapper.forget(replaced, settled)
        return settled, message


class Gathering(Method):
    """A method whose server step needs each update, and which defines ``aggregate``; it takes no server optimizer."""

    #: tags of the tensors of which it takes the weighted mean nevertheless (``mean_of``)
    averaged: tuple[str, ...] = ()


def tensors_of(state: Mapping[str, Value]) -> dict[str, Tensor]:
    """``state``, all of whose values must be tensors.

    Raises:
        TypeError: a value is a number; the message names it.
    """
    tensors = {n: value for n, value in state.items() if isinstance(value, Tensor)}
    for name in sorted(state.keys() - tensors.keys()):
        raise TypeError(
            f"{name} of the state is {state[name]!r}, expected a tensor: its name is that of a shared weight"
        )
    return tensors


def split_merges(message: Tensors) -> tuple[dict[int, dict[str, Tensor]], dict[str, Tensor]]:
    """The adapters to merge in a message, by round in order, and the other tensors.

    A tensor to merge is called ``merge:<round>:<name>``.
    """
    tensors = {n: t for n, t in message.items() if not n.startswith("merge:")}
    merges: dict[int, dict[str, Tensor]] = {}
    for round, name in sorted((int(n.split(":", 2)[1]), n.split(":", 2)[2]) for n in message.keys() - tensors.keys()):
        merges.setdefault(round, {})[name] = message[f"merge:{round}:{name}"]
    return merges, tensors
