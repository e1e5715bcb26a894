"""`Scheduler`: handlers, commands and schedules that a program declares, and what runs them."""
