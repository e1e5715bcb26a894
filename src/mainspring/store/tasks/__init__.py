"""Tasks on the server: put, cancel, find, list, explain, and dead letters."""
