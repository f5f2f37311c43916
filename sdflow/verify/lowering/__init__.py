"""Run the graph of any target on a CPU: contrib operators are replaced by standard ones, computed in float32, with
results rounded to 16 bits where the artifact has them."""

from sdflow.verify.lowering.lower import OPERATORS, Lowered, before_angles, lower
from sdflow.verify.lowering.pieces import PieceSession
from sdflow.verify.lowering.session import session_of

__all__ = ["OPERATORS", "Lowered", "PieceSession", "before_angles", "lower", "session_of"]
