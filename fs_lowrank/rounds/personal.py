"""What clients keep for themselves from round to round, and how a round is taken back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class PersonalParts(dict[int, dict[str, Tensor]]):
    """Client -> its personal tensors by name; a client that has not trained yet is absent.

    Args:
        untrained: what every client starts with; empty for a method without personal tensors.
    """

    def __init__(self, untrained: Mapping[str, Tensor]):
        super().__init__()
        self.untrained = dict(untrained)
        #: client -> the last round that it trained in, and what it had before
        self.before: dict[int, tuple[int, dict[str, Tensor] | None]] = {}

    def of(self, client: int) -> dict[str, Tensor]:
        """What ``client`` has now."""
        return self.get(client, self.untrained)

    def keep(self, client: int, round: int, tensors: Mapping[str, Tensor]) -> None:
        """``client`` has trained in ``round``, and has ``tensors`` now; nothing where the method has none."""
        if self.untrained:
            self.before[client] = round, self.get(client)
            self[client] = dict(tensors)

    def undo(self, client: int, round: int) -> None:
        """If ``client`` has trained in ``round`` or later, what it has is what it had before."""
        trained, before = self.before.get(client, (0, None))
        if trained < round or not trained:
            return
        del self.before[client]
        if before is None:
            del self[client]
        else:
            self[client] = before

    def settle(self) -> None:
        """The round is over, and nothing of it will be undone."""
        self.before.clear()
