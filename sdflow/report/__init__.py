"""Prints results: tables for people, JSON with a `format_version` for programs. Standard output only."""

from sdflow.report.build import print_bake, print_explanation, print_plan, print_run, print_validation
from sdflow.report.cache import (
    print_cache_verification,
    print_collection,
    print_engines,
    print_entries,
    print_pulled,
    print_pushed,
    print_remote_entries,
    print_swept,
)
from sdflow.report.machine import print_diagnoses, print_passes, print_targets
from sdflow.report.verify import print_verifications
from sdflow.units import parse_age, parse_size

__all__ = [
    "parse_age",
    "parse_size",
    "print_bake",
    "print_cache_verification",
    "print_collection",
    "print_diagnoses",
    "print_engines",
    "print_entries",
    "print_explanation",
    "print_passes",
    "print_plan",
    "print_pulled",
    "print_pushed",
    "print_remote_entries",
    "print_run",
    "print_swept",
    "print_targets",
    "print_validation",
    "print_verifications",
]
