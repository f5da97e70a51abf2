"""The example clusters and containers: they load, fit what Ray says of such files, and ask for a token."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.scripts import scripts

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "cluster"
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


# -- containers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def services() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return loaded


def test_rays_own_command_takes_what_the_containers_give_it(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        ray_command, start, *options = service["command"].split()
        assert (ray_command, start) == ("ray", "start")
        scripts.start.make_context("start", options)  # raises for an unknown option
    _, *check = services["head"]["healthcheck"]["test"]
    assert check[:2] == ["ray", "health-check"]
    scripts.healthcheck.make_context("health-check", check[2:])
    assert "--address=head:6379" in services["worker"]["command"]
    assert services["worker"]["depends_on"] == {"head": {"condition": "service_healthy"}}


def test_the_containers_ask_for_a_token_and_open_no_port(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["environment"]["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
        assert "ports" not in service
        assert "dashboard-host" not in service["command"]
    assert "/.ray-token" in (ROOT / ".gitignore").read_text().splitlines()
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*", "what is not named does not get into the image"


def test_the_image_has_the_versions_of_the_package_and_no_root() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in re.findall(r'"(torch(?:vision)?>=[^"]+)"', dockerfile):
        assert requirement in project["dependencies"]
    python = re.search(r"^ARG PYTHON=(.*)$", dockerfile, re.M)
    assert python is not None
    assert f"Programming Language :: Python :: {python[1]}" in project["classifiers"]
    assert dockerfile.rindex("\nUSER fedloom\n") > dockerfile.rindex("\nRUN "), "nothing of the image runs as root"
    copied = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert all((ROOT / name).exists() for name in copied)
    folders = {"tiers", "platform", "actors", "experiments"}
    assert {*folders, "pyproject.toml", project["readme"], *project["license-files"]} == set(copied)
