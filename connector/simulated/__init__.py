"""An engine that behaves like vLLM 0.32 on the wire, without a GPU and without weights.

It serves chat and text completions, responses, messages, embeddings, scores, reranking,
transcriptions and tokenising, with tool calls and structured outputs; makers' own clients need
nothing but its address. What differs from vLLM stands at the head of each endpoint's module.

Same block hashes, same keys in a real Mooncake pool, same KV events, same answers' shape; the time
that a step takes comes from `timing`, and the words from `text`. It tokenises with the connector's
own tokenizer, so it agrees with the gateway by construction: what that is worth against a real
engine is for tests/real to show.
"""
