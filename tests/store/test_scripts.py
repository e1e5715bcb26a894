"""Scripts: put together once, called by their hash, and kept to their contract."""

import re
from importlib.resources import files

import pytest

from mainspring.model.clock import ManualClock, ServerClock
from mainspring.store import scripts
from mainspring.store.scripts import Scripts, text_of

FILES = {path.name: path for folder in (files("mainspring.store") / "lua").iterdir() for path in folder.iterdir()}
NAMES = sorted(name[:-4] for name in FILES if name[0] != "_" and name.endswith(".lua"))
PIECES = sorted(name for name in FILES if name[0] == "_" and name.endswith(".lua"))


@pytest.mark.parametrize("name", NAMES)
def test_a_script_names_its_keys_arguments_and_answer_on_its_first_lines(name: str) -> None:
    head = FILES[f"{name}.lua"].read_text().split("\nlocal ")[0]
    for word in ("KEYS", "ARGV", "returns"):
        assert re.search(rf"^-- {word}\b", head, re.MULTILINE), f"{name}.lua does not say its {word}"


@pytest.mark.parametrize("name", NAMES)
def test_every_script_can_be_put_together(name: str) -> None:
    for manual in (False, True):
        text = text_of(name, manual)
        assert text.startswith("#!lua")
        assert not re.search(r"^\s*--", text, re.MULTILINE), "comments stay at home"


@pytest.mark.parametrize("name", NAMES)
def test_only_puts_are_refused_when_the_server_is_full(name: str) -> None:
    assert ("allow-oom" in text_of(name, False)) == (name not in ("put_ids", "register", "replace", "note_lanes"))


def test_every_piece_is_used() -> None:
    used = {f"_{piece}.lua" for pieces in scripts._NEEDS.values() for piece in pieces}
    assert set(PIECES) == used | {"_time_manual.lua"}


@pytest.mark.parametrize("name", NAMES)
def test_the_servers_clock_decides_unless_a_test_holds_it(name: str) -> None:
    assert "ARGV[#ARGV]" not in text_of(name, False)
    assert "redis.call('TIME')" not in text_of(name, True)


def test_a_call_carries_the_hash_the_keys_and_the_arguments() -> None:
    call = Scripts(ServerClock()).call("release", ["k"], ["token"])
    assert call[0] == "EVALSHA"
    assert len(str(call[1])) == 40
    assert call[2:] == (1, "k", "token")


def test_under_a_manual_clock_its_time_travels_last() -> None:
    call = Scripts(ManualClock(5)).call("release", ["k"], ["token"])
    assert call[2:] == (1, "k", "token", 5_000)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_can_be_sent_in_full_to_a_server_that_forgot_the_script(name: str) -> None:
    for clock in (ServerClock(), ManualClock()):
        made = Scripts(clock)
        call = made.call(name, ["k"], ["a"])
        whole = made.in_full(call)
        assert whole == ("EVAL", text_of(name, clock.manual), *call[2:])


def test_an_unknown_hash_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError):
        Scripts(ServerClock()).in_full(("EVALSHA", "0" * 40, 0))
