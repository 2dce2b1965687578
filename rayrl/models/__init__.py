"""Policies behind the ChatModel protocol: OpenAI-compatible HTTP, the scripted shopper, a local small model."""
