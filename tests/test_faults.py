"""The list of planted faults: each has one place in the source, and tests that there are."""

import pytest

from mutations import FAULTS, ROOT


def test_there_are_enough_over_all_floors() -> None:
    assert len(FAULTS) >= 60 and len({fault.floor for fault in FAULTS}) >= 10
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


@pytest.mark.slow  # whoever renames what a fault names renames it there, too: before a release, not in each change
def test_each_has_its_place_and_its_tests() -> None:
    for fault in FAULTS:
        assert fault.old != fault.new and fault.place(ROOT / "src")
        for test in fault.tests.split():
            assert (ROOT / test).exists(), test
