"""Fisher information, and Gram matrices of layer inputs, of a model on some data.

The Fisher is that of the model's predictive distribution, ``F = (1/n) Σ_x E_{y ~ p(y|x)} [∇log p(y|x) ∇log p(y|x)ᵀ]``
(Jhunjhunwala et al. 2024, equation 3): labels of the data are not used. ``draws`` is the number of ``y`` drawn for each
``x``; 0 computes the exact expectation, with one backward pass per class.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..algebra import on_device
from ..errors import UserError, say_once
from .kinds import unwrapped
from .machine import input_device, rounding, without_autocast
from .shortcuts.masks import comparable
from .shortcuts.trials import failure, preserving_modes, with_gradients

Batches = Iterable[Mapping[str, Tensor]]
#: gives what is differentiated, sums over the samples of a batch, from its logits
Scalars = Callable[[Tensor], list[Tensor]]

#: maximum number of parameters of a full Fisher, which is a square matrix of 8-byte numbers
LARGEST_FULL = 4096
#: number of classes up to which the expectation over labels is exact by default, with one backward pass per class
LARGEST_EXACT = 100


def require_curvlinops() -> None:
    """Raise ``UserError`` unless curvlinops, which estimates K-FAC, is installed."""
    if importlib.util.find_spec("curvlinops") is None:
        raise UserError(
            'fisher: kfac needs curvlinops; run: pip install "fs-lowrank[oneshot]", then: '
            "pip install --no-deps curvlinops-for-pytorch backpack-for-pytorch (their own requirements "
            "would bring torchvision and another torch)"
        )


def matrix_layers(model: nn.Module, names: Iterable[str]) -> dict[str, bool]:
    """Linear and convolutional layers with their weight in ``names``: layer -> whether the bias is in ``names`` too.

    Grouped convolutions are left out, because their Fisher has no single factor for all inputs.
    """
    names = set(names)
    return {
        name: f"{name}.bias" in names
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or isinstance(module, nn.Conv2d) and module.groups == 1
        if f"{name}.weight" in names
    }


@contextmanager
def _only(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, nn.Parameter]]:
    """A context in which only the parameters ``names`` have gradients; yields them.

    The model is in evaluation mode, and computes in the dtype of its weights.
    """
    parameters, wanted = dict(model.named_parameters()), set(names)
    with preserving_modes(model), with_gradients(model, wanted), without_autocast(model), torch.enable_grad():
        model.eval()
        yield {n: parameters[n] for n in sorted(wanted)}


def _on(model: nn.Module, batches: Batches) -> Iterator[dict[str, Tensor]]:
    device = input_device(model)
    for batch in batches:
        yield on_device(batch, device)


def _logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.float()
    if logits.ndim != 2:
        raise UserError(
            f"the Fisher is of one class a sample, this model answers {tuple(logits.shape[1:])} to each; "
            "it applies to classifiers"
        )
    return logits


@torch.no_grad()
def count_classes(model: nn.Module, batches: Batches) -> int:
    """The number of classes of ``model``, from its output for the first batch."""
    with _only(model, ()):
        return _logits(model, next(_on(model, batches))).shape[1]


def _likelihoods(draws: int, generator: torch.Generator) -> Scalars:
    """For each draw (or class), the log-likelihood of a batch from its logits.

    The term of each sample is scaled so that the outer products of its gradients add up to its Fisher.
    """

    def scalars(logits: Tensor) -> list[Tensor]:
        logs = logits.log_softmax(-1)
        weights = logs.detach().exp()
        if draws == 0:
            return [(logs[:, label] * weights[:, label].sqrt()).sum() for label in range(logits.shape[1])]
        # Drawn on the CPU, so that a seed gives the same labels on every device.
        drawn = [torch.multinomial(weights.cpu(), 1, generator=generator).to(logs.device) for _ in range(draws)]
        return [logs.gather(1, labels).sum() * draws**-0.5 for labels in drawn]

    return scalars


def _gradients(logits: Tensor, tensors: Sequence[Tensor], scalars: Scalars) -> Iterator[tuple[Tensor | None, ...]]:
    """The gradients of each of ``scalars`` of the batch with respect to ``tensors``; None: unused."""
    values = scalars(logits)
    for scalar in values:
        yield torch.autograd.grad(scalar, tensors, retain_graph=scalar is not values[-1], allow_unused=True)


# -- the mean ------------------------------------------------------------------------------------------


def mean_gradients(model: nn.Module, batches: Batches, names: Iterable[str], rows: Tensor) -> dict[str, Tensor]:
    """The gradients of the mean loss of some rows of the data, float32, by the ``names`` of weights.

    Args:
        rows: their places in ``batches``, int64 ``(samples,)``.
    """
    with _only(model, names) as weights:
        sums, seen = {n: torch.zeros_like(w, dtype=torch.float32) for n, w in weights.items()}, 0
        for batch in _on(model, batches):
            size = len(batch["labels"])
            chosen = torch.isin(torch.arange(seen, seen + size), rows)
            seen += size
            if not chosen.any():
                continue
            part = {n: t[chosen.to(t.device)] for n, t in batch.items()}
            size = int(chosen.sum())
            grads = torch.autograd.grad(unwrapped(model)(**part).loss * size, list(weights.values()), allow_unused=True)
            for total, gradient in zip(sums.values(), grads):
                if gradient is not None:
                    total += gradient.float()
    return {n: total / len(rows) for n, total in sums.items()}


# -- the diagonal --------------------------------------------------------------------------------------


def _supported(module: nn.Module) -> bool:
    """Whether ``_squares`` supports ``module``."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if isinstance(module, nn.BatchNorm2d):
        return module.track_running_stats
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.scale_grad_by_freq
    return isinstance(module, (nn.Linear, nn.LayerNorm, nn.GroupNorm))


def _squares(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Squared gradients, summed over samples, from a layer's input and the gradient of its output."""
    x, g = x.detach(), g.detach().float()
    if isinstance(module, nn.Embedding):
        return {"weight": _embedding_squares(module, x, g)}
    x = x.float()
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm2d)):
        return _norm_squares(module, x, g)
    if isinstance(module, nn.Conv2d):
        padding = cast(tuple[int, ...], module.padding)  # ``_supported`` excludes text
        x = nn.functional.unfold(x, module.kernel_size, module.dilation, padding, module.stride)
        x, g = x.transpose(1, 2), g.flatten(2).transpose(1, 2)
    elif x.ndim == 2:
        # One outer product per sample: its square is the outer product of the squares.
        return {"weight": (g * g).T @ (x * x), "bias": (g * g).sum(0)}
    x, g = x.flatten(1, -2), g.flatten(1, -2)  # (samples, positions, width)
    total = x.new_zeros(g.shape[-1], x.shape[-1])
    share = max(1, (1 << 24) // total.numel())  # number of samples at a time, which bounds the memory
    for a, b in zip(x.split(share), g.split(share)):
        total += torch.bmm(b.transpose(1, 2), a).square_().sum(0)
    return {"weight": total, "bias": g.sum(1).square().sum(0)}


def _norm_squares(module: nn.LayerNorm | nn.GroupNorm | nn.BatchNorm2d, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    parameters = module.named_parameters(recurse=False)
    plain_affine = {n: torch.full_like(p, float(n == "weight"), dtype=x.dtype) for n, p in parameters}
    plain = functional_call(module, plain_affine, (x,))
    axes = tuple(range(2, x.ndim))
    if isinstance(module, nn.LayerNorm):
        axes = tuple(range(1, x.ndim - len(module.normalized_shape)))
    terms = {"weight": g * plain, "bias": g}
    return {n: (t.sum(axes) if axes else t).square().sum(0) for n, t in terms.items()}


def _embedding_squares(module: nn.Embedding, ids: Tensor, g: Tensor) -> Tensor:
    rows, ids, g = module.num_embeddings, ids.flatten(1), g.flatten(1, -2)
    if module.padding_idx is not None:
        g = g * (ids != module.padding_idx)[..., None]
    # Occurrences of a token in one sample are summed before squaring.
    keys = ids + rows * torch.arange(len(ids), device=ids.device)[:, None]
    unique, inverse = keys.flatten().unique(return_inverse=True)
    summed = g.new_zeros(len(unique), g.shape[-1]).index_add_(0, inverse, g.flatten(0, 1))
    return g.new_zeros(rows, g.shape[-1]).index_add_(0, unique % rows, summed.square_())


def diagonal_fisher(
    model: nn.Module, batches: Batches, names: Sequence[str], *, draws: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """The diagonal of the Fisher over the parameters ``names``.

    If all of them belong to linear or convolutional layers, norms and embeddings, whole batches are used, at the cost
    of one or two epochs. For other models, samples are processed one at a time; also where the first two samples say
    that this gives something else, as the inputs of a layer need not be of one sample each.

    Args:
        batches: the data once, as model inputs; ``labels`` are ignored.
        draws: number of labels drawn for each sample; 0: the exact expectation.
        seed: of the draws.
    Returns:
        Nonnegative float32 tensors by name, with the shapes of the parameters.
    """
    owners = {n: model.get_submodule(n.rpartition(".")[0]) for n in names}
    by_sample = any(not _supported(m) or n.rpartition(".")[2] not in ("weight", "bias") for n, m in owners.items())
    with _only(model, names) as parameters:
        total = _zeros(parameters)
        scalars, count = _likelihoods(draws, torch.Generator().manual_seed(seed)), 0
        for batch in _on(model, batches):
            by_sample = by_sample or count == 0 and _layers_differ(model, batch, parameters)
            for part in _samples(batch) if by_sample else [batch]:
                (_add_by_sample if by_sample else _add_by_layer)(model, part, parameters, total, scalars)
            count += len(batch["labels"])
    return {n: t / count for n, t in total.items()}


def _zeros(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: torch.zeros(p.shape, device=p.device) for n, p in parameters.items()}


def _samples(batch: Mapping[str, Tensor], limit: int | None = None) -> list[dict[str, Tensor]]:
    """The samples of a batch as batches, at most ``limit`` of them."""
    return [{k: v[i : i + 1] for k, v in batch.items()} for i in range(len(batch["labels"]))[:limit]]


def _layers_differ(model: nn.Module, batch: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether ``_add_by_layer`` gives something else than ``_add_by_sample``; if so, a warning says so once.

    It is tried on two samples of ``batch``, with one sum of their logits and without the run's random numbers.
    """
    by_sample, by_layer, wrong = _zeros(parameters), _zeros(parameters), ""
    with comparable():
        for sample in _samples(batch, 2):
            _add_by_sample(model, sample, parameters, by_sample, _probe)
        try:
            _add_by_layer(model, {k: v[:2] for k, v in batch.items()}, parameters, by_layer, _probe)
        except Exception as error:  # a layer may take and give anything
            wrong = failure(error)
    norms = {n: float(t.norm()) for n, t in by_sample.items()}
    # A GPU may compute in TF32. Gradients that are zero but for rounding have squares of any size below its square.
    eps = max(rounding(model), 1e-3 if batch["labels"].device.type == "cuda" else 0.0)
    for name, norm in norms.items() if not wrong else ():
        difference = float((by_layer[name] - by_sample[name]).norm())
        if not difference <= max(1e-2, 32 * eps) * norm + (32 * eps) ** 2 * max(norms.values()):  # NaN too
            wrong = f"that of {name}, of norm {norm:.2g}, would differ by {difference:.2g}"
            break
    if wrong:
        say_once(
            f"the diagonal Fisher of {type(unwrapped(model)).__name__} is computed sample by sample, which takes "
            f"longer; by layers it would be wrong ({wrong})"
        )
    return bool(wrong)


def _probe(logits: Tensor) -> list[Tensor]:
    """One sum to which all classes contribute differently."""
    return [(logits.log_softmax(-1) * torch.linspace(0, 1, logits.shape[1], device=logits.device)).sum()]


def _add_by_sample(model, sample, parameters, total, scalars) -> None:
    for grads in _gradients(_logits(model, sample), list(parameters.values()), scalars):
        for name, grad in zip(parameters, grads):
            if grad is not None:
                total[name] += grad.float().square()


def _add_by_layer(model, batch, parameters, total, scalars) -> None:
    layers = sorted({n.rpartition(".")[0] for n in parameters})
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    size = len(batch["labels"])

    def keep(name):
        def hook(module, args, output):
            if name in seen:
                raise UserError(
                    f"{name} is used more than once in a forward pass; the diagonal Fisher of a shared "
                    "layer is not the sum of its uses"
                )
            x = args[0]
            if len(x) == 1 < size:  # positions, looked up once for all samples
                x, output = (t.expand(size, *t.shape[1:]) for t in (x, output))
            seen[name] = x, output
            return output

        return hook

    with ExitStack() as stack:
        for name in layers:
            stack.enter_context(model.get_submodule(name).register_forward_hook(keep(name)))
        logits = _logits(model, batch)
    used = sorted(seen)
    # With respect to outputs, since gradients of weights would be sums over the batch.
    for grads in _gradients(logits, [seen[n][1] for n in used], scalars):
        for name, grad in zip(used, grads):
            squares = {} if grad is None else _squares(model.get_submodule(name), seen[name][0], grad)
            for part, square in squares.items():
                if f"{name}.{part}" in total:
                    total[f"{name}.{part}"] += square.reshape(total[f"{name}.{part}"].shape)


# -- Kronecker factors ---------------------------------------------------------------------------------


class _Logits(nn.Module):
    """A model that maps its inputs to logits only."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return _logits(self.model, inputs)


def kronecker_fisher(
    model: nn.Module, batches: Batches, layers: Mapping[str, bool], *, draws: int = 1, seed: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    """K-FAC (Martens and Grosse 2015; convolutions: Grosse and Martens 2016) of ``layers``, by curvlinops.

    The Fisher of a layer is approximated by ``A ⊗ G``: ``A`` of its inputs (with a last entry of one if the bias is
    included), ``G`` of the gradients of its outputs. Only the product is determined; its scale may be in either factor.

    Args:
        layers: from ``matrix_layers``.
    Returns:
        ``(A, G)`` in float32, ``(d_in, d_in)`` and ``(d_out, d_out)``, by layer; ``d_in`` of a convolution is
        its input channels times its kernel size, as in its weight flattened from the second dimension on.
    """
    require_curvlinops()
    from curvlinops import KFACLinearOperator

    names = [f"{n}.weight" for n in layers] + [f"{n}.bias" for n, bias in layers.items() if bias]
    with _only(model, names) as parameters:
        data = [({k: v for k, v in b.items() if k != "labels"}, b["labels"]) for b in _on(model, batches)]
        operator = KFACLinearOperator(
            _Logits(model),
            nn.CrossEntropyLoss(),
            list(parameters.values()),
            data,
            check_deterministic=False,
            fisher_type="mc" if draws else "type-2",
            mc_samples=max(draws, 1),
            seed=seed,
            separate_weight_and_bias=False,
            num_data=sum(len(y) for _, y in data),
            num_per_example_loss_terms=1,
            batch_size_fn=lambda inputs: len(next(iter(inputs.values()))),
        )
        operator.compute_kronecker_factors()
        factors = operator.state_dict()

    def symmetric(kind: str, name: str) -> Tensor:
        matrix = factors[kind][f"model.{name}"]
        return (0.5 * (matrix + matrix.T)).detach().float()

    return {n: (symmetric("input_covariances", n), symmetric("gradient_covariances", n)) for n in layers}


# -- full ---------------------------------------------------------------------------------------------


def full_fisher(model: nn.Module, batches: Batches, names: Sequence[str], *, draws: int = 0, seed: int = 0) -> Tensor:
    """The full Fisher over the parameters ``names``, sorted and flattened: float64 ``(d, d)``.

    Raises:
        UserError: more parameters than ``LARGEST_FULL``.
    """
    with _only(model, names) as parameters:
        check_full_size(parameters)
        size = sum(p.numel() for p in parameters.values())
        total = torch.zeros(size, size, dtype=torch.float64)
        scalars, count = _likelihoods(draws, torch.Generator().manual_seed(seed)), 0
        for batch in _on(model, batches):
            for sample in _samples(batch):
                for grads in _gradients(_logits(model, sample), list(parameters.values()), scalars):
                    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), grads)]
                    flat = torch.cat([g.flatten() for g in filled]).double().cpu()
                    total.addr_(flat, flat)
                count += 1
    return total / count


def check_full_size(parameters: Mapping[str, Tensor]) -> None:
    """Raise ``UserError`` if the full Fisher over ``parameters`` would be too large."""
    size = sum(p.numel() for p in parameters.values())
    if size > LARGEST_FULL:
        raise UserError(
            f"fisher: full is a square matrix over all {size} parameters, which is for nets of up to "
            f"{LARGEST_FULL}; choose kfac or diag"
        )


# -- inputs --------------------------------------------------------------------------------------------


@torch.no_grad()
def input_grams(model: nn.Module, batches: Batches, layers: Iterable[str]) -> dict[str, Tensor]:
    """``(1/m) Σ x xᵀ`` over the ``m`` inputs of each linear layer: float32 ``(d_in, d_in)`` by layer."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def keep(name):
        def hook(module, args):
            x = args[0].detach().float().flatten(0, -2)
            sums[name] = sums[name] + x.T @ x if name in sums else x.T @ x
            counts[name] = counts.get(name, 0) + len(x)

        return hook

    with _only(model, ()), ExitStack() as stack:
        for name in layers:
            stack.enter_context(model.get_submodule(name).register_forward_pre_hook(keep(name)))
        for batch in _on(model, batches):
            model(**{k: v for k, v in batch.items() if k != "labels"})
    return {name: sums[name] / counts[name] for name in layers}
