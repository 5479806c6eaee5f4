"""The request's story: who asks, what the fleet knows, where it goes, what came of it."""
