"""Columns and roles to records."""
