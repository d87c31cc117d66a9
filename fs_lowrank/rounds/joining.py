"""Whether a client's process may take part in a run: what it must have in common with the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..algebra import digest
from ..config import Config, load_config
from ..data.tokenize import tokenizer_fingerprint
from ..errors import UserError
from ..methods import revisions
from ..settings import flatten
from .admission import Admission, is_whole
from .ledger import Standing
from .site import Site

#: the keys that say where data come from and how they are divided; a client with data of its own may set them freely
_DATA_KEYS = (
    "data.root",
    "data.type",
    "data.args",
    "data.splitter",
    "data.splitter_args",
    "data.splits",
    "data.subsample",
    "data.test_subsample",
)


def proof_of(site: Site) -> dict[str, str]:
    """What must be equal in all processes at the start: hashes of the frozen model, of its configuration and its
    tokenizer, and of every shared tensor.
    """
    shared = site.method.view(site.initial_state)
    return {
        "the base model": site.base_fingerprint,
        **({"the configuration of the base model": site.configured} if site.configured else {}),
        **({"the tokenizer": tokenizer_fingerprint(site.tokenizer)} if site.tokenizer is not None else {}),
        **{name: digest({name: tensor})[:16] for name, tensor in shared.items()},
    }


def reported_standing(facts: Mapping[str, Any]) -> Standing:
    """Where a client's copy is, by its facts; at round 0 if it does not say so in the agreed form."""
    match facts.get("standing"):
        case [int(round), str(stamp)]:
            return Standing(round, stamp)
    return Standing()


def agreed(config: Config, proof: Mapping[str, str]) -> str:
    """A hash of what ``objection`` compares: a process with another one is to be asked again what it has in common."""
    return digest({}, json.dumps([config.decisive(), revisions(config), proof], sort_keys=True, default=str))[:16]


def objection(
    config: Config,
    proof: Mapping[str, str],
    theirs: Mapping[str, Any],
    their_revisions: Mapping[str, int],
    their_proof: Mapping[str, str],
    own_data: bool = False,
) -> str:
    """The reason why a process cannot take part in the run of ``config``; empty if it can.

    Args:
        proof: the server's ``proof_of``.
        theirs, their_revisions, their_proof: the process's configuration, revisions and ``proof_of``.
        own_data: its data are its own, so its data keys may differ.
    """
    try:
        if reason := _too_much(flatten(theirs), flatten(config.to_dict())):
            return reason
        keys = differing(load_config(theirs), config, own_data)
    except UserError as error:
        return f"its configuration is wrong: {error}"
    if keys:
        return f"it was started with another configuration than the server; they differ in {', '.join(keys)}"
    own = revisions(config)
    for name in sorted(own.keys() | their_revisions.keys()):
        if own.get(name, 1) != their_revisions.get(name, 1):
            return (
                f"it has revision {their_revisions.get(name, 1)} of {name}, the server has revision "
                f"{own.get(name, 1)}, which computes another result; install the same version of fs-lowrank on both"
            )
    wrong = sorted(n for n in proof.keys() | their_proof.keys() if proof.get(n) != their_proof.get(n))
    if wrong:
        return (
            f"its model is not the server's at the start: {wrong[0]} differs"
            + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
            + "; the same seed, model files and versions of torch, transformers and peft give the same"
        )
    return ""


def _too_much(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Why a stranger's configuration is not even read: it would take memory without bound, or name a file here."""
    for name in ("federate.client_num", "lowrank.clients"):
        given, wanted = theirs.get(name), own.get(name)
        if given != wanted and not (name == "lowrank.clients" and isinstance(given, list)):
            return (
                f"it was started with another configuration than the server; they differ in {name}: "
                f"{repr(given)[:60]}, expected {repr(wanted)[:60]}"
            )
    return ""


def samples_objection(client: int, samples: object, admission: Admission, own_data: bool, elsewhere: str) -> str:
    """The reason why the training samples that a process declares for ``client`` are not believed; empty if they are.

    Args:
        elsewhere: how a process says that its data are its own.
    """
    if not is_whole(samples) or not 1 <= samples <= admission.max_samples:
        return (
            f"it declares {repr(samples)[:60]} training samples; expected a whole number from 1 to "
            f"lowrank.max_samples, {admission.max_samples}"
        )
    if not own_data and samples != admission.declared(client):
        return (
            f"it declares {samples} training samples, and the server's division of the data gives client {client} "
            f"{admission.declared(client)}; their data files differ ({elsewhere} is for data of its own)"
        )
    return ""


def differing(theirs: Config, mine: Config, own_data: bool = False) -> list[str]:
    """The dotted keys that affect the result and in which two processes of one run differ.

    Args:
        own_data: one of them is a client with data of its own, whose data keys may differ.
    """
    a, b = theirs.decisive(), mine.decisive()
    free = ("distribute.", *(_DATA_KEYS if own_data else ()))
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k) and not k.startswith(free))
