"""Connections to Redis and Valkey: URLs, one connection, clusters and sentinels, and sending commands."""
