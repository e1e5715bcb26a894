"""Sinks that other packages bring: entry points of the group `mainspring.sinks`, loaded when a node starts.

    [project.entry-points."mainspring.sinks"]
    file = "mainspring_file:make"

The name is the scheme of its targets; `make(config)` returns the sink.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint

from ..model.errors import ConfigError
from ..model.targets import SCHEMES, SINK_GROUP, is_scheme, sink_entry_points
from .base import Sink


def plugin_sinks(config: object) -> Mapping[str, Sink]:
    """The sinks of all installed plug-ins by scheme; one that cannot be used ends the start, and is named."""
    sinks: dict[str, Sink] = {}
    makers: dict[str, EntryPoint] = {}
    for point in sink_entry_points():
        _check_scheme(point, makers)
        makers[point.name] = point
        sinks[point.name] = _made(point, config)
    return sinks


def _check_scheme(point: EntryPoint, makers: Mapping[str, EntryPoint]) -> None:
    if point.name in SCHEMES:
        raise ConfigError(
            f"{_told(point)} wants the scheme {point.name}:, which is built in; uninstall it, or ask for another name"
        )
    if not is_scheme(point.name):
        raise ConfigError(
            f"{_told(point)} has the name {point.name!r}, which can be no scheme: a-z first, then a-z 0-9 + . -"
        )
    if point.name in makers:
        raise ConfigError(f"{_told(makers[point.name])} and {_told(point)} are both for {point.name}:; uninstall one")


def _made(point: EntryPoint, config: object) -> Sink:
    try:
        sink: Sink = point.load()(config)
    except ConfigError as error:  # the plug-in has checked its settings: these are its own words
        raise ConfigError(f"{_told(point)}: {error}") from error
    except Exception as error:  # whatever a module does when it is imported: it is not ours, and is to be named
        text = f"{_told(point)} cannot be used: {type(error).__name__}: {error}; mend its installation or uninstall it"
        raise ConfigError(text) from error
    lacking = [name for name in ("deliver", "aclose") if not callable(getattr(sink, name, None))]
    if lacking:
        raise ConfigError(f"{_told(point)} made a {type(sink).__name__}, which has no {' and no '.join(lacking)}")
    return sink


def _told(point: EntryPoint) -> str:
    """Whose it is, in words."""
    whose = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    return f"the sink plug-in of {whose} ({SINK_GROUP}: {point.name} = {point.value})"
