"""How tokens are chosen: the parameters of a request (host) and the sampler (inside programs)."""
