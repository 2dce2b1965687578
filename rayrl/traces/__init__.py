"""Traces: the record of every episode, its store, replay and conversion."""
