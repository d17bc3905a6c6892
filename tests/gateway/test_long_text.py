"""Texts of megabytes: refused from a lower bound, or tokenised in parts, so that nobody else waits for them."""

from __future__ import annotations

import httpx
import pytest
from driving import client_of

from hermetic.gateway import limits
from hermetic.gateway.app import create_app
from hermetic.gateway.tenants import local_tenants
from hermetic.model.tokenizer import Tokenizer


@pytest.fixture
def counted(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many characters each call of the tokenizer was given."""
    sizes: list[int] = []
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, *args: bool, **kwargs: bool) -> list[int]:
        sizes.append(len(text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    return sizes


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
async def test_a_conversation_far_over_the_limit_is_refused_without_tokenising_it(
    backend: object, tokenizer: Tokenizer, counted: list[int], role: str
) -> None:
    messages = [{"role": role, "content": "word " * 400_000}, {"role": "user", "content": "Go on."}]
    async with client_of(create_app(backend, tokenizer, local_tenants())) as client:  # type: ignore[arg-type]
        answer = await client.post("/v1/chat/completions", json={"model": "smollm2", "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert sum(counted) < 200_000


async def test_a_long_text_tokenised_in_parts_has_the_tokens_of_the_whole(
    backend: object, tokenizer: Tokenizer, counted: list[int]
) -> None:
    text = "The cat, 1234 dogs\nand a na\u00efve \u4f60\u597d  bird; " * 12_000
    async with client_of(create_app(backend, tokenizer, local_tenants())) as client:  # type: ignore[arg-type]
        answer = await client.post("/tokenize", json={"prompt": text}, timeout=60)
    assert max(counted) <= limits.PART_CHARS
    assert answer.json()["tokens"] == tokenizer.encode(text)


async def test_a_long_text_without_a_space_is_refused_with_the_size_that_would_do(
    backend: object, tokenizer: Tokenizer
) -> None:
    async with client_of(create_app(backend, tokenizer, local_tenants())) as client:  # type: ignore[arg-type]
        answer: httpx.Response = await client.post("/tokenize", json={"prompt": "x" * 200_000}, timeout=60)
    assert answer.json()["error"]["code"] == "request_too_large"
    assert "131,072" in answer.json()["error"]["message"]
