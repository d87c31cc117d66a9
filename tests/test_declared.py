"""Copies of modules that import no torch say of methods and keys what the modules themselves say."""

import dataclasses

import pytest

from fs_lowrank import declared, keys, methods

COPY = declared._copy("fs_lowrank.methods")


def described(room, name):
    cls = room.get_method_class(name)
    fields = {f.name: (f.type, f.default, dict(f.metadata)) for f in dataclasses.fields(cls.Params)}
    needs = dataclasses.asdict(cls.requires(cls.Params()))
    shared = cls.name, cls.source, cls.sends, cls.shared, cls.personal, cls.revision
    return shared, issubclass(cls, room.Averaging), fields, needs


def test_a_copy_has_the_methods_and_nothing_that_computes():
    assert COPY is not methods and COPY.list_methods() == methods.list_methods()
    torch = declared._copy("fs_lowrank.methods.base").torch
    assert torch.zeros(3) is torch, "torch is absent"


@pytest.mark.parametrize("name", methods.list_methods())
def test_a_method_is_described_alike(name):
    assert described(COPY, name) == described(methods, name)


def test_the_reference_of_keys_is_the_same(monkeypatch):
    from_modules = keys.reference()
    monkeypatch.setattr(keys, "declared", declared._copy)
    monkeypatch.setattr(keys, "methods", lambda: COPY)
    assert keys.reference() == from_modules
