"""The retrieval policy's world: memory, encoders, features, the vectorised MDP, baselines, oracle, serving gate."""
