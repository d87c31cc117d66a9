"""The client's side: a Flower ``ClientApp`` that answers one message at a time, in a process that may end after each.

What the client must remember (the round where its copy of the model stands, the base weights that changed, its personal
tensors) is in a folder of its own disk, with checksums. A process that lives on keeps data and model, whichever client
it answers for next.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...algebra import digest
from ...config import Config, load_config
from ...data import Examples, ImageExamples
from ...data.fetch import home
from ...errors import UserError
from ...methods import Client, revisions
from ...models.adapters import load_tensors
from ...rounds.copies import LostCopy, OwnCopy, answer, apology, standing_in
from ...rounds.evaluator import Evaluator
from ...rounds.joining import agreed, proof_of
from ...rounds.parcel import Parcel
from ...rounds.personal import PersonalParts
from ...rounds.site import Site
from . import keys
from .messages import packed, unpacked


def memory(place: Path, identity: str, client: int) -> Path:
    """The folder below ``place`` where ``client`` of the run ``identity`` remembers; other runs have others."""
    return place / f"run_{digest({}, identity)[:16]}" / f"client_{client}"


def client_app(folder: Path | None = None, threads: int = 0) -> ClientApp:
    """The app that every node runs.

    Args:
        folder: where clients keep what they remember; None: where the node's configuration says.
        threads: of torch; 0: as many as it takes.
    """
    app = ClientApp()
    for kind in (app.query, app.train, app.evaluate):
        kind()(partial(respond, folder=folder, threads=threads))
    return app


def respond(message: Message, context: Context, folder: Path | None, threads: int) -> Message:
    """The reply to ``message``; an error is one, too."""
    if threads:
        torch.set_num_threads(threads)
    round = 0
    try:
        order = unpacked(message.content)
        round = order.facts.get("round", 0)
        reply = Node(order.facts, context.node_config, folder).obey(order)
    except Exception as error:  # must not end the round of the others; the server records it
        reply = apology(round, error)
    return Message(packed(reply), reply_to=message)


class Node:
    """One client, for the time of one message.

    Args:
        facts: of the message: ``run``, what tells this run from others, and ``config``, the server's configuration.
        own: the node's configuration: ``partition-id``, the client's number less one; ``cfg``, a configuration of its
            own; ``own-data``, whether all data that it names are this client's; ``folder``, where it remembers.
        folder: in place of the node's own, in a simulation; there Ray shows each process GPUs of its own only, so that
            the server's ``device`` is not theirs.
    """

    def __init__(self, facts: Mapping[str, Any], own: Mapping[str, Any], folder: Path | None):
        if "partition-id" not in own:
            raise UserError(
                "the node's configuration does not say which client it is; start flower-supernode with "
                "--node-config 'partition-id=0' for client 1, 1 for client 2 and so on"
            )
        self.client, self.own_data = int(own["partition-id"]) + 1, bool(own.get("own-data", False))
        given = str(own["cfg"]) if own.get("cfg") else facts["config"]
        self.config = load_config(given)
        if folder and self.config.torch_device != "cpu":
            self.config = self.config.replace(device=-1)
        self.identity = f"{self.config.fingerprint()}:{facts['run']}"
        place = folder or Path(str(own.get("folder") or home() / "flower")).expanduser()
        self.disk = memory(place, self.identity, self.client)

    @cached_property
    def workplace(self) -> Workplace:
        return _workplace(json.dumps(self.config.to_dict()), self.own_data)

    def obey(self, order: Parcel) -> Parcel:
        """The reply to ``order``, which may be a call: how the client introduces itself."""
        reply = self.introduction() if order.facts.get("kind") == "call" else self.work(order)
        reply.facts["agreed"] = agreed(self.config, self.workplace.proof)
        return reply

    def introduction(self) -> Parcel:
        """Which client this is, what it has in common with the server, and where its copy stands."""
        client, own, tests = self.workplace.of(self.client, self.own_data)
        return Parcel(
            {},
            client=self.client,
            own_data=self.own_data,
            config=self.config.to_dict(),
            revisions=revisions(self.config),
            proof=self.workplace.proof,
            samples=len(own),
            tested=len(tests) if tests is not None else 0,
            standing=list(standing_in(self.disk, self.client, self.identity)),
        )

    def work(self, order: Parcel) -> Parcel:
        """Bring the client's copy up to date, and train or evaluate it.

        The fact ``followed`` of the reply says that the copy was kept as the order has it, also if training failed.
        """
        site, round, purpose = self.workplace.site, order.facts["round"], order.facts["purpose"]
        client, own, tests = self.workplace.of(self.client, self.own_data)
        codec, personal = keys.codec(self.config), PersonalParts(site.personal.untrained)
        self.workplace.start_again()
        copy = OwnCopy(site.method, site.model, self.client, personal, codec, self.identity)
        copy.restore(self.disk)
        before, reply = list(copy.standing), Parcel({}, round=round)
        try:
            copy.catch_up(order)
            try:
                if purpose == "train":
                    update, result = site.fit(client, own, round, site.model, site.prefix)
                    reply = answer(round, update, result.loss, codec)
                    reply.facts["spent"] = site.take_spent()[self.client]
                    copy.keep_personal(round)
                elif purpose == "evaluate" and tests is not None:
                    reply.facts["scores"] = Evaluator(site).score(tests, f"client {self.client} test")
            except Exception as error:
                reply = apology(round, error)
            copy.save(self.disk)
        except (LostCopy, UserError) as error:
            reply = apology(round, error)
            reply.facts["standing"] = before
        else:
            reply.facts |= {"standing": list(copy.standing), "followed": True}
        return reply


class Workplace:
    """Data and model of this process, for whichever client it works."""

    def __init__(self, config: Config, own_data: bool):
        self.site = Site(config, serves=False, undivided=own_data)
        self.proof = proof_of(self.site)
        #: what a run changes in the model, as it was at the start
        self._start = {
            **self.site.method.view(self.site.initial_state),
            **{name: tensor.clone() for name, tensor in self.site.changed_base().items()},
        }

    def start_again(self) -> None:
        """Set the model to where every copy stands at round 0."""
        load_tensors(self.site.model, self._start)

    def of(
        self, client: int, own_data: bool
    ) -> tuple[Client, Examples | ImageExamples, Examples | ImageExamples | None]:
        """A client, its training data, and its share of the test data.

        Raises:
            UserError: there is no such client.
        """
        site, count = self.site, self.site.config.federate.client_num
        if own_data:
            return dataclasses.replace(site.clients[0], id=client), site.data.clients[0], site.data.client_tests[0]
        if not 1 <= client <= count:
            raise UserError(f"partition-id = {client - 1}: expected 0 to {count - 1}; federate.client_num is {count}")
        return site.clients[client - 1], site.data.clients[client - 1], site.data.client_tests[client - 1]


@lru_cache(1)
def _workplace(config: str, own_data: bool) -> Workplace:
    return Workplace(load_config(json.loads(config)), own_data)
