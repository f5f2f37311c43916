"""The interface to passes that validation needs. Passes live in a higher layer and are handed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel


class PassNotFound(LookupError):
    """No usable pass has that name; `str()` is the reason, in words for the user."""


@dataclass(frozen=True)
class PassInfo:
    """A pass as workflows see it.

    accepts: "checkpoint" for a pass that starts a chain, "onnx" for one that continues it.
    takes_loras: whether the pass merges the workflow's LoRAs.
    options: the pydantic model of its options; it must reject unknown ones.
    quantizes: maps options to the type that the pass quantizes weights to; None leaves them floating-point.
    """

    name: str
    accepts: Literal["checkpoint", "onnx"]
    takes_loras: bool
    options: type[BaseModel]
    quantizes: Callable[[Mapping[str, Any]], str | None] = lambda options: None


class PassCatalog(Protocol):
    """The passes that workflows can name."""

    def names(self) -> Sequence[str]:
        """Every name that `find` accepts without a path, for suggestions and the schema."""
        ...

    def find(self, name: str, folder: Path) -> PassInfo:
        """Return the pass called `name`, or defined at a path like `user_scripts/foo.py:ClassName`.

        folder: of the file that names the pass; relative paths start there. Raises PassNotFound.
        """
        ...
