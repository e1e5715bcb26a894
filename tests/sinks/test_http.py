"""The webhook sink against real web servers."""

import asyncio
import base64
import contextlib
import logging
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from standardwebhooks import Webhook as Verifier

from mainspring.model.delivery import DONE, Dead, Done, Outcome, Retry
from mainspring.model.targets.webhook import Basic, Bearer, Webhook
from mainspring.sinks import http_session
from mainspring.sinks.http import HttpOptions, HttpSink
from tests.support.web_receiver import Answer, Request, delivery, receiving

LOCAL = ("127.0.0.0/8",)


@pytest.fixture
async def sink() -> AsyncIterator[HttpSink]:
    made = HttpSink(HttpOptions(allow=LOCAL))
    yield made
    await made.aclose()


async def send(sink: HttpSink, hook: Webhook, payload: bytes = b'{"order": 42}', **more: Any) -> Outcome:
    [outcome] = await sink.deliver_to(hook, [delivery("target:x", payload, **more)])
    return outcome


def held_by(release: threading.Event) -> Callable[[Request], Answer]:
    """Answers nothing until the test says so."""

    def answer(_: Request) -> Answer:
        release.wait(60)
        return Answer()

    return answer


# -- what is sent ----------------------------------------------------------------------------------------------


async def test_the_payload_arrives_as_it_was_given_with_its_key_id_due_and_attempt(sink: HttpSink) -> None:
    with receiving() as receiver:
        one = delivery(receiver.url + "?a=b", b'{"order":  42}', id="grüße/ 1", attempt=3)
        assert await sink.deliver([one]) == [DONE]
    [request] = receiver.requests
    assert (request.method, request.path, request.body) == ("POST", "/hook?a=b", b'{"order":  42}')
    assert request.headers["content-type"] == "application/json"
    assert request.headers["idempotency-key"] == "main/gr%C3%BC%C3%9Fe%2F%201/1700000000123"
    assert request.headers["mainspring-id"] == "gr%C3%BC%C3%9Fe%2F%201"
    assert request.headers["mainspring-due"] == "2023-11-14T22:13:20.123Z"
    assert request.headers["mainspring-attempt"] == "3"
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert "webhook-signature" not in request.headers


async def test_a_retry_carries_the_key_and_due_time_of_the_first_attempt(sink: HttpSink) -> None:
    with receiving() as receiver:
        first = delivery(receiver.url)
        again = delivery(receiver.url, original_due_ms=1_600_000_000_000, attempt=2)
        assert await sink.deliver([first, again]) == [DONE, DONE]
    keys = {request.headers["mainspring-attempt"]: request.headers["idempotency-key"] for request in receiver.requests}
    assert keys == {"1": f"main/{'0' * 32}/1700000000123", "2": f"main/{'0' * 32}/1600000000000"}


async def test_bytes_are_sent_as_bytes_and_a_header_of_the_target_goes_first(sink: HttpSink) -> None:
    with receiving() as receiver:
        await sink.deliver([delivery(receiver.url, b"\xff\x00", raw=True)])
        own = (("Content-Type", "text/csv"), ("X-Shop", "1"), ("User-Agent", "shop"))
        await send(sink, Webhook(receiver.url, headers=own), b"a;b", raw=True)
    assert [request.body for request in receiver.requests] == [b"\xff\x00", b"a;b"]
    assert [request.headers["content-type"] for request in receiver.requests] == [
        "application/octet-stream",
        "text/csv",
    ]
    assert receiver.requests[1].headers["x-shop"] == "1"
    assert receiver.requests[1].headers["user-agent"] == "shop"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "GET", "HEAD"])
async def test_every_method_works_and_only_get_and_head_go_without_a_body(sink: HttpSink, method: str) -> None:
    with receiving(lambda _: Answer(200, {}, b"ok")) as receiver:
        assert await send(sink, Webhook(receiver.url, method=method)) == DONE
    [request] = receiver.requests
    assert request.method == method
    assert request.body == (b"" if method in ("GET", "HEAD") else b'{"order": 42}')


async def test_user_and_password_or_a_token_are_sent(sink: HttpSink) -> None:
    with receiving() as receiver:
        await send(sink, Webhook(receiver.url, auth=Basic("ada", "hunter2")))
        await send(sink, Webhook(receiver.url, auth=Bearer("token")))
    sent = [request.headers["authorization"] for request in receiver.requests]
    assert sent == ["Basic " + base64.b64encode(b"ada:hunter2").decode(), "Bearer token"]


async def test_a_signed_request_is_accepted_by_the_public_library(sink: HttpSink) -> None:
    secrets = tuple("whsec_" + base64.b64encode(dead_letter * 32).decode() for dead_letter in (b"n", b"o"))
    with receiving() as receiver:
        await send(sink, Webhook(receiver.url, secrets=secrets), '{"name": "grüße"}'.encode())
    [request] = receiver.requests
    for secret in secrets:
        assert Verifier(secret).verify(request.body, dict(request.headers)) == {"name": "grüße"}


async def test_a_proxy_in_the_environment_is_not_used(sink: HttpSink, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as proxy, receiving() as receiver:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert await sink.deliver([delivery(receiver.url)]) == [DONE]
        assert (proxy.connections, len(receiver.requests)) == (0, 1)


# -- connections -----------------------------------------------------------------------------------------------


async def test_connections_are_used_again(sink: HttpSink) -> None:
    with receiving(lambda _: Answer(200, {}, b"x" * 20_000)) as receiver:
        hook = Webhook(receiver.url, concurrency=3)
        outcomes = await sink.deliver_to(hook, [delivery("target:x", number=n) for n in range(60)])
        assert list(outcomes) == [DONE] * 60
        assert receiver.connections <= 3
        assert receiver.most_at_once <= 3


async def test_only_some_connections_are_kept_for_very_many_hosts(
    sink: HttpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a file of the process, and those that wait for their next use are under way nowhere."""
    monkeypatch.setattr(http_session, "most_connections", lambda: 8)
    made, still_open = 0, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made, still_open
        made, still_open = made + 1, still_open + 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n1")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        still_open -= 1
        writer.close()

    async with await asyncio.start_server(serve, [f"127.0.0.{n}" for n in range(1, 31)]) as server:
        hosts = [one.getsockname() for one in server.sockets]
        for _ in range(2):
            for host, port in hosts:
                assert await send(sink, Webhook(f"http://{host}:{port}/"), b"1") == DONE
        async with asyncio.timeout(60):
            while still_open > 4:  # noqa: ASYNC110  # what is closed here is heard of there a little later
                await asyncio.sleep(0.01)
        assert made == 30 + 26, "and those that are kept are used again"
        await sink.aclose()


async def test_a_host_gets_at_most_its_limit_of_requests_at_a_time() -> None:
    together = threading.Barrier(4, timeout=30)

    def answer(_: Request) -> Answer:
        together.wait()  # passes only in groups of four: with fewer at one time this would never end
        return Answer()

    sink = HttpSink(HttpOptions(allow=LOCAL, concurrency=4))
    with receiving(answer) as receiver:
        assert list(await sink.deliver([delivery(receiver.url, number=n) for n in range(40)])) == [DONE] * 40
        assert receiver.most_at_once == 4
    await sink.aclose()


async def test_a_slow_host_does_not_delay_others() -> None:
    release = threading.Event()
    sink = HttpSink(HttpOptions(allow=LOCAL, concurrency=2, timeout_s=60, room=1000))
    with receiving(held_by(release)) as slow, receiving() as quick:
        batches = [
            asyncio.create_task(sink.deliver([delivery(slow.url, number=64 * at + n) for n in range(64)]))
            for at in range(40)
        ]
        async with asyncio.timeout(60):
            for number in range(20):
                assert await sink.deliver([delivery(quick.url, number=number)]) == [DONE]
        assert slow.most_at_once <= 2
        assert len(slow.requests) <= 2
        release.set()
        outcomes = [one for batch in batches for one in await batch]
    delivered, put_off = outcomes.count(DONE), [one for one in outcomes if isinstance(one, Retry)]
    assert delivered + len(put_off) == 40 * 64
    assert delivered == len(slow.requests) >= 400
    assert put_off
    assert all(one.untried and one.after_ms for one in put_off)
    await sink.aclose()


async def test_closing_ends_requests_under_way_and_a_closed_sink_opens_again() -> None:
    release = threading.Event()
    sink = HttpSink(HttpOptions(allow=LOCAL))
    with receiving(held_by(release)) as receiver:
        under_way = asyncio.create_task(sink.deliver([delivery(receiver.url)]))
        async with asyncio.timeout(60):
            while not receiver.requests:  # noqa: ASYNC110  # the thread of the receiver tells us nothing
                await asyncio.sleep(0.01)
        await sink.aclose()
        with pytest.raises(asyncio.CancelledError):
            await under_way
        release.set()
        assert await sink.deliver([delivery(receiver.url)]) == [DONE]
    await sink.aclose()
    await sink.aclose()


# -- answers ---------------------------------------------------------------------------------------------------


async def test_status_headers_and_the_first_bytes_of_the_answer_are_kept_with_the_outcome(sink: HttpSink) -> None:
    with receiving(lambda _: Answer(202, {"X-Run": "7"}, b"accepted")) as receiver:
        [outcome] = await sink.deliver([delivery(receiver.url)])
    assert isinstance(outcome, Done)
    assert outcome.response is not None
    assert (outcome.response.status, outcome.response.body) == (202, b"accepted")
    assert ("X-Run", "7") in outcome.response.headers
    assert outcome.response.duration_ms >= 0


@pytest.mark.parametrize(("kept", "size"), [(4096, 5000), (65536, 70_000), (0, 10), (4096, 40_000_000)])
async def test_a_big_answer_is_cut(sink: HttpSink, kept: int, size: int) -> None:
    with receiving(lambda _: Answer(200, {}, b"x" * size)) as receiver:
        for _ in range(2):
            outcome = await send(sink, Webhook(receiver.url, response_bytes=kept))
            assert outcome == DONE
            assert outcome.response is not None
            assert outcome.response.body == b"x" * kept
        # A short rest is read so that the connection can be used again; a long one is not worth it.
        assert receiver.connections == (1 if size < 100_000 else 2)


async def test_a_compressed_answer_is_kept_as_it_came(sink: HttpSink) -> None:
    with receiving(lambda _: Answer(200, {"Content-Encoding": "gzip"}, b"not gzip at all")) as receiver:
        [outcome] = await sink.deliver([delivery(receiver.url)])
    assert outcome.response is not None
    assert outcome.response.body == b"not gzip at all"


async def test_a_failure_says_the_status_and_what_the_target_wrote(
    sink: HttpSink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "mainspring.http")
    answers = iter([Answer(503, {"Retry-After": "7"}, b"come back\nlater"), Answer(404, {}, b"no such order")])
    with receiving(lambda _: next(answers)) as receiver:
        [again] = await sink.deliver([delivery(receiver.url + "?key=hunter2")])
        [never] = await sink.deliver([delivery(receiver.url)])
    assert isinstance(again, Retry)
    assert again.reason == "HTTP 503 Service Unavailable: come back later"
    assert again.after_ms is not None
    assert 7_000 <= again.after_ms <= 7_700
    assert never == Dead("HTTP 404 Not Found: no such order")
    assert "503 after" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_a_failure_and_never_followed(sink: HttpSink, status: int) -> None:
    with receiving() as canary, receiving(lambda _: Answer(status, {"Location": canary.url})) as receiver:
        [outcome] = await sink.deliver([delivery(receiver.url)])
        assert canary.connections == 0
    assert isinstance(outcome, Dead if status in (301, 308) else Retry)
    assert "redirects are never followed" in outcome.reason


async def test_the_limit_of_a_host_holds_for_all_targets_on_it() -> None:
    sink = HttpSink(HttpOptions(concurrency=4, allow=("127.0.0.0/8",)))
    with receiving() as receiver:
        batch = [delivery("target:x", number=n) for n in range(40)]
        hooks = [Webhook(receiver.url), *(Webhook(receiver.url, concurrency=count) for count in (2, 3, 100))]
        await asyncio.gather(*(sink.deliver_to(hook, batch) for hook in hooks))
        assert len(receiver.requests) == 160
        assert receiver.connections <= 4
    await sink.aclose()


async def test_after_410_nothing_more_is_sent_of_what_waits_and_the_outcome_says_so(sink: HttpSink) -> None:
    with receiving(lambda _: Answer(410)) as receiver:
        hook = Webhook(receiver.url, gone_disables=True, concurrency=1)
        batches = [[delivery("target:x", number=n) for n in range(5)] for _ in range(3)]
        outcomes = [one for some in await asyncio.gather(*(sink.deliver_to(hook, b) for b in batches)) for one in some]
        assert len(receiver.requests) == 1
        assert all(isinstance(one, Dead) for one in outcomes)
        assert [one.disables for one in outcomes if isinstance(one, Dead)].count(True) == 1
        assert str(outcomes[-1]) == "dropped while paused: HTTP 410 Gone"
        assert isinstance(await send(sink, hook), Dead)
        assert len(receiver.requests) == 2, "whether it may be tried again is not for the sink to say"


async def test_without_gone_disables_410_ends_its_own_task_only(sink: HttpSink) -> None:
    with receiving(lambda _: Answer(410)) as receiver:
        outcomes = await sink.deliver_to(Webhook(receiver.url), [delivery("target:x", number=n) for n in range(5)])
        assert len(receiver.requests) == 5
    assert not any(isinstance(one, Dead) and one.disables for one in outcomes)


# -- trouble on the way ----------------------------------------------------------------------------------------


async def test_no_answer_in_time_is_tried_again(sink: HttpSink) -> None:
    release = threading.Event()
    with receiving(held_by(release)) as receiver:
        outcome = await send(sink, Webhook(receiver.url, timeout_s=0.05))
        release.set()
    assert outcome == Retry("no answer within 0.05 s")


async def test_an_answer_that_never_ends_is_cut_off_in_time(sink: HttpSink) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        outcome = await send(sink, Webhook(f"http://127.0.0.1:{port}/", timeout_s=0.2))
        assert outcome == Retry("no answer within 0.2 s")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "closed the connection without an answer"),
        (b"SMTP ready\r\n\r\n", "Expected HTTP/"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort", "ClientPayloadError"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", "Got more than"),
    ],
)
async def test_a_malformed_response_is_tried_again(sink: HttpSink, said: bytes, reason: str) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"42}")
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        [outcome] = await sink.deliver([delivery(f"http://127.0.0.1:{port}/")])
    assert isinstance(outcome, Retry)
    assert reason in outcome.reason


async def test_a_refused_connection_is_tried_again(sink: HttpSink) -> None:
    with receiving() as receiver:
        url = receiver.url
    [outcome] = await sink.deliver([delivery(url)])
    assert isinstance(outcome, Retry)
    assert outcome.reason.startswith("cannot connect: ")


async def test_a_name_that_cannot_be_resolved_is_tried_again(sink: HttpSink) -> None:
    [outcome] = await sink.deliver([delivery("http://nowhere.invalid/")])
    assert isinstance(outcome, Retry)
    assert outcome.reason.startswith("the name cannot be resolved: ")


async def test_an_address_that_makes_no_sense_is_dead(sink: HttpSink) -> None:
    [outcome] = await sink.deliver([delivery("http://user:hunter2@127.0.0.1/")])
    assert isinstance(outcome, Dead)
    assert "user and password" in outcome.reason
    assert "hunter2" not in outcome.reason


# -- TLS -------------------------------------------------------------------------------------------------------


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self._ca = trustme.CA()
        self.file = str(folder / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.file)

    def serve_as(self, host: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(host).configure_cert(context)
        return context


async def test_our_own_authority_is_trusted_where_it_is_named_and_only_there(sink: HttpSink, tmp_path: Path) -> None:
    ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    with receiving(tls=ours.serve_as("127.0.0.1")) as receiver:
        assert await send(sink, Webhook(receiver.url, ca_file=ours.file)) == DONE
        for wrong in (Webhook(receiver.url), Webhook(receiver.url, ca_file=other.file)):
            outcome = await send(sink, wrong)
            assert isinstance(outcome, Retry)
            assert outcome.reason.startswith("the server's certificate is not accepted: ")
    assert len(receiver.requests) == 1


async def test_a_certificate_for_another_host_is_refused(sink: HttpSink, tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")
    with receiving(tls=ours.serve_as("elsewhere.example")) as receiver:
        outcome = await send(sink, Webhook(receiver.url, ca_file=ours.file))
    assert isinstance(outcome, Retry)
    assert "certificate" in outcome.reason
    assert receiver.requests == []


async def test_a_name_is_verified_although_its_address_is_what_is_connected_to(tmp_path: Path) -> None:
    ours = Authority(tmp_path, "ours")

    async def lookup(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    sink = HttpSink(HttpOptions(allow=LOCAL), lookup)
    with receiving(tls=ours.serve_as("shop.example")) as receiver:
        hook = Webhook(f"https://shop.example:{receiver.port}/", ca_file=ours.file)
        assert await send(sink, hook) == DONE
        assert receiver.requests[0].headers["host"] == f"shop.example:{receiver.port}"
        wrong = Webhook(f"https://other.example:{receiver.port}/", ca_file=ours.file)
        assert isinstance(await send(sink, wrong), Retry)
    await sink.aclose()


async def test_an_authority_that_cannot_be_read_is_named(sink: HttpSink, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for name in ("none.pem", "empty.pem"):
        outcome = await send(sink, Webhook("https://127.0.0.1/", ca_file=str(tmp_path / name)))
        assert isinstance(outcome, Retry)
        assert f"{name} cannot be used" in outcome.reason


# -- without the extra -----------------------------------------------------------------------------------------


async def test_without_aiohttp_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("mainspring.sinks.http_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    sink = HttpSink(HttpOptions(allow=LOCAL))
    for _ in range(2):
        [outcome] = await sink.deliver([delivery("http://127.0.0.1/")])
        assert isinstance(outcome, Retry)
        assert "pip install 'mainspring[http]'" in outcome.reason
    assert len(caplog.records) == 1
    await sink.aclose()


async def test_no_task_holds_its_connection_for_longer_than_the_settings_allow() -> None:
    release = threading.Event()

    def answer(_: Request) -> Answer:
        release.wait(60)
        return Answer()

    sink = HttpSink(HttpOptions(allow=LOCAL, max_timeout_s=0.2))
    with receiving(answer) as receiver:
        async with asyncio.timeout(30):
            [outcome] = await sink.deliver([delivery(receiver.url, timeout_ms=10 * 365 * 86_400_000)])
        release.set()
    await sink.aclose()
    assert isinstance(outcome, Retry)
    assert outcome.reason == "no answer within 0.2 s"
