"""The folder of the repository."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
