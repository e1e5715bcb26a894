"""How commands show what a run left behind."""

import msgspec

from mainspring.cli.table import printable
from mainspring.model.explain import moment
from mainspring.model.outcome import Response
from mainspring.model.result import Output, Result


def lines_of(result: Result) -> list[str]:
    """For people; a value, an answer or an output comes last, as it is."""
    lines = [f"ending      {result.ending}"]
    if result.reason:
        lines.append(f"reason      {result.reason}")
    lines.append(f"attempt     {result.attempt}")
    if result.worker:
        lines.append(f"run by      {result.worker}")
    if result.ended_ms:
        took_ms = result.ended_ms - result.started_ms
        lines.append(f"ended       {result.ended_ms} ({moment(result.ended_ms)}), after {took_ms} ms")
    lines += [f"log         {line}" for line in result.log]
    if result.response is not None:
        lines += answer_lines(result.response)
    elif result.output is not None:
        lines += _output_lines(result.output)
    elif result.value is not None:
        lines.append(f"value       {msgspec.json.encode(result.json_value).decode()}")
    return lines


def answer_lines(response: Response) -> list[str]:
    """What the target said to the last attempt."""
    lines = [f"answer      HTTP {response.status} after {response.duration_ms} ms"]
    lines += [f"  {printable(name)}: {printable(value)}" for name, value in response.headers]
    return [*lines, *_indented(response.body)]


def _output_lines(output: Output) -> list[str]:
    lines = [f"exit code   {'none: it never ran' if output.exit_code is None else output.exit_code}"]
    for name, kept, size in (
        ("stdout", output.stdout, output.stdout_bytes),
        ("stderr", output.stderr, output.stderr_bytes),
    ):
        cut = f", the last {len(kept)} of them:" if len(kept) < size else ""
        lines += [f"{name}      {size} bytes{cut}", *_indented(kept)]
    return lines


def _indented(text: bytes) -> list[str]:
    return [f"  {printable(line)}" for line in text.decode(errors="replace").splitlines()]
