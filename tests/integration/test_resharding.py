"""Slots that move while tasks are put, cancelled and fired: nothing is lost, doubled, or held up that need not be."""

import asyncio
from collections.abc import Iterator

import pytest
from traffic import PARTITIONS, Traffic, now_us, scene, until

from mainspring.client import Client
from mainspring.model.clock import ManualClock
from mainspring.model.errors import Unavailable
from mainspring.store.sender import PART
