"""A complete, commented configuration from data of the user's: looks at columns and texts, or pictures, and the model.

Nothing is decided silently: every line of the file that was guessed says so, and why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from torch import nn

from .config import load_config
from .data import CAUSAL_LM, IMAGE_CLASSIFICATION, LONGEST, RawData, load_raw
from .data.own import look_at, refuse_tables, stem_of
from .data.sources import data_args
from .data.stored import is_saved
from .data.tables import talks_in, with_fraction
from .data.template import SYNONYMS
from .data.tokenize import tokenize_causal, tokenize_classification
from .errors import UserError, nearest
from .models.build import build_skeleton, build_tokenizer, positions
from .settings.reading import Dumper, Loader
from .settings.sections import VISION_MODELS

_TEXTS = ("text", "sentence", "review", "content", "comment", "body", "message", "tweet", "document", "question")
_LABELS = ("label", "class", "stars", "rating", "sentiment", "category", "target", "intent", "topic", "y")
_PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question1", "question2"),
)
#: the layers that LoRA's paper adapts, queries and values, by the names that transformers has for them
_ATTENTION = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("query_proj", "value_proj"),
    ("q", "v"),
    ("query_key_value",),
    ("qkv_proj",),
    ("Wqkv",),
    ("c_attn",),
)
#: columns that say whose a row is
_SITE = re.compile(r"(site|client|hospital|user|institution)s?([ _-]?(id|name))?", re.IGNORECASE)
#: more values than this are not taken for classes
MOST_CLASSES = 100
_ROLES = ("text", "text_pair", "label", "instruction", "input", "output")
#: pixels; larger pictures are resized, as are those of unequal sizes
LARGEST = 64
_EVALUATION = ("eval:", "  freq: 2                        # rounds between evaluations", "  split: [test, val]")
#: rows whose length is looked at
LOOKED_AT = 2000


@dataclass(frozen=True)
class Given:
    """What the user says; empty or None: looked for, or the usual.

    Attributes:
        data: a file or folder that ``data.type`` reads as labelled texts or instructions, or a pattern for several, or
            a folder with a folder of pictures for each class.
        text, text_pair, label, instruction, input, output: columns.
        model: a folder, a name to fetch, or a name on a hub; ``@huggingface_llm`` or ``@transformers`` may follow. For
            pictures, one of our networks.
    """

    data: Path
    text: str = ""
    text_pair: str = ""
    label: str = ""
    instruction: str = ""
    input: str = ""
    output: str = ""
    model: str = ""
    method: str = ""
    clients: int = 0
    outdir: str = ""


def draft(given: Given) -> str:
    """The text of a configuration file for ``given``; it has been loaded once, so it is known to be valid.

    Raises:
        UserError: the file cannot be read; columns that do not exist or cannot be guessed; classes that are numbers
            with fractions, or too many; a model that is not here; a value that no configuration may have.
    """
    lines = _pictures(given) if given.data.is_dir() and not is_saved(given.data) else _texts(given)
    text = "\n".join(" ".join(line.splitlines()) for line in lines) + "\n"
    _check(text)
    return text


def _texts(given: Given) -> list[str]:
    """The lines for labelled texts, or for instructions with answers."""
    table = look_at(given.data, LOOKED_AT)
    columns, why, causal = _columns(given, table)
    model = given.model or ("smollm2" if causal else "minilm")
    if "@" not in model:
        model += "@huggingface_llm" if causal else "@transformers"
    probe = {
        "data": {"type": str(given.data), "args": [columns] if columns else []},
        "model": {"type": model},
        "federate": {"client_num": 1, "method": "fedlora"},
        "llm": {"tok_len": 1},
    }
    config = load_config(probe)
    if (config.model.task == "CausalLM") != causal:
        asked = "instructions and answers" if causal else "classes"
        raise UserError(
            f"model={model!r} is for {config.model.task}, and {given.data} has {asked}; "
            f"write it {model.partition('@')[0]}@{'huggingface_llm' if causal else 'transformers'}, or name the columns"
        )
    raw = load_raw(config.data, origin=config.source, task=config.model.task)
    tokenizer, skeleton = build_tokenizer(config), build_skeleton(config)
    length, about_length = _length(raw, tokenizer, positions(skeleton))
    modules, layers, about_layers = _layers(skeleton)
    clients, splitter = _clients(given, raw)
    head, each = _head(given, raw, clients, "rolora", 0.8)
    batch = max(1, min(4 if causal else 16, int(each)))
    rank = "r: 8, alpha: 16" if causal else "r: 4, alpha: 8"
    return [
        *head,
        *([f"  args: [{_flow(columns)}]"] if columns else []),
        *[f"  # {reason}" for reason in why],
        *(f"  {line}" for line in splitter),
        "  splits: [0.8, 0.1, 0.1]        # train, validation, test",
        f"model: {{type: {_yaml(model)}}}" + ("" if given.model else "   # guessed: the usual one for such data"),
        "llm:",
        f"  tok_len: {length}                   # {about_length}",
        f"  adapter: {{args: [{{{rank}, modules: [{', '.join(modules)}], layers: [{', '.join(map(str, layers))}]}}]}}",
        f"  # {about_layers}",
        f"dataloader: {{batch_size: {batch}}}",
        "train:",
        "  local_update_steps: 10         # batches of a client in a round",
        f"  optimizer: {{type: AdamW, lr: {'1.0e-3' if causal else '5.0e-3'}}}   # `fs-lowrank hpo tune` searches it",
        *_EVALUATION,
    ]


def _pictures(given: Given) -> list[str]:
    """The lines for a folder of class folders: a network for images, from scratch."""
    for role in _ROLES:
        if column := getattr(given, role):
            raise UserError(f"{role}={column!r}: {given.data} is a folder of pictures, which have no columns")
    refuse_tables(given.data, str(given.data))
    model = given.model or "resnet10"
    probe: dict[str, Any] = {
        "data": {"type": str(given.data)},
        "model": {"type": model},
        "federate": {"client_num": 1, "method": "fedavg"},
    }
    if not (config := load_config(probe)).is_vision:
        raise UserError(
            f"model={model!r} reads texts, and {given.data} has pictures; name one of {', '.join(VISION_MODELS)}"
        )
    resized = False
    try:
        raw = load_raw(config.data, origin=config.source)
        resized = raw.images is not None and max(raw.images.shape[2:]) > LARGEST
    except UserError:  # pictures of unequal sizes; any other reason comes again
        resized = True
    if resized:
        config = config.replace({"data.args": [{"size": LARGEST}]})
        raw = load_raw(config.data, origin=config.source)
    held_out = [0.0 if frame is not None else 0.1 for frame in (raw.validation, raw.test)]
    clients, splitter = _clients(given, raw)
    share = 1 - sum(held_out)
    head, each = _head(given, raw, clients, "fedlora", share)
    folders = "; test and validation have folders of their own" if not all(held_out) else ""
    return [
        *head,
        *([f"  args: [{{size: {LARGEST}}}]           # guessed: height and width of each"] if resized else []),
        *(f"  {line}" for line in splitter),
        f"  splits: [{share:.1f}, {held_out[0]}, {held_out[1]}]        # train, validation, test{folders}",
        f"model: {{type: {model}}}" + ("" if given.model else "         # guessed: a small network, from scratch"),
        "llm: {adapter: {args: [{r: 16, alpha: 16}]}}",
        f"dataloader: {{batch_size: {max(1, min(32, int(each)))}}}",
        "train:",
        "  local_update_steps: 10         # batches of a client in a round",
        "  optimizer: {type: SGD, lr: 0.03, momentum: 0.9}   # `fs-lowrank hpo tune` searches it",
        *_EVALUATION,
    ]


def _head(given: Given, raw: RawData, clients: int, method: str, share: float) -> tuple[list[str], float]:
    """The first lines, up to ``data.type``, and the training rows of a client.

    Args:
        method: if the user names none. share: of the rows, those for training.
    """
    rows = len(raw.train)
    each = rows * share / clients
    if each < 1:
        raise UserError(
            f"clients={clients}: {given.data} has {rows} rows, of which {rows * share:.0f} are for training"
        )
    rounds = 20 if raw.task == IMAGE_CLASSIFICATION else 4  # from scratch, or from a model that knows texts
    classes = f"{raw.num_labels} classes ({', '.join(raw.label_names[:8])})"
    task = "instructions and answers" if raw.task == CAUSAL_LM else classes
    guessed = "" if given.clients else "guessed: "
    return [
        f"# {given.data.name}: {rows} rows, {task}. Run it with: fs-lowrank run --cfg THIS_FILE",
        "# `fs-lowrank keys NAME` explains a key; what is not here is at its default.",
        "seed: 0",
        f"outdir: {_yaml(given.outdir or f'runs/{stem_of(given.data)}')}",
        "federate:",
        f"  method: {given.method or method}                 # fs-lowrank methods lists them",
        f"  client_num: {clients}                 # {guessed}about {each:.0f} training rows each",
        "  sample_client_num: -1         # how many of them take part in a round; -1: all",
        f"  total_round_num: {rounds}            # to go on with more: raise it, and resume the run",
        "data:",
        f"  type: {_yaml(str(given.data))}",
    ], each


def _check(text: str) -> None:
    config = load_config(yaml.load(text, Loader))
    data_args(config.data, config.source)


def _clients(given: Given, raw: RawData) -> tuple[int, list[str]]:
    """How many clients there are, and the lines of ``data.splitter``: by site where the data say it, else dealt out."""
    rows, kinds = len(raw.train), {name: int(raw.train[name].nunique()) for name in raw.fields}
    several = {name: count for name, count in kinds.items() if 2 <= count <= rows // 2}
    for name, count in several.items():
        if _SITE.fullmatch(name):
            by = ["splitter: field", f"splitter_args: [{_flow({'field': name})}]"]
            return given.clients or count, [f"# guessed: the column {name} says whose a row is", *by]
    files = several.get("file", 0)
    if files and given.clients in (0, files):
        return files, ["# guessed: each file is a client; or iid: the rows of all are dealt out", "splitter: file"]
    clients = given.clients or max(2, min(10, rows // 40))
    field = next((name for name, count in several.items() if count <= clients), "COLUMN")
    lines = [
        "# simulated clients: the rows of one table are dealt out. Or clients are files of their own: splitter: file;",
        f"# or the values of a column: splitter: field, splitter_args: [{_flow({'field': field})}]",
    ]
    if raw.images is not None:
        lines = ["# simulated clients: the pictures of one folder are dealt out"]
    if raw.label_names and rows * 0.8 / clients >= 40:
        lines += ["# guessed, since a client has 40 rows: its own mixture of classes; or iid, shards, quantity"]
        lines += ["splitter: dirichlet", "splitter_args: [{alpha: 1.0, min_size: 8}]   # smaller: more skewed"]
    else:
        reason = "a client has few rows" if raw.label_names else "answers have no classes"
        lines += [f"# guessed, since {reason}: equal, random parts; or quantity (unequal sizes), dirichlet, shards"]
        lines += ["splitter: iid"]
    return clients, lines


def _columns(given: Given, table: pd.DataFrame) -> tuple[dict[str, str], list[str], bool]:
    """``data.args``, why, and whether the rows are instructions with answers."""
    named = {role: getattr(given, role) for role in _ROLES if getattr(given, role)}
    for role, column in named.items():
        if column not in table:
            there = [str(c) for c in table]
            raise UserError(
                f"{role}={column!r}: {given.data} has no such column{nearest(column, there)}; "
                f"there are: {', '.join(there)}"
            )
    language, classes = named.keys() & {"instruction", "input", "output"}, named.keys() & {"text", "text_pair", "label"}
    if language and classes:
        raise UserError(
            f"{min(classes)} is of a classification, {min(language)} of instructions with answers; give one of them"
        )
    if (talks := talks_in(table)) and not named:
        return {}, [f"guessed: conversations in the column {talks}"], True
    found = {r: next((n for n in names if n in table), "") for r, names in SYNONYMS.items()}
    usual, plain = found["instruction"] == "instruction", "label" not in table
    guessed = found["instruction"] and (found["output"] or usual) and (plain or usual and found["output"])
    kind = given.model.partition("@")[2]
    if language or not classes and (kind == "huggingface_llm" or guessed and kind != "transformers"):
        roles = {
            role: column for role in ("instruction", "input", "output") if (column := named.get(role) or found[role])
        }
        for role in ("instruction", "output"):
            if role not in roles:
                raise UserError(
                    f"{given.data}: which column is the {role}? say {role}='COLUMN', of {', '.join(map(str, table))}; "
                    "for plain text write the configuration by hand, with data.args [{template: '{COLUMN}', output: "
                    "COLUMN}]"
                )
        return roles, [] if language else ["guessed: instructions and answers, by the names of the columns"], True
    why: list[str] = []
    text = named.get("text", "")
    pair = named.get("text_pair", "")
    if not text:
        two = next((p for p in _PAIRS if set(p) <= set(table)), None)
        if two and not pair:
            text, pair = two
            why.append(f"guessed: two sentences, {text} and {pair}, by their names")
        else:
            text = _guess_text(given, table, {pair, named.get("label", "")})
            why.append(f"guessed: the text is {text}")
    label = named.get("label", "")
    if not label:
        label = _guess_label(given, table, {text, pair})
        why.append(f"guessed: the class is {label}")
    _check_classes(given, table[label], label)
    return {"text": text, **({"text_pair": pair} if pair else {}), "label": label}, why, False


def _guess_text(given: Given, table: pd.DataFrame, taken: set[str]) -> str:
    by_name = [name for name in _TEXTS for column in table if str(column).lower() == name and column not in taken]
    if by_name:
        return next(str(c) for c in table if str(c).lower() == by_name[0])
    mean = {
        str(c): table[c].map(lambda v: len(str(v)) if isinstance(v, str) else 0).mean() for c in table if c not in taken
    }
    longest = max(mean, key=mean.__getitem__, default="")
    if not longest or mean[longest] < 12:
        raise UserError(
            f"{given.data}: no column looks like text; say which one: text='COLUMN', of {', '.join(map(str, table))}"
        )
    return longest


def _guess_label(given: Given, table: pd.DataFrame, taken: set[str]) -> str:
    free = [str(c) for c in table if c not in taken]
    for name in _LABELS:
        for column in free:
            if column.lower() == name:
                return column
    few = {c: table[c].map(str).nunique() for c in free}
    likely = [
        c
        for c, n in few.items()
        if c != "file" and not _SITE.fullmatch(c) and 2 <= n <= min(MOST_CLASSES, max(2, len(table) // 5))
    ]
    if len(likely) != 1:
        listed = ", ".join(f"{c} ({n} values)" for c, n in few.items()) or "none but the text"
        raise UserError(f"{given.data}: which column is the class? say label='COLUMN'; there are: {listed}")
    return likely[0]


def _check_classes(given: Given, column: pd.Series, name: str) -> None:
    values = column.map(lambda value: str(value).strip())
    count = values.nunique()
    fraction = with_fraction(values)
    if fraction is not None:
        raise UserError(
            f"{given.data}: the label column {name!r} has numbers with fractions, such as {fraction}; "
            "classes are expected: write them as classes, or name another column with label='COLUMN'; to predict "
            "numbers, write the configuration by hand, with model.task SequenceRegression"
        )
    if count > MOST_CLASSES:
        raise UserError(
            f"{given.data}: the label column {name!r} has {count} different values, more than {MOST_CLASSES}; "
            "is it another column? name it with label='COLUMN'"
        )


def _length(raw: RawData, tokenizer: Any, room: int | None) -> tuple[int, str]:
    """``llm.tok_len``: the 99th percentile of the rows, in steps of 8, up to what the model has room for."""
    most = min(room or LONGEST, tokenizer.model_max_length)
    part = raw.train.iloc[np.linspace(0, len(raw.train) - 1, min(LOOKED_AT, len(raw.train))).astype(int)]

    def tokenized(length: int) -> tuple[np.ndarray, int, int]:
        """The lengths of the rows, and how many are cut and left out with ``length``."""
        if raw.task == CAUSAL_LM:
            examples, kept = tokenize_causal(part, tokenizer, length)
            return examples.lengths, examples.truncated, int((~kept).sum())
        examples = tokenize_classification(part, tokenizer, length)
        return examples.lengths, examples.truncated, 0

    lengths, *beyond = tokenized(most)
    enough = int(np.percentile(lengths, 99, method="higher"))
    length = min(math.ceil(enough / 8) * 8, most)
    _, cut, left_out = tokenized(length)
    known = sum(beyond) <= 0.01 * len(part)
    about = f"99 of 100 rows have at most {enough} tokens" if known else f"the model takes no more than {most} tokens"
    about += f"; {cut} of {len(part)} rows looked at are cut"
    return length, about + (f", {left_out} left out, whose prompts fill it" if left_out else "")


def _layers(skeleton: nn.Module) -> tuple[list[str], list[int], str]:
    """Names of modules and indices of layers for an adapter: queries and values of the last third."""
    inside = re.compile(r"\.(\d+)\..*?([^.]+)$")
    found: dict[str, set[int]] = {}
    for name, module in skeleton.named_modules():
        match = inside.search(name)
        if match and type(module).__name__ in ("Linear", "Conv1D"):
            found.setdefault(match[2], set()).add(int(match[1]))
    if not found:
        raise UserError("the model has no numbered layers with linear modules; write llm.adapter.args by hand")
    modules = next((list(names) for names in _ATTENTION if set(names) <= found.keys()), None)
    depth = 1 + max(max(layers) for layers in found.values())
    layers = list(range(depth - max(1, round(depth / 3)), depth))
    others = ", ".join(sorted(found))
    if modules is None:
        modules = sorted(found)
        return modules, layers, f"proposed: all linear modules of the last {len(layers)} of {depth} layers"
    about = f"proposed: queries and values of the last {len(layers)} of {depth} layers; the model has: {others}"
    return modules, layers, about


def _yaml(text: str) -> str:
    """``text`` as a value of a YAML file, also in braces; quoted where it would be read as something else."""
    style = None if text.isprintable() else '"'
    options: dict[str, Any] = {"default_flow_style": True, "default_style": style, "allow_unicode": True}
    return str(yaml.dump([text], Dumper=Dumper, width=math.inf, **options)).strip()[1:-1]


def _flow(mapping: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {_yaml(value)}" for key, value in mapping.items()) + "}"
