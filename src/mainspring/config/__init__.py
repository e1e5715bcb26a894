"""Settings: their names and values, and where each value comes from."""
