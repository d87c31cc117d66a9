"""Load a model and its tokenizer by name or path."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data.files import refuse_pointer
from ..data.sources import length_of
from ..data.tokenize import pad_id
from ..errors import UserError, nearest
from ..fetch import FETCHABLE, usable
from ..fetch.hub import hub, silence
from ..seeds import derive
from ..settings import VISION_MODELS, Settings
from .ends import settle_ends
from .fingerprints import configuration_fingerprint
from .given import copy_of_held, held, is_given
from .kinds import text_part
from .loaded import check_loaded, transformers_silent
from .names import refuse_reserved
from .padding import position_embeddings, settle_padding
from .placing import placing
from .quantised import loading, settle

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .vision import VisionModel


#: the tasks of models with labels, and transformers' names for them
PROBLEMS = {
    "SequenceClassification": "single_label_classification",
    "SequenceRegression": "regression",
    "MultiLabelClassification": "multi_label_classification",
}


def locate(name: str) -> str:
    """The place of model ``name``: the user's folder, the folder of a fetched model, else the name itself for a hub.

    Raises:
        UserError: a fetchable model that has not been fetched, a path that does not exist, or a folder that holds an
            adapter alone.
    """
    if (folder := Path(name).expanduser()).is_dir():
        if (folder / "adapter_config.json").is_file():
            raise UserError(
                f"model.type: {name!r} holds an adapter in PEFT's format; expected a whole model, as a run saves it "
                "with lowrank.save_merged True, or PEFT's merge_and_unload makes it"
            )
        return str(folder)
    fetched = usable(name) if name in FETCHABLE else None
    if fetched is not None:
        return str(fetched)
    if name in FETCHABLE:
        raise UserError(f"model.type: {name!r} is not on this machine yet; run: fs-lowrank fetch {name}")
    if name.startswith((".", "/", "~")):
        raise UserError(f"model.type: there is no folder {name!r}")
    return name


def hub_name(config: Settings, model: nn.Module | None = None) -> tuple[str, str]:
    """Name and revision of the run's model on the Hugging Face hub, as far as they are known; each may be empty."""
    name = "" if config.is_vision or is_given(config) else model_name(config.model.type)
    folder = Path(name).expanduser()
    if name in FETCHABLE and not folder.is_dir():
        return FETCHABLE[name].hub, ""
    if not folder.is_dir():
        return name, getattr(getattr(model, "config", None), "_commit_hash", None) or ""
    match = re.search(r"/models--([^/]+)/snapshots/([^/]+)$", folder.resolve().as_posix())  # huggingface_hub's cache
    return (match[1].replace("--", "/"), match[2]) if match else ("", "")


def model_name(model_type: str) -> str:
    """``model.type`` without FederatedScope's ``@huggingface_llm`` or ``@transformers``."""
    return model_type.rsplit("@", 1)[0] if "@" in model_type else model_type


@contextlib.contextmanager
def _complaints(part: str, source: str) -> Iterator[None]:
    """A context for loading from ``source``: any error of transformers becomes a ``UserError`` of one line."""
    try:
        with contextlib.nullcontext() if Path(source).is_dir() else hub():
            yield
    except UserError:
        raise
    except Exception as error:  # damaged files raise various errors: of safetensors, JSON, torch, a model's code
        for path in sorted(Path(source).glob("*")):
            refuse_pointer(path)
        first, is_local = (str(error).strip() or type(error).__name__).splitlines()[0], Path(source).is_dir()
        if not isinstance(error, (OSError, ValueError)):
            first = f"{type(error).__name__}: {first}"
        reason = _known_cause(error) or not is_local and isinstance(error, OSError) and silence() or first
        if not is_local:
            folders = [path.name for path in Path().iterdir() if path.is_dir()]
            models = [name for name, item in FETCHABLE.items() if item.hub]
            names = f"{', '.join(models)}){nearest(source, [*models, *folders])}"
            reason = f"it is neither a folder nor one of the models to fetch ({names}, and {reason}"
        raise UserError(f"model.type: cannot load the {part} of {source!r}: {reason}") from error


def _known_cause(error: Exception) -> str:
    """Why loading failed and what to do, where the library's words would mislead; else empty."""
    if "trust_remote_code" in str(error):
        return (
            "it brings code of its own, which is not run here; take a model of a kind that transformers has itself, or "
            "save it as one"
        )
    if isinstance(error, UnpicklingError):
        return (
            "a .bin file holds other things than tensors, or is damaged; such a file can run code when it is read, so "
            "take the model's .safetensors files"
        )
    return ""


def _check_type(config: Settings) -> None:
    """Raise ``UserError`` for a name without suffix that is not one of our networks, and for one on ModelScope."""
    name = config.model.type
    if name.endswith("@modelscope_llm") and not Path(locate(model_name(name))).is_dir():
        raise UserError(
            f"model.type = {name!r}: models are not looked for on ModelScope; download it, and name the folder: "
            "FOLDER@huggingface_llm"
        )
    if "@" not in name and name not in VISION_MODELS:
        raise UserError(
            f"model.type = {name!r}: no network of that name{nearest(name, VISION_MODELS)}; there are: "
            f"{', '.join(VISION_MODELS)}; a model for text is written NAME@transformers or "
            "NAME@huggingface_llm"
        )


def build_tokenizer(config: Settings, folder: Path | None = None):
    """Load the tokenizer, with the end-of-text token as padding token if it has none; None for image networks.

    Args:
        folder: of its files; None: the model's.
    Raises:
        UserError: it cannot be found or loaded; it has more tokens than the embedding of the model; ``llm.tok_len`` is
            greater than the number of positions of the model.
    """
    _check_type(config)
    if config.is_vision:
        return None
    if is_given(config):
        return held(config)[1]
    from transformers import AutoTokenizer

    source = locate(model_name(config.model.type))
    skeleton: Any = build_skeleton(config)
    (length_key, length), room = length_of(config), positions(skeleton)
    reserved = config.adapter.virtual_tokens if config.llm.adapter.use else 0
    room = None if room is None else room - reserved
    limit = f"{room} positions" + (f" left by {reserved} virtual tokens" if reserved else "")
    sizes = {"lowrank.clients: tok_len": max((s.get("tok_len", 0) for s in config.client_settings.values()), default=0)}
    for key, tokens in {**sizes, length_key: length}.items():
        if room is not None and isinstance(tokens, int) and tokens > room:
            raise UserError(f"{key} = {tokens}: the model at {source!r} has {limit}; set {key} to {room} or less")
    source = source if folder is None else str(folder)
    with _complaints("tokenizer", source):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        largest = max(tokenizer.get_vocab().values(), default=-1)
    for name in ("is_local", "local_files_only"):  # otherwise what a run saves depends on HF_HUB_OFFLINE
        tokenizer.init_kwargs.pop(name, None)
    rows = skeleton.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise UserError(
            f"model.type: the tokenizer at {source!r} has {largest + 1} tokens, the model's embedding {rows} rows; the "
            "two do not belong together: put the tokenizer's files there that the model was trained with"
        )
    if length == "auto" and room is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, room)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def positions(model: PreTrainedModel) -> int | None:
    """The maximum number of tokens; None if the model has no limit (relative positions, ALiBi, state spaces).

    For learned or sinusoidal positions, this is the number of rows of their embedding, without those that models with a
    padding position (RoBERTa) or an offset (OPT, BART) do not use. For rotary positions it is
    ``max_position_embeddings``, the length that the model was trained for.
    """
    rows = [
        table.num_embeddings - (getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1)
        for table in position_embeddings(text_part(model)[1])
    ]
    if rows:
        return min(rows)
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) if getattr(config, "rope_parameters", None) else None


def build_model(
    config: Settings,
    num_labels: int | None,
    tokenizer: Any = None,
    image_shape: tuple[int, int, int] | None = None,
    label_names: Sequence[str] = (),
    say_new: bool = True,
) -> nn.Module:
    """Load or create the model, in evaluation mode and ``lowrank.dtype``. New weights are drawn with the run's seed.

    Its attribute ``new_weights`` lists the names of the weights that were not loaded from a file.

    Args:
        num_labels: number of classes; ignored for ``CausalLM``.
        tokenizer: with which padding and the ends of answers are made to agree; None: they are as in the model's files.
        image_shape: ``(channels, height, width)``, for ``ImageClassification``.
        label_names: names of the classes, saved with a text classifier.
        say_new: warn about a text classifier's new head; not where a trained one replaces it.
    Raises:
        UserError: the model cannot be found or loaded; its checkpoint lacks weights or has other shapes.
    """
    _check_type(config)
    if is_given(config):
        module = copy_of_held(config, num_labels)
        if tokenizer is not None:
            settle_padding(module, pad_id(tokenizer))
        return module
    if config.is_vision:
        assert num_labels is not None and image_shape is not None
        return _build_vision(config, num_labels, image_shape)
    source = locate(model_name(config.model.type))
    classifies = config.model.task in PROBLEMS
    # check_loaded refuses shapes that differ, with a better message.
    options = {"dtype": getattr(torch, config.dtype), "output_loading_info": True, "ignore_mismatched_sizes": True}
    loader = _loader(config)
    if classifies:
        options.update(num_labels=num_labels, problem_type=PROBLEMS[config.model.task])
    if attention := config.model.attn_implementation:
        options["attn_implementation"] = attention
    if config.quantised or config.model.device_map:
        skeleton = build_skeleton(config)
        options |= loading(config, skeleton)
        options |= placing(config, skeleton) if config.model.device_map else {}
    torch.manual_seed(derive(config.seed, "model"))
    # check_loaded reports what matters of the loader's messages.
    with transformers_silent(), _complaints("weights", source):
        model, report = loader.from_pretrained(source, trust_remote_code=False, **options)
    settle(model, config, source)
    refuse_reserved(model, f"model.type = {config.model.type}")
    vars(model)["new_weights"] = check_loaded(model, report, source, num_labels if classifies else None, say_new)
    if tokenizer is not None and classifies:
        settle_padding(model, pad_id(tokenizer), config.llm.tok_len)
    elif tokenizer is not None and model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    vars(model)["configured"] = configuration_fingerprint(model)
    if tokenizer is not None:
        settle_ends(model, tokenizer)
    if label_names and classifies:
        model.config.id2label = dict(enumerate(label_names))
        model.config.label2id = {name: i for i, name in enumerate(label_names)}
    return model.eval()


def _loader(config: Settings) -> Any:
    """The class of transformers that loads models for ``model.task``."""
    import transformers

    if config.model.task == "Seq2SeqLM":
        return transformers.AutoModelForSeq2SeqLM
    labelled = config.model.task in PROBLEMS
    return transformers.AutoModelForSequenceClassification if labelled else transformers.AutoModelForCausalLM


def loads(config: Settings, model: PreTrainedModel) -> bool:
    """Whether transformers loads the class of ``model``, or one with its base, from a folder for ``model.task``."""
    try:
        with torch.device("meta"):
            skeleton = _loader(config).from_config(copy.deepcopy(model.config))
    except (ValueError, KeyError):  # no class for such a configuration
        return False
    base = type(skeleton.base_model) if config.model.task in PROBLEMS else None
    return type(model) in (type(skeleton), base)


def build_skeleton(config: Settings) -> nn.Module:
    """Create the model without weights on the ``meta`` device, which takes milliseconds, to check adapters for it.

    Networks for images are those for ten classes and images of 3 × 32 × 32.

    Raises:
        UserError: the model's configuration cannot be found or loaded.
    """
    _check_type(config)
    if is_given(config):
        return copy_of_held(config).to("meta")
    with torch.device("meta"):
        if config.is_vision:
            return _vision_net(config, 10, (3, 32, 32))
        import transformers

        source = locate(model_name(config.model.type))
        with _complaints("configuration", source):
            spec, loader = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False), _loader(config)
            try:
                return loader.from_config(spec, trust_remote_code=False)
            except ValueError:
                if spec.is_encoder_decoder and config.model.task == "CausalLM":
                    raise UserError(
                        f"model.type: {source!r} is an encoder-decoder model ({spec.model_type}), which is not for "
                        "model.task CausalLM; set model.task Seq2SeqLM"
                    ) from None
                raise


def _vision_net(config: Settings, num_classes: int, image_shape: tuple[int, int, int]) -> VisionModel:
    from .vision import VisionOptions, build_vision

    return build_vision(
        VisionOptions(
            config.model.type,
            num_classes,
            image_shape,
            config.lowrank.width,
            config.lowrank.norm,
            config.model.use_bias,
        )
    )


def _build_vision(config: Settings, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    from .vision import load_weights

    torch.manual_seed(derive(config.seed, "model"))
    model = _vision_net(config, num_classes, image_shape)
    weights = config.lowrank.weights
    vars(model)["new_weights"] = load_weights(model, weights) if weights else [n for n, _ in model.named_parameters()]
    model.to(getattr(torch, config.dtype))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()  # updates of running statistics are too small for 16 bits
    return model.eval()
