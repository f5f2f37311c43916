"""LoRAs of a server, from its folder and uploaded. Requests refer to them by name only."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from sdflow.digest import digest_file
from sdflow.disk.locked_folder import remove_abandoned_scratch, scratch_folder
from sdflow.errors import CheckpointError, UsageError
from sdflow.inspection.adapters import trigger_words
from sdflow.serve.api_error import ApiError, invalid
from sdflow.serve.jobs import LoraFile
from sdflow.serve.limits import Limits
from sdflow.sources.loras.lora import lora_submodels
from sdflow.sources.safetensors_file import read_metadata

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.+-]{0,99}")
_SUFFIX = ".safetensors"

DEFAULTS = Limits()

AT_ONCE = 2
"""Maximum concurrent uploads: each also takes its size in the system's temporary files until it is complete."""


class Loras:
    """LoRAs by name. folder: of .safetensors files, which may come and go; None: none.

    sent_below: parent of the scratch folder for uploads; None: the system's temporary folder. A pickled copy creates
    its own scratch folder. require_fit: raises CheckpointError or UsageError for a file that fits no pipeline; None: no
    check. limits: number and size of uploads.
    """

    def __init__(
        self,
        folder: Path | None,
        sent_below: Path | None = None,
        require_fit: Callable[[Path], None] | None = None,
        limits: Limits = DEFAULTS,
    ) -> None:
        """Raises UsageError if the folder does not exist."""
        if folder is not None and not folder.is_dir():
            raise UsageError("no such folder", where=str(folder), remedy="Check the path of --loras.")
        self.folder, self.sent_below, self.require_fit, self.limits = folder, sent_below, require_fit, limits
        remove_abandoned_scratch(sent_below)  # left by killed servers
        self._closing = contextlib.ExitStack()
        self._sent = self._closing.enter_context(scratch_folder("sent-loras", sent_below))
        self._removed: set[str] = set()
        self._receiving: list[int] = []
        self._naming = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Loras, (self.folder, self.sent_below, self.require_fit, self.limits)

    def close(self) -> None:
        self._closing.close()

    def files(self) -> dict[str, Path]:
        """Return the current files by name. An upload takes precedence over the folder."""
        own = [] if self.folder is None else sorted(self.folder.glob(f"*{_SUFFIX}"))
        found = {path.stem: path for path in own if path.stem not in self._removed}
        return {**found, **{path.stem: path for path in sorted(self._sent.glob(f"*{_SUFFIX}"))}}

    def to_json(self) -> list[dict[str, Any]]:
        """Return all LoRAs as an OpenAI list. Unreadable ones have an `error`."""
        listed = []
        for name, path in self.files().items():
            entry = {"id": name, "object": "lora", "sent": path.parent == self._sent}
            try:
                size, sha256, submodels, words = _look_at(path)
            except FileNotFoundError:  # removed meanwhile
                continue
            except (CheckpointError, OSError) as error:
                listed.append({**entry, "error": _reason(error)})
            else:
                listed.append({**entry, "bytes": size, "sha256": sha256, "submodels": submodels, "words": words})
        return listed

    def find(self, wanted: Sequence[tuple[str, float]]) -> tuple[LoraFile, ...]:
        """Return the LoRAs of these names and scales. Raises ApiError."""
        files, found = self.files(), []
        for name, scale in wanted:
            if name not in files:
                known = ", ".join(files) or "none"
                raise invalid("loras", f"no LoRA named {name!r}; available: {known}.", code="lora_not_found")
            try:
                sha256 = _look_at(files[name])[1]
            except (CheckpointError, OSError) as error:
                raise invalid("loras", f"{name} is not a LoRA: {_reason(error)}.") from error
            found.append(LoraFile(name, str(files[name].absolute()), sha256, scale))
        return tuple(found)

    @contextlib.contextmanager
    def receiving(self, size: int) -> Iterator[None]:
        """Reserve room for an upload of this many bytes while it is received, in the event loop's thread. Raises
        ApiError if there is no room or too many uploads are in progress."""
        if len(self._receiving) >= AT_ONCE:
            words = f"{AT_ONCE} LoRAs are already being uploaded. Try again later."
            raise ApiError(503, words, code="overloaded", retry_after=5)
        sent, limits = [path.stat().st_size for path in self._sent.glob(f"*{_SUFFIX}")], self.limits
        if len(sent) + len(self._receiving) >= limits.uploads:
            raise _no_room(f"at most {limits.uploads} LoRAs can be uploaded")
        if sum(sent) + sum(self._receiving) + size > limits.upload_bytes:
            raise _no_room(f"uploaded LoRAs can have at most {limits.upload_bytes} bytes in total")
        self._receiving.append(size)
        try:
            yield
        finally:
            self._receiving.remove(size)

    def add(self, name: str, content: IO[bytes]) -> dict[str, Any]:
        """Add an uploaded file. Raises ApiError if the name is invalid or taken, the file is no LoRA or fits no
        pipeline, or the disk is full; then nothing of it is kept."""
        name = name.removesuffix(_SUFFIX)
        if not _NAME.fullmatch(name):
            raise invalid(
                "name", "a name has at most 100 letters, digits, spaces and _.+-, and starts with a letter or digit."
            )
        if name in self.files():
            raise _taken(name)
        path = self._sent / f"{uuid.uuid4().hex}.part"
        try:
            with path.open("wb") as part:
                shutil.copyfileobj(content, part)
            try:
                sha256, submodels = digest_file(path), lora_submodels(path)
            except CheckpointError as error:
                raise invalid("file", f"not a LoRA: {error.what}.", code="invalid_lora") from error
            try:
                if self.require_fit is not None:
                    self.require_fit(path)
            except (CheckpointError, UsageError) as error:
                raise invalid("file", f"it fits none of the pipelines: {error.what}.", code="invalid_lora") from error
            size = path.stat().st_size
            with self._naming:
                if name in self.files():  # taken meanwhile
                    raise _taken(name)
                path.rename(self._sent / f"{name}{_SUFFIX}")
            return {"id": name, "object": "lora", "sent": True, "bytes": size, "sha256": sha256, "submodels": submodels}
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise _no_room("the server's disk is full") from error
        finally:
            path.unlink(missing_ok=True)

    def remove(self, name: str) -> Path:
        """Remove a LoRA and return its file, which is deleted if it was uploaded. Raises ApiError."""
        with self._naming:
            path = self.files().get(name)
            if path is None:
                raise ApiError(404, f"no LoRA named {name!r}.", code="lora_not_found")
            if path.parent == self._sent:
                path.unlink()
            else:
                self._removed.add(name)
            return path.absolute()


def _look_at(path: Path) -> tuple[int, str, tuple[str, ...], list[str]]:
    """Return size, digest, submodels and trigger words of a LoRA file. Raises CheckpointError, OSError."""
    stat = path.stat()
    return stat.st_size, *_read(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=10_000)
def _read(path: Path, size: int, changed: int) -> tuple[str, tuple[str, ...], list[str]]:
    return digest_file(path), lora_submodels(path), trigger_words(read_metadata(path))


def _reason(error: CheckpointError | OSError) -> str:
    """Return the reason without the path, which clients must not see."""
    return error.what if isinstance(error, CheckpointError) else error.strerror or type(error).__name__


def _no_room(why: str) -> ApiError:
    return ApiError(507, f"{why}. Delete one: DELETE /v1/loras/NAME.", param="file", code="no_room")


def _taken(name: str) -> ApiError:
    return ApiError(409, f"a LoRA named {name} already exists.", param="name", code="lora_exists")
