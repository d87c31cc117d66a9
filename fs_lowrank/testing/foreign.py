"""Servers of Flower, NVFlare and APPFL as functions that the referee calls; a package is imported where it is met."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from ..errors import UserError


def as_step(server: Any) -> Any:
    """``server`` as a function ``step(states, sizes, ranks, alphas)``.

    Args:
        server: such a function; a strategy of Flower that takes messages (``aggregate_train``); an aggregator of
            NVFlare (``accept`` and ``aggregate``) or a workflow with ``aggregate_fn``; an aggregator of APPFL
            (``set_client_sample_size`` and ``aggregate``). Each call begins with a server that has seen nothing.
    Raises:
        UserError: it is none of these.
    """
    for attribute, step in _STEPS.items():
        if hasattr(server, attribute) and (step is _nvflare_workflow or not isinstance(server, type)):
            return partial(step, server)
    try:
        inspect.signature(server).bind([], [], [], [])
    except (TypeError, ValueError) as error:
        name = getattr(server, "__name__", type(server).__name__)
        raise UserError(
            f"{name} came, expected a function step(states, sizes, ranks, alphas), a strategy of Flower "
            f"with aggregate_train, or an aggregator of NVFlare or APPFL, not its class: {error}"
        ) from error
    return server


def _flower(strategy: Any, states: Sequence[dict], sizes: Sequence[int], *_: Any) -> Any:
    from flwr.app import ArrayRecord, Message, Metadata, MetricRecord, RecordDict

    replies = []
    for node, (state, size) in enumerate(zip(states, sizes), start=1):
        arrays, metrics = ArrayRecord(state), MetricRecord({strategy.weighted_by_key: size})
        content = RecordDict({strategy.arrayrecord_key: arrays, "metrics": metrics})
        metadata = Metadata(1, f"reply {node}", node, 0, f"order {node}", "1", time.time(), 3600.0, "train")
        replies.append(Message(metadata=metadata, content=content))
    arrays, _ = deepcopy(strategy).aggregate_train(1, replies)
    return arrays.to_torch_state_dict()


def _nvflare_models(states: Sequence[dict], sizes: Sequence[int]) -> list:
    from nvflare.apis.fl_constant import FLMetaKey
    from nvflare.app_common.abstract.fl_model import FLModel

    pairs = enumerate(zip(states, sizes), start=1)
    entries = [(state, {FLMetaKey.NUM_STEPS_CURRENT_ROUND: n, "client_name": f"site-{k}"}) for k, (state, n) in pairs]
    return [FLModel(params=state, meta=meta, current_round=0) for state, meta in entries]


def _nvflare_workflow(workflow: Any, states: Sequence[dict], sizes: Sequence[int], *_: Any) -> Any:
    return workflow.aggregate_fn(_nvflare_models(states, sizes)).params


def _nvflare(aggregator: Any, states: Sequence[dict], sizes: Sequence[int], *_: Any) -> Any:
    from nvflare.apis.dxo import from_shareable
    from nvflare.apis.event_type import EventType
    from nvflare.apis.fl_constant import ReservedKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.app_common.app_constant import AppConstants
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils

    server, context = deepcopy(aggregator), FLContext()
    context.set_prop(AppConstants.CURRENT_ROUND, 0)
    server.handle_event(EventType.START_RUN, context)
    for model in _nvflare_models(states, sizes):
        shareable = FLModelUtils.to_shareable(model)
        shareable.set_peer_props({ReservedKey.IDENTITY_NAME: model.meta["client_name"]})
        shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, 0)
        if not server.accept(shareable, context):
            raise ValueError(f"it did not accept the model of {model.meta['client_name']}")
    return from_shareable(server.aggregate(context)).data


def _appfl(aggregator: Any, states: Sequence[dict], sizes: Sequence[int], *_: Any) -> Any:
    server = deepcopy(aggregator)
    for client, size in enumerate(sizes):
        server.set_client_sample_size(client, size)
    return server.aggregate(dict(enumerate(states)))


#: an attribute that only a server of this kind has -> how it is called
_STEPS: dict[str, Callable[..., Any]] = {
    "aggregate_train": _flower,
    "aggregate_fn": _nvflare_workflow,
    "accept": _nvflare,
    "set_client_sample_size": _appfl,
}
