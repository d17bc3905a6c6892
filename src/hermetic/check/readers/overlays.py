"""What changes a manifest from outside: kustomize, and the file that docker compose reads beside its own.

The one thing to know: such a manifest is not what will run. Nothing is put together here, since the tool that does it prints the result; what is changed is
not read, and said.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from hermetic.check.readers.beside import Files
from hermetic.check.readers.yaml_text import Node, NotYaml, documents, mapping, text_of

_KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml", "Kustomization")
_CHANGES_NOTHING = frozenset({
    "apiVersion", "kind", "metadata", "resources", "namespace", "labels", "commonLabels", "commonAnnotations", "namePrefix", "nameSuffix", "buildMetadata",
    "sortOptions", "openapi", "configurations", "replicas",
})  # fmt: skip
_COMPOSED = ("compose.yaml", "compose.yml", "docker-compose.yaml", "docker-compose.yml")
_OVERRIDES = (
    "compose.override.yml", "compose.override.yaml", "docker-compose.override.yml", "docker-compose.override.yaml",
)  # fmt: skip


def is_kustomization(name: str) -> bool:
    return PurePath(name).name in _KUSTOMIZATIONS


def changed_by_kustomize(name: str, document: Node) -> str | None:
    """What to do about a kustomization that changes what it names; None for one that only lists files, and for other documents."""
    told = mapping(document)
    own = text_of(told.get("apiVersion")).startswith("kustomize.config.k8s.io/")
    if not (is_kustomization(name) or (own and told.get("kind") in ("Kustomization", "Component"))):
        return None
    changes = [key for key, value in told.items() if key not in _CHANGES_NOTHING and value is not None]
    if not changes:
        return None
    folder = PurePath(name).parent
    return f"changes the files that it names ({', '.join(changes[:4])}), which are not what will run; render them: kubectl kustomize {folder} > rendered.yaml"


def overridden(name: str, files: Files) -> tuple[str, Mapping[str, Node]]:
    """The file that docker compose reads by itself beside this one, and the services that it changes. Raises NotYaml; empty where there is none."""
    if PurePath(name).name not in _COMPOSED:
        return "", {}
    for other in _OVERRIDES:
        if (text := files(other)) is not None:
            try:
                whole = mapping(next(iter(documents(text)), None))
            except NotYaml as error:
                raise NotYaml(f"is changed by {other}, which {error}") from None
            return other, mapping(whole.get("services"))
    return "", {}


def of_an_engine(*services: Node) -> bool:
    """Whether a service that is written in several files may start an engine or a router."""
    return any(
        word in str(service)
        for service in services
        for word in ("sglang", "vllm", "hermetic", "sgl-model-gateway")
    )


__all__ = ["changed_by_kustomize", "is_kustomization", "of_an_engine", "overridden"]
