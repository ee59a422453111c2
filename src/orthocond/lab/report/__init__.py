"""The report on runs: the paper's tables and figures, and how certain the differences are.

`write_report` is what ``orthocond report`` calls; `read_report` gives the same content to a script.
"""

from orthocond.lab.report.content import Report, Section, read_report
from orthocond.lab.report.write import FORMATS, watch_report, write_report

__all__ = ["FORMATS", "Report", "Section", "read_report", "watch_report", "write_report"]
