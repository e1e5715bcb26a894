"""docs/limits.md is true: its settings are read as it says, and its defaults are the real ones."""

import re
from pathlib import Path

from mainspring.config.config import Config
from mainspring.model.flow import BreakerPolicy, Limit, Rate
from mainspring.model.lane import LanePolicy
from mainspring.model.retry import RetryPolicy
from tests.support.pages import blocks, text_of
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "limits.md"


def test_the_settings_of_the_page_are_read(tmp_path: Path) -> None:
    [toml] = blocks(PAGE, "toml")
    file = tmp_path / "mainspring.toml"
    file.write_text(toml)
    config = Config.load({"config": str(file)}, {})
    assert config.catch_up_rate == Rate(5_000)
    assert config.breaker == BreakerPolicy()
    assert config.targets.limits() == {
        "target:orders": Limit(Rate(100), 10),
        "target:ticks": Limit(Rate(20_000, 5_000)),
    }
    assert config.targets.breakers() == {"target:orders": BreakerPolicy(off=True)}
    assert config.queue.rates() == {"queue:mail": Limit(Rate(0.5))}
    assert config.queue.slots() == {"mail": Limit(concurrency=4)}
    assert config.queue.retries() == {"mail": RetryPolicy(5, base_ms=60_000)}
    assert config.queue.lane_policies() == {"mail": LanePolicy("skip")}
    assert Config.load({}, config.to_environ()) == config


def test_the_defaults_of_breakers_are_on_the_page() -> None:
    table = dict(re.findall(r"^\| `(\w+)`(?:, `\w+`)? \| `?([\w.]+)`?", text_of(PAGE), re.MULTILINE))
    told = dict(part.split("=") for part in str(BreakerPolicy()).split())
    for name in ("failure_rate", "min_calls", "window", "open", "probes", "ramp"):
        assert table[name] == told[name], name
