"""Access as a user meets it: `mainspring serve` and `mainspring key` as processes of their own."""

import http.client
import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from mainspring.testing.servers import wait_until
from tests.support.api_calls import LATER
from tests.support.serving import ENVIRON, MAIN, Serve, run, serving
from tests.support.web_receiver import Answer, Request, receiving
from tests.support.workers import WorkerProcess

NOWHERE = "http://127.0.0.1:9/hook?token="


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    with serving(tmp_path) as start:
        yield start


def key(folder: Path, *options: str) -> str:
    made = run("key", "add", *options, "--data-dir", str(folder / "data"), cwd=folder)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def call(url: str, token: str | None, path: str, body: Any = None, method: str | None = None) -> tuple[int, bytes]:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.replace("0.0.0.0", "127.0.0.1") + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("more", [(), ("--processes", "2")], ids=["one process", "several"])
def test_serve_beyond_loopback_without_keys_refuses_and_says_how_to_make_one(
    serve: Callable[..., Serve], more: tuple[str, ...]
) -> None:
    node = serve("--host", "0.0.0.0", *more, wait=False)
    assert node.process.wait(60) == 2
    assert "mainspring key add" in node.log
    assert "MAINSPRING_API_KEY_FILE" in node.log


def test_serve_beyond_loopback_answers_those_who_have_a_key(serve: Callable[..., Serve], tmp_path: Path) -> None:
    token = key(tmp_path, "shop", "--role", "operator")
    node = serve("--host", "0.0.0.0")
    tick = {"item": "a", "at": LATER}
    assert call(node.url, None, "/ticks", tick)[0] == 401
    assert call(node.url, token, "/ticks", tick)[0] == 202
    for path in ("/livez", "/readyz", "/healthy", "/docs"):  # a machine that stalls makes a probe say 503 for once
        wait_until(lambda: call(node.url, None, path)[0] == 200, f"{path} is open", timeout_s=60)  # noqa: B023
    assert node.end() == 0


def test_insecure_answers_everybody_and_is_asked_for_by_name(serve: Callable[..., Serve]) -> None:
    node = serve("--host", "0.0.0.0", "--insecure")
    assert call(node.url, None, "/ticks", {"item": "a", "at": LATER})[0] == 202
    assert node.end() == 0


def test_the_first_key_may_come_from_a_file(
    serve: Callable[..., Serve], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run("key", "generate", cwd=tmp_path)
    token = made.stdout.strip()
    file = tmp_path / "keys.txt"
    file.write_text(f"# the operators' own\n{token}\n")
    (tmp_path / "mainspring.toml").write_text(f'api_key_file = "{file}"\naccess = "keys"\n')
    node = serve()
    assert call(node.url, None, "/v1/audit")[0] == 401
    assert call(node.url, token, "/v1/audit")[0] == 200
    assert node.end() == 0
    file.write_text("password\n")
    refused = serve(wait=False)
    assert refused.process.wait(60) == 2
    assert "api_key_file" in refused.log


def test_keys_are_made_listed_and_revoked_and_the_trail_records_it(serve: Callable[..., Serve], tmp_path: Path) -> None:
    token = key(tmp_path, "shop", "--role", "submit-only", "--target", "log:*", "--expires", "90d", "--rate", "50")
    where = ("--data-dir", str(tmp_path / "data"))
    listed = run("key", "list", *where, "--json", cwd=tmp_path)
    [shown] = json.loads(listed.stdout)
    assert (shown["name"], shown["role"], shown["targets"], shown["rate"]) == ("shop", "submit-only", ["log:*"], 50.0)
    assert token not in listed.stdout
    assert shown["id"] in run("key", "list", *where, cwd=tmp_path).stdout
    node = serve("--host", "0.0.0.0")
    assert call(node.url, token, "/ticks", {"item": "a", "at": LATER})[0] == 202
    assert call(node.url, token, "/v1/tasks")[0] == 403
    assert run("key", "revoke", shown["id"], *where, cwd=tmp_path).returncode == 0
    wait_until(lambda: call(node.url, token, "/ticks", {"item": "a", "at": LATER})[0] == 401, "the key is gone")
    told = run("key", "revoke", shown["id"], "--json", *where, cwd=tmp_path)
    assert json.loads(told.stdout) == [{"id": shown["id"], "outcome": "unknown"}]
    again = run("key", "revoke", shown["id"], *where, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (1, f"{shown['id']}: unknown\n")
    trail = run("audit", *where, "--json", cwd=tmp_path)
    assert [one["change"]["what"] for one in json.loads(trail.stdout)["changes"]] == ["key.revoke", "key.add"]
    assert "key.revoke" in run("audit", *where, cwd=tmp_path).stdout
    assert token not in trail.stdout
    assert node.end() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--role", "king"), "is not one of reader"),
        (("--expires", "2001-01-01T00:00:00Z"), "has passed"),
        (("--target", "https://a.exam*"), "name the host in full"),
        (("--target", "*"), "target pattern"),
        (("--also", "a:b"), "namespace"),
        (("--rate", "0"), "rate"),
        (("a\nb",), "printable"),
    ],
)
def test_a_key_that_makes_no_sense_is_not_made(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    made = run("key", "add", *options, "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
    assert made.returncode == 2
    assert message in made.stderr
    assert made.stdout == ""


# -- TLS -------------------------------------------------------------------------------------------------------


def test_the_api_speaks_tls_where_it_has_a_certificate(serve: Callable[..., Serve], tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.RSA)  # the weak ciphers below need one
    cert, secret = tmp_path / "api.pem", tmp_path / "api.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(secret))
    (tmp_path / "mainspring.toml").write_text(f'api_tls_cert = "{cert}"\napi_tls_key = "{secret}"\n')
    node = serve(wait=False)
    wait_until(lambda: "the API is at https://" in node.log, "serve is ready", timeout_s=60)
    port = int(node.log.partition("the API is at https://127.0.0.1:")[2].partition('"')[0].partition("\n")[0])
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    secure = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=trusting)

    def well() -> bool:
        secure.request("GET", "/readyz")
        answer = secure.getresponse()
        answer.read()
        assert answer.headers["strict-transport-security"].startswith("max-age=")
        return answer.status == 200

    wait_until(well, "the probe says 200", timeout_s=60)
    secure.close()
    # A command with the same authority, over the same TLS.
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    trusts = {"SSL_CERT_FILE": str(tmp_path / "ca.pem"), "MAINSPRING_API_URL": f"https://127.0.0.1:{port}"}
    for environ, code in ((trusts, 0), (trusts | {"SSL_CERT_FILE": ""}, 1)):
        told = subprocess.run([*MAIN, "task", "count"], env=ENVIRON | environ, cwd=tmp_path, check=False, timeout=60)
        assert told.returncode == code
    strangers = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=ssl.create_default_context())
    with pytest.raises(ssl.SSLCertVerificationError):
        strangers.request("GET", "/readyz")
    trusting.maximum_version = ssl.TLSVersion.TLSv1_2
    for cipher in ("AES128-GCM-SHA256", "AES128-SHA", "ECDHE-RSA-AES128-SHA"):  # no forward secrecy, or SHA-1
        trusting.set_ciphers(cipher)
        weak = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=trusting)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            weak.request("GET", "/readyz")
    plain = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    plain.request("GET", "/readyz")
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.getresponse()
    plain.close()
    assert node.end() == 0


@pytest.mark.parametrize("content", ["no certificate", None])
def test_a_certificate_that_cannot_be_used_is_a_clear_error(
    serve: Callable[..., Serve], tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "api.pem"
    if content is not None:
        file.write_text(content)
    (tmp_path / "mainspring.toml").write_text(f'api_tls_cert = "{file}"\napi_tls_key = "{file}"\n')
    node = serve(wait=False)
    assert node.process.wait(60) == 2
    assert "api_tls_cert" in node.log


# -- logs ------------------------------------------------------------------------------------------------------


def test_no_key_and_no_payload_is_ever_in_the_log(serve: Callable[..., Serve], tmp_path: Path) -> None:
    """Canaries: everything that is secret is sent in every way there is, right and wrong, at the lowest log level."""
    token = key(tmp_path, "canary", "--role", "admin")
    (tmp_path / "mainspring.toml").write_text(
        'access = "keys"\nlog_level = "debug"\n[targets.hook]\n'
        f'url = "{NOWHERE}canary-url"\nheaders = {{ x-key = "canary-header" }}\n'
        'auth = { user = "u", password = "canary-password" }\n[retry]\nmax_attempts = 2\nbase = "10ms"\n'
    )
    node = serve()
    payload = {"secret": "canary-payload"}
    ways: list[tuple[str, Any]] = [
        ("/v1/tasks", {"target": "null:", "payload": payload, "id": "a"}),
        ("/v1/tasks", {"target": "target:hook", "payload": payload, "id": "b"}),
        ("/v1/tasks", {"target": f"{NOWHERE}canary-target", "payload": payload, "id": "c"}),
        ("/v1/tasks", {"target": "smtp:x", "payload": payload}),
        ("/v1/tasks", b'{"target": "null:", "payload": "canary-payload'),
        ("/v1/tasks:batch", b'{"target": "null:", "payload": "canary-payload"}\n{"canary-payload"\n'),
        ("/ticks", {"item": "canary-payload", "at": LATER}),
        ("/ticks", b'{"item": "canary-payload"'),
        ("/v1/schedules", {"name": "s", "every": "1s", "target": "null:", "payload": payload}),
    ]
    for path, body in ways:
        for shown in (token, "msk_canary-wrong-key-canary-wrong-key-canary", "canary-basic"):
            call(node.url, shown, path, body)
    call(node.url, token, "/v1/tasks/a", method="DELETE")
    call(node.url, token, "/v1/targets")
    wait_until(lambda: call(node.url, token, "/v1/dead/b")[0] == 200, "the webhook is given up", timeout_s=60)
    call(node.url, token, "/v1/dead/b/replay", {})
    status, trail = call(node.url, token, "/v1/audit")
    assert status == 200
    assert b"canary-payload" not in trail
    assert node.end() == 0
    for secret in (token, token.removeprefix("msk_"), "canary-"):
        assert secret not in node.log.replace('"canary"', ""), secret


ECHOING_APP = """
from mainspring import Config, Dead, Scheduler

scheduler = Scheduler(Config())


@scheduler.handler(queue="cry")
def repeat(secret: str) -> None:
    try:
        raise KeyError(secret)
    except KeyError as error:
        raise ValueError(f"refused: {secret}") from error


@scheduler.handler(queue="cry")
async def give_up(secret: str) -> None:
    raise Dead(f"never: {secret}")
"""


def dead_letter_of(node: Serve, name: str) -> str:
    path = f"/v1/dead/{name}"
    wait_until(lambda: call(node.url, None, path)[0] == 200, f"{name} is given up", timeout_s=60)
    return call(node.url, None, path)[1].decode()


def _echo(request: Request) -> Answer:
    told = json.dumps({"headers": dict(request.headers), "path": request.path, "body": request.body.decode()})
    return Answer(400, {"x-echo": request.headers["authorization"], "location": request.path}, told.encode())


@pytest.mark.parametrize("redacted", [False, True])
def test_the_log_says_what_receivers_commands_and_handlers_said_unless_it_is_redacted(
    serve: Callable[..., Serve], tmp_path: Path, *, redacted: bool
) -> None:
    """The same canaries, sent back by those who got them; no log and nothing that is kept has the credentials."""
    (tmp_path / "app.py").write_text(ECHOING_APP)
    with receiving(_echo) as receiver:
        (tmp_path / "mainspring.toml").write_text(
            f'log_level = "debug"\nlog_format = "json"\nlog_redact = {str(redacted).lower()}\n'
            'http_allow = ["127.0.0.1"]\n[targets.hook]\n'
            f'url = "{receiver.url}?token=canary-url"\nheaders = {{ x-key = "canary/header\\"" }}\n'
            'auth = { user = "u", password = "canary-password" }\n[retry]\nmax_attempts = 1\n'
            '[commands.cry]\nargv = ["sh", "-c", "echo canary-printed >&2; exit 3"]\nqueue = "cry"\n'
        )
        node = serve()
        worker = WorkerProcess(tmp_path, "app:scheduler", "--data-dir", str(tmp_path / "data"))
        try:
            payload = {"secret": "canary-payload"}
            targets = {
                "a": ("target:hook", payload, "canary-payload"),
                "b": ("queue:cry/repeat", payload, "ValueError: refused: canary-payload"),
                "c": ("queue:cry/give_up", payload, "never: canary-payload"),
                "d": ("queue:cry/give_up", {"canary-field": 1, "secret": "x"}, "canary-field"),
                "e": ("command:cry", None, "exit code 3: canary-printed"),
            }
            for name, (target, given, _) in targets.items():
                status, said = call(node.url, None, "/v1/tasks", {"target": target, "payload": given, "id": name})
                assert status == 201, said
            for name, (_, _, kept) in targets.items():
                assert kept in dead_letter_of(node, name), "the letter has the words"
            dead_letter = dead_letter_of(node, "a")
            assert worker.end() == 0
        finally:
            worker.remove()
    assert node.end() == 0
    for secret in ("canary-url", "canary/header", "canary\\/header", "canary-password", "dTpjYW5hcnktcGFzc3dvcmQ"):
        assert secret not in dead_letter + node.log + worker.log
    assert "HTTP 400 Bad Request" in node.log
    lines = (
        "ValueError: refused: canary-payload",
        "never: canary-payload",
        "exit code 3: canary-printed",
        "canary-field",
    )
    if redacted:
        assert "canary" not in node.log + worker.log
        lines = ("ValueError in repeat (app.py:", "Dead in give_up (app.py:", "exit code 3", "does not fit queue:cry")
    for line in lines:
        assert line in worker.log
    assert "Traceback" in worker.log
    debug = [json.loads(line) for line in node.log.splitlines() if '"mainspring.http"' in line]
    assert [line["task"] for line in debug] == ["a"]
