"""Programs that a test needs and that are missing."""

import os
from typing import NoReturn

import pytest

from mainspring.testing.servers import Kind, missing


def gap(reason: str) -> NoReturn:
    """Skip the test, but never on CI, where a gap must not hide."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; on CI nothing is left out: run tools/install-parts")
    pytest.skip(reason)


def need_server(kind: Kind, *, tls: bool = False) -> None:
    """For tests that want a server of this kind."""
    if reason := missing(kind, tls=tls):
        gap(reason)
