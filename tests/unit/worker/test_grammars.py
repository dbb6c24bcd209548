"""Grammars in the worker: what they allow, when they are not ready, and how they fail."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest

from octavo.common.errors import ProtocolError
from octavo.common.messages.step import GRAMMAR_FAILED, NOT_READY, OpenSlot, RowFlag, SlotRules, StepPlan, TableDelta
from octavo.common.messages.token_rules import TokenRules
from octavo.worker import grammars as module
from octavo.worker.grammars import BoolArray, GrammarMatcher, Grammars
from support.runner_driver import make_runner
from support.small_tokenizer import EOS, byte_level_json, byte_level_tokenizer, id_of
from support.tiny_models import prompt_of, save_tiny_model

TOKENIZER = byte_level_tokenizer()
EOS_ID = id_of(TOKENIZER, EOS)
VOCAB_SIZE = TOKENIZER.get_vocab_size() + 20
AB_OR_AC = llguidance.LLMatcher.grammar_from_regex("a(b|c)")


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


@pytest.fixture
def known(tmp_path: Path) -> Grammars:
    (tmp_path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    return Grammars(tmp_path / "tokenizer.json", VOCAB_SIZE, [EOS_ID])


def mask_of(matcher: GrammarMatcher) -> BoolArray:
    mask = matcher.mask(10.0)
    assert not isinstance(mask, int)
    return mask


def allowed(matcher: GrammarMatcher) -> set[str]:
    texts = {TOKENIZER.decode([token_id], skip_special_tokens=False) for token_id in np.flatnonzero(mask_of(matcher))}
    return texts


def test_tokens_of_the_grammar_are_allowed_and_the_end_where_it_is_complete(known: Grammars) -> None:
    matcher = known.begin(AB_OR_AC, [])
    assert allowed(matcher) == {"a"}
    matcher.tell(ids_of("a"), 0)
    assert allowed(matcher) == {"b", "c"}
    matcher.tell(ids_of("b"), 1)
    assert allowed(matcher) == {EOS}
    assert len(mask_of(matcher)) == VOCAB_SIZE


def test_output_that_is_there_already_is_read_and_not_read_again(known: Grammars) -> None:
    """A slot that is opened anew, and a row that is launched again."""
    matcher = known.begin(AB_OR_AC, ids_of("a"))
    matcher.tell(ids_of("a"), 0)
    assert allowed(matcher) == {"b", "c"}
    matcher.tell(ids_of("ac"), 0)
    assert allowed(matcher) == {EOS}


@pytest.mark.parametrize("grammar", ["not a grammar {", llguidance.LLMatcher.grammar_from_regex("a[")])
def test_grammar_that_cannot_be_compiled_has_failed(known: Grammars, grammar: str) -> None:
    assert known.begin(grammar, []).mask(10.0) == GRAMMAR_FAILED


def test_compiler_that_breaks_fails_its_own_grammar_only(known: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises ends neither the step nor the thread, which goes on with the next grammar."""

    def broken(self: Grammars, grammar: str) -> llguidance.LLMatcher:
        raise MemoryError("not the error of any grammar")

    with monkeypatch.context() as patch:
        patch.setattr(Grammars, "new_matcher", broken)
        for _ in range(2 * module.NUM_THREADS):
            assert known.begin(AB_OR_AC, []).mask(10.0) == GRAMMAR_FAILED
    assert allowed(known.begin(AB_OR_AC, [])) == {"a"}


def test_output_that_is_not_of_the_grammar_has_failed(known: Grammars) -> None:
    matcher = known.begin(AB_OR_AC, [])
    mask_of(matcher)
    matcher.tell(ids_of("b"), 0)
    assert matcher.mask(10.0) == GRAMMAR_FAILED


def test_folder_without_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    assert Grammars(tmp_path / "tokenizer.json", VOCAB_SIZE, [EOS_ID]).begin(AB_OR_AC, []).mask(10.0) == GRAMMAR_FAILED


def test_mask_that_takes_long_is_not_waited_for_and_fails_in_the_end(
    known: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    compiled = known.new_matcher

    def slowly(grammar: str) -> Any:
        go_on.wait(10.0)
        return compiled(grammar)

    monkeypatch.setattr(known, "new_matcher", slowly)
    monkeypatch.setattr(module, "TIMEOUT_S", 0.05)
    slow, late = known.begin(AB_OR_AC, []), known.begin(AB_OR_AC, [])
    assert slow.mask(0.0) == NOT_READY
    time.sleep(0.06)
    assert late.mask(0.0) == GRAMMAR_FAILED
    go_on.set()
    assert allowed(slow) == {"a"}


def test_any_choice_among_the_allowed_tokens_gives_a_document_of_the_schema(known: Grammars) -> None:
    """Any choice among the allowed tokens leads to a document that is valid, or to the limit."""
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["x", "y"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})
    chance = np.random.default_rng(5)
    for _ in range(20):
        matcher, output = known.begin(grammar, []), []
        while (chosen := int(chance.choice(np.flatnonzero(mask_of(matcher))))) != EOS_ID:
            output.append(chosen)
            matcher.tell([chosen], len(output) - 1)
        document = json.loads(TOKENIZER.decode(output))
        assert set(document) == {"kind", "count"}
        assert document["kind"] in ("x", "y")
        assert 0 <= document["count"] <= 99


def test_runner_follows_a_grammar_and_refuses_rows_that_bring_no_token(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, vocab_size=512, eos_token_id=1)
    (tmp_path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    runner, prompt = make_runner(tmp_path), prompt_of(20)
    slot = SlotRules(TokenRules(grammar=AB_OR_AC), tuple(prompt), (), (EOS_ID,))
    opening = OpenSlot(0, 1, (1,), 0.0, 1.0, 0, None, slot)
    plan = StepPlan(
        step_id=1,
        opened_slots=[opening],
        table_deltas=[TableDelta(0, 0, (6, 2), (1, 1))],
        slots=[0],
        starts=[0],
        lengths=[20],
        flags=[RowFlag.SAMPLE],
        token_ids=prompt,
    )
    with pytest.raises(ProtocolError, match="grammar"):
        runner.execute(plan)
    runner.use_grammars(Grammars(tmp_path / "tokenizer.json", 512, [EOS_ID]))
    drawn = runner.execute(plan).token_ids
    output: list[int] = []
    while drawn != [EOS_ID]:
        output += [] if drawn == [NOT_READY] else drawn
        tokens = [*prompt, *output]
        again = StepPlan(
            step_id=2, slots=[0], starts=[len(tokens) - 1], lengths=[1], flags=[RowFlag.SAMPLE], token_ids=tokens[-1:]
        )
        drawn = runner.execute(again).token_ids
    assert TOKENIZER.decode(output) in ("ab", "ac")
    fed = StepPlan(step_id=3, slots=[0], starts=[22], lengths=[1], flags=[RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE])
    with pytest.raises(ProtocolError, match="fed by its last sample"):
        runner.execute(fed)
