"""The alerts as the Prometheus operator takes them in Kubernetes."""

from __future__ import annotations

from collections.abc import Iterable

import yaml

from gpuwatch.render.alerts import alert_rules
from gpuwatch.render.document import document
from gpuwatch.rulebook import Rule


def prometheus_rule(rules: Iterable[Rule]) -> str:
    """A PrometheusRule with the same groups as the rule file for Prometheus."""
    groups = yaml.safe_load(alert_rules(rules))
    body = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "gpuwatch", "labels": {"app.kubernetes.io/name": "gpuwatch"}},
        "spec": groups,
    }
    return document(body, "For the Prometheus operator; the same rules as alerts/gpuwatch.rules.yaml.")
