"""Reading requests without a server: parameters, depth, lines of a batch, times."""

import contextlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.api.app import ROUTES
from mainspring.api.asgi import PROBLEMS, Problem, check_depth, read_json, read_query, when
from mainspring.api.batch import BatchQuery, Lines, Repeats
from mainspring.api.lanes import NewPause
from mainspring.api.openapi import document
from mainspring.api.routes import Route, Router
from mainspring.api.tasks import ListTasks, NewTask, PostedTask, check_payload, task_of
from mainspring.model.access import ApiKey
from mainspring.model.errors import InvalidInput
from mainspring.model.limits import HORIZON_MS
from mainspring.model.task import Task
from mainspring.model.times import instant_ms

NOW = 1_800_000_000_000
REPEATS = Repeats(b"s", BatchQuery(), NOW, lambda *_: False, lambda *_: False)
ANYBODY = ApiKey("k", "k", "admin", "", 0)

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}"\\ab', max_size=4), inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(values, st.integers(1, 6))
def test_the_depth_of_a_value_does_not_depend_on_its_texts(value: object, limit: int) -> None:
    body = json.dumps(value).encode()
    if depth_of(value) > limit:
        with pytest.raises(Problem):
            check_depth(body, limit)
    else:
        check_depth(body, limit)


class Query(msgspec.Struct, frozen=True):
    limit: int = 50
    lane: str | None = None
    deep: bool = False


@pytest.mark.parametrize(
    ("query", "found"),
    [
        (b"", Query()),
        (b"limit=7&lane=a%2Fb+c&deep=true", Query(7, "a/b c", True)),
        (b"lane=null", Query(lane="null")),
        (b"lane=", Query(lane="")),
    ],
)
def test_parameters_become_the_routes_own_type(query: bytes, found: Query) -> None:
    assert read_query(Query, query) == found


@pytest.mark.parametrize(
    ("query", "slug"),
    [
        (b"limit=x", "invalid"),
        (b"limit=", "invalid"),
        (b"colour=red", "invalid"),
        (b"limit=1&limit=1", "invalid"),
        (b"lane=%ff", "malformed"),
        (b"lane=\xff", "malformed"),
        (b"&".join([b"a=1"] * 40), "malformed"),
    ],
)
def test_wrong_parameters_are_problems(query: bytes, slug: str) -> None:
    with pytest.raises(Problem) as caught:
        read_query(Query, query)
    assert caught.value.kind == slug


def test_a_route_without_parameters_takes_none() -> None:
    assert read_query(None, b"") is None
    with pytest.raises(Problem, match="there are none here"):
        read_query(None, b"a=1")


def test_an_empty_body_is_an_empty_object() -> None:
    assert read_json(dict, b"", 8) == {}


@pytest.mark.parametrize("text", ["2030-01-01T00:00:00Z", "2030-01-01T01:00:00 01:00", "1893456000000"])
def test_an_instant_in_a_parameter_has_many_spellings(text: str) -> None:
    read = when(text, "after")
    assert read is not None
    assert instant_ms(read) == 1_893_456_000_000


@pytest.mark.parametrize(
    "text", ["", "soon", "-1", "9" * 40, "2030-01-01T00:00:00", "9999-12-31T23:59:59-23:59", "NaN"]
)
def test_a_value_that_is_no_instant_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        when(text, "after")


@given(st.text(max_size=40))
def test_no_text_breaks_the_reading_of_times(text: str) -> None:
    try:
        when(text, "after")
    except InvalidInput:
        return


@given(st.binary(max_size=60))
def test_a_payload_that_is_taken_can_be_read_again(payload: bytes) -> None:
    """Whatever the decoder skipped over without a look is looked at here."""
    try:
        new = msgspec.json.decode(b'{"target":"null:","payload":%b}' % payload, type=NewTask)
        check_payload(bytes(new.payload))
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidInput):
        return
    msgspec.json.decode(bytes(new.payload))


@given(
    st.fixed_dictionaries(
        {"target": st.sampled_from(["null:", "log:", "nope"])},
        optional={
            "at": st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=30),
            "after": st.text(max_size=10),
            "expires": st.integers() | st.text(max_size=30),
            "id": st.text(max_size=300),
            "lane": st.text(max_size=300),
            "retry": st.text(max_size=20),
            "payload": values,
        },
    )
)
def test_a_posted_task_is_a_task_or_an_input_error(fields: dict[str, object]) -> None:
    try:
        new = msgspec.json.decode(msgspec.json.encode(fields), type=NewTask)
    except msgspec.DecodeError:
        return
    try:
        task = task_of(new, NOW)
    except InvalidInput:
        return
    assert isinstance(task.at, int)
    assert task.at >= 0


# -- lines -----------------------------------------------------------------------------------------------------


def test_lines_keep_their_numbers_over_portions_and_empty_lines() -> None:
    lines = Lines(ANYBODY, 64)
    first = lines.take(b'{"target":"null:"}\n\n{"target":"null:"}\n', NOW, 100)
    second = lines.take(b'nonsense\n{"target":"null:"}', NOW, 100)
    assert (list(first.numbers), list(second.numbers), list(second.wrong)) == ([1, 3], [5], [4])
    assert lines.taken == 5


@given(
    st.lists(
        st.sampled_from([b'{"target":"null:","at":1800000000001}', b"{}", b"", b"[", b'{"target":"log:","id":"a"}'])
    )
)
def test_every_line_has_the_same_outcome_on_both_ways_to_read_it(rows: list[bytes]) -> None:
    body = b"\n".join(rows)
    quick, slow = Lines(ANYBODY, 64), Lines(ANYBODY, 64, REPEATS)
    one, other = quick.take(body, NOW, 10**6), slow.take(body, NOW, 10**6)
    assert list(one.numbers) == list(other.numbers)
    assert set(one.wrong) == set(other.wrong)
    assert one.size == sum(bool(row) for row in rows)
    assert [task.target for task in one.tasks] == [task.target for task in other.tasks]


ODD_TIMES = [-1, 0, NOW - 1, NOW + HORIZON_MS, NOW + HORIZON_MS + 1, NOW * 1000, "x", 2.5]


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "target": st.sampled_from(["null:", "log:"]),
                "at": st.just(NOW + 5) | st.sampled_from(ODD_TIMES),
            },
            optional={
                "id": st.sampled_from([None, "a", "é", "", "a" * 40]),
                "lane": st.sampled_from([None, "l"]),
                "after": st.none(),
                "payload": st.sampled_from([{"at": 1}, '"', None, 10**12, 10**30, "é", [[]] * 99, "x" * 200]),
            },
        ),
        min_size=1,
        max_size=4,
    )
)
def test_lines_read_together_become_the_tasks_that_they_become_one_by_one(rows: list[dict[str, object]]) -> None:
    lines = [msgspec.json.encode(row) for row in rows]
    together, alone = Lines(ANYBODY, 64), Lines(ANYBODY, 64)
    for one in (together, alone):
        one.take(b'{"target":"null:"}\n{"target":"log:"}', NOW, 100)  # these targets are known from now on
    found = together.take(b"\n".join(lines), NOW, 100)
    single = [alone.take(line, NOW, 100) for line in lines]
    assert [fields(task) for task in found.tasks] == [fields(task) for one in single for task in one.tasks]
    said = {number: str(problem) for number, problem in found.wrong.items()}
    assert said == {number: str(problem) for one in single for number, problem in one.wrong.items()}


@pytest.mark.parametrize("at_ms", [0, NOW - 1, NOW, NOW + 10_000_000, NOW + HORIZON_MS])
def test_a_line_in_which_nothing_has_to_be_computed_is_passed_on_unchanged(at_ms: int) -> None:
    found = Lines(ANYBODY, 64).take(b'{"target":"null:","at":%d}\n' % at_ms * 3, NOW, 100)
    assert [type(task) for task in found.tasks] == [NewTask] * 3


def fields(task: Task) -> tuple[object, ...]:
    return task.target, task.at, task.after, task.id, task.lane, bytes(task.payload)


def test_lines_behind_the_last_error_allowed_are_left_alone() -> None:
    lines = Lines(ANYBODY, 64)
    found = lines.take(b'{"target":"null:"}\nx\n' * 5, NOW, 2)
    assert (list(found.numbers), list(found.wrong), lines.taken) == ([1, 3], [2, 4], 4)


# -- routes ----------------------------------------------------------------------------------------------------


async def _nothing(_call: object) -> None:
    """Never called."""


def route(method: str, path: str) -> Route:
    return Route(method, path, _nothing, None, "")  # type: ignore[arg-type]


def find(router: Router, method: str, raw: bytes) -> tuple[str, dict[str, str]]:
    found, params = router.find({"method": method, "raw_path": raw, "path": raw.decode("latin-1")})
    return found.path, dict(params)


def test_a_path_is_split_before_it_is_decoded_and_literals_go_first() -> None:
    router = Router(
        [route("GET", "/v1/a/{id}"), route("GET", "/v1/a/{id}/b"), route("POST", "/v1/a/x"), route("GET", "/v1/a")]
    )
    assert find(router, "GET", b"/v1/a/c%2Fd%20e") == ("/v1/a/{id}", {"id": "c/d e"})
    assert find(router, "HEAD", b"/v1/a/c/b") == ("/v1/a/{id}/b", {"id": "c"})
    assert find(router, "POST", b"/v1/a/x") == ("/v1/a/x", {})
    for raw in (b"/v1/a/", b"/v1//b", b"/v1/a/c/d", b"", b"/", b"v1/a"):
        with pytest.raises(Problem, match="nothing at"):
            find(router, "GET", raw)
    with pytest.raises(Problem) as caught:
        find(router, "DELETE", b"/v1/a/c")
    assert (caught.value.kind, caught.value.headers) == ("method", [(b"allow", b"GET, HEAD")])


def test_two_routes_for_one_place_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="two routes"):
        Router([route("GET", "/a/{id}"), route("GET", "/a/{name}")])


@pytest.mark.parametrize("slug", PROBLEMS)
def test_a_problem_can_always_be_written(slug: str) -> None:
    told = json.loads(Problem(slug, "a lone \ud800 and \x00").body())
    assert told["status"] == PROBLEMS[slug][0]


def test_a_word_that_is_none_of_the_choices_is_answered_with_the_choices() -> None:
    with pytest.raises(Problem, match=r"'lost'.*; use one of pending, fired, queued, running"):
        read_query(ListTasks, b"state=lost")
    with pytest.raises(Problem, match="use one of hold, drop"):
        read_json(NewPause, b'{"all": true, "mode": "slow"}', 64)


# -- one rule for single tasks and lines ---------------------------------------------------------------------------

TASK = b'{"target":"log:","at":%d,"id":"a","payload":{"n":1}}' % NOW
TWICE = [
    b'{"target":"log:","at":1,"at":2}',
    b'{"id":"a","target":"log:","id":"a"}',
    b'{"target":"log:","i\\u0064":"a","id":"b"}',
    b'{"target":"log:","lane":"l","lane":null}',
    b'{"target":"log:","payload":{"at":"\\"at\\":"},"payload":null}',
]
ONCE = [
    b'{"target":"log:","id":"at","payload":{"at":1,"id":2,"target":"log:"}}',
    b'{"target":"log:","id":"\\"id\\":","payload":["at","at"]}',
    b'{"target":"log:","at":null,"lane":null,"retry":null}',
    b'{"target":"log:","payload":"\\"at\\":1,\\"at\\":2"}',
    b'{ "target" : "log:" , "lane" : "at" , "expires" : "2031-01-01T00:00:00Z", "after" : "1s" }',
]


def wrong_lines(*lines: bytes, depth: int = 64) -> dict[int, Problem]:
    return Lines(ANYBODY, depth).take(b"\n".join(lines) + b"\n", NOW, 1000).wrong


@pytest.mark.parametrize("body", TWICE)
def test_a_field_that_is_given_twice_is_refused_in_a_line_as_in_a_single_task(body: bytes) -> None:
    with pytest.raises(Problem, match="given more than once") as caught:
        read_json(PostedTask, body, 64)
    wrong = wrong_lines(TASK, body, TASK)
    assert {number: (one.kind, str(one)) for number, one in wrong.items()} == {2: ("invalid", str(caught.value))}


@pytest.mark.parametrize("body", ONCE)
def test_names_inside_of_values_and_nulls_are_no_repeats(body: bytes) -> None:
    read_json(PostedTask, body, 64)
    assert wrong_lines(TASK, body, TASK) == {}


@pytest.mark.parametrize(("levels", "fits"), [(2, True), (3, True), (4, False), (9, False)])
def test_a_line_may_be_as_deep_as_a_single_task(levels: int, fits: bool) -> None:
    body = b'{"target":"log:","payload":%b%b}' % (b"[" * levels, b"]" * levels)
    said = "nested deeper than 4 levels"
    with contextlib.nullcontext() if fits else pytest.raises(Problem, match=said):
        read_json(PostedTask, body, 4)
    expected = [] if fits else [f"the JSON is {said}"]
    assert [str(one) for one in wrong_lines(TASK, body, depth=4).values()] == expected
    alone = Lines(ANYBODY, 4, REPEATS).take(body, NOW, 1000)  # with an Idempotency-Key, one by one
    assert (len(alone.tasks), len(alone.wrong)) == ((1, 0) if fits else (0, 1))


def test_the_document_names_the_headers_that_routes_take() -> None:
    paths = document(ROUTES)["paths"]

    def headers(path: str, method: str) -> set[str]:
        return {one["name"] for one in paths[path][method].get("parameters", ()) if one["in"] == "header"}

    assert headers("/v1/tasks:batch", "post") == {"Idempotency-Key", "Mainspring-Namespace"}
    assert headers("/v1/tasks", "post") == {"Idempotency-Key", "Mainspring-Namespace"}
    assert headers("/v1/tasks", "get") == {"Mainspring-Namespace"}
    assert headers("/v1/keys", "post") == {"Mainspring-Namespace"}
    assert "An Idempotency-Key is refused" in paths["/v1/keys"]["post"]["summary"]
    assert headers("/livez", "get") == set()


def test_the_document_says_which_lists_come_whole() -> None:
    made = document(ROUTES)
    lists = [route for route in ROUTES if route.method == "GET" and route.name.startswith("list_")]
    paged = {route.tag for route in lists if hasattr(route.query, "cursor")}
    assert paged == {"tasks", "runs", "dead", "schedules", "lanes", "queues", "audit"}
    assert {route.tag for route in lists} - paged == {"keys", "pauses", "workers", "targets", "beats"}
    assert "keys, pauses, workers, targets and beats come whole" in made["info"]["description"]
