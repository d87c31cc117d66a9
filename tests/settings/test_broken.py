"""Broken configurations: whatever a file holds, it is taken, or refused with one line."""

import datetime
import functools
import gzip
import math
import random
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fs_lowrank import UserError, cli, list_methods, load_config
from fs_lowrank.keys import json_schema
from fs_lowrank.methods import get_method_class, requirements
from fs_lowrank.settings import framework, known_keys, read_yaml
from tests.torture.child import difference, is_one_line

Draft202012Validator = pytest.importorskip("jsonschema").Draft202012Validator

pytestmark = pytest.mark.more
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
TREES = [read_yaml(path)[1] for path in EXAMPLES]
MANY = settings(max_examples=60, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
#: without controls, which a message would show as they are
NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=5)
VALUES = st.one_of(
    *(st.integers(), st.floats(), st.text(max_size=5), st.booleans(), st.lists(st.integers(-1, 3), max_size=2)),
    st.sampled_from([None, 10**400, -(10**400), math.nan, "1e400", "../../x", "a" * 10_000, "\0", "\u202e", b"1"]),
    st.sampled_from([[[]], [{}], {"a": 1}, {3: None}, [["abc"]], datetime.date(2026, 1, 1), {"type": "abc"}]),
)
#: what stands where a line of the file has its value
VALUES_OF_LINES = [
    *('"\\ud800"', "9" * 400, "9" * 5000, "0." + "9" * 400, "1:30", "0o17", "1e400", "2026-01-01", "*nothing"),
    *("&me [*me]", "!!python/object/apply:os.system ['exit 3']", "!!set {a, b}", "!!binary é", "!!int abc"),
    *("{<<: 3}", "{{a: 1}: 2}", "{[a]: 2}", "[", '"abc', "[" * 1000 + "]" * 1000, "{a: " * 1000, "a" * 1_000_000),
]
#: what is made of the text of the file
TEXTS = [
    *(lambda text: "%YAML 3.0\n---\n" + text, lambda text: text + "---\n" + text, lambda text: text[: len(text) // 2]),
    *(lambda text: "", lambda text: "# nothing\n", lambda text: "3\n", lambda text: "- 1\n", lambda text: "\t" + text),
    *(lambda text: text.replace(":", "\0", 1), lambda text: text.replace("\n", "\u2028", 3)),
    lambda text: "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)) + text,
    *(lambda text: text.encode("utf-16"), lambda text: text.encode() + b"# \xe9\n", lambda text: b"\xff" * 40),
    lambda text: gzip.compress(text.encode()),
]


def leaves(node, name=""):
    """The keys of a JSON schema, each with its own schema."""
    for key, below in node.get("properties", {}).items():
        yield from leaves(below, f"{name}.{key}".lstrip("."))
    yield from ((name, each) for each in (node, *node.get("anyOf", ())) if name)


def edges(node):
    """The least and the largest value, or every one of few."""
    bounds = [node[bound] for bound in ("minimum", "maximum") if bound in node]
    bounds += [node["exclusiveMinimum"] + 1e-30] if "exclusiveMinimum" in node else []
    bounds += {"number": [1e30], "boolean": [False, True]}.get(str(node.get("type")), [])
    return [*node.get("enum", ()), *bounds]


def beyond(node):
    """Values next to those edges, and a word that is none of any."""
    bounds = [node[bound] for bound in ("exclusiveMinimum", "exclusiveMaximum") if bound in node]
    bounds += [node[bound] + by for bound, by in (("minimum", -1), ("maximum", 1)) if bound in node]
    return [*bounds, "no such word"]


SCHEMA = Draft202012Validator(json_schema())
OURS = "seed federate data dataloader model llm train grad early_stop eval fedopt lowrank".split()
LEAVES = [
    (key, node)
    for key, node in leaves(SCHEMA.schema)
    if key.partition(".")[0] in OURS and key not in framework.DEFAULTS
]
EDGES = [(key, value) for key, node in LEAVES for value in edges(node)]


def is_taken_or_refused(source):
    """What is taken is valid by the JSON schema, but for arguments, which are checked when they are used."""
    try:
        taken = load_config(source).to_dict()
    except UserError as error:
        assert is_one_line(str(error)), str(error)
    else:
        assert all("_args" in error.json_path for error in SCHEMA.iter_errors(taken)), source


def changed(content, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    is_taken_or_refused(path)


@MANY
@given(tree=st.sampled_from(TREES), key=st.sampled_from(sorted(known_keys())), value=VALUES, last=NAMES)
def test_any_value_of_any_key_and_any_name(tree, key, value, last):
    is_taken_or_refused({**tree, key: value})
    is_taken_or_refused({**tree, key.partition(".")[0]: value})
    is_taken_or_refused({**tree, f"{key}{last}": value})


@pytest.mark.parametrize("value", VALUES_OF_LINES, ids=lambda value: value[:9])
def test_any_value_in_a_file(tmp_path, value):
    lines = EXAMPLES[0].read_text(encoding="utf-8").splitlines()
    for at in [i for i, line in enumerate(lines) if re.match(r"\s*\w+: \S", line)][::8]:
        written = [*lines[:at], f"{lines[at].partition(':')[0]}: {value}", *lines[at + 1 :]]
        changed("\n".join(written) + "\n", tmp_path)


@pytest.mark.parametrize("change", TEXTS, ids=range(len(TEXTS)))
def test_any_text(tmp_path, change):
    changed(change(EXAMPLES[0].read_text(encoding="utf-8")), tmp_path)


@MANY
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_any_byte(tmp_path_factory, at, bit, cut):
    content = bytearray(EXAMPLES[0].read_bytes())
    place = int(at * len(content))
    if cut:
        del content[place]
    else:
        content[place] ^= 1 << bit
    changed(bytes(content), tmp_path_factory.getbasetemp())


#: methods for text
TEXTUAL = [m for m in list_methods() if "SequenceClassification" in requirements(m).tasks]


def method_with(key, methods):
    """One of the methods that has the key; RoLoRA where it has it or none has."""
    own = [m for m in methods if key.removeprefix("lowrank.") in get_method_class(m).Params.__dataclass_fields__]
    return own[0] if own and "rolora" not in own else "rolora"


def test_what_the_schema_forbids_is_refused_by_name():
    """Keys of a scheduler are checked when it is used."""
    checked = 0
    for key, value in {(key, value) for key, node in LEAVES if "scheduler." not in key for value in beyond(node)}:
        if not SCHEMA.is_valid(functools.reduce(lambda below, part: {part: below}, reversed(key.split(".")), value)):
            few = {"federate.client_num": 3, "federate.method": method_with(key, list_methods())}
            with pytest.raises(UserError) as refused:
                load_config({**few, key: value})
            assert key in str(refused.value) and "unknown key" not in str(refused.value), refused.value
            checked += 1
    assert checked > 250


@pytest.mark.slow
@pytest.mark.parametrize("key, value", random.Random(3).sample(EDGES, 40), ids=str)
def test_what_is_taken_gives_the_same_finite_result_twice(settings, tmp_path, capsys, key, value):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    few = {"federate.client_num": 3, "federate.total_round_num": 2, "train.local_update_steps": 1}
    few |= {"federate.method": method_with(key, TEXTUAL), "lowrank.pictures": False, key: value}
    command = ["run", "--cfg", str(tmp_path / "run.yaml"), *(str(part) for pair in few.items() for part in pair)]
    codes = [cli.main([*command, "outdir", str(tmp_path / name)]) for name in "12"]
    said = capsys.readouterr().err
    assert codes[0] == codes[1] and "Traceback" not in said and "please report" not in said
    if codes[0]:
        assert all(is_one_line(part.rstrip()) for part in said.split("error: ")[1:]), said
        return
    assert not difference(tmp_path / "1", tmp_path / "2")
    for file in tmp_path.rglob("*.safetensors"):
        assert all(t.isfinite().all() for t in load_file(file).values() if t.is_floating_point()), file
