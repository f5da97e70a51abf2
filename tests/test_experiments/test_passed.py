"""What is passed from Python as it is: the same runs as by name, in other processes too, or one line."""

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import fedloom as fl
from fedloom.experiments.passed import called, check_current, names_in
from fedloom.platform.data.arrays import Arrays, read_npz
from fedloom.platform.runs.source_code import sources_of
from fedloom.platform.spaces.as_is import STRUCTURE, packed, stored

TINY: dict[str, Any] = {
    "data": {"num_clients": 4, "train_samples": 160, "test_samples": 40},
    "method": {"train": {"rounds": 1, "clients_per_round": 2, "epochs": 1, "batch_size": 16, "evaluate_every": 0}},
    "executor.kind": "serial",
    "quiet": True,
}

CODE = """
from dataclasses import dataclass

import torch
from fedloom.platform.clients.objectives import Objective
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.hidden, self.out, self.act = nn.Linear(64, hidden), nn.Linear(hidden, 10), F.gelu

    def forward(self, x):
        return self.out(self.act(self.hidden(x.flatten(1))))


class Stripes(torch.utils.data.Dataset):
    def __init__(self, samples, shift=0.0):
        self.samples, self.shift = samples, shift

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        return torch.arange(64.0).view(1, 8, 8) * (i % 10) + self.shift, i % 10


class Scaled(Objective):
    def __init__(self, *, factor: float = 1.0, power: float = 1.0):
        self.factor = factor

    def loss(self, outputs, targets):
        return self.factor * super().loss(outputs, targets)


@dataclass
class Doubled:
    factor: float = 1.0


def prox(client, *, mu: float = 0.01):
    received = client.received

    def correct(name, parameter, gradient):
        gradient.add_(parameter - received[name], alpha=mu)

    return correct


STEADY = Doubled(3.0)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of one's own in a file."""
    (tmp_path / "my_own.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_own", raising=False)
    return importlib.import_module("my_own")


def names(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    with names_in({**changes, "results": tmp_path}) as found:
        return {key: value for key, value in found.values.items() if key != "results"}


def test_code_is_called_by_its_import_path(own: Any, tmp_path: Path) -> None:
    assert names(
        tmp_path,
        method={"train": {"local_rule": functools.partial(own.prox, mu=0.5), "selection": "random", "lr": 0.1}},
        tiers={"budget": {"kind": own.STEADY}},
        objective={"name": own.Scaled, "options": {"factor": 2.0}},
        space=own.Net,
        data={"dataset": own.Stripes},
    ) == {
        "method.train.local_rule": "my_own:prox",
        "method.train.options.mu": 0.5,
        "method.train.selection": "random",
        "method.train.lr": 0.1,
        "tiers.budget.kind": "my_own:STEADY",
        "objective.name": "my_own:Scaled",
        "objective.options.factor": 2.0,
        "space.name": "module",
        "space.build": "my_own:Net",
        "data.dataset": "my_own:Stripes",
    }
    rules = {"distribution": {"heuristic": functools.partial(own.prox, mu=1)}, "processors": [own.Scaled, "clip"]}
    assert names(tmp_path, method={"train": rules}, space={"name": own.prox}) == {
        "method.train.distribution.heuristic": "my_own:prox",
        "method.train.options.mu": 1,
        "method.train.processors": ["my_own:Scaled", "clip"],
        "space.name": "my_own:prox",
    }
    module = {"space.name": "module", "space.build": "my_own:Net"}
    assert names(tmp_path, space={"name": own.Net}) == names(tmp_path, space={"build": own.Net}) == module
    assert names(tmp_path, space=functools.partial(own.Net, width=3)) == {**module, "space.options.width": 3}
    assert names(tmp_path, data=own.Stripes) == {"data.dataset": "my_own:Stripes"}
    with pytest.raises(ValueError, match=r"^space=my_own:prox: give space={'build': ...} for a network, or {'name': "):
        names(tmp_path, space=functools.partial(own.prox, mu=1))
    lora = {"space.name": "lora", "space.build": "my_own:prox"}
    assert names(tmp_path, space={"name": "lora", "build": own.prox}) == lora


def test_objects_that_set_an_option_to_different_values_are_refused(own: Any, tmp_path: Path) -> None:
    one, other = functools.partial(own.prox, mu=0.5), functools.partial(own.prox, mu=2.0)
    assert (called(one), called(other)) == ("prox mu=0.5", "prox mu=2.0"), "as an ablation labels them"
    equal = names(tmp_path, method={"train": {"local_rule": one, "selection": one}})
    assert equal["method.train.options.mu"] == 0.5
    shared: list[dict[str, Any]] = [
        {"local_rule": one, "selection": other},
        {"processors": [one, other]},
        {"local_rule": one, "options": {"mu": 2.0}},
    ]
    for rules in shared:
        with pytest.raises(ValueError, match=r"^method.train.options.mu: 0.5 and 2.0 are given for it: all that takes"):
            names(tmp_path, method={"train": rules})


def test_a_method_with_its_keys_is_one_dictionary_as_in_the_configuration_of_a_run(own: Any, tmp_path: Path) -> None:
    method = {"name": own.STEADY, "train": {"rounds": 3}}
    assert names(tmp_path, method=method) == {"method": "my_own:STEADY", "method.train.rounds": 3}


def test_an_object_is_its_class_and_its_options_or_refused(own: Any, tmp_path: Path) -> None:
    scaled = type("Whole", (own.Scaled,), {"__module__": "my_own", "__init__": _with_factor})
    own.Whole = scaled
    assert names(tmp_path, objective={"name": scaled(factor=2.5)}) == {
        "objective.name": "my_own:Whole",
        "objective.options.factor": 2.5,
    }
    with pytest.raises(
        ValueError, match=r"^objective.name=.*: Scaled and its options cannot rebuild this .* objective.opt"
    ):
        names(tmp_path, objective={"name": _touched(own.Scaled(factor=2.0))})


def _with_factor(self: Any, *, factor: float = 1.0) -> None:
    self.factor = factor


def _touched(value: Any) -> Any:
    value.more = 1
    return value


def local() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (
            lambda _client: None,
            r"rule is a lambda, .*: write a function into a file .*%%writefile my_code.py.* import it$",
        ),
        (
            local(),
            r"rule: local.<locals>.inner is defined in a function, where no other process can import it: write it",
        ),
        (functools.partial(F.relu, torch.ones(1)), r"rule: give partial\(relu, ...\) its options by keyword, as plain"),
    ],
    ids=["lambda", "local", "partial"],
)
def test_what_no_other_process_could_import_is_refused(code: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=line) as raised:
        fl.run("fedavg_digits", **TINY, **{"method.train.local_rule": code}, results=tmp_path / "results")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "results").exists()


def test_code_of_main_and_of_a_reloaded_module_is_refused(own: Any, tmp_path: Path) -> None:
    prox = own.prox
    prox.__module__ = "__main__"
    with pytest.raises(ValueError, match=r"rule: prox is defined in (the program itself|a notebook's cell), where no"):
        names(tmp_path, method={"train": {"local_rule": prox}})
    prox.__module__ = "my_own"
    importlib.reload(own)
    with pytest.raises(ValueError, match=r"rule: my_own:prox is no longer this prox, as after importlib.reload"):
        names(tmp_path, method={"train": {"local_rule": prox}})


def test_a_file_that_has_changed_since_its_import_is_noticed(own: Any, tmp_path: Path) -> None:
    check_current(sources_of(["my_own"]))
    (tmp_path / "my_own.py").write_text(CODE.replace("return correct", "return None"))
    with pytest.raises(
        ValueError, match=r"my_own.py has changed since it was imported here: importlib.reload\(my_own\)"
    ):
        fl.run("fedavg_digits", **TINY, **{"method.train.local_rule": own.prox}, results=tmp_path / "results")
    importlib.reload(own)
    check_current(sources_of(["my_own"]))


def test_a_network_is_the_same_in_another_process(own: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    networks: list[nn.Module] = [
        own.Net(),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(72, 10)),
        nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 8, activation=F.gelu), nn.Flatten()),
    ]
    for network in networks:
        next(network.parameters()).requires_grad_(False)
        content, code = packed(network)
        assert code == ["my_own:Net"] * isinstance(network, own.Net)
        assert packed(network)[0] == content
        (tmp_path / "net.safetensors").write_bytes(content)
        again = stored(path=str(tmp_path / "net.safetensors"), code=code)
        assert repr(again) == repr(network)
        assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in network.parameters()]
        x = torch.rand(3, 1, 8, 8)
        torch.manual_seed(1)
        y = network(x)
        torch.manual_seed(1)
        assert torch.equal(again(x), y)


def test_tied_weights_stay_tied_and_what_cannot_be_written_down_is_named(own: Any, tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    (tmp_path / "tied").write_bytes(packed(tied)[0])
    again: Any = stored(path=str(tmp_path / "tied"))
    assert again[1].weight is again[0].weight
    refused: list[tuple[Any, str]] = [
        (_touched_by(own.Net(), "log", sys.stderr), r"its log is TextIOWrapper|its log is EncodedFile"),
        (_touched_by(own.Net(), "act", lambda x: x), r"its act is .*<lambda>, which no other process can import"),
        (_touched_by(own.Net(), "blocks", [nn.Linear(1, 1)]), r"its blocks.0 is no registered module"),
        (nn.Sequential(nn.LazyLinear(3)), r"its 0.weight has no shape yet"),
    ]
    for network, line in refused:
        with pytest.raises(
            ValueError, match=rf"^space.build: this \w+ cannot be passed as it is: ({line}).*; pass its cl"
        ):
            names(tmp_path, space={"build": network})
    with pytest.raises(
        ValueError, match=r"^method.train.local_rule takes no network: give the function that builds it"
    ):
        names(tmp_path, method={"train": {"local_rule": own.Net()}})
    assert not (tmp_path / "passed").exists()


def _touched_by(network: nn.Module, name: str, value: Any) -> nn.Module:
    setattr(network, name, value)
    return network


def test_a_file_chooses_no_code(own: Any, tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    for structure, line in [
        ({"": ["my_own:Net", {}]}, "names my_own:Net, which is not in space.options.code"),
        ({"": ["os:system", {}]}, "names os:system, which is not"),
        ({"": ["torch.nn.functional:relu", {}]}, "torch.nn.functional:relu is not a subclass of torch.nn.Module"),
        ({"": ["torch.nn.modules.linear:Linear", {"run": "echo"}]}, "no network can be read from it"),
        ({}, "no network can be read from it"),
    ]:
        content = {"modules": structure, "requires_grad": {}}
        file.write_bytes(save({"x": torch.zeros(1)}, {STRUCTURE: json.dumps(content)}))
        with pytest.raises(ValueError, match=line):
            stored(path=str(file))
    with safe_open(file, "pt") as opened:
        assert STRUCTURE in opened.metadata()


def test_a_run_with_a_network_and_data_as_they_are_is_resumed_by_the_command(own: Any, tmp_path: Path) -> None:
    results, data = tmp_path / "results", {**TINY["data"], "dataset": (own.Stripes(160), own.Stripes(40))}
    network = own.Net(4)
    stopped: list[int] = []

    def stop(_round: Any) -> None:
        stopped.append(1)
        raise ZeroDivisionError

    changes = {**TINY, "data": data, "space": {"build": network}, "results": results}
    with pytest.raises(ZeroDivisionError):
        fl.run("fedavg_digits", **changes, **{"method.train.rounds": 2}, on_round=stop)
    (run,) = fl.load(results)
    assert {path.name for path in (results / "artifacts" / run.id / "plugins").iterdir()} == {"my_own.py"}
    command = [sys.executable, "-m", "fedloom.experiments", "resume", run.id, "--results", str(results)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert run.status == "done"
    whole = fl.run("fedavg_digits", **changes, **{"method.train.rounds": 2})
    assert whole.evaluations["value"].equals(run.evaluations["value"])
    assert len([*(results / "passed").iterdir()]) == 2, "the same network and data are written once"
    assert type(whole.model()).__name__ == "Net"


def test_a_refused_run_leaves_no_files(own: Any, tmp_path: Path) -> None:
    data = {"dataset": TensorDataset(torch.rand(30, 8, 8), torch.arange(30) % 3), "num_clients": 4}
    with pytest.raises(ValueError, match=r"gives \(4, 10\) for labels \(4,\) of 3 classes"):
        fl.run("fedavg_digits", **{**TINY, "data": data}, space=own.Net(), results=tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_data_sets_become_arrays(own: Any, tmp_path: Path) -> None:
    class Several(Dataset[Any]):
        classes = ("no", "yes")

        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> Any:
            if i >= 6:
                raise IndexError
            return {"a": np.full(2, i, np.int64), "b": [0.5]}, i % 2, f"client {i // 3}"

    ((_, path),) = [item for item in names(tmp_path, data={"dataset": Several()}).items() if item[0] != "data.dataset"]
    read = read_npz(Path(path))
    x, y, clients = read.train
    assert {name: array.tolist() for name, array in x.items()} == {
        "a": [[i, i] for i in range(6)],
        "b": [[0.5]] * 6,
    }
    assert (y.tolist(), clients.tolist()[::3]) == ([0, 1] * 3, ["client 0", "client 1"])
    assert (read.test, read.class_names) == (None, ["no", "yes"])
    arrays = Arrays(train=(np.zeros((4, 3)), [0, 1, 0, 1]), test=(np.ones((1, 3)), [0]), class_names=["p", "q"])
    first = names(tmp_path, data=arrays)["data.options.path"]
    again = read_npz(Path(first))
    assert again.test is not None
    assert (again.train[0].shape, again.test[0].tolist(), again.class_names) == ((4, 3), [[1.0] * 3], ["p", "q"])
    assert names(tmp_path, data=own.Stripes(9)) == names(tmp_path, data={"dataset": own.Stripes(9)})
    assert names(tmp_path, data=own.Stripes(9)) != names(tmp_path, data=own.Stripes(9, shift=1e-6))


@pytest.mark.parametrize(
    ("samples", "line"),
    [
        ([], "has no samples$"),
        ([torch.zeros(3)], r"\[0\] is Tensor: give \(x, y\), or \(x, y, client\)$"),
        (
            [(torch.zeros(3), 0), (torch.zeros(4), 1)],
            r"the inputs are of 2 shapes, such as \(3,\) and \(4,\): give num",
        ),
        ([(object(), 0)], "the inputs are no arrays: give numbers of one shape$"),
    ],
    ids=["empty", "no pair", "shapes", "objects"],
)
def test_a_data_set_that_is_none_is_refused(samples: list[Any], line: str, tmp_path: Path) -> None:
    class Listed(Dataset[Any]):
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, i: int) -> Any:
            return samples[i]

    with pytest.raises(ValueError, match=rf"^data.dataset: Listed:? ?{line}"):
        names(tmp_path, data={"dataset": Listed()})
    with pytest.raises(ValueError, match=r"are no data set: give TensorDataset.*, or Arrays\(\(x, y\)\) of fedloom"):
        names(tmp_path, data=(np.zeros((2, 3)), np.zeros(2)))
    assert not (tmp_path / "passed").exists()
