"""The tensors that stay with their client from round to round, and how a round is undone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..models.names import tags


class PersonalParts(dict[int, dict[str, Tensor]]):
    """Client -> its personal tensors by name; a client that has not trained yet is absent.

    Args:
        untrained: the tensors that every client starts with; empty for a method without personal tensors.
    """

    def __init__(self, untrained: Mapping[str, Tensor]):
        super().__init__()
        self.untrained = dict(untrained)
        #: the tensors by which clients' models differ; others are beside the model (``methods.put_beside``)
        self.of_model = {n: t for n, t in self.untrained.items() if ":" not in n}
        #: client -> the last round in which it trained, and its tensors before that
        self.before: dict[int, tuple[int, dict[str, Tensor] | None]] = {}

    @property
    def kinds(self) -> list[str]:
        """What each client has of its own in the model: ``head``, ``lora_A`` and ``lora_B``, or some of them."""
        return [kind for kind in ("head", "lora_A", "lora_B") if any(kind in tags(name) for name in self.of_model)]

    def of(self, client: int) -> dict[str, Tensor]:
        """The current tensors of ``client``."""
        return self.get(client, self.untrained)

    def keep(self, client: int, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Note the ``tensors`` that ``client`` has after an exchange of ``round``."""
        if self.before.get(client, (0, None))[0] != round:
            self.before[client] = round, self.get(client)
        if tensors:
            self[client] = dict(tensors)
        else:
            self.pop(client, None)

    def undo(self, client: int, round: int) -> None:
        """Reset the tensors of ``client`` to the values before its last training, if that was in ``round`` or later."""
        trained, before = self.before.get(client, (0, None))
        if trained < round or not trained:
            return
        del self.before[client]
        if before is None:
            self.pop(client, None)
        else:
            self[client] = before

    def leave_part(self, client: int) -> None:
        """Undo the work of ``client`` in a round that was to go on with another exchange, and has not."""
        if self.of(client).keys() != self.untrained.keys():
            self.undo(client, 0)

    def settle(self) -> None:
        """Forget the tensors that would undo the round, which is over."""
        self.before.clear()
