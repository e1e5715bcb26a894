"""Meaning of answers, and making of signatures."""

import base64
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

from mainspring import Signer
from mainspring.model.delivery import DONE, Dead, Response, Retry
from mainspring.sinks.http_request import LONGEST_WAIT_MS, MAX_HEADERS, kept_headers, outcome_of, retry_after_ms

NOW_S = 1_800_000_000.25


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 299])
def test_any_2xx_is_done(status: int) -> None:
    outcome = outcome_of(Response(status, (), b"ok"), NOW_S)
    assert outcome == DONE
    assert outcome.response is not None
    assert outcome.response.body == b"ok"


@pytest.mark.parametrize("status", [101, 302, 303, 304, 307, 408, 425, 429, 500, 501, 502, 503, 504, 599, 600, 999])
def test_temporary_statuses_are_tried_again(status: int) -> None:
    outcome = outcome_of(Response(status), NOW_S)
    assert isinstance(outcome, Retry)
    assert outcome.reason.startswith(f"HTTP {status}")
    assert not outcome.untried


@pytest.mark.parametrize("status", [301, 308, 400, 401, 403, 404, 405, 409, 410, 411, 413, 422, 426, 428, 431, 499])
def test_permanent_statuses_are_dead(status: int) -> None:
    outcome = outcome_of(Response(status), NOW_S)
    assert isinstance(outcome, Dead)
    assert outcome.reason.startswith(f"HTTP {status}")


def test_a_reason_holds_the_status_and_one_short_line_of_the_answer() -> None:
    body = b"no\r\n\x1b[31m such\torder \xff" + b"x" * 5000
    outcome = outcome_of(Response(404, (), body), NOW_S)
    assert isinstance(outcome, Dead)
    assert outcome.reason.startswith("HTTP 404 Not Found: no [31m such order xxx")
    assert len(outcome.reason) < 250
    assert outcome.reason.isprintable()


def test_a_redirect_names_where_it_wanted_to_go() -> None:
    outcome = outcome_of(Response(301, (("Location", "http://169.254.169.254/"),)), NOW_S)
    assert isinstance(outcome, Dead)
    assert "to http://169.254.169.254/: redirects are never followed" in outcome.reason


@pytest.mark.parametrize(("value", "wait_ms"), [("120", 120_000), (" 7 ", 7_000), ("9" * 30, LONGEST_WAIT_MS)])
def test_retry_after_in_seconds_is_kept_to_and_not_much_more(value: str, wait_ms: int) -> None:
    for _ in range(50):
        found = retry_after_ms(value, NOW_S)
        assert found is not None
        assert wait_ms <= found <= wait_ms * 1.1


@pytest.mark.parametrize(("ahead_s", "wait_ms"), [(90, 89_750), (10**8, LONGEST_WAIT_MS)])
def test_retry_after_may_be_a_date(ahead_s: int, wait_ms: int) -> None:
    when = datetime.fromtimestamp(int(NOW_S), UTC) + timedelta(seconds=ahead_s)
    found = retry_after_ms(format_datetime(when, usegmt=True), NOW_S)
    assert found is not None
    assert wait_ms <= found <= wait_ms * 1.1


ENDLESS_ZONE = f"Tue, 01 Jan 2030 00:00:00 +{10**20}"


@pytest.mark.parametrize(
    "value",
    [None, "", "0", "-5", "1.5", "soon", "Mon, 99 Foo 2026", "Wed, 21 Oct 2015 07:28:00 GMT", "٣", ENDLESS_ZONE],
)
def test_without_a_usable_retry_after_the_policy_decides(value: str | None) -> None:
    assert retry_after_ms(value, NOW_S) is None


def test_retry_after_counts_only_where_trying_again_makes_sense() -> None:
    told = (("RETRY-AFTER", "30"),)
    again = outcome_of(Response(503, told), NOW_S)
    assert isinstance(again, Retry)
    assert again.after_ms is not None
    assert again.after_ms >= 30_000
    assert isinstance(outcome_of(Response(404, told), NOW_S), Dead)


def test_headers_that_log_people_in_are_kept_without_their_values() -> None:
    given = [("Set-Cookie", "session=secret"), ("authorization", "Bearer secret"), ("X-Id", "7")]
    assert kept_headers(given) == (("Set-Cookie", "***"), ("authorization", "***"), ("X-Id", "7"))


def test_headers_are_kept_within_bounds() -> None:
    kept = kept_headers((f"X-{number}", "v" * 10_000) for number in range(1000))
    assert len(kept) == MAX_HEADERS
    assert max(len(value) for _, value in kept) <= 500


# -- signatures ------------------------------------------------------------------------------------------------


def secret(dead_letter: bytes) -> str:
    return "whsec_" + base64.b64encode(dead_letter * 24).decode()


PAYLOAD = '{"order": 42, "name": "grüße"}'
KEY = "main/order.42/1700000000000"


def test_a_signature_is_accepted_by_the_public_library() -> None:
    headers = Signer([secret(b"a")]).headers(KEY, int(time.time()), PAYLOAD.encode())
    assert Verifier(secret(b"a")).verify(PAYLOAD, headers) == {"order": 42, "name": "grüße"}


def test_every_secret_signs_so_that_receivers_can_change_over() -> None:
    headers = Signer([secret(b"a"), secret(b"b")]).headers(KEY, int(time.time()), PAYLOAD.encode())
    for dead_letter in (b"a", b"b"):
        Verifier(secret(dead_letter)).verify(PAYLOAD, headers)
    with pytest.raises(WebhookVerificationError):
        Verifier(secret(b"c")).verify(PAYLOAD, headers)


@pytest.mark.parametrize("change", ["webhook-id", "webhook-timestamp", "payload"])
def test_a_request_changed_on_its_way_is_not_accepted(change: str) -> None:
    headers = Signer([secret(b"a")]).headers(KEY, int(time.time()), PAYLOAD.encode())
    payload = PAYLOAD
    if change == "payload":
        payload = PAYLOAD.replace("42", "43")
    elif change == "webhook-id":
        headers[change] += "x"
    else:
        headers[change] = str(int(headers[change]) - 1)
    with pytest.raises(WebhookVerificationError):
        Verifier(secret(b"a")).verify(payload, headers)


def test_the_id_holds_no_full_stop_which_separates_what_is_signed() -> None:
    first, second = (Signer([secret(b"a")]).headers(KEY, now_s, b"1") for now_s in (1, 2))
    assert first["webhook-id"] == second["webhook-id"] == "main/order%2E42/1700000000000"
