"""Every error the HTTP side can answer: a stable code, its status, what happened and what to do.

`CODES` is the list; docs/errors.md is the same list for readers, and a test holds the two equal. Errors travel as the
backend's own exceptions (`Refused`: nothing was taken; `Failed`: it was taken and could not be completed), so that there
is one way from an exception to an answer, wherever it was raised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from hermetic.gateway.backend import Failed, Refused


@dataclass(frozen=True)
class Code:
    """`status` is the usual HTTP status: a worker may know a better one for its own refusal."""

    status: int
    meaning: str
    remedy: str


CODES: Mapping[str, Code] = {
    "invalid_json": Code(400, "The body is not JSON.", "Send one JSON object, UTF-8 encoded."),
    "invalid_request": Code(
        400,
        "A field is missing, has the wrong type or a value out of range; `param` names it.",
        "Correct that field: the message says what it takes.",
    ),
    "unknown_field": Code(
        400,
        "The body has a field that this server does not know; `param` names it.",
        "Leave it out. Internal fields (tickets, rooms, transfer parameters) cannot be set from outside.",
    ),
    "unsupported_parameter": Code(
        400,
        "The field is known from other servers, but this one cannot do what it asks.",
        "Leave it out or give it its default; nothing is silently ignored.",
    ),
    "unsupported_content": Code(
        400,
        "A message holds an image, audio, a file or a tool call.",
        "Send text only: the model reads text.",
    ),
    "empty_prompt": Code(400, "There is no token to continue.", "Send a prompt or a message with some text."),
    "invalid_token_id": Code(
        400,
        "A token id is not an integer of the vocabulary; the message has the id and the vocabulary's size.",
        "Tokenise with this model's tokenizer, for example with /tokenize.",
    ),
    "context_length_exceeded": Code(
        400,
        "Prompt and max_tokens can never fit what the workers' pools hold; the message has both numbers.",
        "Shorten the prompt or lower max_tokens; /v1/models shows max_model_len.",
    ),
    "no_chat_template": Code(
        400, "The model has no chat template.", "Use /v1/completions, or a model that was trained to chat."
    ),
    "model_disabled": Code(
        400,
        "An operator took the model away, or it did so itself after repeated integrity failures; the message has the reason.",
        "Nothing helps but waiting for the operator: `hermetic enable` ends it.",
    ),
    "metrics_local_only": Code(
        403,
        "/metrics was asked from another host on a server with API keys; it names every tenant.",
        "Scrape it from the server's own host.",
    ),
    "admin_local_only": Code(
        403,
        "Without a key file, /admin answers programs on the server's own host; this came from elsewhere, or from a browser.",
        "Run `hermetic status` there, or start the server with --api-keys and an operator in the file.",
    ),
    "operator_key_required": Code(
        403,
        "/admin is for operators; the server's key file names none, or the key that was sent is a tenant's.",
        "Put [operators.NAME] with key_hashes into the key file (`hermetic hash-key`), and send that key.",
    ),
    "invalid_api_key": Code(
        401,
        "The Authorization header is missing or its key is unknown.",
        "Send `Authorization: Bearer KEY` with a key from the operator.",
    ),
    "not_found": Code(
        404, "There is nothing at this path.", "Check the base URL: it ends in /v1 for OpenAI clients."
    ),
    "model_not_found": Code(
        404, "The model is not served here; the message lists what is.", "Use a name from /v1/models."
    ),
    "worker_not_found": Code(
        404,
        "No worker of this name is a member; the message lists those that are.",
        "Use a name from `hermetic status`.",
    ),
    "method_not_allowed": Code(
        405, "The path exists, but not for this method.", "Use the method in `Allow`."
    ),
    "body_timeout": Code(
        408, "The body did not arrive within the server's bound.", "Send it again over a faster connection."
    ),
    "request_too_large": Code(
        413, "The body is over the server's limit; the message has it.", "Send less in one request."
    ),
    "unsupported_media_type": Code(
        415,
        "The body of an /admin request is not declared as JSON.",
        "Send `Content-Type: application/json`.",
    ),
    "overloaded": Code(
        429, "Every place in the queue is taken.", "Try again after the seconds in `Retry-After`."
    ),
    "internal_error": Code(
        500,
        "Something in the server broke.",
        "Report it with the request id; the server's log has the reason.",
    ),
    "kv_integrity": Code(
        500,
        "A KV page of this request was not what it must be. The request was ended so that nothing computed from "
        "that page is sent; other requests go on.",
        "Send the request again. The operator should look at the quarantine counters in /metrics.",
    ),
    "numerical_error": Code(
        500,
        "The model's output was not a number: its weights are damaged, or their values overflow the dtype.",
        "The operator should check the model's files, or serve it with --dtype float32.",
    ),
    "transport_error": Code(
        500,
        "Pages could not be moved from prefill to decode, also when the request was run again.",
        "Send the request again; the log has the reason.",
    ),
    "duplicate_attempt": Code(
        500,
        "A worker was given an attempt that it already has: a fault inside the server.",
        "Report it with the request id.",
    ),
    "state_not_saved": Code(
        500,
        "The state file cannot be written, so a restart would forget what was asked; nothing was enabled.",
        "Make room or give the server the right to write it; the message has the reason.",
    ),
    "not_ready": Code(
        503,
        "The server lives but no work moves: it is starting, stopping, or its workers do not answer.",
        "Try again after the seconds in `Retry-After`.",
    ),
    "no_workers": Code(
        503,
        "No worker is alive that could serve the request.",
        "Try again after the seconds in `Retry-After`.",
    ),
    "no_pair": Code(
        503,
        "The prefill and the decode worker that were chosen cannot reach each other.",
        "Try again after the seconds in `Retry-After`.",
    ),
    "shutting_down": Code(503, "The server is being stopped.", "Send the request again when it is back."),
    "worker_lost": Code(
        503,
        "A worker died or stopped answering while it held this request, and no other one could go on with it.",
        "Send the request again.",
    ),
    "deadline_exceeded": Code(
        504, "The request did not end within its bound.", "Send it again, or ask for fewer tokens."
    ),
}


def refuse(code: str, message: str, param: str | None = None) -> Refused:
    """The refusal `code`, with the status that `CODES` gives it."""
    return Refused(code, message, CODES[code].status, param)


def internal_error(request_id: str) -> Failed:
    """What a client is told of an exception that nobody expected: only where to look."""
    return Failed(
        "internal_error", f"the server failed on this request; its log has the reason under {request_id}"
    )


def error_type(status: int) -> str:
    """OpenAI's `type` for a status."""
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_body(error: Refused | Failed) -> bytes:
    """The error in OpenAI's shape, as JSON."""
    param = error.param if isinstance(error, Refused) else None
    shape = {"message": error.message, "type": error_type(error.status), "param": param, "code": error.code}
    return msgspec.json.encode({"error": shape})


def error_headers(error: Refused | Failed) -> dict[str, str]:
    """`Retry-After` in whole seconds, rounded up, and what 401 and 413 must say."""
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["www-authenticate"] = 'Bearer realm="hermetic"'
    if error.status in (
        408,
        413,
    ):  # the rest of the body is unread: this connection cannot carry another request
        headers["connection"] = "close"
    return headers
