"""The example clusters: they load, fit what Ray says of such files, and ask for a token."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "cluster"
RAY_SCHEMA = Path(ray.autoscaler.__file__).with_name("ray-schema.json")
MOUNT = {"name": "shared", "mountPath": "/shared"}


@pytest.fixture
def launched() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
    return loaded


@pytest.fixture
def resource() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    return loaded


def test_the_launcher_example_fits_rays_schema(launched: dict[str, Any]) -> None:
    schema = json.loads(RAY_SCHEMA.read_text())
    jsonschema.validate(launched, schema)
    with pytest.raises(jsonschema.ValidationError):  # the schema sees a mistake
        jsonschema.validate({**launched, "worker_types": {}}, schema)


def test_the_launcher_example_is_consistent(launched: dict[str, Any]) -> None:
    types = launched["available_node_types"]
    assert launched["head_node_type"] in types
    workers = {name: kind for name, kind in types.items() if name != launched["head_node_type"]}
    assert len({kind["resources"]["CPU"] for kind in workers.values()}) == 2
    assert sum(kind["max_workers"] for kind in workers.values()) <= launched["max_workers"]


def test_the_launcher_example_authenticates_and_keeps_the_dashboard_private(launched: dict[str, Any]) -> None:
    starts = [launched["head_start_ray_commands"][-1], launched["worker_start_ray_commands"][-1]]
    assert all("export RAY_AUTH_MODE=token" in start for start in starts)
    assert "/home/ubuntu/.ray/auth_token" in launched["file_mounts"]
    assert not any("dashboard-host" in start for start in starts)
    assert any("fedloom-*.whl" in command for command in launched["setup_commands"])


def containers(group: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = group["template"]["spec"]["containers"]
    return found


def test_the_kubernetes_example_has_what_the_operator_asks_for(resource: dict[str, Any]) -> None:
    assert (resource["apiVersion"], resource["kind"]) == ("ray.io/v1", "RayCluster")
    spec = resource["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert tuple(map(int, spec["rayVersion"].split("."))) >= (2, 52, 0)  # the first with token authentication
    assert containers(spec["headGroupSpec"])[0]["name"] == "ray-head"
    ports = {port["name"]: port["containerPort"] for port in containers(spec["headGroupSpec"])[0]["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    names = [group["groupName"] for group in spec["workerGroupSpecs"]]
    assert len(set(names)) == len(names) == 2


def test_every_pod_has_the_shared_disk_and_the_same_image(resource: dict[str, Any]) -> None:
    groups = [resource["spec"]["headGroupSpec"], *resource["spec"]["workerGroupSpecs"]]
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    for group in groups[1:]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in groups:
        (container,) = containers(group)
        assert container["image"] == containers(groups[0])[0]["image"]
        assert MOUNT in container["volumeMounts"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert [volume["name"] for volume in group["template"]["spec"]["volumes"]] == ["shared"]
