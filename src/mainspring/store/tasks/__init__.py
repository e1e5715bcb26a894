"""Tasks on the server, as clients change and read them."""
