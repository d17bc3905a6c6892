"""The report of an audit, for whoever reads it: a page (html), a program (json_file), a pipeline (junit), a terminal.

The one thing to know: all four say the same, from `result.Report` alone, and share their words (`words`). What servers sent
is made harmless in each of them; keys are taken out before any of them sees the report (`redact`).
"""
