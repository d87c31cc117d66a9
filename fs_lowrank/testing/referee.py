"""A referee for server steps of any origin: a plain function, compared with the mean of the clients' products.

    from fs_lowrank.testing import check_server_step

    def test_my_server_step():
        check_server_step(my_step)

The function gets what servers get: ``my_step(states, sizes, ranks, alphas)``, with the clients' state dicts in PEFT's
names, and returns the server's. Layers are not square, sizes and ranks are unequal, and alpha is not the rank, because
nearly all errors of server steps are invisible otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .foreign import as_step

#: the result of a server step: tensors or arrays by name
State = Mapping[str, Any]
Step = Callable[[list[dict[str, torch.Tensor]], list[int], list[int], list[float]], State]

SIZES, ALPHA = [3, 10, 27], 6.0
#: case -> the ranks of the three clients
CASES = {"equal ranks": [3, 3, 3], "unequal ranks": [2, 3, 5]}
#: layer -> the shape of its weight
LAYERS = {"up": (12, 7), "down": (6, 15)}
_PREFIX, _HEAD = "base_model.model.", "base_model.model.classifier.weight"
_SUM = "a sum instead of a mean"
#: relative errors below it are rounding of float32
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Finding:
    """The referee's finding about one layer.

    Attributes:
        case: which ranks the clients have. layer: ``up``, ``down`` or ``head``.
        exact: the server's product is the mean of the products, or its best approximation of the rank that it has.
        error: relative, in the Frobenius norm, against the mean of the products; NaN where there is no product.
        cause: the likely cause, in words; empty if exact.
    """

    case: str
    layer: str
    exact: bool
    error: float
    cause: str


def check_server_step(step: Step, scale: float | None = None) -> list[Finding]:
    """Assert that a server step gives the mean of the clients' products.

    Args:
        step, scale: as for ``judge_server_step``.
    Raises:
        AssertionError: it does not; the message has a line for each layer, with the likely cause.
        UserError: as for ``judge_server_step``.
    """
    findings = judge_server_step(step, scale)
    wrong = [f"{f.case}, {f.layer}: off by {f.error:.2g}; {f.cause}" for f in findings if not f.exact]
    if wrong:
        raise AssertionError("the server step is not exact:\n  " + "\n  ".join(wrong))
    return findings


def judge_server_step(step: Step, scale: float | None = None) -> list[Finding]:
    """Compare a server step with ``Σ p_k s_k B_k A_k`` in float64, with ``p_k = n_k / Σ n`` and ``s_k = alpha / r_k``.

    Args:
        step: called with ``states``, ``sizes``, ``ranks`` and ``alphas`` of three clients. A state has
            ``base_model.model.LAYER.lora_A.weight`` ``(r_k, d_in)``, ``….lora_B.weight`` ``(d_out, r_k)`` and a head,
            ``base_model.model.classifier.weight``, in float32. It returns a state with the same names, whose pairs may
            have any rank; ``base_model.model.LAYER.weight``, in place of a pair or beside it, changes the weight.
            A strategy of Flower and an aggregator of NVFlare or APPFL are called as these call them (``foreign``).
        scale: the factor on the server's ``B A``; None: ``alpha / r`` with the rank that the pair has.
    Returns:
        For each case, one finding for each layer and for the head.
    Raises:
        UserError: it is no server step, or returns no mapping of names to arrays.
    """
    findings, step = [], as_step(step)
    for case, ranks in CASES.items():
        states, alphas = _clients(ranks), [ALPHA] * len(ranks)
        copies = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
        try:
            answer = step(copies, list(SIZES), list(ranks), alphas)
        except Exception as error:
            cause = f"it raised {type(error).__name__}: {error}".splitlines()[0]
            findings.append(Finding(case, "all", False, float("nan"), cause))
            continue
        try:
            returned = {str(name): _array(value) for name, value in answer.items()}
        except (AttributeError, TypeError, ValueError) as error:
            text = f"the server step returned {type(answer).__name__}, expected a state dict of arrays by name: {error}"
            raise UserError(text) from error
        arrays = [{name: _array(value) for name, value in state.items()} for state in states]
        findings += [_judge_layer(case, layer, arrays, ranks, returned, scale) for layer in LAYERS]
        findings.append(_judge_head(case, arrays, returned))
    return findings


def _clients(ranks: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(7)
    states = []
    for rank in ranks:
        state = {_HEAD: torch.randn(3, 6, generator=draw)}
        for layer, (rows, columns) in LAYERS.items():
            state[f"{_PREFIX}{layer}.lora_A.weight"] = torch.randn(rank, columns, generator=draw)
            state[f"{_PREFIX}{layer}.lora_B.weight"] = torch.randn(rows, rank, generator=draw)
        states.append(state)
    return states


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double()
    return np.asarray(value, dtype=np.float64)


def _judge_head(case: str, states: Sequence[Mapping[str, np.ndarray]], answer: Mapping[str, np.ndarray]) -> Finding:
    heads, p = [state[_HEAD] for state in states], np.array(SIZES) / sum(SIZES)
    mean = np.tensordot(p, heads, 1)
    out = answer.get(_HEAD)
    if out is None or out.shape != mean.shape:
        shape = "transposed" if out is not None and out.shape == mean.T.shape else "of another shape"
        return Finding(case, "head", False, float("nan"), "the head is missing" if out is None else shape)
    causes = [("a plain mean instead of the weighted one", np.mean(heads, 0)), (_SUM, np.sum(heads, 0))]
    causes += [(f"the head of client {k + 1}, not averaged", head) for k, head in enumerate(heads)]
    return _judge(case, "head", out, mean, causes)


def _judge_layer(
    case: str,
    layer: str,
    states: Sequence[Mapping[str, np.ndarray]],
    ranks: Sequence[int],
    answer: Mapping[str, np.ndarray],
    scale: float | None,
) -> Finding:
    name = f"{_PREFIX}{layer}"
    pairs = [(state[f"{name}.lora_B.weight"], state[f"{name}.lora_A.weight"]) for state in states]
    exact = _sums(pairs, [n / sum(SIZES) for n in SIZES], [ALPHA / r for r in ranks])
    up, down, change = (answer.get(f"{name}.{part}") for part in ("lora_B.weight", "lora_A.weight", "weight"))
    if change is None and (up is None or down is None):
        return Finding(case, layer, False, float("nan"), f"{name} has neither a pair nor a change of the weight")
    parts = [] if change is None else [change]
    rank, factor = 0, 1.0
    if up is not None and down is not None:
        if up.ndim != 2 or down.ndim != 2 or up.shape[1] != down.shape[0]:
            shapes = f"lora_B {up.shape} and lora_A {down.shape} have no product B A; one may be transposed"
            return Finding(case, layer, False, float("nan"), shapes)
        if not (rank := len(down)):
            return Finding(case, layer, False, float("nan"), "the server's pair has no component")
        factor = ALPHA / rank if scale is None else scale
        parts.append(factor * up @ down)
    for part in parts:
        if part.shape != exact.shape:
            shapes = f"the product is {part.shape}, expected {exact.shape}: transposed"
            return Finding(case, layer, False, float("nan"), shapes)
    cut = rank if change is None else min(exact.shape)
    return _judge(case, layer, np.sum(parts, axis=0), exact, _mistakes(pairs, ranks, factor, cut), cut)


def _sums(pairs, weights: Sequence[float], scales: Sequence[float]) -> np.ndarray:
    total: np.ndarray = sum(p * s * up @ down for p, s, (up, down) in zip(weights, scales, pairs))
    return total


def _mistakes(pairs, ranks: Sequence[int], factor: float, cut: int) -> Iterator[tuple[str, np.ndarray]]:
    """The products that a server step with a known mistake, or with several, gives; the fewest mistakes first."""
    count, largest = len(pairs), max(ranks)
    weights = {
        "": [n / sum(SIZES) for n in SIZES],
        "a plain mean instead of the weighted one": [1 / count] * count,
        _SUM: [1.0] * count,
        "the sizes as weights, which do not add up to 1": [float(n) for n in SIZES],
    }
    scales = {
        "": [ALPHA / r for r in ranks],
        "the scale alpha / r is left out": [1.0] * count,
        "one scale, of the largest rank, for all": [ALPHA / largest] * count,
        "one scale, of client 1, for all": [ALPHA / ranks[0]] * count,
    }
    short = [largest - rank for rank in ranks]
    padded = [(np.pad(up, ((0, 0), (0, n))), np.pad(down, ((0, n), (0, 0)))) for (up, down), n in zip(pairs, short)]
    padding = "padding with zeros, and " if min(ranks) < largest else ""
    cases = itertools.product(weights.items(), scales.items())
    for (weight_label, w), (scale_label, s) in sorted(cases, key=lambda pair: bool(pair[0][0]) + bool(pair[1][0])):
        labels = [part for part in (weight_label, scale_label) if part]
        mean = _sums(pairs, w, s)
        twice = "the scale alpha / r is in the pair, and counts twice; scale=1 if it is not applied to it"
        best = _best(mean, cut)
        if labels:
            yield "; ".join(labels), best
        yield "; ".join(labels) or twice, best * factor
        u, values, vh = np.linalg.svd(mean, full_matrices=False)
        half = (u * np.sqrt(values))[:, :cut] @ vh[:cut]
        for applied in (factor**0.5, 1.0, factor):  # the scale is taken out of the sum, or of B, or not at all
            yield "; ".join(["√Σ in one half only", *labels]), half * applied
        up, down = (np.stack([p * pair[i] for p, pair in zip(w, padded)]).sum(0) for i in (0, 1))
        means = f"{padding}A and B averaged each by itself: the product of means is not the mean of products"
        yield "; ".join([means, *labels]), s[-1] * up @ down
        scaled = np.stack([p * c * pair[0] for p, c, pair in zip(w, s, padded)]).sum(0)
        yield "; ".join([means, *labels]), scaled @ down
    for weight_label, w in weights.items():
        up, down = (np.stack([p * pair[i] for p, pair in zip(w, padded)]).sum(0) for i in (0, 1))
        out = factor * up @ down + _sums(pairs, w, [1.0] * count) - up @ down
        yield "; ".join(filter(None, ["the scale alpha / r is left out of the residual", weight_label])), out
    for k, (up, down) in enumerate(pairs, start=1):
        yield f"the pair of client {k}, not averaged", factor * up @ down


def _best(matrix: np.ndarray, rank: int) -> np.ndarray:
    """The best approximation of ``matrix`` of a rank."""
    u, values, vh = np.linalg.svd(matrix, full_matrices=False)
    best: np.ndarray = (u * values)[:, :rank] @ vh[:rank]
    return best


def _judge(
    case: str,
    layer: str,
    out: np.ndarray,
    exact: np.ndarray,
    causes: Iterable[tuple[str, np.ndarray]],
    cut: int | None = None,
) -> Finding:
    def gap(reference: np.ndarray) -> float:
        return float(np.linalg.norm(out - reference)) / max(float(np.linalg.norm(reference)), 1e-12)

    error = gap(exact)
    if error < _ROUNDING or cut is not None and gap(_best(exact, cut)) < _ROUNDING:
        return Finding(case, layer, True, error, "")
    cause = next((name for name, wrong in causes if gap(wrong) < 10 * _ROUNDING), "no cause that is known here")
    return Finding(case, layer, False, error, cause)
