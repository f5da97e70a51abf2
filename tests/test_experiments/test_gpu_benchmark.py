"""The GPU benchmark: what it says without a GPU, what it measures, and how it reads nvidia-smi."""

import pytest
import torch

from fedloom.experiments.benchmarks import gpu
from fedloom.experiments.benchmarks.gpu import Utilisation, sample_of, summed_up
from fedloom.experiments.runs.configuration import compose_config


def test_without_a_gpu_it_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert "torch sees no GPU" in err


def test_every_number_of_actors_has_as_many_plain_processes_and_what_tells_most_is_first() -> None:
    names = list(gpu.variants_of("fedavg", [2, 4]))
    assert names == ["loop", "2 actors", "4 actors", "2 x stacked", "4 x stacked", "2 processes", "4 processes"]
    assert "2 x stacked" not in gpu.variants_of("spider", [2])


@pytest.mark.parametrize("actors", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("case", gpu.CASES)
def test_actors_share_one_gpu(case: str, actors: int) -> None:
    config = compose_config(gpu.overrides_of(case, "actors", actors, "cuda", small=False))
    assert (config.ray.num_gpus, config.ray.num_cpus, config.tiers.count) == (1, actors, 1)
    assert config.tiers.num_gpus == [1 / actors]
    assert config.executor.failures.policy == "tolerate", "who exceeds a share is counted"


def test_lines_of_nvidia_smi() -> None:
    assert sample_of("37, 1024\n") == (37.0, 2.0**30)
    assert sample_of("[N/A], 12") is None
    assert sample_of("No devices were found") is None
    assert summed_up([]) == {"utilisation": None, "device_bytes": None}
    assert summed_up([(10.0, 5.0), (30.0, 4.0)]) == {"utilisation": 20.0, "device_bytes": 5.0}
    with Utilisation("cpu") as watched:
        pass
    assert watched.between(0.0, 1e12)["utilisation"] is None
