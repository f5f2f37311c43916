"""Read DirectML's kernels from the Windows wheel on any machine, without running it.

ONNX Runtime keeps them in one constant array (`operatorRegistrationInformationTable` in
core/providers/dml/DmlExecutionProvider/src/Operators/OperatorRegistration.cpp), which is in the library as linked:
name, first version, domain, names of the type constraints, and a bit set of types for each. The array is located by a
name that only it points to. The bits' meaning is checked against operators whose types the standard fixes, with an
error if ONNX Runtime has changed them.
"""

from __future__ import annotations

import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = "onnxruntime/capi/onnxruntime_pybind11_state.pyd"
RECORD = 160
NAME, SINCE, DOMAIN, CONSTRAINTS, TYPES = 0, 8, 16, 80, 96
LANDMARK = "NhwcConv"
"""An operator that no other table of the library names: one pointer to it, in the array."""

# enum class SupportedTensorDataTypes: 1 << number. Above 15: complex numbers and sequences, which no graph here has.
WORDS = "undefined float uint4 int4 uint8 int8 uint16 int16 int32 int64 string bool float16 double uint32 uint64"
BITS = WORDS.split()
PLAIN = frozenset(BITS) - {"undefined", "uint4", "int4", "string"}
KNOWN = {"Not": {"bool"}, "Cast": PLAIN, "Conv": {"float", "float16"}, "Erf": {"float", "float16"}}
"""Operators whose types are known, each: the first constraint of its newest kernel."""


@dataclass(frozen=True)
class Library:
    """A Windows library (PE, 64 bits) as it lies in its file. base: the address that its pointers count from."""

    data: bytes
    base: int
    sections: tuple[tuple[int, int, int], ...]  # address, place in the file, size

    @classmethod
    def of(cls, data: bytes) -> Library:
        if data[:2] != b"MZ":
            raise SystemExit(f"{LIBRARY} is no Windows library")
        header = struct.unpack_from("<I", data, 0x3C)[0]
        count, optional = (struct.unpack_from("<H", data, header + place)[0] for place in (6, 20))
        sections = []
        for index in range(count):
            _, address, size, place = struct.unpack_from("<4I", data, header + 24 + optional + 40 * index + 8)
            sections.append((address, place, size))
        return cls(data, struct.unpack_from("<Q", data, header + 48)[0], tuple(sections))

    def place(self, address: int) -> int | None:
        """Where in the file an address lies; None for one that is not of this library."""
        for start, place, size in self.sections:
            if start <= address - self.base < start + size:
                return address - self.base - start + place
        return None

    def address(self, place: int) -> int | None:
        for start, first, size in self.sections:
            if first <= place < first + size:
                return place - first + start + self.base
        return None

    def number(self, place: int) -> int:
        return int(struct.unpack_from("<Q", self.data, place)[0])

    def text(self, pointer: int) -> str | None:
        """The word that the pointer at this place points to; None where there is none."""
        place = self.place(self.number(pointer))
        if place is None:
            return None
        found = re.match(rb"([A-Za-z0-9_.]{0,80})\0", self.data[place : place + 81])
        return found[1].decode() if found else None


def directml_kernels(wheel: Path) -> list[Any]:
    """The kernels as `kernel_tables.write_table` takes them: domain, name, first, last, {constraint: types}.

    DirectML registers each version on its own, to an open end: as ONNX Runtime reads it, for that version alone.
    """
    with zipfile.ZipFile(wheel) as archive:
        library = Library.of(archive.read(LIBRARY))
    rows = list(records(library))
    newest = {(domain, name): types for domain, name, _, types in rows}
    for name, wanted in KNOWN.items():
        found = next(iter(newest.get(("", name), {}).values()), set())
        if found != wanted:
            raise SystemExit(f"{name} would take {sorted(found)}, not {sorted(wanted)}: look at the enum again")
    return [[domain, name, since, 2**31 - 1, types] for domain, name, since, types in rows]


def records(library: Library) -> Iterator[tuple[str, str, int, dict[str, set[str]]]]:
    """The array's records in its order: domain, operator, first version, types of each constraint."""
    word = library.data.find(f"\0{LANDMARK}\0".encode())
    address = None if word < 0 else library.address(word + 1)
    place = -1 if address is None else library.data.find(struct.pack("<Q", address))
    if place < 0:
        raise SystemExit(f"no table of operators in {LIBRARY}: nothing points to {LANDMARK}")
    while record(library, place - RECORD):
        place -= RECORD
    while found := record(library, place):
        yield found
        place += RECORD


def record(library: Library, place: int) -> tuple[str, str, int, dict[str, set[str]]] | None:
    """The record at a place in the file; None where there is none any more."""
    name, domain = library.text(place + NAME), library.text(place + DOMAIN)
    since = library.number(place + SINCE) & 0xFFFFFFFF
    constraints, sets = library.number(place + CONSTRAINTS), library.number(place + TYPES)
    if not name or domain is None or not 0 < since < 64 or constraints > 16 or sets > 64:
        return None
    names = [library.text(library.place(library.number(place + CONSTRAINTS + 8)) + 8 * i) for i in range(constraints)]  # type: ignore[operator]
    bits = [
        library.number(library.place(library.number(place + TYPES + 8)) + 8 * i) for i in range(min(sets, constraints))
    ]  # type: ignore[operator]
    return domain, name, since, {str(n): typed(mask) for n, mask in zip(names, bits, strict=False)}


def typed(mask: int) -> set[str]:
    return {name for bit, name in enumerate(BITS) if mask >> bit & 1 and name in PLAIN}
