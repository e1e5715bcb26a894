"""`mainspring bench`: one module per benchmark.

`lifecycle` measures N tasks from put to delivery; `cycle` and `baseline` run it on Mainspring and on a sorted set.
`environment` provides the server and its readings.
"""
