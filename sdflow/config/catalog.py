"""What validation needs to know about passes. The passes themselves live a floor above and are handed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel


class PassNotFound(LookupError):
    """No pass of that name can be used; `str()` is the reason, in words for the user."""


@dataclass(frozen=True)
class PassInfo:
    """A pass as a workflow sees it.

    accepts: "checkpoint" for a pass that starts a chain, "onnx" for one that continues it.
    takes_loras: the pass merges the workflow's LoRAs.
    options: the pydantic model of its options; unknown options must be errors in it.
    quantizes: the type that it makes of weights with such options; None: it leaves them floating-point numbers.
    """

    name: str
    accepts: Literal["checkpoint", "onnx"]
    takes_loras: bool
    options: type[BaseModel]
    quantizes: Callable[[Mapping[str, Any]], str | None] = lambda options: None


class PassCatalog(Protocol):
    """The passes that workflows can name."""

    def names(self) -> Sequence[str]:
        """Every name that `find` knows without a path, for suggestions and for the schema."""
        ...

    def find(self, name: str, folder: Path) -> PassInfo:
        """The pass called `name`, or written at a path like `user_scripts/foo.py:ClassName`.

        folder: of the file that names the pass; paths are looked up from there. Raises PassNotFound.
        """
        ...
