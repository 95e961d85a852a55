from __future__ import annotations

from tests.gateway.simulator.conftest import RunningReplica


async def test_embeddings_are_the_same_in_either_encoding(replica: RunningReplica) -> None:
    create = replica.openai.embeddings.create
    encoded = await create(model="sim", input=["a", "b"], encoding_format="base64")
    _, plain = await replica.post("/v1/embeddings", {"model": "sim", "input": ["a", "b"]})
    sdk_default = await create(model="sim", input=["a", "b"])
    assert [item["embedding"] for item in plain["data"]] == [item.embedding for item in sdk_default.data]
    assert isinstance(encoded.data[0].embedding, str)
    assert len(plain["data"][0]["embedding"]) == 64
    assert plain["usage"]["total_tokens"] == 2


async def test_documents_are_ranked_by_score(replica: RunningReplica) -> None:
    documents = ["a", "b", "c", "d"]
    _, ranked = await replica.post("/v1/rerank", {"model": "sim", "query": "q", "documents": documents, "top_n": 3})
    scores = [result["relevance_score"] for result in ranked["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
    best = ranked["results"][0]
    assert documents[best["index"]] == best["document"]["text"]
    _, scored = await replica.post("/score", {"model": "sim", "text_1": "q", "text_2": documents})
    assert scored["data"][best["index"]]["score"] == best["relevance_score"]


async def test_pooling_requests_pass_through_the_engine_and_its_cache(replica: RunningReplica) -> None:
    for _ in range(2):
        await replica.post("/v1/embeddings", {"model": "sim", "input": "word " * 100})
    state = await replica.state()
    assert (state["prompt_tokens"], state["cached_tokens"]) == (250, 112)
    assert [request["cached_tokens"] for request in state["recent"]] == [0, 112]
