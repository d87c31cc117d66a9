"""Uses of other libraries beyond their documented interfaces are listed, each with its reason."""

import ast
from pathlib import Path

import pytest

import fs_lowrank

#: names with an underscore that are documented: ``os._exit`` and a method of named tuples
DOCUMENTED = {"_exit", "_replace"}
#: private names of other libraries that are used, by file; the reason is given there or here
BORROWED = {
    # the version of the framework is pinned, and checked when it is imported (engines/locate_federatedscope.py)
    # a value of a new key is read as yacs reads all others
    "fs_lowrank/engines/federatedscope/config.py": {"_decode_cfg_value", "_immutable"},
    # the process of an executor of one, whose exit code says how it died
    "fs_lowrank/jobs/pool.py": {"_processes"},
    # the type that argparse's add_subparsers returns has no public name; it is used as a type hint only
    "fs_lowrank/commands/__init__.py": {"_SubParsersAction"},
    # the commands of a parser with their help, for the overview; the options that it has
    "fs_lowrank/jobs/shell.py": {"_choices_actions", "_SubParsersAction"},
    # the id by which a heartbeat is recorded: Optuna records the first one too late (hpo/worker.py)
    "hpo/worker.py": {"_trial_id"},
    # what accelerate must not divide, as transformers' own from_pretrained(device_map=…) asks its models
    "fs_lowrank/models/placing.py": {"_no_split_modules"},
    # torch has no public way to ask whether a module has hooks; if it has, PEFT's own forward runs
    "fs_lowrank/models/convolution.py": {"_forward_hooks"},
}


#: attributes of a library's objects that decide what they run, and the only files that replace them
REPLACED = {
    "fs_lowrank/models/convolution.py": {"__class__"},
    "fs_lowrank/models/given.py": {"__class__"},
    "fs_lowrank/models/padding.py": {"__class__"},
    "fs_lowrank/models/shortcuts/reads.py": {"forward"},
}


@pytest.mark.more
def test_nothing_else_of_a_library_s_own_is_used_or_replaced():
    """Looks in the code for attributes and imports with a leading underscore that are not ours, and for assignments."""
    root = Path(fs_lowrank.__file__).parent.parent
    ours, private, imported, replaced = set(), {}, [], {}
    for path in (path for room in ("fs_lowrank", "benchmark", "hpo") for path in (root / room).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours.add(node.attr)
                if node.attr in ("__class__", "forward"):
                    replaced.setdefault(name, set()).add(node.attr)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                    private.setdefault(name, set()).add(node.attr)
            elif isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
                parts = (getattr(node, "module", None) or "").split(".")
                parts += [part for alias in node.names for part in alias.name.split(".")]
                imported += [f"{name}: {part}" for part in parts if part.startswith("_") and not part.startswith("__")]
    used = {name: names - ours - DOCUMENTED for name, names in private.items()}
    assert {name: names for name, names in used.items() if names} == BORROWED
    assert not imported
    assert replaced == REPLACED, "give the reason in the code, test what it relies on, and add the file here"
