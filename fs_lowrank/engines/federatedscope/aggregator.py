"""Gives the framework an aggregator that takes the method's server step, and saves and loads its state."""

from __future__ import annotations

import os
from pickle import UnpicklingError

import torch
from federatedscope.core.aggregators import Aggregator
from torch import Tensor

from ...errors import UserError
from ...models.adapters import load_tensors
from ...rounds.ending import end_round
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
        """Write the shared tensors, by the names of the framework's adapters, and the rest of the method's state."""
        session, ledger = self.session, self.session.ledger
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        torch.save(
            {
                "cur_round": cur_round,
                "method": session.method.name,
                "model": {n: t.detach().cpu() for n, t in session.method.view(ledger.state).items()},
                "state": {n: v.detach().cpu() if isinstance(v, Tensor) else v for n, v in ledger.state.items()},
                "base": {n: p.cpu() for n, p in session.site.changed_base().items()},
            },
            path,
        )

    def load_model(self, path):
        """Restore the state from the file at ``path``; returns the number of completed rounds.

        Raises:
            UserError: there is no such file, or it is of another method or model.
        """
        session = self.session
        if not os.path.exists(path):
            raise UserError(f"federate.restore_from: there is no file {path}")
        try:
            saved = torch.load(path, map_location=session.site.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, UnpicklingError) as error:
            raise UserError(f"federate.restore_from: cannot read {path}: {error}") from error
        if not isinstance(saved, dict) or "model" not in saved:
            raise UserError(f"federate.restore_from: {path} was not saved by a run of this framework")
        now = session.method.view(session.ledger.state)
        then = saved["model"]
        bad = sorted(
            n for n in now.keys() | then.keys() if n not in now or n not in then or now[n].shape != then[n].shape
        )
        if bad:
            raise UserError(
                f"federate.restore_from: {path} does not fit this method and model: {bad[0]!r} differs"
                f" ({len(bad)} tensors in all)"
            )
        if saved.get("method", session.method.name) != session.method.name:
            raise UserError(
                f"federate.restore_from: {path} is of method {saved['method']!r}, this run's is {session.method.name!r}"
            )
        # A file that the framework itself has written has only the tensors.
        state, done = dict(saved.get("state") or {**session.ledger.state, **then}), int(saved.get("cur_round", 0))
        numbers = {n: v for n, v in state.items() if not isinstance(v, Tensor)}
        known = {"numbers": numbers, "synced": {}, "outbox": {}}
        tensors = {n: v for n, v in state.items() if n not in numbers}
        session.ledger.restore(done, {"state": tensors}, known)
        load_tensors(self.model, saved.get("base", {}))
        load_tensors(self.model, session.method.view(session.ledger.state))
        return done

    def reset(self):
        """Do nothing: the framework resets an online aggregator here, and every round of ours has a new intake."""
