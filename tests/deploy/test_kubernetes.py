"""The manifests for Kubernetes: valid, and at one with each other, with the job file and with our options."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from checkmate.cli.main import app
from checkmate.job.addresses import split_address
from checkmate.job.files import read_job
from checkmate.keys.access import INSECURE
from checkmate.keys.folder import read_keys
from checkmate.keys.making import make_keys
from checkmate.keys.roles import SECRETS, Role
from tests.support.cli import invoke
from tests.support.keys import NOW
from tests.support.manifests import FOLDER, documents, find_manifest, generated, kustomization, pods
from tests.support.units import Unit
from topologies import torchrun
from topologies.describe.topology import load

JOB = FOLDER / "job" / "gpt.yaml"
OTHER_API_VERSIONS = {"trainer.kubeflow.org/v1alpha1"}
VERSIONS = ("1.33", "1.37")
ROLES = pytest.mark.parametrize("role", ["controller", "shadow", "trainer"])


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_the_manifests(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    manifests = [document for document in documents() if document["apiVersion"] not in OTHER_API_VERSIONS]
    assert len(manifests) == 7
    for manifest in manifests:
        validator.validate(manifest, version, strict=True)
    wrong = find_manifest("StatefulSet")
    wrong["spec"]["replicsa"] = 2
    with pytest.raises(validator.ValidationError, match="replicsa"):
        validator.validate(wrong, version, strict=True)


@pytest.mark.parametrize("kind", ["TrainJob", "TrainingRuntime"])
def test_kubeflow_trainer_accepts_the_manifests(kind: str) -> None:
    """The models drop keys that they do not know, so what they return is compared."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is missing")
    model: Any = getattr(models, f"TrainerV1alpha1{kind}")
    manifest = find_manifest(kind)
    assert model.from_dict(manifest).to_dict() == manifest
    with pytest.raises(ValueError, match="should be a valid dictionary"):
        model.from_dict({**manifest, "spec": []})


def test_the_pods_of_a_runtime_are_pods() -> None:
    """The models of Kubeflow do not check the keys of pods; as those of a Job they are checked."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    template = pods()["trainer"].template
    template["spec"]["restartPolicy"] = "Never"  # the trainer's default
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": template}}
    validator.validate(job, VERSIONS[0], strict=True)


def test_the_example_job_is_valid() -> None:
    code, text = invoke("validate", JOB)
    assert (code, text.count("valid;")) == (0, 1)


@ROLES
def test_volumes_mounts_and_what_is_generated_fit(role: str) -> None:
    of_role = pods()[role]
    names = {volume["name"] for volume in of_role.spec["volumes"]}
    mounted = {mount["name"] for container in of_role.all_containers() for mount in container["volumeMounts"]}
    assert mounted == names
    (config,) = generated("configMap")
    assert of_role.volume("job")["configMap"]["name"] == config
    assert of_role.volume("secret")["secret"]["secretName"] in generated("secret")
    assert all((FOLDER / file).exists() for file in generated("configMap")[config])
    mounts = {mount["name"]: mount["mountPath"] for mount in of_role.container["volumeMounts"]}
    assert "secret" not in mounts, "Checkmate's process reads the copy"
    assert Path(mounts["keys"]) == read_job(JOB).keys


def test_each_role_gets_its_own_keys_and_no_others(tmp_path: Path) -> None:
    make_keys([(read_job(JOB), tmp_path / "keys")], NOW)
    assert len(generated("secret")) == 3
    for name, files in generated("secret").items():
        folder = tmp_path / "keys" / "gpt" / name.rpartition("-")[2]
        assert {tmp_path / file for file in files} == set(folder.iterdir())


@ROLES
def test_what_is_copied_from_a_secret_are_keys_that_checkmate_accepts(tmp_path: Path, role: str) -> None:
    """The volume is laid out as Kubernetes does: links to files in a folder that everybody can write to."""
    job = read_job(JOB)
    make_keys([(job, tmp_path / "made")], NOW)
    (volume := tmp_path / "secret").mkdir()
    volume.chmod(0o1777)
    data = volume / "..2026_11_23"
    shutil.copytree(tmp_path / "made" / "gpt" / role, data)
    data.chmod(0o755)
    mode = pods()[role].volume("secret")["secret"]["defaultMode"]
    (volume / "..data").symlink_to(data.name)
    for file in data.iterdir():
        file.chmod(mode)
        (volume / file.name).symlink_to(f"..data/{file.name}")
    with pytest.raises(Exception, match="has mode"):
        read_keys(volume, "gpt", Role(role), now=NOW)
    (init,) = pods()[role].spec["initContainers"]
    folder = tmp_path / "keys" / "gpt" / role
    command = [word.replace("/secret/", f"{volume}/") for word in init["command"]]
    assert command[-1] == f"/etc/checkmate/keys/gpt/{role}"
    subprocess.run([*command[:-1], str(folder)], check=True)
    assert set(read_keys(folder, "gpt", Role(role), now=NOW).secrets) == set(SECRETS[Role(role)])


def parsed(words: list[str]) -> dict[str, Any]:
    """Parse a command line by our own parser; return its values."""
    group: Any = typer.main.get_command(app)
    name, *arguments = [word.replace("$(HOST_IP)", "192.168.0.21") for word in words]
    context = group.get_command(None, name).make_context(name, arguments)
    return dict(context.params)


@pytest.mark.parametrize(("role", "at"), [("controller", "0.0.0.0"), ("shadow", "192.168.0.21")])
def test_commands_are_ours_and_metrics_are_where_probes_and_services_look(role: str, at: str) -> None:
    of_role = pods()[role]
    options = parsed(of_role.container["args"])
    assert options["metrics"] == f"{at}:{of_role.ports['metrics']}"
    for probe, path in (("livenessProbe", "/healthz"), ("startupProbe", "/healthz")):
        assert of_role.container[probe]["httpGet"] == {"path": path, "port": "metrics"}
    service = next(doc for doc in documents() if doc["kind"] == "Service" and role in doc["metadata"]["name"])
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (of_role.ports["metrics"], "metrics")
    mounts = {mount["name"]: mount["mountPath"] for mount in of_role.container["volumeMounts"]}
    jobs = options["jobs"] if role == "controller" else [options["job"]]
    expected = [mounts["job"]] if role == "controller" else [f"{mounts['job']}/{JOB.name}"]
    assert [str(job_path) for job_path in jobs] == expected
    assert (options["insecure"], options.get("standby")) == (False, True if role == "controller" else None)


def test_labels_and_selectors_fit() -> None:
    for kind, role in (("Deployment", "controller"), ("StatefulSet", "shadow")):
        spec, labels = find_manifest(kind)["spec"], pods()[role].labels
        assert spec["selector"]["matchLabels"] == labels
        assert spec["replicas"] == 2
        budget = find_manifest("PodDisruptionBudget", role)["spec"]
        assert budget["selector"]["matchLabels"] == labels
    (rule,) = pods()["controller"].spec["affinity"]["podAntiAffinity"].popitem()[1]
    assert rule["labelSelector"]["matchLabels"] == pods()["controller"].labels
    for service in (doc for doc in documents() if doc["kind"] == "Service"):
        labels_wanted = service["spec"]["selector"].items()
        assert any(labels_wanted <= pod.labels.items() for pod in pods().values())
    assert find_manifest("StatefulSet")["spec"]["serviceName"] in {
        doc["metadata"]["name"] for doc in documents() if doc["kind"] == "Service"
    }


def test_an_update_deletes_no_shadow_node_that_was_not_drained() -> None:
    """A StatefulSet's update does not ask the disruption budget."""
    assert find_manifest("StatefulSet")["spec"]["updateStrategy"] == {"type": "OnDelete"}
    guide = (FOLDER.parents[1] / "docs" / "deploy.md").read_text()
    drain, delete = guide.index("checkmate drain job/gpt.yaml --id"), guide.index("delete pod -l")
    assert drain < delete
    labels = pods()["shadow"].labels
    assert re.findall(r"delete pod -l (\S+?)=(\S+)", guide) == [next(iter(labels.items()))]


def test_the_job_and_the_pods_have_the_same_hosts_and_ports() -> None:
    job = read_job(JOB)
    shadow = pods()["shadow"]
    assert find_manifest("StatefulSet")["spec"]["replicas"] == len(job.shadow_nodes)
    for node in job.shadow_nodes:
        ports = {"grpc": split_address(node.mgmt)[1], "records": node.records_at[1]}
        assert {name: shadow.ports[name] for name in ports} == ports
    assert all(port["hostPort"] == port["containerPort"] for port in shadow.container["ports"])
    ranks = [rank for group in job.dp_groups for rank in group.ranks]
    trainer = find_manifest("TrainJob")["spec"]["trainer"]
    hosts = {rank.place for rank in ranks}
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (len(hosts), len(ranks) // len(hosts))
    places = [rank.place for rank in sorted(ranks, key=lambda rank: rank.rank)]
    assert places == sorted(places), "torchrun numbers hosts by their addresses as text"
    assert find_manifest("TrainingRuntime")["spec"]["mlPolicy"]["numNodes"] == trainer["numNodes"]
    assert (
        find_manifest("TrainJob")["spec"]["runtimeRef"]["name"]
        == find_manifest("TrainingRuntime")["metadata"]["name"]
    )


def test_pods_have_the_capabilities_of_the_units_and_no_others() -> None:
    tagger = {"BPF", "PERFMON", "NET_ADMIN"}
    units = {
        "controller": {
            capability.upper() for capability in Unit("checkmate-controller.service").capabilities
        },
        "shadow": {capability.upper() for capability in Unit("checkmate-shadow@.service").capabilities},
        "trainer": tagger,
    }
    for role, capabilities in units.items():
        of_role = pods()[role]
        security_context = of_role.container["securityContext"]
        assert set(security_context["capabilities"].get("add", [])) == capabilities
        for context in (container["securityContext"] for container in of_role.all_containers()):
            assert context["capabilities"]["drop"] == ["ALL"]
            assert context["allowPrivilegeEscalation"] is False
        assert not of_role.spec["automountServiceAccountToken"]
        assert of_role.spec["securityContext"]["runAsUser"] == (0 if capabilities else 10001)
        assert of_role.spec.get("hostNetwork", False) is bool(capabilities)


def test_trainers_start_as_everywhere(tmp_path: Path) -> None:
    """The runtime's own line, run by sh, has the options of labs' torchrun, and the TrainJob's arguments."""
    container = pods()["trainer"].container
    (fake := tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "gpt-node-0-0.gpt",
        "PET_MASTER_PORT": "29500",
        "HOST_IP": "192.168.0.12",
        "JOB_COMPLETION_INDEX": "1",
    }
    command = [*container["command"], *find_manifest("TrainJob")["spec"]["trainer"]["args"]]
    arguments = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    topology = load("single_tor")
    words = [str(word) for word in torchrun.command(topology, topology.trainers[0], [])]
    starter_options = {word.partition("=")[0] for word in words if word.startswith("--")} - {
        "--monitor-interval"
    }
    assert {word.partition("=")[0] for word in arguments[: len(starter_options)]} == starter_options
    assert {"--rdzv-conf=is_host=0", "--local-addr=192.168.0.12", "--nnodes=2"} <= set(arguments)
    assert f"--max-restarts={torchrun.RESTARTS}" in arguments
    assert arguments[len(starter_options) :] == find_manifest("TrainJob")["spec"]["trainer"]["args"]
    names = {entry["name"] for entry in container["env"]}
    assert {*torchrun.ENVIRONMENT, "CHECKMATE_JOB"} <= names and INSECURE not in names


def test_images_are_targets_of_the_dockerfile() -> None:
    stages = set(re.findall(r" AS (\w+)$", (FOLDER.parent / "Dockerfile").read_text(), re.MULTILINE))
    for role, of_role in pods().items():
        assert {container["image"] for container in of_role.all_containers()} == {f"checkmate-{role}"}
        assert role in stages
    images = {entry["name"]: entry for entry in kustomization()["images"]}
    assert images.keys() == {f"checkmate-{role}" for role in pods()}
    trainer = images["checkmate-trainer"]
    assert (
        find_manifest("TrainJob")["spec"]["trainer"]["image"] == f"{trainer['newName']}:{trainer['newTag']}"
    )


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on PATH")
def test_kustomize_builds_it(tmp_path: Path) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    make_keys([(read_job(JOB), folder / "keys")], NOW)
    result = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    manifests = list(yaml.safe_load_all(result.stdout))
    kinds = [manifest["kind"] for manifest in manifests]
    assert (kinds.count("Secret"), kinds.count("ConfigMap")) == (3, 1)
    assert {manifest["metadata"].get("namespace") for manifest in manifests} == {"checkmate", None}
    (stateful,) = (manifest for manifest in manifests if manifest["kind"] == "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/checkmate-shadow:0.1.0"
