"""schemathesis on the OpenAPI document: requests that fit it and requests that do not, on every route.

Never a 500, only answers the document names, in the shapes it gives them; and the books balance afterwards.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mainspring.api import app
from mainspring.api.routes import Route
from mainspring.testing.servers import standalone
from tests.support.api_calls import LATER
from tests.support.serving import Serve, run, serving

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
KNOWN = {"id": "known", "lane": "known", "name": "known"}
pytestmark = pytest.mark.filterwarnings("ignore")


class Served(NamedTuple):
    node: Serve
    schema: Any
    redis_url: str


@schemathesis.serializer("application/x-ndjson")
def _lines(_context: Any, value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else json.dumps(value).encode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A node with something of every kind under the name `known`."""
    folder: Path = tmp_path_factory.mktemp("schema")
    (folder / "mainspring.toml").write_text('[targets.known]\naddress = "null:"\n')
    with standalone() as server, serving(folder) as start:
        node = start("--redis-url", server.url, "--partitions", "4", "--tick-target", "null:")
        for path, body in (
            ("/v1/tasks", {"target": "null:", "at": LATER, "id": "known", "lane": "known"}),
            ("/v1/schedules", {"name": "known", "cron": "@daily", "target": "null:"}),
            ("/v1/pauses", {"lane": "known"}),
        ):
            assert node.status(path, body) == 201
        yield Served(node, schemathesis.openapi.from_url(f"{node.url}/openapi.json"), server.url)
        assert node.end() == 0


def name_of(route: Route) -> str:
    return f"{route.method} {route.path}"


@pytest.mark.parametrize("route", app.ROUTES, ids=name_of)
def test_no_request_breaks_a_route_whether_it_fits_the_document_or_not(route: Route, served: Served) -> None:
    operation = served.schema[route.path][route.method]
    modes = [operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(modes), known=st.booleans())
    def attempt(case: Any, known: bool) -> None:
        for name in KNOWN if known else ():
            if name in (case.path_parameters or {}):
                case.path_parameters[name] = KNOWN[name]
        case.call_and_validate(checks=CHECKS, timeout=60)

    attempt()


def test_afterwards_every_task_is_accounted_for(served: Served, tmp_path: Path) -> None:
    """Runs last: after all requests to the routes nothing is half written."""
    report = run("verify", "--redis-url", served.redis_url, cwd=tmp_path)
    assert report.returncode == 0, report.stdout
    assert "a request failed in an unexpected way" not in served.node.log
