"""The description of the API as a page: made here, so that it shows without fetching anything from elsewhere."""

from __future__ import annotations

import html
import json
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
pre { background: #f4f4f4; padding: 0.7rem; overflow-x: auto; }
table { border-collapse: collapse; } td, th { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; }
"""


def render_reference(description: dict[str, Any]) -> str:
    """A page of HTML with every call of an OpenAPI description."""
    info = description["info"]
    schemas = description.get("components", {}).get("schemas", {})
    sections = []
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            sections.append(_render_operation(method.upper(), path, operation, schemas))
    body = "\n".join(sections)
    title = html.escape(f"{info['title']} {info['version']}")
    about = html.escape(info.get("description", ""))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{about}</p>"
        f'<p>For programs: <a href="/openapi.json">openapi.json</a>.</p>\n{body}</body></html>\n'
    )


def _render_operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    lines = [f"<h2><code>{method} {html.escape(path)}</code></h2>"]
    lines.append(f"<p>{html.escape(operation.get('description', operation.get('summary', '')))}</p>")
    fields = [_render_parameter(parameter) for parameter in operation.get("parameters", [])]
    body = operation.get("requestBody")
    if body is not None:
        schema = _resolve(body["content"]["application/json"]["schema"], schemas)
        required = schema.get("required", [])
        for name, field in schema["properties"].items():
            fields.append(_render_field(name, name in required, field))
    if fields:
        lines.append(f"<table><tr><th>name</th><th></th><th>what</th></tr>{''.join(fields)}</table>")
    answer = operation["responses"]["200"]["content"].get("application/json")
    if answer is not None:
        schema = _resolve(answer["schema"], schemas)
        example = json.dumps(_sketch(schema, schemas), indent=1)
        lines.append(f"<p>It answers:</p><pre>{html.escape(example)}</pre>")
    return "\n".join(lines)


def _render_parameter(parameter: dict[str, Any]) -> str:
    field = {**parameter["schema"], "description": parameter.get("description", "")}
    return _render_field(parameter["name"], parameter.get("required", False), field)


def _render_field(name: str, is_required: bool, field: dict[str, Any]) -> str:
    default = _describe_default(is_required, field.get("default"))
    about = html.escape(field.get("description", ""))
    return f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(default)}</td><td>{about}</td></tr>"


def _describe_default(is_required: bool, default: Any) -> str:
    if is_required:
        return "required"
    is_empty = default is None or default == []
    return "optional" if is_empty else f"default {json.dumps(default)}"


def _resolve(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref", "")
    name = reference.rpartition("/")[2]
    resolved: dict[str, Any] = schemas[name] if name else schema
    return resolved


def _sketch(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """The shape of an answer, with the kinds of its values."""
    schema = _resolve(schema, schemas)
    if "anyOf" in schema:
        return _sketch(schema["anyOf"][0], schemas)
    if schema.get("type") == "array":
        return [_sketch(schema["items"], schemas)]
    if "properties" in schema:
        return {name: _sketch(field, schemas) for name, field in schema["properties"].items()}
    return schema.get("type", "any")
