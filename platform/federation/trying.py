"""Tests of a user's own rules on tiny inputs before a run starts, to report errors early."""

import torch

from fedloom.platform.averaging.average import Update, WeightedSums
from fedloom.platform.averaging.server import SERVER_RULES, ServerRound, serve
from fedloom.platform.averaging.weighting import Work, weighting_rule
from fedloom.platform.clients.local_rules import LocalClient, LocalRule, local_rule, place_of
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.federation.selection import check_selection
from fedloom.platform.plugins import ComponentSpec, PluginError, is_import_path
from fedloom.platform.spaces.slices import Slice

PARAMETER, BUFFER = "layer.weight", "layer.running_mean"
TRIED_SAMPLES = (4, 1000)


def try_rules(
    selection: ComponentSpec, local: ComponentSpec, weighting: ComponentSpec, server: ComponentSpec, cohort: int | None
) -> None:
    """Raises a one-line PluginError that names the rule if one of the user's own rules fails.

    `cohort` is the number of clients per round, None for all clients.
    """
    if is_import_path(selection.name):
        check_selection(selection, cohort)
    if is_import_path(weighting.name):
        _try_weighting(weighting)
    if is_import_path(server.name):
        _try_server(server)
    if is_import_path(local.name):
        _try_local(local)


def _try_weighting(weighting: ComponentSpec) -> None:
    """Asks for the weights of a client with few samples and of one with many, of which one must count."""
    rule = weighting_rule(weighting)
    works = [Work(n, 2 * n, {PARAMETER: 2 * n, BUFFER: n}) for n in TRIED_SAMPLES]
    if not any(rule(work)[tensor] for work in works for tensor in work.seen_by_tensor):
        few, many = TRIED_SAMPLES
        raise PluginError(
            f"weighting rule {weighting.name!r} weighs all tensors 0, of a client with {few} samples and of one with "
            f"{many}: nothing would be trained; give what is trained a weight above 0"
        )


def _try_server(server: ComponentSpec) -> None:
    rule = SERVER_RULES.make(server)
    old, kept = {PARAMETER: torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, dict[str, torch.Tensor]()
    for round_ in range(2):
        sums = WeightedSums()
        first_row = {PARAMETER: Slice(PARAMETER, ((0, 1), (0, 2)))}
        sums.add(Update({PARAMETER: torch.ones(1, 2)}, first_row, {PARAMETER: 1.0}))
        new, kept = serve({PARAMETER: (server.name, rule)}, old, sums.finish(old), kept, ServerRound(round_, 1, 2))
        old = {PARAMETER: new[PARAMETER]}


def _try_local(local: ComponentSpec) -> None:
    """Runs two rounds of one client's step and the server's merge."""
    rule, state = local_rule(local), dict[str, torch.Tensor]()
    weights = {PARAMETER: torch.tensor([1.0, 2.0])} | {
        place_of(slot, PARAMETER): torch.zeros(2) for slot in rule.shared
    }
    for round_ in range(2):
        parameter = weights[PARAMETER].clone().requires_grad_()
        slices = {PARAMETER: Slice(PARAMETER)}
        sgd = LocalSGD(1, 2, 0.1)
        client = LocalClient(0, round_, 2, 1, sgd, {PARAMETER: parameter}, slices, weights, state)
        correct = rule.begin(client)
        (parameter.square().sum() / 2).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if correct is not None:
                assert parameter.grad is not None, "the loss reached it"
                correct(PARAMETER, parameter, parameter.grad)
            rule.end(client)
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            raise PluginError(f"local rule {local.name!r} makes a gradient that is not finite")
        weights = {**weights, **_merged(rule, local.name, weights, client, round_)}
        state = client.state


def _merged(
    rule: LocalRule, name: str, weights: dict[str, torch.Tensor], client: LocalClient, round_: int
) -> dict[str, torch.Tensor]:
    sums = WeightedSums()
    sums.add(Update(client.sent, client.sent_slices, dict.fromkeys(client.sent, 1.0)))
    rules = dict.fromkeys(client.sent, (name, rule.merge))
    new, _ = serve(rules, weights, sums.finish(weights), {}, ServerRound(round_, 1, 2))
    return new
