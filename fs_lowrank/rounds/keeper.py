"""What a run leaves in its folder, kept while it goes: records, checkpoints, and at its end what was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
from filelock import FileLock
from torch import Tensor

from ..algebra import nbytes
from ..config import Config, load_config
from ..errors import RunFailed, UserError
from ..jobs.files import write_text
from ..jobs.locks import take
from ..methods import revisions
from ..models.adapters import adapter_name, load_tensors, save_adapter
from ..models.names import tags
from ..runs.card import model_card
from ..runs.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ..runs.environment import environment
from ..runs.plots import plot_curves
from ..runs.records import Records, read_records
from ..runs.result import RunResult
from ..versions import SCHEMA
from .evaluator import Evaluator
from .intake import TooFewClients
from .ledger import Ledger
from .record import Failure
from .round import BadRound
from .site import Site


def outdir_of(config: Config) -> Path:
    """The folder that a run writes into."""
    return Path(config.outdir) / config.expname


def check_outdir(config: Config, resume: bool) -> None:
    """Whether a run may begin in its folder; worth asking before data and model are made.

    Raises:
        UserError: another run's results are there and this one does not continue it, or cannot.
    """
    folder = outdir_of(config)
    records = folder / "rounds.jsonl"
    checkpoint, finished = (folder / "checkpoint").exists(), (folder / "summary.json").exists()
    if not resume and (checkpoint or finished or (records.exists() and records.stat().st_size)):
        raise UserError(f"{folder} holds a run already; continue it with --resume, or choose another outdir")
    if resume and finished and not checkpoint:
        raise UserError(
            f"{folder} holds a finished run that kept no checkpoint (lowrank.checkpoint_freq 0), so there "
            "is nothing to continue; choose another outdir"
        )


class RecordKeeper:
    """Keeps the folder of one run.

    Args:
        site: of the process that keeps it.
        evaluator: of the process that keeps it.
        ledger: whose state is saved and restored.
        outdir: the folder. config_name: the file in it that the resolved configuration is written to.
    """

    def __init__(
        self, site: Site, evaluator: Evaluator, ledger: Ledger, outdir: Path, config_name: str = "config.yaml"
    ):
        self.site, self.evaluator, self.ledger = site, evaluator, ledger
        self.config, self.method = site.config, site.method
        self.outdir, self.config_name = outdir, config_name
        self._lock: FileLock | None = None
        self._records: Records | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of the rounds that are done."""
        return self._records.history if self._records else []

    def add(self, record: dict[str, Any]) -> None:
        """Write the record of a round, and a checkpoint where one is due."""
        if self._records is None:
            raise RuntimeError(f"round {record['round']} cannot be recorded before start() has opened {self.outdir}")
        self._records.add(record)
        if self.checkpoint_due(record["round"]):
            self.save(record["round"])

    def stopped(self, round: int, error: TooFewClients | BadRound, failed: list[Failure]) -> RunFailed:
        """What to raise where ``round`` cannot be finished; the last good round is on the disk by then.

        Args:
            error: why; its ``remedy`` is what the user can do.
            failed: the clients that failed, as in the record.
        """
        if round > 1 and not self.checkpoint_due(round - 1):
            self.save(round - 1)
        kept = (
            f"the last good round, {round - 1}, is in {self.outdir / 'checkpoint'}; continue with --resume, "
            f"and {error.remedy}"
            if round > 1
            else f"no round was completed; start again, and {error.remedy}"
        )
        return RunFailed(f"{error} ({'; '.join(f['reason'] for f in failed[:3]) or 'nobody failed'}); {kept}")

    def claim(self) -> None:
        """Hold the folder until ``release``, or until this process ends, however it does.

        Raises:
            RunFailed: another run writes into it.
        """
        self._lock = take(self.outdir / ".lock")
        if self._lock is None:
            raise RunFailed(f"another run is writing into {self.outdir}; wait for it, or choose another outdir")

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def start(self, resume: bool) -> Checkpoint | None:
        self.claim()
        check_outdir(self.config, resume)
        records = self.outdir / "rounds.jsonl"
        checkpoint = load_checkpoint(self.outdir / "checkpoint") if resume else None
        history = []
        if checkpoint:
            self.restore(checkpoint)
            history = read_records(records, up_to=checkpoint.round)
            if [record["round"] for record in history] != list(range(1, checkpoint.round + 1)):
                raise UserError(
                    f"{records} does not hold the rounds 1 to {checkpoint.round} once each; something else "
                    "wrote into it, so the run cannot be continued; start again in another outdir"
                )
        self._records = Records(records, history)
        self.config.dump(self.outdir / self.config_name)
        about = {"schema": SCHEMA, **environment(), "new_weights": self.site.new_weights}
        write_text(self.outdir / "environment.json", json.dumps(about, indent=1))
        data = {"schema": SCHEMA, **self.site.data.record()}
        write_text(self.outdir / "data.json", json.dumps(data, separators=(",", ":")))
        return checkpoint

    def checkpoint_due(self, round: int) -> bool:
        freq = self.config.lowrank.checkpoint_freq
        return freq > 0 and (round % freq == 0 or round == self.config.federate.total_round_num)

    def save(self, round: int) -> None:
        changed = set(self.method.changed_base(self.site.model))
        parts, known = self.ledger.saved(round)
        parts |= {
            "base": {n: p for n, p in self.site.model.named_parameters() if n in changed},
            "personal": {f"{c}/{n}": t for c, own in self.site.personal.items() for n, t in own.items()},
        }
        save_checkpoint(
            self.outdir / "checkpoint",
            round,
            {n: p for n, p in parts.items() if p},
            {
                **known,
                "config": self.config.to_dict(),
                "revisions": revisions(self.config),
                "data": self.site.data.fingerprint,
                "model": self.site.base_fingerprint,
            },
            keep=self.config.lowrank.keep_checkpoints,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        for what, now in (("data", self.site.data.fingerprint), ("model", self.site.base_fingerprint)):
            if checkpoint.meta[what] != now:
                raise UserError(
                    f"the {what} is not what the run in {self.outdir} started with; it cannot be continued with another"
                )
        self._check_same_run(checkpoint.meta["config"])
        self._check_revisions(checkpoint.meta.get("revisions", {}))

        def to(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {n: t.to(self.site.device) for n, t in tensors.items()}

        self.ledger.restore(checkpoint.round, checkpoint.parts, checkpoint.meta, self.site.device)
        for key, tensor in to(checkpoint.parts.get("personal", {})).items():
            client, name = key.split("/", 1)
            self.site.personal.setdefault(int(client), {})[name] = tensor
        load_tensors(self.site.model, to(checkpoint.parts.get("base", {})))
        load_tensors(self.site.model, self.method.view(self.ledger.state))

    def _check_same_run(self, begun: Mapping[str, Any]) -> None:
        then, now = load_config(begun).decisive(), self.config.decisive()
        if not (self.method.needs.rounds or self.config.train.scheduler.type):
            then["federate.total_round_num"] = now["federate.total_round_num"]
        # Else a round that too few clients finished, or that failed at the server, could never be got past.
        free = {"lowrank.min_clients", "lowrank.on_bad_round"}
        free |= {"lowrank.max_update_norm", "lowrank.max_update_norm_factor"}
        differing = sorted(key for key in (then.keys() | now.keys()) - free if then.get(key) != now.get(key))
        if differing:
            raise UserError(
                f"the run in {self.outdir} was started with another {', '.join(differing)}; "
                "continue it with its own config.yaml, or choose another outdir"
            )

    def _check_revisions(self, then: dict[str, int]) -> None:
        now = revisions(self.config)
        for name in sorted(then.keys() | now.keys()):
            if then.get(name, 1) != now.get(name, 1):
                raise UserError(
                    f"the run in {self.outdir} was begun with revision {then.get(name, 1)} of {name}, and this version "
                    f"of fs-lowrank has revision {now.get(name, 1)}, which computes something else from the same "
                    "configuration (see CHANGELOG.md); start again in another outdir, or continue it with the "
                    "version that began it"
                )

    def _formula_bytes(self) -> int:
        """The papers' estimate of all traffic, ``2 · K · C · P · bytes · rounds``: what a client sends, both ways.

        ``P`` is of each round, since what is sent may alternate. It leaves out that round 1 sends nothing down, what a
        late client needs more, and ranks that differ.
        """
        state = self.ledger.state
        sent = sum(nbytes(self.method.expected(state, record["round"], 1)) for record in self.history)
        return 2 * self.config.sampled_per_round * sent

    def _save_personal(self) -> Path:
        """Every client's own adapter, in PEFT's format, in a folder of its number."""
        folder, model = self.outdir / "personal", self.site.model
        if not isinstance(model, peft.PeftModel):
            raise TypeError(
                f"the clients' own adapters are saved from a PeftModel, the model is {type(model).__name__}"
            )
        for client in self.site.personal:
            self.site.load_client(self.ledger.state, client)
            for name in {adapter_name(n) for n in self.site.personal[client]}:
                save_adapter(
                    folder / f"client_{client}",
                    model.peft_config[name],
                    peft.get_peft_model_state_dict(model, adapter_name=name),
                )
        self.site.load_global(self.ledger.state)
        return folder

    def finish(self) -> RunResult:
        history = self.history
        last: dict[str, dict[str, float]] = next((r["metrics"] for r in reversed(history) if r["metrics"]), {})
        final = {f"{split}_{name}": v for split, values in last.items() for name, v in values.items()}
        for metric in {m for m in final if m.endswith("_acc")}:
            split = metric.removesuffix("_acc")
            final[f"{metric}_last5"] = float(
                np.mean([r["metrics"][split]["acc"] for r in history if split in r["metrics"]][-5:])
            )
        values = {r["round"]: self.evaluator.key_value(r) for r in history if r["metrics"]}
        ranked = {round: value for round, value in values.items() if value is not None}
        if ranked:
            final["best_round"] = min(ranked, key=ranked.__getitem__)
        result = RunResult(
            history=history,
            final=final,
            outdir=self.outdir,
            model=self.site.model,
            base_changed="base" in self.method.shared
            or any("base" in tags(n) for n in self.method.changed_base(self.site.model)),
            facts={
                "method": self.method.name,
                "source": self.site.data.source,
                "data": self.site.data.fingerprint,
                "model": self.site.base_fingerprint,
                "config": self.config.fingerprint(),
                "clients": [c.num_samples for c in self.site.clients],
                "majority": self.site.data.majority,
                "parameters": self.site.parameters,
                "images": self.site.data.image_shape,
                "labels": self.site.data.label_names,
                "formula_bytes": self._formula_bytes(),
            },
        )
        if not result.base_changed:
            result.saved["adapter"] = result.save_adapter(self.outdir / "adapter")
        if result.base_changed or self.config.lowrank.save_merged:
            result.saved["model"] = result.save_model(self.outdir / "model")
        if self.site.personal:
            result.saved["personal"] = self._save_personal()
        for folder in (result.saved[what] for what in ("adapter", "model") if what in result.saved):
            if self.site.tokenizer is not None:
                self.site.tokenizer.save_pretrained(str(folder))
            write_text(folder / "README.md", model_card(self.config, result.facts, final, folder.name))
        result.saved["curves"] = plot_curves(
            {self.method.name: history}, self.outdir / "curves.png", self.site.data.majority
        )
        summary = {
            "schema": SCHEMA,
            "final": final,
            "bytes": dict(result.bytes),
            **result.facts,
            "versions": environment()["versions"],
            "seed": self.config.seed,
        }
        write_text(self.outdir / "summary.json", json.dumps(summary, indent=1))
        return result
