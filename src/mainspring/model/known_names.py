"""Names in tables of settings: one that is not known is an error that says which, and what may have been meant."""

from collections.abc import Collection, Iterable

from .errors import InvalidInput


def check_known(given: Iterable[object], known: Collection[str], what: str, besides: str = "") -> None:
    """Refuse the first name that `what` (a webhook, a queue) does not have; `besides` is what else there may be."""
    for name in given:
        if name not in known:
            meant = did_you_mean([str(name)], known)
            raise InvalidInput(f"{name} is not known of {what}; there are {', '.join(known)}{besides}{meant}")


def did_you_mean(names: Iterable[str], known: Collection[str]) -> str:
    """`; did you mean retries?`, or nothing where no name is near."""
    from difflib import get_close_matches  # only for an error: it is slow to load

    near = [match for name in names for match in get_close_matches(name, known, n=1)]
    return f"; did you mean {' or '.join(near)}?" if near else ""
