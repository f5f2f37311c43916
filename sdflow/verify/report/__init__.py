"""The report of a verification: a page, plots, JSON."""
