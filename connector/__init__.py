"""Everything that touches the world: engines, the KV pool, tokenizers. Acts, never decides."""

import os

# transformers says at import that it found no torch; tokenizers and templates need none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
