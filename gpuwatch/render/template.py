"""Texts of an alert, in two readings: as a template for Prometheus, and as what Prometheus will make of it.

The second one is what the promtool tests expect, so both come out of the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Voice:
    """How to say a literal text, a label's value, the alert's number, and the place where the alert has one."""

    literal: Callable[[str], str]
    label: Callable[[str], str]
    number: Callable[[str], str]
    place: Callable[[str], str]


def template() -> Voice:
    """Speaks Prometheus' template language."""
    return Voice(
        literal=escaped,
        label=lambda name: f"{{{{ $labels.{name} }}}}",
        number=lambda unit: _TEMPLATES.get(unit, '{{ $value | printf "%.4g" }}'),
        place=lambda text: "{{ with $labels.where }}" + text.replace("%s", "{{ . }}") + "{{ end }}",
    )


def spoken(labels: Mapping[str, str], value: float) -> Voice:
    """Speaks as Prometheus will, about an alert with these labels and this value."""
    where = labels.get("where")
    return Voice(
        literal=str,
        label=lambda name: labels[name],
        number=lambda unit: humanized(value, unit),
        place=lambda text: text.replace("%s", where) if where else "",
    )


def escaped(text: str) -> str:
    """A text that Prometheus' template language shows as it is: code may hold ``{{``."""
    return text.replace("{{", '{{ "{{" }}')


def humanized(number: float, unit: str) -> str:
    """A number as the template for this unit prints it in Prometheus."""
    if unit == "ratio":
        return f"{100 * number:.4g}%"
    if unit == "seconds":
        return _duration(number)
    if unit == "bytes":
        return _scaled(number, 1024, ("", "ki", "Mi", "Gi", "Ti", "Pi", "Ei", "Zi", "Yi")) + "B"
    if unit == "hertz":
        large = _scaled(number, 1000, ("", "k", "M", "G", "T", "P", "E", "Z", "Y"))
        return f"{large if abs(number) >= 1 else _small(number)}Hz"
    if unit == "celsius":
        return f"{number:.0f} °C"
    if unit == "count":
        return f"{number:.0f}"
    return f"{number:.4g}"


_TEMPLATES = {
    "ratio": "{{ $value | humanizePercentage }}",
    "seconds": "{{ $value | humanizeDuration }}",
    "bytes": "{{ $value | humanize1024 }}B",
    "hertz": "{{ $value | humanize }}Hz",
    "celsius": '{{ $value | printf "%.0f" }} °C',
    "count": '{{ $value | printf "%.0f" }}',
}


def _duration(seconds: float) -> str:
    # Prometheus' humanizeDuration: whole seconds from a minute on, SI prefixes below a second.
    if abs(seconds) < 1:
        return f"{_small(seconds)}s"
    sign, whole = ("-" if seconds < 0 else ""), int(abs(seconds))
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{sign}{days}d {hours}h {minutes}m {rest}s"
    if hours:
        return f"{sign}{hours}h {minutes}m {rest}s"
    if minutes:
        return f"{sign}{minutes}m {rest}s"
    return f"{sign}{abs(seconds):.4g}s"


def _small(number: float) -> str:
    if number == 0:
        return "0"
    for prefix in "munpfaz":
        number *= 1000
        if abs(number) >= 1:
            return f"{number:.4g}{prefix}"
    return f"{number * 1000:.4g}y"


def _scaled(number: float, base: int, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes[:-1]:
        if abs(number) < base:
            return f"{number:.4g}{prefix}"
        number /= base
    return f"{number:.4g}{prefixes[-1]}"
