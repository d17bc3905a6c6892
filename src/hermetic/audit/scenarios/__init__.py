"""What an audit does to a server: each scenario plays one way in which the field has seen answers go to the wrong people.

The one thing to know: importing this package fills SCENARIOS; the modules are grouped by what they play with.
"""

from __future__ import annotations

from hermetic.audit.scenarios import (
    aborts,
    capacity,
    fields,
    mixing,
    prefixes,
    sessions,
    timing,
)
from hermetic.audit.scenarios.registry import NEEDS, PROFILES, SCENARIOS, Need, Scenario, chosen, scenario

_THEMES = (mixing, prefixes, aborts, fields, sessions, timing, capacity)  # importing them is what registers

__all__ = ["NEEDS", "PROFILES", "SCENARIOS", "Need", "Scenario", "chosen", "scenario"]
