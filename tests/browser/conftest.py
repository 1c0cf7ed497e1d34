"""A real browser for all tests of pages. It needs Chromium."""

import os
import shutil

import pytest

CHROMIUM = os.environ.get("CHROMIUM", "chromium")
WIDE = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")  # while it is open, an event loop runs in this process
def browser():
    from playwright.sync_api import sync_playwright

    path = shutil.which(CHROMIUM)
    assert path, f"CHROMIUM='{CHROMIUM}' is not found; install it: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser):
    """Return a function that opens a page; at the end it must have printed nothing and asked for nothing else."""
    contexts, problems = [], []

    def open_page(address, viewport=WIDE, scheme="light", allowed=()):
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        url = address if isinstance(address, str) else address.as_uri()
        own = (url, "data:", *allowed)
        page.on("request", lambda request: request.url.startswith(own) or problems.append(f"asked for {request.url}"))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="session")
def axe():
    """Return a function that lists what axe finds in a page: rules and the first element of each."""
    from axe_playwright_python.sync_playwright import Axe

    # It would ask for style sheets a second time, which pages that are opened as files must not.
    options = {"resultTypes": ["violations"], "preload": False}

    def findings(page):
        found = Axe().run(page, options=options).response["violations"]
        return [(each["id"], each["nodes"][0]["html"][:200]) for each in found]

    return findings
