"""Ray actors: rollout workers that hold leases and a model client, and the pool that feeds them."""
