"""docs/retries.md is true: its settings are read as it says, its sums are the ones that are computed."""

from pathlib import Path

from mainspring.config.config import Config
from mainspring.model.retry import RetryPolicy
from tests.support.pages import blocks
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "retries.md"


def test_the_settings_of_the_page_are_read(tmp_path: Path) -> None:
    [toml] = blocks(PAGE, "toml")
    file = tmp_path / "mainspring.toml"
    file.write_text(toml)
    config = Config.load({"config": str(file)}, {"MAINSPRING_RETRY_ON": "429=retry:30s 4xx=dead"})
    assert str(config.retry) == "10 jitter=full 429=retry:30s 4xx=dead"
    retries = {name: str(policy) for name, policy in config.targets.retries().items()}
    assert retries == {"target:shop": "3 base=5s 404=retry:1m ValueError=dead", "target:ticks": "9 base=5s"}


def test_the_line_of_the_page_is_the_shortest_one() -> None:
    [line] = [code.strip() for code in blocks(PAGE, "") if "429=" in code]
    assert str(RetryPolicy.parse(line)) == line
