"""Proves that an artifact computes what the PyTorch model computes, for any target, on a CPU."""

from sdflow.verify.check import Subject, Verified, own_image, subject_of_folder, verify
from sdflow.verify.html import write_html, write_reports
from sdflow.verify.result import Verification

__all__ = [
    "Subject",
    "Verification",
    "Verified",
    "own_image",
    "subject_of_folder",
    "verify",
    "write_html",
    "write_reports",
]
