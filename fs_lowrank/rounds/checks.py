"""Checks of a configuration against the data and the model of a process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..config import Config
from ..data import CLASSIFICATION, FederatedData, RawData
from ..data.user_data import LABELS
from ..errors import UserError, nearest, say_once
from ..methods import Method, Phase, State
from ..models.names import HEAD_MODULES, TAGS, all_tensors, is_head, named_tensors, select, tags
from ..settings import Data, Eval
from ..settings.metrics import LANGUAGE
from ..settings.origin import show
from ..training.local import steps_taken
from .personal import PersonalParts

#: name in ``eval.split`` -> attribute of the data
SPLITS = {"test": "test", "val": "validation"}
#: by task of labelled text, the contents of such data, and what to take for them
_TASKS = {
    "classification": ("classes to predict", "model.task SequenceClassification"),
    "regression": ("numbers to predict", "model.task SequenceRegression"),
    "multi_label": ("sets of classes to predict", "model.task MultiLabelClassification"),
}


def check_task(config: Config, raw: RawData) -> None:
    """Raise ``UserError`` unless the data have what the model needs: images, text with labels, or text with answers."""
    model, data = config.model, config.data.type
    if (raw.images is not None) != config.is_vision:
        raise UserError(
            f"model.type = {model.type} takes {'images' if config.is_vision else 'text'}, but "
            f"data.type = {data} holds {'text' if config.is_vision else 'images'}"
        )
    labelled = model.task not in LANGUAGE
    kind, advice = "labels and no answers", "NAME@transformers, or data with instruction and output"
    if config.is_vision or labelled and raw.task == LABELS.get(model.task, CLASSIFICATION):
        return
    if raw.task not in _TASKS:
        if not labelled:
            return
        kind, advice = "answers and no labels", "NAME@huggingface_llm, or name the columns text and label in data.args"
    elif labelled:
        kind, advice = _TASKS[raw.task]
    raise UserError(
        f"model.type = {model.type} is for model.task {model.task}, but data.type = {data} has {kind}; take {advice}"
    )


def check_head(config: Config, model: nn.Module, heads: Sequence[str]) -> None:
    """Raise ``UserError`` unless ``model`` has a head that ``lowrank.train_head`` False leaves as it is, all of it.

    A message says once if a classifier with an adapter has no head.

    Args:
        model: with the method's parts on it. heads: see ``names.is_head``.
    """
    tagged = named_tensors(model, ("head",))
    untagged = [n for n, _ in model.named_parameters() if n not in tagged and is_head(n, heads)]
    if untagged and not config.lowrank.train_head:  # methods know what they train by its tags
        raise UserError(
            f"lowrank.train_head = False without an adapter would train {untagged[0]}, which is of the head; take an "
            "adapter, or leave the key out"
        )
    if not tagged and not config.lowrank.train_head:
        raise UserError("lowrank.train_head = False: the model has no head that could be left as it is")
    if not tagged and config.llm.adapter.use and not config.is_language:
        say_once(
            f"model.type = {config.model.type}: no head is trained beside the adapter, because no module at its top is "
            f"called {', '.join(HEAD_MODULES)}, and no other one can be the head. Call it classifier, or name it in "
            "modules_to_save (llm.adapter.args)"
        )


def say_turns(config: Config, method: Method, sizes: np.ndarray) -> None:
    """Say which half is never trained, if no client takes as many steps as there are halves that train by turns.

    Args:
        sizes: number of samples of each client.
    """
    for phase in method.phases(1, int(sizes.argmax()) + 1):
        if idle := phase.turns[max(steps_taken(int(sizes.max()), [phase], variant) for variant in config.variants()) :]:
            say_once(
                f"federate.method = {config.federate.method} trains {' and '.join(phase.turns)} by turns, a step each: "
                f"{' and '.join(idle)} is never trained; give train.local_update_steps at least {len(phase.turns)}"
            )


def check_splits(config: Config, data: FederatedData) -> None:
    """Raise ``UserError`` unless there are data for all requested evaluations."""
    if not data.cut and config.data.splits != Data().splits:
        say_once(
            f"data.splits = {config.data.splits} has no effect: the data have validation and test rows of their own"
        )
    available = {split for split, name in SPLITS.items() if getattr(data, name) is not None}
    reasons = []
    if data.test is None and not config.federate.make_global_eval:
        reasons.append("federate.make_global_eval = False evaluates every client on its share of the test set")
    if data.test is None and config.eval.client_scores:
        reasons.append("eval.client_scores = True evaluates the model of every client on its share of the test set")
    # The default is to evaluate the splits that exist.
    needed = {"test"} if set(config.eval.split) == set(Eval().split) else set(config.eval.split)
    reasons += [f"eval.split asks for {split!r}" for split in sorted(needed - available)]
    if reasons:
        raise UserError(
            f"{reasons[0]}, but none is held out; give data.splits a share for it (now {list(config.data.splits)}), or "
            "leave the key out"
        )


def of_one_client(config: Config) -> Config:
    """``config`` for a process whose data are all one client's.

    Raises:
        UserError: clients have lengths of texts of their own; the process reads its data before it has a number.
    """
    if any("tok_len" in keys for keys in config.client_settings.values()):
        raise UserError(
            "lowrank.clients gives clients a tok_len: a client with data of its own learns its number after it has "
            "read them; leave tok_len out"
        )
    single = {"federate.client_num": 1, "federate.sample_client_num": -1, "federate.sample_client_rate": -1.0}
    # The settings of single clients are found by the number that the server gives this one.
    return config.replace({**single, "lowrank.min_clients": 1, "lowrank.clients": []})


def check_tags(method: Method, model: nn.Module, state: State) -> None:
    """Refuse a tag in ``shared`` or ``personal`` of ``method`` that no tensor can have.

    Args:
        model: with the method's parts on it. state: before round 1.
    Raises:
        UserError: there is one. With a misspelt tag, tensors would be sent or stay with their client that should not.
    """
    for attribute in ("shared", "personal"):
        _check_tags(method, attribute, getattr(method, attribute), {*all_tensors(model), *state})


def trained_in(method: Method, client: int, rounds: int, model: nn.Module) -> set[str]:
    """The tags of the tensors that ``client`` trains in ``rounds`` rounds.

    Args:
        model: with the method's parts on it.
    Raises:
        UserError: ``phases`` gives no list of phases, a phase trains nothing, or no phase trains the client's personal
            tensors.
    """
    names, seen = all_tensors(model), set[tuple[str, ...]]()
    for round in range(1, rounds + 1):
        phases, call = method.phases(round, client), f"phases(round={round}, client={client})"
        if not isinstance(phases, list | tuple) or not phases or not all(isinstance(p, Phase) for p in phases):
            raise UserError(
                f"federate.method = {method.name}: {call} gave {show(phases)}, expected a list of one Phase or more"
            )
        for phase in phases:
            if phase.train in seen:
                continue
            seen.add(phase.train)
            _check_tags(method, call, phase.train, names)
            if not select(names, phase.train):
                raise UserError(
                    f"federate.method = {method.name}: {call} trains {', '.join(phase.train) or 'no tag'}, which no "
                    "tensor of this model has"
                )
    trained = {tag for train in seen for tag in train}
    private = [n for n in select(names, method.personal) if ":" not in n]
    if private and not {*private}.intersection(select(names, trained)):
        raise UserError(
            f"federate.method = {method.name}: {private[0]} stays with its client and is trained in no phase of client "
            f"{client}; let phases name {' or '.join(method.personal)}"
        )
    return trained


def _check_tags(method: Method, source: str, declared: Iterable[str], names: Collection[str]) -> None:
    valid = TAGS.union(*map(tags, names))
    for tag in declared:
        if tag not in valid:
            raise UserError(
                f"federate.method = {method.name}: {source} has the tag {tag!r}, which no tensor has"
                f"{nearest(tag, valid)}; the tags are {', '.join(sorted(valid))}"
            )


def check_personal(config: Config, method: Method, personal: PersonalParts) -> None:
    """Raise ``UserError`` if the clients' own pairs, ``personal``, would be saved beside a base that theirs changes."""
    if personal.kinds:
        say_once(
            f"{' and '.join(personal.kinds)} of the model stay with the clients: scores of the global model, such as "
            "test_acc, use their start values; client_test_acc scores the clients' own models"
        )
    if personal.of_model and (start := config.adapter.moves_base):
        raise UserError(
            f"llm.adapter.args: init_lora_weights = {start} changes the base, so the clients' own pairs of "
            f"{method.name} would fit no saved model; take gaussian"
        )


def say_half(config: Config, changing: State) -> None:
    """Say once if a tensor that a run changes is in bfloat16; adapters never are."""
    half = [n for n, t in changing.items() if isinstance(t, Tensor) and t.dtype == torch.bfloat16]
    if half:
        say_once(
            f"lowrank.dtype = {config.lowrank.dtype}: {len(half)} tensors that the run changes beside the adapter are "
            f"in bfloat16 ({half[0]}, ...). A step of less than a 256th of a weight is lost there"
        )
