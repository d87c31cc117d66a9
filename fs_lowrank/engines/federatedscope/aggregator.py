"""Gives the framework an aggregator that takes the method's server step."""

from __future__ import annotations

from federatedscope.core.aggregators import Aggregator

from ...rounds.ending import end_round
from .session import Session


class MethodAggregator(Aggregator):
    """Takes the server step of the session's method. ``saved.SavedModels`` saves and loads."""

    def __init__(self, session: Session):
        super().__init__()
        self.session, self.model = session, session.workspace.model

    def aggregate(self, agg_info):
        """End an exchange of the round ``agg_info["round"]``; returns its ``Finished``, or None if it goes on."""
        return end_round(agg_info["round"], self.session.recorder)

    def save_model(self, path, cur_round=-1):
        """Do nothing, where the framework would save."""
