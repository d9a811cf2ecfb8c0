"""Models of the server: loaded on demand, each with a loop that computes for all clients together."""
