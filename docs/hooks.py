"""What mkdocs asks of us: pages of the repository's root and of the code, links that fit a site, and old addresses.

The guides link to each other and to files as GitHub shows them. On the site a link to a page leads to the page; one to
another file of the repository becomes the file's name, since the site does not hold it. A link that leads nowhere
stays as it is, and mkdocs refuses it. A page that has moved sends a browser on from where it was.
"""

import dataclasses
import inspect
import os
import re
from pathlib import Path, PurePosixPath

import fs_lowrank.benchmark.cli
import fs_lowrank.hpo.cli
import yaml
from mkdocs.structure.files import File

import fs_lowrank.cli
from fs_lowrank import keys
from fs_lowrank.methods import get_method_class
from fs_lowrank.settings import framework

ROOT = Path(__file__).parents[1]
#: files of the root that are pages
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "results/README.md": "results.md",
    "results/leaderboard.md": "leaderboard.md",
}
#: the pages whose tables are sorted by a click on a header and saved as CSV, as on the page of a run
SORTED = ("leaderboard.md",)
#: pages that were at the top of ``docs`` once, by their folder; ``OLD=NEW`` has another name there
MOVED = {
    "guides": "adapters benchmark evaluation federatedscope flower hpo large_models own_data own_method robust "
    "scale speed",
    "methods": "fedloru=fedloru_details one_shot",
    "reference": "keys platforms run_files",
}
#: pictures outside of ``docs`` that a page shows go to this folder of the site
SHOWN = "pictures"
PICTURE = re.compile(r"!\[[^\[\]]*\]\(([^()\s:]+\.(?:png|svg))\)")
LINK = re.compile(r"\[([^\[\]]+)\]\(([^()#\s:]+)(#[^()\s]*)?\)")


def on_files(files, config):
    sources = [*map(PurePosixPath, PAGES), PurePosixPath("docs/gallery.md")]
    for source in sources:
        for picture in PICTURE.findall((ROOT / source).read_text(encoding="utf-8")):
            path = os.path.normpath(source.parent / picture)
            if not path.startswith("docs/") and not files.get_file_from_path(f"{SHOWN}/{path}"):
                files.append(File.generated(config, f"{SHOWN}/{path}", abs_src_path=str(ROOT / path)))
    for source, page in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        if page in SORTED:
            script = (ROOT / "fs_lowrank" / "draw" / "templates" / "look.js").read_text(encoding="utf-8")
            content += f"\n<script>\n{script}</script>\n"
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, "reference/keys.md", content=keys_page()))
    files.append(File.generated(config, "reference/command_line.md", content=command_line()))
    return files


def keys_page():
    """The page of all keys, from their reference."""

    def listed(names):
        return ", ".join(f"`{name}`" for name in names)

    def example(entry):
        """A value that is not the default: of the files that ship, else the first other choice."""
        kind, _, choices = entry.type.partition(" of ")
        others = [c for c in choices.split(", ") if c not in ("''", entry.default)] if kind in ("one", "any") else []
        others += [{"true": "False"}.get(entry.default, "True")] if entry.type.startswith("True") else []
        value = used.get(entry.name, others[0] if others else None)
        if isinstance(value, list):
            value = f"'{yaml.safe_dump(value, default_flow_style=True, width=1000).strip()}'"
        return "" if str(value) in ("None", entry.default) else f"example: `{entry.name} {value}`"

    used, groups = {}, {}
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        used |= flat(yaml.safe_load(path.read_text(encoding="utf-8")))
    for entry in keys.reference():
        groups.setdefault(entry.group, []).append(entry)
    lines = [
        "# Keys",
        "",
        "Every key that a configuration file or the command line may have; this page is made from the schema.",
        "`fs-lowrank keys NAME` shows one key, or all of a section, in a terminal. A key without a word on",
        "engines has the same meaning on every engine. An example is written as on the command line, `KEY VALUE`; in a",
        "file a dot begins a level.",
        "",
    ]
    for group, entries in groups.items():
        lines += [f"## {group}", "", "| key | meaning | expected |", "| --- | --- | --- |"]
        for entry in entries:
            note = "" if entry.engines == "all" else f" Engines: {entry.engines}."
            default = f"default: `{entry.default}`" if entry.default else ""
            expected = "<br>".join(filter(None, (entry.type, default, example(entry))))
            cells = (f"`{entry.name}`", entry.meaning + note, expected)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    lines += [
        "## FederatedScope",
        "",
        "These keys are read, so that FederatedScope's files load. The table says what `--engine federatedscope` does",
        "with a value that is not the default, under our methods. The other engines refuse it, unless it has no effect",
        f"on a result; the embedded one follows {listed(framework.FOLLOWED['local'])}, and `--engine flower` follows",
        f"{listed(framework.FOLLOWED['flower'])}.",
        "",
        "| key | default | with our methods |",
        "| --- | --- | --- |",
        *(f"| `{e.name}` | `{e.default}` | {e.engines} |" for e in keys.framework_entries()),
    ]
    return "\n".join(lines) + "\n"


def flat(content, above=""):
    """Values by dotted key; of a list of mappings also those of the first."""
    found = {}
    for name, value in content.items():
        if isinstance(value, dict):
            found |= flat(value, f"{above}{name}.")
            continue
        found[f"{above}{name}"] = value
        if isinstance(value, list) and value and isinstance(value[0], dict):
            found |= flat(value[0], f"{above}{name}.0.")
    return found


def command_line():
    """The page of all commands, with the help of each."""
    os.environ["COLUMNS"] = "100"
    lines = ["# Commands", "", "Each command prints its own help with `--help`. This page is made from it."]
    for program in (fs_lowrank.cli, fs_lowrank.hpo.cli, fs_lowrank.benchmark.cli):
        for parser in program._parser()[1]:
            lines += ["", f"## {parser.prog}", "", "```", parser.format_help().strip(), "```"]
    return "\n".join(lines) + "\n"


def from_the_code(name):
    """The docstring of a method's module, its paper and algorithm, and its hyperparameters."""
    method = get_method_class(name)
    lines = ["## Paper and algorithm", "", inspect.cleandoc(inspect.getmodule(method).__doc__).replace("``", "`")]
    meanings, fields = keys.sentences(method.Params), dataclasses.fields(method.Params)
    if fields:
        lines += ["", "## Hyperparameters", "", "Below `lowrank.` in a file:", "", "| key | default | meaning |"]
        lines += ["| --- | --- | --- |"]
        for field in fields:
            meaning = meanings.get(field.name, "").replace("|", "\\|")
            lines.append(f"| `{field.name}` | `{keys.as_yaml(field.default)}` | {meaning} |")
    return "\n".join(lines)


def on_page_markdown(markdown, page, config, files):
    where = PurePosixPath(page.file.src_uri)
    sources = {page: source for source, page in PAGES.items()}
    source = PurePosixPath(sources.get(str(where), f"docs/{where}"))

    def fitting(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        file = os.path.normpath(source.parent / target)
        page = file.removeprefix("docs/") if file.startswith("docs/") and not (ROOT / file).is_dir() else ""
        goal = PAGES.get(file) or page
        goal = goal or (f"{SHOWN}/{file}" if file.endswith((".png", ".svg")) and (ROOT / file).exists() else "")
        if goal:
            return f"[{text}]({os.path.relpath(goal, where.parent)}{anchor})"
        return f"{text} (`{file}`)" if (ROOT / file).exists() else match[0]

    markdown = markdown.replace('="docs/pictures/', '="pictures/')  # of the README
    markdown = re.sub(r"<!-- from the code: (\w+) -->", lambda found: from_the_code(found[1]), markdown)
    return LINK.sub(fitting, markdown)


def on_post_build(config):
    for folder, names in MOVED.items():
        for old_name, _, new_name in (name.partition("=") for name in names.split()):
            new, old = f"../{folder}/{new_name or old_name}/", Path(config.site_dir, old_name)
            old.mkdir()
            (old / "index.html").write_text(
                f'<!doctype html><title>Moved</title><script>location.replace("{new}" + location.hash)</script>'
                f'<meta http-equiv="refresh" content="0; url={new}"><a href="{new}">This page has moved.</a>\n'
            )
