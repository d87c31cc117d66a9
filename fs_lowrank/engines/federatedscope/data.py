"""Our data sets and partitioners, as the framework asks for them."""

from __future__ import annotations

import numpy as np
from federatedscope.core.data import ClientData
from federatedscope.core.splitters import BaseSplitter

from ...data import PARTITIONERS, Rows, partition
from .config import our_method
from .session import Session, open_session


class Held(ClientData):
    """One worker's data: our tokenized examples by split, of which batches are made as they are needed."""

    def __init__(self, client_cfg, **splits):
        super().__init__(client_cfg)
        # A mapping with ``x``, because the framework looks there for the shape of its inputs, and warns without one.
        # It looks at one split at least, also where the server evaluates nothing.
        for split, examples in (splits or {"test": None}).items():
            self[split] = {"examples": examples, "x": np.empty((len(examples or ()), 0))}

    def setup(self, new_client_cfg=None):
        """The framework would build its data loaders here; ours are the examples themselves."""
        self.client_cfg = new_client_cfg
        return False


def load(config, client_cfgs=None):
    """The data of a run with one of our methods; None leaves it to the framework."""
    if our_method(config.federate.method) is None:
        return None
    return handed_out(open_session(config), config), config


def handed_out(session: Session, config):
    """What each worker of this process holds: by its number in standalone mode, its own alone otherwise."""
    held_out = {split: examples for split, examples in session.site.held_out().items() if len(examples)}
    split, _, metric = config.eval.best_res_update_round_wise_key.partition("_")
    if held_out and split in ("val", "test") and split not in held_out:
        # The framework ends a run whose key names a split that is not evaluated, and its default is val_loss.
        config.eval.best_res_update_round_wise_key = f"{next(iter(held_out))}_{metric}"
    if session.role == "server":
        return Held(config, **held_out)
    by_clients = not config.federate.make_global_eval

    def of(number: int) -> Held:
        evaluated = session.held_out_for(number) if by_clients else {}
        return Held(config, train=session.examples(number), **evaluated)

    if session.role == "client":
        return of(max(session.index, 1))
    everyone = {number: of(number) for number in range(1, len(session.site.clients) + 1)}
    return {0: Held(config, **held_out), **everyone}


class Partitioned(BaseSplitter):
    """One of our partitioners, for a data set of the framework's."""

    def __init__(self, client_num: int, name: str, **args):
        super().__init__(client_num)
        self.name, self.args = name, args

    def __call__(self, dataset, prior=None, **kwargs):
        items = [dataset[i] for i in range(len(dataset))]
        labels = None
        if items and isinstance(items[0], (tuple, list)) and len(items[0]) == 2:
            labels = np.array([int(np.asarray(item[1]).reshape(-1)[0]) for item in items])
        elif items and isinstance(items[0], dict) and "categories" in items[0]:
            labels = np.array([int(item["categories"]) for item in items])
        parts = partition(
            self.name,
            Rows(len(items), labels),
            self.client_num,
            np.random.default_rng(np.random.randint(2**31)),
            self.args,
        )
        return [[items[i] for i in indices] for indices in parts.indices]


#: partitioners under these names are the framework's where its own data are concerned
_FRAMEWORKS = ("iid", "lda", "meta")


def splitter(kind: str, client_num: int, **args):
    """Our partitioner called ``kind``, if the framework has none of that name."""
    return Partitioned(client_num, kind, **args) if kind in PARTITIONERS and kind not in _FRAMEWORKS else None
