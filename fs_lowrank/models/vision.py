"""Networks for small images that are trained from scratch: ResNet-10 and -18 in their CIFAR form, LeNet, the FedMA CNN.

=============== ==================================================== ======================================
name            layers                                               parameters (10 classes)
=============== ==================================================== ======================================
``resnet10``    3×3 stem, four stages of one block of two 3×3        4,902,090 on 1 × 28 × 28 (4.90 M)
``resnet18``    the same with two blocks a stage                     11,173,962 on 3 × 32 × 32 (11.17 M);
                                                                     11,220,132 with 100 classes (11.22 M)
``lenet``       5×5 conv 6, 5×5 conv 16, then 256-120-84-10          44,426 on 1 × 28 × 28
``fedma_cnn``   5×5 conv 32, 5×5 conv 64, then 1600-512-128-10       940,362 on 3 × 32 × 32
=============== ==================================================== ======================================

The ResNets are Table A2 of Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its
Connection to Implicit Regularization" (2024); LeNet and the CNN are those of Jhunjhunwala et al., "FedFisher"
(AISTATS 2024), the latter from Wang et al., "Federated Learning with Matched Averaging" (ICLR 2020). The widths of
their linear layers above follow from images of 28 × 28 and 32 × 32; others work as well.

Adapters go on all convolutions of ``layer1`` to ``layer4``, the 1×1 ones of the shortcuts among them. That is how the
paper counts: with rank 128, 96, 64, what trains in ResNet-18 is 4.59 M, 3.44 M, 2.30 M of 11.17 M (41, 31, 21 %), in
ResNet-10 2.13 M, 1.60 M, 1.07 M of 4.90 M (43, 33, 22 %; the paper has 44 for the first). In the other two nets they go
on the second convolution and the hidden linear layers. What carries no adapter trains whole.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from ..errors import UserError, nearest, say_once
from ..jobs.files import replacing, write_text
from ..settings import VISION_MODELS
from .chain import resize

__all__ = ["VisionModel", "VisionOptions", "build_vision", "load_vision", "load_weights"]

WEIGHTS, OPTIONS = "model.safetensors", "config.json"


@dataclass(frozen=True)
class VisionOptions:
    """All that a network's shape depends on.

    Attributes:
        type: a name from the module's table.
        num_classes: width of the last layer.
        image_shape: ``(channels, height, width)``.
        width: multiplies all hidden widths; below 1 for machines without a GPU.
        norm: ``batch``; ``static``, batch-norm without running statistics, as in the FedLoRU authors' code (it
            evaluates by the statistics of the batch); ``group``; or ``none``. The nets other than ResNets have none.
        use_bias: biases in linear layers and in convolutions that no norm follows.
    """

    type: str
    num_classes: int
    image_shape: tuple[int, int, int]
    width: float = 1.0
    norm: str = "batch"
    use_bias: bool = True

    def scaled(self, channels: int) -> int:
        return max(1, round(channels * self.width))


class VisionModel(nn.Module):
    """Base of the networks: loss, saving, and what they tell adapters.

    Attributes:
        options: what it was built from.
        adapter_targets: full names of the layers that carry an adapter unless others are asked for.
    """

    def __init__(self, options: VisionOptions):
        super().__init__()
        self.options = options
        self.adapter_targets: list[str] = []

    def features(self, x: Tensor) -> Tensor:
        """``(batch, channels, height, width)`` to ``(batch, width of the head)``."""
        raise NotImplementedError

    @property
    def head(self) -> nn.Linear:
        """The last layer."""
        return self.get_submodule("fc" if hasattr(self, "fc") else "classifier")

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **_) -> ImageClassifierOutput:
        """Logits, and the mean cross entropy where ``labels`` are given.

        Args:
            pixel_values: float ``(batch, channels, height, width)``.
            labels: int64 ``(batch,)``.
        """
        logits = self.head(self.features(pixel_values.to(self.head.weight.dtype)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json``; ``load_vision`` reads them back."""
        folder = Path(folder)
        with replacing(folder / WEIGHTS) as aside:
            save_file({n: t.detach().cpu().contiguous() for n, t in self.state_dict().items()}, aside)
        options = dataclasses.asdict(self.options)
        grown = {n: list(m.weight.shape) for n, m in self.named_modules() if getattr(m, "may_grow", False)}
        write_text(folder / OPTIONS, json.dumps({**options, **({"grown": grown} if grown else {})}, indent=1) + "\n")


def _norm(options: VisionOptions, channels: int) -> nn.Module:
    if options.norm == "none":
        return nn.Identity()
    if options.norm == "group":
        # At most the usual 32 groups, and never a channel by itself.
        groups = next(g for g in range(min(32, channels), 0, -1) if channels % g == 0 and (channels > g or g == 1))
        return nn.GroupNorm(groups, channels)
    return nn.BatchNorm2d(channels, track_running_stats=options.norm == "batch")


def _conv(options: VisionOptions, inside: int, outside: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        inside, outside, kernel, stride, padding=kernel // 2, bias=options.norm == "none" and options.use_bias
    )


class _Block(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al., 2016), under torchvision's names."""

    def __init__(self, options: VisionOptions, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = _conv(options, inside, outside, 3, stride), _norm(options, outside)
        self.conv2, self.bn2 = _conv(options, outside, outside, 3), _norm(options, outside)
        self.downsample = (
            None
            if stride == 1 and inside == outside
            else nn.Sequential(_conv(options, inside, outside, 1, stride), _norm(options, outside))
        )

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.downsample is None else self.downsample(x)
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + short)


class ResNet(VisionModel):
    """Stem, four stages of ``blocks`` blocks with 64, 128, 256, 512 channels, mean over positions, one linear layer."""

    def __init__(self, options: VisionOptions, blocks: int):
        super().__init__(options)
        inside = options.scaled(64)
        self.conv1, self.bn1 = _conv(options, options.image_shape[0], inside, 3), _norm(options, inside)
        for stage, channels in enumerate((64, 128, 256, 512), start=1):
            outside = options.scaled(channels)
            layers = [
                _Block(options, inside if i == 0 else outside, outside, 2 if stage > 1 and i == 0 else 1)
                for i in range(blocks)
            ]
            self.add_module(f"layer{stage}", nn.Sequential(*layers))
            inside = outside
        self.fc = nn.Linear(inside, options.num_classes, bias=options.use_bias)
        self.adapter_targets = [
            n for n, m in self.named_modules() if isinstance(m, nn.Conv2d) and n.startswith("layer")
        ]
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if options.norm == "none":
            # Nothing else keeps the sum over the blocks from growing with their number.
            for module in self.modules():
                if isinstance(module, _Block):
                    module.conv2.weight.data /= (4 * blocks) ** 0.5

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))


class ConvNet(VisionModel):
    """Two 5×5 convolutions, each with ReLU and 2×2 max-pooling, hidden linear layers and a last one.

    Args:
        convs: channels of the convolutions. hidden: widths of the hidden linear layers.
    """

    def __init__(self, options: VisionOptions, convs: tuple[int, int], hidden: tuple[int, int]):
        super().__init__(options)
        channels, *size = options.image_shape
        left = [((s - 4) // 2 - 4) // 2 for s in size]
        if min(left) < 1:
            raise UserError(
                f"model.type = {options.type}: images of {size[0]} × {size[1]} are too small for it; "
                "it needs 16 × 16, for instance by data.transform [['Resize', {'size': [16, 16]}]]"
            )
        first, second = map(options.scaled, convs)
        bias = options.use_bias
        self.conv1 = nn.Conv2d(channels, first, 5, bias=bias)
        self.conv2 = nn.Conv2d(first, second, 5, bias=bias)
        widths = [second * left[0] * left[1], *map(options.scaled, hidden)]
        self.fc1 = nn.Linear(widths[0], widths[1], bias=bias)
        self.fc2 = nn.Linear(widths[1], widths[2], bias=bias)
        self.classifier = nn.Linear(widths[2], options.num_classes, bias=bias)
        self.adapter_targets = ["conv2", "fc1", "fc2"]

    def features(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(torch.relu(conv(x)), 2)
        return torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1)))))


_BUILDERS = {
    "lenet": lambda options: ConvNet(options, (6, 16), (120, 84)),
    "fedma_cnn": lambda options: ConvNet(options, (32, 64), (512, 128)),
    "resnet10": lambda options: ResNet(options, 1),
    "resnet18": lambda options: ResNet(options, 2),
}
assert set(_BUILDERS) == set(VISION_MODELS)


def build_vision(options: VisionOptions) -> VisionModel:
    """The network, its weights drawn by torch's global generator.

    Raises:
        UserError: no network of that name (with the nearest), or images that are too small for it.
    """
    if options.type not in _BUILDERS:
        raise UserError(
            f"model.type: no network {options.type!r}{nearest(options.type, _BUILDERS)}; "
            f"there are: {', '.join(_BUILDERS)}"
        )
    return _BUILDERS[options.type](options)


def load_vision(folder: str | Path) -> VisionModel:
    """The network that ``save_pretrained`` wrote to ``folder``, in evaluation mode.

    Raises:
        UserError: no such folder, or files that do not belong together.
    """
    folder = Path(folder)
    try:
        values = json.loads((folder / OPTIONS).read_text())
        grown = dict(values.pop("grown", {}))
        options = VisionOptions(**{**values, "image_shape": tuple(values["image_shape"])})
        model = build_vision(options)
        for name, shape in grown.items():  # widths that a method gave it
            layer = model.get_submodule(name)
            resize(layer, layer.weight.new_empty([int(size) for size in shape]))
            layer.may_grow = True
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UserError(f"{folder / OPTIONS}: cannot be read as a network's options: {error}") from error
    load_weights(model, folder / WEIGHTS, new_head=False)
    return model.eval()


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        UserError: no such file, or not one of safetensors.
    """
    try:
        return load_file(str(Path(path).expanduser()))
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read weights from {path}: {error}; expected a .safetensors file") from error


def load_weights(model: VisionModel, path: str | Path, new_head: bool = True) -> list[str]:
    """Load ``model``'s weights and running statistics from a safetensors file; in place.

    Args:
        new_head: the last layer may be missing in the file as a whole, or have another number of classes; it then
            stays new, which is said once.
    Returns:
        The names of the parameters that stay new.
    Raises:
        UserError: the file cannot be read, or a name or shape differs; nothing has been loaded by then.
    """
    given, own = read_weights(path), model.state_dict()
    head = {n for n in own if model.get_submodule(n.rpartition(".")[0]) is model.head}
    # A counter that nothing reads.
    counters = {n for n in own if n.endswith("num_batches_tracked")}
    other = sorted(n for n in head & given.keys() if given[n].shape != own[n].shape)
    if new_head and (other or not head & given.keys()):
        reason = f"{other[0]} is {_shape(given[other[0]])} there" if other else "the file has none"
        say_once(
            f"{path}: the head for {model.options.num_classes} classes is new ({', '.join(sorted(head))}): {reason}"
        )
        given = {n: t for n, t in given.items() if n not in head}
    else:
        head = set()
    wanted = own.keys() - head - counters
    _check_weights(given, own, wanted, counters, path, model.options.type)
    model.load_state_dict({n: t for n, t in given.items() if n in wanted}, strict=False)
    return sorted(head)


def _shape(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "a single number"


def _check_weights(
    given: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    wanted: set[str],
    counters: set[str],
    path: str | Path,
    kind: str,
) -> None:
    for name in sorted(wanted - given.keys()):
        raise UserError(f"{path}: has no tensor {name!r}, which {kind} needs{nearest(name, given)}")
    for name in sorted(given.keys() - wanted - counters):
        raise UserError(
            f"{path}: has a tensor {name!r}, which this {kind} has not{nearest(name, wanted)}; "
            "lowrank.norm, lowrank.width and model.use_bias must be as when it was saved"
        )
    for name in sorted(wanted):
        if given[name].shape != own[name].shape:
            raise UserError(
                f"{path}: {name} has shape {tuple(given[name].shape)}, this {kind} has "
                f"{tuple(own[name].shape)}; is lowrank.width the same, and the images' shape?"
            )
        if not given[name].is_floating_point():
            raise UserError(f"{path}: {name} has dtype {given[name].dtype}, expected floating point")
