"""The contract between a federated method and the engines that run it.

A method answers five questions; an engine asks them and does everything else.

=================================== ================================================================
``adapt(model)``                    what does it put on the model?
``phases(round)``                   what trains in this round?
``upload(model, round, client)``    what does a client send?
``aggregate(updates, state, round)`` how does the server combine it?
``apply(model, message, round)``    what does every copy of the model do with the server's answer?
=================================== ================================================================

*State* is a flat mapping of names to tensors and numbers; together with the base weights that ``apply``
changes it is all there is to save. *Message* is the part of the new state that travels: the engine keeps
the latest value of every name and brings a client that missed rounds up to date with what it lacks, so no
method handles absence itself. What a message holds for ever (a merge) gets a name of its own per round.
Rounds count from 1; round 0 is the start, which every copy draws from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..algebra import weighted_mean
from ..errors import UserError
from ..models.adapters import add_adapter, load_tensors
from ..models.names import all_tensors, named_tensors, select
from ..seeds import derive
from ..settings import AdapterSpec

Tensors = Mapping[str, Tensor]
State = dict[str, "Tensor | float | int"]


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
    """Base of all methods: federated averaging of everything that trains.

    A subclass states what differs. Hyperparameters are the dataclass ``Params`` (field metadata ``help``,
    ``min``, ``max``, ``choices`` are checked when the method is made).
    """

    name: ClassVar[str]
    #: where it was published, one line
    source: ClassVar[str] = ""
    #: what a client sends each round, one line
    sends: ClassVar[str] = "everything it trains"
    #: raised when the same hyperparameters come to compute something else, by a changed default or formula. Where it
    #: is not 1 it is part of a result's identity, and a run that was begun with another one is not resumed
    revision: ClassVar[int] = 1
    #: True if the server's step is a weighted mean of what clients hold: server optimizers then apply
    averages: ClassVar[bool] = True
    #: True if the server needs no more than the weighted sum of what clients send: secret sharing then applies.
    #: None means: as ``averages``
    additive: ClassVar[bool | None] = None
    #: True if the server's step needs ``workbench``; may depend on the hyperparameters
    selects: bool = False
    #: values of ``model.task`` that it can be used with
    tasks: ClassVar[tuple[str, ...]] = ("SequenceClassification", "CausalLM", "ImageClassification")
    #: True if it takes only nets that are a plain chain of layers without biases and norms (``models.chain``)
    chains_only: ClassVar[bool] = False
    #: True if the head, whatever becomes of the rest, is a weighted mean of the clients' heads
    averages_head: ClassVar[bool] = True
    #: True if its formulas name the halves A and B: another adapter than LoRA has nothing in it for them
    lora_only: ClassVar[bool] = False
    #: True if it works on an adapter where ``llm.adapter.use`` asks for one, and on all weights otherwise
    either: ClassVar[bool] = False

    @dataclass(frozen=True)
    class Params:
        pass

    @classmethod
    def needs_only_sums(cls) -> bool:
        """Whether the weighted sum of what clients send is all that the server needs."""
        return cls.averages if cls.additive is None else cls.additive

    @classmethod
    def revision_of(cls, params: object) -> int:
        """The revision of what the hyperparameters ``params`` compute; for changes that do not concern all of them."""
        return cls.revision

    def __init__(self, params: object, setting: Setting):
        if self.lora_only and setting.adapter.method != "lora":
            raise UserError(
                f"llm.adapter.args: adapter_method = {setting.adapter.method} has no halves A and B, which "
                f"{self.name} works on; take lora, or a method that averages adapters whole"
            )
        self.params = params
        self.setting = setting
        #: tags of what trains whole: a new head, and in a model from scratch all that carries no adapter
        self.whole: tuple[str, ...] = ("head", "rest") if setting.from_scratch else ("head",)
        if "base" not in self.shared:
            self.shared = tuple(dict.fromkeys((*self.shared, *self.whole)))
        #: the last round that adapters were drawn for, and what was drawn
        self._drawn: tuple[int, dict[tuple, Tensor]] = (0, {})
        #: set by the engine where ``selects`` is True
        self.workbench: Workbench | None = None
        #: set by ``methods.server_optimizer``; the plain mean otherwise
        self.combine: Callable[[Mapping[str, Tensor], State], tuple[dict[str, Tensor], State]] | None = None

    # -- what it puts on the model ----------------------------------------------------------------

    def adapt(self, model: nn.Module) -> nn.Module:
        """Put the trainable parts on ``model`` (changed in place) and return the model to train."""
        return add_adapter(model, self.adapter, self.setting.seed)

    @property
    def plans_ahead(self) -> bool:
        """True if what happens in a round depends on how many rounds the run has."""
        return False

    @property
    def adapter(self) -> AdapterSpec:
        """The adapter as this method wants it on the model."""
        return self.setting.adapter

    #: tags of the tensors that all copies share
    shared: ClassVar[tuple[str, ...]] = ("adapter", "head")
    #: tags of the tensors that stay with their client from round to round and never leave it
    personal: ClassVar[tuple[str, ...]] = ("personal",)

    def initial_state(self, model: nn.Module) -> State:
        """The state before round 1, read off the adapted model."""
        return {name: p.detach().clone() for name, p in named_tensors(model, self.shared).items()}

    # -- what trains -------------------------------------------------------------------------------

    def phases(self, round: int, client: int | None = None) -> list[Phase]:
        """The ordered phases of local training in ``round``, at ``client`` (None: at one that has no wishes)."""
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
        tensors = {n: state[n] for n in select(state, self.shared)}
        return tensors if client is None else dict(self.tailor(tensors, client))

    # -- what the server does ----------------------------------------------------------------------

    def weights(self, updates: Sequence[Update]) -> list[float]:
        """``p_k = n_k / Σ n_j`` over the updates at hand, or ``1/K`` where weights are ignored."""
        sizes = [1 if self.setting.uniform else u.num_samples for u in updates]
        return [n / sum(sizes) for n in sizes]

    def average(self, updates: Sequence[Update], state: State, tagged: Sequence[str] = ()) -> tuple[State, State]:
        """The weighted mean of the updates, passed through the server optimizer if there is one.

        Args:
            tagged: average only the tensors with these tags; empty means all that was sent.
        Returns:
            The new tensors, and what the server optimizer remembers (empty without one).
        """
        parts = [u.tensors for u in updates]
        if tagged:
            names = select(parts[0], tagged)
            parts = [{n: part[n] for n in names} for part in parts]
        if not parts[0]:
            return {}, {}
        mean = weighted_mean(parts, self.weights(updates))
        return self.combine(mean, state) if self.combine else (mean, {})

    def aggregate(self, updates: Sequence[Update], state: State, round: int) -> tuple[State, dict[str, Tensor]]:
        """Combine the updates of ``round``.

        Args:
            updates: checked, sorted by client; at least one.
            state: not changed.
        Returns:
            The new state, and the message for the clients.
        """
        mean, memory = self.average(updates, state)
        return {**state, **mean, **memory}, mean

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


def split_merges(message: Tensors) -> tuple[dict[int, dict[str, Tensor]], dict[str, Tensor]]:
    """A message's adapters to merge, by the round they come from, in order, and the rest.

    A tensor to merge travels under the name ``merge:<round>:<name>``.
    """
    rest = {n: t for n, t in message.items() if not n.startswith("merge:")}
    merges: dict[int, dict[str, Tensor]] = {}
    for round, name in sorted((int(n.split(":", 2)[1]), n.split(":", 2)[2]) for n in message.keys() - rest.keys()):
        merges.setdefault(round, {})[name] = message[f"merge:{round}:{name}"]
    return merges, rest
