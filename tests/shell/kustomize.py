"""As much of Kustomize as ``deploy/kubernetes`` uses, so that its manifests are tested without it.

Resources, a namespace, images, and patches that are merged as Kubernetes merges: mappings key by
key, lists of named things by their names, null removes. Anything else is an error. Where Kustomize
is installed, a test holds this against it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

_CLUSTER_WIDE = {"Namespace"}
_KNOWN = {"apiVersion", "kind", "namespace", "resources", "patches", "images"}
# What names an element of a list. Of lists without such a key the patch's takes the place.
_NAMES = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "tolerations": "",
    "args": "",
}


def render(folder: Path) -> list[Resource]:
    """The resources of a kustomization, in the order of its files."""
    recipe = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    if unknown := set(recipe) - _KNOWN:
        raise ValueError(f"{folder}: {sorted(unknown)} is not known here")
    found: list[Resource] = []
    for name in recipe["resources"]:
        path = folder / name
        found += render(path) if path.is_dir() else _documents(path)
    for patch in recipe.get("patches", []):
        for change in _documents(folder / patch["path"]):
            (target,) = (one for one in found if identity(one)[:2] == identity(change)[:2])
            _merge(target, change)
    for resource in found:
        if resource["kind"] not in _CLUSTER_WIDE:
            resource["metadata"]["namespace"] = recipe["namespace"]
        for image in recipe.get("images", []):
            _retag(resource, image)
    return found


def identity(resource: Resource) -> tuple[str, str, str]:
    """Kind, name and namespace."""
    about = resource["metadata"]
    return resource["kind"], about["name"], about.get("namespace", "")


def pod_of(resource: Resource) -> Resource:
    """The pod that a StatefulSet makes."""
    pod: Resource = resource["spec"]["template"]["spec"]
    return pod


def _documents(path: Path) -> list[Resource]:
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def _merge(target: Resource, patch: Resource) -> None:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        elif isinstance(value, list) and _NAMES.get(key, "") and key in target:
            _merge_named(target[key], value, _NAMES[key])
        elif isinstance(value, list) and key not in _NAMES:
            raise ValueError(f"how a list of {key} is merged is not known here")
        else:
            target[key] = _without_nulls(value)


def _merge_named(target: list[Resource], patch: list[Resource], name: str) -> None:
    for change in patch:
        same = next((one for one in target if one[name] == change[name]), None)
        if change.get("$patch") == "delete":
            assert same is not None, f"nothing to delete: {change}"
            target.remove(same)
        elif same is not None:
            _merge(same, change)
        else:
            target.append(change)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return value


def _retag(resource: Resource, image: dict[str, str]) -> None:
    if resource["kind"] != "StatefulSet":
        return
    for container in pod_of(resource)["containers"]:
        name, _, tag = container["image"].rpartition(":")
        if name == image["name"]:
            container["image"] = f"{image['newName']}:{image.get('newTag', tag)}"
