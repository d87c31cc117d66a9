"""The generic suite for methods of other packages.

    from fs_lowrank.testing import check_method

    def test_my_method():
        check_method(MyMethod)

A method is run on a small encoder, causal model and image network (those that it takes), in the embedded engine, in
under a minute and without a network. ``asked_of`` says what is asked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import UserError
from ..methods import Method, get_method_class, requirements
from ..methods.registry import registered
from .bench import TASKS, Bench, quietly
from .checks import CHECKS, Check
from .referee import Finding, check_server_step, judge_server_step

__all__ = [
    "CHECKS",
    "TASKS",
    "Bench",
    "Check",
    "Finding",
    "asked_of",
    "check_method",
    "check_server_step",
    "judge_server_step",
    "quietly",
]


def check_method(
    method: type[Method] | str,
    params: Mapping[str, Any] | None = None,
    *,
    keys: Mapping[str, Any] | None = None,
    only: str | None = None,
    say: Callable[[str], object] | None = None,
) -> list[str]:
    """Run the generic suite over a method.

    Args:
        method: the class, which has registered, or its name.
        params: hyperparameters that are not at their defaults.
        keys: further keys of the configuration for every run, such as ``{"train.optimizer.lr": 0.01}``.
        only: the name of one check.
        say: called with a line for each check, such as ``print``.
    Returns:
        The checks that passed, as ``"check (task)"``.
    Raises:
        AssertionError: checks failed; the message has a line for each.
        UserError: the method is not registered or not known, a hyperparameter is wrong, or there is no such check.
    """
    if not __debug__:
        raise UserError("python -O leaves out assertions, so no check could fail; run without -O")
    name = _name(method)
    if only is not None and only not in [check.name for check in CHECKS]:
        raise UserError(f"no check {only!r}; there are: {', '.join(check.name for check in CHECKS)}")
    general = {f"lowrank.{key}": value for key, value in (params or {}).items()} | dict(keys or {})
    passed, failed = [], []
    first: Exception | None = None
    with tempfile.TemporaryDirectory() as folder, quietly(folder):
        bench = Bench(folder, general)
        for check, task in _checks_of(name, params):
            if only not in (None, check.name):
                continue
            label = f"{check.name} ({task})"
            try:
                check.function(bench, name, task)
            except Exception as error:
                words = " ".join(str(error).split()) or "no message"
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                failed.append(f"{label}: {kind}{words}")
                first = first or error
            else:
                passed.append(label)
            if say:
                say(f"{'failed' if failed and failed[-1].startswith(label) else 'passed'}  {label}: {check.asks}")
    if failed:
        total = len(passed) + len(failed)
        listed = "\n  ".join(failed)
        raise AssertionError(f"{name} fails {len(failed)} of {total} checks:\n  {listed}") from first
    return passed


def asked_of(method: type[Method] | str, params: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The requirements of the generic suite for a method: the check with its task → the requirement."""
    return {f"{check.name} ({task})": check.asks for check, task in _checks_of(_name(method), params)}


def _checks_of(name: str, params: Mapping[str, Any] | None) -> list[tuple[Check, str]]:
    takes = requirements(name, params).tasks
    tasks = [task for task, kind in TASKS.items() if kind in takes]
    return [(check, task) for check in CHECKS for task in (tasks if check.every_task else tasks[:1])]


def _name(method: type[Method] | str) -> str:
    if isinstance(method, str):
        return get_method_class(method).name
    name = getattr(method, "name", None) if isinstance(method, type) else None
    if name is None or registered().get(name) is not method:
        label = getattr(method, "__qualname__", repr(method))
        raise UserError(f"{label} is not a registered method; put @register_method('its_name') over the class")
    return name
