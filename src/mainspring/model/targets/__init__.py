"""Destinations of tasks: the names of targets, webhooks, commands and URLs."""
