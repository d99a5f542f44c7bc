"""Programs that try to break Raglane: each has a ``main(rounds, seed)``, and a small form of it runs in the tests."""
