"""The asynchronous client, the synchronous one, and a client over HTTP."""
