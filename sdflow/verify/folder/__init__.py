"""Compare all files of a pipeline folder other than graphs and weights with its checkpoint.

Each file equals the checkpoint's, or differs as the table `on_purpose` allows. Then both are run: texts through both
tokenizers, and the schedule of every scheduler that a pipeline supports. This shares no code with the assembly.
"""

from sdflow.verify.folder.hold import VERSION, FolderRequest, Held, hold_folder
from sdflow.verify.folder.source import Source, source_of

__all__ = ["VERSION", "FolderRequest", "Held", "Source", "hold_folder", "source_of"]
