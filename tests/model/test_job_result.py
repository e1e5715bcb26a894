"""The result of a task: stored, sent over HTTP, read back and shown."""

import msgspec
import pytest

from mainspring.api.tasks import Ended
from mainspring.cli.output import lines_of
from mainspring.model.delivery import Response
from mainspring.model.job import Output, Result, decode_result

RESULTS = [
    Result("done", {"n": [1, None]}, attempt=3, worker="w", started_ms=1, ended_ms=5, log=("one", "two")),
    Result("done", output=Output(0, b"fine\n", b"\xff\x00", 5, 2_000)),
    Result("dead", reason="it never ran", output=Output()),
    Result("done", response=Response(200, (("X-A", "1"), ("X-A", "2")), b"stored", 12)),
    Result("cancelled", response=Response(204, (), b"\xff", 0)),
]


@pytest.mark.parametrize("result", RESULTS)
def test_a_result_comes_back_as_it_was(result: Result) -> None:
    assert decode_result(result.encode()) == result
    told = msgspec.json.encode(result.as_dict())
    assert Result.from_dict(msgspec.json.decode(told)) == result
    msgspec.json.decode(told, type=Ended)


def test_people_see_what_was_printed_and_how_much_was_cut() -> None:
    lines = lines_of(RESULTS[1])
    assert lines[-5:] == [
        "exit code   0",
        "stdout      5 bytes",
        "  fine",
        "stderr      2000 bytes, of which the beginning and the end are kept:",
        "  \ufffd\ufffd",
    ]
    assert "exit code   none: it never ran" in lines_of(RESULTS[2])


def test_people_see_what_was_returned_and_noted() -> None:
    lines = lines_of(RESULTS[0])
    assert lines[0] == "ending      done"
    assert [line for line in lines if line.startswith("log")] == ["log         one", "log         two"]
    assert lines[-1] == 'value       {"n":[1,null]}'


def test_an_answer_whose_keys_are_no_texts_can_be_shown_all_the_same() -> None:
    given = {(1, 2): "a tuple", None: [{True: "in depth"}], 3: "a number"}
    kept = decode_result(Result("done", given).encode())
    assert kept.value == given
    wanted = {"(1, 2)": "a tuple", "None": [{"True": "in depth"}], "3": "a number"}
    assert msgspec.json.decode(msgspec.json.encode(kept.as_dict()))["value"] == wanted
    assert lines_of(kept)[-1].startswith("value       {")
