"""The server's side of a run, the same for every engine: who takes part, what travels, what is refused."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..algebra import nbytes
from ..config import Config
from ..errors import UserError
from ..methods import Client, Method, State, Update
from ..models.names import tags
from ..seeds import derive
from .admission import Admission

logger = logging.getLogger("fs_lowrank")

#: Up to this magnitude a message is taken for harmless when it is merged into the base: a product of four of its
#: values (LoHa), summed over any rank, is far from the end of float32. Beyond it, the merge is tried on a copy first.
_HARMLESS = 1e8


class TooFewClients(RuntimeError):
    """A round ended with fewer usable updates than ``lowrank.min_clients``."""

    remedy = "a smaller lowrank.min_clients if no more clients can be had"


class BadRound(RuntimeError):
    """The server's step failed on updates that were admitted; state, outbox and model are those before the round."""

    remedy = "set lowrank.on_bad_round to skip, or bound lowrank.max_update_norm or lowrank.max_update_norm_factor"


def without_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # What travels beside a tensor, as ``x:…`` of its name, belongs to the head where the tensor does.
    return {n: t for n, t in tensors.items() if "head" not in tags(n.rsplit(":", 1)[-1])}


class Server:
    """State, participation and messages of one run.

    Args:
        method: the federated method.
        state: its state before round 1.
        num_clients: clients 1 … ``num_clients``.
        per_round: how many take part in a round.
        min_clients: usable updates a round needs.
        seed: decides who takes part.
        drop_rate: chance that a client which was chosen never reports.
        keep_messages: keep the messages' values, to bring late clients up to date. An engine whose clients
            share one model needs only their sizes.
        admission: decides which updates are taken; by default any of a client's that fits.
    """

    def __init__(
        self,
        method: Method,
        state: State,
        num_clients: int,
        per_round: int,
        min_clients: int,
        seed: int,
        drop_rate: float = 0.0,
        keep_messages: bool = False,
        admission: Admission | None = None,
    ):
        self.method, self.state = method, state
        self.num_clients, self.per_round, self.min_clients = num_clients, per_round, min_clients
        self.seed, self.drop_rate, self.keep_messages = seed, drop_rate, keep_messages
        #: name -> (the round it came from, its value or a meta tensor of its shape)
        self.outbox: dict[str, tuple[int, Tensor]] = {}
        #: client -> the round its copy of the shared tensors stands at; absent means 0
        self.synced: dict[int, int] = {}
        self.updates: list[Update] = []
        self.admission = admission or Admission(num_clients)
        #: what becomes of a message on its way, where it is rounded; the server's own state follows it
        self.rounded: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None

    @classmethod
    def of(
        cls, config: Config, method: Method, state: State, clients: Sequence[Client], keep_messages: bool = False
    ) -> Server:
        """The server that ``config`` asks for; ``clients`` say how many samples they have."""
        bounds = config.lowrank
        return cls(
            method,
            state,
            len(clients),
            config.sampled_per_round,
            config.lowrank.min_clients,
            config.seed,
            drop_rate=config.lowrank.drop_rate,
            keep_messages=keep_messages,
            admission=Admission(
                len(clients),
                {c.id: c.num_samples for c in clients},
                bounds.max_samples,
                bounds.max_update_norm,
                bounds.max_update_norm_factor,
            ),
        )

    def select(self, round: int) -> list[int]:
        """The clients of ``round``, sorted; without replacement, decided by the seed and the round alone."""
        if self.per_round >= self.num_clients:
            return list(range(1, self.num_clients + 1))
        generator = np.random.default_rng(derive(self.seed, "participation", round))
        return sorted(int(i) + 1 for i in generator.choice(self.num_clients, self.per_round, replace=False))

    def drops_out(self, client: int, round: int) -> bool:
        """Whether ``client`` is lost in ``round``, after it was sent the message."""
        return np.random.default_rng(derive(self.seed, "dropout", round, client)).random() < self.drop_rate

    def downlink(self, client: int, round: int) -> Mapping[str, Tensor]:
        """What ``client`` lacks at the start of ``round``; from here on it counts as sent."""
        since = self.synced.get(client, 0)
        self.synced[client] = round - 1
        return self.method.tailor({n: t for n, (came, t) in self.outbox.items() if came > since}, client)

    def ask(self, client: int, round: int) -> None:
        """``client`` is asked for an update in ``round``; one of a client that was not is refused."""
        self.admission.ask(client, round)

    def admit(
        self, update: Update, round: int, loss: object = 0.0, expected: Mapping[str, Tensor] | None = None
    ) -> Update:
        """A checked copy of an update.

        Args:
            loss: the mean training loss that came with it.
            expected: where it is not what the method expects of this client (a share): names, shapes and dtypes.
        Raises:
            RefusedUpdate: see ``Admission.admit``.
        """
        self.admission.identify(update.client, round)
        reference = None
        if expected is None:
            expected = self.method.expected(self.state, round, update.client)
            reference = self.method.view(self.state, update.client) if self.admission.bounds_norms else None
        return self.admission.admit(update, expected, reference, loss)

    def receive(self, update: Update, round: int, loss: object = 0.0) -> Update:
        """Admit an update and keep it for the end of the round.

        Raises:
            RefusedUpdate: it is not what the method expects of this client, came twice, or was not asked for.
        """
        update = self.admit(update, round, loss)
        self.updates.append(update)
        return update

    def sift(self) -> dict[int, str]:
        """Take out the updates that the others' show to be too large: client -> reason. Called before ``finish``."""
        refused = self.admission.outliers()
        self.updates = [u for u in self.updates if u.client not in refused]
        return refused

    def finish(self, round: int, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Aggregate what was received, in the order of client ids, and return the message.

        Args:
            model: a copy of the model at the end of the round before. It is not changed; given, a message that it
                could not follow and stay finite is a ``BadRound``.
        Raises:
            TooFewClients: the state is left as it was.
            BadRound: the step raised, or gave something that is not finite; state and outbox are left as they were.
        """
        updates, self.updates = sorted(self.updates, key=lambda u: u.client), []
        self.admission.close()
        if len(updates) < self.min_clients:
            raise TooFewClients(
                f"round {round}: {len(updates)} usable updates, lowrank.min_clients is {self.min_clients}"
            )
        before = self.state
        try:
            with torch.no_grad():
                state, message = self.method.aggregate(updates, before, round)
                if self.rounded is not None:
                    message = self.rounded(message)
                    state = {**state, **{n: t for n, t in message.items() if n in state}}
                self._require_finite({n: v for n, v in state.items() if v is not before.get(n)}, message, round, model)
        except (BadRound, OSError):
            raise
        except Exception as error:  # whatever a client's values led to, it is this round's failure alone
            logger.debug("round %d", round, exc_info=True)
            reason = (str(error).splitlines() or [""])[0]
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            raise BadRound(f"round {round}: the server's step failed: {kind}{reason}") from error
        self.state = state
        for name, tensor in message.items():
            self.outbox[name] = (round, tensor if self.keep_messages else tensor.to("meta"))
        everyone_has = min(self.synced.get(client, 0) for client in range(1, self.num_clients + 1))
        for name in list(self.outbox):
            # What changed without being sent is drawn anew by every copy: an older value must not overtake it.
            redrawn = name not in message and self.state.get(name) is not before.get(name)
            if redrawn or self.outbox[name][0] <= everyone_has:
                del self.outbox[name]
        return message

    def _require_finite(
        self, changed: Mapping[str, Tensor | float | int], message: Mapping[str, Tensor], round: int, model
    ) -> None:
        largest = 0.0
        for name, value in {**changed, **message}.items():
            size = _magnitude(value)
            if not math.isfinite(size):
                raise BadRound(f"round {round}: the server's step gave a {name} that is not finite")
            largest = max(largest, size)
        if model is not None and largest > _HARMLESS:
            trial, own = copy.deepcopy(model), model.state_dict()
            self.method.apply(trial, message, round)
            for name, tensor in trial.state_dict().items():
                was_finite = name not in own or math.isfinite(_magnitude(own[name]))  # a mask's buffer may hold -Inf
                if was_finite and not math.isfinite(_magnitude(tensor)):
                    raise BadRound(f"round {round}: with the message, {name} of the model would not be finite")

    def sizes(self, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        """Bytes of ``tensors`` with and without the head."""
        return nbytes(tensors), nbytes(without_head(tensors))


def _magnitude(value: Tensor | float | int) -> float:
    """The largest absolute value; NaN or Inf where one is among them. Anything but a float is finite by its kind."""
    if not isinstance(value, Tensor):
        return abs(value) if isinstance(value, float) else 0.0
    if not value.is_floating_point() or not value.numel():
        return 0.0
    low, high = value.detach().aminmax()
    return max(abs(float(low)), abs(float(high))) if torch.isfinite(low) & torch.isfinite(high) else math.nan
