"""Pages that people look at, in a browser: ``make pages``."""
