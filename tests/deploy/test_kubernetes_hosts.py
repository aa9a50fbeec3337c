"""The manifests for copies by hosts: valid, at one with job file and options, and ordinary pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from checkmate.job.addresses import split_address
from checkmate.job.files import read_job
from checkmate.keys.making import make_keys
from tests.deploy.test_kubernetes import VERSIONS, parsed
from tests.support.cli import invoke
from tests.support.keys import NOW

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes-hosts"
JOB = FOLDER / "job" / "gpt.yaml"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for name in (*KUSTOMIZATION["resources"], "trainjob.yaml")
    for manifest in yaml.safe_load_all((FOLDER / name).read_text())
]


def of_kind(kind: str) -> dict[str, Any]:
    (match,) = (manifest for manifest in MANIFESTS if manifest["kind"] == kind)
    return match


def pod_of(role: str) -> dict[str, Any]:
    """Return the specification of a role's pods."""
    if role == "shadow":
        return dict(of_kind("StatefulSet")["spec"]["template"]["spec"])
    (replicated,) = of_kind("TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"]
    return dict(replicated["template"]["spec"]["template"]["spec"])


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_the_manifests(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kinds = [manifest for manifest in MANIFESTS if "kubeflow" not in manifest["apiVersion"]]
    pod = {"template": {"spec": {**pod_of("trainer"), "restartPolicy": "Never"}}}
    trainers = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": pod}
    assert len(kinds) == 4
    for manifest in (*kinds, trainers):
        validator.validate(manifest, version, strict=True)


@pytest.mark.parametrize("role", ["shadow", "trainer"])
def test_pods_are_ordinary(role: str) -> None:
    """As Kubernetes' restricted profile wants them: no root, no capability, nothing of the machine's."""
    spec = pod_of(role)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    context = spec["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] and context["seccompProfile"]
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert not any("hostPort" in port for port in container.get("ports", []))
    kinds = [set(volume) - {"name"} for volume in spec["volumes"]]
    assert all(kind <= {"emptyDir", "configMap", "secret"} for kind in kinds)
    assert of_kind("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_job_is_valid_and_names_the_pods_with_their_ports() -> None:
    assert invoke("validate", JOB)[0] == 0
    job, stateful, service = read_job(JOB), of_kind("StatefulSet"), of_kind("Service")
    assert stateful["spec"]["replicas"] == len(job.shadow_nodes)
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    (container,) = pod_of("shadow")["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for node in job.shadow_nodes:
        host = f"shadow-{node.id}.{service['metadata']['name']}.{KUSTOMIZATION['namespace']}.svc"
        assert split_address(node.mgmt) == (host, ports["grpc"])
        assert (node.records_at[1], node.gradients_at[1]) == (ports["records"], ports["gradients"])
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
    trainer = of_kind("TrainJob")["spec"]["trainer"]
    ranks = sum(len(group.ranks) for group in job.dp_groups)
    assert trainer["numNodes"] * trainer["numProcPerNode"] == ranks
    assert of_kind("TrainingRuntime")["spec"]["mlPolicy"]["numNodes"] == trainer["numNodes"]


def test_commands_are_ours() -> None:
    (container,) = pod_of("shadow")["containers"]
    options = parsed([word.replace("$(POD_INDEX)", "1") for word in container["args"]])
    assert (options["node_id"], options["insecure"]) == (1, False)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(options["job"]) == f"{mounts['job']}/{JOB.name}"
    assert Path(mounts["keys"]) == read_job(JOB).keys
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert options["metrics"] == f"0.0.0.0:{ports['metrics']}"


def test_each_role_gets_its_own_keys(tmp_path: Path) -> None:
    make_keys([(read_job(JOB), tmp_path / "keys")], NOW)
    secrets = {entry["name"]: entry["files"] for entry in KUSTOMIZATION["secretGenerator"]}
    for role in ("shadow", "trainer"):
        folder = tmp_path / "keys" / "gpt" / role
        assert {tmp_path / file for file in secrets[f"gpt-keys-{role}"]} == set(folder.iterdir())
        (volume,) = (volume for volume in pod_of(role)["volumes"] if volume["name"] == "secret")
        assert volume["secret"]["secretName"] == f"gpt-keys-{role}"
