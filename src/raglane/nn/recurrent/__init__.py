"""Recurrent layers, and what a call of one goes through."""
