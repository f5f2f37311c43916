"""Parse YAML text into a tree in which every value knows where it was written.

Scalars follow YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema), as in editors: only true and false
are booleans, so yes, no, on and off stay text; 1e-7 is a number; dates and 1:30 are text. A number with a leading zero
(010) is an error, since YAML readers disagree whether it means 8 or 10. Keys are always text. Tags (`!!python/...`),
merge keys (`<<`) and several documents in one file are errors. Anchors and aliases work; the size of the expanded tree
is limited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from sdflow.config.problems import Problems
from sdflow.config.tree import Node, Value, YamlList, YamlMap, YamlScalar
from sdflow.config.workflow import Mark
from sdflow.config.yaml_words import in_words

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 48
_MAX_DIGITS = 40

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)")
_WORDS: Mapping[str, Value] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def plain(text: str, mark: Mark, problems: Problems) -> YamlScalar:
    """Parse an unquoted scalar."""
    if text in _WORDS:
        return YamlScalar(_WORDS[text], mark)
    if text[0] not in "+-.0123456789":
        return YamlScalar(text, mark)
    value: Value = text
    if _LEADING_ZERO.fullmatch(text):
        problems.add(
            mark,
            f"{text[:_MAX_DIGITS]} is read as octal by some and as decimal by others",
            "write it without the leading zero, as 0o… if it is octal, or in quotes if it is text",
        )
    elif _INTEGER.fullmatch(text) or _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            problems.add(mark, f"a number of {len(text)} digits", "put it in quotes if it is text")
        else:
            value = int(text, 0)
    elif _FLOAT.fullmatch(text):
        value = float(text)
    elif _INFINITE.fullmatch(text):
        value = float(text.replace(".", ""))
    return YamlScalar(value, mark)


def decode(data: bytes, file: str, problems: Problems) -> str | None:
    """The text of a file; None, with a problem, if it is not printable UTF-8."""
    if len(data) > MAX_BYTES:
        problems.add(Mark(file, 1, 1), f"{len(data)} bytes: too large for a workflow (at most {MAX_BYTES})")
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", errors="replace")
        problems.add(_place(file, before), f"byte 0x{data[error.start]:02x} is not UTF-8", "save the file as UTF-8")
        return None
    unprintable = _UNPRINTABLE.search(text)
    if unprintable:
        place = _place(file, text[: unprintable.start()])
        problems.add(place, f"the character U+{ord(unprintable.group()):04X} is not allowed in YAML")
        return None
    return text


def _place(file: str, before: str) -> Mark:
    lines = re.split("\r\n|[\n\r\x85\u2028\u2029]", before)
    return Mark(file, len(lines), len(lines[-1]) + 1)


def parse(text: str, file: str, problems: Problems, *, at: Mark | None = None, loader: Any = None) -> Node | None:
    """The tree of one YAML document; None, with problems, if it is not YAML.

    file: name in the marks. at: replaces every mark, for text outside a file.
    """
    builder = _Builder(file, problems, at)
    # Events, not yaml.compose, which recurses in C without limit, and hides tags and duplicate keys.
    try:
        for event in yaml.parse(text, Loader=loader or _Loader):
            if not builder.take(event):
                return None
    except yaml.MarkedYAMLError as error:
        said = in_words(text, error)
        mark, last = builder.mark(said.mark), _place(file, text.rstrip())
        mark = mark if at or mark <= last else last
        if _is_tab(text, error):
            problems.add(mark, "a tab, where YAML takes only spaces", "indent with spaces")
            return None
        problems.add(mark, f"not valid YAML: {said.message}", said.remedy)
        return None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # Raised by PyYAML's readers and Python scanner for escapes and directives without a valid character or number.
        problems.add(builder.mark(None), f"not valid YAML: {' '.join(str(error).split())}")
        return None
    if builder.root is None:
        problems.add(builder.mark(None), "the file is empty")
    return builder.root


def _is_tab(text: str, error: yaml.MarkedYAMLError) -> bool:
    """Whether the parser stopped at a tab used as indentation or at the start of a word. Its message often does not say
    so."""
    place = error.problem_mark
    lines = text.splitlines()
    if "tab character" in (error.problem or ""):
        return True
    return place is not None and place.line < len(lines) and lines[place.line][place.column : place.column + 1] == "\t"


@dataclass
class _Frame:
    """A list or map that is still open, with its size so far."""

    is_map: bool
    mark: Mark
    anchor: str | None
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Mark] = field(default_factory=dict)
    key: tuple[str, Mark] | None = None
    size: int = 1
    height: int = 1


class _Builder:
    """Builds the tree from parser events, without recursion."""

    def __init__(self, file: str, problems: Problems, at: Mark | None) -> None:
        self.file = file
        self.problems = problems
        self.at = at
        self.root: Node | None = None
        self.stack: list[_Frame] = []
        self.anchors: dict[str, tuple[Node, int, int] | None] = {}

    def mark(self, mark: Any) -> Mark:
        if self.at is not None:
            return self.at
        return Mark(self.file, mark.line + 1, mark.column + 1) if mark else Mark(self.file, 1, 1)

    def take(self, event: yaml.Event) -> bool:
        """Process an event. Returns False if parsing should stop."""
        mark = self.mark(event.start_mark)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, mark)
        if isinstance(event, yaml.CollectionStartEvent):
            self._refuse_tag(event.tag, mark)
            if event.anchor:
                self.anchors[event.anchor] = None  # still open: an alias inside would be endless
            if len(self.stack) >= MAX_DEPTH:
                self.problems.add(mark, f"nested deeper than {MAX_DEPTH} levels")
                return False
            if self._awaits_key():
                self.problems.add(mark, "a list or map cannot be a key")
                return False
            self.stack.append(_Frame(isinstance(event, yaml.MappingStartEvent), mark, event.anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            frame = self.stack.pop()
            node: Node = (
                YamlMap(frame.entries, frame.keys, frame.mark)
                if frame.is_map
                else YamlList(tuple(frame.items), frame.mark)
            )
            return self._put(node, frame.size, frame.height, frame.anchor)
        elif isinstance(event, yaml.AliasEvent):
            known = self.anchors.get(str(event.anchor))
            if known is None:
                inside = event.anchor in self.anchors
                reason = "is inside the value it refers to" if inside else "refers to nothing above it"
                self.problems.add(mark, f"the alias *{event.anchor} {reason}")
                return False
            if self._awaits_key():
                self.problems.add(mark, "an alias cannot be a key")
                return False
            return self._put(known[0], known[1], known[2], None)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            self.problems.add(mark, "a second YAML document", "one file holds one workflow")
            return False
        return True

    def _awaits_key(self) -> bool:
        return bool(self.stack) and self.stack[-1].is_map and self.stack[-1].key is None

    def _refuse_tag(self, tag: str | None, mark: Mark) -> None:
        if tag not in (None, "!"):
            self.problems.add(mark, f"YAML tags are not supported ({tag})", "leave the tag out; quote what is text")

    def _scalar(self, event: yaml.ScalarEvent, mark: Mark) -> bool:
        self._refuse_tag(event.tag, mark)
        if self._awaits_key():
            key = event.value
            frame = self.stack[-1]
            if key == "<<" and event.implicit[0]:
                self.problems.add(mark, "merge keys (<<) are not supported", "put what is shared into a file to extend")
            elif key in frame.keys:
                first = frame.keys[key]
                self.problems.add(mark, f"the key {key!r} is written twice", f"first at {first}")
            frame.key = (key, mark)
            return True
        is_plain = event.implicit[0] and not event.tag
        node = plain(event.value, mark, self.problems) if is_plain else YamlScalar(event.value, mark)
        return self._put(node, 1, 0, event.anchor)

    def _put(self, node: Node, size: int, height: int, anchor: str | None) -> bool:
        if anchor:
            self.anchors[anchor] = (node, size, height)
        if not self.stack:
            self.root = node
            return True
        frame = self.stack[-1]
        frame.size += size
        frame.height = max(frame.height, height + 1)
        if frame.size > MAX_NODES:
            self.problems.add(node.mark, f"more than {MAX_NODES} values, aliases expanded")
            return False
        if frame.height > MAX_DEPTH:
            self.problems.add(node.mark, f"nested deeper than {MAX_DEPTH} levels, aliases expanded")
            return False
        if not frame.is_map:
            frame.items.append(node)
        elif frame.key is not None:
            key, mark = frame.key
            frame.key = None
            if key not in frame.entries:
                frame.entries[key] = node
                frame.keys[key] = mark
        return True
