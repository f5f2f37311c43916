"""The report of a verification: an HTML page, plots, JSON."""
