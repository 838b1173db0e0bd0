"""Targets and drafters: the slot cache, loading, identity, the alias registry."""
