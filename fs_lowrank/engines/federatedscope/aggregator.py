"""Gives the framework an aggregator that takes the method's server step, and saves and loads its state."""

from __future__ import annotations

from federatedscope.core.aggregators import Aggregator
from torch import Tensor

from ...errors import UserError
from ...models.adapters import load_tensors
from ...rounds.ending import end_round
from . import saved
from .session import Session


class MethodAggregator(Aggregator):
    """Takes the server step of the session's method."""

    def __init__(self, session: Session):
        super().__init__()
        self.session, self.model = session, session.site.model

    def aggregate(self, agg_info):
        """Finish the round ``agg_info["round"]``; returns its ``Finished``."""
        return end_round(agg_info["round"], self.session.keeper)

    def save_model(self, path, cur_round=-1):
        """Write the shared tensors, by the names of the framework's adapters, and the rest of the method's state.

        Raises:
            RunFailed: the file cannot be written; the one of before is unchanged.
        """
        session, ledger = self.session, self.session.ledger
        saved.write(
            path,
            {
                "cur_round": cur_round,
                "method": session.method.name,
                "model": {n: t.detach().cpu() for n, t in session.method.view(ledger.state).items()},
                "state": {n: v.detach().cpu() if isinstance(v, Tensor) else v for n, v in ledger.state.items()},
                "base": {n: p.cpu() for n, p in session.site.changed_base().items()},
            },
        )

    def load_model(self, path):
        """Restore the state from the file at ``path``; returns the number of completed rounds.

        Raises:
            UserError: there is no such file, it is damaged, or it is of another method or model.
        """
        session = self.session
        content = saved.read(path, session.site.device)
        then, base, of = content["model"], content.get("base", {}), content.get("method", session.method.name)
        if of != session.method.name:
            raise UserError(
                f"federate.restore_from: {path} is of method {str(of)[:60]!r}, this run's is {session.method.name!r}"
            )
        # A file that the framework itself has written has only the tensors.
        state = dict(content.get("state") or {**session.ledger.state, **then})
        bad = _differing(session.method.view(session.ledger.state), then)
        try:
            bad = bad or _differing(session.method.view(state), then)
        except KeyError as error:
            bad = [str(error.args[0])]
        if bad:
            raise UserError(
                f"federate.restore_from: {path} does not fit this method and model: {bad[0]!r} differs"
                f" ({len(bad)} tensors in all)"
            )
        numbers = {n: v for n, v in state.items() if not isinstance(v, Tensor)}
        known = {"numbers": numbers, "synced": {}, "outbox": {}}
        tensors = {n: v for n, v in state.items() if n not in numbers}
        try:
            load_tensors(self.model, base)
        except (KeyError, ValueError) as error:
            raise UserError(
                f"federate.restore_from: {path} has changed weights of another base: {error.args[0]}; use the "
                "model.type of the run that saved it"
            ) from error
        session.ledger.restore(content["cur_round"], {"state": tensors}, known)
        load_tensors(self.model, session.method.view(session.ledger.state))
        return content["cur_round"]

    def reset(self):
        """Do nothing: the framework resets an online aggregator here, and every round of ours has a new intake."""


def _differing(one, other):
    """The names of tensors that are not in both, or have other shapes."""
    return sorted(
        n for n in one.keys() | other.keys() if n not in one or n not in other or one[n].shape != other[n].shape
    )
