"""The benchmarks' index: what is written from the results is current, and each claim's command can be run."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.tables import claims, results, written

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_tables_are_those_of_the_results() -> None:
    """`python benchmarks/tables.py` writes them."""
    stale = [str(path) for path, text in written() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    assert stale == []


def test_a_claims_command_names_a_script_that_takes_its_options() -> None:
    for claim in claims():
        for script, rest in re.findall(r"^python (\S+\.py)(.*)", claim.command):
            source = (BENCHMARKS.parent / script).read_text(encoding="utf-8")
            without_values = re.sub(r"'[^']*'", "", rest)
            assert [each for each in re.findall(r"--[a-z0-9-]+", without_values) if f'"{each}"' not in source] == [], (
                claim.id
            )


def test_every_figure_is_of_a_claim_and_every_table_has_a_cell_for_each_column() -> None:
    known = {claim.id for claim in claims()}
    assert len(known) == len(claims())
    for path, found in results().items():
        assert (found.commit or "unrecorded") == path.stem
        assert {figure.claim for figure in found.figures} <= known, path
        for table in found.tables:
            assert {len(row) for row in table.rows} == {len(table.columns)}, table.title


def test_every_script_measures_a_claim_or_serves_one_that_does() -> None:
    """A script that no claim, no other script, no test and no page needs is one to delete."""
    scripts = set(BENCHMARKS.glob("*/*.py"))
    pages = [*BENCHMARKS.parent.glob("docs/*.md"), BENCHMARKS / "README.md", *BENCHMARKS.parent.glob("tests/**/*.py")]
    text = {path: path.read_text(encoding="utf-8") for path in (*scripts, *pages)}
    for script in scripts:
        names = (f"{script.parent.name}/{script.name}", f"benchmarks.{script.parent.name}.{script.stem} ")
        needed = [path for path, content in text.items() if path != script and any(name in content for name in names)]
        assert needed, script
