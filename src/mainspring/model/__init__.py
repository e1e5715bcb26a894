"""The vocabulary of Mainspring: tasks, targets, schedules, policies, errors. Nothing here does input or output."""
