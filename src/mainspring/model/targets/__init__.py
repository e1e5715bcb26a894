"""Where tasks go: the names of targets, webhooks, commands and URLs."""
