"""Everything that touches the server: keys, Lua scripts, connections, and one function per operation.

`redis` sends commands, `tasks` is used by clients, `owner` by the owner of a partition, `job_queue` by workers.
"""
