"""The rules' pages: docs/rules/CODE.md and its index, and the same as plain text for `--explain CODE`.

The one thing to know: they are made from the rules themselves (`python -m hermetic.check.rules.pages docs/rules`), and a test compares them, so a page
is never about another rule than the one that runs.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from hermetic.check.rules import RULES
from hermetic.check.rules.registry import Rule
from hermetic.options import OptionError

FAMILIES = {
    "CAP": "Capacity: what is advertised, and what the pools hold",
    "VER": "Versions: what each release mends",
    "REL": "Release: when pages are given on after an abort",
    "DET": "Detection: checks of KV, and what they found",
    "PAIR": "Pairs: what must be the same in both halves",
    "VLLM": "vLLM: pool, lease and transfers",
    "PRX": "Proxies and routers",
    "EXP": "Exposure: who can reach what",
    "COV": "Coverage: detectors that look at nothing",
    "HRM": "Hermetic itself",
    "SRC": "Sources that disagree",
}
_PER = {
    "node": "each node", "pair": "each pair of a prefill and a decode node", "proxy": "each proxy or router", "deployment": "the deployment as a whole",
}  # fmt: skip
_ENGINES = {"sglang": "SGLang", "vllm": "vLLM", "hermetic": "Hermetic"}
_KINDS = {
    "nginx": "location of nginx", "envoy": "route of Envoy", "sglang-router": "sglang-router", "vllm-router": "vllm-router",
}  # fmt: skip
_WIDTH = 100
MOST_NEAR = 5  # codes that are written like an unknown one
_HEAD = (
    "These pages are made from the rules (`python -m hermetic.check.rules.pages docs/rules`); change the rule, not the page. "
    "`hermetic check --explain CODE` shows the same."
)


def ordered() -> list[Rule]:
    """All rules, in the order of families and codes."""
    return [RULES[code] for family in FAMILIES for code in sorted(RULES) if RULES[code].family == family]


def sections(rule: Rule) -> list[tuple[str, str]]:
    """What a page says, as (heading, paragraphs)."""
    found = [("What it means", f"{_sentence(rule.title)}\n\n{_asked(rule)}")]
    if decided := inspect.getdoc(rule.check):
        found.append(("How it is decided", decided))
    found += [("Why it matters", rule.why), ("How to fix it", rule.fix), ("Where it comes from", rule.source)]
    if rule.patches:
        numbers = ", ".join(f"`--has-patch {number}`" for number in rule.patches)
        found.append(
            (
                "In a patched build",
                f"{numbers} attests that a fix is in the build: the report then says so instead of finding it.",
            )
        )
    return found


def page(rule: Rule) -> str:
    """Markdown."""
    parts = [f"# {rule.code}: {rule.title}"]
    for heading, text in sections(rule):
        parts += [f"## {heading}", text]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """Markdown: all rules by family."""
    parts = ["# Rules of `hermetic check`", _HEAD]
    for family, title in FAMILIES.items():
        rows = [
            f"| [{rule.code}]({rule.code}.md) | {rule.severity} | {rule.title} |"
            for rule in ordered()
            if rule.family == family
        ]
        parts += [f"## {title}", "\n".join(["| code | severity | finding |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def explained(code: str) -> str:
    """A rule's page as plain text; a list for a family or the beginning of codes (`cap`, `DET00`), of all for an empty one or `all`.

    Raises OptionError for what no code begins with."""
    wanted = code.strip().upper()
    if wanted in RULES:
        return _explained(RULES[wanted])
    found = [rule for rule in ordered() if wanted == "ALL" or rule.code.startswith(wanted)]
    if found:
        return _listed(found)
    if near := _near(wanted):
        told = "; ".join(f"{rule.code} ({rule.title})" for rule in near)
        raise OptionError(f"--explain {code[:60]!r}: no rule begins so; near to it: {told}")
    raise OptionError(
        f"--explain {code[:60]!r}: no rule begins so. Families: {', '.join(FAMILIES)}; `--explain all` lists all rules"
    )


def _listed(rules: Sequence[Rule]) -> str:
    return "\n".join(f"{rule.code:8} {rule.severity:8} {rule.title}" for rule in rules)


def _near(wanted: str) -> list[Rule]:
    """Rules that may have been meant: of the family that it begins with, with a code that is written much like it, or with the word in their titles."""
    letters = wanted.rstrip("0123456789")
    found = {rule.code for rule in RULES.values() if rule.family == letters}
    found = found or set(difflib.get_close_matches(wanted, RULES, MOST_NEAR, cutoff=0.7))
    if not found and len(wanted) > 2:
        found = {rule.code for rule in RULES.values() if wanted in rule.title.upper()}
    return [rule for rule in ordered() if rule.code in found]


def _explained(rule: Rule) -> str:
    parts = [f"{rule.code} {rule.severity}: {rule.title}"]
    for heading, text in sections(rule):
        parts += [heading, "\n\n".join(_plain(paragraph) for paragraph in text.split("\n\n"))]
    return "\n\n".join(parts)


def pages() -> dict[str, str]:
    """Every file of docs/rules by its name."""
    return {"README.md": index(), **{f"{rule.code}.md": page(rule) for rule in RULES.values()}}


def write(folder: Path) -> None:
    """Write all pages, and remove those of rules that are no more."""
    folder.mkdir(parents=True, exist_ok=True)
    made = pages()
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")


def _sentence(title: str) -> str:
    return f"{title[:1].upper()}{title[1:]}."


def _asked(rule: Rule) -> str:
    of = [_ENGINES[engine] for engine in rule.engines] or (
        ["any engine"] if rule.per in ("node", "pair") else []
    )
    limits = "; ".join(" or ".join(some) for some in (of, rule.roles) if some)
    subject = f"each {' or '.join(_KINDS[kind] for kind in rule.kinds)}" if rule.kinds else _PER[rule.per]
    return f"Asked of {subject}{f' ({limits})' if limits else ''}. Severity: {rule.severity}."


def _plain(paragraph: str) -> str:
    """One paragraph or list for a terminal: without Markdown's backquotes, wrapped, indented."""
    lines = paragraph.replace("`", "").split("\n")
    if not any(line.startswith("- ") for line in lines):
        return textwrap.fill(
            " ".join(lines),
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    items: list[str] = []
    for line in lines:
        if line.startswith("- ") or not items:
            items.append(line)
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(
        textwrap.fill(
            item,
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for item in items
    )


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m hermetic.check.rules.pages FOLDER", file=sys.stderr)
        return 2
    write(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


__all__ = ["FAMILIES", "explained", "index", "ordered", "page", "pages", "sections", "write"]
