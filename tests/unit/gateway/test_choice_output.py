"""What of a choice may be sent, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.common.errors import ProtocolError
from octavo.common.messages.generation import ChoiceFinished, FinishReason
from octavo.gateway.choice_output import ChoiceOutput, Delta, OutputRules
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.stop_strings import StopStrings
from support.small_tokenizer import EOS, byte_ids, byte_level_tokenizer, id_of

TOKENIZER = byte_level_tokenizer()
PIECES = TokenPieces(TOKENIZER)
EOS_ID = id_of(TOKENIZER, EOS)


def rules(stops: Sequence[str] = (), lists_tokens: bool = False, skip_special_tokens: bool = True) -> OutputRules:
    return OutputRules(
        PIECES, skip_special_tokens, StopStrings(stops) if stops else None, frozenset({EOS_ID}), lists_tokens
    )


def run(ids: list[int], output_rules: OutputRules, reason: FinishReason = FinishReason.LENGTH) -> list[Delta]:
    """The deltas of a choice, taken after each token."""
    output, deltas = ChoiceOutput(output_rules), []
    for token_id in ids:
        output.push(token_id)
        if delta := output.take():
            deltas.append(delta)
        if output.is_finished:
            return deltas
    output.finish(ChoiceFinished(1, 0, reason))
    last = output.take()
    assert last is not None
    return [*deltas, last]


def run_in_steps(ids: list[int], output_rules: OutputRules, tokens_per_step: int) -> tuple[str, int]:
    """The text, taken after each step and from a step of one token at once if it can be, and the number of tokens."""
    output, text = ChoiceOutput(output_rules), ""
    for start in range(0, len(ids), tokens_per_step):
        step = ids[start : start + tokens_per_step]
        if len(step) == 1 and (passed := output.pass_on(step[0])) is not None:
            assert passed
            text += passed
            continue
        for token_id in step:
            output.push(token_id)
        if output.is_finished:
            break
        delta = output.take()
        text += delta.text if delta else ""
    output.finish(ChoiceFinished(1, 0, FinishReason.LENGTH))
    last = output.take()
    assert last is not None
    return text + last.text, output.num_tokens


def texts(deltas: list[Delta]) -> list[str]:
    return [delta.text for delta in deltas]


def test_text_flows_token_by_token() -> None:
    assert texts(run(byte_ids("abc"), rules())) == ["a", "b", "c", ""]


def test_a_text_passes_on_alone_while_nothing_is_held_back_and_no_stop_may_begin() -> None:
    output = ChoiceOutput(rules([" 3"]))
    a, b, space, four = byte_ids("ab 4")
    assert output.pass_on(a) is None, "the first token of a text may lose its space"
    output.push(a)
    assert output.take() == ("a", (), None, None)
    assert [output.pass_on(b), output.pass_on(space), output.pass_on(EOS_ID)] == ["b", None, None]
    output.push(space)
    assert (output.take(), output.pass_on(b)) == (None, None), "a stop string may have begun"
    output.push(four)
    assert output.take() == (" 4", (), None, None)
    assert output.pass_on(b) == "b"
    output.push(EOS_ID)
    output.finish(ChoiceFinished(1, 0, FinishReason.STOP))
    assert (output.pass_on(b), output.num_tokens) == (None, 6)


def test_nothing_of_a_stop_string_is_ever_sent() -> None:
    deltas = run(byte_ids("1 2 3 4"), rules([" 3"]))
    assert texts(deltas) == ["1", " 2", ""]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", " 3")


def test_beginning_of_a_stop_that_fails_is_released_at_once() -> None:
    assert texts(run(byte_ids("a 4 7"), rules([" 4 9"]))) == ["a", " 4 7", ""]


def test_beginning_of_a_stop_is_released_at_the_end() -> None:
    assert texts(run(byte_ids("ab"), rules(["bc"]))) == ["a", "b"]


def test_end_token_is_counted_and_listed_but_has_no_text() -> None:
    output = ChoiceOutput(rules(lists_tokens=True, skip_special_tokens=False))
    for token_id in [*byte_ids("a"), EOS_ID]:
        output.push(token_id)
    output.finish(ChoiceFinished(1, 0, FinishReason.STOP))
    delta = output.take()
    assert delta is not None
    assert (delta.text, [token.piece for token in delta.tokens], output.num_tokens) == ("a", [b"a", None], 2)


def test_tokens_after_a_stop_string_are_dropped() -> None:
    output = ChoiceOutput(rules(["b"]))
    for token_id in byte_ids("abcd"):
        output.push(token_id)
    output.finish(ChoiceFinished(1, 0, FinishReason.ABORT))
    delta = output.take()
    assert delta is not None
    assert (delta.text, delta.finish_reason, output.num_tokens) == ("a", "stop", 2)


def test_abort_that_nobody_asked_for_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        ChoiceOutput(rules()).finish(ChoiceFinished(1, 0, FinishReason.ABORT))


def test_listed_tokens_decode_to_exactly_the_text_beside_them() -> None:
    deltas = run(byte_ids("x한 zz y"), rules(["zzzz"], lists_tokens=True))
    assert texts(deltas) == ["x", "한", " ", "zz ", "y", ""]
    assert [len(delta.tokens) for delta in deltas] == [1, 3, 1, 3, 1, 0]


def test_token_that_is_half_certain_waits_where_tokens_are_listed() -> None:
    the_fox = TOKENIZER.encode(" the", add_special_tokens=False).ids
    assert [TOKENIZER.id_to_token(token_id) for token_id in the_fox] == ["Ġthe"]
    assert texts(run(the_fox, rules(["e!"]))) == [" th", "e"]
    assert texts(run(the_fox, rules(["e!"], lists_tokens=True))) == [" the"]


def test_text_offsets_count_characters_before_each_token() -> None:
    deltas = run(byte_ids("é한b"), rules(lists_tokens=True))
    assert [token.text_offset for delta in deltas for token in delta.tokens] == [0, 0, 1, 1, 1, 2]


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, TOKENIZER.get_vocab_size()), min_size=1, max_size=30),
    st.lists(st.sampled_from(["e", " t", "the", "o ", "\ufffd", "é"]), max_size=3),
    st.booleans(),
    st.integers(1, 4),
)
def test_any_output_is_aligned_and_independent_of_steps(
    ids: list[int], stops: list[str], skip_special_tokens: bool, tokens_per_step: int
) -> None:
    output_rules = rules(stops, True, skip_special_tokens)
    deltas = run(ids, output_rules)
    for delta in deltas[:-1]:
        assert b"".join(token.piece or b"" for token in delta.tokens).decode("utf-8", "replace") == delta.text

    num_tokens = sum(len(delta.tokens) for delta in deltas)
    plain_rules = rules(stops, False, skip_special_tokens)
    for other_rules in (output_rules, plain_rules):
        assert run_in_steps(ids, other_rules, tokens_per_step) == ("".join(texts(deltas)), num_tokens)

    plain = run(ids, plain_rules)
    assert "".join(texts(plain)) == "".join(texts(deltas))


def test_stop_string_stays_in_the_text_if_it_is_to_be_included() -> None:
    deltas = run(byte_ids("1 2 3 4"), replace(rules([" 3"]), includes_stop=True))
    assert "".join(texts(deltas)) == "1 2 3"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", " 3")


def test_text_of_the_token_that_ends_it_is_included_where_special_tokens_are_shown() -> None:
    ids = [*byte_ids("ab"), EOS_ID]
    shown = replace(rules(skip_special_tokens=False), includes_stop=True)
    assert "".join(texts(run(ids, shown, FinishReason.STOP))) == "ab" + EOS
    assert "".join(texts(run(ids, replace(rules(), includes_stop=True), FinishReason.STOP))) == "ab"
    assert "".join(texts(run(ids, rules(skip_special_tokens=False), FinishReason.STOP))) == "ab"


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (1, "a"), (2, "ab.c"), (3, "ab.c"), (4, "ab.c")])
def test_stop_string_counts_if_a_token_after_min_tokens_completes_it(min_tokens: int, text: str) -> None:
    """The second token completes the first stop, the fifth the second."""
    deltas = run(byte_ids("ab.cb.d"), replace(rules(["b"]), min_tokens=min_tokens))
    assert "".join(texts(deltas)) == text


def test_stop_string_may_begin_within_min_tokens() -> None:
    deltas = run(byte_ids("abcd"), replace(rules(["bc"]), min_tokens=2))
    assert ("".join(texts(deltas)), deltas[-1].finish_reason) == ("a", "stop")
