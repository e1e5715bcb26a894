"""Reading requests: parameters and bodies into checked values. Pure: text in, a value or a Problem out."""

import re
from functools import cache
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec

from ..model.errors import InvalidInput
from ..model.times import When, instant_ms
from .asgi import Headers
from .problems import Problem

_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKETS: Final = re.compile(rb"[\[{\]}]")
_TOKENS: Final = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?|[\[{\]}]', re.DOTALL)
_WRONG_WORD: Final = re.compile(r"Invalid enum value .* - at `\$\.(\w+)`")
_LATEST_MS: Final = 1 << 45
MAX_PARAMETERS: Final = 32


def read_query(kind: type | None, query: bytes) -> Any:
    """The parameters as the route's Struct; unknown and repeated ones are errors, never ignored."""
    if not query:
        return None if kind is None else kind()
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_PARAMETERS,
        )
    except (UnicodeDecodeError, ValueError):
        raise Problem("malformed", f"the parameters are not UTF-8, or more than {MAX_PARAMETERS}") from None
    given = dict(pairs)
    known = () if kind is None else kind.__struct_fields__  # type: ignore[attr-defined]
    for name, _ in pairs:
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "there are none here"
            raise Problem("invalid", f"parameter {name[:80]!r} is not known; {there}")
    if len(given) < len(pairs):
        raise Problem("invalid", "a parameter is given more than once")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Problem("invalid", f"parameters: {error}{_choices(kind, str(error))}") from None


def read_json(kind: Any, body: bytes, depth: int) -> Any:
    """A body as the route's type. An empty one is an empty object."""
    body = body or b"{}"
    check_depth(body, depth)
    try:
        found = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise Problem("invalid", f"{error}{_choices(kind, str(error))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem("malformed", str(error)) from None
    check_repeated(body, field_names(kind))
    return found


def _choices(kind: Any, error: str) -> str:
    """Which words there are, where another was given."""
    named = _WRONG_WORD.search(error)
    hint = None if named is None or not isinstance(kind, type) else get_type_hints(kind).get(named[1])
    words = [str(word) for part in (hint, *get_args(hint)) if get_origin(part) is Literal for word in get_args(part)]
    return f"; use one of {', '.join(dict.fromkeys(words))}" if words else ""


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@cache
def field_names(kind: Any) -> tuple[bytes, ...]:
    """The names of a Struct's fields as they stand in JSON."""
    return tuple(b'"%b"' % name.encode() for name in getattr(kind, "__struct_encode_fields__", ()))


def check_repeated(body: bytes, names: tuple[bytes, ...]) -> None:
    """Refuse a field that is given twice: whoever wrote it cannot know which of the two counts."""
    if names and b"\\" not in body and all(body.count(name) < 2 for name in names):
        return  # nothing is escaped, so a name looks like itself, and no text holds a quote
    level, seen = 0, set()
    for token in _TOKENS.finditer(body):
        if token[1] is None:
            level += 1 if token[0] in b"[{" else -1
        elif level == 1 and token[2] is not None:
            name = msgspec.json.decode(b'"%b"' % token[1]) if b"\\" in token[1] else token[1].decode()
            if name in seen:
                raise Problem("invalid", f"the field {name[:80]!r} is given more than once")
            seen.add(name)


def check_depth(body: bytes, depth: int, *, level: int = 0) -> None:
    """Refuse what is nested deeper: decoders here and at receivers run out of stack.

    `level` is how deep it lies itself.
    """
    if body.count(b"[") + body.count(b"{") <= depth - level:
        return
    for bracket in _BRACKETS.finditer(_STRINGS.sub(b"", body)):
        level += 1 if bracket[0] in b"[{" else -1
        if level > depth:
            raise Problem("invalid", f"the JSON is nested deeper than {depth} levels")


def check_content_type(headers: Headers, wanted: tuple[bytes, ...]) -> None:
    """A body without a type is taken for what the route wants. One that is packed is told so, not called malformed."""
    if b"content-encoding" in headers and headers[b"content-encoding"].lower() != b"identity":
        packed = headers[b"content-encoding"].decode("latin-1")[:80]
        raise Problem("content-type", f"the content encoding is {packed!r}; send the body as it is")
    value = headers.get(b"content-type")
    if value is None or value in wanted:
        return
    if value.split(b";")[0].strip().lower() not in wanted:
        spoken = value.decode("latin-1")[:80]
        raise Problem("content-type", f"the content type is {spoken!r}; send {wanted[0].decode()}")


def when(text: str | None, field: str) -> When | None:
    """An instant in a parameter: ISO 8601 with an offset, or epoch milliseconds."""
    if text is None:
        return None
    # A + is a space in a query; nobody means one in a time.
    given: When = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text.replace(" ", "+")
    try:
        at_ms = instant_ms(given, field=field)
    except (OverflowError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{field}: {text[:80]!r} lies outside of the calendar") from None
    if not 0 <= at_ms < _LATEST_MS:
        raise InvalidInput(f"{field}: {text[:80]!r} lies outside of the calendar")
    return at_ms
