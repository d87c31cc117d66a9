"""A tutorial of ``docs/tutorials``, as its reader follows it: ``python tutorial.py PAGE``.

A block that begins with the name of a file is written; blocks of commands and of Python are run in their order. The one
before a block ``text`` must print what that shows, where … stands for anything.
"""

import re
import sys
from pathlib import Path

from steps import does, file


def shown(text: str, printed: str) -> None:
    """Ends the walk if the lines of ``text`` were not printed, in their order; others may be between them."""
    parts = [part for line in text.splitlines() for part in line.split("…")]
    pattern = ".*?".join(r"\s+".join(map(re.escape, part.split())) for part in parts)
    if not re.search(pattern, printed, re.S):
        sys.exit(f"walk: the page shows\n{text}\nand this was printed\n{printed}")


printed = ""
for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", Path(sys.argv[1]).read_text(encoding="utf-8"), re.M | re.S):
    if name := re.match(r"# (\S+\.\w+)\n", text):
        file(name[1], text)
    elif language == "sh":
        printed = does(f"set -e\n{text}")
    elif language == "python":
        file("step.py", text)
        printed = does("python -W ignore step.py")
    elif language == "text":
        shown(text, printed)
