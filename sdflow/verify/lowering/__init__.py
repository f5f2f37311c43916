"""Runs the graph of any target on a CPU: its contrib operators are replaced by standard ones, in float32 with 16 bits kept
where the artifact has them."""

from sdflow.verify.lowering.lower import OPERATORS, Lowered, before_angles, lower
from sdflow.verify.lowering.pieces import PieceSession
from sdflow.verify.lowering.session import session_of

__all__ = ["OPERATORS", "Lowered", "PieceSession", "before_angles", "lower", "session_of"]
