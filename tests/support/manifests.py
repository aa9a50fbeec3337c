"""The manifests of deploy/kubernetes: documents, pods, and what kustomize generates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).parents[2] / "deploy" / "kubernetes"


def documents() -> list[dict[str, Any]]:
    """Return all manifests, those that kustomize does not apply too."""
    files = [FOLDER / name for name in (*kustomization()["resources"], "trainjob.yaml")]
    return [manifest for file in files for manifest in yaml.safe_load_all(file.read_text())]


def kustomization() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "kustomization.yaml").read_text()))


def find_manifest(kind: str, name: str | None = None) -> dict[str, Any]:
    """Return the only manifest of a kind, or that of a name."""
    (match,) = (doc for doc in documents() if doc["kind"] == kind and name in (None, doc["metadata"]["name"]))
    return match


@dataclass(frozen=True)
class Pods:
    """The pods of a role. `template`: labels in `metadata`, and `spec`."""

    role: str
    template: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.template["spec"])

    @property
    def container(self) -> dict[str, Any]:
        """The container that is not for initialization."""
        (spec,) = self.spec["containers"]
        return dict(spec)

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template.get("metadata", {}).get("labels", {}))

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    def volume(self, name: str) -> dict[str, Any]:
        (match,) = (volume for volume in self.spec["volumes"] if volume["name"] == name)
        return dict(match)

    def all_containers(self) -> Iterator[dict[str, Any]]:
        yield from (*self.spec["initContainers"], *self.spec["containers"])


def pods() -> dict[str, Pods]:
    """Return the pods of each role that has some."""
    (replicated,) = find_manifest("TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"]
    templates = {
        "controller": find_manifest("Deployment")["spec"]["template"],
        "shadow": find_manifest("StatefulSet")["spec"]["template"],
        "trainer": replicated["template"]["spec"]["template"],
    }
    return {role: Pods(role, template) for role, template in templates.items()}


def generated(kind: str) -> dict[str, list[Path]]:
    """Return the files, relative to the folder, of which kustomize makes each `configMap` or `secret`."""
    return {
        entry["name"]: [Path(file) for file in entry["files"]]
        for entry in kustomization()[f"{kind}Generator"]
    }
