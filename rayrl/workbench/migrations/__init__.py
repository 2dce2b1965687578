"""Alembic migrations of the workbench store."""
