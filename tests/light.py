"""Imports torchmetrics without packages that only metrics need which no test uses.

It imports whichever of them is installed, which takes four seconds in each process that collects tests, and a
hundred megabytes, whose page tables each fork copies: a fifth of what a fork costs.
"""

from unittest.mock import patch

from lightning_utilities.core import imports

_LEFT_OUT = ("matplotlib", "scipy", "transformers")
_is_available = imports.package_available


class _Without(imports.RequirementCache):
    """Tells whether a package is installed, and is none of those."""

    def __init__(self, requirement: str | None = None, module: str | None = None) -> None:
        super().__init__(requirement, module)
        if requirement is not None and requirement.startswith(_LEFT_OUT):
            self.available, self.message = False, f"{requirement} is left out of the tests"


def _is_there(name: str) -> bool:
    return name not in _LEFT_OUT and _is_available(name)


with patch.multiple(imports, RequirementCache=_Without, package_available=_is_there):
    import torchmetrics.classification
    import torchmetrics.retrieval  # noqa: F401
