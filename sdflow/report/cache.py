"""Output of `sdflow cache`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from sdflow.report.output import print_json, print_table
from sdflow.report.units import megabytes
