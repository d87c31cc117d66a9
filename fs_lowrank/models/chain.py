"""Nets whose neurons can be reordered: plain chains of convolutional and linear layers without biases."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import UserError


def chain(model: nn.Module, method: str) -> list[str]:
    """Names of the weights of ``model``'s layers, from the first to the last, each fed by the one before it.

    Registration order is taken for the order of use; that every layer's inputs are the neurons of the one before (times
    the positions of an image that was flattened) is checked by the shapes.

    Args:
        method: whose the wish is, for the message.
    Raises:
        UserError: a bias, a norm or any other parameter whose neurons would have to move along, or a branch.
    """
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    plain = {f"{n}.weight" for n, _ in layers}
    for name in dict(model.named_parameters()):
        if name in plain:
            continue
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        hint = (
            "set model.use_bias False"
            if name.endswith(".bias") and owner in ("Linear", "Conv2d")
            else ("set lowrank.norm none, or choose another method" if "Norm" in owner else "choose another method")
        )
        raise UserError(
            f"{method} reorders neurons and takes nets of convolutional and linear layers without biases "
            f"or norms; this model has {name} ({owner}); {hint}"
        )
    if len(layers) < 2:
        raise UserError(f"{method} matches hidden neurons; this model has none")
    for (before, first), (after, second) in zip(layers, layers[1:]):
        width, inputs = first.weight.shape[0], second.weight.shape[1]
        flattened = isinstance(first, nn.Conv2d) and isinstance(second, nn.Linear) and inputs % width == 0
        groups = getattr(second, "groups", 1)
        if groups != 1 or inputs != width and not flattened:
            raise UserError(
                f"{method} takes nets in which each layer feeds the next; {after} does not take the "
                f"{width} outputs of {before} (a shortcut, or groups); choose another method"
            )
    blocks = [n for n, m in model.named_modules() if hasattr(m, "downsample")]
    if blocks:
        raise UserError(
            f"{method} takes nets in which each layer feeds the next; {blocks[0]} has a shortcut, whose "
            "neurons cannot be reordered one layer at a time; choose another method"
        )
    return [f"{n}.weight" for n, _ in layers]


def allow_growth(model: nn.Module) -> None:
    """Let ``load_tensors`` give the model's layers other widths than they have."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.may_grow = True


def resize(layer: nn.Module, weight: Tensor) -> None:
    """Give ``layer`` a weight of another shape, and the widths that follow."""
    layer.weight.data = weight.detach().clone().to(layer.weight)
    if isinstance(layer, nn.Conv2d):
        layer.out_channels, layer.in_channels = weight.shape[:2]
    else:
        layer.out_features, layer.in_features = weight.shape
