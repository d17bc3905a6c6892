"""A recording of two real workers in this process, as lines that a test can change; and ways to change them that matter."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hermetic.handoff.trace import recording, start
from hermetic.lab.pair import LabPair

Line = dict[str, Any]
Lines = list[Line]


def record(model: str, path: Path, only_one: bool = False) -> Lines:
    """Six requests through three slots; one page is refused once, and one request is cancelled in the middle of landing.

    `only_one`: one request that is undisturbed, instead."""
    start(str(path))
    with recording(str(path)):
        pair = LabPair(model, dtype="float32", threads=1, slots=3)
        if only_one:
            pair.ask(list(range(1, 60)), max_tokens=8)
        else:
            _disturbed(pair)
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def _disturbed(pair: LabPair) -> None:
    verify, refuse = pair.decode._verify_landed, [True]

    def refusing_once(*pages: np.ndarray) -> np.ndarray:
        good = verify(*pages)
        if refuse and len(good):
            refuse.clear()
            good[0] = False
        return good

    with mock.patch.object(pair.decode, "_verify_landed", refusing_once):
        for i in range(4):
            pair.submit([7 * i + j for j in range(1, 60 + 9 * i)], max_tokens=8)
        pair.run()
        left = pair.submit(list(range(1, 150)), max_tokens=8)
        pair.run(lambda: pair.decode.landing.pages_landed > 22)
        pair.cancel(left)
        pair.submit(list(range(50, 90)), max_tokens=20)
        pair.run()


def save(lines: Lines, path: Path) -> Path:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return path


# ----------------------------------------------------------------------------------------- changes that matter
Change = Callable[[Lines, random.Random], None]
"""Changes the lines in one place of many; the places are those where it must be found."""

CHANGES: dict[str, tuple[Change, str]] = {}
"""Name -> the change, and what is said of it (a regular expression)."""


def change(name: str, said: str) -> Callable[[Change], Change]:
    def add(made: Change) -> Change:
        CHANGES[name] = made, said
        return made

    return add


def does(line: Line, what: str) -> list[list[Any]]:
    return [action for action in line.get("do", ()) if action[0] == what]


def at(lines: Lines, wanted: Callable[[Line], object]) -> list[int]:
    found = [i for i, line in enumerate(lines) if wanted(line)]
    assert found, "the recording has no such place"
    return found


def says(line: Line, message: str) -> bool:
    return any(sent[1][0] == message for sent in does(line, "send"))


@change("a completed request is reported as something else", r"reports (Failed|Aborted|Bogus) by")
def outcome_of_another(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: any(d[1] == "Completed" for d in does(x, "report"))))]
    does(line, "report")[0][1:] = [rng.choice(["Failed", "Aborted", "Bogus"]), "code", "reason"]


@change("an aborted request is reported as completed", r"reports Completed by|allowed|Failed or Aborted")
def completed_anyway(lines: Lines, rng: random.Random) -> None:
    reports = at(lines, lambda x: any(d[1] not in ("Completed",) for d in does(x, "report")))
    does(lines[rng.choice(reports)], "report")[0][1] = "Completed"


@change("a lease of a request that is over is never closed", r"still leased by|takes page .* as free")
def lease_left(lines: Lines, rng: random.Random) -> None:
    roles = {x["p"]: x["role"] for x in lines if x["k"] == "process"}
    drops = at(
        lines,
        lambda x: x["k"] == "pages" and x["what"] == "drop" and roles[x["p"]] == "prefill" and x.get("owner"),
    )
    last = {(lines[i]["p"], lines[i]["owner"], page): i for i in drops for page in lines[i]["pages"]}
    del lines[rng.choice(list(last.values()))]


@change("something follows the end of its process", r"a record after the end")
def after_the_end(lines: Lines, rng: random.Random) -> None:
    end = rng.choice(at(lines, lambda x: x["k"] == "end"))
    lines.insert(end + 1, {"k": "end", "p": lines[end]["p"]})


@change("a segment is made twice", r"is made a second time")
def segment_twice(lines: Lines, rng: random.Random) -> None:
    made = rng.choice(at(lines, lambda x: x["k"] == "segment"))
    lines.insert(made + 1, dict(lines[made]))


@change("drained is said before a write has ended", r"while write .* may still put bytes")
def drained_early(lines: Lines, rng: random.Random) -> None:
    drained = rng.choice(at(lines, lambda x: says(x, "Drained")))
    key, p = lines[drained]["key"], lines[drained]["p"]
    ended = at(lines, lambda x: (x["k"], x.get("key"), x["p"]) == ("written", key, p))
    lines.insert(rng.choice(ended), lines.pop(drained) | {"b": "SENDING"})


@change("one use of a slot is written twice", r"is written twice|was not given|once more into")
def slot_twice(lines: Lines, rng: random.Random) -> None:
    writes = at(lines, lambda x: does(x, "write"))
    last = rng.choice(writes[1:])
    earlier = [i for i in writes if i < last and lines[i]["p"] == lines[last]["p"]]
    used = does(lines[rng.choice(earlier)], "write")[0][2][0]
    does(lines[last], "write")[0][2][0][1:] = used[1:]


@change("a landed that nobody said", r"Landed is received, which prefill did not send")
def forged_landed(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: x.get("e") == "Landed" and does(x, "copy")))]
    line["m"][1] += 1


@change("prefill says that a page has landed which it did not write", r"announcement \d+|landed \d+:")
def landed_unwritten(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: says(x, "Landed") and x["e"] == "wrote"))]
    sent = next(sent for sent in does(line, "send") if sent[1][0] == "Landed")
    sent[1][2][0][0] += 1


@change("a page that failed counts as good", r"what its verification said|verified|good")
def verified_anyway(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: x["k"] == "verified" and not all(p[3] for p in x["pages"])))]
    for page in line["pages"]:
        page[3] = True


@change("a page that was good counts as failed", r"is good")
def refused_anyway(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: x["k"] == "verified"))]
    for page in line["pages"]:
        page[3] = False


@change("slots go back in the middle of landing", r"go back .* may still write into them")
def slots_early(lines: Lines, rng: random.Random) -> None:
    """With the next credit, all that this ticket holds."""
    granted = rng.choice(at(lines, lambda x: x["k"] == "slots" and x["what"] == "grant"))
    grant = lines[granted]
    lines.insert(granted + 1, grant | {"what": "release"})


@change("a slot is granted while it is another's", r"while it is granted to|is granted as use")
def slot_of_another(lines: Lines, rng: random.Random) -> None:
    grants = at(lines, lambda x: x["k"] == "slots" and x["what"] == "grant")
    lines[rng.choice(grants)]["uses"][0][1] += 1


@change("decode believes complete with other counts", r"did not send|\(I4\)|complete")
def other_counts(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: x.get("e") == "Complete" and x["s"] == x["b"]))]
    line["m"][2] += 1


@change("complete is said before all is announced", r"complete, \d+ batches")
def complete_early(lines: Lines, rng: random.Random) -> None:
    complete = lines[rng.choice(at(lines, lambda x: says(x, "Complete")))]
    first = next(x for x in lines if x.get("key") == complete["key"] and does(x, "write"))
    sent = next(sent for sent in does(complete, "send") if sent[1][0] == "Complete")
    complete["do"].remove(sent)
    first["do"].append(sent)


@change("a page is taken that somebody holds", r"takes page .* as free")
def page_of_another(lines: Lines, rng: random.Random) -> None:
    takes = at(lines, lambda x: x["k"] == "pages" and x["what"] == "take")
    second = rng.choice([i for i in takes if lines[i - 1] in [lines[j] for j in takes]])
    lines[second]["pages"][0] = lines[second - 1]["pages"][0]


@change("a source page is given up under its write", r"is given up while write \d+ reads it")
def source_freed(lines: Lines, rng: random.Random) -> None:
    write = rng.choice(at(lines, lambda x: x["k"] == "write"))
    page, key = lines[write]["pages"][0][1], lines[write]["key"]
    owner = key[:12] + key[key.index("/") :]
    drop = {
        "k": "pages",
        "p": lines[write]["p"],
        "what": "drop",
        "kind": "SEND",
        "pages": [page],
        "owner": owner,
    }
    lines.insert(write + 1, drop)


@change("a write reads a page that is not leased for it", r"without a send lease")
def source_of_another(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: x["k"] == "write"))]
    line["pages"][0][1] = 63


@change("a page is copied to where another request's is", r"does not hold for that|of its table")
def copied_astray(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: x["k"] == "copying"))]
    line["pages"][0][2] = 63


@change("a request enters without its last page", r"while page \[\d.*\] is not verified \(I1\)|\(I4\)")
def enters_early(lines: Lines, rng: random.Random) -> None:
    entered = lines[rng.choice(at(lines, lambda x: does(x, "enter") and x["e"] == "copied"))]
    mine = at(lines, lambda x: x.get("e") == "copied" and x["key"] == entered["key"] and x["s"] == "LANDING")
    lines[rng.choice(mine)].update(s="ENTERED", do=entered["do"])


@change("one half reports twice", r"reports .* after")
def reports_twice(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: does(x, "report")))]
    line["do"].append(does(line, "report")[0])


@change("a machine moves where its table does not lead", r"--\w+--> |which has no row|is said to be")
def no_row(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: x["k"] == "step"))]
    line["s"] = "HAS_GRANT" if line["s"] != "HAS_GRANT" else "STUCK"


@change("prefill has completed without an ack", r"while its sender is open")
def completed_alone(lines: Lines, rng: random.Random) -> None:
    line = lines[rng.choice(at(lines, lambda x: x.get("e") == "Ack" and does(x, "report")))]
    line["e"], line["a"] = "fenced", ["it says so"]
    del line["m"]


@change("a ticket begins again after its end", r"has been here|was over|second pair")
def begins_again(lines: Lines, rng: random.Random) -> None:
    over = rng.choice(at(lines, lambda x: does(x, "forget")))
    begin = next(
        x for x in lines if x["k"] == "begin" and (x["key"], x["p"]) == (lines[over]["key"], lines[over]["p"])
    )
    lines.insert(over + 1, begin)


def missed(line: Line) -> bool:
    """Whether a recording without this line cannot be one of the protocol."""
    match line["k"]:
        case "step":
            idle = line["b"] == line["s"] and not line.get("do")
            return not (idle and line["e"] in ("Credit", "nudge", "Complete", "computed"))
        case "pages":
            return line["what"] in ("take", "share")
        case kind:
            return kind in ("begin", "segment", "opened", "slots", "write", "written", "copying", "verified")


@change("a record is missing", r".")
def removed(lines: Lines, rng: random.Random) -> None:
    del lines[rng.choice(at(lines, missed))]
