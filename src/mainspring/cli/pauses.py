"""`mainspring pauses`: what is paused."""

import typer

from mainspring.cli.pause import as_dict, line_of
from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load
from mainspring.cli.table import printable
from mainspring.cli.task import print_json, with_client

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command("pauses")
def pauses(
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """List what is paused, by whom, since when and why."""
    found = with_client(load(redis_url, data_dir, namespace, config), lambda client: client.pauses())
    if json:
        print_json([as_dict(one) for one in found])
        return
    for one in found:
        print(printable(line_of(one)))
    if not found:
        print("nothing is paused")
