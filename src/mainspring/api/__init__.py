"""The HTTP API: the server, authentication, routes, and their OpenAPI description."""
