"""The folder of a run: its records and checkpoints while it runs, and at its end the trained model and the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
from filelock import FileLock
from safetensors import SafetensorError

from ..algebra import nbytes
from ..config import load_config
from ..errors import RunFailed, UserError
from ..jobs.files import cannot_write, remove_unfinished, replacing, to_json, write_text
from ..jobs.locks import take
from ..methods import revisions
from ..models.adapters import adapter_name, load_tensors, save_adapter
from ..models.names import tags
from ..runs.card import model_card
from ..runs.checkpoint import Checkpoint, load_checkpoint, remove_old, save_checkpoint
from ..runs.environment import environment, write_environment
from ..runs.folder import check_outdir
from ..runs.plots import plot_curves
from ..runs.records import Records, read_records
from ..runs.result import RunResult, sort_configs
from ..versions import SCHEMA
from .evaluator import CLIENTS, Evaluator
from .intake import TooFewClients
from .ledger import Ledger
from .record import Failure
from .round import BadRound
from .site import Site


class RecordKeeper:
    """Writes the folder of one run, and restores a run from it.

    Args:
        site, evaluator: of this process.
        ledger: its state is saved and restored.
        outdir: the folder.
        config_name: name of the file in it for the resolved configuration.
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
        """The records of the finished rounds."""
        return self._records.history if self._records else []

    def add(self, record: dict[str, Any]) -> None:
        """Write the record of a round, and a checkpoint if one is due."""
        if self._records is None:
            raise RuntimeError(f"round {record['round']} cannot be recorded before start() has opened {self.outdir}")
        self._records.add(record)
        if self.checkpoint_due(record["round"]):
            self.save(record["round"])

    def stopped(self, round: int, error: TooFewClients | BadRound, failed: list[Failure]) -> RunFailed:
        """The error to raise if ``round`` cannot be finished; saves the round before it first.

        Args:
            error: the cause; its ``remedy`` is what the user can do.
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
        """Lock the folder until ``release`` or the end of this process.

        Raises:
            RunFailed: another run writes to it.
        """
        self._lock = take(self.outdir / ".lock")
        if self._lock is None:
            raise RunFailed(f"another run is writing into {self.outdir}; wait for it, or choose another outdir")

    def release(self) -> None:
        """Unlock the folder; nothing happens if it is not locked."""
        if self._lock is not None:
            self._lock.release()

    def start(self, resume: bool) -> Checkpoint | None:
        """Lock the folder, restore its last checkpoint if ``resume``, and write the files that describe the run.

        Returns:
            The checkpoint, or None if the run starts at round 1.
        Raises:
            UserError: the folder holds another run, or one that cannot be continued.
            RunFailed: another run writes to the folder, or a file cannot be written.
        """
        self.claim()
        check_outdir(self.config, resume)
        remove_unfinished(self.outdir)
        records = self.outdir / "rounds.jsonl"
        checkpoint = load_checkpoint(self.outdir / "checkpoint", self.site.device) if resume else None
        history: list[dict[str, Any]] = []
        if checkpoint:
            self.restore(checkpoint)
            history = read_records(records, checkpoint.round, checkpoint.meta.get("records", ()))
            if [record["round"] for record in history] != list(range(1, checkpoint.round + 1)):
                raise UserError(
                    f"{records} does not hold the rounds 1 to {checkpoint.round} once each; something else "
                    "wrote into it, so the run cannot be continued; start it anew with --overwrite or in another outdir"
                )
            remove_old(self.outdir / "checkpoint", self.config.lowrank.keep_checkpoints, checkpoint.round)
        self._records = Records(records, history)
        with self._replaced(self.config_name) as aside:
            self.config.dump(aside)
        write_environment(
            self.outdir / "environment.json", self.site.new_weights, checkpoint.round if checkpoint else None
        )
        data = {"schema": SCHEMA, **self.site.data.record()}
        write_text(self.outdir / "data.json", to_json(data, separators=(",", ":")))
        return checkpoint

    def checkpoint_due(self, round: int) -> bool:
        """Whether ``lowrank.checkpoint_freq`` asks for a checkpoint after ``round``."""
        freq = self.config.lowrank.checkpoint_freq
        return freq > 0 and (round % freq == 0 or round == self.config.federate.total_round_num)

    def save(self, round: int) -> None:
        """Write the checkpoint of ``round``: state, changed base weights, personal tensors and messages.

        Raises:
            RunFailed: it cannot be written; earlier checkpoints are unchanged.
        """
        parts, known = self.ledger.saved(round)
        parts |= {
            "base": self.site.changed_base(),
            "personal": {f"{c}/{n}": t for c, own in self.site.personal.items() for n, t in own.items()},
        }
        save_checkpoint(
            self.outdir / "checkpoint",
            round,
            {n: p for n, p in parts.items() if p},
            {
                **known,
                "records": self._records.digests if self._records else [],
                "config": self.config.to_dict(),
                "revisions": revisions(self.config),
                "data": self.site.data.fingerprint,
                "model": self.site.base_fingerprint,
            },
            keep=self.config.lowrank.keep_checkpoints,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``, whose tensors are on the run's device.

        Raises:
            UserError: it is of other data, another model, another configuration, or another revision of the method.
        """
        for what, now in (("data", self.site.data.fingerprint), ("model", self.site.base_fingerprint)):
            if checkpoint.meta[what] != now:
                raise UserError(
                    f"the {what} is not what the run in {self.outdir} started with; it cannot be continued with another"
                )
        self._check_same_run(checkpoint.meta["config"])
        self._check_revisions(checkpoint.meta.get("revisions", {}))

        self.ledger.restore(checkpoint.round, checkpoint.parts, checkpoint.meta)
        for key, tensor in checkpoint.parts.get("personal", {}).items():
            client, name = key.split("/", 1)
            self.site.personal.setdefault(int(client), {})[name] = tensor
        load_tensors(self.site.model, checkpoint.parts.get("base", {}))
        load_tensors(self.site.model, self.method.view(self.ledger.state))

    def _check_same_run(self, begun: Mapping[str, Any]) -> None:
        then, now = load_config(begun).decisive(), self.config.decisive()
        if not (self.method.needs.rounds or self.config.train.scheduler.type):
            then["federate.total_round_num"] = now["federate.total_round_num"]
        # These may change; otherwise a run could never get past a round that failed.
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
        """The papers' estimate of all traffic: twice the uplink of client 1 in each round, times the clients per round.

        It ignores that nothing is sent down in round 1, that late clients are sent more, and that ranks may differ.
        """
        state = self.ledger.state
        sent = sum(nbytes(self.method.expected(state, record["round"], 1)) for record in self.history)
        return 2 * self.config.sampled_per_round * sent

    @contextmanager
    def _replaced(self, name: str) -> Iterator[Path]:
        """A path to write a file or a folder to, which replaces the one called ``name`` when the block ends."""
        path = self.outdir / name
        try:
            with replacing(path) as aside:
                yield aside
                sort_configs(aside)
        except Exception as error:
            # tokenizers raises a bare Exception if it cannot write.
            if isinstance(error, (OSError, SafetensorError)) or type(error) is Exception:
                raise cannot_write(path, error) from error
            raise

    def _save_personal(self, folder: Path) -> None:
        """Save every client's own adapter in PEFT's format, in ``client_K`` of ``folder``."""
        model = self.site.model
        if not isinstance(model, peft.PeftModel):
            raise TypeError(
                f"the clients' own adapters are saved from a PeftModel, the model is {type(model).__name__}"
            )
        for client in self.site.personal:
            self.site.load_client(self.ledger.state, client)
            for name in sorted({adapter_name(n) for n in self.site.personal[client]}):
                save_adapter(
                    folder / f"client_{client}",
                    model.peft_config[name],
                    peft.get_peft_model_state_dict(model, adapter_name=name),
                )
        self.site.load_global(self.ledger.state)

    def finish(self) -> RunResult:
        """Save the adapter or the model, the personal adapters, the curves and the summary; returns the result.

        Raises:
            RunFailed, OSError: something cannot be written; what was there before is unchanged.
        """
        history = self.history
        last: dict[str, dict[str, float]] = next((r["metrics"] for r in reversed(history) if r["metrics"]), {})
        final = {f"{split}_{name}": v for split, values in last.items() for name, v in values.items()}
        for metric in [m for m in final if m.endswith("_acc")]:
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
            base_changed="base" in self.method.shared or any("base" in tags(n) for n in self.site.changed_base()),
            facts={
                "method": self.method.name,
                "source": self.site.data.source,
                "data": self.site.data.fingerprint,
                "model": self.site.base_fingerprint,
                "config": self.config.fingerprint(),
                "clients": [c.num_samples for c in self.site.clients],
                "rows": self.site.data.counts(),
                "majority": self.site.data.majority,
                "parameters": self.site.parameters,
                "images": self.site.data.image_shape,
                "labels": self.site.data.label_names,
                "formula_bytes": self._formula_bytes(),
                **({"own_models": self.evaluator.differ(self.ledger.state)} if CLIENTS in last else {}),
            },
        )
        saving: dict[str, Callable[[Path], object]] = {}
        if not result.base_changed:
            saving["adapter"] = result.save_adapter
        if result.base_changed or self.config.lowrank.save_merged:
            saving["model"] = result.save_model
        for name, save in saving.items():
            with self._replaced(name) as folder:
                folder.mkdir()
                save(folder)
                if self.site.tokenizer is not None:
                    self.site.tokenizer.save_pretrained(str(folder))
                write_text(folder / "README.md", model_card(self.config, result.facts, final, name))
            result.saved[name] = self.outdir / name
        if self.site.personal:
            with self._replaced("personal") as folder:
                folder.mkdir()
                self._save_personal(folder)
            result.saved["personal"] = self.outdir / "personal"
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
        write_text(self.outdir / "summary.json", to_json(summary, indent=1))
        return result
