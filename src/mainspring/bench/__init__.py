"""The figures: what `mainspring bench` measures. One bench, one file; both designs go through the same code.

load         what is put: numbered payloads, due times, ids, lanes, which ones are cancelled
tally        the sink: takes deliveries at next to no cost, judges them afterwards
server_time  the latest that the server's clock can stand at
ground       a private server (or the one given), a namespace of its own, what the server says of itself
life         a whole life of N tasks, measured; `cycle` and `baseline` are the two designs that live it
"""
