"""Codec of the rules for logits, which both streams carry."""

from __future__ import annotations

from octavo.common.codecs.arrays import pack_float32, pack_int32, unpack_float32, unpack_int32
from octavo.common.errors import ProtocolError
from octavo.common.messages.token_rules import TokenRules
from octavo.v1 import scheduler_service_pb2 as pb


def rules_to_proto(rules: TokenRules) -> pb.TokenRules:
    return pb.TokenRules(
        grammar=rules.grammar,
        allowed_token_ids=pack_int32(rules.allowed_token_ids),
        bad_word_lengths=pack_int32([len(word) for word in rules.bad_words]),
        bad_word_token_ids=pack_int32([token_id for word in rules.bad_words for token_id in word]),
        min_tokens=rules.min_tokens,
        biased_token_ids=pack_int32([token_id for token_id, _ in rules.logit_bias]),
        biases=pack_float32([bias for _, bias in rules.logit_bias]),
        repetition_penalty=rules.repetition_penalty,
        frequency_penalty=rules.frequency_penalty,
        presence_penalty=rules.presence_penalty,
        min_p=rules.min_p,
        typical_p=rules.typical_p,
    )


def rules_from_proto(rules: pb.TokenRules) -> TokenRules:
    biased, biases = unpack_int32(rules.biased_token_ids), unpack_float32(rules.biases)
    if len(biased) != len(biases):
        raise ProtocolError(f"{len(biased)} tokens have {len(biases)} biases")
    return TokenRules(
        grammar=rules.grammar,
        allowed_token_ids=tuple(unpack_int32(rules.allowed_token_ids)),
        bad_words=_bad_words(rules),
        min_tokens=rules.min_tokens,
        logit_bias=tuple(zip(biased, biases, strict=True)),
        repetition_penalty=rules.repetition_penalty,
        frequency_penalty=rules.frequency_penalty,
        presence_penalty=rules.presence_penalty,
        min_p=rules.min_p,
        typical_p=rules.typical_p,
    )


def _bad_words(rules: pb.TokenRules) -> tuple[tuple[int, ...], ...]:
    token_ids, words, end = unpack_int32(rules.bad_word_token_ids), [], 0
    for length in unpack_int32(rules.bad_word_lengths):
        begin, end = end, end + length
        words.append(tuple(token_ids[begin:end]))
    if end != len(token_ids):
        raise ProtocolError(f"bad words of {end} tokens come with {len(token_ids)}")
    return tuple(words)
