"""docs/lanes.md is true: its settings are read as it says."""

from pathlib import Path

from mainspring.config.config import Config
from mainspring.model.lane import LanePolicy
from tests.support.pages import blocks
from tests.support.paths import ROOT


def test_the_settings_of_the_page_are_read(tmp_path: Path) -> None:
    [toml] = blocks(ROOT / "docs" / "lanes.md", "toml")
    file = tmp_path / "mainspring.toml"
    file.write_text(toml)
    config = Config.load({"config": str(file)}, {})
    assert config.lane_policy == LanePolicy("block", 600_000)
    assert config.targets.lane_policies() == {"target:ledger": LanePolicy("park")}
    assert config.queue.lane_policies() == {"mail": LanePolicy("skip")}
