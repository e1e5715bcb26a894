"""Workers: take jobs from queues, run Python handlers and commands, and report how each job ended."""
