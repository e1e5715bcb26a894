"""Notices of a whole node: a schedule fails and recovers, mail and webhook arrive, the watchdog is called."""

import asyncio
import json
from pathlib import Path

from mainspring.config.config import Config
from mainspring.node.node import Node
from tests.support.mail_receiver import mail_server
from tests.support.web_receiver import Answer, Request, receiving


async def test_a_node_sends_notices_by_mail_and_webhook_and_calls_the_watchdog(tmp_path: Path) -> None:
    working = asyncio.Event()

    def answer(request: Request) -> Answer:
        failing = request.path == "/job" and not working.is_set()
        return Answer(500, {}, b"the disk is full") if failing else Answer()

    with receiving(answer) as receiver, mail_server(tmp_path, password="secret") as box:
        base = receiver.url.removesuffix("/hook")
        config = Config(
            data_dir=tmp_path / "data",
            notify={  # type: ignore[arg-type]  # a table, as in a file
                "ops": {"to": "mail:ops@example.com", "smtp": box.url, "ca_file": box.ca_file},
                "hook": {"url": f"{base}/notices"},
            },
            watchdog_url=f"{base}/watchdog",
        )
        node = Node(config)
        await node.start()
        try:
            assert node.client is not None
            await node.client.schedules.add("poll", every="1s", target=f"{base}/job", retries=0, timeout="500ms")
            async with asyncio.timeout(60):
                while not box.mails:  # noqa: ASYNC110  # the server's thread tells us nothing
                    await asyncio.sleep(0.05)
            working.set()
        finally:
            await node.stop()
        paths = [one.path for one in receiver.requests]
        [told] = [json.loads(one.body) for one in receiver.requests if one.path == "/notices"]
    [mail] = box.mails
    assert mail["Subject"] == "[main] schedule:poll failed"
    text = mail.get_body(("plain",))
    assert text is not None
    assert "  status: 500" in text.get_content()
    assert told["title"] == "schedule:poll failed"
    assert paths.count("/watchdog") in (1, 2)  # a minute may have begun meanwhile
