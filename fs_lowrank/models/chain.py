"""Networks whose neurons can be reordered: chains of convolutional and linear layers without biases."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import UserError


def chain(model: nn.Module, method: str) -> list[str]:
    """Names of the weights of the layers, from the first to the last, if each layer feeds only the next.

    The order of registration is assumed to be the order of use. Shapes are checked: the inputs of a layer must be the
    neurons of the one before, times the number of positions of a flattened image.

    Args:
        method: name of the method that needs a chain, for the message.
    Raises:
        UserError: the model has a bias, a norm, another parameter that belongs to neurons, or a branch.
    """
    message = (
        f"{method} reorders neurons, and takes nets of convolutional and linear layers without biases (model.use_bias "
        "False), norms (lowrank.norm none) and shortcuts, in which each layer feeds the next"
    )
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    plain = {f"{n}.weight" for n, _ in layers}
    for name in dict(model.named_parameters()):
        if name not in plain:
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise UserError(f"{message}; this model has {name} ({owner}); choose another method")
    if len(layers) < 2:
        raise UserError(f"{method} matches hidden neurons; this model has none")
    for (before, first), (after, second) in zip(layers, layers[1:]):
        width, inputs = first.weight.shape[0], second.weight.shape[1]
        flattened = isinstance(first, nn.Conv2d) and isinstance(second, nn.Linear) and inputs % width == 0
        if getattr(second, "groups", 1) != 1 or inputs != width and not flattened:
            raise UserError(f"{message}; {after} does not take the {width} outputs of {before}; choose another method")
    if blocks := [n for n, m in model.named_modules() if hasattr(m, "downsample")]:
        raise UserError(f"{message}; {blocks[0]} has a shortcut; choose another method")
    return [f"{n}.weight" for n, _ in layers]


def allow_growth(model: nn.Module) -> None:
    """Allow ``load_tensors`` to change the widths of the layers."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            vars(module)["may_grow"] = True


def resize(layer: Any, weight: Tensor) -> None:
    """Give a linear layer or convolution a weight of another shape, and the corresponding widths."""
    layer.weight.data = weight.detach().clone().to(layer.weight)
    if isinstance(layer, nn.Conv2d):
        layer.out_channels, layer.in_channels = weight.shape[:2]
    else:
        layer.out_features, layer.in_features = weight.shape
