"""The result of a run, in Python and on disk."""

from __future__ import annotations

import copy
import html
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_model

from ..draw.panels import digits
from ..draw.runs import curves
from ..errors import UserError, counted, nearest
from ..jobs.files import read_json
from ..models.accumulated import one_adapter
from ..models.adapters import ACCUMULATED
from ..models.factorised import plain
from ..models.loaded import transformers_silent
from ..models.merging import untie
from ..models.names import tags
from ..models.prompts import is_prompted
from ..models.quantised import dequantised, layers
from ..models.saved import save_adapter
from ..settings.metrics import larger_is_better
from .chance import run_verdict
from .records import flat_metrics
from .split import read_data_json
from .summary import for_people

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

logger = logging.getLogger("fs_lowrank")


@dataclass(repr=False)
class RunResult:
    """The result of a run; a notebook shows its figures as a table.

    Attributes:
        history: one record per round, as in ``rounds.jsonl``.
        final: metrics of the last evaluated round, such as ``{"test_acc": …, "test_loss": …}``, and ``best_round``
            by ``eval.best_res_update_round_wise_key``.
        best: the best round by validation data: its number as ``round``, the metric as ``by``, and its metrics as in
            ``final``; empty if no validation data were evaluated.
        before: the metrics before round 1, with ``eval.before``.
        outdir: folder of the run's files.
        model: the adapted model with the global tensors; None for the row ``local``, which has one for each client and
            saves none.
        base_changed: whether the method trained or changed base weights, so that no adapter holds the result.
        saved: paths of written files by name (``adapter``, ``model``, ``adapter_best``, ``model_best``, ``curves``).
        facts: method, source of the data, sizes of clients, majority class, fingerprints.
    """

    history: list[dict[str, Any]]
    final: dict[str, float]
    outdir: Path
    model: Any
    base_changed: bool
    saved: dict[str, Path] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)

    @property
    def language(self) -> bool:
        """Whether the model is one of language, whose ``acc`` is the accuracy of the next token."""
        return not self.facts.get("labels", True)

    @property
    def bytes(self) -> Mapping[str, int]:
        """Bytes sent in the whole run, in both directions, with and without the head."""
        keys = ("uplink_bytes", "uplink_bytes_without_head", "downlink_bytes", "downlink_bytes_without_head")
        return {key: sum(record[key] for record in self.history) for key in keys}

    @property
    def client_scores(self) -> dict[int, dict[str, float]]:
        """By client, ``acc``, ``loss`` and ``samples`` of its share of the test set in the last evaluated round; of a
        language model also ``tokens``, over which its scores are means.

        Empty if the clients' models were not evaluated (``eval.client_scores``).
        """
        last: dict[str, Any] = next((r for r in reversed(self.history) if r["metrics"]), {})
        return {int(client): scores for client, scores in last.get("client_scores", {}).items()}

    @property
    def unseen(self) -> list[int]:
        """The clients that never took part: no update of theirs counted in any round."""
        took_part = {client for record in self.history for client in record["clients"]}
        return [c for c in range(1, len(self.facts.get("clients", ())) + 1) if c not in took_part]

    @property
    def verdict(self) -> str:
        """A sentence if the last round is no better than always predicting the majority class; empty otherwise."""
        return run_verdict(read_data_json(self.outdir), self.final, self.best)

    def _figures(self) -> list[tuple[str, str]]:
        """The figures of the result for people: name and value."""
        metrics = for_people(self.final, self.language)
        rows = [(name, digits(value)) for name, value in metrics.items() if name != "best_round"]
        if self.best:
            best = for_people({n: v for n, v in self.best.items() if n.startswith("test_")}, self.language)
            of_best = ", ".join(f"{n} {digits(v)}" for n, v in best.items())
            rows.append((f"best round by {self.best['by']}", f"{self.best['round']}" + (of_best and f": {of_best}")))
        return rows

    def __repr__(self) -> str:
        method, figures = self.facts.get("method", "?"), ", ".join(f"{name} {value}" for name, value in self._figures())
        note = f"; {self.verdict.partition(';')[0]}" if self.verdict else ""
        return f"<{method}, {counted(len(self.history), 'round')}: {figures or 'not evaluated'}{note}; {self.outdir}>"

    def _repr_html_(self) -> str:
        rows = [("rounds", str(len(self.history))), *self._figures(), ("folder", str(self.outdir))]
        rows += [("note", self.verdict)] if self.verdict else []
        cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
        return f"<table><caption>{html.escape(self.facts.get('method', ''))}</caption>{cells}</table>"

    def plot(self) -> Figure:
        """The learning curves, as in ``curves.png``; a figure that is not pyplot's, so no global state is used."""
        label, majority = self.facts.get("method", ""), self.facts.get("majority")
        sizes = self.facts.get("held_out")
        return curves({label: [self.history]}, majority, sizes=sizes, language=self.language)

    def history_frame(self) -> DataFrame:
        """One row per round, by its number.

        Columns: how many ``clients`` counted and how many ``failed``, ``train_loss``, the metrics as in ``final``,
        ``uplink_bytes``, ``downlink_bytes``, and ``seconds_…`` of training, aggregation and evaluation. Round 0, with
        ``eval.before``, has metrics only.
        """
        from pandas import DataFrame

        rows = [
            {
                "round": r["round"],
                "clients": len(r["clients"]),
                "failed": len(r["failed"]),
                "train_loss": r["loss"],
                **flat_metrics(r["metrics"]),
                **{key: r[key] for key in ("uplink_bytes", "downlink_bytes")},
                **{f"seconds_{name}": value for name, value in r["seconds"].items()},
            }
            for r in self.history
        ]
        before = [{"round": 0, **self.before}] if self.before else []
        return DataFrame([*before, *rows]).set_index("round") if rows else DataFrame()

    def clients_frame(self) -> DataFrame:
        """One row per client, by its number.

        Columns: training ``samples``; the number of ``rounds`` in which its update counted, and of rounds in which it
        ``failed``; ``uplink_bytes``, ``downlink_bytes``, ``seconds`` of its training; and ``test_acc``, ``test_loss``,
        ``test_samples`` and so on of ``client_scores``, where there are any.
        """
        from pandas import DataFrame

        count = len(self.facts.get("clients", ()))
        totals: dict[str, list[float]] = {
            name: [0] * count for name in ("rounds", "failed", "uplink_bytes", "downlink_bytes", "seconds")
        }
        for r in self.history:
            seconds = {c: spent["training"] for c, spent in r.get("client_seconds", {}).items()}
            added = {"uplink_bytes": r["client_uplink_bytes"], "downlink_bytes": r["client_downlink_bytes"]}
            added |= {"rounds": dict.fromkeys(r["clients"], 1), "seconds": seconds}
            added["failed"] = dict.fromkeys((f["client"] for f in r["failed"]), 1)
            for name, values in added.items():
                for client, value in values.items():
                    totals[name][int(client) - 1] += value
        frame = DataFrame({"samples": self.facts.get("clients", ()), **totals}, index=range(1, count + 1))
        scores = DataFrame.from_dict(self.client_scores, orient="index").add_prefix("test_")
        return frame.rename_axis("client").join(scores)

    def bytes_to(self, target: float, metric: str = "test_acc") -> int | None:
        """Bytes sent in both directions until the end of the first evaluated round that reached ``target``.

        None if no round reached it.

        Args:
            metric: one that was measured in evaluated rounds, such as ``test_acc`` or ``val_loss``; one that is better
                when smaller has to be at most the target. Metrics of ``final`` that are computed from several rounds
                or at the end alone are none: ``test_acc_last5``, ``best_round``, ``unseen_test_acc`` and the like.
        Raises:
            UserError: no evaluated round has the metric; names the measured ones.
        """
        evaluated = [flat_metrics(record["metrics"]) for record in self.history]
        if metric not in (names := sorted(set[str]().union(*evaluated))):
            measured = ", ".join(names) or "none (eval.freq, eval.split)"
            raise UserError(f"metric = {metric!r}: no round has it{nearest(metric, names)}; measured are: {measured}")
        sign, total = (1 if larger_is_better(metric) else -1), 0
        for record, metrics in zip(self.history, evaluated):
            total += int(record["uplink_bytes"] + record["downlink_bytes"])
            value = metrics.get(metric)
            if value is not None and sign * value >= sign * target:
                return total
        return None

    def _global_model(self) -> Any:
        if self.model is None:
            raise UserError("the row local has a model for each client and saves none, so there is nothing to save")
        return self.model

    def save_adapter(self, folder: str | Path) -> Path:
        """Save the global adapter (and head) in PEFT's format.

        For an image network, the folder ``base`` has the network with everything trained outside the adapter;
        ``PeftModel.from_pretrained(load_vision(folder / "base"), folder)`` loads both.

        Raises:
            UserError: the method trained or changed the base weights, so that an adapter cannot represent the result;
                or there is no global model.
        """
        model = self._global_model()
        peft_config = getattr(model, "peft_config", {})
        if self.base_changed or "default" not in peft_config:
            raise UserError(
                "this method changes the base weights, so no adapter holds its result; "
                "save the whole model with save_model(folder)"
            )
        if ACCUMULATED in peft_config:
            save_adapter(folder, *one_adapter(model))
        else:
            tensors = {n: t for n, t in model.state_dict().items() if "nested" not in tags(n)}  # that is not PEFT's
            model.save_pretrained(str(folder), selected_adapters=["default"], state_dict=tensors)
        sort_configs(Path(folder), self.facts.get("hub", ("", "")))
        if self.facts.get("images"):
            copy.deepcopy(model).unload().save_pretrained(Path(folder) / "base")
        return Path(folder)

    def save_model(self, folder: str | Path) -> Path:
        """Save the model with any adapter merged into it, for transformers.

        Quantised matrices are saved in the dtype in which they compute. Image networks are loaded with
        ``fs_lowrank.models.vision.load_vision``. Of a module of the user's that is not of transformers,
        ``model.safetensors`` has the tensors.

        Raises:
            UserError: virtual tokens were trained, which no weights of the model hold; or there is no global model.
        """
        model: Any = self._global_model()
        if is_prompted(model):
            raise UserError(
                "virtual tokens were trained, which no weights of the model hold; save them with save_adapter(folder)"
            )
        if layers(model):
            logger.warning("%s: the quantised base is saved without quantisation, as it computes", folder)
            model = dequantised(model)
        else:
            model = copy.deepcopy(model)
        if hasattr(model, "peft_config"):
            untie(model)
            model = model.merge_and_unload()
        model = plain(model)
        if not hasattr(model, "save_pretrained"):  # a module of the user's
            Path(folder).mkdir(exist_ok=True)
            save_model(model, str(Path(folder) / "model.safetensors"))
            return Path(folder)
        with transformers_silent():
            model.save_pretrained(str(folder))
        return Path(folder)


def sort_configs(folder: Path, hub: Sequence[str] = ("", "")) -> None:
    """Sort the lists of names in PEFT's ``adapter_config.json`` files; PEFT writes sets in an order that varies.

    Args:
        hub: name and revision of the base on the hub, in place of its folder, which another machine does not have.
    """
    for path in folder.rglob("adapter_config.json"):
        content = read_json(path)
        for key, value in content.items():
            if isinstance(value, list) and all(isinstance(item, str) for item in value):
                content[key] = sorted(value)
        if hub[0]:
            content |= {"base_model_name_or_path": hub[0], "revision": hub[1] or None}
        path.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
