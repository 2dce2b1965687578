"""Stand-ins for tests and benchmarks: a mock model endpoint that misbehaves on demand."""
