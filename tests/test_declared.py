"""Copies of modules that import no torch say of methods and keys what the modules themselves say."""

import dataclasses
import inspect
import json
import subprocess
import sys

import pytest

from fs_lowrank import keys, methods
from fs_lowrank.methods.one_shot.base import DRAWS
from fs_lowrank.models.curvature import LARGEST_EXACT


def described(room, name):
    cls = room.get_method_class(name)
    fields = {f.name: (f.type, f.default, dict(f.metadata)) for f in dataclasses.fields(cls.Params)}
    needs = dataclasses.asdict(cls.requires(cls.Params()))
    shared = cls.name, cls.source, cls.sends, cls.shared, cls.personal, cls.revision
    return repr((shared, issubclass(cls, room.Averaging), fields, needs))


def as_text(entries):
    return [repr((e.name, e.group, e.type, e.default, e.engines, e.meaning)) for e in entries]


@pytest.fixture(scope="module")
def copied():
    """What a process says that has not imported torch: of each method, and of all keys."""
    code = "import dataclasses, json, sys\nfrom fs_lowrank import keys\nfrom fs_lowrank.declared import methods\n"
    code += "".join(f"{inspect.getsource(function)}\n" for function in (described, as_text))
    code += "room = methods()\nsaid = {name: described(room, name) for name in room.list_methods()}\n"
    code += "print(json.dumps([said, as_text(keys.reference()), 'torch' in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_a_copy_imports_no_torch_and_describes_every_method_alike(copied):
    said, _, torch_too = copied
    built_in = [n for n in methods.list_methods() if methods.get_method_class(n).__module__.startswith("fs_lowrank")]
    assert not torch_too and said == {name: described(methods, name) for name in built_in}, "but those of other tests"


def test_the_reference_of_keys_is_the_same(copied):
    assert copied[1] == as_text(keys.reference())


def test_a_text_names_the_number_that_is_computed_with():
    assert f"None up to {LARGEST_EXACT} classes" in DRAWS["help"]
