"""Environment adapters behind the Environment protocol."""
