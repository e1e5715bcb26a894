"""What only the owner of a partition does on the server; every write carries its token."""
