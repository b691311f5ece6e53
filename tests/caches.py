"""Cache folders of a test's own."""

from pathlib import Path

from forerun.writing import cache_root


def empty_cache(folder: Path) -> str:
    """For ``FORERUN_CACHE``: nothing is in it but the compiled kernels, which would take a compiler seconds."""
    kernels = cache_root() / "kernels"
    for made in (kernels, folder):
        made.mkdir(parents=True, exist_ok=True)
    (folder / "kernels").symlink_to(kernels)
    return str(folder)
