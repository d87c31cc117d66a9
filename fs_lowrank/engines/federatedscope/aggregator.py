"""Gives the framework an aggregator that takes the method's server step, and saves and loads its state."""

from __future__ import annotations

from federatedscope.core.aggregators import Aggregator

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
        saved.save_state(path, self.session.site, self.session.ledger, cur_round)

    def load_model(self, path):
        return saved.load_state(path, self.session.site, self.session.ledger)

    def reset(self):
        """Do nothing: the framework resets an online aggregator here, and every round of ours has a new intake."""
