"""Pipelines of a server by name, with aliases and a default. Pipelines can be added and removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sdflow.errors import SdflowError, UsageError
from sdflow.serve.api_error import ApiError, invalid
from sdflow.serve.http.served_model import ServedModel, read_served


class Models(Mapping[str, ServedModel]):
    """Pipelines by name, the default first. aliases: other names of pipelines. default: used if a request names none,
    or one that does not exist; None: the first, only if a request names none."""

    def __init__(
        self, models: Mapping[str, ServedModel], aliases: Mapping[str, str] | None = None, default: str | None = None
    ) -> None:
        """Raises UsageError if an alias or the default names no pipeline, or an alias equals a pipeline's name."""
        self._models, self.aliases, self._default = dict(models), dict(aliases or {}), default
        if both := self._models.keys() & self.aliases.keys():
            words = f"{min(both)!r} is already the name of a pipeline"
            raise UsageError(words, where="--alias", remedy="Choose another alias.")
        wanted = [("--alias", name) for name in self.aliases.values()]
        for option, name in [*wanted, *([] if default is None else [("--default", default)])]:
            if name not in self._models:
                remedy = f"Choose one of {', '.join(self._models)}."
                raise UsageError(f"no pipeline named {name!r}", where=option, remedy=remedy)

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._models, key=lambda name: name != self._default))

    def __len__(self) -> int:
        return len(self._models)

    def named(self, name: str | None) -> ServedModel | None:
        return self._models.get(self.aliases.get(name or "", name or ""))

    def get_named(self, name: str | None) -> ServedModel:
        """Return the pipeline of this name or alias. Raises ApiError."""
        if (found := self.named(name)) is None:
            known = ", ".join([*self, *self.aliases])
            words = f"no pipeline named {name!r}; available: {known}." if known else "this server has no pipelines."
            raise ApiError(404, words, param="model", code="model_not_found")
        return found

    def find(self, name: str | None) -> ServedModel:
        """Return the pipeline of this name or alias, or the default. Raises ApiError."""
        if self.named(name) is None and self._models and (name is None or self._default in self._models):
            return self._models[next(iter(self))]
        return self.get_named(name)

    def put(self, model: ServedModel) -> None:
        self._models[model.name] = model

    def remove(self, name: str) -> None:
        """Remove a pipeline. Raises ApiError if there is none of this name."""
        if self._models.pop(name, None) is None:
            raise ApiError(404, f"no pipeline named {name!r}.", param="model", code="model_not_found")


@dataclass(frozen=True)
class Additions:
    """How pipelines are added. folder: parent of their folders; None: existing ones can only be reloaded.
    require_verified, check: see `read_served`."""

    folder: Path | None = None
    require_verified: bool = False
    check: bool = True

    def read(self, name: str, there: ServedModel | None) -> ServedModel:
        """Read the pipeline of this name from its current folder, or else from the server's. Raises ApiError."""
        folder = there.folder if there is not None else self._find(name)
        try:
            found = read_served(folder, require_verified=self.require_verified, check=self.check)
        except SdflowError as error:
            raise invalid("id", f"{name} cannot be served: {error.what}.", code="invalid_pipeline") from error
        if found.name != name:
            words = f"{name} is a link to the pipeline {found.name}; add it by that name."
            raise invalid("id", words, code="invalid_pipeline")
        return found

    def _find(self, name: str) -> Path:
        if self.folder is None:
            raise invalid("id", "adding pipelines requires --pipeline-folder.")
        if not name or name in (".", "..") or set(name) & set("/\\:") or not (self.folder / name).is_dir():
            there = ", ".join(sorted(path.parent.name for path in self.folder.glob("*/sdflow.json"))) or "none"
            raise ApiError(404, f"no pipeline named {name!r} in the server's folder; available: {there}.", param="id")
        return self.folder / name


NO_ADDITIONS = Additions()


def read_aliases(texts: list[str]) -> dict[str, str]:
    """Parse options like dall-e-3=NAME. Raises UsageError."""
    found = {}
    for text in texts:
        alias, equals, name = text.partition("=")
        if not (alias and equals and name):
            raise UsageError(
                f"{text!r} is not an alias", where="--alias", remedy="Write ALIAS=PIPELINE, such as dall-e-3=sdxl."
            )
        found[alias] = name
    return found
