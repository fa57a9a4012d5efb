"""What MkDocs needs beside the files in docs/: pages of the repository's root, and references made from the code.

Links are written for the repository, where they can be followed too. Here links to files that the site has no page for,
such as source code, become plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
#: Pages of the root, by their place in the site.
ROOT_PAGES = {"index.md": "README.md", **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}}


def on_files(files: Files, config: Any) -> Files:
    for place, source in ROOT_PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in sorted((ROOT / "recipes").glob("*/README.md")):
        place = f"recipes/{page.parent.name}/README.md"
        files.append(File.generated(config, place, content=page.read_text(encoding="utf-8")))
        recipe = f"recipes/{page.parent.name}/recipe.yaml"
        files.append(File.generated(config, recipe, content=(ROOT / recipe).read_text(encoding="utf-8")))
    for place, text in {"settings": _settings(), "commands": _commands(), "recipes": _recipes()}.items():
        files.append(File.generated(config, f"reference/{place}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links of the repository into links of the site."""
    here = page.file.src_uri
    of_root = here in ROOT_PAGES or here.startswith("recipes/")
    source = ROOT_PAGES.get(here, here) if of_root else f"docs/{here}"

    def turned(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return match[0]
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = next((at for at, name in ROOT_PAGES.items() if name == inside), inside.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:
            if not (ROOT / inside).exists():
                raise ValueError(f"{source}: link to {target}, which does not exist")
            return text if not image else ""
        relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
        return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(turned, markdown)


def _recipes() -> str:
    lines = [
        "# Recipes that come with hone",
        "",
        "`hone config presets` lists them; every verb accepts their names.",
        "",
    ]
    for page in sorted((ROOT / "recipes").glob("*/README.md")):
        claim = re.search(r"\*\*Claim\.\*\* (.*?)(?:\n\n|$)", page.read_text(encoding="utf-8"), re.S)
        text = " ".join(claim[1].split()) if claim else ""
        lines.append(f"- [{page.parent.name}](../recipes/{page.parent.name}/README.md): {text}")
    return "\n".join(lines) + "\n"


def _commands() -> str:
    """Every verb with its help, as the command line prints it."""
    import typer

    from hone.cli.app import app

    def pages(command: Any, name: str) -> Iterator[str]:
        context = typer.Context(command, info_name=name)
        yield f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"
        for verb, child in getattr(command, "commands", {}).items():
            yield from pages(child, f"{name} {verb}")

    return "# Commands\n\n" + "\n".join(pages(typer.main.get_command(app), "hone"))


def _settings() -> str:
    """Every setting of a recipe with its default, from the schema."""
    from hone.recipe.load import schema

    tree = schema()
    sections = tree["$defs"]

    def name_of(field: dict[str, Any]) -> str:
        if "$ref" in field:
            return field["$ref"].rsplit("/", 1)[-1]
        if "anyOf" in field:
            return " or ".join(dict.fromkeys(name_of(one) for one in field["anyOf"]))
        if "enum" in field:
            return ", ".join(f"`{value}`" for value in field["enum"])
        return f"`{field['const']}`" if "const" in field else str(field.get("type", "any"))

    def table(fields: dict[str, Any]) -> Iterator[str]:
        yield "| setting | values | default |\n|---|---|---|"
        for key, field in fields.items():
            default = f"`{field['default']}`".replace("|", "\\|") if "default" in field else ""
            yield f"| `{key}` | {name_of(field)} | {default} |"

    lines = ["# Every setting", "", *table(tree["properties"])]
    for title, section in sections.items():
        if section.get("properties"):
            text = section.get("description", "").replace("\n", " ")
            lines += ["", f"## {title}", "", text, "", *table(section["properties"])]
    return "\n".join(lines) + "\n"
