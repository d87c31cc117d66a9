"""What a server takes from a client: every update of every engine passes here."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..methods import RefusedUpdate, Update, check_update


class Admission:
    """What counts as an update."""

    def admit(
        self, update: Update, expected: Mapping[str, Tensor], reference: Mapping[str, Tensor], loss: object
    ) -> Update:
        """A checked copy of ``update``; see ``check_update``.

        Args:
            expected: names, shapes and dtypes to be sent.
            reference: the shared tensors that the client held at the start of the round.
            loss: the mean training loss that came with it.
        Raises:
            RefusedUpdate: it cannot be used; the message names the client.
        """
        if not isinstance(update.num_samples, int) or not isinstance(loss, (int, float)):
            raise RefusedUpdate(f"client {update.client}: its update does not say its samples and loss")
        return check_update(update, expected)

    def outliers(self) -> dict[int, str]:
        """Client -> reason, of the admitted whose updates the others' show to be of no use."""
        return {}
