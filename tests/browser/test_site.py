"""The documentation as a site: it is built without a warning, complete, and reads well in a real browser."""

import functools
import http.server
import importlib
import os
import re
import subprocess
import sys
import threading
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PHONE = {"width": 390, "height": 844}
SHOWN = ("index.html", "rewards.html", "notebooks/first_run.html", "reference/hybridflow.protocol.html")
"""The front page, a guide, a notebook, a reference page."""

pytestmark = pytest.mark.browser


def build(directory, version=""):
    """Build the site as `make docs` does: a warning is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "DOCS_VERSION": version}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Return the directory of the site."""
    directory = tmp_path_factory.mktemp("site")
    build(directory)
    return directory


@pytest.fixture
def open_site(open_page, site):
    """Return a function that opens a page of the site, which asks for nothing outside of the site."""
    return lambda name, *args: open_page(site / name, *args, allowed=(site.as_uri(),))


def overflow(page):
    """Return how far a page is wider than the screen."""
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def test_no_link_of_the_site_is_dead(site):
    texts = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    names = {
        path: {unescape(name) for name in re.findall(r'\b(?:id|name)="([^"]*)"', text)} for path, text in texts.items()
    }
    dead = []
    for path, text in texts.items():
        for link in set(re.findall(r'\b(?:href|src)="([^"]*)"', text)):
            address, _, anchor = unescape(unquote(link)).partition("#")
            if re.match(r"[a-z]+:", address) or path.name == "404.html":
                continue
            target = (path.parent / address.partition("?")[0]).resolve() if address else path
            if not target.exists() or (anchor and anchor not in names.get(target, ())):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_each_public_name_has_an_entry_or_a_link_to_it(site):
    pages = {path.stem: path.read_text("utf-8") for path in site.glob("reference/hybridflow*.html")}
    assert len(pages) > 10
    for package in pages.keys() - {"hybridflow.errors"}:
        found = re.findall(r'(?:id|href)="[^"]*\.(\w+)"', pages[package])
        assert set(importlib.import_module(package).__all__) - set(found) == set(), package


def test_a_search_finds_a_key_and_a_public_name(open_site):
    page = open_site("index.html")
    for text, found in {
        "actor.optimizer.lr": "configuration.html",
        "DataProtoFuture": "hybridflow.protocol.html",
    }.items():
        search = page.locator(".md-search__input")
        search.fill("")
        search.press_sequentially(text)
        page.locator(f'.md-search-result__link[href*="{found}"]').first.wait_for()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.exhaustive)])
def test_axe_finds_nothing_in_the_kinds_of_pages(open_site, axe, scheme):
    for name in SHOWN:
        page = open_site(name, PHONE, scheme)
        assert axe(page) == [], name
        assert overflow(page) <= 0, name


@pytest.mark.exhaustive
def test_every_page_fits_the_screen_of_a_phone(open_site, site):
    names = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if path.name != "404.html")
    page = open_site(names[0], PHONE)
    wide = []
    for name in names:
        page.goto((site / name).as_uri())
        wide += [name] * (overflow(page) > 0)
    assert wide == []


@pytest.mark.exhaustive
def test_a_site_of_a_version_offers_all_versions_newest_first(open_page, tmp_path):
    (tmp_path / "sites/0.9").mkdir(parents=True)
    (tmp_path / "sites/0.9/sitemap.xml").write_text('<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9"/>')
    (tmp_path / "sites/0.9/index.html").write_text('<link rel="icon" href="data:,">an older version')
    build(tmp_path / "site", version="0.10")
    handler = functools.partial(QuietHandler, directory=tmp_path / "sites")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        page = open_page(address, allowed=(address,))
        page.wait_for_url(f"{address}0.10/index.html")
        page.locator(".md-version").hover()
        assert page.locator(".md-version__link").all_inner_texts() == ["0.10", "0.9"]
        page.get_by_role("link", name="0.9", exact=True).click()
        page.get_by_text("an older version").wait_for()
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, *args):
        """Print nothing."""
