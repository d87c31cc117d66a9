"""DENSE: a generator learns images for which the ensemble of clients is certain, and one model learns from them.

Zhang et al., "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022, Algorithm 1.

    every epoch       a new generator and its inputs z are trained on the ensemble's logits  f(x) = Σ_k p_k f_k(x):
                      L = CE(f(x), y) + λ₁ L_BN − λ₂ KL(f(x) ‖ student(x)) where the two disagree,   y at random
                      its best images are added to those of the earlier epochs
                      the student learns them:  L_S = KL(f(x) ‖ student(x)) at temperature 20

The student starts at the mean, and the epoch that is best on validation data is kept. ``L_BN`` is the distance of the
inputs of each batch norm to its running statistics, summed over layers and clients as in the authors' code
(github.com/zj-jayzhang/DENSE), and zero in networks without batch norm. As in the code of Jhunjhunwala et al. 2024,
``f`` weights by ``p_k``, and images are cropped and flipped at random. Their range is that
of a batch of validation images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...algebra import weighted_mean
from ...seeds import derive
from ...settings import key
from ..registry import register_method
from ..terms import Tensors
from .base import WITHOUT_ADAPTER, OneShot, best, logits_of

TEMPERATURE, PADDING = 20.0, 4


class Generator(nn.Module):
    """Noise ``(n, latent)`` to images of ``shape`` between ``low`` and ``high``; the authors' network."""

    def __init__(self, latent: int, width: int, shape: tuple[int, int, int], low: float, high: float):
        super().__init__()
        self.shape, self.start = shape, (-(-shape[1] // 4), -(-shape[2] // 4))
        self.low, self.high, self.width = low, high, width
        self.first = nn.Linear(latent, 2 * width * self.start[0] * self.start[1])
        self.norms = nn.ModuleList([nn.BatchNorm2d(2 * width), nn.BatchNorm2d(2 * width), nn.BatchNorm2d(width)])
        widths = ((2 * width, 2 * width), (2 * width, width), (width, shape[0]))
        self.convs = nn.ModuleList([nn.Conv2d(*pair, 3, padding=1, bias=i == 2) for i, pair in enumerate(widths)])

    def forward(self, z: Tensor) -> Tensor:
        x = self.norms[0](self.first(z).reshape(len(z), 2 * self.width, *self.start))
        x = x.contiguous(memory_format=torch.channels_last)
        for norm, conv in zip(self.norms[1:], self.convs):
            x = nn.functional.leaky_relu(norm(doubled(x, conv.get_parameter("weight"))), 0.2)
        x = self.low + (self.high - self.low) * torch.sigmoid(self.convs[2](x))
        return x[..., : self.shape[1], : self.shape[2]]

    def draw(self, generator: torch.Generator) -> None:
        """Draw all weights as the authors do: normal with standard deviation 0.02 around 0, or around 1 in norms."""
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                parameter.data.zero_()
                if name == "weight":
                    parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
                    parameter.data += float(isinstance(module, nn.BatchNorm2d))


def doubled(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve ``x (n, in, h, w)``, each pixel doubled in both directions, with ``weight (out, in, 3, 3)``.

    One transposed convolution with sums of the kernel's entries, which takes 2.25 times fewer products than two steps.

    Returns:
        ``(n, out, 2h, 2w)``.
    """
    kernel = weight.flip(2, 3)
    pairs = nn.functional.pad(kernel, (1, 0)) + nn.functional.pad(kernel, (0, 1))
    kernel = nn.functional.pad(pairs, (0, 0, 1, 0)) + nn.functional.pad(pairs, (0, 0, 0, 1))
    return nn.functional.conv_transpose2d(x, kernel.transpose(0, 1), stride=2, padding=1)


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """``KL(teacher ‖ student)`` of each sample, times the square of the temperature."""
    logs = (student / temperature).log_softmax(-1)
    return nn.functional.kl_div(logs, (teacher / temperature).softmax(-1), reduction="none").sum(-1) * temperature**2


def vary(images: Tensor, generator: torch.Generator) -> Tensor:
    """The batch shifted by up to ``PADDING`` pixels, and each image mirrored with probability ½."""
    height, width = images.shape[2:]
    top, left = torch.randint(0, 2 * PADDING + 1, (2,), generator=generator).tolist()
    moved = nn.functional.pad(images, [PADDING] * 4)[:, :, top : top + height, left : left + width]
    mirrored = (torch.rand(len(images), generator=generator) < 0.5).to(images.device)
    return torch.where(mirrored[:, None, None, None], moved.flip(3), moved)


@register_method("dense")
class Dense(OneShot):
    source = "Zhang et al., NeurIPS 2022"
    sends = "all weights"

    @dataclass(frozen=True)
    class Params:
        epochs: int = key(20, min=1, help="number of generators, each with its own images")
        generator_steps: int = key(30, min=1, help="T_G, steps of each generator")
        images: int = key(256, min=2, help="made by each generator")
        latent: int = key(256, min=1, help="width of the generator's input")
        channels: int = key(64, min=1, help="of the generator")
        generator_lr: float = key(1e-3, above=0.0, help="of Adam")
        student_lr: float = key(0.01, above=0.0, help="of SGD with momentum 0.9")
        lambda1: float = key(1.0, min=0.0, help="of the batch-norm loss")
        lambda2: float = key(0.5, min=0.0, help="of the boundary loss")

    params: Params

    @classmethod
    def requires(cls, params: Params):
        needs = replace(super().requires(params), adapter="none", idle=WITHOUT_ADAPTER)
        return replace(needs, tasks=("ImageClassification",), validation=True)

    def aggregate(self, updates, state, round):
        weights, parts = self.weights(updates), [u.tensors for u in updates]
        mean = weighted_mean(parts, weights)
        with torch.enable_grad():
            students = self.students(parts, weights, mean, derive(self.workbench.seed, "dense", round))
            message = {**mean, **best(self.workbench, students)}
        return {**state, **message}, message

    def students(
        self, parts: Sequence[Tensors], weights: Sequence[float], start: Tensors, seed: int
    ) -> Iterator[dict[str, Tensor]]:
        """The student before the first epoch and after each; ``losses`` holds the losses by epoch."""
        p, model = self.params, self.workbench.model
        draw = torch.Generator().manual_seed(seed)
        parameters = dict(model.named_parameters())
        student = {n: t.clone().requires_grad_(n in parameters) for n, t in start.items()}
        first = next(iter(self.workbench.validation()))["pixel_values"].to(next(iter(start.values())).device)
        generator = Generator(p.latent, p.channels, tuple(first.shape[1:]), float(first.min()), float(first.max()))
        generator.to(first.device)
        optimizer = torch.optim.SGD([t for n, t in student.items() if n in parameters], lr=p.student_lr, momentum=0.9)
        pool: list[Tensor] = []
        self.losses: dict[str, list[float]] = {"generator_first": [], "generator_last": [], "student": []}
        model.eval()
        yield student
        for _ in range(p.epochs):
            pool.append(self.images(model, generator, parts, weights, student, draw))
            total = 0.0
            for i in torch.randperm(len(pool), generator=draw).tolist():
                images = vary(pool[i], draw)
                with torch.no_grad():
                    teacher = self.ensemble(model, parts, weights, images)
                loss = divergence(logits_of(model, student, {"pixel_values": images}), teacher, TEMPERATURE).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach())
            self.losses["student"].append(total / len(pool))
            yield student

    def images(
        self,
        model: nn.Module,
        generator: Generator,
        parts: Sequence[Tensors],
        weights: Sequence[float],
        student: Tensors,
        draw: torch.Generator,
    ) -> Tensor:
        """The batch of images with the lowest loss while a generator with new weights trains."""
        p, device = self.params, next(generator.parameters()).device
        generator.draw(draw)
        generator.train()
        classes = logits_of(model, parts[0], {"pixel_values": torch.zeros(1, *generator.shape, device=device)}).shape[1]
        z = torch.randn(p.images, p.latent, generator=draw).to(device).requires_grad_()
        labels = torch.randint(0, classes, (p.images,), generator=draw).sort()[0].to(device)
        optimizer = torch.optim.Adam([*generator.parameters(), z], lr=p.generator_lr, betas=(0.5, 0.999))
        losses: list[float] = []
        chosen, lowest = z, float("inf")
        for _ in range(p.generator_steps):
            images = generator(z)
            varied = vary(images, draw)
            with Statistics(model) as statistics:
                teacher = self.ensemble(model, parts, weights, varied)
            answers = logits_of(model, {n: t.detach() for n, t in student.items()}, {"pixel_values": varied})
            disagree = (answers.argmax(-1) != teacher.argmax(-1)).float()
            loss = (
                nn.functional.cross_entropy(teacher, labels)
                + p.lambda1 * statistics.distance()
                - p.lambda2 * (divergence(answers, teacher) * disagree).mean()
            )
            losses.append(float(loss.detach()))
            if len(losses) == 1 or losses[-1] < lowest:
                chosen, lowest = images.detach(), losses[-1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.losses["generator_first"].append(losses[0])
        self.losses["generator_last"].append(losses[-1])
        return chosen

    @staticmethod
    def ensemble(model: nn.Module, parts: Sequence[Tensors], weights: Sequence[float], images: Tensor) -> Tensor:
        """``Σ_k p_k f_k(images)``."""
        first, *terms = (w * logits_of(model, part, {"pixel_values": images}) for w, part in zip(weights, parts))
        return sum(terms, first)


class Statistics:
    """The distances of the inputs of each batch norm to its running statistics, in the forward passes inside."""

    def __init__(self, model: nn.Module):
        self.norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d) and m.track_running_stats]
        self.distances: list[Tensor] = []

    def __enter__(self):
        self.hooks = [m.register_forward_pre_hook(self.note) for m in self.norms]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def note(self, module, args) -> None:
        var, mean = torch.var_mean(args[0].float(), (0, 2, 3), correction=0)
        self.distances.append((module.running_mean - mean).norm() + (module.running_var - var).norm())

    def distance(self) -> Tensor | float:
        return sum(self.distances) if self.distances else 0.0
