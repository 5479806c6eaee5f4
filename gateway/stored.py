"""Which engine keeps which response: /v1/responses can be asked for again by id, and built upon.

Only the engine that made a response knows it (vllm/entrypoints/openai/responses/serving.py: a dict in the
process), and only the tenant that made it may ask.
"""

from collections import OrderedDict

MOST = 50_000
"""Responses remembered, some 15 MB; the one not used for longest is forgotten first."""


class Stored:
    """Responses by their tenant and id."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._homes: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()

    def keep(self, tenant: str, response: str, model: str, engine: str) -> None:
        """An engine has made a response."""
        self._homes[tenant, response] = (model, engine)
        self._homes.move_to_end((tenant, response))
        if len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def home(self, tenant: str, response: str) -> tuple[str, str] | None:
        """The model and the engine of a response; None where it is not known, or another tenant's."""
        found = self._homes.get((tenant, response))
        if found is not None:
            self._homes.move_to_end((tenant, response))
        return found
