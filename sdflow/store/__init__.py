"""Content-addressed cache of files, digests and actions. It knows nothing about models or passes."""

from sdflow.store.cache import Cache, CorruptArtifactError
from sdflow.store.gc import Entry, GcReport
from sdflow.store.notes import Failure
from sdflow.store.objects import VerifyReport
from sdflow.store.publish import Staging
from sdflow.store.stat_cache import StatCache

__all__ = ["Cache", "CorruptArtifactError", "Entry", "Failure", "GcReport", "Staging", "StatCache", "VerifyReport"]
