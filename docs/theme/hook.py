"""Hooks of the site's build: navigation, pages of public packages, pages of files outside docs/ that a page links.

`docs/index.md` is the one list of pages: its headings and tables are the navigation. The build imports nothing of
hybridflow: names are read from `__all__` of the source.
"""

import ast
import json
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "hybridflow"
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
SECTION_OF_README = re.compile(r"^\[[^\]]+\]\(\.\./README\.md#([\w-]+)\)$", re.MULTILINE)
GROUPS = ("Start", "Guides", "Reference", "Understand")
VERSION = os.environ.get("DOCS_VERSION", "")
"""If it is given, the site goes to sites/VERSION and has a menu of all versions there."""
INDEX = (ROOT / "docs/index.md").read_text("utf-8")

PACKAGES = {
    "hybridflow": "",
    "hybridflow.trainers": "trainers",
    "hybridflow.algorithms": "algorithms",
    "hybridflow.protocol": "protocol",
    "hybridflow.controller": "controller",
    "hybridflow.controller.ray": "controller/ray",
    "hybridflow.workers": "workers",
    "hybridflow.environments": "environments",
    "hybridflow.rewards": "environments/rewards",
    "hybridflow.rollout": "rollout",
    "hybridflow.engines": "engines",
    "hybridflow.data": "data",
    "hybridflow.checkpoint": "checkpoint",
    "hybridflow.observability": "runtime/observe",
    "hybridflow.config": "config",
    "hybridflow.errors": "errors.py",
}
"""The public packages, and the folder or file of each in the source."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation of the headings and tables of docs/index.md."""
    groups = [{name: [f"{name.lower()}/index.md", *pages_of(section(INDEX, name))]} for name in GROUPS]
    groups[2]["Reference"].append({"Python": [{name: f"reference/{name}.md"} for name in PACKAGES]})
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    groups[3]["Understand"].append({"Decisions": [f"decisions/{page.name}" for page in decisions]})
    config.nav = [{"Home": "index.md"}, *groups]
    if VERSION:
        if not re.fullmatch(r"v?\d+(\.\w+)*", VERSION):
            raise PluginError(f"DOCS_VERSION={VERSION!r} is invalid: expected a version or a tag, such as 1.2 or v1.2")
        config.site_dir = str(Path(config.site_dir).with_name("sites") / VERSION)
        config.extra["version"] = {"provider": "mike"}  # the theme reads ../versions.json, as that program writes it
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """List the versions that are built, newest first, for the theme's menu; the first one opens by itself."""
    if VERSION:
        folder = Path(config.site_dir).parent
        built = [page.parent.name for page in folder.glob("*/index.html")]
        built.sort(key=lambda version: [int(number) for number in re.findall(r"\d+", version)], reverse=True)
        rows = [{"version": version, "title": version, "aliases": []} for version in built]
        (folder / "versions.json").write_text(json.dumps(rows), "utf-8")
        newest = f'<link rel="icon" href="data:,"><meta http-equiv="refresh" content="0; url={built[0]}/index.html">'
        (folder / "index.html").write_text(newest, "utf-8")


def pages_of(group: str) -> list[dict]:
    """Return the navigation of a group of the index: the first link of a row is a page, a heading begins a part."""
    pages: list[dict] = []
    part = pages
    for line in group.splitlines():
        if heading := re.match(r"### (.*)", line):
            part = []
            pages.append({heading[1]: part})
        elif row := re.match(r"\| \[([^\]]+)\]\(([^)#]+)\)", line):
            title = row[1].strip("`").rpartition("/")[2]
            part.append({title[0].upper() + title[1:]: uri_of(posixpath.normpath(f"docs/{row[2]}"))})
    return pages


def section(text: str, name: str) -> str:
    """Return the section of a page under a heading, given as its text or anchor, up to the next one of its level."""
    lines = text.splitlines(keepends=True)
    headings = [i for i, line in enumerate(lines) if re.match("##? ", line)]
    for start, end in zip(headings, [*headings[1:], len(lines)], strict=True):
        title = lines[start].partition(" ")[2].strip()
        if name in (title, slug(title)):
            return "".join(lines[start:end])
    raise PluginError(f"{name!r} is not a heading of the page")


def slug(title: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def uri_of(path: str) -> str:
    """Return where the site has the page of a file, whose path begins at the root of the repository."""
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return f"files/{path if path.endswith('.md') else path + '.md'}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page of each public package, and of each file outside docs/ and each notebook that a page links."""
    for name in PACKAGES:
        files.append(File.generated(config, f"reference/{name}.md", content=reference(name)))
    for name in GROUPS:
        files.append(File.generated(config, f"{name.lower()}/index.md", content=group_page(name)))
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    linked = [path for origin, text in texts.items() for path in linked_files(text, origin)]
    while linked:
        path = linked.pop()
        if files.get_file_from_path(uri_of(path)) is None:
            text = (ROOT / path).read_text("utf-8")
            page = File.generated(config, uri_of(path), content=shown(text, path))
            page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
            if path.endswith((".md", ".ipynb")):
                linked += linked_files(text, path)
    return files


def group_page(name: str) -> str:
    """Return the page of a group of the index: its tables."""
    return relinked(section(INDEX, name).replace("\n### ", "\n## ")[1:], "docs/index.md", f"{name.lower()}/index.md")


def linked_files(text: str, origin: str) -> list[str]:
    """Return the files that a text links and that need a page: those outside docs/, and notebooks."""
    paths = [target(link, origin) for link in LINK.finditer(text)]
    return [path for path in paths if not re.match(r"docs/.*(?<!\.ipynb)$", path) and (ROOT / path).is_file()]


def shown(text: str, path: str) -> str:
    """Return a file as Markdown: Markdown as it is, a notebook as its cells, other files as code."""
    if path.endswith(".md"):
        return relinked(text, path, uri_of(path))
    if path.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        return relinked("\n\n".join(block for cell in cells for block in cell_blocks(cell)), path, uri_of(path))
    return f"# {path}\n\n{fence(text, Path(path).suffix[1:])}"


def cell_blocks(cell: dict) -> list[str]:
    """Return a cell of a notebook as blocks of Markdown: its text or code, and what it printed or drew."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [text]
    blocks = [fence(text, "python")]
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "image/png" in data:
            blocks.append(f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})")
        else:
            blocks.append(fence("".join(output.get("text", data.get("text/plain", ""))), "text"))
    return blocks


def fence(text: str, language: str) -> str:
    """Return a text as a block of code."""
    return f"`````{language}\n{text.rstrip()}\n`````"


def relinked(text: str, origin: str, page: str) -> str:
    """Return the text of a file with its links as a page of the site needs them."""

    def of_site(link: re.Match[str]) -> str:
        path = target(link, origin)
        if not (ROOT / path).is_file():
            return link[0]
        return f"{link[1]}{posixpath.relpath(uri_of(path), posixpath.dirname(page) or '.')}{link[3]}"

    return LINK.sub(of_site, text)


def target(link: re.Match[str], origin: str) -> str:
    """Return the path that a link in a file names; both begin at the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link[2]))


def reference(name: str) -> str:
    """Return the page of a public package: its docstring, then each of its names by mkdocstrings."""
    module = ".".join(["hybridflow", *Path(PACKAGES[name].removesuffix(".py")).parts])
    names = sorted(names_of(name), key=lambda each: (not each[0].isupper() or each.isupper(), each.lower()))
    homes = imported_from("__init__.py") if name == "hybridflow" else {}
    elsewhere = {each: homes[each] for each in names if homes.get(each) in PACKAGES}
    links = "\n".join(f"- [`{each}`]({home}.md#{home}.{each}), of `{home}`" for each, home in elsewhere.items())
    entries = "\n\n".join(f"::: {module}.{each}" for each in names if each not in elsewhere)
    return f"# {name}\n\n{ast.get_docstring(parsed(PACKAGES[name]))}\n\n{links}\n\n{entries}\n"


def parsed(place: str) -> ast.Module:
    """Return the syntax of a package, or of a module, of the source."""
    path = SOURCE / place
    return ast.parse((path / "__init__.py" if path.is_dir() else path).read_text("utf-8"))


def imported_from(place: str) -> dict[str, str]:
    """Return the package from which each name of a module is imported for type checkers."""
    return {
        alias.name: node.module
        for node in ast.walk(parsed(place))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def names_of(package: str) -> list[str]:
    """Return the public names of a package: those of `__all__`, or all classes that it defines."""
    place = {"hybridflow.algorithms": "algorithms/exports.py"}.get(package, PACKAGES[package])
    body = parsed(place).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return [node.name for node in body if isinstance(node, ast.ClassDef)]


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    """Rewrite links that leave docs/, and names after the language of a block, which only tests read."""
    uri = page.file.src_uri
    if uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
        markdown = SECTION_OF_README.sub(section_of_readme, markdown.partition("\n## Start\n")[0])
    if (ROOT / "docs" / uri).is_file():
        markdown = relinked(markdown, f"docs/{uri}", uri)
    if uri.startswith(("files/", "reference/", "decisions/", "benchmarks", "test-all")):
        page.meta["search"] = {"boost": 0.3}  # what explains comes before what lists
    elif uri.endswith("/index.md"):
        page.meta["search"] = {"exclude": True}  # a group has no words that its pages lack
    return re.sub(r"^(```[a-z]+) .+$", r"\1", markdown, flags=re.MULTILINE)


def section_of_readme(link: re.Match[str]) -> str:
    """Return the section of the README that a paragraph of the front page links; of its first one, the text."""
    text = section((ROOT / "README.md").read_text("utf-8"), link[1])
    return relinked(text.partition("\n")[2] if text.startswith("# ") else text, "README.md", "index.md")


def on_page_content(html: str, **_) -> str:
    """Make the empty corner of a table a cell: a screen reader would announce it as a heading without text."""
    return html.replace("<th></th>", "<td></td>")
