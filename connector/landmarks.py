"""Names for a prompt's leading parts, a few hundred tokens apart, and where prompts that begin so were sent.

An index of all blocks says exactly what an engine holds. This one says, for a hundredth of the cost, what an
engine was given: to whom a prompt's beginning went that is being computed there now, and for prompts whose
tokens are not known, to whom text that begins so went lately.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from hashlib import blake2b

from msgspec import Struct
from xxhash import xxh3_64, xxh3_64_intdigest

from connector.blocks import Prefix

APART = 512
"""Tokens from one landmark to the next, as nearly as whole blocks allow."""
TOKEN_BYTES = 4
"""Bytes of text that count as a token, where nobody has counted."""
PIECE = APART * TOKEN_BYTES
"""Bytes of text from one landmark to the next."""
KEY_BYTES = 8
GRACE = 1.0
"""Seconds for which a prompt counts as under way after its answer, until the engine's events have told of it."""
MOST = 16_384
"""Landmarks remembered of an engine, some 3 MB: 8 million tokens."""


class Landmarks(Struct, frozen=True, gc=False):
    """A prompt's landmarks, first to last; equal ones stand for equal beginnings."""

    keys: tuple[bytes, ...] = ()
    apart: int = APART
    """Tokens from one to the next."""
    whole: bytes = b""
    """A name for all of the prompt that a cache can give; empty where there is none."""
    tokens: int = 0
    """How many tokens that is."""

    @property
    def names(self) -> tuple[bytes, ...]:
        """All of them, the one for the whole last."""
        return (*self.keys, self.whole) if self.whole else self.keys


NOWHERE = Landmarks()
"""Of a prompt that has none."""


def of_prefix(prefix: Prefix) -> Landmarks:
    """The landmarks of hashed blocks: each names all that is before it, salt and adapter included."""
    step = max(1, APART // prefix.block_size)
    reusable = prefix.hashes[: prefix.reusable]
    whole = reusable[-1][-KEY_BYTES:] if reusable else b""
    keys = tuple(block[-KEY_BYTES:] for block in reusable[step - 1 :: step])
    if keys and keys[-1] == whole:
        whole = blake2b(whole, digest_size=KEY_BYTES).digest()  # a name of its own
    return Landmarks(keys, step * prefix.block_size, whole, len(reusable) * prefix.block_size)


def of_text(text: bytes, domain: bytes) -> Landmarks:
    """The landmarks of a prompt whose tokens are not known; `domain` keeps apart what must not be shared.

    XXH3 takes a tenth of what a cryptographic hash does. Its seed is the domain's, which holds a secret salt: who
    makes two texts of one name, if anybody can, makes them for nobody else.
    """
    digest = xxh3_64(seed=xxh3_64_intdigest(domain))
    keys = []
    for start in range(0, len(text) - PIECE + 1, PIECE):
        digest.update(text[start : start + PIECE])
        keys.append(digest.digest())
    digest.update(text[len(keys) * PIECE :])
    return Landmarks(tuple(keys), whole=digest.digest(), tokens=len(text) // TOKEN_BYTES)


class Sent:
    """The landmarks of the prompts that were sent to one engine, and which of them are under way there.

    A prompt that is under way is being computed, or its answer is: then the engine keeps it.
    """

    def __init__(self, clock: Callable[[], float], most: int = MOST) -> None:
        self._clock = clock
        self._most = most
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        """How many requests each is under way in."""
        self._ended: deque[tuple[float, Landmarks]] = deque()
        """Prompts that were answered, and until when they count as under way."""
        self._waiting = 0
        """Landmarks of those."""

    def begin(self, landmarks: Landmarks) -> None:
        """A request goes there; its prompt is under way until `ended` or `failed`."""
        keys = self._keys
        for key in reversed(landmarks.names):  # the tail is forgotten first: a head outlives what stands on it
            keys[key] = keys.get(key, 0) + 1
            keys.move_to_end(key)
        while len(keys) > self._most:
            keys.popitem(last=False)

    def ended(self, landmarks: Landmarks) -> None:
        """Its answer is over."""
        now = self._clock()
        if names := len(landmarks.names):
            self._ended.append((now + GRACE, landmarks))
            self._waiting += names
        self._let_go(now)

    def failed(self, landmarks: Landmarks) -> None:
        """It came to nothing."""
        for key in landmarks.names:
            count = self._keys.get(key)
            if count:
                self._keys[key] = count - 1

    def under_way(self, landmarks: Landmarks) -> int:
        """How many leading tokens of a prompt are under way."""
        self._let_go(self._clock())
        return self._leading(landmarks, least=1)

    def lately(self, landmarks: Landmarks) -> int:
        """How many leading tokens of a prompt were sent there, and are remembered."""
        return self._leading(landmarks, least=0)

    def _let_go(self, now: float) -> None:
        """What was answered a while ago is not under way any more, nor is the oldest of too much."""
        ended = self._ended
        while ended and (ended[0][0] < now or self._waiting > self._most):
            landmarks = ended.popleft()[1]
            self._waiting -= len(landmarks.names)
            self.failed(landmarks)

    def _leading(self, landmarks: Landmarks, least: int) -> int:
        """Who has a landmark has those before it: halve until the last one is found."""
        keys, found = self._keys, self._keys.get
        if not keys:
            return 0
        if landmarks.whole and found(landmarks.whole, -1) >= least:
            return landmarks.tokens
        low, high = 0, len(landmarks.keys)
        while low < high:
            middle = (low + high) // 2
            if found(landmarks.keys[middle], -1) >= least:
                low = middle + 1
            else:
                high = middle
        return low * landmarks.apart

    def forget(self) -> None:
        """The engine was away: what it was given before is lost. What is under way counts no more."""
        self._keys.clear()
        self._ended.clear()
        self._waiting = 0

    @property
    def answered(self) -> int:
        """Prompts that count as under way though they were answered."""
        return len(self._ended)

    def __len__(self) -> int:
        return len(self._keys)
