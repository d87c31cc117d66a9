"""FedLoRU's two theorems on Hessians with random error, in a numerical experiment with known expectations.

Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its Connection to Implicit
Regularization", Proposition 3.1, Theorems 3.2 and 3.3.

The Hessian on N samples is H_N = H_true + s(N) X (eq. 1): H_true (R, R) has the eigenvalues theta and zeros, X is
symmetric with independent entries of mean 0 and variance sigma^2 / R, and s falls with N. Then, as R grows,

    an eigenvalue theta with |theta| > sigma s moves to theta + sigma^2 s^2 / theta            (Proposition 3.1)
    srank(H) = ||H||_F^2 / ||H||_2^2 is larger for the smaller sample                          (Theorem 3.2)
    the mean cosine of two clients' rank-r gradients falls as r grows                          (Theorem 3.3)

Known expectations used here: E ||H||_F^2 = sum theta^2 + R sigma^2 s^2, exactly; ||H||_2 from Proposition 3.1; for the
cosine, eqs. 54 and 57.

Two remarks on the paper.
* Its condition for an eigenvalue to leave the bulk, theta + sigma^2 s^2 / theta > 2 sigma s (eq. 2), holds for every
  positive theta except sigma s. The condition of the result that it uses (Benaych-Georges and Nadakuditi, 2011) is
  |theta| > sigma s; a smaller theta stays at the edge of the bulk, 2 sigma s.
* The bound of Theorem 3.2 counts every eigenvalue of the bulk at the edge. The mean square over the bulk is
  sigma^2 s^2, a quarter of that, so the gap has the sign of the theorem and may lie below the bound.
Assumption A.5 (a gradient's derivatives along the eigenvectors are the same for all clients: alpha along the outliers,
beta along the bulk) is taken as given, not tested.
"""

from __future__ import annotations

import math

import torch

from benchmark.script import script

from . import label, panels

THETA = (5.0, 4.0, 3.0, -2.5, 2.0)
SIGMA = 1.0


def scale(samples: int) -> float:
    """s(N) = 7 / sqrt(N), between 0 and 1 for 50 samples and more."""
    return 7.0 / math.sqrt(samples)


def draw(theta: tuple[float, ...], dim: int, s: float, generator: torch.Generator, sigma: float = SIGMA):
    """H_N (dim, dim), float64, in the basis of H_true's eigenvectors: the first ones belong to ``theta``."""
    entries = torch.randn(dim, dim, generator=generator, dtype=torch.float64) * (s * sigma / math.sqrt(dim))
    error = entries.triu() + entries.triu(1).T
    error.diagonal()[: len(theta)] += torch.tensor(theta, dtype=torch.float64)
    return error


def outlier(theta: float, s: float, sigma: float = SIGMA) -> float:
    """The limit of the eigenvalue ``theta``; the edge of the bulk if it is too small to leave it."""
    if abs(theta) <= sigma * s:
        return math.copysign(2 * sigma * s, theta)
    return theta + sigma**2 * s**2 / theta


def stable_rank(eigenvalues: torch.Tensor) -> float:
    """||H||_F^2 / ||H||_2^2."""
    squares = eigenvalues.square()
    return (squares.sum() / squares.max()).item()


def expected_stable_rank(theta: tuple[float, ...], dim: int, s: float, sigma: float = SIGMA) -> float:
    """From the exact expectation of the squared Frobenius norm and the limit of the spectral norm."""
    top = max(abs(outlier(t, s, sigma)) for t in theta)
    return (sum(t * t for t in theta) + dim * sigma**2 * s**2) / max(top, 2 * sigma * s) ** 2


def bound(theta: tuple[float, ...], dim: int, s_small: float, s_large: float, sigma: float = SIGMA) -> float:
    """Theorem 3.2's lower bound (eq. 4) on srank(few samples, ``s_small``) - srank(many, ``s_large``)."""
    top = max(theta, key=abs)
    outliers = [t for t in theta if abs(t) > sigma * s_large]
    spikes = sum(8 * sigma**4 * s_small * s_large * abs(top / t - t / top) for t in outliers)
    bulk = 4 * sigma**2 * (dim - len(outliers)) * (top**2 - sigma**4 * s_small**2 * s_large**2 / top**2)
    return (
        (s_small**2 - s_large**2) / (outlier(top, s_small, sigma) * outlier(top, s_large, sigma)) ** 2 * (spikes + bulk)
    )


def gradients(theta, dim: int, s: float, ranks, alpha: float, beta: float, generator: torch.Generator) -> torch.Tensor:
    """One client's rank-r gradients (len(ranks), dim): alpha along each outlier's eigenvector (taken in the direction
    of the true one), beta along the following ones of the bulk, by falling magnitude."""
    values, vectors = torch.linalg.eigh(draw(theta, dim, s, generator))
    vectors = vectors[:, values.abs().argsort(descending=True)[: max(ranks)]]
    order = sorted(range(len(theta)), key=lambda i: -abs(theta[i]))
    signs = torch.randint(2, (vectors.shape[1],), generator=generator) * 2.0 - 1.0
    for j, i in enumerate(order[: vectors.shape[1]]):
        signs[j] = torch.sign(vectors[i, j])
    weights = torch.full((vectors.shape[1],), beta, dtype=torch.float64)
    weights[: len(theta)] = alpha
    return torch.stack([vectors[:, :r] @ (signs[:r] * weights[:r]) for r in ranks])


def cosines(theta, dim: int, s: float, ranks, clients: int, alpha: float, beta: float, seed: int) -> list[list[float]]:
    """For each rank, the cosine of every pair of clients."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.stack([gradients(theta, dim, s, ranks, alpha, beta, generator) for _ in range(clients)], dim=1)
    units = vectors / vectors.norm(dim=-1, keepdim=True)
    upper = torch.triu_indices(clients, clients, 1)
    return [(u @ u.T)[upper[0], upper[1]].tolist() for u in units]


def expected_cosine(theta, s: float, rank: int, alpha: float, beta: float, sigma: float = SIGMA) -> float:
    """Eq. 54 for ranks up to the number of outliers, eq. 57 beyond."""
    outliers = sorted((abs(t) for t in theta), reverse=True)
    overlaps = [alpha**2 * max(0.0, 1 - (sigma * s / t) ** 2) for t in outliers[:rank]]
    return sum(overlaps) / (alpha**2 * len(overlaps) + beta**2 * max(0, rank - len(outliers)))


def study(
    dim: int,
    seeds: int,
    *,
    samples=(50, 100, 200, 500, 1000, 2000, 5000),
    compared=(50, 500),
    ranks=(1, 2, 3, 4, 5, 6, 8, 12, 20, 40),
    clients: int = 8,
    alpha: float = 1.0,
    beta: float = 0.5,
) -> dict:
    """The result of the command, as plain data."""
    by_size = []
    for n in samples:
        s, stable_ranks, tops, weak = scale(n), [], [], []
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(1000 * n + seed)
            values = torch.linalg.eigvalsh(draw(THETA, dim, s, generator))
            stable_ranks.append(stable_rank(values))
            tops.append(values[-4:].flip(0).tolist())  # of the four positive thetas
            weak.append(torch.linalg.eigvalsh(draw((0.5 * SIGMA * s,), dim, s, generator))[-1].item() / s)
        by_size.append(
            {
                "samples": n,
                "s": s,
                "stable_rank": stable_ranks,
                "expected_stable_rank": expected_stable_rank(THETA, dim, s),
                "largest_eigenvalues": tops,
                "expected_eigenvalues": [outlier(t, s) for t in THETA if t > 0],
                "weak_eigenvalue_over_s": weak,
            }
        )
    gaps = []
    for small, large in zip(by_size, by_size[1:]):
        gap = sum(small["stable_rank"]) / seeds - sum(large["stable_rank"]) / seeds
        gaps.append(
            {
                "few": small["samples"],
                "many": large["samples"],
                "measured": gap,
                "bound": bound(THETA, dim, small["s"], large["s"]),
                "positive": gap > 0,
            }
        )
    alignment = [
        {
            "samples": n,
            "s": scale(n),
            "ranks": list(ranks),
            "cosines": cosines(THETA, dim, scale(n), ranks, clients, alpha, beta, seed=n),
            "expected": [expected_cosine(THETA, scale(n), r, alpha, beta) for r in ranks],
        }
        for n in compared
    ]
    return {
        "settings": {
            "dim": dim,
            "theta": list(THETA),
            "sigma": SIGMA,
            "s": "7 / sqrt(N)",
            "seeds": seeds,
            "clients": clients,
            "alpha": alpha,
            "beta": beta,
        },
        "theorem_3_2": {"by_size": by_size, "gaps": gaps},
        "weak_eigenvalue": {"theta_over_sigma_s": 0.5, "paper": 2.5, "edge": 2.0},
        "theorem_3_3": alignment,
    }


def plot(result: dict):
    settings, by_size = result["settings"], result["theorem_3_2"]["by_size"]
    figure, (left, middle, right) = panels(3, 15, 5)
    sizes = [e["samples"] for e in by_size]

    ranks = torch.tensor([e["stable_rank"] for e in by_size], dtype=torch.float64)
    left.plot(sizes, ranks.mean(1), "o", ms=7, label=f"measured, mean of {settings['seeds']} draws")
    left.vlines(sizes, ranks.amin(1), ranks.amax(1), lw=2)
    left.plot(sizes, [e["expected_stable_rank"] for e in by_size], color="tab:orange", label="expected")
    label(left, "Theorem 3.2: fewer samples, larger stable rank", "samples N", r"$\|H\|_F^2\,/\,\|H\|_2^2$", "xy")

    tops = torch.tensor([e["largest_eigenvalues"] for e in by_size], dtype=torch.float64).mean(1)
    for k, theta in enumerate(t for t in settings["theta"] if t > 0):
        colour = f"C{k}"
        middle.plot(sizes, tops[:, k], "o", color=colour, label=rf"$\theta = {theta:g}$")
        middle.plot(sizes, [e["expected_eigenvalues"][k] for e in by_size], color=colour, lw=1)
    edge = [2 * settings["sigma"] * e["s"] for e in by_size]
    middle.plot(sizes, edge, color="grey", ls=":", label="edge of the bulk")
    title = r"Proposition 3.1: dots measured, lines $\theta + \sigma^2 s^2/\theta$"
    label(middle, title, "samples N", "eigenvalue", "x", ylim=(0, None))

    for k, entry in enumerate(result["theorem_3_3"]):
        cosine = torch.tensor(entry["cosines"], dtype=torch.float64)
        error = cosine.std(1) / math.sqrt(cosine.shape[1])
        text = f"N = {entry['samples']}, measured ± 2 standard errors"
        right.errorbar(entry["ranks"], cosine.mean(1), 2 * error, fmt="o", capsize=3, color=f"C{k}", label=text)
        right.plot(entry["ranks"], entry["expected"], color=f"C{k}", lw=1, label="expected, eqs. 54 and 57")
    right.axvline(len(settings["theta"]), color="grey", ls=":", label="number of outliers")
    title = "Theorem 3.3: alignment falls as the rank grows"
    label(right, title, "rank r", "mean cosine of two clients", "x", ylim=(0, 1.02))
    figure.suptitle(
        f"$H_N = H_{{true}} + s(N)\\,X$, R = {settings['dim']}, s(N) = 7/√N, σ = {settings['sigma']:g}, "
        f"θ = {', '.join(f'{t:g}' for t in settings['theta'])}"
    )
    return figure


OPTIONS = {
    "--dim": dict(type=int, default=800, help="R, the size of the matrices"),
    "--seeds": dict(type=int, default=5, help="draws of each matrix"),
}
main = script(__spec__.name, __doc__, OPTIONS, study, plot=plot)


if __name__ == "__main__":
    raise SystemExit(main())
