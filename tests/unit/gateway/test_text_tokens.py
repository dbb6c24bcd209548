from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.common.messages.generation import ChoiceFinished, FinishReason
from octavo.gateway.answer_parts import Content, PlainReader
from octavo.gateway.choice_output import ChoiceOutput, Delta, OutputRules
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.reasoning import ReasoningReader
from octavo.gateway.text_tokens import TextTokens
from support.small_tokenizer import byte_level_tokenizer, byte_token_ids

TOKENIZER = byte_level_tokenizer()
PIECES = TokenPieces(TOKENIZER)


def deltas_of(token_ids: list[int], cuts: list[int]) -> list[Delta]:
    """What a choice gives that is looked at after each cut."""
    output = ChoiceOutput(OutputRules(PIECES, True, None, frozenset(), lists_tokens=True))
    found = []
    for place, token_id in enumerate(token_ids):
        output.push(token_id)
        if place in cuts:
            found.append(output.take())
    output.finish(ChoiceFinished(1, 0, FinishReason.LENGTH))
    return [delta for delta in (*found, output.take()) if delta is not None]


@given(st.lists(st.sampled_from(["<", "<<", "a", " ", "</", "think", "한", "👍", "\n"])), st.lists(st.integers(0, 40)))
def test_tokens_of_a_plain_text_are_all_told_in_order_with_their_text(words: list[str], cuts: list[int]) -> None:
    token_ids = [token_id for word in words for token_id in byte_token_ids(TOKENIZER, word.encode())]
    tokens = TextTokens(PlainReader())
    told: list[int] = []
    for delta in deltas_of(token_ids, cuts):
        for part, mine in tokens.parts(delta):
            assert isinstance(part, Content)
            assert b"".join(token.piece or b"" for token in mine).decode() == part.text
            told += [token.token_id for token in mine]
    assert told == token_ids


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        (["<think>", "so", "</think>", "\n\n", "so", " on"], ["so", " on"]),
        (["<think>", "so", "</", "think", ">", "t", "<", "<", "b"], ["t", "<", "<", "b"]),
        (["x", " <", "b", " <", "/"], ["x", " <", "b", " <", "/"]),
        (["<think>", "한", "</think>", "한", "한"], ["한", "한"]),
    ],
)
@pytest.mark.parametrize("cuts", [[], range(100)], ids=["whole", "token by token"])
def test_tokens_of_marks_and_of_reasoning_are_not_told(pieces: list[str], told: list[str], cuts: list[int]) -> None:
    token_ids = [token_id for piece in pieces for token_id in byte_token_ids(TOKENIZER, piece.encode())]
    tokens = TextTokens(ReasoningReader(PlainReader(), is_begun=False))
    found = [token for delta in deltas_of(token_ids, cuts) for _, mine in tokens.parts(delta) for token in mine]
    assert b"".join(token.piece or b"" for token in found).decode() == "".join(told)
