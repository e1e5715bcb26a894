"""`mainspring acl`: the smallest rights with which everything works, as a line for the server."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from mainspring.cli.reach import Json, Namespace, Settings, load
from mainspring.model.errors import InvalidInput
from mainspring.store.acl import acl_rules

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_USER = re.compile(r"[A-Za-z0-9._-]{1,64}")


@app.command()
def acl(
    user: Annotated[str, typer.Option(help="Name of the user.")] = "mainspring",
    namespace: Namespace = None,
    password_file: Annotated[Path | None, typer.Option(help="File with its password; printed as a hash.")] = None,
    disk: Annotated[bool, typer.Option("--disk", help="Allow durability=disk; needs Redis 7.2 or Valkey.")] = False,
    file: Annotated[bool, typer.Option("--file", help="As a line of an ACL file.")] = False,
    config: Settings = None,
    json: Json = False,
) -> None:
    """Print the ACL line of a user that may do what Mainspring does in one namespace, and nothing else."""
    if not _USER.fullmatch(user):
        raise InvalidInput(f"user is {user!r}; use 1 to 64 of A-Z a-z 0-9 . _ -")
    settings = load(None, None, namespace, config)
    rules = acl_rules(settings.namespace, secret=_secret(password_file), disk=disk)
    if json:
        import msgspec

        print(msgspec.json.encode({"user": user, "rules": rules}).decode())
        return
    if file:
        print("user", user, *(rule for rule in rules if rule != "reset"))
    else:
        print("ACL SETUSER", user, *rules)
    if password_file is None:
        print("put a password in the place of PASSWORD, or name a file with --password-file", file=sys.stderr)


def _secret(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        secret = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--password-file {file}: {error}") from None
    if not secret:
        raise InvalidInput(f"--password-file {file} is empty")
    return secret
