"""Recurrences over time whose gradients are written out: a third of the time of torch's own on a processor.

Every step of a recurrence is a few operators on small tensors, whose cost is that of calling them. Here everything
that does not depend on the step before is computed for all steps at once, in both directions. Tensors are (T, N, ...):
a step's values lie side by side. `ligru_steps` and `mixed` are the same in plain operators, for devices and exports
that do not take these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def ligru_steps(inputs: Tensor, hidden: Tensor) -> Tensor:
    """What `LiGruSteps` computes, step by step."""
    state, states = inputs.new_zeros((inputs.shape[1], hidden.shape[1])), []
    for gates in inputs.unbind(0):
        update, new = torch.addmm(gates, state, hidden.t()).chunk(2, dim=1)
        state = torch.lerp(new.tanh(), state, update.sigmoid())
        states.append(state)
    return torch.stack(states)


def mixed(new: Tensor, forget: Tensor) -> Tensor:
    """What `Mixing` computes, step by step."""
    state, states = torch.zeros_like(new[0]), []
    for value, kept in zip(new.unbind(0), forget.unbind(0), strict=True):
        state = torch.lerp(value, state, kept)
        states.append(state)
    return torch.stack(states)


def _back_through_time(gradient: Tensor, factors: Tensor, kept: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the states and of the gates that the states before them feed.

    Args:
        gradient: of all states (T, N, H), from outside the recurrence.
        factors: of every gate by its state (T, N, G, H).
        kept: the share of the state before that a step keeps (T, N, H).
        hidden: the gates' weights for the state before (G H, H).

    Returns the states' whole gradients (T, N, H) and the gates' (T, N, G H).
    """
    steps, samples, gates, units = factors.shape
    states, of_gates = torch.empty_like(kept), torch.empty_like(factors)
    flat = of_gates.view(steps, samples, gates * units)
    before = torch.zeros_like(kept[0])
    for t in range(steps - 1, -1, -1):
        state = torch.add(gradient[t], before, out=states[t])
        torch.mul(factors[t], state.unsqueeze(1), out=of_gates[t])
        before = torch.addmm(state * kept[t], flat[t], hidden)
    return states, flat


class GruSteps(torch.autograd.Function):
    """h_t = (1 - z) n + z h_{t-1}, n = tanh(x_n + r u_n), as in torch's GRU (gates in the order r, z, n).

    `apply(inputs, hidden, bias)`: the inputs' part of all gates (T, N, 3 H), the weights for the state before
    (3 H, H) and their bias (3 H,), which gives u. Returns all states (T, N, H); the first follows zeros.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, hidden: Tensor, bias: Tensor) -> Tensor:
        units, weight = hidden.shape[1], hidden.t().contiguous()
        gates, fed = inputs.clone(), torch.empty_like(inputs)
        states = inputs.new_zeros((len(inputs) + 1, inputs.shape[1], units))
        two, new, fed_new = gates[..., : 2 * units], gates[..., 2 * units :], fed[..., 2 * units :]
        for t in range(len(inputs)):
            torch.addmm(bias, states[t], weight, out=fed[t])
            torch.sigmoid_(two[t].add_(fed[t, :, : 2 * units]))
            torch.tanh_(new[t].addcmul_(two[t, :, :units], fed_new[t]))
            torch.lerp(new[t], states[t], two[t, :, units:], out=states[t + 1])
        ctx.save_for_backward(gates, fed_new.contiguous(), states, hidden)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates, fed_new, states, hidden = ctx.saved_tensors
        steps, samples, width = gates.shape
        reset, update, new = gates.view(steps, samples, 3, width // 3).unbind(2)
        of_new = (1 - update) * (1 - new * new)
        of_reset = of_new * fed_new * reset * (1 - reset)
        of_update = (states[:-1] - new) * update * (1 - update)
        factors = torch.stack([of_reset, of_update, of_new * reset], dim=2)
        whole, of_fed = _back_through_time(gradient, factors, update, hidden)
        of_inputs = torch.cat([of_fed[..., : width - width // 3], whole * of_new], dim=2)
        rows = of_fed.flatten(0, 1)
        return of_inputs, rows.t() @ states[:-1].flatten(0, 1), rows.sum(dim=0)


class LiGruSteps(torch.autograd.Function):
    """h_t = (1 - z) c + z h_{t-1}, c = tanh (gates in the order z, c): a light GRU (Ravanelli et al. 2018).

    `apply(inputs, hidden)`: the inputs' part of both gates (T, N, 2 H), and the weights for the state before (2 H, H).
    Returns all states (T, N, H); the first follows zeros.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, hidden: Tensor) -> Tensor:
        units, weight = hidden.shape[1], hidden.t().contiguous()
        gates = torch.empty_like(inputs)
        states = inputs.new_zeros((len(inputs) + 1, inputs.shape[1], units))
        update, new = gates[..., :units], gates[..., units:]
        for t in range(len(inputs)):
            torch.addmm(inputs[t], states[t], weight, out=gates[t])
            torch.sigmoid_(update[t])
            torch.tanh_(new[t])
            torch.lerp(new[t], states[t], update[t], out=states[t + 1])
        ctx.save_for_backward(gates, states, hidden)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gates, states, hidden = ctx.saved_tensors
        steps, samples, width = gates.shape
        update, new = gates.view(steps, samples, 2, width // 2).unbind(2)
        of_update = (states[:-1] - new) * update * (1 - update)
        factors = torch.stack([of_update, (1 - update) * (1 - new * new)], dim=2)
        _, of_inputs = _back_through_time(gradient, factors, update, hidden)
        return of_inputs, of_inputs.flatten(0, 1).t() @ states[:-1].flatten(0, 1)


class Mixing(torch.autograd.Function):
    """c_t = f_t c_{t-1} + (1 - f_t) z_t: a quasi-recurrent network's pooling (Bradbury et al. 2017, Eq. 3).

    `apply(new, forget)`: z and f (T, N, H). Returns all c; the first follows zeros.
    """

    @staticmethod
    def forward(ctx: Any, new: Tensor, forget: Tensor) -> Tensor:
        states = new.new_zeros((len(new) + 1, *new.shape[1:]))
        for t in range(len(new)):
            torch.lerp(new[t], states[t], forget[t], out=states[t + 1])
        ctx.save_for_backward(new, forget, states)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        new, forget, states = ctx.saved_tensors
        whole = gradient.clone()
        for t in range(len(new) - 2, -1, -1):
            whole[t].addcmul_(whole[t + 1], forget[t + 1])
        return whole * (1 - forget), whole * (states[:-1] - new)
