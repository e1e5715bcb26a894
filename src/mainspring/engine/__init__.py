"""The engine of a node: reads slices ahead, delivers what is due, and commits the outcomes.

Each module is one role or one part of a partition's state; `engine.Engine` puts them together.
"""
