"""Anybody's world: its shape as data, honest endings, and what wraps public environments."""
