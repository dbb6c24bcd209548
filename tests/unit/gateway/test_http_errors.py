"""Errors as clients see them."""

from __future__ import annotations

from octavo.common import errors
from octavo.common.errors import OctavoError
from octavo.gateway.http_errors import FieldError, kind_of, report_of


def test_every_error_has_a_status() -> None:
    def tree(root: type[OctavoError]) -> list[type[OctavoError]]:
        return [root, *(found for child in root.__subclasses__() for found in tree(child))]

    statuses = {error_class.__name__: kind_of(error_class).status for error_class in tree(OctavoError)}
    assert statuses["PromptTooLongError"] == 400
    assert statuses["UnknownModelError"] == 404
    assert statuses["QueueFullError"] == 429
    assert statuses["NotReadyError"] == statuses["LinkClosedError"] == statuses["OverloadedLinkError"] == 503
    assert statuses["StaleEpochError"] == statuses["InternalError"] == 500


def test_field_error_names_its_field() -> None:
    assert report_of(FieldError("n", "n: too many")).body == {
        "error": {"message": "n: too many", "type": "invalid_request_error", "param": "n", "code": None}
    }


def test_internal_texts_are_withheld() -> None:
    for error in (errors.InternalError("secret"), errors.StaleEpochError("secret"), ValueError("secret")):
        shown = report_of(error)
        assert shown.status == 500
        assert "secret" not in str(shown.body)


def test_errors_that_pass_ask_for_another_try() -> None:
    assert report_of(errors.NotReadyError("loading")).headers == {"retry-after": "1"}
    assert report_of(errors.UnknownModelError("x")).headers == {}
    assert report_of(errors.UnknownModelError("x")).body["error"]["param"] == "model"
