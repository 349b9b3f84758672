"""How figures of an audit of tally are printed: attacks beside their controls, and what settings cost."""

from __future__ import annotations

from typing import Any

from tacita.cli import console, result_tables


def format_attack(name: str, attack: dict[str, Any]) -> dict[str, str]:
    labels = {"membership": "took part, 90 % of the line known (AUC)", "canary": "planted line's last item, named"}
    return {
        "attack": labels[name],
        "found": _format_figure(name, attack["found"], attack["of"]),
        "control": _format_figure(name, attack["control"], attack["of_control"]),
    }


def _format_figure(name: str, value: float | None, n: int) -> str:
    """An AUC, or the share of planted lines as a count."""
    if value is None:
        return "–"
    return f"{value:.3f}" if name == "membership" else f"{round(value * n)} of {n}"


def show_audit(result: dict[str, Any]) -> None:
    from tacita.report import tally_audit as report_audit

    rows = []
    for row in result["rows"]:
        setting = report_audit.name_setting(result, row)
        rows.append({"setting": setting, **_format_row(row)})
    result_tables.show_bench({"data": result["data"], "users in each block": str(result["users"]), "rows": rows}, False)
    for row in result["rows"]:
        setting = report_audit.name_setting(result, row)
        result_tables.show_bench({"setting": setting, "rows": _list_attacks(row["attacks"])}, False)
    console.print_note("Control: the same attack where the person, or the answer, is not in the release.")
    readable = f"{result['bytes_up_readable']:,.0f} bytes as a readable list"
    maskable = f"{result['bytes_up_maskable'] / 1e6:.2f} MB in a form that can be masked"
    console.print_note(f"Up per client: {readable}, {maskable}.")


def _list_attacks(attacks: dict[str, Any]) -> list[dict[str, str]]:
    from tacita.report import tally_audit as report_audit

    rows = []
    for name, label in report_audit.ATTACKS.items():
        success = report_audit.format_figure(name, attacks[name])
        control = report_audit.format_figure(name, attacks[name], "control")
        rows.append({"attack": label, "found": success, "control": control})
    return rows


def _format_row(row: dict[str, Any]) -> dict[str, str]:
    """The cost of a setting, and how many people peeling reads in each block."""
    from tacita.report.tally_audit import find_metric

    metric = find_metric(row)
    return {
        metric: f"{row[metric]:.4f}",
        "peeled, each block": " / ".join(map(str, row["peeled"])),
        "MB down": f"{row['bytes_down'] / 1e6:.2f}",
    }
