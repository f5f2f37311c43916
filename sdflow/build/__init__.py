"""From a checked workflow to a pipeline folder: plan, steps, their execution, assembly."""
