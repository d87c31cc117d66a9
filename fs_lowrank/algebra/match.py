"""Matching the neurons of several networks: exact optimal transport, and nonparametric matching."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError


def require(package: str, module: str, method: str) -> None:
    """Raise ``UserError`` unless ``module`` of ``package`` can be imported."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f'{method} needs {package}; run: pip install "fs-lowrank[oneshot]"')


def exact_transport(source: Tensor, target: Tensor) -> Tensor:
    """The optimal transport plan between two uniformly weighted point clouds under squared distance, by POT.

    Args:
        source: ``(n, d)``. target: ``(m, d)``.
    Returns:
        float32 ``(n, m)``; rows sum to ``1/n``, columns to ``1/m``. If ``n = m``, a permutation divided by ``n``.
    Raises:
        ValueError: the distances are too large for the solver, or it has not found the plan.
    """
    import ot

    cost = torch.cdist(source.double(), target.double()).square()
    n, m = cost.shape
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning is in the log, and raised below
        plan, log = ot.emd(np.full(n, 1 / n), np.full(m, 1 / m), cost.cpu().numpy(), numItermax=1_000_000, log=True)
    marginals = np.abs(plan.sum(1) - 1 / n).max() * n + np.abs(plan.sum(0) - 1 / m).max() * m
    if log["warning"] or not marginals < 1e-6:
        raise ValueError(
            f"no transport plan for neurons with squared distances up to {float(cost.max()):.3g}: "
            f"{log['warning'] or 'its marginals are wrong'}"
        )
    return torch.from_numpy(plan).to(source)


def move_inputs(weight: Tensor, plan: Tensor) -> Tensor:
    """The weight of a layer after the neurons of the layer below are moved by ``plan``.

    Args:
        weight: ``(d_out, n)`` or ``(d_out, n, k₁, k₂)``; or ``(d_out, n · positions)`` of a flattened image.
        plan: ``(n, m)``.
    Returns:
        The same shape with ``m`` instead of ``n``.
    """
    out, n, m = weight.shape[0], *plan.shape
    moved = torch.einsum("onp,nm->omp", weight.reshape(out, n, -1), plan.to(weight))
    return moved.reshape(out, m, *weight.shape[2:]) if weight.shape[1] == n else moved.reshape(out, -1)


def move_outputs(weight: Tensor, plan: Tensor) -> Tensor:
    """The weight ``(n, …)`` of a layer after its neurons are moved by ``plan`` ``(n, m)``: ``planᵀ W``."""
    return torch.tensordot(plan.T.to(weight), weight, dims=1)


def nonparametric_matching(
    nets: Sequence[np.ndarray],
    *,
    sigma: float = 1.0,
    sigma0: float = 1.0,
    gamma: float = 7.0,
    sweeps: int = 5,
    widest: int = 700,
    rng: np.random.Generator,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Match the neurons of several networks by maximum a posteriori estimation of a beta-Bernoulli process.

    Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019, equations 6 to 9;
    each network in turn is assigned by the Hungarian method while the others are fixed, as in the code of Wang et al.
    2020 (FedMA). That code omits a factor 2 before the logarithm of the popularity and limits the popularity to 10.

    Args:
        nets: the weights of a layer, ``(L_k, d)``, with one row per neuron; ``d`` is the same for all.
        sigma: variance of a neuron around its global neuron. sigma0: variance of the global neurons around zero.
        gamma: mass of the process; a larger value gives more global neurons.
        sweeps: number of times that every network is removed and assigned again. widest: number of global neurons
            beyond which an assignment adds at most one.
    Returns:
        Global weights, ``(L, d)``; and for every network the global indices of its neurons, ``(L_k,)``.
    """
    from scipy.optimize import linear_sum_assignment

    count = len(nets)
    scaled = [np.asarray(net, dtype=np.float64) / sigma for net in nets]
    total = np.zeros((0, scaled[0].shape[1]))
    popularity = np.zeros(0, dtype=np.int64)
    assigned: list[np.ndarray] = [np.zeros(0, dtype=np.int64) for _ in nets]

    def assign(k: int) -> None:
        nonlocal total, popularity
        neurons, size, existing = scaled[k], len(scaled[k]), len(total)
        added = min(size, max(widest - existing, 1)) if existing else size
        if existing + added < size:
            added = size - existing
        precision = 1 / sigma0 + popularity / sigma
        # ‖w + g‖² / (1/σ + s) − ‖g‖² / s, for every pair
        norms = (total**2).sum(1)
        cross = (neurons**2).sum(1)[:, None] + 2 * neurons @ total.T + norms
        seen = np.minimum(popularity, 10)
        old = cross / (1 / sigma + precision) - norms / precision + np.log(seen / (count - np.minimum(seen, count - 1)))
        fresh = (neurons**2).sum(1)[:, None] / (1 / sigma0 + 1 / sigma) - 2 * np.log(np.arange(1, added + 1))
        rows, columns = linear_sum_assignment(np.hstack([old, fresh + 2 * np.log(gamma / count)]), maximize=True)
        indices = np.empty(size, dtype=np.int64)
        new = columns >= existing
        indices[rows[~new]] = columns[~new]
        indices[rows[new]] = existing + np.arange(new.sum())
        total = np.vstack([total, np.zeros((new.sum(), total.shape[1]))])
        popularity = np.concatenate([popularity, np.zeros(new.sum(), dtype=np.int64)])
        total[indices] += neurons
        popularity[indices] += 1
        assigned[k] = indices

    def withdraw(k: int) -> None:
        nonlocal total, popularity
        total[assigned[k]] -= scaled[k]
        popularity[assigned[k]] -= 1
        used = popularity > 0
        position = np.cumsum(used) - 1
        for j in range(count):
            if j != k:
                assigned[j] = position[assigned[j]]
        total, popularity = total[used], popularity[used]

    for k in sorted(range(count), key=lambda k: -len(nets[k])):
        assign(k)
    for _ in range(sweeps if count > 1 else 0):
        for k in rng.permutation(count):
            withdraw(k)
            assign(k)
    return total / (1 / sigma0 + popularity / sigma)[:, None], assigned
