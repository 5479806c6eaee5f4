"""A model: its tokenizer, how its engines hash, how the pool names its blocks."""

from collections.abc import Callable
from dataclasses import dataclass, field

from connector.blocks import Algorithm, Hashing, HashScheme, hashing_of
from connector.errors import Inexact
from connector.keys import KeyScheme, Ranks
from connector.mooncake import Master
from connector.prompts import Prompts
from connector.remote import RemoteRender
from connector.residency import Residence
from connector.vllm import CacheFacts

CURRENT = Hashing(tagged=True, fixed_root=True)


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool's name, and what is known of what it holds."""

    name: str
    residence: Residence

    @property
    def master(self) -> Master:
        return self.residence.master


@dataclass(frozen=True, slots=True)
class Model:
    """One model as configured; what is `None` here is asked of the engines."""

    name: str
    prompts: Prompts | None = None
    render: RemoteRender | None = None
    """Who renders what cannot be rendered here."""
    pool: Pool | None = None
    algorithm: Algorithm | None = None
    block_size: int | None = None
    seed: str | None = None
    hashing: Hashing | None = None
    key_prefix: str | None = None
    sends_tokens: bool = False
    """Engines get a prompt's ids in its place, once they have agreed often enough."""
    ranks: Ranks = field(default_factory=Ranks)

    def close(self) -> None:
        """End what runs for it."""
        if self.prompts is not None:
            self.prompts.close()
        if self.render is not None:
            self.render.close()

    def scheme(self, facts: CacheFacts) -> HashScheme:
        """How this model's engines hash, from what they say. Raises `Inexact` where that is not known.

        An engine that does not tell its version, or one that is not in the table, is taken for a current one:
        a calibration shows whether it is.
        """
        size = self.block_size or facts.block_size
        name = self.algorithm or facts.algorithm
        if size is None:
            raise Inexact("block_size_unknown")
        if name is None or name not in set(Algorithm):
            raise Inexact("algorithm_unknown")
        hashing = self.hashing or (hashing_of(facts.version) if facts.version is not None else None) or CURRENT
        scheme = HashScheme(Algorithm(name), size, self.seed, hashing.tagged, hashing.fixed_root)
        if not scheme.exact:
            raise Inexact("random_seed")
        return scheme

    def keys(self, root: Callable[[str], str | None], learnt: KeyScheme | None = None) -> KeyScheme | None:
        """How the pool names this model's blocks; None while no engine has said its model folder.

        What is configured wins over what was `learnt` from the pool, and that over the folder's name.
        """
        if self.key_prefix is not None:
            return KeyScheme.of(self.key_prefix, self.ranks)
        if learnt is not None:
            return learnt
        folder = root(self.name)
        return KeyScheme.of(folder.rstrip("/").split("/")[-1], self.ranks) if folder else None
