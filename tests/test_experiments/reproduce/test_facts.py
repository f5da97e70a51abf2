"""What is counted without training: of a space, a family, a dry run, a whole run; and how a fact is named."""

import pytest

from fedloom.experiments.reproduce import counting
from fedloom.experiments.reproduce.counting import fact
from fedloom.experiments.reproduce.facts import family_facts, space_facts, training_facts, work_facts

FAMILY = ["experiment=superfednas_digits"]
FEDAVG = ["experiment=fedavg_digits", "data.num_clients=4", "method.train.rounds=3", "method.train.clients_per_round=2"]


def test_a_family_is_counted_as_its_space_is() -> None:
    family, space = family_facts(FAMILY), space_facts(FAMILY)
    names = [*family["macs"]]
    assert [family["macs"][names[0]], family["macs"][names[-1]]] == [
        space["macs"]["smallest"],
        space["macs"]["largest"],
    ]
    assert family["parameters"][names[-1]] == space["parameters"]["largest"]
    assert family["bytes"][names[-1]] == space["state_bytes"]


def test_a_dry_run_sends_the_model_to_every_client_of_every_round() -> None:
    facts = training_facts(FEDAVG)
    (kind,) = facts["rounds"]
    assert (facts["rounds"][kind], facts["clients"][kind]) == (3, 6)
    assert facts["bytes"][kind] == facts["bytes_down"][kind] + facts["bytes_up"][kind]
    assert facts["bytes_per_client"][kind] == facts["bytes"][kind] / 6
    # Float32 parameters, and the few buffers of normalisation layers.
    size = 4 * space_facts(FEDAVG)["parameters"]["largest"]
    assert size <= facts["bytes_down"][kind] / 6 <= 1.1 * size


def test_the_work_of_a_whole_run_has_its_dry_runs_macs_times_three() -> None:
    changes = ["experiment=fedoras_digits", "method.train.rounds=2", "tiers.count=1", "tiers.paths=200"]
    work, dry = work_facts(changes), training_facts(changes)
    assert work["by_kind"]["supernet"] == 3 * dry["macs"]["supernet"]
    assert {*work["by_kind"]} == {"supernet", "slices", "search", "fine_tuned", "rand_init", "evaluation"}
    assert work["macs"] == pytest.approx(sum(work["by_kind"].values()))


def test_a_transfer_is_counted_between_its_smallest_and_its_largest_network() -> None:
    """Without the run from which it starts, and though the largest network is beyond its tier."""
    train = ["method.train.clients_per_round=2", "method.train.batch_size=16"]
    start = ["experiment=fedavg_digits", "method=transfer", "method.start_from=nowhere", "method.tier=1", *train]
    work = work_facts([*start, "method.head.rounds=1", "method.train.rounds=2"])
    alone = [
        work_facts(["experiment=fedavg_digits", f"method.architecture={end}", "method.train.rounds=3", *train])
        for end in ("smallest", "largest")
    ]
    assert work["by_kind"]["fedavg"] == pytest.approx(sum(one["by_kind"]["fedavg"] for one in alone) / 2)


def test_images_that_are_not_there_are_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs are those of real images: of random ones, as many."""
    monkeypatch.setitem(counting.SIZES, "cifar10", (400, 100, 10))
    small = ["experiment=superfednas_cifar10_small", "method.train.rounds=2", "data.train_samples=null"]
    small += ["data.test_samples=null"]
    real = [*small, "data.dataset=synthetic", "data.train_samples=400", "data.test_samples=100"]
    assert training_facts(small) == training_facts(real)


def test_a_fact_is_named_by_its_way() -> None:
    facts = {"a": {"b": [1, 2], "c": {"x": 3}}, "d": 4}
    assert fact(facts, "a.b") == {"tier1": 1.0, "tier2": 2.0}
    assert fact(facts, "a.c") == {"x": 3.0}
    assert fact(facts, "d") == {"": 4.0}
    with pytest.raises(ValueError, match=r"there is no fact 'a\.e': at 'e' there are b, c"):
        fact(facts, "a.e")
    with pytest.raises(ValueError, match=r"the fact 'a' is neither a number nor numbers by place: name one of its par"):
        fact(facts, "a")
    with pytest.raises(ValueError, match=r"the fact 'e' is neither a number nor numbers by place$"):
        fact({"e": "macs"}, "e")
