"""A complete, commented configuration from the user's data, by the names of columns, or from pictures.

Nothing is decided silently: every guessed line of the file has a comment with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from jinja2 import Environment, PackageLoader, Template
from torch import nn

from .config import Config, load_config
from .data import CAUSAL_LM, RawData, load_raw
from .data.files import require_columns
from .data.sources import data_args
from .data.stored import is_saved
from .data.tables import conversation_column
from .data.template import SYNONYMS
from .data.user_data import stem_of, train_table
from .errors import UserError
from .models.adapters import layer_stack, target_modules
from .models.build import build_skeleton, build_tokenizer
from .settings import AdapterSpec
from .settings.reading import Dumper, Loader
from .settings.sections import VISION_MODELS, Data

#: role -> the usual names of its column
_USUAL = {
    "text": tuple("text sentence review content comment body message tweet document question".split()),
    "text_pair": ("text_pair",),
    "label": tuple("label class stars rating sentiment category target intent topic y".split()),
}
#: names of columns with the client of a row
_SITE = re.compile(r"(site|client|hospital|user|institution)s?([ _-]?(id|name))?", re.IGNORECASE)
#: pixels; larger pictures and pictures of unequal sizes are resized
LARGEST = 64


@dataclass(frozen=True)
class Setup:
    """The user's choices; an empty one is found in the data, or is the usual value.

    Attributes:
        data: a file or folder that ``data.type`` reads as labelled texts or instructions, or a pattern for several, or
            a folder with a folder of pictures for each class.
        columns: by role: text, text_pair, label, instruction, input, output.
        model: a folder, a name to fetch, or a name on a hub; ``@huggingface_llm`` or ``@transformers`` may follow. For
            pictures, one of our networks.
    """

    data: Path
    columns: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    method: str = ""
    clients: int = 0


def draft(setup: Setup) -> str:
    """The text of a configuration file for ``setup``; it has been loaded once, so it is known to be valid.

    Raises:
        UserError: the file cannot be read; columns that do not exist or have no usual name; labels that are no classes;
            a model that is not here; a value that no configuration may have.
    """
    facts = _pictures(setup) if setup.data.is_dir() and not is_saved(setup.data) else _texts(setup)
    raw: RawData = facts.pop("raw")
    rows, clients = len(raw.train), _clients(setup, raw)
    sets = zip(Data().splits[1:], (raw.validation, raw.test))
    trained = rows * (1 - sum(share for share, own in sets if own is None))
    share = trained / clients["clients"]
    if share < 1:
        number = f"clients={clients['clients']}"
        raise UserError(f"{number}: {setup.data} has {rows} rows, of which {trained:.0f} are for training")
    content = "instructions and answers"
    if raw.task != CAUSAL_LM:
        content = f"{raw.num_labels} classes ({', '.join(raw.label_names[:8])})"
    facts |= {"setup": setup, "stem": stem_of(setup.data), "rows": rows, "content": content, "share": share, **clients}
    text = _template().render(facts)
    config = load_config(yaml.load(text, Loader))
    data_args(config.data, config.source)
    return text


def _template() -> Template:
    """The file with gaps, of which none takes more than one line."""
    look: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    look |= {"variable_start_string": "<<", "variable_end_string": ">>", "finalize": _in_one_line}
    pages = Environment(loader=PackageLoader(__package__), **look)
    pages.filters |= {"yaml": _yaml, "flow": _flow}
    return pages.get_template("init.yaml")


def _in_one_line(value: Any) -> str:
    return " ".join(str(value).splitlines())


def _texts(setup: Setup) -> dict[str, Any]:
    """The gaps for labelled texts, or for instructions with answers."""
    columns, causal = _columns(setup, train_table(setup.data))
    kind = "huggingface_llm" if causal else "transformers"
    model = setup.model or ("smollm2" if causal else "minilm")
    model += "" if "@" in model else f"@{kind}"
    config = _probe(setup, model, {"data.args": [columns] if columns else [], "llm.tok_len": "auto"})
    if (config.model.task == "CausalLM") != causal:
        content = "instructions and answers" if causal else "classes"
        raise UserError(
            f"model={model!r} is for {config.model.task}, and {setup.data} has {content}; "
            f"write it {model.partition('@')[0]}@{kind}, or name the columns"
        )
    raw = load_raw(config.data, origin=config.source, task=config.model.task)
    build_tokenizer(config)  # a model without one is refused here
    layers, why = _layers(build_skeleton(config))
    guessed = ", ".join(f"the {role} is {column}" for role, column in columns.items() if not setup.columns.get(role))
    gaps = {"kind": "instructions" if causal else "texts", "raw": raw, "model": model, "columns": columns}
    return {**gaps, "guessed": guessed, "layers": layers, "why_layers": why}


def _pictures(setup: Setup) -> dict[str, Any]:
    """The gaps for a folder of class folders: a network for images, from scratch."""
    for role, column in setup.columns.items():
        if column:
            raise UserError(f"{role}={column!r}: {setup.data} is a folder of pictures, which have no columns")
    model = setup.model or "resnet10"
    config = _probe(setup, model, {"federate.method": "fedavg"})
    size = 0
    try:
        raw = load_raw(config.data, origin=config.source)
        resized = raw.images is not None and max(raw.images.shape[2:]) > LARGEST
    except UserError:  # pictures of unequal sizes; any other reason comes again
        resized = True
    if resized:
        size = LARGEST
        raw = load_raw(config.replace({"data.args": [{"size": size}]}).data, origin=config.source)
    if not config.is_vision:
        raise UserError(
            f"model={model!r} reads texts, and {setup.data} has pictures; name one of {', '.join(VISION_MODELS)}"
        )
    return {"kind": "pictures", "raw": raw, "model": model, "size": size}


def _probe(setup: Setup, model: str, keys: Mapping[str, Any]) -> Config:
    """A configuration that is enough to read the data and to build the model."""
    minimal = {"data.type": str(setup.data), "model.type": model, "federate.client_num": 1}
    return load_config({**minimal, "federate.method": "fedlora", **keys})


def _clients(setup: Setup, raw: RawData) -> dict[str, Any]:
    """The number of ``clients``, and whether they are values of a column (``site``) or ``files``; else dealt out."""
    rows, distinct = len(raw.train), {name: int(raw.train[name].nunique()) for name in raw.fields}
    site = next((name for name, count in distinct.items() if _SITE.fullmatch(name) and 2 <= count <= rows // 2), "")
    if site:
        return {"site": site, "clients": setup.clients or distinct[site]}
    files = distinct.get("file", 0)
    if files > 1 and setup.clients in (0, files):
        return {"files": True, "clients": files}
    return {"clients": setup.clients or max(2, min(10, rows // 40))}


def _columns(setup: Setup, table: pd.DataFrame) -> tuple[dict[str, str], bool]:
    """``data.args``, and whether the rows are instructions with answers."""
    named, available = {role: column for role, column in setup.columns.items() if column}, [str(c) for c in table]
    listed = ", ".join(available)
    for role, column in named.items():
        require_columns(f"{role}={column!r}: {setup.data}", table, [column])
    language, classes = named.keys() & SYNONYMS.keys(), named.keys() & _USUAL.keys()
    if language and classes:
        raise UserError(
            f"{min(classes)} is of a classification, {min(language)} of instructions with answers; give one of them"
        )
    if conversation_column(table) and not named:
        return {}, True
    kind = setup.model.partition("@")[2]
    usual = {
        role: [column for name in names for column in available if column.lower() == name]
        for role, names in (SYNONYMS | _USUAL).items()
    }
    asks = usual["instruction"] and usual["output"] and ("instruction" in available or "label" not in available)
    causal = bool(language or not classes and (kind == "huggingface_llm" or asks and kind != "transformers"))
    columns = {}
    for role in SYNONYMS if causal else _USUAL:
        candidates = [column for column in usual[role] if column not in named.values()]
        if column := named.get(role) or (candidates[0] if len(candidates) == 1 or candidates and causal else ""):
            columns[role] = column
        elif role not in ("input", "text_pair"):
            few = [n for i, n in enumerate(available) if 1 < table.iloc[:, i].astype(str).nunique() <= len(table) // 5]
            likely = few if role == "label" else [name for name in available if name not in few]
            advice = "" if few else "; of instructions with answers, instruction='{}' and output='{}'"
            advice = advice.format(*available[:2], "COLUMN", "COLUMN")
            if causal:
                template = "[{template: '{COLUMN}', output: COLUMN}]"
                advice = f"; for plain text write the configuration by hand, with data.args {template}"
            listed = ", ".join(likely) or listed
            raise UserError(f"{setup.data}: which column is the {role}? say {role}='COLUMN', of {listed}{advice}")
    return columns, causal


def _layers(skeleton: nn.Module) -> tuple[str, str]:
    """Arguments of an adapter, and why: PEFT's usual modules in the last third of the layers."""
    stack = layer_stack(skeleton)
    try:
        modules = sorted({name.rpartition(".")[2] for name in target_modules(skeleton, AdapterSpec())})
    except UserError:  # PEFT has no usual choice for this kind of model
        modules = []
    if stack is None or not modules:
        return "modules: all-linear", "proposed: all linear modules, as the model is of no usual kind"
    depth = len(stack[1])
    layers = range(depth - max(1, round(depth / 3)), depth)
    comment = f"proposed: the modules that PEFT adapts in such models, in the last third of its {depth} layers"
    return f"modules: [{', '.join(modules)}], layers: [{', '.join(map(str, layers))}]", comment


def _yaml(text: str) -> str:
    """``text`` as a value of a YAML file, also in braces; quoted where it would be read as something else."""
    style = None if text.isprintable() else '"'
    options: dict[str, Any] = {"default_flow_style": True, "default_style": style, "allow_unicode": True}
    return str(yaml.dump([text], Dumper=Dumper, width=math.inf, **options)).strip()[1:-1]


def _flow(mapping: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {_yaml(value)}" for key, value in mapping.items()) + "}"
