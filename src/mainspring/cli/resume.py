"""`mainspring resume`: end a pause."""

import typer

from mainspring.cli.pause import All, Lane, Queue, Target, check_scope
from mainspring.cli.reach import DataDir, Json, Namespace, RedisUrl, Settings, load
from mainspring.cli.task import print_json, with_client
from mainspring.model.pause import Scope

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command("resume")
def resume(
    everything: All = False, target: Target = None, queue: Queue = None, lane: Lane = None,
    redis_url: RedisUrl = None, data_dir: DataDir = None, namespace: Namespace = None,
    config: Settings = None, json: Json = False,
) -> None:  # fmt: skip
    """End a pause. Exit code 1 when exactly this was not paused."""
    check_scope(everything, target, queue, lane)
    loaded = load(redis_url, data_dir, namespace, config)
    ended = with_client(loaded, lambda client: client.resume(target=target, queue=queue, lane=lane))
    scope = Scope.of(target, queue, lane).text
    if json:
        print_json({"scope": scope, "resumed": ended})
    else:
        print(f"resumed: {scope}" if ended else f"{scope} was not paused; see mainspring pauses")
    if not ended:
        raise typer.Exit(1)
