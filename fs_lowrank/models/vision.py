"""Networks for small images, trained from scratch: ResNet-10 and -18 (CIFAR form), LeNet, and the FedMA CNN.

=============== ==================================================== ======================================
name            layers                                               parameters (10 classes)
=============== ==================================================== ======================================
``resnet10``    3×3 stem, four stages of one block of two 3×3        4,902,090 on 1 × 28 × 28 (4.90 M)
``resnet18``    the same with two blocks per stage                   11,173,962 on 3 × 32 × 32 (11.17 M);
                                                                     11,220,132 with 100 classes (11.22 M)
``lenet``       5×5 conv 6, 5×5 conv 16, then 256-120-84-10          44,426 on 1 × 28 × 28
``fedma_cnn``   5×5 conv 32, 5×5 conv 64, then 1600-512-128-10       940,362 on 3 × 32 × 32
=============== ==================================================== ======================================

The ResNets are Table A2 of Park and Klabjan, "Communication-Efficient Federated Low-Rank Update Algorithm and its
Connection to Implicit Regularization" (2024); LeNet and the CNN are those of Jhunjhunwala et al., "FedFisher"
(AISTATS 2024), the latter from Wang et al., "Federated Learning with Matched Averaging" (ICLR 2020). The widths of
their linear layers above are for images of 28 × 28 and 32 × 32; other sizes work as well.

Adapters are on all convolutions of ``layer1`` to ``layer4``, including the 1×1 convolutions of the shortcuts. This
agrees with the paper: with rank 128, 96, 64, the trained parameters of ResNet-18 are 4.59 M, 3.44 M, 2.30 M of 11.17 M
(41, 31, 21 %), those of ResNet-10 2.13 M, 1.60 M, 1.07 M of 4.90 M (43, 33, 22 %; the paper has 44 for the first). In
the other two networks they are on the second convolution and the hidden linear layers. Layers without an adapter are
trained in full.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from ..errors import UserError, say_once, user_errors
from ..jobs.files import read_json, replacing, write_text
from ..settings import VISION_MODELS
from .chain import allow_growth, resize
from .loaded import difference

__all__ = ["VisionModel", "VisionOptions", "build_vision", "load_vision", "load_weights"]

WEIGHTS, OPTIONS = "model.safetensors", "config.json"


@dataclass(frozen=True)
class VisionOptions:
    """The options that determine the shape of a network.

    Attributes:
        type: a name from the table of the module.
        num_classes: width of the last layer.
        image_shape: ``(channels, height, width)``.
        width: factor on all hidden widths; below 1 for machines without a GPU.
        norm: ``batch``; ``static``, batch norm without running statistics, as in the FedLoRU authors' code (evaluation
            uses the statistics of the batch); ``group``; or ``none``. Only ResNets have norms.
        use_bias: whether linear layers, and convolutions without a norm, have biases.
    """

    type: str
    num_classes: int
    image_shape: tuple[int, int, int]
    width: float = 1.0
    norm: str = "batch"
    use_bias: bool = True

    def scaled(self, channels: int) -> int:
        return max(1, round(channels * self.width))


class VisionModel(nn.Module, ABC):
    """Base class of the networks: loss, saving, and default layers for adapters.

    Attributes:
        options: the options it was built with.
        adapter_targets: full names of the layers that have an adapter by default.
    """

    def __init__(self, options: VisionOptions):
        super().__init__()
        self.options = options
        self.adapter_targets: list[str] = []

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """``(batch, channels, height, width)`` to ``(batch, width of the head)``."""

    @property
    def head(self) -> nn.Linear:
        """The last layer."""
        return getattr(self, "fc" if hasattr(self, "fc") else "classifier")

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **_) -> ImageClassifierOutput:
        """Logits, and the mean cross entropy if ``labels`` are given.

        Args:
            pixel_values: float ``(batch, channels, height, width)``.
            labels: int64 ``(batch,)``.
        """
        logits = self.head(self.features(pixel_values.to(self.head.weight.dtype)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json``, which ``load_vision`` reads."""
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
        # At most the usual 32 groups, and at least two channels in each.
        groups = next(g for g in range(min(32, channels), 0, -1) if channels % g == 0 and (channels > g or g == 1))
        return nn.GroupNorm(groups, channels)
    return nn.BatchNorm2d(channels, track_running_stats=options.norm == "batch")


def _conv(options: VisionOptions, inside: int, outside: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        inside, outside, kernel, stride, padding=kernel // 2, bias=options.norm == "none" and options.use_bias
    )


class _Block(nn.Module):
    """Two 3×3 convolutions and a shortcut (He et al., 2016), with torchvision's names."""

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

    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

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
            # Without norms, the sum over the blocks would otherwise grow with their number.
            for module in self.modules():
                if isinstance(module, _Block):
                    module.conv2.weight.data /= (4 * blocks) ** 0.5

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))


class ConvNet(VisionModel):
    """Two 5×5 convolutions, each with ReLU and 2×2 max-pooling, hidden linear layers and an output layer.

    Args:
        convs: channels of the convolutions. hidden: widths of the hidden linear layers.
    """

    def __init__(self, options: VisionOptions, convs: tuple[int, int], hidden: tuple[int, int]):
        super().__init__(options)
        channels, *size = options.image_shape
        pooled = [((s - 4) // 2 - 4) // 2 for s in size]
        if min(pooled) < 1:
            raise UserError(
                f"model.type = {options.type}: images of {size[0]} × {size[1]} are too small for it; "
                "it needs 16 × 16, for instance by data.transform [['Resize', {'size': [16, 16]}]]"
            )
        first, second = map(options.scaled, convs)
        bias = options.use_bias
        self.conv1 = nn.Conv2d(channels, first, 5, bias=bias)
        self.conv2 = nn.Conv2d(first, second, 5, bias=bias)
        widths = [second * pooled[0] * pooled[1], *map(options.scaled, hidden)]
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
    """Create a network, with weights drawn from torch's global generator.

    Raises:
        UserError: images that are too small.
    """
    return _BUILDERS[options.type](options)


def load_vision(folder: str | Path) -> VisionModel:
    """Load the network that ``save_pretrained`` wrote to ``folder``, in evaluation mode.

    Raises:
        UserError: no such folder, or files that do not match.
    """
    folder = Path(folder)
    with user_errors(f"{folder / OPTIONS}: reading it as a network's options"):
        values = read_json(folder / OPTIONS)
        grown = dict(values.pop("grown", {}))
        options = VisionOptions(**{**values, "image_shape": tuple(values["image_shape"])})
        model = build_vision(options)
        for name, shape in grown.items():  # widths changed by a method
            layer = model.get_submodule(name)
            resize(layer, torch.empty([int(size) for size in shape]))
            allow_growth(layer)
    load_weights(model, folder / WEIGHTS, new_head=False)
    return model.eval()


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file.

    Raises:
        UserError: no such file, or not a safetensors file.
    """
    with user_errors(f"reading weights from {path}", "expected a .safetensors file"):
        return load_file(str(Path(path).expanduser()))


def load_weights(model: VisionModel, path: str | Path, new_head: bool = True) -> list[str]:
    """Load weights and running statistics of ``model`` in place from a safetensors file.

    Args:
        new_head: allow the last layer to be missing in the file or to have another number of classes. It then keeps
            its new weights, and a warning says so.
    Returns:
        The names of the parameters that keep new weights.
    Raises:
        UserError: the file cannot be read, or a name or shape differs; the model is not changed then.
    """
    tensors, parameters = read_weights(path), model.state_dict()
    head = {n for n in parameters if model.get_submodule(n.rpartition(".")[0]) is model.head}
    # The counters of batch norms are not used.
    counters = {n for n in parameters if n.endswith("num_batches_tracked")}
    reshaped = sorted(n for n in head & tensors.keys() if tensors[n].shape != parameters[n].shape)
    if new_head and (reshaped or not head & tensors.keys()):
        reason = f"{reshaped[0]} is {tuple(tensors[reshaped[0]].shape)} there" if reshaped else "the file has none"
        say_once(
            f"{path}: the head for {model.options.num_classes} classes is new ({', '.join(sorted(head))}): {reason}"
        )
        tensors = {n: t for n, t in tensors.items() if n not in head}
    else:
        head = set()
    required = {n: t for n, t in parameters.items() if n not in head | counters}
    tensors = {n: t for n, t in tensors.items() if n not in counters}
    integers = (f"{n} is {t.dtype}" for n, t in sorted(tensors.items()) if not t.is_floating_point())
    if wrong := difference(tensors, required) or next(integers, ""):
        raise UserError(
            f"{path}: not the weights of this {model.options.type}: {wrong}; lowrank.norm, lowrank.width, "
            "model.use_bias and the images' shape must be as when it was saved"
        )
    model.load_state_dict(tensors, strict=False)
    return sorted(head)
