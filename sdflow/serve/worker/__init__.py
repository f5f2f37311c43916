"""The process that draws, and the front's view of it."""
