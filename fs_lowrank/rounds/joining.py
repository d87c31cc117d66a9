"""Comparisons of a client's process with the server's, and of a run with the process that continues it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..algebra import digest
from ..config import Config, load_config
from ..data.tokenize import tokenizer_fingerprint
from ..errors import CannotContinue, UserError
from ..methods import Method, revisions
from ..runs.environment import versions
from .admission import Admission, is_whole
from .ledger import Standing
from .workspace import Workspace

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
#: the most differing keys that a message names
_NAMED = 20
#: keys that say where data and model are, whose contents are compared
_PLACES = ("data.type", "data.root", "model.type", "lowrank.weights")


def proof_of(workspace: Workspace) -> dict[str, str]:
    """Hashes that must be equal in all processes at the start: of the frozen model, of its configuration and its
    tokenizer, and of every shared tensor.
    """
    shared = workspace.method.view(workspace.initial_state)
    return {
        "the base model": workspace.base_fingerprint,
        **({"the configuration of the base model": workspace.configured} if workspace.configured else {}),
        **({"the tokenizer": tokenizer_fingerprint(workspace.tokenizer)} if workspace.tokenizer is not None else {}),
        **{name: digest({name: tensor})[:16] for name, tensor in shared.items()},
    }


def reported_standing(facts: Mapping[str, Any]) -> Standing:
    """Where a client's copy is, by its facts; at round 0 if it does not say so in the agreed form."""
    match facts.get("standing"):
        case [int(round), str(stamp)]:
            return Standing(round, stamp)
    return Standing()


def agreed(config: Config, proof: Mapping[str, str]) -> str:
    """A hash of the values that ``objection`` compares: a process with another one has to introduce itself again."""
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
        theirs, their_revisions, their_proof: the decisive keys of the process's configuration (``Settings.decisive``),
            its revisions and its ``proof_of``.
        own_data: its data are its own, so its data keys may differ.
    """
    decisive, free = config.decisive(), ("distribute.", *(_DATA_KEYS if own_data else ()))
    if keys := differing(theirs, decisive, free):
        named = ", ".join(key if key in decisive else repr(key)[:60] for key in keys[:_NAMED])
        suffix = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        return f"it was started with another configuration than the server; they differ in {named}{suffix}"
    server = revisions(config)
    for name in differing(their_revisions, server):
        return (
            f"it has revision {their_revisions.get(name, 1)} of {name}, the server has revision {server.get(name, 1)}, "
            "which computes another result; install the same version of fs-lowrank on both"
        )
    if mismatches := differing(their_proof, proof):
        return (
            f"its model is not the server's at the start: {mismatches[0]} differs"
            + (f", and {len(mismatches) - 1} more" if len(mismatches) > 1 else "")
            + "; the same seed, model files and versions of torch, transformers and peft give the same"
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


def differing(first: Mapping[str, Any], second: Mapping[str, Any], free: tuple[str, ...] = ()) -> list[str]:
    """The names whose values differ, but for those that begin with one of ``free``."""
    return sorted(k for k in first.keys() | second.keys() if first.get(k) != second.get(k) and not k.startswith(free))


# -- a run that is continued ---------------------------------------------------------------------------


def begun_with(workspace: Workspace) -> dict[str, Any]:
    """The entries of a checkpoint that ``check_continued`` compares. ``read`` is of the files beside the weights, as
    this version of transformers reads them.
    """
    files = {} if workspace.tokenizer is None else {"tokenizer": tokenizer_fingerprint(workspace.tokenizer, saved=True)}
    return {
        "config": workspace.config.to_dict(),
        "revisions": revisions(workspace.config),
        "data": workspace.data.fingerprint,
        "model": workspace.base_fingerprint,
        "read": {"by": versions()["transformers"], "configuration of the model": workspace.configured, **files},
    }


def check_continued(meta: Mapping[str, Any], workspace: Workspace, outdir: Path) -> None:
    """Compare the metadata of the checkpoint in ``outdir`` with ``workspace``, which is to continue its run.

    Raises:
        CannotContinue: it is of other data, another model, configuration, or revision of the method.
    """
    current, read = begun_with(workspace), meta.get("read", {})
    pairs = [(subject, meta[subject], current[subject]) for subject in ("data", "model")]
    if read.get("by") == current["read"]["by"]:
        pairs += [(subject, read.get(subject), value) for subject, value in current["read"].items()]
    pairs = [pair for pair in pairs if pair[:2] != ("configuration of the model", workspace.labelled)]
    for subject, saved, value in pairs:
        if saved != value:
            raise CannotContinue(
                f"the {subject} is not what the run in {outdir} started with; it cannot be continued with another"
            )
    check_configuration(meta["config"], workspace.config, workspace.method, outdir)
    old, new = meta.get("revisions", {}), current["revisions"]
    for name in differing(old, new):
        raise CannotContinue(
            f"the run in {outdir} was begun with revision {old.get(name, 1)} of {name}, and this version of "
            f"fs-lowrank has revision {new.get(name, 1)}, which computes something else from the same configuration "
            "(see CHANGELOG.md); start again in another outdir, or continue it with the version that began it"
        )


def check_configuration(begun: Mapping[str, Any], config: Config, method: Method, outdir: Path) -> None:
    """Raise ``CannotContinue`` if a run ``begun`` with another configuration cannot be continued with ``config``."""
    try:
        saved, current = load_config(begun).decisive(), config.decisive()
    except UserError as error:
        raise CannotContinue(f"the configuration of the run in {outdir} cannot be read: {error}") from error
    # These may change; otherwise a run could never get past a round that failed.
    free: tuple[str, ...] = ("lowrank.min_clients", "lowrank.on_bad_round", "lowrank.max_update_norm")
    schedule = config.train.scheduler
    if not (method.needs.rounds or schedule.type or schedule.warmup_ratio):
        free += ("federate.total_round_num",)
    keys = differing(saved, current, free)
    if changed := [key for key in keys if _kind(key, saved.get(key)) != _kind(key, current.get(key))]:
        raise CannotContinue(
            f"the run in {outdir} was started with another {', '.join(changed)}; "
            "continue it with its own config.yaml, or choose another outdir"
        )


def _kind(key: str, value: Any) -> Any:
    """The value of a key without places: of a model its library, of ``data.args`` all but files."""
    if key == "data.args":
        return [{name: v for name, v in entry.items() if name not in ("test", "validation")} for entry in value or []]
    if key == "model.type":
        return value.rpartition("@")[2]
    return "" if key in _PLACES else value
