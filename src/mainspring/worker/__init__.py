"""Runs Python handlers and commands from queues."""
