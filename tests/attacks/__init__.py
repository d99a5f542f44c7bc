"""Attacks on the library and its commands: each a module with ``main(rounds, seed)``; the tests run a little of it."""
