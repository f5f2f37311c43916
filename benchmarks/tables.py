"""Write the tables of this folder from its results, and record new results.

    python benchmarks/tables.py                                        # write README.md, RESULTS.md and */RESULTS.md anew
    python benchmarks/tables.py --check                                # say which of them are not current, and end with 1
    python benchmarks/tables.py --record build/first "80 s, 0.18x" --machine 2-cores --met

claims.json: claims with the command that measures each, and its goal. results/MACHINE/COMMIT.json: measurements on a
machine at a commit, `unrecorded` if the commit is unknown.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

HERE = Path(__file__).parent
UNRECORDED = "unrecorded"
BEGIN = "<!-- written by tables.py from here on -->\n"


@dataclass(frozen=True)
class Claim:
    """id: SUBJECT/NAME. goal: empty without one. headline: what RESULTS.md calls it; None where it is not there."""

    id: str
    claim: str
    command: str
    goal: str = ""
    headline: str | None = None


@dataclass(frozen=True)
class Figure:
    """What was measured of a claim. met: whether that reaches the goal; None without a goal."""

    claim: str
    date: str
    figure: str
    met: bool | None = None


@dataclass(frozen=True)
class Table:
    """A table of figures. conditions: what a reader must know to compare them. command: empty where there is none any more."""

    subject: str
    title: str
    date: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    conditions: str = ""
    command: str = ""


@dataclass(frozen=True)
class Results:
    """What was measured on a machine at a commit. machine: its hardware and the versions of the packages there."""

    machine: str
    commit: str | None
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


CLAIMS, RESULTS = TypeAdapter(tuple[Claim, ...]), TypeAdapter(Results)


def claims() -> tuple[Claim, ...]:
    return CLAIMS.validate_json((HERE / "claims.json").read_bytes())


def results() -> dict[Path, Results]:
    """File -> what it holds, in the order of machines and commits."""
    return {path: RESULTS.validate_json(path.read_bytes()) for path in sorted(HERE.glob("results/*/*.json"))}


def latest(claim: Claim) -> tuple[str, str, Figure] | None:
    """Machine, commit and figure of the last measurement; None where there is none."""
    found = [
        (figure.date, path.stem != UNRECORDED, path.parent.name, path.stem, figure)
        for path, each in results().items()
        for figure in each.figures
        if figure.claim == claim.id
    ]
    if not found:
        return None
    *_, machine, commit, figure = max(found, key=lambda each: each[:2])
    return machine, commit, figure


def written() -> Iterator[tuple[Path, str]]:
    """Every file that is written, and its content."""
    measured = [(claim, latest(claim)) for claim in claims()]
    by_claim = [
        (
            claim.claim,
            f"`{claim.command}`",
            claim.goal,
            *(
                ("not measured", "", "")
                if last is None
                else (_judged(last[2]), last[2].date[:10], f"{last[0]}, {last[1]}")
            ),
        )
        for claim, last in measured
    ]
    readme = (HERE / "README.md").read_text(encoding="utf-8").partition(BEGIN)[0]
    columns = ("claim", "command", "goal", "latest figure", "date", "machine, commit")
    yield HERE / "README.md", readme + BEGIN + "\n" + "\n".join(_rows(columns, by_claim)) + "\n"

    headlines = [
        (claim.headline, last[2].figure, claim.goal, {True: "yes", False: "no", None: ""}[last[2].met], last[0])
        for claim, last in measured
        if claim.headline and last is not None
    ]
    lines = [
        "# Current figures",
        "",
        "Each row is a claim of the [index](README.md), with its command and date there. Missed goals are listed too.",
        "",
        *_rows(("", "figure", "goal", "met", "machine"), headlines),
        "",
        *(f"- **{name}**: {machine}" for name, machine in _machines().items()),
    ]
    yield HERE / "RESULTS.md", "\n".join(lines) + "\n"

    tables = [(path, table) for path, each in results().items() for table in each.tables]
    for subject in sorted({table.subject for _, table in tables}):
        lines = [
            f"# Measured: {subject}",
            "",
            "Written by `benchmarks/tables.py` from `results/`; [the index](../README.md).",
        ]
        for path, table in tables:
            if table.subject == subject:
                at = "commit not recorded" if path.stem == UNRECORDED else path.stem
                lines += [
                    "",
                    f"## {table.title}",
                    "",
                    f"{table.date[:10]}, {path.parent.name}, {at}. {table.conditions}".strip(),
                ]
                lines += ["", f"    {table.command}"] if table.command else []
                lines += ["", *_rows(table.columns, table.rows)]
        yield HERE / subject / "RESULTS.md", "\n".join(lines) + "\n"


def _judged(figure: Figure) -> str:
    return figure.figure + {True: " (met)", False: " (missed)", None: ""}[figure.met]


def _machines() -> dict[str, str]:
    return {path.parent.name: each.machine for path, each in results().items()}


def _rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def record(figure: Figure, machine: str) -> Path:
    """Add a figure of the present commit. Returns the file. Raises ValueError for a claim that is not there, or where the
    machine is a new one, whose description nobody has written."""
    if figure.claim not in {claim.id for claim in claims()}:
        raise ValueError(f"there is no claim {figure.claim} in claims.json")
    described = _machines().get(machine)
    if described is None:
        raise ValueError(f"there is no results/{machine}: make it with a file that says what the machine is")
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
    )
    path = HERE / "results" / machine / f"{commit.stdout.strip()}.json"
    before = results().get(path, Results(described, commit.stdout.strip()))
    after = Results(before.machine, before.commit, (*before.figures, figure), before.tables)
    path.write_bytes(RESULTS.dump_json(after, indent=1) + b"\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--record", nargs=2, metavar=("CLAIM", "FIGURE"))
    parser.add_argument("--machine")
    parser.add_argument("--met", action=argparse.BooleanOptionalAction)
    options = parser.parse_args()
    if options.record:
        try:
            now = datetime.now(UTC).isoformat(timespec="minutes")  # of two figures of a day, the later one counts
            print(record(Figure(options.record[0], now, options.record[1], options.met), options.machine))
        except ValueError as error:
            parser.error(str(error))
    stale = [(path, text) for path, text in written() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        print(path.relative_to(HERE))
        if not options.check:
            path.write_text(text, encoding="utf-8")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
