"""A model and its tokenizer, by name or path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ..config import VISION_MODELS
from ..data.fetch import FETCHABLE, resolve
from ..errors import UserError, nearest
from ..seeds import derive


def locate(name: str) -> str:
    """Where the model ``name`` is: a folder of the user's, a fetched one, else a hub name as it stands.

    Raises:
        UserError: a fetchable model that has not been fetched, or a path that does not exist.
    """
    if Path(name).expanduser().is_dir():
        return str(Path(name).expanduser())
    fetched = resolve(name) if name in FETCHABLE else None
    if fetched is not None:
        return str(fetched)
    if name in FETCHABLE:
        raise UserError(f"model.type: {name!r} is not on this machine yet; run: fs-lowrank fetch {name}")
    if name.startswith((".", "/", "~")):
        raise UserError(f"model.type: there is no folder {name!r}")
    return name


def model_name(model_type: str) -> str:
    """``model.type`` without FederatedScope's ``@huggingface_llm`` or ``@transformers``."""
    return model_type.rsplit("@", 1)[0] if "@" in model_type else model_type


def _load(what: str, loader, place: str, **options):
    try:
        return loader.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError) as error:
        hint = (
            ""
            if Path(place).is_dir()
            else (
                f"; it is neither a folder nor one of the models to fetch ({', '.join(FETCHABLE)}"
                f"){nearest(place, FETCHABLE)}, and no hub answered"
            )
        )
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"model.type: cannot load the {what} of {place!r}{hint} ({first})") from error


def _check_type(config) -> None:
    """Raise ``UserError`` for a bare name that is none of our networks: all other models have a suffix."""
    name = config.model.type
    if "@" not in name and name not in VISION_MODELS:
        raise UserError(
            f"model.type = {name!r}: no network of that name{nearest(name, VISION_MODELS)}; there are: "
            f"{', '.join(VISION_MODELS)}; a model for text is written NAME@transformers or "
            "NAME@huggingface_llm"
        )


def build_tokenizer(config):
    """The model's tokenizer, with a padding token (the end-of-text token where it has none); None for images."""
    _check_type(config)
    if config.is_vision:
        return None
    from transformers import AutoTokenizer

    tokenizer = _load("tokenizer", AutoTokenizer, locate(model_name(config.model.type)))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def build_model(
    config,
    num_labels: int | None,
    pad_token_id: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    label_names: Sequence[str] = (),
) -> nn.Module:
    """The model in evaluation mode, in ``lowrank.dtype``, what is new in it drawn from the run's seed.

    Args:
        num_labels: classes; ignored for ``CausalLM``.
        image_shape: ``(channels, height, width)``, for ``ImageClassification``.
        label_names: of the classes; a text classifier is saved with them.
    Raises:
        UserError: the model cannot be found or loaded.
    """
    _check_type(config)
    if config.is_vision:
        return _build_vision(config, num_labels, image_shape)
    import transformers

    place = locate(model_name(config.model.type))
    options = {"dtype": getattr(torch, config.dtype)}
    if config.model.task == "SequenceClassification":
        loader = transformers.AutoModelForSequenceClassification
        options.update(num_labels=num_labels, problem_type="single_label_classification")
    else:
        loader = transformers.AutoModelForCausalLM
    torch.manual_seed(derive(config.seed, "model"))
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    # The loader's report lists the classifier as newly initialised; that is what a new task means.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model = _load("weights", loader, place, **options)
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
    if model.config.pad_token_id is None:
        model.config.pad_token_id = pad_token_id
    if label_names and config.model.task == "SequenceClassification":
        model.config.id2label = dict(enumerate(label_names))
        model.config.label2id = {name: i for i, name in enumerate(label_names)}
    return model.eval()


def build_skeleton(config, image_shape: tuple[int, int, int] = (3, 32, 32)) -> nn.Module:
    """The model without its weights, on torch's ``meta`` device: in milliseconds, to see what fits onto it.

    Args:
        image_shape: as for ``build_model``.
    Raises:
        UserError: the model's configuration cannot be found or loaded.
    """
    _check_type(config)
    with torch.device("meta"):
        if config.is_vision:
            return _vision_net(config, 10, image_shape)
        import transformers

        classifies = config.model.task == "SequenceClassification"
        loader = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModelForCausalLM
        return loader.from_config(
            _load("configuration", transformers.AutoConfig, locate(model_name(config.model.type)))
        )


def _vision_net(config, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    from .vision import VisionOptions, build_vision

    return build_vision(
        VisionOptions(
            config.model.type,
            num_classes,
            tuple(image_shape),
            config.lowrank.width,
            config.lowrank.norm,
            config.model.use_bias,
        )
    )


def _build_vision(config, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    from .vision import load_weights

    torch.manual_seed(derive(config.seed, "model"))
    model = _vision_net(config, num_classes, image_shape)
    if config.lowrank.weights:
        load_weights(model, config.lowrank.weights)
    model.to(getattr(torch, config.dtype))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()  # running statistics move by less than 16 bits can show
    return model.eval()
