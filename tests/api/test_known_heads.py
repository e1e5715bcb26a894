"""Heads that came on a connection before."""

from mainspring.api.server import MAX_BYTES, MOST, KnownHeads

HEADERS = {b"host": b"localhost", b"content-length": b"3"}
HEAD = b"POST /ticks HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3"


def known(packet: bytes, body: bytes) -> KnownHeads:
    heads = KnownHeads()
    heads.learn(packet, HEADERS, body)
    return heads


def test_the_same_head_with_another_body_of_that_length_is_read() -> None:
    heads = known(HEAD + b"\r\n\r\nabc", b"abc")
    assert heads.read(HEAD + b"\r\n\r\nxyz") == (HEADERS, b"xyz")


def test_a_body_that_is_not_all_there_or_has_something_behind_it_is_for_the_parser() -> None:
    heads = known(HEAD + b"\r\n\r\nabc", b"abc")
    assert heads.read(HEAD + b"\r\n\r\nab") is None
    assert heads.read(HEAD + b"\r\n\r\nabcPOST") is None
    assert heads.read(HEAD) is None


def test_a_body_with_an_empty_line_is_whole() -> None:
    heads = known(HEAD + b"\r\n\r\nabc", b"abc")
    heads.learn(HEAD.replace(b"3", b"4") + b"\r\n\r\n\r\n\r\n", HEADERS, b"\r\n\r\n")
    assert heads.read(HEAD.replace(b"3", b"4") + b"\r\n\r\n\r\n\r\n") == (HEADERS, b"\r\n\r\n")


def test_any_other_head_is_for_the_parser() -> None:
    heads = known(HEAD + b"\r\n\r\nabc", b"abc")
    assert heads.read(HEAD.replace(b"localhost", b"elsewhere") + b"\r\n\r\nabc") is None
    assert heads.read(HEAD.replace(b"/ticks", b"/v1/tasks") + b"\r\n\r\nabc") is None


def test_only_a_packet_that_was_one_request_teaches_a_head() -> None:
    for packet, body in ((b"", b""), (b"\r\n\r\n", b""), (HEAD + b"\r\n\r\nabcdef", b"abc"), (b"bc", b"abc")):
        heads = known(packet, body)
        assert heads.read(packet) is None
        assert heads.read(b"\r\n\r\n") is None


def test_known_heads_are_few_and_short() -> None:
    heads = known(b"POST /ticks HTTP/1.1\r\nx: %b\r\n\r\nabc" % (b"y" * MAX_BYTES), b"abc")
    assert heads.read(b"POST /ticks HTTP/1.1\r\nx: %b\r\n\r\nabc" % (b"y" * MAX_BYTES)) is None
    packets = [HEAD + b"\r\nx: %d\r\n\r\nabc" % n for n in range(MOST + 1)]
    for packet in packets:
        heads.learn(packet, HEADERS, b"abc")
    assert [heads.read(packet) is not None for packet in packets] == [False] * MOST + [True]
