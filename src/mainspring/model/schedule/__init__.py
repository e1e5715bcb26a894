"""Schedules: cron and intervals, time zones, definitions, and the chain of runs. Pure: the caller passes the time."""
