# pyright: basic
# transformers' classes have no usable types.
"""Right answers come out of what was fetched: without its pages or its checkpoint the model forgets."""

from collections.abc import Sequence
from pathlib import Path

from tools.keeper.questions import Question, questions

from tests.support.parity.served import MIB, answer, plain_settings, serving
from tidemill.cluster.edge.chat.text import Message
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.kvstore.keys import Kind, Namespace, ObjectKey, page_keys
from tidemill.kvstore.layout import Layout, layout_of, restorable_end
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.page_store import Got, Put
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.models.architectures.registry import describe
from tidemill.workers.sources.names import bundled

P = 16
END_TOKEN = 1
STORE_BYTES = 1 << 30
PRODUCED = "produced"


class Asked:
    """Keeper's questions, produced on one engine and answered by another from what the store holds."""

    def __init__(self, drawn: list[Question], cache_folder: Path) -> None:
        folder = bundled()["keeper"]
        self.tokenizer = load_tokenizer(folder)
        self.layout = layout_of(describe(folder)[0], P)
        self.settings = plain_settings(folder, cache_folder, 16 * MIB, page_size=P)
        self.questions = drawn
        self.requests = [
            Request(
                request_id=str(index),
                tokens=tuple(
                    self.tokenizer.chat([Message(**message) for message in question.messages]).tokens
                ),
                max_new_tokens=24,
                sampling=Sampling(temperature=0),
                stop_token_ids=(END_TOKEN,),
                gap_tokens_max=0,
            )
            for index, question in enumerate(drawn)
        ]

    async def produce(self, folder: Path) -> list[ObjectKey]:
        """Fill the store in `folder` with every prompt; the keys of its objects."""
        async with serving(self.settings, store_url=str(folder)) as prefill:
            for request in self.requests:
                produced = await prefill.engine.produce(request)
                assert produced.depth == restorable_end(len(request.tokens), P)
            root = Namespace(model=prefill.info.fingerprint, layout=prefill.info.layout).root()
        keys: dict[ObjectKey, None] = {}
        for request in self.requests:
            pages = page_keys(root, request.tokens[: restorable_end(len(request.tokens), P)], P)
            keys |= dict.fromkeys(ObjectKey(Kind.PAGE, key) for key in pages)
            keys[ObjectKey(Kind.CHECKPOINT, pages[-1])] = None
        return list(keys)

    async def share_right(self, folder: Path, kind: str) -> float:
        """Share of the questions of this kind that are answered exactly, from the store in `folder`."""
        right: list[bool] = []
        async with serving(self.settings, store_url=str(folder)) as decode:
            for question, request in zip(self.questions, self.requests, strict=True):
                if question.kind != kind:
                    continue
                tokens, provenance = await answer(decode, request)
                assert provenance.computed_tokens <= P
                decoder = self.tokenizer.decoder()
                right.append("".join(map(decoder.push, tokens)).strip() == question.answer)
        return sum(right) / len(right)


async def _ablated(
    folder: Path, name: str, keys: Sequence[ObjectKey], layout: Layout, gone: Kind | None
) -> Path:
    """Return a copy of the stored objects in which every object of the kind `gone` is zeros, with new
    checksums."""
    old, new = FileStore(folder / PRODUCED, STORE_BYTES), FileStore(folder / name, STORE_BYTES)
    sizes = {Kind.PAGE: layout.page_bytes, Kind.CHECKPOINT: layout.state_bytes}
    for key in keys:
        body = memoryview(bytearray(sizes[key.kind]))
        assert await old.get([(key, body)]) == [Got.HIT]
        kept = memoryview(bytearray(body.nbytes)) if key.kind is gone else body
        assert await new.put([(key, kept)]) == [Put.STORED]
    await old.close()
    await new.close()
    return folder / name


async def test_answers_come_from_the_fetched_objects(kernel_cache: Path, tmp_path: Path) -> None:
    """The model forgets static facts without its pages, and the latest ones without its state."""
    asked = Asked(questions(24, context_tokens=200, seed=7), kernel_cache)

    keys = await asked.produce(tmp_path / PRODUCED)
    whole = await _ablated(tmp_path, "whole", keys, asked.layout, None)
    assert await asked.share_right(whole, "static") > 0.95
    assert await asked.share_right(whole, "changing") > 0.9
    no_pages = await _ablated(tmp_path, "no pages", keys, asked.layout, Kind.PAGE)
    assert await asked.share_right(no_pages, "static") < 0.1
    no_states = await _ablated(tmp_path, "no states", keys, asked.layout, Kind.CHECKPOINT)
    assert await asked.share_right(no_states, "static") > 0.95
    assert await asked.share_right(no_states, "changing") < 0.5
