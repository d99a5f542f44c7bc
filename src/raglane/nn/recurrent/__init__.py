"""Recurrent layers and the steps of their calls."""
