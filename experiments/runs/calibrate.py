"""`fedloom calibrate`: the MACs per second of a simulated device, from the measured training of a real one."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fedloom.experiments.runs.configuration import compose_config
from fedloom.platform.averaging.average import WeightedSums
from fedloom.platform.clients.assignments import Assignment, ClientResult
from fedloom.platform.clients.execution import SharedWeights, run_assignment
from fedloom.platform.clients.networks import Subnet
from fedloom.platform.clients.trainer import Train
from fedloom.platform.clients.training import LocalSGD
from fedloom.platform.clients.worker import Worker
from fedloom.platform.federation.config import RunConfig
from fedloom.platform.federation.world import World, build_world
from fedloom.platform.seeding import torch_stream
from fedloom.platform.spaces.base import SearchSpace
from fedloom.platform.spaces.registry import build_space
from fedloom.platform.spaces.slices import Architecture
from fedloom.tiers.calibration import macs_per_s_of
from fedloom.tiers.device_files import read_measured_training, write_device_table
from fedloom.tiers.devices import DeviceProfile

LEAST_S, LEAST_RUNS = 2.0, 3
"""Minimum seconds and number of a client's timed trainings; one more before them is a warm-up."""


def calibrate(
    overrides: Sequence[str],
    *,
    architecture: str = "largest",
    samples: int | None = None,
    epochs: int = 1,
    seconds: float | None = None,
    measured: Path | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """The MACs per second of a device, or of each device in the file `measured`, written as a device table to `out`.

    Without `seconds` and `measured` a client's training is timed on this machine's CPU. Raises ValueError for an
    architecture that the space does not have, a damaged file, and options that do not belong together.
    """
    if (samples is None) != (seconds is None) or (epochs != 1 and seconds is None):
        raise ValueError("--seconds, --samples and --epochs describe a measured training: give --seconds and --samples")
    if out is not None and measured is None:
        raise ValueError("--out writes a table of devices: give what was measured on them with --measured")
    config = compose_config(overrides)
    if seconds is None and measured is None:
        return _timed_here(config, architecture)
    space = build_space(config.space)
    chosen = _parsed(space, architecture)
    macs = space.cost_table("macs").cost(chosen)
    facts = {"space": config.space.name, "architecture": space.label(chosen), "macs": int(macs)}
    if measured is None:
        assert samples is not None
        assert seconds is not None
        facts |= {"samples": samples, "epochs": epochs, "seconds": seconds}
        return {**facts, **_rate(macs_per_s_of(macs * samples * epochs, seconds))}
    devices = config.devices
    link = DeviceProfile("", 1.0, devices.down_bytes_per_s, devices.up_bytes_per_s)
    table = read_measured_training(measured).devices(macs, link)
    rates = {
        name: float(f(table.macs_per_s)) for name, f in (("least", np.min), ("median", np.median), ("most", np.max))
    }
    facts |= {"devices": len(table), "macs_per_s": rates}
    if out is not None:
        write_device_table(out, table)
        facts |= {"written": str(out), "keys": f"tiers.device_table={out}"}
    return facts


def _rate(macs_per_s: float) -> dict[str, Any]:
    return {"macs_per_s": macs_per_s, "keys": f"devices.macs_per_s=[{macs_per_s:.6g}]"}


def _parsed(space: SearchSpace, architecture: str) -> Architecture:
    try:
        return space.parse(architecture)
    except ValueError as error:
        raise ValueError(f"--architecture {error}") from error


def _timed_here(config: RunConfig, architecture: str) -> dict[str, Any]:
    """Times the training of the client with the most samples, one pass over its data per run."""
    world = build_world(config)
    chosen, worker = _parsed(world.space, architecture), Worker(world.spec)
    client_id = int(np.argmax(world.data.sizes("train")))
    results, began = [_trained(world, worker, chosen, client_id)], time.monotonic()
    while len(results) <= LEAST_RUNS or time.monotonic() - began < LEAST_S:
        results.append(_trained(world, worker, chosen, client_id))
    seconds = median(float(r.wall_s or 0.0) for r in results[1:])
    return {
        "space": config.space.name,
        "architecture": world.space.label(chosen),
        "macs": int(world.macs_table.cost(chosen)),
        "samples": results[0].samples,
        "batch_size": config.tiers.step_batch_size,
        "seconds": seconds,
        "repeats": len(results) - 1,
        "device": f"{worker.device}, {world.spec.threads} thread{'s' * (world.spec.threads != 1)}",
        **_rate(macs_per_s_of(results[0].macs, seconds)),
    }


def _trained(world: World, worker: Worker, architecture: Architecture, client_id: int) -> ClientResult:
    weights = world.space.initial_subnet_weights(architecture, torch_stream(0, "calibration"))
    local = LocalSGD(epochs=1, batch_size=world.config.tiers.step_batch_size, lr=0.01)
    task = Train(Subnet(architecture, stand_alone=True), local)
    assignment = Assignment("calibration", 0, client_id, world.tier(client_id).name, task)
    result = run_assignment(worker, assignment, SharedWeights(weights, "calibration@0"), WeightedSums())
    if result.status != "ok":
        raise ValueError(f"the training that is to be timed fails: {result.error}")
    return result
