"""The methods by name: built in, and registered by other packages. Nothing else asks for a method by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points

from ..errors import UserError, nearest
from ..settings import AdapterSpec, Settings, check_method_params
from .base import Averaging, Method
from .corrected import DriftCorrection
from .drift import corrected
from .registry import refuse_former, registered
from .robust import RobustMean
from .server_optimizer import ServerOptimizer
from .terms import Requires, Setting

ENTRY_POINTS = "fs_lowrank.methods"
_BUILT_IN = (
    "fedavg",
    "fedlora",
    "ffa_lora",
    "rolora",
    "flexlora",
    "flora",
    "florist",
    "fedex_lora",
    "fedask",
    "fedsvd",
    "raflora",
    "hetlora",
    "fedrot_lora",
    "frlora",
    "lora_fair",
    "fedsa_lora",
    "la_lora",
    "fedpara",
    "ravan",
    "fed_sb",
    "fedloru",
    "mfedloru",
    "pfedloru",
    "pfedlora",
    "fedhm",
    "one_shot.fedfisher",
    "one_shot.fisher_merge",
    "one_shot.regmean",
    "one_shot.otfusion",
    "one_shot.pfnm",
    "one_shot.dense",
)
_ALIASES = {"fedit": "fedlora", "lora": "fedlora", "rb_lora": "raflora"}
_POOLED = "all data in one place is the row `pooled` of `fs-lowrank compare`"
#: names of FederatedScope's that are no methods here -> what to take in their place
_ALTERNATIVES = {
    "local": "each client alone is the row `local` of `fs-lowrank compare`; one client alone is "
    "federate.client_idx_for_local_train N",
    "global": _POOLED,
    "pooled": _POOLED,
    "relora": "FedLoRU's schedule on all data in one place is the row `relora` of `fs-lowrank compare`",
    **{n: f"it is lowrank.drift {n}, with an averaging method" for n in ("fedprox", "scaffold", "feddyn")},
    "fedopt": "a server optimizer is fedopt.use True, with any method whose server step is a mean",
}


@cache
def _load(path: tuple[str, ...]) -> None:
    """Import the modules that register methods, once for each ``sys.path``: looking for packages takes time."""
    for module in _BUILT_IN:
        __import__(f"{__package__}.{module}")  # by name, as a copy of this module (``declared``) imports copies
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            raise UserError(
                f"the package that adds method {point.name!r} ({point.value}) failed to import: "
                f"{type(error).__name__}: {error}"
            ) from error


def list_methods() -> list[str]:
    """Names of all methods, built in and registered by other packages, sorted."""
    _load(tuple(sys.path))
    return sorted(registered())


def get_method_class(name: str) -> type[Method]:
    """The method's class; names are case-insensitive, ``fedit`` and ``lora`` mean ``fedlora``, and ``rb_lora`` means
    ``raflora``.

    Raises:
        UserError: no such method; names the nearest.
    """
    _load(tuple(sys.path))
    key = str(name).lower()
    key = _ALIASES.get(key, key)
    methods = registered()
    if key not in methods:
        hint = f"; {_ALTERNATIVES[key]}" if key in _ALTERNATIVES else nearest(key, [*methods, *_ALTERNATIVES])
        raise UserError(f"federate.method: no method {name!r}{hint}; there are: {', '.join(sorted(methods))}")
    return methods[key]


def create_method(
    name: str,
    *,
    adapter: AdapterSpec | None = None,
    rounds: int | None = None,
    seed: int = 0,
    uniform: bool = False,
    from_scratch: bool = False,
    with_adapter: bool = False,
    only_sums: bool = False,
    local_steps: int = 1,
    own_steps: Mapping[int, int] | None = None,
    train_head: bool = True,
    personal: Sequence[str] = (),
    drift: DriftCorrection | None = None,
    server_optimizer: Mapping[str, object] | None = None,
    robust: RobustMean | None = None,
    **params: object,
) -> Method:
    """A method ready to be asked.

    Args:
        adapter: the adapter to put on the model; PEFT's defaults if None.
        rounds: rounds of the whole run, for methods whose plan depends on it.
        seed: the run's seed; fresh draws come from it.
        uniform: weigh clients equally instead of by samples.
        from_scratch: the model was not pre-trained, so layers without an adapter train whole.
        with_adapter: for methods that take either, the adapter rather than all weights.
        only_sums: the server will see no more than the weighted sum of what clients send.
        local_steps: ``train.local_update_steps``, for methods that compute with the length of a phase.
        own_steps: by client, where it differs from ``local_steps``.
        train_head: a classifier's head is trained and shared, too.
        personal: tags of further tensors that stay with their client: ``head``.
        drift: what is added to the clients' objective, so that they drift apart less; None: nothing.
        server_optimizer: ``{"type": "Adam", "lr": …}``; None is the plain mean.
        robust: a mean that a few malicious clients cannot move far; None is the weighted mean.
        params: the method's hyperparameters.
    Raises:
        UserError: unknown method or hyperparameter, a value out of range, something that the method requires and the
            run does not have, or a server optimizer, a robust mean or a correction on a method that it is not for.
    """
    cls = corrected(get_method_class(name), drift)
    steps = local_steps, dict(own_steps or {})
    settings = rounds, seed, uniform, from_scratch, with_adapter, only_sums, *steps, train_head, tuple(personal)
    method = cls(cls.Params(**check_method_params(cls, params)), Setting(adapter or AdapterSpec(), *settings))
    refuse_former(cls.name, vars(method))
    if not train_head and any("head" in (*method.shared, *phase.train) for phase in method.phases(1)):
        raise UserError(
            f"lowrank.train_head = False: {cls.name} names the head in its phases, so it would train it nevertheless; "
            "choose another method (in one of your own, write self.whole in place of head)"
        )
    if server_optimizer is not None:
        if not isinstance(method, Averaging):
            raise UserError(
                f"fedopt.use: {cls.name}'s server step is not a weighted mean, so a server optimizer "
                f"has no pseudo-gradient to work on; it applies to: {_averaging()}"
            )
        if cls.aggregate is not Averaging.aggregate:
            raise UserError(
                f"fedopt.use: {cls.name} has an aggregate of its own, which might leave the server optimizer out; "
                "override mean or settle instead"
            )
        method.wrappers = (ServerOptimizer.from_config(server_optimizer),)
    if robust is not None:
        _add_robust(method, robust)
    return method


def _add_robust(method: Method, robust: RobustMean) -> None:
    rule = f"lowrank.robust = {robust.rule}"
    if not isinstance(method, Averaging):
        raise UserError(
            f"{rule}: {method.name}'s server step is not a weighted mean, which a robust mean could replace; it "
            f"applies to: {_averaging()}"
        )
    if method.setting.only_sums:
        raise UserError(
            f"{rule} needs the update of each client; a server that sees only their sum (federate.use_ss, "
            "federate.online_aggr) has none"
        )
    cls = type(method)
    own_mean = cls.mean is not Averaging.mean and cls.recovered is Averaging.recovered
    if cls.aggregate is not Averaging.aggregate or own_mean:
        raise UserError(
            f"{rule}: {cls.name} has {'a mean' if own_mean else 'an aggregate'} of its own, which would ignore the "
            "robust mean; override recovered or settle instead"
        )
    method.robust = robust


def _averaging() -> str:
    return ", ".join(n for n in list_methods() if issubclass(registered()[n], Averaging))


def requirements(name: str, params: Mapping[str, object] | None = None) -> Requires:
    """What a method requires with its hyperparameters ``params``, the others at their defaults.

    Raises:
        UserError: as ``create_method``, for the name and the hyperparameters.
    """
    cls = get_method_class(name)
    return cls.requires(cls.Params(**check_method_params(cls, params or {})))


def revisions(config: Settings) -> dict[str, int]:
    """The revisions of the configured method and server optimizer, by name, where they are not 1.

    They say that the same configuration once computed something else: a benchmark's cell is hashed with them, and a
    run that was begun with others is not resumed.
    """
    cls = get_method_class(config.federate.method)
    numbers = {cls.name: cls.revision_of(cls.Params(**config.method_params))}
    if config.fedopt.use:
        server = config.fedopt.optimizer
        numbers[f"server {server.type}"] = ServerOptimizer.revision_of({"type": server.type, **server.extra})
    return {name: revision for name, revision in numbers.items() if revision != 1}
