"""`Scheduler`: declares handlers, commands and schedules in a program, and runs them."""
