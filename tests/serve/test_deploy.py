"""The files in ``deploy/`` are well formed, and the dashboard asks for metrics that there are."""

import configparser
import json
import re
from pathlib import Path

import yaml

from serve.conftest import Live

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_the_files_are_well_formed() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"forerun", "prometheus", "grafana"}
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), source
    for path in DEPLOY.rglob("*.y*ml"):
        assert yaml.safe_load(path.read_text()), path
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read_string((DEPLOY / "forerun.service").read_text())
    assert unit["Service"]["ExecStart"].endswith("forerun serve $FORERUN_ARGUMENTS")


def test_the_dashboard_asks_for_metrics_that_there_are(live: Live) -> None:
    there = set(re.findall(r"^# TYPE (\S+) ", live.get("/metrics").text, re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana" / "forerun.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"] for name in _names(target["expr"])}
    assert len(asked) > 12
    assert {name.removesuffix("_bucket") for name in asked} <= there


def _names(expression: str) -> set[str]:
    return set(re.findall(r"(?:vllm|forerun):\w+", expression))
