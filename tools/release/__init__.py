"""Builds and checks what a release publishes; run ``make wheel`` and ``make release-check``."""
