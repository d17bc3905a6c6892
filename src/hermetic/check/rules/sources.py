"""Sources: what is said of one node in two ways.

The one thing to know: where two sources disagree every rule that needs the fact says unknown, so one wrong file hides findings. This rule says which
sources they are. What was measured (speeds, counts) changes from one reading to the next and is no disagreement.
"""

from __future__ import annotations

from hermetic.check import facts
from hermetic.check.facts import Sheet
from hermetic.check.rules.registry import Answer, rule

MOST = 5  # facts that one message names


@rule(
    "SRC001",
    "the sources of a node disagree",
    severity="warning",
    why="One of them is old, or of another node. Rules that need the fact cannot be answered until it is known which.",
    fix="Read the node again from its URL, and leave out files of an earlier start; name sources that belong to different nodes (NAME=SOURCE).",
    source="The sources themselves.",
)
def disagree(node: Sheet) -> Answer:
    found = []
    for name, seen in node.facts():
        if (
            name not in facts.FACTS
            or facts.FACTS[name].several is not None
            or len(node.values(facts.FACTS[name])) < 2
        ):
            continue
        told = ", ".join(f"{one.value} ({one.where})" for one in seen[:MOST])
        found.append(f"{facts.FACTS[name].says}: {told}")
    if not found:
        return None
    more = f"; and {len(found) - MOST} more" if len(found) > MOST else ""
    return f"its sources disagree on {'; '.join(found[:MOST])}{more}"
