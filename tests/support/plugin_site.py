"""Install packages in a folder, among them the examples of docs/extend, to test plug-ins."""

import re
import tomllib
from pathlib import Path

from quire.base.plugins import KINDS, PluginKind

DOCUMENTS = sorted((Path(__file__).parents[2] / "docs" / "extend").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> dict[str, tuple[str, dict]]:
    """Return module name -> (source, pyproject.toml) in the order of the documents."""
    found: dict[str, tuple[str, dict]] = {}
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCUMENTS)
    blocks = [text for _, text in BLOCK.findall(pages)]
    for text, after in zip(blocks, blocks[1:], strict=False):
        named = re.match(r"# (\w+)\.py\n", text)
        if named:
            assert after.startswith("# pyproject.toml\n")
            found[named[1]] = (text, tomllib.loads(after))
    return found


EXAMPLES = examples()


class Site:
    """A folder on sys.path, into which packages are installed as pip does it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self, package: str, kind: PluginKind, name: str, target: str, source: str | None = None
    ) -> None:
        """Install a package with one entry point; target is module:object."""
        module = target.split(":")[0]
        if source is not None:
            (self.folder / f"{module}.py").write_text(source, encoding="utf-8")
        info = self.folder / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        entry = f"[{kind.group}]\n{name} = {target}\n"
        (info / "entry_points.txt").write_text(entry, encoding="utf-8")

    def install_example(self, module: str) -> None:
        source, project = EXAMPLES[module]
        [[group, entries]] = project["project"]["entry-points"].items()
        [[name, target]] = entries.items()
        [kind] = [k for k in KINDS if k.group == group]
        self.install(project["project"]["name"], kind, name, target, source)
