"""What applications call: the asynchronous client, the synchronous one, and one over HTTP."""
