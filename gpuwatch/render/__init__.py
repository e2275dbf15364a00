"""Renderers: the rulebook in, text out. They read and write nothing themselves."""
