"""The files of ``federate.save_to``, which ``federate.restore_from`` reads.

They have the framework's form, a dict of ``cur_round`` and ``model`` that ``torch.save`` writes, and entries of ours
beside these.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import torch
from federatedscope.core.auxiliaries.utils import add_prefix_to_path
from torch import Tensor

from ...callbacks import Callback
from ...errors import UserError
from ...jobs.files import write_bytes
from ...models.adapters import load_tensors
from ...rounds.evaluator import best_record
from ...rounds.ledger import Ledger
from ...rounds.recorder import Recorder
from ...rounds.workspace import Workspace
from ...runs.result import RunResult


def write(path: str, content: Mapping[str, Any]) -> None:
    """Write ``content`` to the file at ``path``, whose folder is created.

    Raises:
        RunFailed: it cannot be written, for instance on a full disk; the file of before is unchanged.
    """
    data = io.BytesIO()
    torch.save(dict(content), data)
    write_bytes(path, data.getvalue())


def read(path: str, device: torch.device | str) -> dict[str, Any]:
    """The content of the file at ``path``, with its tensors on ``device``; only tensors and plain values are read.

    Returns:
        ``cur_round``, the number of completed rounds; ``model``, tensors by name; and of a file of ours ``method``, the
        method's name; ``state``, tensors and numbers by name; ``base``, changed weights of the base by name.

    Raises:
        ValueError: it is damaged. Others, by what its bytes lead to: it was not written by ``federate.save_to``.
    """
    with zipfile.ZipFile(path) as archive:  # torch compares no checksums, and reads nothing of what is marked a folder
        if damaged := archive.testzip() or next((i.filename for i in archive.infolist() if i.external_attr), ""):
            raise ValueError(f"it is damaged: {damaged} has another checksum, or other attributes")
    try:
        content: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except UnpicklingError:  # torch advises to load such a file all the same
        raise ValueError("it holds other things than tensors and plain values") from None
    content["cur_round"] = max(int(content["cur_round"]), 0)  # the framework writes -1 if it was not told the round
    return content


# -- a run ---------------------------------------------------------------------------------------------


class SavedModels(Callback):
    """Saves the global state after the best round so far, after each ``save_freq`` rounds and at the end, and
    starts from such a file.

    Args:
        federate: the framework's section.
    """

    def __init__(self, federate: Any):
        self.federate = federate

    def on_start(self, run: Recorder) -> None:
        if not self.federate.restore_from or run.history:
            return
        load_state(self.federate.restore_from, run.workspace, run.ledger)
        last = self.federate.total_round_num
        if run.ledger.stood >= last:
            raise UserError(f"all {last} rounds are done already; raise federate.total_round_num to go on")

    def after_round(self, run: Recorder, record: dict[str, Any]) -> None:
        file, freq, number = self.federate.save_to, self.federate.save_freq, record["round"]
        if file and best_record([*run.history, record], *run.config.watched) is record:
            save_state(file, run.workspace, run.ledger, number)
        if file and freq > 0 and number % freq == 0 and number < self.federate.total_round_num:
            save_state(add_prefix_to_path(f"{number}_", file), run.workspace, run.ledger, number)

    def on_end(self, run: Recorder, result: RunResult) -> None:
        if file := self.federate.save_to:  # the run may have ended early
            save_state(add_prefix_to_path("final_", file), run.workspace, run.ledger, run.ledger.stood)


def save_state(path: str, workspace: Workspace, ledger: Ledger, cur_round: int) -> None:
    """Write the shared tensors, by the names of the framework's adapters, and the rest of the method's state."""
    write(
        path,
        {
            "cur_round": cur_round,
            "method": workspace.method.name,
            "model": {n: t.detach().cpu() for n, t in workspace.method.view(ledger.state).items()},
            "state": {n: v.detach().cpu() if isinstance(v, Tensor) else v for n, v in ledger.state.items()},
            "base": {n: p.cpu() for n, p in workspace.changed_base().items()},
        },
    )


def load_state(path: str, workspace: Workspace, ledger: Ledger) -> None:
    """Restore the state from the file at ``path``.

    Raises:
        UserError: there is no such file, it is damaged, or it is of another method or model.
    """
    method = workspace.method
    try:
        content = read(path, workspace.device)
        if (name := content.get("method", method.name)) != method.name:
            raise ValueError(f"it is of method {str(name)[:60]!r}, this run's is {method.name!r}")
        # A file that the framework itself has written has only the tensors.
        state = dict(content.get("state") or {**ledger.state, **content["model"]})
        expected, actual = ({n: t.shape for n, t in method.view(s).items()} for s in (ledger.state, state))
        if differing := sorted(dict(expected.items() ^ actual.items())):
            raise ValueError(f"{differing[0]} differs ({len(differing)} tensors in all)")
        load_tensors(workspace.model, content.get("base", {}))
    except Exception as error:  # of any class: of a damaged file torch raises whatever its bytes lead to
        reason = (str(error).splitlines() or [""])[0][:200]
        raise UserError(
            f"federate.restore_from: cannot restore {path} ({type(error).__name__}: {reason}); expected what "
            "federate.save_to writes, a dict of cur_round and model, of a run with this method and model"
        ) from error
    tensors = {n: v for n, v in state.items() if isinstance(v, Tensor)}
    numbers = {n: v for n, v in state.items() if n not in tensors}
    round = content["cur_round"]  # every client's copy is older
    ledger.restore(round, {"state": tensors}, {"numbers": numbers, "synced": {}, "outbox": {}, "horizon": round})
    load_tensors(workspace.model, method.view(ledger.state))
