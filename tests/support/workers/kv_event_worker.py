"""A process with an engine of keeper that publishes KV events: `FOLDER KERNEL_CACHE BUFFER_STEPS`.

For each number that it reads it answers as many random requests, and prints its prefix index as JSON.
"""

import asyncio
import json
import sys
from pathlib import Path
from random import Random

from tests.support.parity.served import answer, serving
from tidemill.workers.messages import Request, Sampling
from tidemill.workers.settings import EngineSettings, KvEventSettings
from tidemill.workers.sources.names import bundled


async def main(folder: str, kernel_cache: str, buffer_steps: str) -> None:
    random = Random(int(buffer_steps))
    settings = EngineSettings(
        model_folder=bundled()["keeper"],
        memory_bytes=4 << 20,
        max_model_len=400,
        page_size=16,
        store_url="memory:?size=0",
        cache_folder=Path(kernel_cache),
        kv_events=KvEventSettings(
            endpoint=f"ipc://{folder}/live",
            replay_endpoint=f"ipc://{folder}/past",
            buffer_steps=int(buffer_steps),
        ),
    )
    async with serving(settings) as built:
        index = built.engine._ledger.index  # pyright: ignore[reportPrivateUsage] - what is mirrored
        serial = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            for _ in range(int(line)):
                serial += 1
                head = tuple(Random(random.randrange(6)).choices(range(90), k=160))
                tokens = head + tuple(random.choices(range(90), k=random.randint(1, 200)))
                sampling = Sampling(temperature=0)
                request = Request(request_id=str(serial), tokens=tokens, max_new_tokens=4, sampling=sampling)
                await answer(built, request)
            pages = {entry.key.hex(): entry.parent and entry.parent.key.hex() for entry in index}
            restorable = sorted(key.hex() for key in index.restorable_keys())
            counters = built.engine.load().counters
            removed = sum(value for name, value in counters.items() if name.startswith("evicted_pages"))
            shown = {"pages": pages, "restorable": restorable, "removed": removed}
            sys.stdout.write(json.dumps(shown) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
