"""Files that drawing reads and writes: the pipeline folder, images, their text."""
