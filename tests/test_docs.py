"""Commands in the documentation: each parses, its configuration loads, and what it names is there."""

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import benchmark.cli
import hpo.cli
from fs_lowrank import UserError, cli, list_methods, load_config
from fs_lowrank.baselines import split_names
from fs_lowrank.config import load_for
from fs_lowrank.fetch import FETCHABLE
from fs_lowrank.jobs import shell
from fs_lowrank.methods import get_method_class
from fs_lowrank.settings import parse_overrides
from hpo.space import load_space

pytestmark = pytest.mark.more
ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/*"), ROOT / "Makefile"])
#: commands with a command line of their own
OWN = {"hpo": hpo.cli, "benchmark": benchmark.cli}
#: written in the tutorials, by nobody here
ELSEWHERE = {"median_lora"}
#: options of other programs: pip, a suite's scripts, Flower's SuperLink and SuperNode
FOREIGN = {"--no-deps", "--out", "--node-config", "--insecure", "--ssl-certfile", "--shell"}
#: what a sentence says is an error
MISSPELT = {"runn"}


def blocks(text: str) -> Iterator[str]:
    """The commands of a page's code blocks, and of a notebook's cells, one at a time."""
    text = re.sub(r"\\\n\s*", "", text)
    text = re.sub(r'^run="([^"]*)"', lambda found: " ".join(found[1].split()), text, flags=re.M)  # a shell's variable
    for line in [*re.findall(r'^\s*"!(fs-lowrank .*?)(?:\\n)?",?$', text, re.M), *fenced(text)]:
        for part in line.split("&&"):
            if part.strip().startswith("fs-lowrank "):
                yield part.strip()


def fenced(text: str) -> list[str]:
    parts = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    lines = [line.strip() for language, part in parts if language in ("", "sh") for line in part.splitlines()]
    return [line.removeprefix("$ ") for line in lines]


def inline(text: str) -> list[str]:
    """Commands in backticks, which may leave out arguments."""
    return [re.sub(r"\s+", " ", found) for found in re.findall(r"(?<!`)`(fs-lowrank [^`]+)`(?!`)", text)]


def parser_of(words: list[str]):
    """The parser of a command, with all commands' parsers, and the words after ``fs-lowrank`` that it takes."""
    module = OWN.get(words[0], cli)
    return *module._parser(), words[1:] if words[0] in OWN else words


def options_of(parser) -> set[str]:
    """The options of a command and of the commands below it, such as ``flower app``."""
    below = [c for a in parser._actions if isinstance(a.choices, dict) for c in a.choices.values()]
    return set(parser._option_string_actions).union(*map(options_of, below))


def parsed(command: str):
    words = shlex.split(command.replace("…", ""), comments=True)[1:]
    parser, commands, words = parser_of(words)
    return shell._arguments(parser, commands, words)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def pages(find):
    return [pytest.param(c, id=f"{p.name}: {c[11:70]}") for p in PAGES if p.is_file() for c in find(read(p))]


@pytest.mark.parametrize("command", pages(blocks))
def test_a_command_of_a_code_block(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = parsed(command)
    methods = [m for m in shell.names(getattr(args, "methods", None)) if m not in ELSEWHERE]
    assert set(split_names(methods)[0]) <= set(list_methods()) if methods else True
    config = str(getattr(args, "cfg", None) or "")
    if config.startswith("examples/"):
        if args.command == "tune":
            load_config(config, **parse_overrides(args.overrides))
            load_space(args.space)
        else:
            overrides = getattr(args, "overrides", None)
            load_for(config, methods, overrides) if methods else load_config(config, overrides)
    if args.command == "fetch":
        assert set(args.names) <= set(FETCHABLE)
    if args.command == "examples":
        assert all((ROOT / "examples" / f"{n}.yaml").exists() or n == "first_hour" for n in args.names)


@pytest.mark.parametrize("command", pages(inline))
def test_a_command_in_a_sentence(command):
    words = [word for word in command.split()[1:] if word != "…"]
    parser, commands, words = parser_of(words)
    names = {c.prog.rpartition(" ")[2]: c for c in commands}
    assert not words or words[0] in {*names, *MISSPELT} or not words[0].isidentifier(), command
    known = options_of(names[words[0]]) if words and words[0] in names else set()
    assert {w for w in words if w.startswith("--")} <= {*known, "--help", "--version"}, command


@pytest.mark.parametrize("path", [p for p in PAGES if p.suffix == ".md"], ids=lambda p: p.name)
def test_options_in_sentences_and_tables(path):
    """Every option that a page names is one of a command here, or of another program."""
    words = [word for found in re.findall(r"`([^`\n]+)`", read(path)) for word in found.split()]
    named = {option[0] for word in words if (option := re.match(r"--[a-z][a-z_-]*", word))}
    parsers = [p for module in (cli, *OWN.values()) for p in module._parser()[1]]
    known = {option for parser in parsers for option in parser._option_string_actions} | {"--debug", "--verbose"}
    assert named <= known | FOREIGN, named - known - FOREIGN


def built_in():
    return [name for name in list_methods() if get_method_class(name).__module__.startswith("fs_lowrank.")]


def test_every_method_has_a_page():
    for name in built_in():
        page = read(ROOT / "docs" / "methods" / f"{name}.md")
        assert f"<!-- from the code: {name} -->" in page and f"methods/{name}.md" in read(ROOT / "mkdocs.yml"), name


def with_ranks(method):
    return {"ranks", "nested_ranks", "rank_factors"} & set(method.Params.__dataclass_fields__)


def with_sums(method):
    return method.requires(method.Params()).sums


@pytest.mark.parametrize("page", ["guides/unequal_ranks.md", "guides/scale.md", "compare.md"])
def test_lists_of_methods_are_those_of_the_registry(page):
    (has, part), *more = re.findall(r"<!-- all with (\w+) -->(.*?)<!-- end -->", read(ROOT / "docs" / page), re.S)
    listed = set(re.findall(r"`(\w+)`", part)) & set(built_in())
    declares = {"ranks": with_ranks, "sums": with_sums}[has]
    assert not more and listed == {n for n in built_in() if declares(get_method_class(n))}


def test_the_number_of_methods():
    table = read(ROOT / "docs" / "methods" / "index.md").split("## All methods")[1].split("\n\n")[1]
    number = len(set(re.findall(r"\[`(\w+)`\]", table)) - {"fedavg", "fedlora"})
    assert f"| {number}, tested against" in read(ROOT / "README.md")
    assert f"| [{number}](methods/index.md#all-methods), tested against" in read(ROOT / "docs" / "compare.md")


@pytest.mark.parametrize("path", [p for p in PAGES if p.suffix == ".md"], ids=lambda p: p.name)
def test_files_that_a_page_names_are_there(path):
    named = re.findall(r"`((?:tests|examples|fs_lowrank|studies|benchmark|hpo)/[\w./-]+)`", read(path))
    assert path.name == "CHANGELOG.md" or all((ROOT / name).exists() for name in named), named


@pytest.mark.parametrize("path", [p for p in PAGES if p.suffix == ".md"], ids=lambda p: p.name)
def test_rows_and_items_have_lines_of_their_own(path):
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    broken = [line for line in text.splitlines() if line.startswith("|") and not line.rstrip().endswith("|")]
    assert not broken + re.findall(r"^[^|\n]*[^|\s] +- .*", text, re.M)


def test_the_commands_are_found():
    assert len(pages(blocks)) > 40 and len(pages(inline)) > 20
    with pytest.raises(UserError, match="unrecognised: --rounds"):
        parsed("fs-lowrank run --cfg examples/demo.yaml --rounds 3")


@pytest.mark.parametrize("path", [p for p in PAGES if p.suffix == ".md"], ids=lambda p: p.name)
def test_modules_targets_and_extras(path):
    text = read(path)
    for module in re.findall(r"python -m ((?:benchmark|fs_lowrank|studies|tests)[\w.]*\w)", text):
        assert find_spec(module), module
    targets = set(re.findall(r"^([\w-]+):", read(ROOT / "Makefile"), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)) <= targets
    extras = set(re.findall(r'^\s+"(\w+)": \[', read(ROOT / "setup.py"), re.M))
    found = re.findall(r"(?:(?:fs-lowrank|\.)\[|\bextra `?)(\w+(?:,\w+)*)", text)
    named = {extra for extras_of in found for extra in extras_of.split(",")}
    assert named <= extras, (named, extras)
