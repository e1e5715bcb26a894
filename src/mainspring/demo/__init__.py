"""`mainspring demo ticks`: requests through the HTTP API to Kafka at full speed, and proof that none is missing.

`generator` posts ticks and `consumer` reads the topic, each in its own process; `run` starts everything and compares.
"""
