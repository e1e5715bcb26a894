"""Commands: what may be configured, what is refused."""

from pathlib import Path

import pytest

from mainspring.config.config import Config
from mainspring.model.errors import ConfigError, InvalidInput
from mainspring.model.targets.command import Command, read_commands, write_commands

TABLES = {
    "backup": {
        "argv": ["/usr/bin/backup", "--all"],
        "env": {"LEVEL": "3"},
        "cwd": "/var/backups",
        "timeout": "10m",
        "kill_after": "2s",
        "output_bytes": 100,
        "queue": "nightly",
        "arguments": True,
        "result_ttl": "1h",
        "retry": "3 base=2s",
    },
    "plain": {"argv": ["true"]},
}


def test_commands_come_from_the_settings_file_and_from_the_environment(tmp_path: Path) -> None:
    commands = read_commands(TABLES)
    backup = commands["backup"]
    assert backup.argv == ("/usr/bin/backup", "--all")
    assert (backup.timeout_ms, backup.kill_after_ms, backup.queue) == (600_000, 2_000, "nightly")
    assert backup.retry is not None
    assert backup.retry.max_attempts == 3
    assert commands["plain"] == Command(("true",))
    file = tmp_path / "mainspring.toml"
    file.write_text('[commands.backup]\nargv = ["/usr/bin/backup", "--all"]\ntimeout = "10m"\n')
    config = Config.load({"config": str(file)}, {})
    assert config.commands["backup"].timeout_ms == 600_000
    again = Config.load({}, config.to_environ())
    assert again.commands == config.commands


def test_written_commands_are_read_again() -> None:
    commands = read_commands(TABLES)
    assert read_commands(write_commands(commands)) == commands


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "argv is missing"),
        ({"argv": "rm -rf /"}, "expected a list of strings, not 'rm -rf /': a command is never a line for a shell"),
        ({"argv": []}, "the program first"),
        ({"argv": [""]}, "the program first"),
        ({"argv": ["a", 1]}, "1 is not a string"),
        ({"argv": ["a\0b"]}, "the program first"),
        ({"argv": ["a"], "shell": True}, "shell is not a setting of a command; use argv"),
        ({"argv": ["a"], "env": {"A=B": "c"}}, "not a variable"),
        ({"argv": ["a"], "env": {"A": 1}}, "expected strings"),
        ({"argv": ["a"], "timeout": 30}, "with its unit"),
        ({"argv": ["a"], "timeout": "0s"}, "timeout is 0"),
        ({"argv": ["a"], "output_bytes": 10**9}, "between 0 and 65536"),
        ({"argv": ["a"], "queue": "no spaces"}, "queue 'no spaces'"),
        ({"argv": ["a"], "arguments": "yes"}, "expected a bool"),
        ("true", "expected a table"),
    ],
)
def test_a_wrong_command_is_named_with_what_is_wrong(table: object, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        read_commands({"backup": table})


def test_a_wrong_setting_names_its_command(tmp_path: Path) -> None:
    file = tmp_path / "mainspring.toml"
    file.write_text("[commands.backup]\nargv = 'ls -l'\n")
    with pytest.raises(ConfigError, match="commands: backup: argv: expected a list of strings"):
        Config.load({"config": str(file)}, {})


def test_a_command_of_another_tool_that_runs_in_a_command_finds_no_strange_settings() -> None:
    assert Config.load({}, {"MAINSPRING_TASK_ID": "a", "MAINSPRING_TASK_KEY": "b"}) == Config()
