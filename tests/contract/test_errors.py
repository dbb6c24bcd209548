"""Every error has a name of its own, a place in the gateway's table, and means the same after a trip over the wire."""

from __future__ import annotations

import pytest

from octavo.common import errors
from octavo.common.codecs import GENERATE
from octavo.common.errors import InternalError, OctavoError, from_reason
from octavo.common.messages.generation import RequestFailed, TokenBatch
from octavo.gateway.http_errors import ERROR_KINDS, kind_of, report_of


def tree(root: type[OctavoError]) -> list[type[OctavoError]]:
    return [root, *(found for child in root.__subclasses__() for found in tree(child))]


EVERY_ERROR = tree(OctavoError)


def test_reasons_are_unique() -> None:
    assert len({error.reason for error in EVERY_ERROR}) == len(EVERY_ERROR) >= 15


def test_all_errors_stand_in_the_drawn_tree() -> None:
    drawn = errors.__doc__ or ""
    assert [error.__name__ for error in EVERY_ERROR if error.__name__ not in drawn] == []


@pytest.mark.parametrize("error_class", EVERY_ERROR)
def test_error_has_a_status(error_class: type[OctavoError]) -> None:
    assert 400 <= kind_of(error_class).status < 600
    body = report_of(error_class("too bad")).body["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"] == ("too bad" if not kind_of(error_class).withholds_message else body["message"])


def test_only_bugs_are_internal_errors() -> None:
    internal = {error.__name__ for error in EVERY_ERROR if kind_of(error).status == 500}
    assert internal == {
        "OctavoError",
        "ProtocolError",
        "ProtocolVersionError",
        "StaleEpochError",
        "MessageGapError",
        "StaleBlockError",
        "NumericError",
        "InternalError",
    }
    assert set(ERROR_KINDS) <= set(EVERY_ERROR)


@pytest.mark.parametrize("error_class", EVERY_ERROR)
def test_error_survives_the_wire(error_class: type[OctavoError]) -> None:
    sent = TokenBatch(failed=[RequestFailed(7, error_class.reason, "because of 東京")])
    received = GENERATE.decode_server(GENERATE.encode_server(sent))
    assert isinstance(received, TokenBatch)
    [failed] = received.failed
    error = from_reason(failed.reason, failed.message)
    assert (type(error), error.message, failed.request_no) == (error_class, "because of 東京", 7)


def test_reason_of_a_newer_version_is_an_internal_error() -> None:
    assert isinstance(from_reason("NOT_INVENTED_YET", "x"), InternalError)
