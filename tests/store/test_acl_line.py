"""The ACL line names what the store sends and what the scripts call: no more, and no less."""

import re
from importlib.resources import files
from pathlib import Path

import mainspring
from mainspring.store import acl
from mainspring.store.rights import probes

HERE = Path(mainspring.__file__).parent
_CALLED = re.compile(r"'([A-Z]{3,})'(?:, '([A-Z]+)')?")
_SENT = re.compile(r"\(\s*b?\"([A-Z]{3,})\"(?:, \"([A-Z]+)\")?")
_WITH_SUBCOMMANDS = {"CLIENT", "CLUSTER", "CONFIG", "OBJECT", "SENTINEL", "XGROUP", "XINFO"}

SENDERS = ("client", "engine", "node", "scheduler", "store", "worker")
NOT_THE_USERS = {
    "AUTH": "every user may sign in",
    "CONFIG|GET": "asked for only where INFO does not tell, and a refusal is an answer",
    "CONFIG|SET": "of the embedded server, by its own user",
    "SENTINEL|MASTER": "asked of sentinels, which have users of their own",
    "LOADING": "the first word of an error",
    "NOPERM": "the first word of an error",
}


def _name(command: str, subcommand: str) -> str:
    return f"{command}|{subcommand}" if command in _WITH_SUBCOMMANDS and subcommand else command


def sent() -> set[str]:
    """First words of the tuples that are commands, in every module that makes commands."""
    found: set[str] = set()
    for file in [*HERE.glob("*.py"), *(one for folder in SENDERS for one in (HERE / folder).rglob("*.py"))]:
        # The first has all of them as samples, the second has methods of HTTP, the third names of ours.
        if file.name not in ("rights.py", "http.py") and file != HERE / "__init__.py":
            found |= {_name(*match) for match in _SENT.findall(file.read_text())}
    return found


OPTIONS = {"BYSCORE", "COUNT", "GROUP", "IDLE", "JUSTID", "MKSTREAM", "RETRYCOUNT", "STREAMS", "WITHSCORES"}
"""Words in the scripts that follow a command."""


def called() -> set[str]:
    """Every word in capitals: a script may pass the name of a command on before it calls it."""
    found: set[str] = set()
    for folder in (files("mainspring.store") / "lua").iterdir():
        for file in folder.iterdir():
            found |= {_name(*match) for match in _CALLED.findall(file.read_text())}
    return found - OPTIONS


def test_every_command_that_is_sent_or_called_has_its_place() -> None:
    allowed = {name.upper() for name in acl.commands(disk=True)}
    assert {"RPUSH", "EVALSHA", "CLUSTER|SLOTS"} <= sent()
    assert {"SETRANGE", "XGROUP|CREATE"} <= called()
    unknown = (sent() | called()) - allowed - NOT_THE_USERS.keys()
    assert not unknown, f"give these a place in store/acl.py, and a sample in store/rights.py: {sorted(unknown)}"


def test_no_command_is_allowed_that_is_never_sent() -> None:
    # EVAL and the transactions are put together from parts; all others are found as they are.
    allowed = {name.upper() for name in acl.commands(disk=True)}
    assert allowed - sent() - called() == set()


def test_the_doctor_can_ask_for_every_right() -> None:
    asked = probes("{t}:n", disk=True)
    assert set(acl.commands(disk=True)) - set(asked) == {"multi", "exec", "ssubscribe", "select"}


def test_the_rules_reach_one_namespace_and_no_other() -> None:
    rules = acl.acl_rules("shop", secret="x")
    patterns = [rule for rule in rules if rule[0] in "~&"]
    assert patterns == ["~{shop}:*", "&{shop}:*", "~{shop:*", "&{shop:*"]
    assert "-@all" in rules
    assert not [rule for rule in rules if re.search(r"config|debug|flush|keys|@(?!all)", rule)]
    assert ">PASSWORD" in acl.acl_rules("shop")
