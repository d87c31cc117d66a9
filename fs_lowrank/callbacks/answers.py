"""Answers of the global model to held-out prompts while it trains (``eval.generate``), in ``answers.jsonl``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from ..data.examples import IGNORED_LABEL, Examples
from ..errors import UserError, say_once, user_errors
from ..jobs.files import cannot_read, from_json, to_json, write_text
from ..rounds.recorder import Callback, Recorder
from ..runs.records import append_line
from ..runs.result import RunResult
from ..seeds import derive
from ..settings import Settings
from ..training.generate import continue_prompts

logger = logging.getLogger("fs_lowrank")

#: a score of an answer against the answer of the data, between 0 and 1 where larger is better
Score = Callable[[str, str], float]
FILE = "answers.jsonl"


def exact_match(answer: str, reference: str) -> float:
    """1 if both are equal but for case and blanks, else 0."""
    return float(answer.casefold().split() == reference.casefold().split())


def score_of(config: Settings) -> tuple[str, Score]:
    """Name and function of ``eval.generate.score``.

    Raises:
        UserError: there is no such function, or ROUGE's package is not installed.
    """
    score = config.eval.generate.score
    key = f"eval.generate.score = {score!r}: "
    if score == "exact_match":
        return score, exact_match
    if score == "rouge_l":
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError:
            raise UserError(f"{key}rouge_score is not installed; install it with: pip install rouge-score") from None
        scorer = RougeScorer(["rougeL"])
        return score, lambda answer, reference: float(scorer.score(reference, answer)["rougeL"].fmeasure)
    module, _, name = score.partition(":")
    if not (module and name):
        raise UserError(f"{key}expected exact_match, rouge_l, or a function of (answer, reference) as MODULE:FUNCTION")
    with user_errors(f"{key}importing it", "the module must be on the path, as with PYTHONPATH=."):
        function = getattr(import_module(module), name)
    return name, function


class Answers(Callback):
    """The answers of one run, after every ``eval.generate.freq`` rounds and the last one.

    Raises, at the start:
        UserError: the data have no such split, its rows have no prompts, or there is no such score, or it fails.
    """

    def on_start(self, run: Recorder) -> None:
        self.workspace, self.options, self.path = run.workspace, run.config.eval.generate, run.outdir / FILE
        self.name, self.score = score_of(run.config)
        self.prompts, self.references = self._questions()
        self._scored(self.references[0], self.references[0])  # a function of the user's fails before round 1
        # No record has those of an early end: a run that ends there again makes them again, one that goes on has none.
        answered = [record["round"] for record in run.history if "answers" in record]
        write_text(self.path, "".join(line + "\n" for line in self._earlier(answered)))

    def after_round(self, run: Recorder, record: dict[str, Any]) -> None:
        round = record["round"]
        if round % self.options.freq and round != run.config.federate.total_round_num:
            return
        started = time.perf_counter()
        run.global_model()
        record["answers"] = self.make(round)
        seconds = record["seconds"]
        record["seconds"] = {**seconds, "evaluation": seconds["evaluation"] + time.perf_counter() - started}

    def on_end(self, run: Recorder, result: RunResult) -> None:
        if run.history and "answers" not in run.history[-1]:  # it ended early
            run.global_model()
            self.make(run.history[-1]["round"])

    def _questions(self) -> tuple[list[np.ndarray], list[str]]:
        """Token ids of some prompts, spread over the split, and the answers of the data."""
        split = self.options.split
        examples = {"test": self.workspace.data.test, "val": self.workspace.data.validation}[split]
        key = f"eval.generate.freq = {self.options.freq}: "
        if not isinstance(examples, Examples) or not len(examples):
            raise UserError(f"{key}the run has no {split} data (eval.generate.split, data.splits)")
        rows = np.unique(np.linspace(0, len(examples) - 1, min(self.options.prompts, len(examples))).astype(int))
        prompts, references = [], []
        for row in rows:
            ids, labels = (np.asarray(examples.columns[name][row]) for name in ("input_ids", "labels"))
            first = int(np.argmax(labels != IGNORED_LABEL))
            if not first:
                raise UserError(
                    f"{key}the rows have no prompts of their own, as with loss_on: all or a template without one"
                )
            prompts.append(ids[:first])
            references.append(self.workspace.tokenizer.decode(ids[first:], skip_special_tokens=True).strip())
        return prompts, references

    def _earlier(self, rounds: Sequence[int]) -> list[str]:
        """The lines of the file for these ``rounds``."""
        try:
            lines = self.path.read_bytes().splitlines() if rounds and self.path.exists() else []
        except OSError as error:
            raise cannot_read(self.path, error) from error
        retained = []
        for number, line in enumerate(lines, start=1):
            try:
                round = from_json(line)["round"]
                if round <= rounds[-1] and round in rounds:
                    retained.append(line.decode())
            except (ValueError, KeyError, TypeError) as error:
                warning = "%s: line %d is not the answers of a round (%s); it is left out"
                logger.warning(warning, self.path, number, error)
        return retained

    def make(self, round: int) -> dict[str, float]:
        """Let the model, as it is, answer; returns the mean score by its name.

        Raises:
            UserError: the score of an answer is not a finite number. RunFailed: the answers cannot be written.
        """
        self.workspace.model.eval()
        answers = continue_prompts(
            self.workspace.model,
            self.workspace.tokenizer,
            [prompt.tolist() for prompt in self.prompts],
            batch_size=self.workspace.config.eval_batch_size,
            max_new_tokens=self.options.max_tokens,
            temperature=self.options.temperature,
            seed=derive(self.workspace.config.seed, "answers", round),
            on_cut=lambda count: say_once(
                f"eval.generate.max_tokens = {self.options.max_tokens} cuts answers that have not ended by then"
            ),
        )
        rows: list[dict[str, Any]] = []
        for prompt, reference, answer in zip(self.prompts, self.references, answers):
            text = self.workspace.tokenizer.decode(prompt, skip_special_tokens=True)
            value = self._scored(answer.strip(), reference)
            rows.append({"prompt": text, "reference": reference, "answer": answer.strip(), self.name: value})
        mean = {self.name: float(np.mean([row[self.name] for row in rows]))}
        append_line(self.path, to_json({"round": round, **mean, "answers": rows}))
        return mean

    def _scored(self, answer: str, reference: str) -> float:
        with user_errors(f"eval.generate.score = {self.options.score!r}: called with {answer!r} and {reference!r}, it"):
            value = self.score(answer, reference)
        if isinstance(value, (bool, int, float)) and math.isfinite(value):
            return float(value)
        raise UserError(f"eval.generate.score = {self.options.score!r} gave {value!r}: expected a finite number")
