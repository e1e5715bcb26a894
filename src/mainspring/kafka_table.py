"""The `[kafka]` table of a settings file, and the same as one text for the environment."""

from collections.abc import Mapping

import msgspec

from .sinks.kafka_options import Properties


def read_kafka(value: object) -> Properties:
    """A table, or JSON in a text: `MAINSPRING_KAFKA='{"security.protocol": "SASL_SSL"}'`."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ValueError(f"expected JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a table of settings, not {type(value).__name__}")
    return Properties(value)


def write_kafka(properties: Properties) -> str:
    return msgspec.json.encode(dict(properties)).decode() if properties else ""
