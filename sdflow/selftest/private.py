"""Remove personal data from reports: users, machines, and paths."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sdflow.selftest.result import DrawnPair, Ran, Report, from_json, to_json

PATH, NAME = "<path>", "<name>"
_USERS = ("USER", "USERNAME", "LOGNAME", "SUDO_USER")
_HOSTS = ("HOSTNAME", "COMPUTERNAME", "USERDOMAIN")
_FOLDERS = ("HOME", "USERPROFILE", "HOMEPATH", "APPDATA", "LOCALAPPDATA", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "PWD")
_PATHS = re.compile(
    r"""file://\S+
    | (?<![\w/\\]) [A-Za-z]: [\\/] [^\s"'<>|:;,()]*            # C:\\Users\\...
    | \\\\ [^\s"'<>|:;,()]+                                    # \\\\server\\share
    | (?<![\w<.]) ~? / [\w.@+-][^\s"'<>|:;,()]*                # /home/..., ~/...
    | (?<![\w.]) (?:[\w.@+-]+ [\\/]){2,} [\w.@+-]*             # relative, of three parts or more
    """,
    re.VERBOSE,
)
_FREE = ("reason", "notes")
"""Fields of a report with free text: from ONNX Runtime, a driver, an exception."""

_KEPT = ("target", "verdict", "prompt", "png", "pytorch_png")
"""Fields with our own words, or pixels in base64."""

_OURS = frozenset(each.name for kind in (Report, Ran, DrawnPair) for each in fields(kind))
"""Our own keys, which are kept even if a user has such a name."""


@dataclass(frozen=True)
class Private:
    """Replaces personal data in a report.

    folders: absolute paths to replace everywhere, the longest first. names: of users and machines.
    """

    folders: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def here(cls) -> Private:
        """The data of this user and machine."""
        names = {os.environ.get(key, "") for key in (*_USERS, *_HOSTS)}
        folders = {os.environ.get(key, "") for key in _FOLDERS} | {str(Path.cwd()), sys.prefix}
        with suppress(OSError, KeyError, ImportError):  # the user is not in the system's list
            names.add(getpass.getuser())
        with suppress(OSError):
            names.add(socket.gethostname())
        with suppress(RuntimeError):
            folders.add(str(Path.home()))
            names.add(Path.home().name)
        names |= {name.split(".")[0] for name in names}
        return cls.of(folders, names)

    @classmethod
    def of(cls, folders: Iterable[str], names: Iterable[str]) -> Private:
        spelled = {
            each for folder in folders for each in (folder, folder.replace("\\", "/"), folder.replace("/", "\\"))
        }
        long = sorted((each.rstrip("/\\") for each in spelled if len(each.strip("/\\")) > 1), key=len, reverse=True)
        return cls(tuple(long), tuple(sorted({name for name in names if name.strip()}, key=len, reverse=True)))

    def text(self, text: str, *, free: bool = True) -> str:
        """The text without personal data. free: whether it is free text, in which every path is replaced."""
        for folder in self.folders:
            text = re.sub(re.escape(folder) + r"(?![A-Za-z0-9])", lambda _: PATH, text, flags=re.IGNORECASE)
        if free:
            text = _PATHS.sub(PATH, text)
            text = re.sub(rf"{PATH}[^\s\"'|:;,()]+", PATH, text)
        for name in self.names:
            text = re.sub(
                rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", lambda _: NAME, text, flags=re.IGNORECASE
            )
        return text

    def cleared(self, report: Report) -> Report:
        """The report with all its texts cleared. Pixels, in base64, contain no text."""
        plain = to_json(report).items()
        return from_json({key: value if key in _KEPT else self._value(value, key in _FREE) for key, value in plain})

    def _value(self, value: Any, free: bool) -> Any:
        if isinstance(value, str):
            return self.text(value, free=free)
        if isinstance(value, list):
            return [self._value(each, free) for each in value]
        if isinstance(value, dict):
            return {
                key if key in _OURS else self.text(key, free=False): each if key in _KEPT else self._value(each, free)
                for key, each in value.items()
            }
        return value
