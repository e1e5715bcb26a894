"""`mainspring notify`: channels are listed without their secrets, and tried from the command line."""

import json
import subprocess
import sys
from pathlib import Path

from mainspring.testing.servers import Server
from tests.support.mail_receiver import mail_server
from tests.support.serving import ENVIRON
from tests.support.web_receiver import Answer, receiving

PASSWORD = "p4ss"


def run(folder: Path, *arguments: str, settings: str = "") -> "subprocess.CompletedProcess[str]":
    (folder / "mainspring.toml").write_text(settings)
    command = [sys.executable, "-m", "mainspring", "notify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder, env=ENVIRON)


def test_a_channel_is_tried_with_its_own_settings(tmp_path: Path) -> None:
    with (
        mail_server(tmp_path, password=PASSWORD) as box,
        receiving(lambda _: Answer(403, {}, b"no\x1b[2J")) as receiver,
    ):
        settings = f"""
            http_allow = ["127.0.0.0/8"]
            [notify.ops]
            to = "mail:ops@example.com"
            smtp = "{box.url}"
            ca_file = "{box.ca_file}"
            [notify.hook]
            url = "{receiver.url}?token={PASSWORD}"
            kinds = ["failed", "dead"]
            """
        sent = run(tmp_path, "test", "ops", settings=settings)
        assert (sent.returncode, sent.stdout.startswith("sent: mail to ops@example.com")) == (0, True), sent.stderr
        assert box.mails[0]["Subject"] == "[main] schedule:example failed"
        refused = run(tmp_path, "test", "hook", settings=settings)
        assert refused.returncode == 1
        assert refused.stderr.startswith("mainspring: HTTP 403 Forbidden")
        assert "\x1b" not in refused.stderr
        missing = run(tmp_path, "test", "opps", settings=settings)
        assert (missing.returncode, missing.stderr) == (
            2,
            "mainspring: there is no channel 'opps'; there are ops, hook\n",
        )
        listed = run(tmp_path, "list", settings=settings)
        assert [line.split()[0] for line in listed.stdout.splitlines()] == ["CHANNEL", "ops", "hook"]
        assert listed.stdout.splitlines()[2].endswith("failed,dead")
        rows = json.loads(run(tmp_path, "list", "--json", settings=settings).stdout)
        assert [one["channel"] for one in rows] == ["ops", "hook"]
        assert PASSWORD not in listed.stdout + sent.stdout + refused.stdout + json.dumps(rows)


def test_wrong_settings_end_the_start_with_the_channel_and_what_to_do(tmp_path: Path) -> None:
    ended = run(tmp_path, "list", settings='[notify.ops]\nto = "ops@example.com"\n')
    assert ended.returncode == 2
    assert ended.stderr.startswith("mainspring: mainspring.toml: notify: ops: to is neither mail:<address>")
    none = run(tmp_path, "list")
    assert none.returncode == 0
    assert none.stderr.startswith("no channel is set up in namespace main on ")
    assert none.stderr.endswith("try: a table [notify.<name>] in mainspring.toml\n")


def test_a_beat_from_a_crontab_is_stored(tmp_path: Path, server: Server) -> None:
    assert run(tmp_path, "beat", "backup", "--every", "1h", "--redis-url", server.url, "-n", "beats").returncode == 0
    unknown = run(tmp_path, "beat", "other", "--redis-url", server.url, "-n", "beats")
    assert unknown.returncode == 1
    assert "say when it is expected with every or cron" in unknown.stderr
    header, row = run(tmp_path, "beats", "--redis-url", server.url, "-n", "beats").stdout.splitlines()
    assert header.split() == ["NAME", "EXPECTED", "LAST", "DEADLINE"]
    assert row.startswith("backup  every 1h, grace 1m  2")
    removed = run(tmp_path, "beat", "other", "--remove", "--redis-url", server.url, "-n", "beats")
    assert removed.returncode == 1
    place = f"(namespace beats on {server.url})"
    assert removed.stderr == f"mainspring: there is no beat 'other' {place}\ntry: mainspring notify beats -n beats\n"
