"""The files of ``federate.save_to``, which ``federate.restore_from`` reads.

They have the framework's form, a dict of ``cur_round`` and ``model`` that ``torch.save`` writes, and entries of ours
beside these. One of them is a digest: torch does not compare the checksums that it writes, so that without it a bit
that was flipped on the disk would be trained on. A file of the framework, or of a version before 0.2.0, has none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ...algebra import digest
from ...errors import UserError
from ...jobs.files import cannot_write, replacing
from ...models.adapters import load_tensors
from ...rounds.evaluator import Evaluator
from ...rounds.ledger import Ledger
from ...rounds.site import Site

#: entries that are tensors by name; the first is in every file
_PARTS = ("model", "state", "base")
_EXPECTED = "expected what federate.save_to writes"


def _digest(content: Mapping[str, Any]) -> str:
    """SHA-256 over the entries of ``content`` that are read."""
    tensors: dict[str, Tensor] = {}
    plain = [(name, content.get(name)) for name in ("cur_round", "method")]
    for name in _PARTS:
        for own, value in sorted(content.get(name, {}).items()):
            if isinstance(value, Tensor):
                tensors[f"{name}/{own}"] = value
            else:
                plain.append((f"{name}/{own}", value))
    return digest(tensors, repr(plain))


def write(path: str, content: Mapping[str, Any]) -> None:
    """Write ``content``, with its digest, to the file at ``path``, whose folder is created.

    Raises:
        RunFailed: it cannot be written, for instance on a full disk; the file of before is unchanged.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    try:
        if target.exists() and not target.is_file():
            raise OSError("it is there already and is not a file")
        with replacing(target) as aside, aside.open("wb") as file:
            torch.save({**content, "digest": _digest(content)}, file)
            file.flush()
    except (OSError, RuntimeError) as error:
        raise cannot_write(path, _of_the_disk(error)) from error


def _of_the_disk(error: Exception) -> Exception:
    """The ``OSError`` behind ``error``: torch reports a failed write as a RuntimeError about positions."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def read(path: str, device: torch.device | str) -> dict[str, Any]:
    """The content of the file at ``path``, with its tensors on ``device``; only tensors and plain values are read.

    Returns:
        ``cur_round``, the number of completed rounds; ``model``, tensors by name; and of a file of ours ``method``, the
        method's name; ``state``, tensors and numbers by name; ``base``, changed weights of the base by name.

    Raises:
        UserError: there is no such file, or it is damaged, or was not written by ``federate.save_to``.
    """
    if not os.path.exists(path):
        raise UserError(f"federate.restore_from: there is no file {path}")
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # of a damaged file torch lets through whatever its bytes lead to
        raise UserError(f"federate.restore_from: cannot read {path}: {_reason(error)}; restore the file") from error
    wrong = _wrong(content)
    if wrong:
        raise UserError(f"federate.restore_from: {path}: {wrong}; restore the file, or start without it")
    # The framework writes -1 if it was not told the round.
    content = {**content, "cur_round": max(content["cur_round"], 0)}
    content.pop("digest", None)
    return content


def _reason(error: Exception) -> str:
    """One line; torch's own on pickled objects are many, and advise to load them all the same."""
    if isinstance(error, UnpicklingError):
        return "it holds other things than tensors and plain values, or is damaged"
    said = (getattr(error, "strerror", None) or str(error)).strip()
    return f"{said.splitlines()[0][:200] if said else 'it is damaged'} ({type(error).__name__})"


def _wrong(content: Any) -> str:
    """What is wrong with the content of a file, in words; empty if nothing is."""
    if not isinstance(content, dict):
        return f"it holds {_shown(content)}, {_EXPECTED}: a dict with cur_round and model"
    for name in ("cur_round", "model"):
        if name not in content:
            return f"it has no {name} (it has {', '.join(map(str, list(content)[:6])) or 'nothing'}), {_EXPECTED}"
    done = content["cur_round"]
    if not isinstance(done, int) or isinstance(done, bool) or done < -1:
        return f"cur_round is {_shown(done)}, expected the number of completed rounds"
    for name in _PARTS:
        part = content.get(name, {})
        if not isinstance(part, dict):
            return f"{name} is {_shown(part)}, expected a dict of tensors by name"
        for own, value in part.items():
            number = name == "state" and isinstance(value, (int, float, str, list, tuple, dict, type(None)))
            if not isinstance(own, str) or not (isinstance(value, Tensor) or number):
                return f"{name} has {_shown(value)} for {_shown(own)}, expected tensors by name"
    if "digest" in content and content["digest"] != _digest(content):
        return "it is damaged: its digest does not match"
    return ""


def _shown(value: Any) -> str:
    """``value`` for a message: its type, and what it is if that is short."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    kind, text = type(value).__name__, repr(value) if isinstance(value, (str, int, float, bool, type(None))) else ""
    return f"{kind} {text}" if text and len(text) <= 60 else f"a value of type {kind}"


# -- a run ---------------------------------------------------------------------------------------------


def save_state(path: str, site: Site, ledger: Ledger, cur_round: int) -> None:
    """Write the shared tensors, by the names of the framework's adapters, and the rest of the method's state."""
    write(
        path,
        {
            "cur_round": cur_round,
            "method": site.method.name,
            "model": {n: t.detach().cpu() for n, t in site.method.view(ledger.state).items()},
            "state": {n: v.detach().cpu() if isinstance(v, Tensor) else v for n, v in ledger.state.items()},
            "base": {n: p.cpu() for n, p in site.changed_base().items()},
        },
    )


def load_state(path: str, site: Site, ledger: Ledger) -> int:
    """Restore the state from the file at ``path``; returns the number of completed rounds.

    Raises:
        UserError: there is no such file, it is damaged, or it is of another method or model.
    """
    content, method = read(path, site.device), site.method
    then, base, of = content["model"], content.get("base", {}), content.get("method", method.name)
    if of != method.name:
        raise UserError(f"federate.restore_from: {path} is of method {str(of)[:60]!r}, this run's is {method.name!r}")
    # A file that the framework itself has written has only the tensors.
    state = dict(content.get("state") or {**ledger.state, **then})
    bad = _differing(method.view(ledger.state), then)
    try:
        bad = bad or _differing(method.view(state), then)
    except KeyError as error:
        bad = [str(error.args[0])]
    if bad:
        raise UserError(
            f"federate.restore_from: {path} does not fit this method and model: {bad[0]!r} differs ({len(bad)} tensors "
            "in all)"
        )
    numbers = {n: v for n, v in state.items() if not isinstance(v, Tensor)}
    try:
        load_tensors(site.model, base)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"federate.restore_from: {path} has changed weights of another base: {error.args[0]}; use the model.type "
            "of the run that saved it"
        ) from error
    tensors = {n: v for n, v in state.items() if n not in numbers}
    done: int = content["cur_round"]
    ledger.restore(done, {"state": tensors}, {"numbers": numbers, "synced": {}, "outbox": {}})
    load_tensors(site.model, method.view(ledger.state))
    return done


def _differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that are not in both, or have other shapes."""
    return sorted(
        n for n in one.keys() | other.keys() if n not in one or n not in other or one[n].shape != other[n].shape
    )


def is_best(evaluator: Evaluator, metrics: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether ``metrics`` are better than those of all records in ``history``, by the key of the best result."""
    now = evaluator.key_value({"metrics": metrics})
    before = [evaluator.key_value(r) for r in history if r["metrics"]]
    return now is not None and all(value is None or now < value for value in before)
