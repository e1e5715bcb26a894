"""Every exception Mainspring raises.

MainspringError
├── InvalidInput          the caller's value is wrong; nothing was written (also a ValueError)
├── Conflict              the id is taken and on_conflict="reject"
├── ConfigError           a setting is wrong or unknown
└── StoreError            the server, or the road to it
    ├── Unavailable       not reachable, or the connection broke; `sent` says whether the command may have run
    ├── Refused           the server answered with an error
    │   └── OutOfMemory   maxmemory reached; nothing of the call was written
    ├── NotConfirmed      stored, but the asked durability was not reached; repeat with the same id
    ├── WrongFormat       the namespace was made with another partition count or format
    └── EmbeddedError     the embedded server cannot start or be shared
"""


class MainspringError(Exception):
    """Root of all errors of this package."""


class InvalidInput(MainspringError, ValueError):
    """The caller's value is wrong; the message names the field and nothing was written."""


class Conflict(MainspringError):
    """A task with this id exists and the call asked to reject repeats."""


class ConfigError(MainspringError):
    """A setting is wrong, unknown, or contradicts another."""


class StoreError(MainspringError):
    """The server, or the road to it, failed."""


class Unavailable(StoreError):
    """The server could not be reached, or the connection broke before the reply.

    `sent` is True when the command may have been executed: only an idempotent repeat is safe then.
    """

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Refused(StoreError):
    """The server answered with an error; the command did nothing unless the message says otherwise."""


class OutOfMemory(Refused):
    """The server's maxmemory is reached; nothing of this call was written."""


class NotConfirmed(StoreError):
    """The tasks are stored, but the asked durability was not confirmed in time."""


class WrongFormat(StoreError):
    """The namespace on this server was made with another partition count or format."""


class EmbeddedError(StoreError):
    """The embedded server cannot be started or shared."""
