"""A client without a network, and bodies of requests that are fine, to be made wrong one field at a time."""

from __future__ import annotations

from typing import Any

import httpx
from fastapi import FastAPI


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://hermetic.test")


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": "The capital of France is"} | fields


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": content} for content in contents or ("What is the capital of France?",)
    ]
    return {"model": "smollm2", "messages": messages} | fields
