"""Encoding, decoding and streaming text, against transformers' own decoder, for both kinds of vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from hermetic.model.errors import ModelError
from hermetic.model.source import ModelSource
from hermetic.model.tokenizer import ChatError, IncrementalDetokenizer, Tokenizer

FLAG = "\U0001f1eb\U0001f1f7"


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A small vocabulary as Llama 2's: spaces as U+2581, unknown characters as bytes, one space dropped at the start."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "b",
        "\u2581a",
        "\u2581b",
    ]
    merges = [("\u2581", "a"), ("\u2581", "b")]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    backend = Backend(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
    )


@settings(max_examples=150)
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"]), max_size=60))
def test_text_survives_encoding_and_decoding_and_streams_to_the_same_text(
    text: str, tokenizer: Tokenizer
) -> None:
    # SmolLM2's vocabulary lacks some bytes (control characters, F1 to F4) and drops what has them.
    tokens = tokenizer.encode(text, add_special=False, parse_special=False)
    assert tokenizer.decode(tokens) == text
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join(stream.push(token) for token in tokens) == text
    assert stream.pending == b""


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 49151), max_size=30))
def test_any_tokens_decode_as_transformers_decodes_them(tokens: list[int], tokenizer: Tokenizer) -> None:
    expected = tokenizer._pretrained.decode(tokens, skip_special_tokens=True)
    assert tokenizer.decode(tokens) == expected
    stream = IncrementalDetokenizer(tokenizer)
    streamed = "".join(stream.push(token) for token in tokens)
    # What is held back is at most the beginning of one character.
    assert expected.startswith(streamed)
    assert expected[len(streamed) :] == stream.pending.decode("utf-8", errors="replace")
    assert len(stream.pending) < 4


@pytest.mark.parametrize("text", ["日本語です", f"a{FLAG}b", "naïve — “quoted”", "👩‍👩‍👧‍👦"])
def test_half_a_character_is_never_shown(text: str, tokenizer: Tokenizer, sentencepiece: Tokenizer) -> None:
    for kind in (tokenizer, sentencepiece):
        stream = IncrementalDetokenizer(kind, at_start=True)
        parts = [stream.push(token) for token in kind.encode(text, add_special=False)]
        assert len(parts) > 3
        assert all("\ufffd" not in part for part in parts)
        assert "".join(parts) == text


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 263), max_size=20))
def test_a_sentencepiece_vocabulary_decodes_valid_text_as_transformers_does(
    tokens: list[int], sentencepiece: Tokenizer
) -> None:
    ours = sentencepiece.decode(tokens)
    if (
        "\ufffd" not in ours
    ):  # for invalid bytes, ByteFallback writes one U+FFFD a byte and not one a sequence
        assert ours == sentencepiece._pretrained.decode(tokens, skip_special_tokens=True)


def test_a_leading_space_is_kept_when_a_prompt_is_continued_and_dropped_at_the_start(
    sentencepiece: Tokenizer,
) -> None:
    tokens = sentencepiece.encode("a b", add_special=False)
    for at_start, expected in ((True, "a b"), (False, " a b")):
        stream = IncrementalDetokenizer(sentencepiece, at_start=at_start)
        assert "".join(stream.push(token) for token in tokens) == expected


def test_control_tokens_are_left_out_of_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    tokens = [1, *tokenizer.encode("hi", add_special=False), 2]
    assert tokenizer.decode(tokens) == "hi"
    assert tokenizer.decode(tokens, skip_special=False) == "<|im_start|>hi<|im_end|>"
    stream = IncrementalDetokenizer(tokenizer, skip_special=False)
    assert "".join(stream.push(token) for token in tokens) == "<|im_start|>hi<|im_end|>"


def test_control_tokens_in_a_text_are_parsed_only_where_that_is_wanted(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_end|>", add_special=False) == [2]
    plain = tokenizer.encode("<|im_end|>", add_special=False, parse_special=False)
    assert 2 not in plain
    assert tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>", add_special=False) == [2]


def test_a_tokens_bytes_are_exact_and_an_id_without_a_token_has_none(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("é日", add_special=False)
    assert b"".join(tokenizer.token_bytes(token) for token in tokens) == "é日".encode()
    assert tokenizer.token_text(tokenizer.encode(" the", add_special=False)[0]) == " the"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""


def test_a_conversation_becomes_the_models_own_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer.apply_chat(messages), skip_special=False) == expected
    without = tokenizer.apply_chat(messages, add_generation_prompt=False)
    assert tokenizer.decode(without, skip_special=False) == expected.removesuffix("<|im_start|>assistant\n")


def test_a_model_without_a_template_and_messages_it_refuses_are_the_clients_to_know(
    sentencepiece: Tokenizer,
) -> None:
    with pytest.raises(ChatError, match=r"no chat template.*completions"):
        sentencepiece.apply_chat([{"role": "user", "content": "Hi"}])
    strict = Tokenizer(sentencepiece._pretrained, "strict")
    strict.chat_template = strict._pretrained.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(ChatError, match="roles must alternate"):
            strict.apply_chat([{"role": "user", "content": "Hi"}])
    finally:
        strict._pretrained.chat_template = None


def test_a_missing_or_foreign_tokenizer_is_a_model_error(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        Tokenizer.load(ModelSource("none", tmp_path))
    backend = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="decodes with WordPiece"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
