"""Files of inference: the pipeline folder, images, their metadata."""
