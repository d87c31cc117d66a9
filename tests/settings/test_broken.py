"""Broken configurations: whatever a file holds, it is taken, or refused with one line."""

import datetime
import gzip
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fs_lowrank import UserError, load_config
from fs_lowrank.settings import known_keys

pytestmark = pytest.mark.more
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
TREES = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in EXAMPLES]
MANY = settings(max_examples=60, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
#: without controls, which a message would show as they are
NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=5)
#: the only message of several lines: keys that do nothing, each in an indented line
LISTED = re.compile(r"[^\n]+; remove:(\n  \S[^\n]*)+")
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


def is_taken_or_refused(source):
    try:
        load_config(source)
    except UserError as error:
        assert len(str(error).splitlines()) == 1 or LISTED.fullmatch(str(error)), str(error)


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
