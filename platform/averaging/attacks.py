"""Attackers: clients that train on false labels, or send something other than what they trained.

`attack.share` of the clients are attackers (`World.attackers`). An attack defines what they do, in one or more of three
methods, which do not handle slices, chunks or messages:

    client   labels       the labels of an attacker's training samples
             change       the change that it sends, given the one that it trained
    server   colluding    the change that all attackers of a round send, given the ones that they trained

Colluders see only each other's changes. Because they may be trained in different processes, the server replaces their
updates once all updates of the round have arrived, before anything else reads them.

    Label flip         Tolpegin, Truex, Gursoy, Liu: Data Poisoning Attacks Against Federated Learning Systems. ESORICS
                       2020; every class y of C becomes C - 1 - y (Fang, Cao, Jia, Gong 2020)
    Sign flip          Li, Xu, Chen, Giannakis, Ling: RSA. AAAI 2019: the change times a negative number
    Gaussian           Blanchard et al. 2017: normal noise instead of a change
    ALIE               Baruch, Baruch, Goldberg: A Little Is Enough. NeurIPS 2019, Algorithm 3:
                           s = floor(n / 2 + 1) - m                               supporters needed
                           z = max{z: phi(z) < (n - m - s) / (n - m)}             n clients, m of them attackers
                           all attackers send mu_j + z sigma_j of every coordinate j
    Inner product      Xie, Koyejo, Gupta: Fall of Empires. UAI 2020: all attackers send -epsilon mu

ALIE's authors send mu - z sigma, the mirror image, with z an option (1.5); ByzantineMomentum lets attackers see the
honest clients' changes, and divides sigma's sum by n - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from torch import Tensor

from fedloom.platform.averaging.processors import Message, Processor, ServerContext
from fedloom.platform.averaging.server import of_shape
from fedloom.platform.data.trees import single
from fedloom.platform.plugins import PluginError, Registry, Shipped, blaming, is_import_path
from fedloom.platform.seeding import torch_stream
from fedloom.platform.settings import POSITIVE, ZERO_OR_MORE
from fedloom.platform.spaces.slices import Region, cells, inside, part_in, part_of, whole_region

if TYPE_CHECKING:
    from fedloom.platform.averaging.average import Update
    from fedloom.platform.data.trees import Tree
    from fedloom.platform.plugins import ComponentSpec


class Collusion(NamedTuple):
    """A region of a parameter: the changes that N attackers trained, and the round's numbers of clients and attackers.

    `changes_n` is of shape (N, *region), without the attackers that do not hold the region.
    """

    changes_n: Tensor
    clients: int
    attackers: int


class Attack:
    """Base class of attacks, whose attackers behave honestly; override the methods that attack.

    Attacks are frozen dataclasses, because they are sent to the clients. Keyword parameters of the constructor are
    options (`attack.options.NAME`).
    """

    @property
    def colludes(self) -> bool:
        """Whether attackers see each other's changes."""
        return type(self).colluding is not Attack.colluding

    def labels(self, labels: Tensor, num_classes: int) -> Tensor:  # noqa: ARG002
        """The labels on which an attacker trains."""
        return labels

    def change(self, change: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """The change of a parameter that an attacker sends."""
        return change

    def colluding(self, about: Collusion) -> Tensor | None:  # noqa: ARG002
        """The change of a region that all attackers send; overriding it makes them collude."""
        return None


@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Trains on labels in reverse order: the first class becomes the last one."""

    def labels(self, labels: Tensor, num_classes: int) -> Tensor:
        return torch.where(labels >= 0, num_classes - 1 - labels, labels)  # below 0: no label


@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Sends the negated change, or a multiple of it."""

    scale: Annotated[float, POSITIVE, "the factor that scales the negated change"] = 1.0

    def change(self, change: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        return -self.scale * change


@dataclass(frozen=True, kw_only=True)
class Gaussian(Attack):
    """Sends normal noise instead of a change."""

    deviation: Annotated[float, POSITIVE, "gaussian: the standard deviation of the noise sent"] = 1.0

    def change(self, change: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(change.shape, generator=generator) * self.deviation  # on CPUs, for equal bits on any device
        return noise.to(change)


@dataclass(frozen=True, kw_only=True)
class Alie(Attack):
    """All attackers send their mean change, shifted by as many standard deviations as still look honest."""

    z: Annotated[float | None, ZERO_OR_MORE, "alie: standard deviations from the mean; null: the paper's formula"] = (
        None
    )

    def colluding(self, about: Collusion) -> Tensor:
        z = largest_deviation(about.clients, about.attackers) if self.z is None else self.z
        return about.changes_n.mean(dim=0) + z * about.changes_n.std(dim=0, correction=0)


@dataclass(frozen=True, kw_only=True)
class InnerProduct(Attack):
    """All attackers send their negated mean change, scaled by `epsilon`."""

    epsilon: Annotated[float, POSITIVE, "inner_product: the factor that scales the negated mean"] = 0.5

    def colluding(self, about: Collusion) -> Tensor:
        return -self.epsilon * about.changes_n.mean(dim=0)


def largest_deviation(clients: int, attackers: int) -> float:
    """ALIE's z; 0 where the attackers are a majority, or no benign client is left to support them."""
    benign = clients - attackers
    supporters = clients // 2 + 1 - attackers
    share = (benign - supporters) / benign if benign else 0.0
    return NormalDist().inv_cdf(share) if 0 < share < 1 else 0.0


ATTACKS: Registry[Attack] = Registry(
    "attack",
    Shipped(
        {
            "label_flip": LabelFlip,
            "sign_flip": SignFlip,
            "gaussian": Gaussian,
            "alie": Alie,
            "inner_product": InnerProduct,
        }
    ),
    (),
    made=True,
)


def attack(choice: ComponentSpec) -> Attack:
    """The chosen attack; raises PluginError if it is not an `Attack`, or if a user's own fails on small tensors."""
    made: object = ATTACKS.make(choice)
    if not isinstance(made, Attack):
        raise PluginError(f"attack {choice.name!r} is no Attack: derive the class from {__name__}.Attack")
    if is_import_path(choice.name):
        with blaming(ATTACKS.kind, choice.name):
            _labels(made, torch.tensor([0, 1, 1]), 2)
            _change(made, torch.ones(2, 3), torch_stream(0, "trial"))
            if made.colludes:
                _colluding(made, Collusion(torch.ones(2, 3), 6, 2))
    return made


def _labels(attack: Attack, labels: Tensor, num_classes: int) -> Tensor:
    return _like(labels, attack, attack.labels(labels, num_classes))


def _change(attack: Attack, change: Tensor, generator: torch.Generator) -> Tensor:
    return _like(change, attack, attack.change(change, generator))


def _colluding(attack: Attack, about: Collusion) -> Tensor:
    return _like(about.changes_n[0], attack, attack.colluding(about))


def _like(before: Tensor, attack: Attack, after: object) -> Tensor:
    """What an attack made of a tensor; PluginError for anything but a tensor of the same shape."""
    name = f"{type(attack).__module__}:{type(attack).__name__}"
    return of_shape(after, before, f"attack {name!r} gives", "a tensor", "one")


# -- as a processor ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attackers(Processor):
    """The attackers of a round, and what they do to their labels, changes and each other's updates.

    Only trained parameters are attacked: a false statistic of batch norm, such as a negative variance, would break any
    network at once.
    """

    attack: Attack
    client_ids: frozenset[int]
    needs_updates: bool = False
    seed: int = 0
    places: tuple[str, int] = ("", 0)
    """Stage and round; with the client's id, they derive its random stream."""

    def begun(self, context: ServerContext) -> Attackers:
        """Keeps only the attackers of the cohort, because there may be many among all clients."""
        return replace(
            self,
            client_ids=self.client_ids.intersection(context.cohort),
            seed=context.seed,
            places=(context.stage, context.round),
        )

    def on_labels(self, client_id: int, labels: Tree, num_classes: int) -> Tree:
        if client_id not in self.client_ids or type(self.attack).labels is Attack.labels:
            return labels
        return _labels(self.attack, single(labels, "an attack on labels"), num_classes)

    @torch.no_grad()
    def on_client(self, message: Message) -> Message:
        """Changes the attacker's parameters, in place."""
        if message.client_id in self.client_ids and type(self.attack).change is not Attack.change:
            generator = torch_stream(self.seed, "attackers", *self.places, message.client_id)
            for name in message.parameters:
                trained, received = message.update.tensors[name], message.received[name]
                trained.copy_(received + _change(self.attack, trained - received, generator))
        return message

    @torch.no_grad()
    def on_updates(self, updates: Mapping[int, Update], context: ServerContext) -> Mapping[int, Update]:
        """The round's updates with those of the colluders replaced."""
        attackers = {client: update for client, update in updates.items() if client in self.client_ids}
        if not self.needs_updates or not attackers:
            return updates
        pieces: dict[str, list[tuple[Region, Tensor]]] = {}
        for update in attackers.values():
            for name, region, tensor in _parameters(update, context):
                pieces.setdefault(update.slices[name].source, []).append((region, tensor))
        sent = {
            source: self._sent(context.old[source], of, len(updates), len(attackers)) for source, of in pieces.items()
        }
        forged = dict(updates)
        for client, update in attackers.items():
            tensors = {n: part_of(sent[update.slices[n].source], r).clone() for n, r, _ in _parameters(update, context)}
            forged[client] = replace(update, tensors={**update.tensors, **tensors})
        return forged

    def _sent(self, old: Tensor, pieces: Sequence[tuple[Region, Tensor]], clients: int, attackers: int) -> Tensor:
        """The values of a shared tensor of which each attacker sends the parts that it holds."""
        values = old.clone()
        for region in cells([region for region, _ in pieces]):
            held = [part_in(tensor, box, region) for box, tensor in pieces if inside(region, box)]
            if held:
                before = part_of(old, region)
                change = _colluding(self.attack, Collusion(torch.stack(held) - before, clients, attackers))
                part_of(values, region).copy_(before + change)
        return values


def _parameters(update: Update, context: ServerContext) -> Iterator[tuple[str, Region, Tensor]]:
    """The trained parameters of an update, and their regions of the shared tensors."""
    for name, tensor in update.tensors.items():
        piece = update.slices[name]
        if piece.source in context.parameters and update.weights[name]:
            yield name, whole_region(tensor) if piece.region is None else piece.region, tensor
