"""What mkdocs asks of us: pages for the files of the repository's root, and links that fit a site.

The guides link to each other and to files as GitHub shows them. On the site a link to a page leads to the page; one to
another file of the repository becomes the file's name, since the site does not hold it. A link that leads nowhere
stays as it is, and mkdocs refuses it.
"""

import os.path
import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
#: files of the root that are pages
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\[([^\[\]]+)\]\(([^()#\s:]+)(#[^()\s]*)?\)")


def on_files(files, config):
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    where = PurePosixPath(page.file.src_uri)
    sources = {page: source for source, page in PAGES.items()}
    source = PurePosixPath(sources.get(str(where), f"docs/{where}"))

    def fitting(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        file = os.path.normpath(source.parent / target)
        goal = PAGES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else "")
        if goal:
            return f"[{text}]({os.path.relpath(goal, where.parent)}{anchor})"
        return f"{text} (`{file}`)" if (ROOT / file).exists() else match[0]

    markdown = markdown.replace('="docs/pictures/', '="pictures/')  # of the README
    return LINK.sub(fitting, markdown)
