"""Evidence by what an answer claims: its status, its end, its counts, its time.

The one thing to know: nothing here is left to chance. A count is only called wrong where no tokenizer and no template can
explain it, since what the server counts is not known in advance.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from hermetic.audit.evidence.gathering import Gathering
from hermetic.audit.exchange import Answer, Ask, shortened
from hermetic.audit.learned import Learned
from hermetic.audit.result import Coverage, Finding

WORDS_AT_LEAST = 24  # below so many words of a prompt its count of tokens says nothing
TOKENS_A_WORD = 0.7  # no tokenizer in use joins words: an English text has at least a token a word; with room
TEMPLATE_TOKENS = 2048  # a chat template with a long system prompt of its own
IDS_MORE = 64  # tokens that a server may add to token ids
FASTER = 4.0  # times the best rate of prefill that was measured here
GAP = 0.25  # seconds that it is faster at least
LONG_ENOUGH = 512  # tokens, below which a time says nothing
REMEMBERED = 4096  # requests
ENDED_BADLY = ("error", "abort", "aborted", "cancelled", "canceled")


class _Fast(NamedTuple):
    """An answer to so many tokens of a new prompt, and the seconds that it took."""

    scenario: str
    answer: Answer
    tokens: int
    took: float


class Semantics:
    """The semantics part of a judge."""

    def __init__(self, learned: Learned) -> None:
        self._learned = learned
        self._found = Gathering("semantics")
        self._counted: OrderedDict[int, tuple[int, Answer]] = OrderedDict()
        self._begun: OrderedDict[int, None] = OrderedDict()
        self._fast: list[_Fast] = []  # new prompts that were answered sooner than they could be read
        self._quickest = float("inf")  # seconds to the first token of the quickest short prompt
        # Tokens a second at best, of new prompts whose number of tokens has so many bits.
        self._read: dict[int, float] = {}

    # ------------------------------------------------------------------------------ every answer

    def seen(self, scenario: str, answer: Answer) -> None:
        """What any answer claims."""
        new = self._new_beginning(answer.ask)
        if answer.how != "answered":
            return
        self._found.compared[scenario] += 1
        self._end(scenario, answer)
        self._halves(scenario, answer)
        self._completion(scenario, answer)
        if answer.ask.raw is None:
            self._prompt_count(scenario, answer)
            self._time(scenario, answer, new)

    def _end(self, scenario: str, answer: Answer) -> None:
        if answer.error:
            self._add(scenario, answer, "hidden error", f"an answer with status 200 and finish reason {answer.finish!r} holds an error: {answer.error[:120]!r}",
                      "a client that reads the status and the finish reason takes a failure for an answer")  # fmt: skip
        elif answer.finish is None:
            self._add(scenario, answer, "no finish reason", "an answer ended without a finish reason",
                      "whether it is whole cannot be told: a failure looks the same")  # fmt: skip
        elif answer.finish == "length" and self._short(answer):
            self._add(scenario, answer, "short", f"finish reason 'length' after {answer.usage.completion} tokens of {answer.ask.max_tokens}",
                      "it had room for more, so something else ended it, and the finish reason hides what")  # fmt: skip

    def _short(self, answer: Answer) -> bool:
        prompt, completion = answer.usage.prompt, answer.usage.completion
        if prompt is None or completion is None or answer.ask.endpoint not in self._learned.edges:
            return False
        if not _bounded(answer.ask):
            return False
        room = 0.8 * self._learned.longest(answer.ask.endpoint)
        return completion < answer.ask.max_tokens and prompt + answer.ask.max_tokens < room

    def _halves(self, scenario: str, answer: Answer) -> None:
        half = answer.prefill
        if half is None:
            return
        if half.how in ("refused", "failed"):
            self._add(scenario, answer, "refused by one half", f"prefill said {half.how} ({half.error[:80]!r}), and decode answered with 200",
                      "what decode read was computed for nobody, or for somebody else", prefill=half.how)  # fmt: skip
        a, b = half.usage.prompt, answer.usage.prompt
        if a is not None and b is not None and a != b:
            self._add(scenario, answer, "halves differ", f"prefill counts {a} prompt tokens, decode {b}",
                      "decode reads KV for as many tokens as it counts; what prefill did not compute is somebody else's", prefill=a, decode=b)  # fmt: skip

    def _completion(self, scenario: str, answer: Answer) -> None:
        most, asked = answer.usage.completion, answer.ask.max_tokens
        streamed = sum(token.logprob is not None and bool(token.text) for token in answer.tokens)
        if _bounded(answer.ask) and asked > 0 and max(most or 0, streamed) > asked:
            self._add(scenario, answer, "more than asked", f"{max(most or 0, streamed)} completion tokens where at most {asked} were asked for",
                      "the tokens beyond, or the count, belong to another request or to no limit")  # fmt: skip

    def _prompt_count(self, scenario: str, answer: Answer) -> None:
        """None and 0 are no counts: an engine that was sent nothing, or does not count, says 0."""
        counted, ask = answer.usage.prompt, answer.ask
        if not counted:
            return
        least, most = self._least(ask), _most(ask)
        if counted < least and self._learned.counts_cached:
            self._add(scenario, answer, "fewer counted", f"usage counts {counted} prompt tokens, but at least {least} were sent",
                      "the answer was computed from less than the request, or the count is another's", least=least, counted=counted)  # fmt: skip
        elif counted > most:
            self._add(scenario, answer, "more counted", f"usage counts {counted} prompt tokens, but at most {most} were sent",
                      "the answer was computed from more than the request, or the count is another's", most=most, counted=counted)  # fmt: skip
        else:
            self._same_count(scenario, answer, counted)

    def _least(self, ask: Ask) -> int:
        """Tokens of prompt that a request has at least."""
        if not isinstance(ask.prompt, str):
            return len(ask.prompt)
        words = len(ask.prompt.split()) + len(ask.system.split())
        if words < WORDS_AT_LEAST:
            return 1
        return int(words * min(TOKENS_A_WORD, self._learned.tokens_per_word / 2))

    def _same_count(self, scenario: str, answer: Answer, counted: int) -> None:
        """The same text has the same number of tokens every time, if those from the cache are counted too."""
        ask = answer.ask
        if ask.extra or not self._learned.counts_cached:  # fields may change what the template makes of it
            return
        key = hash((ask.endpoint, ask.system, ask.prompt))
        before = self._counted.get(key)
        if before is None:
            self._counted[key] = counted, shortened(answer)
            if len(self._counted) > REMEMBERED:
                self._counted.popitem(last=False)
        elif before[0] != counted:
            self._add(scenario, answer, "counts differ", f"the same prompt counted {before[0]} tokens before and {counted} now",
                      "one of the counts is of another request, or one answer was computed from another prompt", before[1],
                      before=before[0], now=counted)  # fmt: skip

    def _new_beginning(self, ask: Ask) -> bool:
        """Whether no request until now began like this one: nothing of it can be cached."""
        key = hash((ask.system[:256], ask.prompt[:64] if isinstance(ask.prompt, tuple) else ask.prompt[:256]))
        new = key not in self._begun
        self._begun[key] = None
        self._begun.move_to_end(key)
        if len(self._begun) > 4 * REMEMBERED:
            self._begun.popitem(last=False)
        return new

    def _time(self, scenario: str, answer: Answer, new: bool) -> None:
        """A new prompt cannot be read much faster than any prompt was here, when nothing else ran."""
        tokens, took = self._sent(answer), _took(answer)
        if took <= 0.0:
            return
        if tokens < LONG_ENOUGH:  # an answer without a word may have computed nothing: Ollama's to no prompt
            self._quickest = min(self._quickest, took) if answer.text else self._quickest
        if not new or not answer.text:
            return
        bits = tokens.bit_length()
        self._read[bits] = max(self._read.get(bits, 0.0), tokens / took)
        if tokens >= LONG_ENOUGH and len(self._fast) < REMEMBERED and self._too_fast(tokens, took):
            self._fast.append(_Fast(scenario, shortened(answer), tokens, took))

    def _rate(self, tokens: int) -> float:
        """Tokens a second at best, for a prompt of `tokens`; 0 if none was measured. A machine that was busy while its rate was measured may be idle
        later: so it is what was measured, as much more as short prompts were ever answered sooner than then, or what new prompts of an eighth to a
        half of that length were seen to take, whichever is most. Longer ones say nothing of it: they may not have been read either."""
        if self._learned.prefill is None:
            return 0.0
        measured = self._learned.prefill * max(1.0, self._learned.first / self._quickest)
        most = (tokens // 2 + 1).bit_length() - 1  # numbers of so many bits are half of it at most
        return max(measured, self._read.get(most, 0.0), self._read.get(most - 1, 0.0))

    def _too_fast(self, tokens: int, took: float) -> bool:
        rate = self._rate(tokens)
        return rate > 0 and took * FASTER <= tokens / rate and tokens / rate - took >= GAP

    def _all(self) -> Gathering:
        """What was found, and those that were too fast also for the server at its quickest."""
        found = self._found.copy()
        for scenario, answer, tokens, took in self._fast:
            if self._too_fast(tokens, took):
                rate = self._rate(tokens)
                found.add(scenario, "too fast", f"{tokens} tokens of a new prompt were answered after {took:.3f} s",
                          f"that is {tokens / took:,.0f} tokens a second, where {rate:,.0f} are the most that is possible here by what was measured: this "
                          "prompt was not read", (answer,), tokens=tokens, rate=rate, expected=tokens / rate)  # fmt: skip
        return found

    def _sent(self, answer: Answer) -> int:
        """About how many tokens of prompt were sent: by our own measure, and never more than the server counts."""
        prompt = answer.ask.prompt
        sent = (
            len(prompt)
            if not isinstance(prompt, str)
            else int(len(prompt.split()) * (self._learned.tokens_per_word if self._learned.usage else 1.0))
        )
        return sent if answer.usage.prompt is None else min(sent, answer.usage.prompt)

    # ------------------------------------------------------------------------------ what a scenario means

    def same(self, scenario: str, alone: Answer, again: Answer) -> None:
        """Two answers to one request count it alike."""
        a, b = alone.usage.prompt, again.usage.prompt
        if (
            a is None
            or b is None
            or (alone.ask.prompt, alone.ask.system) != (again.ask.prompt, again.ask.system)
        ):
            return
        if (
            alone.ask.extra != again.ask.extra
            or alone.ask.endpoint != again.ask.endpoint
            or not again.ask.extra
            or not self._learned.counts_cached
        ):
            return  # those without further fields are compared when they are seen
        if a != b:
            self._add(scenario, again, "counts differ", f"the same request counted {a} prompt tokens alone and {b} in company",
                      "one of the counts is of another request, or one answer was computed from another prompt", alone, before=a, now=b)  # fmt: skip

    def must_refuse(self, scenario: str, answer: Answer, tokens: int, why: str) -> None:
        """An answer, whole or begun, is a finding; a 4xx, a 5xx and an error event are in order, silence is told elsewhere."""
        if answer.how in ("limited", "unreachable", "silent") and not answer.text:
            return
        self._found.compared[scenario] += 1
        refused = answer.finish in ENDED_BADLY and not answer.text
        if (answer.how == "answered" and not refused) or (
            answer.how in ("left", "cut", "silent") and answer.text
        ):
            self._add(scenario, answer, "accepted", f"{tokens} tokens were answered with status {answer.status or 200}: {answer.text[:60]!r}",
                      f"{why}: it had to be refused with a 4xx or an error event", tokens=tokens)  # fmt: skip

    def must_serve(self, scenario: str, answer: Answer, why: str) -> None:
        """A refusal or failure is a finding; silence is told by liveness; no connection, or a rate limit, says nothing."""
        if answer.how in ("limited", "unreachable", "silent", "left"):
            return
        self._found.compared[scenario] += 1
        if answer.how != "answered":
            self._add(scenario, answer, "not served", f"a request that is in order was {answer.how} (status {answer.status}): {answer.error[:120]!r}",
                      why)  # fmt: skip

    def _add(
        self, scenario: str, answer: Answer, kind: str, what: str, why: str, *more: Answer, **detail: Any
    ) -> None:
        self._found.add(scenario, kind, what, why, (answer, *more), **detail)

    def findings(self) -> list[Finding]:
        return self._all().findings()

    def coverage(self, scenario: str) -> Coverage:
        return self._all().coverage(scenario)


def _took(answer: Answer) -> float:
    """Seconds to the first token, or to the whole of what does not come as a stream."""
    return answer.first if answer.first is not None else answer.seconds


def _bounded(ask: Ask) -> bool:
    """Whether `max_tokens` is what was asked for: a body of our own making may say something else, and so may further fields."""
    return ask.raw is None and not ask.extra.keys() & {
        "max_tokens",
        "max_completion_tokens",
        "sampling_params",
    }


def _most(ask: Ask) -> int:
    """Tokens of prompt that a request has at most: one a byte, and a template."""
    if not isinstance(ask.prompt, str):
        return len(ask.prompt) + IDS_MORE
    return (
        len(ask.prompt.encode(errors="replace")) + len(ask.system.encode(errors="replace")) + TEMPLATE_TOKENS
    )


__all__ = ["FASTER", "Semantics"]
