"""`mainspring demo ticks`: the whole road from a request to Kafka, at full speed, and the proof that none is missing.

plan        what is asked for
ticks       the random ticks, and the number by which each is known again
road        keep-alive connections to the schedulers' APIs, kept busy
generator   a process: posts ticks, and writes down which were taken
consumer    a process: reads the topic, and writes down what came and how late
journal     the files in which they write it down, and what follows from them
side        how the demo speaks to those two
scheduler   `mainspring serve`, a process each
usage       what each process costs
stage       Kafka and the server for them, given or started
run         all of it, second by second, and the reconciliation
"""
