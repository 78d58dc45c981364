"""The API reference as Markdown, read from the sources: nothing is imported, least of all torch."""

import re
import tomllib
from pathlib import Path

import griffe

MARK = re.compile(r"^<!-- (python|crates): ?(\S*) -->$", re.MULTILINE)


def expand(page: str, root: Path) -> str:
    """Replace each mark of a page by the reference that it asks for."""

    def replaced(mark: re.Match[str]) -> str:
        return crates(root) if mark[1] == "crates" else python(root, mark[2])

    return MARK.sub(replaced, page)


def python(root: Path, name: str) -> str:
    """Return everything that a Python module exports."""
    package = griffe.load(
        "fanin", search_paths=[root / "python"], allow_inspection=False, docstring_parser=None
    )
    assert isinstance(package, griffe.Module)
    module = package if name == "fanin" else package[name.removeprefix("fanin.")]
    parts = [docstring(module)]
    public = module.exports or [
        key for key, member in module.members.items() if is_public(member, module)
    ]
    for key in public:
        member = module.members.get(key)
        if key.startswith("_") or member is None or member.is_module:
            continue
        target = member.final_target if isinstance(member, griffe.Alias) else member
        parts.append(described(f"{name}.{key}", target, depth=6))
    return "\n\n".join(parts)


def is_public(member: griffe.Object | griffe.Alias, module: griffe.Module) -> bool:
    """Return whether a module without `__all__` defines this for its users."""
    return not member.is_alias and not member.name.startswith("_") and member.parent is module


def described(name: str, what: griffe.Object | griffe.Alias, depth: int) -> str:
    """Return one object with its members, as a directive of Sphinx's Python domain."""
    fence = ":" * depth
    body = [docstring(what)]
    if isinstance(what, griffe.Class):
        kind = "exception" if is_exception(what) else "class"
        signature = call(what.all_members.get("__init__"))
        body += [
            described(key, member, depth - 1)
            for key, member in what.members.items()
            if not key.startswith("_")
            and not member.is_alias
            and (member.has_docstring or member.is_function)
            and not set(member.labels) & {"overload"}
        ]
    elif isinstance(what, griffe.Function):
        in_class = what.parent is not None and what.parent.is_class
        kind, signature = ("method" if in_class else "function"), call(what)
    else:
        is_property = "property" in what.labels
        kind, signature = ("property" if is_property else "attribute"), ""
        if isinstance(what, griffe.Attribute) and what.annotation is not None:
            body.insert(0, f":type: {what.annotation}\n")
    text = "\n\n".join(part for part in body if part)
    return f"{fence}{{py:{kind}}} {name}{signature}\n{text}\n{fence}"


def is_exception(what: griffe.Class) -> bool:
    """Return whether a class is an error, by its bases' names."""
    names = {str(base) for base in what.bases} | {base.name for base in what.mro()}
    return bool(names & {"Exception", "RuntimeError", "FaninError", "ValueError"})


def call(what: griffe.Object | griffe.Alias | None) -> str:
    """Return how a function is called, without `self`."""
    if not isinstance(what, griffe.Function):
        return "()"
    parts: list[str] = []
    keyword_only = False
    for parameter in what.parameters:
        if parameter.name in ("self", "cls") and parameter is what.parameters[0]:
            continue
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(
            parameter.kind.value if parameter.kind else "", ""
        )
        if parameter.kind is griffe.ParameterKind.keyword_only and not keyword_only:
            parts.append("*")
        keyword_only |= parameter.kind is griffe.ParameterKind.keyword_only or star == "*"
        text = f"{star}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not star:
            text += f" = {parameter.default}" if parameter.annotation else f"={parameter.default}"
        parts.append(text)
    answer = f" -> {what.returns}" if what.returns is not None and what.name != "__init__" else ""
    return f"({', '.join(parts)}){answer}"


def docstring(what: griffe.Object | griffe.Alias) -> str:
    """Return a docstring as MyST: pages and names of fanin become links."""
    text = what.docstring.value if what.docstring else ""
    text = re.sub(r"(?<![\w/`])docs/[\w/-]+\.md", r"[\g<0>](../\g<0>)", text)
    return re.sub(r"(?<!`)`(fanin\.[\w.]+)`(?!`)", r"{py:obj}`\1`", text)


def crates(root: Path) -> str:
    """Return a table of the workspace's crates, each with the first line of its documentation."""
    rows = ["| crate | what it is |", "|---|---|"]
    for manifest in sorted(root.glob("crates/*/Cargo.toml")):
        cargo = tomllib.loads(manifest.read_text())
        name = cargo.get("lib", {}).get("name") or cargo["package"]["name"].replace("-", "_")
        library = manifest.parent / "src" / "lib.rs"
        head = re.match(r"(?://! .+\n)+", library.read_text())
        text = " ".join(line[4:] for line in head[0].splitlines()) if head else ""
        text = re.sub(r"\[(`\w+`)\]", r"\1", text)
        link = f'<a href="../rust/{name}/index.html">{name}</a>'
        rows.append(f"| {link} | {text} |")
    return "\n".join(rows)
