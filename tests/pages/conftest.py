from pages.browser import browser  # noqa: F401
