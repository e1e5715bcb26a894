"""Settings in a Python file, read and never run: what a `beat_schedule` says, as far as that can be seen."""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from .errors import InvalidInput

_ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_SHOWN: Final = 80
_TIMES: Final = ("crontab", "timedelta", "schedule", "solar")
_CHANGING: Final = ("setdefault", "pop", "popitem", "clear", "update")


class Unread(NamedTuple):
    """What only a run of the file would tell. As a key of a table: something of it is missing."""

    text: str

    def __str__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}…"
        return f"{shown} cannot be read without running the file; write it out there, or give JSON"


class Made(dict[str, Any]):
    """A time as a call makes it, `crontab(minute=0)`: its name as `__type__`, its arguments. No payload."""


def unread_in(value: object, *, times: bool = False) -> Unread | None:
    """The first part of a value that is not known. `times`: it may be made by calls."""
    if isinstance(value, Unread):
        return value
    if isinstance(value, Made) and not times:
        return Unread(f"{value['__type__']}(…)")
    parts: list[object] = []
    if isinstance(value, Mapping):
        parts = [*value, *value.values()]
    elif isinstance(value, list):
        parts = value
    looked_at = (unread_in(part, times=times) for part in parts)
    return next((found for found in looked_at if found is not None), None)


def parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise InvalidInput(f"neither JSON nor Python: {error}") from None


def setting(tree: ast.Module, wanted: str) -> Any:
    """The last value that the file gives to a name, or an attribute, that ends so."""
    found: Any = None
    for node in _in_order(tree):
        for value in _given(node, wanted):
            found = _value(value)
    return found


def table(tree: ast.Module, wanted: str) -> Any:
    """The same of a table, with what is added to it afterwards. What cannot be followed stands in it as Unread."""
    found: Any = None
    for node in _in_order(tree):
        for value in _given(node, wanted):
            found = _value(value)
        for key, added in _additions(node, wanted):
            found = {**_as_table(found), key: added}
    return found


def _in_order(tree: ast.Module) -> list[ast.AST]:
    return sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0))


def _given(node: ast.AST, wanted: str) -> Iterator[ast.expr]:
    """beat_schedule = {…}, app.conf.update(beat_schedule={…}), app.conf.update({"beat_schedule": {…}})"""
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (node.value for target in targets if _is(target, wanted))
    elif isinstance(node, ast.Call) and _name_of(node.func) == "update" and not _is_method(node, wanted):
        yield from (one.value for one in node.keywords if one.arg is not None and one.arg.lower().endswith(wanted))
        for one in node.args:
            if isinstance(one, ast.Dict):
                yield from (
                    value for key, value in zip(one.keys, one.values, strict=True)
                    if isinstance(key, ast.Constant) and str(key.value).lower().endswith(wanted)
                )  # fmt: skip


def _additions(node: ast.AST, wanted: str) -> Iterator[tuple[Any, Any]]:
    """What a statement puts into the table: key, value."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                yield from _put(target, node, wanted)
    elif isinstance(node, ast.AugAssign) and _is(node.target, wanted):
        merged = _value(node.value) if isinstance(node.op, ast.BitOr) else _unread(node)
        yield from _as_table(merged).items()
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
        yield from _change(node.target, node, wanted)
    elif isinstance(node, ast.Delete):
        for target in node.targets:
            yield from _change(target, node, wanted)
    elif isinstance(node, ast.Call):
        yield from _calls(node, wanted)


def _put(target: ast.Subscript, node: ast.Assign, wanted: str) -> Iterator[tuple[Any, Any]]:
    if _is(target.value, wanted):
        yield _key(target.slice), _value(node.value)  # beat_schedule["one more"] = {…}
    else:
        yield from _change(target.value, node, wanted)  # beat_schedule["one"]["kwargs"] = {…}


def _calls(node: ast.Call, wanted: str) -> Iterator[tuple[Any, Any]]:
    if _name_of(node.func) == "add_periodic_task":
        yield _unread(node), None
    elif _is_method(node, wanted) and _name_of(node.func) == "update":
        for one in node.args:
            yield from _as_table(_value(one)).items()
        for keyword in node.keywords:
            yield from _entry(keyword)
    elif isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
        if _is_method(node, wanted):
            yield _unread(node), None
        else:
            yield from _change(node.func.value, node, wanted)


def _entry(keyword: ast.keyword) -> Iterator[tuple[Any, Any]]:
    if keyword.arg is None:
        yield from _as_table(_value(keyword.value)).items()
    else:
        yield keyword.arg, _value(keyword.value)


def _change(place: ast.expr, node: ast.AST, wanted: str) -> Iterator[tuple[Any, Any]]:
    """An entry is changed or removed where it stands: it is not what it was."""
    while isinstance(place, ast.Subscript):
        if _is(place.value, wanted):
            yield _key(place.slice), _unread(node)
            return
        place = place.value


def _as_table(value: Any) -> Mapping[Any, Any]:
    if value is None:
        return {}
    return value if isinstance(value, Mapping) and not isinstance(value, Made) else {_as_unread(value): None}


def _as_unread(value: Any) -> Unread:
    return value if isinstance(value, Unread) else Unread(repr(value))


def _is(node: ast.expr, wanted: str) -> bool:
    return _name_of(node).lower().endswith(wanted)


def _is_method(node: ast.Call, wanted: str) -> bool:
    return isinstance(node.func, ast.Attribute) and _is(node.func.value, wanted)


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _unread(node: ast.AST) -> Unread:
    return Unread(ast.unparse(node))


# -- values -------------------------------------------------------------------------------------------------------


def _value(node: ast.expr) -> Any:
    """Literals, and the calls that beat schedules are made of: crontab(…), timedelta(…), schedule(…)."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand) if is_number(number := _value(operand)):
            return -number if isinstance(sign, ast.USub) else number
        case ast.Dict():
            return _dict(node)
        case ast.List() | ast.Tuple() | ast.Set():
            return [_value(one) for one in node.elts]
        case ast.BinOp(op=ast.BitOr()):
            return {**_as_table(_value(node.left)), **_as_table(_value(node.right))}
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return _sum(node)
        case ast.Call() if _name_of(node.func) in _TIMES and all(one.arg for one in node.keywords):
            said = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
            return Made({"__type__": _name_of(node.func), "args": [_value(one) for one in node.args], **said})
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            return dict(pair for keyword in node.keywords for pair in _entry(keyword))
    return _unread(node)


def _dict(node: ast.Dict) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            found.update(_as_table(_value(value)))  # {**base}
        else:
            found[_key(key)] = _value(value)
    return found


def _key(node: ast.expr) -> Any:
    key = _value(node)
    return _unread(node) if isinstance(key, (list, Mapping)) else key


def _sum(node: ast.BinOp) -> Any:
    """60 * 5"""
    left, right = _value(node.left), _value(node.right)
    if not (is_number(left) and is_number(right)) or (isinstance(node.op, ast.Div) and right == 0):
        return _unread(node)
    return _ARITHMETIC[type(node.op)](left, right)


def is_number(value: object) -> bool:
    """One that can be reckoned with: neither infinite nor beyond what a float holds exactly."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1 << 53
