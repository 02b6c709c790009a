"""The pipeline of a world of one's own: what `hamlet new` writes and `hamlet own STAGE` runs."""
