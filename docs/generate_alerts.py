"""Write docs/operations/alerts.md from the rules of ``observe.findings``: `make docs`.

The page is checked in, and tests/docs/test_alerts.py fails when it is not what this prints.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from holdfast.observe.findings import RULES

PAGE = Path(__file__).parent / "operations" / "alerts.md"
_NOTE = "Generated from RULES in src/holdfast/observe/findings.py by `make docs`: change that."
_HEAD = f"""<!-- {_NOTE} -->
# What is found wrong with a run

`holdfast report` judges a run by these rules, the worst first. Each finding has a `cause` (the name
of the rule), a `severity`, the `evidence` with figures, the moment `since_s` (null where it is not
known) and a `remedy`. `--json` has them under `findings`.

* *critical*: what was promised is at risk. *warning*: it costs time. *notice*: nothing is at risk.
* Who is slow is told against the median of all ranks, for the same bytes, and only if it was so in
  three of the last five saves of the newest start. A wait is the last one's to answer for, never
  the one's who waits, where the same rank is the last of the last ten saves more often than chance
  explains. Of writing and the fsync at its end the one is named that explains more.
  What copies and writes slowly, or describes slowly and comes late, lacks CPU or memory.
  Where processes of that host waited for a CPU or for I/O more than those of others (PSI), the
  sentence says so.
* `holdfast top` shows them while a run trains, judged by the newest 50,000 records, of each host as
  many; `holdfast report` judges a run that did not close by the present moment, too.
* `holdfast.observe.findings.find(report, now_s)` is a pure function of a report, as
  `holdfast.observe.report_builder.read_report` makes it.
"""


def render() -> str:
    """Returns the page."""
    rules = "\n".join(
        f"\n## `{rule.name}`\n\n*{rule.severity}*: {rule.when}. {rule.remedy}" for rule in RULES
    )
    return f"{_HEAD}{rules}\n"


if __name__ == "__main__":
    PAGE.write_text(render())
