"""Everything in a pipeline folder that is no graph and no weight, held to the checkpoint that it was built from.

Each file is the checkpoint's, or differs from it by what the assembly does on purpose: `on_purpose` is the table of that. Then
both are tried: texts through both tokenizers, and the schedule of every scheduler that a pipeline may be given. Nothing of
what puts a folder together takes part.
"""

from sdflow.verify.folder.hold import VERSION, FolderRequest, Held, hold_folder
from sdflow.verify.folder.source import Source, source_of

__all__ = ["VERSION", "FolderRequest", "Held", "Source", "hold_folder", "source_of"]
