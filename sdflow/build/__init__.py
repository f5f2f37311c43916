"""Build a pipeline folder from a validated workflow: plan, run the steps, assemble."""
