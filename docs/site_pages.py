"""A hook of mkdocs: pages that lie outside of docs/ join the site, and links between them and docs/ are the site's."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/peers/README.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    for path in OUTSIDE:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages of the site: the repository's `docs/x.md` is the site's `x.md`, and `../x.md` of docs/ is its `x.md`."""
    here = page.file.src_uri
    if here in OUTSIDE:
        depth = here.count("/")
        return re.sub(rf"\]\(((?:\.\./){{{depth}}})docs/", r"](\1", markdown)
    return markdown.replace("](" + "../" * (here.count("/") + 1), "](" + "../" * here.count("/"))
