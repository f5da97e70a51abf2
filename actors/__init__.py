"""Ray: client actors, the server actor and the pool that places them."""
