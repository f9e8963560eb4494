"""The files of deploy/ for KubeRay: each is what KubeRay's own schema takes, and asks for what docs/cluster.md says."""

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCHEMAS = {"RayCluster": "rayclusters", "RayJob": "rayjobs"}
FILES = ["kuberay-cluster.yaml", "kuberay-job.yaml"]


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / name).read_text())
    return found


@functools.cache
def validator(kind: str) -> jsonschema.Draft7Validator:
    """Read KubeRay's schema of a kind, and let it refuse fields that it does not name, which Kubernetes would drop in silence."""
    packed = (ROOT / "tests" / "golden" / "kuberay" / f"{SCHEMAS[kind]}.v1.json.gz").read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(packed))
    found["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(_closed(found))


def _closed(part: Any) -> Any:
    if isinstance(part, list):
        return [_closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    made = {name: _closed(value) for name, value in part.items()}
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("pattern", None)
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def cluster_of(found: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = found["spec"]
    return spec["rayClusterSpec"] if found["kind"] == "RayJob" else spec


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_kuberays_schema_takes(name: str) -> None:
    found = document(name)
    validator(found["kind"]).validate(found)


@pytest.mark.parametrize("name", FILES)
def test_a_cluster_asks_for_a_token_keeps_gpus_off_the_head_and_gives_channels_memory(name: str) -> None:
    spec = cluster_of(document(name))
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        shared = {volume["name"] for volume in pod["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"}
        [container] = pod["containers"]
        assert {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in shared} == {"/dev/shm"}


def test_a_job_has_the_cluster_of_the_other_file() -> None:
    one, other = map(document, FILES)
    assert cluster_of(one) == cluster_of(other)
