"""Verify, for any target and on a CPU, that an artifact computes what the PyTorch model computes."""

from sdflow.verify.check import Verified
from sdflow.verify.report.html import write_html, write_reports
from sdflow.verify.result import Verification
from sdflow.verify.subject import Subject, own_image, subject_of_folder
from sdflow.verify.with_refiner import verify

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
