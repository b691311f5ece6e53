"""The list of planted faults: each has one place in the source, and tests that there are."""

from mutations import FAULTS, ROOT


def test_there_are_enough_over_all_floors() -> None:
    assert len(FAULTS) >= 60 and len({fault.floor for fault in FAULTS}) >= 10
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


def test_each_has_its_place_and_its_tests() -> None:
    for fault in FAULTS:
        assert fault.old != fault.new and fault.place(ROOT / "src")
        paths = [word for word in fault.tests.split() if word.startswith("tests/")]
        assert paths
        for path in paths:
            assert (ROOT / path.partition("::")[0]).exists(), path
