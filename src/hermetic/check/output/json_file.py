"""The report as JSON, and its schema: `python -m hermetic.check.output.json_file docs/check-schema.json`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from hermetic.check.result import Report
from hermetic.options import OptionError


def dump(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def load(path: Path) -> Report:
    """An earlier report. Raises OptionError."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
        if (odd := _odd(report)) is not None:
            raise msgspec.ValidationError(odd)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"{path} is no report of `hermetic check --format json` ({error}): make one first"
        ) from None
    return report


def _odd(report: Report) -> str | None:
    """What a report that this version wrote cannot be; other JSON may pass for one, since each of its fields may be left out."""
    if report.version != Report().version:
        return f"version {report.version}"
    if not report.nodes:
        return "it has no nodes"
    pools = [seen.get("value") for told in report.nodes for seen in told.facts.get("pool", ())]
    return next((f"a pool of {pool!r}" for pool in pools if type(pool) is not int), None)


def schema() -> bytes:
    return schema_of(Report, "What hermetic check --format json writes")


def schema_of(struct: type[msgspec.Struct], title: str) -> bytes:
    """JSON Schema, draft 2020-12."""
    (reference,), components = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **reference,
        "$defs": components,
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(schema())

__all__ = ["dump", "load", "schema", "schema_of"]
