"""Print results on standard output: tables for people, JSON with a `format_version` for programs."""
