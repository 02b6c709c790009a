"""The four modules without any hand-made knowledge, for a world that is only described."""
