"""For the one-shot methods: all weights or an adapter, what is sent besides them, and selection by validation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...models.curvature import LARGEST_EXACT, count_classes, diagonal_fisher
from ...models.machine import input_device
from ...models.names import entries, select
from ...seeds import derive
from ..base import Gathering, State
from ..terms import TRAIN, Client, RefusedUpdate, Tensors, Update, Workbench, refuse_negative
from .compress import Budget

logger = logging.getLogger("fs_lowrank")


#: metadata of the hyperparameter ``draws``
DRAWS = {
    "min": 0,
    "help": "labels drawn from the model for each sample, for the expectation in the Fisher; 0 computes it exactly, "
    "and so does None up to 100 classes (one drawn label beyond)",
}
#: ``Requires.idle`` of methods that train all weights whatever ``llm.adapter.use`` is
WITHOUT_ADAPTER = {"llm.adapter.args": "the method trains all weights, without an adapter"}
#: the tasks of models that have a Fisher (``models.curvature``)
CLASSIFIERS = ("SequenceClassification", "ImageClassification")
#: factor on the Fisher, which is small, if only sums arrive, which may be fixed-point numbers
SUM_SCALE = 2.0**8
#: share of the largest value of a matrix that is taken for rounding; 8 bits round to a 254th of it
ROUNDING = 0.01
#: share of the largest value of a matrix by which rounding to 8 bits, and computing in float32 or TF32, change another;
#: they lower an eigenvalue by no more than this times the number of rows
NOISE = 0.005
#: a larger matrix is looked at in blocks of so many rows, so that it takes seconds and not minutes
LARGEST_BLOCK = 4096
#: a smaller Fisher could not be distinguished from the rounding of such numbers, and counts as zero
SMALLEST_SUM = 1e-8


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without values, for shapes and dtypes."""
    return torch.empty(shape, dtype=dtype, device="meta")


def refuse_indefinite(update: Update, names: Iterable[str]) -> None:
    """Refuse ``update`` if one of its matrices ``names`` cannot be a sum of ``x xᵀ``, up to rounding.

    Looked at are the symmetry, the diagonal, every ``2 × 2`` minor, ``g_ij² ≤ g_ii g_jj``, and whether the matrix has a
    Cholesky factor when what rounding does to eigenvalues is added to its diagonal. That takes a small part of the time
    of the eigenvalues that the server's step takes. Of more than ``LARGEST_BLOCK`` rows, only blocks on the diagonal
    have to have one.

    Raises:
        RefusedUpdate: the message names client and tensor.
    """
    for name in names:
        matrix = update.tensors[name]
        diagonal = matrix.diagonal()
        rounding = ROUNDING * diagonal.max()
        root = (diagonal + rounding).sqrt()
        flaw = ""
        if diagonal.min() < 0:
            flaw = f"holds {float(diagonal.min()):.6g} on its diagonal"
        elif ((matrix - matrix.T).abs() > rounding).any():
            flaw = "is not symmetric"
        elif (matrix.abs() > root[:, None] * root).any():
            flaw = "holds values that are too large for its diagonal"
        elif any(map(_has_negative, _blocks(matrix))):
            flaw = "has eigenvalues below zero, and rounding does not explain them"
        if flaw:
            raise RefusedUpdate(
                f"client {update.client}: {name} {flaw}, expected a symmetric matrix that is positive semi-definite"
            )


def _blocks(matrix: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(matrix), LARGEST_BLOCK):
        rows = slice(start, start + LARGEST_BLOCK)
        yield matrix[rows, rows]


def _has_negative(matrix: Tensor) -> bool:
    """Whether a symmetric matrix, whose diagonal is not below zero, has an eigenvalue below zero beyond rounding."""
    largest = matrix.diagonal().max().double()
    if largest == 0:
        return False
    scaled = matrix.double() / largest
    scaled.diagonal().add_(NOISE * len(matrix))
    return bool(torch.linalg.cholesky_ex(scaled).info != 0)


class OneShot(Gathering):
    """Trains and sends all weights, or the adapter and the head if ``llm.adapter.use`` asks for it."""

    shared = ("base", "head")
    #: whether the warning about drawn labels has been logged
    _warned = False

    @classmethod
    def requires(cls, params):
        return replace(super().requires(params), adapter="optional", tasks=(*CLASSIFIERS, "CausalLM"))

    def __init__(self, params, setting):
        if self.requires(params).adapter == "optional" and setting.with_adapter:
            self.shared = ("adapter", "head")
        super().__init__(params, setting)

    def adapt(self, model: nn.Module) -> nn.Module:
        model = super().adapt(model) if "adapter" in self.shared else model
        #: names of the parameters that are sent; running statistics are sent too, but have no gradient
        self.parameters = select(dict(model.named_parameters()), self.shared)
        return model

    # -- what is sent besides the weights ------------------------------------------------------------

    def beside(self, model: nn.Module, tensors: Tensors, round: int, client: Client) -> dict[str, Tensor]:
        """What ``client`` sends besides its weights ``tensors``, as ``KIND:NAME``."""
        return {}

    def beside_shapes(self, tensors: Tensors) -> dict[str, Tensor]:
        """Names, shapes and dtypes of ``beside``, as meta tensors."""
        return {}

    def upload(self, model, round, client):
        tensors = super().upload(model, round, client)
        beside = self.beside(model, tensors, round, client)
        return Budget(tensors, self.parameters, beside).compress() if self.compresses else {**tensors, **beside}

    def expected(self, state, round, client, exchange=TRAIN):
        tensors = super().expected(state, round, client)
        beside = self.beside_shapes(tensors)
        return Budget(tensors, self.parameters, beside).shapes() if self.compresses else {**tensors, **beside}

    def check(self, update):
        super().check(update)
        if self.compresses:
            # Of a semi-definite matrix the eigenvalues are sent, and of any tensor its largest magnitude.
            refuse_negative(update, [n for n in update.tensors if n.startswith(("scale:", "values:"))])

    def received(self, updates: Sequence[Update], state: State) -> list[dict[str, Tensor]]:
        """What each client sent, decompressed."""
        if not self.compresses:
            return [dict(u.tensors) for u in updates]
        tensors = self.view(state)
        budget = Budget(tensors, self.parameters, self.beside_shapes(tensors))
        return [budget.expand(u.tensors) for u in updates]

    @property
    def compresses(self) -> bool:
        """Whether updates are brought to the bytes of plain averaging, for methods with the option ``compress``."""
        return getattr(self.params, "compress", False)

    # -- the Fisher ----------------------------------------------------------------------------------

    def draws(self, model: nn.Module, client: Client) -> int:
        """``params.draws``; if it is None, 0 for a model of up to ``LARGEST_EXACT`` classes and 1 beyond."""
        if self.params.draws is not None:
            return self.params.draws
        classes = count_classes(model, client.batches())
        if classes > LARGEST_EXACT and not self._warned:
            logger.warning(
                "%s: with %d classes, the Fisher uses one drawn label per sample; lowrank.draws 0 uses all labels, "
                "with one backward pass per class (the default up to %d classes)",
                self.name,
                classes,
                LARGEST_EXACT,
            )
            self._warned = True
        return int(classes > LARGEST_EXACT)

    def label_draws(self, model: nn.Module, round: int, client: Client) -> dict[str, int]:
        """The arguments ``draws`` and ``seed`` of the functions in ``models.curvature``."""
        return {"draws": self.draws(model, client), "seed": derive(self.setting.seed, "fisher", round, client.id)}

    def diagonal(self, model: nn.Module, round: int, client: Client) -> dict[str, Tensor]:
        """The diagonal of the Fisher at ``model`` over the client's data, float32, by parameter."""
        return diagonal_fisher(model, client.batches(), self.parameters, **self.label_draws(model, round, client))

    def diagonal_entries(self, fisher: Tensors, sent: Tensors) -> dict[str, Tensor]:
        """The entries ``fisher:…`` of a diagonal Fisher and, if only sums arrive, ``product:…`` of ``F_k W_k``."""
        if not self.setting.only_sums:
            return entries("fisher", fisher)
        large = {n: f * SUM_SCALE for n, f in fisher.items()}
        return {**entries("fisher", large), **entries("product", {n: f * sent[n].float() for n, f in large.items()})}

    def diagonal_shapes(self, tensors: Tensors) -> dict[str, Tensor]:
        """Names and shapes of ``diagonal_entries``."""
        kinds = ("fisher", "product") if self.setting.only_sums else ("fisher",)
        return {f"{kind}:{n}": meta(*tensors[n].shape) for n in self.parameters for kind in kinds}

    def diagonal_sums(self, parts: Sequence[Tensors], weights: Sequence[float], name: str) -> tuple[Tensor, Tensor]:
        """``Σ p_k F_k`` and ``Σ p_k F_k W_k`` of the parameter ``name``, in float64."""
        zero = torch.zeros((), dtype=torch.float64)
        total = sum((p * part[f"fisher:{name}"].double() for p, part in zip(weights, parts)), zero)
        if not self.setting.only_sums:
            products = (p * t[f"fisher:{name}"].double() * t[name].double() for p, t in zip(weights, parts))
            return total, sum(products, zero)
        product = sum((p * part[f"product:{name}"].double() for p, part in zip(weights, parts)), zero)
        total, product = total / SUM_SCALE, product / SUM_SCALE
        nonzero = total >= SMALLEST_SUM
        return total * nonzero, product * nonzero


def logits_of(model: nn.Module, tensors: Tensors, batch: Tensors) -> Tensor:
    """The logits of ``model`` for ``batch`` with ``tensors`` instead of its own, which do not change."""
    device = input_device(model)
    inputs = {k: v.to(device) for k, v in batch.items() if k != "labels"}
    return functional_call(model, dict(tensors), kwargs=inputs).logits


@torch.no_grad()
def accuracy(workbench: Workbench, tensors: Tensors) -> float:
    """Share of the validation samples (or predicted tokens) that the model with ``tensors`` classifies correctly."""
    workbench.model.eval()
    right = count = 0
    for batch in workbench.validation():
        logits, labels = logits_of(workbench.model, tensors, batch), batch["labels"]
        if labels.ndim == 2:
            logits, labels = logits[:, :-1], labels[:, 1:]
        labels = labels.to(logits.device)
        labelled = labels != -100
        right += int((logits.argmax(-1) == labels)[labelled].sum())
        count += int(labelled.sum())
    return right / max(count, 1)


def best(workbench: Workbench, candidates: Iterable[Tensors]) -> dict[str, Tensor]:
    """The candidate with the highest validation accuracy, the first of equals; candidates with NaN or Inf are skipped.

    Raises:
        ArithmeticError: no candidate is finite.
    """
    chosen: dict[str, Tensor] = {}
    highest = -1.0
    for candidate in candidates:
        if not all(bool(torch.isfinite(t).all()) for t in candidate.values() if t.is_floating_point()):
            continue
        score = accuracy(workbench, candidate)
        if score > highest:
            chosen, highest = {n: t.detach().clone() for n, t in candidate.items()}, score
    if not chosen:
        raise ArithmeticError("no candidate is finite; choose a smaller step, or another solver")
    return chosen
