"""Chaos: real processes under faults, a recorder that is never faulted, and the history checker at the end.

`python -m tests.support.chaos --profile standalone --seed 7` runs once and prints a report. The same seed plans
the same faults at the same moments; what the processes make of them is up to the machine.
"""
