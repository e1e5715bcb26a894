"""Everything that touches the server: keys, Lua scripts, connections, and one function per operation.

`redis` sends commands; clients use `tasks`, the owner of a partition uses `owner`, workers use `job_queue`.
"""
