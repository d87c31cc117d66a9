"""Gives the framework our models."""

from __future__ import annotations

from .session import session_for_model


def build(model_config, input_shape):
    """The adapted model for the next worker of the session; None leaves the model to the framework."""
    session = session_for_model(model_config.type)
    return None if session is None else session.next_model()
