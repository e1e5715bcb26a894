"""Sinks deliver tasks to their targets: webhooks, Kafka, standard output, and plug-ins of other packages."""
