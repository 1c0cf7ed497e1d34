"""Render notebooks as Markdown, with the outputs that they store."""

import re


def markdown_of(notebook: dict) -> str:
    """Return the cells of a notebook as Markdown: text as it is, code and what it printed as blocks, images inline."""
    return "\n\n".join(block for cell in notebook["cells"] for block in _blocks(cell)) + "\n"


def _blocks(cell: dict) -> list[str]:
    """Return the text of a cell, or its code and outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    blocks = [_fenced(source, "python")] if source.strip() else []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            blocks.append(f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})")
        elif text := "".join(output.get("text", data.get("text/plain", ""))):
            blocks.append(_fenced(text, "text"))
    return blocks


def _fenced(text: str, language: str) -> str:
    """Return a text in a fence that is longer than those within it."""
    fence = "`" * (1 + max([2, *map(len, re.findall("`{3,}", text))]))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
